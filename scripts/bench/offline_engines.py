"""The engines that `offline.py` compares: processes that wait for their turn, and llama.cpp's tool.

Each answers `generate` with seconds and a number of tokens. An engine whose turn it is not is
stopped, so that it cannot take a core.
"""

import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import psutil

WORKER = Path(__file__).parent / "offline_worker.py"
_END_S = 30.0


@dataclass(frozen=True)
class Workload:
    """`batch` prompts of `num_prompt` tokens, each continued by `num_output` tokens."""

    batch: int
    num_prompt: int
    num_output: int

    @classmethod
    def parse(cls, text: str) -> "Workload":
        """From `BATCHxPROMPT+OUTPUT`; ValueError for anything else."""
        batch, _, lengths = text.partition("x")
        num_prompt, _, num_output = lengths.partition("+")
        workload = cls(int(batch), int(num_prompt), int(num_output))
        if min(workload.batch, workload.num_prompt, workload.num_output) < 1:
            raise ValueError(text)
        return workload

    @property
    def is_prefill(self) -> bool:
        """One token that the prompt costs as good as all of."""
        return self.num_output == 1

    @property
    def name(self) -> str:
        if self.is_prefill:
            return f"prefill {self.batch} x {self.num_prompt}"
        return f"batch {self.batch}, {self.num_prompt} in, {self.num_output} out"

    @property
    def num_counted(self) -> int:
        """Tokens that a speed is about: generated ones, or those of the prompt in a prefill."""
        return self.batch * (self.num_prompt if self.is_prefill else self.num_output)


class Engine(Protocol):
    name: str
    facts: dict[str, Any]

    def generate(self, prompts: list[list[int]], workload: Workload) -> dict[str, Any]:
        """`seconds` and `num_tokens`, the tokens that were made."""

    def close(self) -> None: ...


class WorkerEngine:
    """An engine in a process of its own, with `offline_worker.py` in some Python."""

    def __init__(
        self, name: str, kind: str, python: str, directory: Path, options: Mapping[str, Any]
    ) -> None:
        self.name = name
        environ = dict(os.environ)
        if kind != "vllm":  # which chooses for itself, unless its variables say so
            environ["OMP_NUM_THREADS"] = str(options["threads"])
        self._process = subprocess.Popen(
            [python, str(WORKER), kind, str(directory), json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environ,
        )
        began = time.perf_counter()
        self.facts = self._answer() | {"start_s": round(time.perf_counter() - began, 1)}
        self._signal(signal.SIGSTOP)

    def generate(self, prompts: list[list[int]], workload: Workload) -> dict[str, Any]:
        """Seconds as the process itself measures them."""
        self._signal(signal.SIGCONT)
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([prompts, workload.num_output]) + "\n")
        self._process.stdin.flush()
        answer = self._answer()
        self._signal(signal.SIGSTOP)
        return answer

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        if self._process.poll() is None:
            self._signal(signal.SIGCONT)
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
            self._process.wait()
        self._process.stdout.close()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} ended with code {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _signal(self, number: signal.Signals) -> None:
        """To the process and those it started; not to the others of the terminal."""
        own = psutil.Process(self._process.pid)
        for process in [own, *own.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)


class LlamaEngine:
    """llama.cpp's `llama-batched-bench` on a GGUF file: a new process for every workload.

    It makes its prompts itself. Loading does not count, as with the others; like theirs, the
    seconds of a decoding workload have the prompts in them.
    """

    def __init__(self, tool: Path, file: Path, threads: int) -> None:
        self.name = f"llama.cpp {file.stem}"
        self.facts = {"file": file.name, "bytes": file.stat().st_size}
        self._command = [
            str(tool), "-m", str(file), "-t", str(threads), "-b", "2048", "-ub", "512",
            "--output-format", "jsonl",
        ]  # fmt: skip

    def generate(self, prompts: list[list[int]], workload: Workload) -> dict[str, Any]:
        sizes = {
            "-c": workload.batch * (workload.num_prompt + workload.num_output),
            "-npp": workload.num_prompt,
            "-ntg": workload.num_output,
            "-npl": workload.batch,
        }
        words = [str(word) for pair in sizes.items() for word in pair]
        done = subprocess.run([*self._command, *words], capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{self.name} ended with code {done.returncode}: {done.stderr[-400:]}")
        return parse_batched_bench(done.stdout, workload)

    def close(self) -> None:
        """Nothing runs between two workloads."""


def parse_batched_bench(text: str, workload: Workload) -> dict[str, Any]:
    """Seconds and tokens from the one line of `llama-batched-bench --output-format jsonl`.

    A prefill is over with the prompts: the token that the tool makes then is the second one of the
    others. SystemExit if there is no line for this workload.
    """
    for line in text.splitlines():
        try:
            row = json.loads(line)
            found = Workload(row["pl"], row["pp"], row["tg"])
        except (ValueError, TypeError, KeyError):
            continue
        if found == workload:
            seconds = row["t_pp"] if workload.is_prefill else row["t"]
            return {"seconds": seconds, "num_tokens": workload.batch * workload.num_output}
    raise SystemExit(f"llama-batched-bench printed no line for {workload.name}: {text[-400:]!r}")
