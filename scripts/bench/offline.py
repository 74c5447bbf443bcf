"""Compare headrace with transformers' `generate` on the same weights, alternating.

Both load the same transformers directory (a GGUF model is converted once, beside its file) in the
same dtype with as many threads; both generate greedily with a KV cache, transformers with sdpa
attention; prompts are random, of equal length, and new in each round. Each engine has a process of
its own, and the one whose turn it is not is stopped, so that it cannot take a core. Every round is
printed; the ratio of a workload is the median of the ratios of its rounds.

usage: python scripts/bench/offline.py [MODEL] [--rounds 3] [--dtype bfloat16] [--batch 1 8 32 64]
           [--prompt-len 32] [--output-len 64] [--prefill 1024] [--threads N] [--json FILE]
"""

import argparse
import json
import os
import random
import runpy
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

ENGINES = ("headrace", "transformers")
KV_CACHE_BYTES = 2 << 30
VOCABULARY = (1000, 40000)  # prompts are made of these ids
Generate = Callable[[list[list[int]], int], int]


@dataclass(frozen=True)
class Workload:
    """`batch` prompts of `num_prompt` tokens, each continued by `num_output` tokens."""

    name: str
    batch: int
    num_prompt: int
    num_output: int

    @property
    def num_counted(self) -> int:
        """Tokens that a speed is about: generated ones, or those of the prompt in a prefill."""
        return self.batch * (self.num_output if self.num_output > 1 else self.num_prompt)


class EngineProcess:
    """An engine in a process of its own that runs only while it has something to do."""

    def __init__(self, engine: str, directory: Path, args: argparse.Namespace) -> None:
        command = [
            sys.executable, __file__, str(directory), "--worker", engine, "--dtype", args.dtype,
            "--threads", str(args.threads), "--tokenizer", args.tokenizer,
        ]  # fmt: skip
        environ = {**os.environ, "OMP_NUM_THREADS": str(args.threads)}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ
        )
        self.facts = self._answer()
        self._park()

    def generate(self, prompts: list[list[int]], num_output: int) -> dict[str, Any]:
        """Seconds, as the process itself measures them, and the number of tokens it made."""
        self._signal(signal.SIGCONT)
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([prompts, num_output]) + "\n")
        self._process.stdin.flush()
        answer = self._answer()
        self._park()
        return answer

    def close(self) -> None:
        self._signal(signal.SIGCONT)
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"an engine process ended with code {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _park(self) -> None:
        self._signal(signal.SIGSTOP)

    def _signal(self, number: signal.Signals) -> None:
        """To the process and those it started; not to the others of the terminal."""
        own = psutil.Process(self._process.pid)
        for process in [own, *own.children(recursive=True)]:
            process.send_signal(number)


def main() -> None:
    args = parse_arguments()
    if args.worker is not None:
        work(args)
        return
    path = resolved(args.model)
    directory = transformers_directory(path)
    args.tokenizer = str(path)
    cores = sorted(os.sched_getaffinity(0))[: args.threads]
    os.sched_setaffinity(0, cores)
    engines = {name: EngineProcess(name, directory, args) for name in ENGINES}
    for name, engine in engines.items():
        print(json.dumps({"engine": name, **engine.facts}), flush=True)
    try:
        results = [compare(engines, workload, args.rounds) for workload in workloads(args)]
    finally:
        for engine in engines.values():
            engine.close()
    print_table(results)
    if args.json is not None:
        facts = {name: engine.facts for name, engine in engines.items()}
        options = {"dtype": args.dtype, "threads": args.threads, "rounds": args.rounds}
        report = {"options": options, "engines": facts, "workloads": results}
        args.json.write_text(json.dumps(report, indent=2) + "\n")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--rounds", type=int, default=3, help="that count; one more warms up")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 8, 32, 64])
    parser.add_argument("--prompt-len", type=int, default=32)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--prefill", type=int, nargs="*", default=[1024], help="prompt lengths")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--tokenizer", default=None, help=argparse.SUPPRESS)
    parser.add_argument("--worker", choices=ENGINES, default=None, help=argparse.SUPPRESS)
    return parser.parse_args()


def workloads(args: argparse.Namespace) -> list[Workload]:
    chosen = [
        Workload(f"decode, batch {batch}", batch, args.prompt_len, args.output_len)
        for batch in args.batch
    ]
    return chosen + [Workload(f"prefill of {length}", 1, length, 1) for length in args.prefill]


