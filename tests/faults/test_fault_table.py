"""The fault table: whatever dies under load, callers see what they had seen without it.

SmolLM2 in bfloat16 with the native kernels, which give the same bits in every batch.
"""

import logging
import os
import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from signal import SIGKILL, SIGSTOP, Signals
from statistics import mean
from typing import Any

import psutil
import pytest

from headrace import EngineArgs, LLMEngine
from headrace.engine_core.messages import EngineStats
from headrace.sampling_params import RequestOutputKind
from tests.faults.engine_run import (
    Requests,
    Run,
    assert_gone,
    assert_idle,
    core_of,
    family,
    params,
    session_of,
)
from tests.kernels.native_ops import available_isas

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not available_isas(), reason="no native kernels on this machine"),
]

logger = logging.getLogger(__name__)

NUM_KILLS = int(os.environ.get("RECOVERY_TEST_KILLS", "4"))  # at random moments
MAX_WAIT_S = 3.0  # between two of them
MAX_REPLAY_WAIT_S = 0.05  # from the start of a replay, which takes longer
PIECES = {"output_kind": RequestOutputKind.DELTA, "max_tokens": 64}
LONG = "In the beginning there was a small river that ran through the hills to the sea. " * 3

REQUESTS: Requests = {
    "greedy": ("Once upon a time", params(temperature=0, logprobs=2, **PIECES)),
    "greedy, whole": ("The capital of France is", params(temperature=0, logprobs=0)),
    "random": ("The sea", params(logprobs=2, **PIECES)),
    "random, whole": ("def fibonacci(n):", params(logprobs=1, seed=6)),
    "two choices": ("A list:", params(n=2, logprobs=1, **PIECES)),
    "best of three": ("Water boils at", params(n=1, best_of=3, max_tokens=40)),
    "stop string": (LONG, params(stop=["river ran", "zq"], temperature=0, logprobs=0, **PIECES)),
    "random stop string": ("It was a dark night", params(stop=[" the", "zq"], n=2, **PIECES)),
    "prompt logprobs": (LONG + "Then", params(prompt_logprobs=1, logprobs=1, temperature=0)),
    "penalties": ("One, two,", params(repetition_penalty=1.3, presence_penalty=0.5, **PIECES)),
}

ONE = {"greedy": REQUESTS["greedy"]}

Find = Callable[[psutil.Process], psutil.Process]
Outputs = dict[str, list[Any]]  # by the request's name

OPTIONS: dict[str, dict[str, Any]] = {
    "alone": {},
    "shards": {
        "tensor_parallel_size": 3,
        "distributed_executor_backend": "mp",
        "step_timeout": 1.5,
    },
    "replicas": {"data_parallel_size": 2},
    "actors": {"pipeline_parallel_size": 2, "distributed_executor_backend": "ray"},
}


def itself(core: psutil.Process) -> psutil.Process:
    return core


def worker(core: psutil.Process) -> psutil.Process:
    """The second one of its group."""
    return core.children()[1]


def actor(core: psutil.Process) -> psutil.Process:
    return next(p for p in core.children(recursive=True) if "ray::RayWorker" in p.cmdline()[0])


# Which engine, what dies in it (found from its engine core), and how, one after the other.
TABLE: dict[str, tuple[str, Find, tuple[Signals, ...]]] = {
    "engine core": ("alone", itself, (SIGKILL,)),
    "worker": ("shards", worker, (SIGKILL, SIGSTOP)),
    "replica": ("replicas", itself, (SIGKILL,)),
    "Ray actor": ("actors", actor, (SIGKILL,)),
}


class Engines:
    """One engine at a time, and what it gives when nothing dies."""

    def __init__(self, model: Path) -> None:
        self._model = model
        self._name = ""
        self._engine: LLMEngine | None = None
        self._outputs: Outputs = {}

    def start(self, name: str) -> tuple[LLMEngine, Outputs]:
        """With the options of that name; another one ends."""
        if self._name != name or self._engine is None:
            self.close()
            args = EngineArgs(
                str(self._model), dtype="bfloat16", quantization="none", max_model_len=256,
                num_gpu_blocks_override=128, max_num_seqs=16, max_num_batched_tokens=128,
                max_restarts=10_000, **OPTIONS[name],
            )  # fmt: skip
            self._name, self._engine = name, LLMEngine.from_engine_args(args)
            assert self._engine._client.ready.contract_id.startswith("native-")
            self._outputs = Run(self._engine, REQUESTS).finish()
            ends = {choice[-2] for choices, _ in self._outputs.values() for choice in choices}
            assert ends == {"length", "stop"}
        return self._engine, self._outputs

    def close(self) -> None:
        """Nothing of it is left."""
        if self._engine is not None:
            engine, self._engine = self._engine, None
            ranks = session_of(engine).ranks
            processes = [one for rank in ranks for one in family(core_of(engine, rank))]
            engine.close()
            assert_gone(processes)


@pytest.fixture(scope="module")
def engines(smollm2_gguf: Path) -> Iterator[Engines]:
    engines = Engines(smollm2_gguf)
    yield engines
    engines.close()


