"""Where the time of a step goes: phases of the engine, and operations of the native kernels."""

from collections.abc import Callable, Mapping
from typing import Any

from headrace.frontend.cli.bench.report import print_table
from headrace.frontend.cli.bench.step_timer import WHOLE, StepTimer, medians

_STEP = "model step"
_EXECUTE = "headrace.workers.model_runner:ModelRunner.execute"
_PROCESS = "headrace.frontend.output_processor:OutputProcessor.process"
# In the engine core: on the thread of the step loop, but for the encoding.
_CORE_PHASES = {
    "schedule": ("headrace.engine_core.scheduler:Scheduler.schedule",),
    _STEP: (_EXECUTE,),
    "prepare inputs": (
        "headrace.workers.model_runner:ModelRunner._prepare",
        "headrace.workers.model_runner:make_input_batch",
        "headrace.workers.models.decoder:Decoder.embed",
    ),
    "layers": (
        "headrace.workers.models.decoder:Decoder.forward",
        "headrace.workers.models.native_decoder:NativeDecoder.forward",
    ),
    "head": (
        "headrace.workers.models.decoder:Decoder.compute_logits",
        "headrace.workers.models.native_decoder:NativeDecoder.compute_logits",
    ),
    "sample": ("headrace.workers.sampler:Sampler.sample",),
    "take results": ("headrace.engine_core.scheduler:Scheduler.update_from_output",),
    "encode messages": ("headrace.engine_core.wire:Codec.encode",),
}
_IN_MODEL_STEP = ("prepare inputs", "layers", "head", "sample")
_IN_TURN = ("schedule", _STEP, "take results")
_FRONT_PHASES = {
    "decode messages": ("headrace.engine_core.wire:Codec.decode_from_core",),
    "process outputs": (_PROCESS,),
}
_BESIDE = ("encode messages", "decode messages", "process outputs")
_REST_OF_MODEL_STEP = "rest of the model step"
_REST = "rest of the step loop"
_TIMER = "bench_step_timer"  # attribute of the worker while it runs


def profile_batch(llm: Any, iterate: Callable[[], None]) -> dict[str, Any]:
    """Profile one batch.

    `phases`: seconds of the median step in which every sequence decodes, or of all steps if there
    is none. `operations`: seconds, bytes and operations per such step by name; None if the kernels
    are torch's.
    """
    llm.collective_rpc(_start)
    (is_native,) = llm.collective_rpc("start_op_profile")
    front = StepTimer(_FRONT_PHASES, _PROCESS, lambda *args: True)
    try:
        iterate()
    finally:
        front_steps = front.stop()
        (core_steps,) = llm.collective_rpc(_stop)
    phases = medians(core_steps)
    phases.update({k: v for k, v in medians(front_steps).items() if k != WHOLE})
    operations = None
    if is_native:
        (totals,) = llm.collective_rpc("stop_op_profile")
        operations = _per_step(totals)
    return {"phases": _with_rests(phases), "operations": operations}


def print_profile(profile: Mapping[str, Any]) -> None:
    """Two tables for people."""
    phases, operations = profile["phases"], profile["operations"]
    whole = phases.get(WHOLE)
    rows: dict[str, tuple[Any, ...]] = {
        label: (1e3 * phases[name], 100 * phases[name] / whole if whole else None)
        for label, name in _labels()
        if name in phases
    }
    print_table("a step, median", ("ms", "share (%)"), rows)
    if operations is None:
        print("The kernels are torch's: their operations are not timed one by one.")
        return
    total = sum(op["seconds"] for op in operations.values())
    by_name: dict[str, tuple[Any, ...]] = {
        name: (
            1e3 * op["seconds"],
            100 * op["seconds"] / total,
            op["calls"],
            op["num_bytes"] / op["seconds"] / 1e9 if op["num_bytes"] else None,
            op["num_operations"] / op["seconds"] / 1e9 if op["num_operations"] else None,
        )
        for name, op in operations.items()
    }
    columns = ("ms", "share (%)", "calls", "GB/s", "GFLOP/s")
    print_table("native operations, mean of the steps", columns, by_name)


def _labels() -> list[tuple[str, str]]:
    """Rows of the table of phases: what is shown, and the phase."""
    inner = [(f"  {name}", name) for name in (*_IN_MODEL_STEP, _REST_OF_MODEL_STEP)]
    beside = [(f"beside it: {name}", name) for name in _BESIDE]
    rows = [("schedule", "schedule"), (_STEP, _STEP), *inner, ("take results", "take results")]
    return [*rows, (_REST, _REST), (WHOLE, WHOLE), *beside]


def _with_rests(phases: dict[str, float]) -> dict[str, float]:
    """And what the phases leave of the model's step and of the whole one."""
    if WHOLE not in phases:
        return phases
    inner = sum(phases.get(name, 0.0) for name in _IN_MODEL_STEP)
    turn = sum(phases.get(name, 0.0) for name in _IN_TURN)
    rests = {_REST_OF_MODEL_STEP: phases[_STEP] - inner, _REST: phases[WHOLE] - turn}
    return phases | {name: max(0.0, seconds) for name, seconds in rests.items()}


def _per_step(totals: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Of decoding steps, or of those with prompts if there are no others."""
    chosen = totals["decode"] if totals["decode"]["num_steps"] else totals["prompts"]
    return {
        name: {key: value / chosen["num_steps"] for key, value in op.items()}
        for name, op in chosen["ops"].items()
    }


def _start(worker: Any) -> None:
    """In the engine core, between two steps."""
    setattr(worker, _TIMER, StepTimer(_CORE_PHASES, _EXECUTE, _is_decode))


def _stop(worker: Any) -> list[dict[str, float]]:
    timer = getattr(worker, _TIMER)
    delattr(worker, _TIMER)
    steps: list[dict[str, float]] = timer.stop()
    return steps


def _is_decode(runner: Any, step: Any) -> bool:
    """Whether every sequence of a `SchedulerOutput` has one new token."""
    counts = step.num_scheduled_tokens.values()
    return bool(counts) and not step.new_requests and max(counts) == 1