def compare(engines: dict[str, EngineProcess], workload: Workload, rounds: int) -> dict[str, Any]:
    """Tokens/s of every round. Who goes first changes from round to round."""
    rng = random.Random(workload.name)
    speeds: dict[str, list[float]] = {name: [] for name in engines}
    for number in range(rounds + 1):
        prompts = [
            [rng.randint(*VOCABULARY) for _ in range(workload.num_prompt)]
            for _ in range(workload.batch)
        ]
        for name in ENGINES if number % 2 else ENGINES[::-1]:
            answer = engines[name].generate(prompts, workload.num_output)
            if answer["num_tokens"] != workload.batch * workload.num_output:
                raise SystemExit(f"{name} made {answer['num_tokens']} tokens in {workload.name}")
            speed = workload.num_counted / answer["seconds"]
            kind = "warm-up" if number == 0 else f"round {number}"
            print(
                json.dumps(
                    {"workload": workload.name, "round": kind, "engine": name,
                     "seconds": round(answer["seconds"], 4), "tokens_per_s": round(speed, 1)}
                ),
                flush=True,
            )  # fmt: skip
            if number:
                speeds[name].append(speed)
    ratios = [ours / theirs for ours, theirs in zip(*speeds.values(), strict=True)]
    return {
        "workload": workload.name,
        "tokens_per_s": speeds,
        "medians": {name: statistics.median(values) for name, values in speeds.items()},
        "ratios": ratios,
        "ratio": statistics.median(ratios),
    }


def print_table(results: list[dict[str, Any]]) -> None:
    print(f"\n{'tokens/s, medians':<24}{'headrace':>12}{'transformers':>14}{'ratio':>8}")
    for result in results:
        ours, theirs = (result["medians"][name] for name in ENGINES)
        print(f"{result['workload']:<24}{ours:>12.1f}{theirs:>14.1f}{result['ratio']:>8.2f}")


def resolved(model: str) -> Path:
    from headrace.configs.model_files.resolve import resolve_model

    return resolve_model(model)


def transformers_directory(path: Path) -> Path:
    """The directory that both engines load the weights from."""
    if path.is_dir():
        return path
    script = Path(__file__).parent.parent / "gguf_to_hf.py"
    directory = path.parent / f"{path.stem}-transformers"
    runpy.run_path(str(script))["convert"](path, directory, "float32")
    return directory


def work(args: argparse.Namespace) -> None:
    """In an engine's process: answer a line of prompts with a line of facts."""
    load = load_headrace if args.worker == "headrace" else load_transformers
    generate, facts = load(args)
    print(json.dumps(facts), flush=True)
    for line in sys.stdin:
        prompts, num_output = json.loads(line)
        began = time.perf_counter()
        num_tokens = generate(prompts, num_output)
        seconds = time.perf_counter() - began
        print(json.dumps({"seconds": seconds, "num_tokens": num_tokens}), flush=True)


def load_headrace(args: argparse.Namespace) -> tuple[Generate, dict[str, Any]]:
    import headrace

    llm = headrace.LLM(
        args.model, tokenizer=args.tokenizer, dtype=args.dtype,
        kv_cache_memory_bytes=KV_CACHE_BYTES,
    )  # fmt: skip

    def generate(prompts: list[list[int]], num_output: int) -> int:
        params = headrace.SamplingParams(temperature=0.0, max_tokens=num_output, ignore_eos=True)
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = llm.generate(inputs, params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    return generate, {"version": headrace.__version__}


def load_transformers(args: argparse.Namespace) -> tuple[Generate, dict[str, Any]]:
    import torch
    import transformers

    torch.set_num_threads(args.threads)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        args.model, dtype=getattr(torch, args.dtype), attn_implementation="sdpa"
    ).eval()

    def generate(prompts: list[list[int]], num_output: int) -> int:
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            output = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                use_cache=True,
                min_new_tokens=num_output,
                max_new_tokens=num_output,
            )
        return int(output[:, ids.shape[1] :].numel())

    facts = {"version": transformers.__version__, "torch": torch.__version__,
             "threads": torch.get_num_threads()}  # fmt: skip
    return generate, facts


if __name__ == "__main__":
    main()