def assert_counted(
    engine: LLMEngine, outputs: Outputs, before: EngineStats, log: pytest.LogCaptureFixture
) -> int:
    """The metrics say of what was lost since `before` what the log says; how many pauses."""
    assert Run(engine, ONE).finish() == {name: outputs[name] for name in ONE}  # brings statistics
    after, pauses = engine.front_end.stats, pauses_in(log)
    assert after.num_restarts == before.num_restarts + len(pauses)
    assert after.num_replayed_requests > before.num_replayed_requests
    rounding = 0.006 * len(pauses)
    assert sum(pauses) == pytest.approx(after.recovery_s - before.recovery_s, abs=rounding)
    return len(pauses)


def pauses_in(log: pytest.LogCaptureFixture) -> list[float]:
    """Seconds, from the log's lines about engine cores that are back."""
    return [float(pause) for pause in re.findall(r"core recovered .* pause of (\S+) s", log.text)]


class RandomKills:
    """Requests run again and again in an engine whose engine cores are killed meanwhile."""

    def __init__(self, engine: LLMEngine, outputs: Outputs) -> None:
        self.pids: list[int] = []  # that were killed
        self.num_in_replay = self.num_in_start = 0
        self._engine, self._outputs = engine, outputs
        self._run = Run(engine, REQUESTS)
        self._session = session_of(engine)
        self._known: dict[str, int] = {}  # request -> output ids at the last loss

    def kill(self, seconds: float) -> None:
        """After `seconds`; requests go on meanwhile."""
        timer = threading.Timer(seconds, self._kill)
        timer.start()
        while timer.is_alive():
            if self._run.is_over:
                self.finish()
                self._run = Run(self._engine, REQUESTS)
            self._run.step()
        if self.pids[-1] != self._session.replicas[0].ready.pid:  # type: ignore[union-attr]
            self.num_in_start += 1
            return
        self._run.until(lambda: not self._session.is_up)
        known = {
            entry.request.request_id: sum(map(len, entry.open.values()))
            for entry in self._session.ledger.entries()
        }
        self.num_in_replay += any(self._known.get(name) == num for name, num in known.items())
        self._known = known

    def _kill(self) -> None:
        """The engine core of this moment, also one that is loading."""
        while True:  # none is there for a moment between two of them
            for child in psutil.Process().children():
                with suppress(psutil.NoSuchProcess):
                    if child.pid not in self.pids and "headrace.engine_core" in child.cmdline():
                        child.kill()
                        self.pids.append(child.pid)
                        return
            time.sleep(0.005)

    def recover(self) -> None:
        """Until an engine core is up, and replays."""
        self._run.until(lambda: self._session.is_up)

    def finish(self) -> None:
        assert self._run.finish() == self._outputs and not self._run.errors


def test_kills_at_random_moments(engines: Engines, caplog: pytest.LogCaptureFixture) -> None:
    """Every second one meets the replay that the last one has led to."""
    engine, outputs = engines.start("alone")
    before, began = engine.front_end.stats, time.monotonic()
    randomness = random.Random(NUM_KILLS)
    kills = RandomKills(engine, outputs)
    with caplog.at_level(logging.INFO, "headrace"):
        for i in range(NUM_KILLS):
            if i % 2:
                kills.recover()
            kills.kill(randomness.uniform(0, MAX_REPLAY_WAIT_S if i % 2 else MAX_WAIT_S))
        kills.finish()
        assert_idle(engine)
    seconds = time.monotonic() - began
    assert kills.num_in_replay > 0 and caplog.text.count("killed by SIGKILL") >= NUM_KILLS
    assert assert_counted(engine, outputs, before, caplog) <= NUM_KILLS
    pauses = pauses_in(caplog)
    logger.info(
        "%d kills in %.0f s: %d during a replay, %d during a start; pauses: mean %.2f s, "
        "longest %.2f s",
        NUM_KILLS, seconds, kills.num_in_replay, kills.num_in_start, mean(pauses), max(pauses),
    )  # fmt: skip


@pytest.mark.parametrize(("name", "find", "signals"), TABLE.values(), ids=TABLE.keys())
def test_nobody_notices(
    engines: Engines,
    name: str,
    find: Find,
    signals: tuple[Signals, ...],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if name == "actors":
        pytest.importorskip("ray", reason="Ray is not installed (the extra `ray`)")
        monkeypatch.delenv("RAY_ADDRESS", raising=False)
    engine, outputs = engines.start(name)
    before, lost = engine.front_end.stats, list[psutil.Process]()
    with caplog.at_level(logging.INFO, "headrace"):
        run = Run(engine, REQUESTS)
        for number in signals:
            run.go_on(100)
            core = core_of(engine)
            lost += family(core)
            find(core).send_signal(number)
            run.until(lambda core=core: not core.is_running())  # type: ignore[misc]
        assert run.finish() == outputs and not run.errors
        assert_idle(engine)  # it waits until all are up again
    assert_gone(lost)
    assert assert_counted(engine, outputs, before, caplog) == len(signals)
