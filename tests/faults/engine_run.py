"""Requests in an engine whose processes die meanwhile: what their callers see in all."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import psutil

from headrace import LLMEngine, SamplingParams
from headrace.configs.errors import HeadraceError
from headrace.engine_core.messages import EngineStats
from headrace.engine_core.session import Session
from headrace.frontend.outputs import RequestOutput
from headrace.inputs import PromptType
from headrace.sampling_params import RequestOutputKind

MANY = {"max_restarts": 1000}  # for tests that do not test the limit
GONE_S = 10.0  # that processes may take to end

Requests = Mapping[str, tuple[PromptType, SamplingParams]]  # by the caller's name


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 60, "ignore_eos": True, "seed": 5, **fields})


def session_of(engine: LLMEngine) -> Session:
    client = engine._client
    session: Session = client._session  # type: ignore[union-attr]
    return session


def core_of(engine: LLMEngine, rank: int = 0) -> psutil.Process:
    """The engine core of now, or the last one, of a replica."""
    ready = session_of(engine).replicas[rank].ready
    assert ready is not None
    return psutil.Process(ready.pid)


def restarts_of(engine: LLMEngine) -> int:
    """How often an engine core was lost and came back."""
    return engine.front_end.stats.num_restarts


def family(process: psutil.Process) -> list[psutil.Process]:
    """It and everything that it has started."""
    return [process, *process.children(recursive=True)]


def assert_gone(processes: list[psutil.Process]) -> None:
    """All of them end soon."""
    alive = psutil.wait_procs(processes, timeout=GONE_S)[1]
    assert not alive, f"processes are left behind: {alive}"


def stats_of(engine: LLMEngine) -> list[EngineStats]:
    """As each replica's engine core has them at this moment, once all are up."""
    value = engine._client.call("stats")
    several = isinstance(value[0], list)
    return msgspec.convert(value if several else [value], list[EngineStats])


def assert_idle(engine: LLMEngine) -> None:
    """Nothing is left of any request, in the client or in an engine core."""
    assert not engine.has_unfinished_requests() and not len(session_of(engine).ledger)
    for stats in stats_of(engine):
        assert stats.num_requests == 0 and stats.num_free_blocks == stats.num_blocks


@dataclass
class Seen:
    """What a caller has got of a request, whole or piece by piece."""

    is_delta: bool
    choices: dict[int, list[Any]] = field(default_factory=dict)
    prompt_logprobs: Any = None

    def take(self, output: RequestOutput) -> None:
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        for new in output.outputs:
            pieces = [list(new.token_ids), new.text, list(new.logprobs or ())]
            if self.is_delta and new.index in self.choices:
                before = self.choices[new.index]
                pieces = [old + piece for old, piece in zip(before, pieces, strict=False)]
            ends = [new.cumulative_logprob, new.finish_reason, new.stop_reason]
            self.choices[new.index] = pieces + ends

    def facts(self) -> list[Any]:
        """Of each choice ids, text, logprobs, their sum and how it ended; prompt logprobs."""
        return [[self.choices[index] for index in sorted(self.choices)], self.prompt_logprobs]


class Run:
    """Requests in an engine, step by step."""

    def __init__(self, engine: LLMEngine, requests: Requests) -> None:
        self.engine = engine
        self.done: dict[str, list[Any]] = {}
        self.errors: list[Exception] = []
        self.num_outputs = 0
        self._seen: dict[str, Seen] = {}
        for name, (prompt, sampling) in requests.items():
            self._seen[name] = Seen(sampling.output_kind is RequestOutputKind.DELTA)
            engine.add_request(name, prompt, sampling)

    @property
    def is_over(self) -> bool:
        return not self.engine.has_unfinished_requests()

    def step(self) -> None:
        try:
            outputs = self.engine.step()
        except HeadraceError as error:
            self.errors.append(error)
            outputs = []
        for output in outputs:
            self.num_outputs += 1
            seen = self._seen.setdefault(output.request_id, Seen(is_delta=False))
            seen.take(output)
            if output.finished:
                self.done[output.request_id] = seen.facts()

    def until(self, condition: Callable[[], bool]) -> None:
        """Go on until it holds, or the end."""
        while not self.is_over and not condition():
            self.step()

    def go_on(self, num_outputs: int) -> None:
        """Until so many more outputs have come, or the end."""
        goal = self.num_outputs + num_outputs
        self.until(lambda: self.num_outputs >= goal)

    def finish(self) -> dict[str, list[Any]]:
        self.until(lambda: False)
        return self.done
