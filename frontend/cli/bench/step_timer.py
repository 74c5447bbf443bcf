"""Times parts of steps by replacing the methods that do them, for as long as it is asked to."""

import functools
import importlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

WHOLE = "whole step"
Step = dict[str, float]  # seconds by phase
IsCounted = Callable[..., bool]


class StepTimer:
    """Adds up the seconds of each phase, step by step.

    `phases`: methods or functions, as "module:Class.method" or "module:function", by phase; they
    are called by this name from then on. A step begins with a call of `marker`, one of them, and
    ends with the next one. `is_counted` gets the arguments of that call and says what sort of step
    it begins. What is done between two steps counts for the first.
    """

    def __init__(
        self, phases: Mapping[str, Sequence[str]], marker: str, is_counted: IsCounted
    ) -> None:
        self._marker = marker
        self._is_counted = is_counted
        self._steps: dict[bool, list[Step]] = {True: [], False: []}
        self._current: Step = {}
        self._sort = False
        self._began = 0.0
        self._undo: list[tuple[Any, str, Any]] = []
        for phase, names in phases.items():
            for name in names:
                self._replace(phase, name)

    def stop(self) -> list[Step]:
        """Put the methods back; the steps that count, or all if none does.

        Nothing says when the last one ended: it is there, without `WHOLE`, only if it is the first.
        """
        for owner, name, original in self._undo:
            setattr(owner, name, original)
        return self._steps[True] or self._steps[False] or [self._current]

    def _replace(self, phase: str, path: str) -> None:
        module, _, name = path.partition(":")
        owner: Any = importlib.import_module(module)
        *outer, name = name.split(".")
        for part in outer:
            owner = getattr(owner, part)
        original = vars(owner)[name]

        @functools.wraps(original)
        def timed(*args: Any, **options: Any) -> Any:
            began = time.perf_counter()
            if path == self._marker:
                self._begin_step(began, self._is_counted(*args, **options))
            try:
                return original(*args, **options)
            finally:
                seconds = time.perf_counter() - began
                self._current[phase] = self._current.get(phase, 0.0) + seconds

        setattr(owner, name, timed)
        self._undo.append((owner, name, original))

    def _begin_step(self, now: float, sort: bool) -> None:
        if self._began:
            self._current[WHOLE] = now - self._began
            self._steps[self._sort].append(self._current)
        self._current, self._began, self._sort = {}, now, sort


def medians(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Of each phase; a step without it counts as 0. Empty if there are no steps."""
    names = {name: None for step in steps for name in step}
    return {name: statistics.median(step.get(name, 0.0) for step in steps) for name in names}
