"""Pausing, sleep and weight updates of an engine core: what happens between requests.

Each of them is a call that brings the scheduler to rest, if that is not so already, does its work
on all workers while no step is in flight, and tells the journal.
"""

import inspect
import logging
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, cast

from headrace.configs.config import EngineConfig
from headrace.configs.errors import (
    EngineDeadError,
    HeadraceError,
    InvalidRequestError,
    RequestFailedError,
    UnsupportedFeatureError,
    WrongStateError,
)
from headrace.engine_core.core_state import (
    MEMORY_TAGS,
    PAUSE_MODES,
    SLEEP_TAGS,
    CoreState,
    PauseMode,
    SleepTag,
)
from headrace.engine_core.scheduler import Scheduler
from headrace.engine_core.weight_session import WeightSession

logger = logging.getLogger(__name__)

MAX_SLEEP_LEVEL = 2
CallWorkers = Callable[..., list[Any]]
Action = Callable[[], object]
Reply = Callable[[object], None]


class AtRest:
    """The value of a call that goes on with `action` once nothing runs."""

    def __init__(self, action: Action) -> None:
        self.action = action


class Maintenance:
    """State of an engine core beside its requests. One thread uses it: that of the step loop."""

    METHODS = (
        "pause", "resume", "is_paused", "sleep", "wake_up", "is_sleeping",
        "release_kv_cache_memory", "reload_weights", "init_weight_transfer_engine",
        "start_weight_update", "start_draft_weight_update", "update_weights",
        "finish_weight_update", "rollback_weight_update", "shutdown_weight_transfer_engine",
        "update_weight_version", "weight_info", "world_size",
    )  # fmt: skip

    def __init__(
        self,
        config: EngineConfig,
        scheduler: Scheduler,
        call_workers: CallWorkers,
        unwatched: Callable[[], AbstractContextManager[None]],
        on_change: Callable[[CoreState], None],
    ) -> None:
        """`call_workers(method, *args)`: on every worker; results by rank, or its exception.

        What it does may take longer than a step, so it is done `unwatched`.
        """
        self._config = config
        self._scheduler = scheduler
        self._call_workers = call_workers
        self._unwatched = unwatched
        self._on_change = on_change
        self._session = WeightSession(config, call_workers)
        self._is_paused = False  # by a call of its own; sleep holds the scheduler, too
        self._sleep_level = 0
        self._asleep: set[SleepTag] = set()
        self._was_modified = False  # the weights in memory, by a call of a script's
        self._waiting: deque[tuple[Action, Reply]] = deque()

    @property
    def weight_version(self) -> str:
        """Of the weights that compute now."""
        return self._session.version

    # -- calls --------------------------------------------------------------------------------

    def call(
        self,
        method: str,
        kwargs: Mapping[str, Any],
        is_at_rest: Callable[[], bool],
        reply: Reply,
    ) -> None:
        """Run one of `METHODS`; `reply` gets its value or the HeadraceError, now or later."""
        run = getattr(self, method)
        try:
            inspect.signature(run).bind(**kwargs)
        except TypeError as error:
            reply(InvalidRequestError(f"{method}: {error}"))
            return
        value = self._run(lambda: run(**kwargs))
        if isinstance(value, AtRest):
            self._waiting.append((value.action, reply))
            if is_at_rest():
                self.advance()
        else:
            reply(value)

    def advance(self) -> None:
        """Nothing runs: do what waits for that."""
        while self._waiting:
            action, reply = self._waiting.popleft()
            reply(self._run(action))

    def _run(self, action: Action) -> object:
        """The value, or the error; what has changed is in the journal then.

        Raises EngineDeadError alone: the engine core that comes next knows nothing of this call.
        """
        before = self.state()
        value: object = None
        try:
            with self._unwatched():
                value = action()
        except EngineDeadError:
            raise
        except HeadraceError as error:
            value = error
        except Exception as error:  # no call may end the loop
            logger.exception("a call of the engine core failed")
            value = RequestFailedError(f"internal error: {type(error).__name__}: {error}")
        if self.state() != before:
            self._on_change(self.state())
        return value

    def state(self) -> CoreState:
        """What the next engine core would have to be brought to."""
        session = self._session
        is_configured = session.version == self._config.model_config.weight_version
        return CoreState(
            None if is_configured and not session.has_new_weights else session.version,
            session.has_new_weights,
            session.source,
            self._is_paused,
            self._sleep_level,
            sorted(self._asleep),
        )

    def restore(self, state: CoreState) -> None:
        """Bring a fresh engine core to what the one before it was."""
        if state.has_new_weights:
            self._restore_weights(state)
        elif state.weight_version is not None:
            self._session.version = state.weight_version
        if state.is_paused:
            self._is_paused = True
            self._scheduler.pause("keep")
        if state.asleep:
            self._scheduler.pause("keep")
            self._sleep_level, self._asleep = state.sleep_level, set(state.asleep)
            if "weights" in self._asleep:
                self._call_workers("release_weights", state.sleep_level, True)
            if "kv_cache" in self._asleep:
                self._call_workers("release_kv_cache")

    def _restore_weights(self, state: CoreState) -> None:
        try:
            self._session.restore(state.source, state.weight_version or "")
        except EngineDeadError:
            raise
        except HeadraceError as error:
            logger.error(
                "the weights %s cannot be had again, so that the engine is back at %s: %s",
                state.weight_version, self.weight_version, error,
            )  # fmt: skip
        else:
            self._scheduler.use_weights(self.weight_version)

    def note_modified(self) -> None:
        """A script's call may have changed the weights in memory."""
        self._was_modified = True

    def note_reloaded(self) -> None:
        """A script had the workers read their weights again from files."""
        self._was_modified = False
        self._wake_weights()

    # -- pausing ------------------------------------------------------------------------------

    def pause(self, mode: str = "abort", clear_cache: bool = True) -> object:
        """Hold new requests; see `Scheduler.pause`. The answer comes when nothing runs."""
        self._scheduler.pause(_checked_mode(mode))

        def settle() -> None:
            self._is_paused = True
            if clear_cache:
                self._scheduler.forget_kv()

        return AtRest(settle)

    def resume(self) -> None:
        """Run what was held. Idempotent. WrongStateError while the engine sleeps."""
        if self._asleep:
            raise WrongStateError("the engine sleeps: wake it up")
        self._is_paused = False
        self._cancel_waiting("the engine was resumed before everything had ended")
        self._scheduler.resume()

    def is_paused(self) -> bool:
        return self._scheduler.is_paused

    def _cancel_waiting(self, reason: str) -> None:
        waiting, self._waiting = self._waiting, deque()
        for _, reply in waiting:
            reply(WrongStateError(reason))

    def _go_on(self) -> None:
        """Run requests again, unless something else holds them."""
        if not (self._is_paused or self._asleep or self._waiting):
            self._scheduler.resume()

    # -- sleep --------------------------------------------------------------------------------

    def sleep(self, level: int = 1, mode: str | None = None) -> object:
        """Pause in `mode`, then give memory back; new requests are held until the engine is awake.

        `mode` None: as the engine is paused already, or "abort".
        Level 0: none of it. 1: weights, which come back by themselves, and KV cache. 2: both, and
        the weights have to be loaded again.
        """
        self._check_sleep()
        if type(level) is not int or not 0 <= level <= MAX_SLEEP_LEVEL:
            raise InvalidRequestError(f"level must be 0, 1 or 2, got {level!r}", "level")
        if mode is None and not self._scheduler.is_paused:
            mode = "abort"
        checked = None if mode is None else _checked_mode(mode)
        if self._asleep:
            logger.warning("sleep(level=%d) was ignored: the engine sleeps already", level)
            return None
        if self._session.is_open:
            raise WrongStateError("a weight update is going on: finish it, or roll it back")
        if checked is not None:
            self._scheduler.pause(checked)

        def settle() -> None:
            self._sleep_level, self._asleep = level, {"scheduling"}
            if level == 0:
                return
            self._asleep |= {"kv_cache", "weights"}
            self._scheduler.forget_kv()
            freed = self._call_workers("release_kv_cache")
            try:
                freed += self._call_workers("release_weights", level, not self._was_modified)
            except HeadraceError:  # of a full disk, say: back to where everything was
                self.wake_up()
                raise
            logger.info("asleep at level %d: %.1f MiB given back", level, sum(freed) / 2**20)

        return AtRest(settle)

    def wake_up(self, tags: list[SleepTag] | None = None) -> dict[str, object]:
        """Bring back what `tags` name, by default all. Requests run once all memory is there.

        Weights of level 2 are there only when they have been loaded.
        """
        self._check_sleep()
        wanted = set(SLEEP_TAGS if tags is None else tags)
        if unknown := wanted - set(SLEEP_TAGS):
            raise InvalidRequestError(
                f"tags must be among {', '.join(SLEEP_TAGS)}, got {', '.join(sorted(unknown))}",
                "tags",
            )
        if "weights" in wanted & self._asleep and all(self._call_workers("restore_weights")):
            self._wake("weights")
        if "kv_cache" in wanted & self._asleep:
            self._call_workers("restore_kv_cache")
            self._wake("kv_cache")
        if "scheduling" in wanted:
            self._wake("scheduling")
        return {"status": "sleeping" if self._asleep else "awake", "asleep": sorted(self._asleep)}

    def is_sleeping(self) -> bool:
        return bool(self._asleep)

    def release_kv_cache_memory(self) -> None:
        """Give the KV cache's memory back alone; `wake_up` with the tag kv_cache takes it again."""
        self._check_sleep()
        if not self._is_paused or self._waiting or self._asleep:
            raise WrongStateError("the engine must be paused, with nothing running, and awake")
        self._scheduler.forget_kv()
        self._call_workers("release_kv_cache")
        self._asleep.add("kv_cache")

    def reload_weights(self) -> AtRest:
        """Read the weights of this version again from their files; needed after level 2."""

        def settle() -> None:
            try:
                self._call_workers("reload_weights")
            except HeadraceError:  # on some workers there may be halves of them
                self._scheduler.pause("keep")
                self._asleep.add("weights")
                self._sleep_level = max(1, self._sleep_level)
                raise
            self._was_modified = False
            self._scheduler.forget_kv()
            self._wake_weights()
            self._go_on()

        return self._while_at_rest(settle)

    def _wake_weights(self) -> None:
        if "weights" in self._asleep:
            self._wake("weights")

    def _wake(self, tag: SleepTag) -> None:
        """One part is awake; the last part of the memory wakes scheduling, too."""
        self._asleep.discard(tag)
        if self._asleep.isdisjoint(MEMORY_TAGS):
            self._asleep.clear()
            self._sleep_level = 0
            self._go_on()
        elif tag == "scheduling":
            self._asleep.add(tag)

    def _check_sleep(self) -> None:
        if not self._config.sleep_config.is_enabled:
            raise WrongStateError("the engine was started without --enable-sleep-mode")

    # -- weights ------------------------------------------------------------------------------

    def init_weight_transfer_engine(self, init_info: dict[str, Any] | None = None) -> None:
        """Meet the trainer that will send weights. It waits for it."""
        self._session.join(init_info or {})

    def shutdown_weight_transfer_engine(self) -> None:
        """Leave the trainer. WrongStateError during an update."""
        self._session.leave()

    def start_weight_update(self) -> None:
        """Begin to take new weights; those that serve go on meanwhile."""
        self._session.begin()

    def start_draft_weight_update(self) -> None:
        raise UnsupportedFeatureError("there is no draft model: this version has no speculation")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Take some of the new weights, or all. An error rolls the update back."""
        self._session.take(update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> object:
        """Have the new weights serve, between two steps of all workers at once.

        Unless the engine is paused, what runs is finished with the old weights first, and new
        requests wait for the new ones. An error rolls the update back.
        """
        session = self._session
        session.check_version(weight_version)

        def settle() -> dict[str, object]:
            try:
                session.commit(weight_version)
                self._was_modified = False
                self._scheduler.use_weights(session.version)
                self._wake_weights()
            finally:
                self._go_on()
            return self.weight_info()

        return self._while_at_rest(settle)

    def rollback_weight_update(self) -> None:
        """Drop the new weights."""
        self._session.roll_back()

    def update_weight_version(self, new_version: str) -> None:
        """Call the weights that serve by another name."""
        self._session.rename(new_version)

    def weight_info(self) -> dict[str, object]:
        """Version of the weights that serve, and the checkpoint that has them, if any was named."""
        source = self._session.source
        return {
            "weight_version": self.weight_version,
            "path": None if source is None else source.path,
            "digest": None if source is None else source.digest,
        }

    def world_size(self) -> int:
        """Workers of this replica."""
        return self._config.parallel_config.world_size

    def _while_at_rest(self, action: Action) -> AtRest:
        """Have what runs finish first, unless it is paused already."""
        if not self._scheduler.is_paused:
            self._scheduler.pause("wait")
        return AtRest(action)


def _checked_mode(mode: str) -> PauseMode:
    if mode not in PAUSE_MODES:
        raise InvalidRequestError(
            f"mode must be one of {', '.join(PAUSE_MODES)}, got {mode!r}", "mode"
        )
    return cast(PauseMode, mode)
