"""Pausing, sleep and weight updates of a scheduler over workers that only record calls."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headrace.configs.config import SleepConfig, WeightTransferConfig
from headrace.configs.errors import (
    HeadraceError,
    InvalidRequestError,
    RequestFailedError,
    UnsupportedFeatureError,
    WrongStateError,
)
from headrace.configs.model_files.weight_source import WeightSource, read_source
from headrace.engine_core.core_state import CoreState
from headrace.engine_core.maintenance import Maintenance
from headrace.workers.protocol import ChoiceId
from tests.engine_core.factories import FakeEngine, make_request

PROMPT = [7] * 14


class Workers:
    """Two workers. `failing`: methods that raise."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.failing: set[str] = set()
        self.are_loaded = True

    def __call__(self, method: str, *args: object) -> list[Any]:
        self.calls.append((method, *args))
        if method in self.failing:
            raise RequestFailedError(f"worker 1: {method} failed")
        if method == "release_weights":
            self.are_loaded = args[0] != 2
        values = {"restore_weights": self.are_loaded, "release_weights": 8, "release_kv_cache": 4}
        return [values.get(method)] * 2

    @property
    def methods(self) -> list[str]:
        return [call[0] for call in self.calls]


class Core:
    """A scheduler with the maintenance around it, as in an engine core."""

    def __init__(self, root: Path | None = None, backend: Any = None, **config: Any) -> None:
        self.engine = FakeEngine(num_blocks=30, **config)
        self.config = replace(
            self.engine.config,
            sleep_config=SleepConfig(is_enabled=True),
            weight_transfer_config=WeightTransferConfig(
                None if root is None else str(root), backend
            ),
        )
        self.workers = Workers()
        self.journal: list[CoreState] = []
        self.replies: dict[int, Any] = {}
        self.maintenance = self.make_maintenance()

    def make_maintenance(self) -> Maintenance:
        @contextmanager
        def unwatched() -> Iterator[None]:
            yield

        return Maintenance(
            self.config, self.engine.scheduler, self.workers, unwatched, self.journal.append
        )

    def has_work(self) -> bool:
        return bool(self.engine.in_flight) or self.engine.scheduler.has_work()

    def begin(self, method: str, **kwargs: Any) -> int:
        """A call whose answer may come later; its number among the replies."""
        number = len(self.replies)
        self.replies[number] = None

        def reply(value: object) -> None:
            self.replies[number] = (value,)

        self.maintenance.call(method, kwargs, lambda: not self.has_work(), reply)
        return number

    def run(self, max_steps: int = 1000) -> None:
        """Until nothing runs, and what waited for that is done."""
        for _ in range(max_steps):
            if not self.has_work():
                self.maintenance.advance()
                if not self.has_work():
                    return
            self.engine.step()
        raise AssertionError("it never comes to rest")

    def call(self, method: str, **kwargs: Any) -> Any:
        number = self.begin(method, **kwargs)
        if self.replies[number] is None:
            self.run()
        (value,) = self.replies[number]
        if isinstance(value, HeadraceError):
            raise value
        return value

    def generate(self, name: str, **fields: Any) -> int:
        """Prompt tokens found in the cache, of a request that runs now."""
        request = make_request(name, PROMPT, **fields)
        self.engine.add(request)
        self.run()
        self.engine.assert_output(request)
        return self.engine.finished[ChoiceId(name)].num_cached_tokens


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Something with bytes: no worker reads it here."""
    path = tmp_path / "root" / "new.gguf"
    path.parent.mkdir()
    path.write_bytes(b"weights")
    return path


def test_abort_ends_what_runs_and_holds_what_comes() -> None:
    core = Core()
    core.engine.add(make_request("old", PROMPT, max_tokens=30, ignore_eos=True))
    core.engine.step()
    assert core.call("pause") is None and core.call("is_paused")
    assert core.engine.finished[ChoiceId("old")].finish_reason == "abort"
    new = make_request("new", PROMPT)
    core.engine.add(new)
    assert not core.has_work() and core.engine.scheduler.stats().num_waiting == 1
    core.engine.add(make_request("unwanted", PROMPT))
    core.engine.abort("unwanted")
    core.call("pause")  # again: nothing changes
    core.call("resume")
    core.call("resume")
    core.run()
    core.engine.assert_output(new)
    core.engine.assert_idle()


def test_wait_answers_when_all_has_ended() -> None:
    core = Core()
    running = [make_request(f"{i}", [i + 1] * 9, max_tokens=9, ignore_eos=True) for i in range(6)]
    for request in running:  # more than run at once: some wait in the queue
        core.engine.add(request)
    core.engine.step()
    number = core.begin("pause", mode="wait")
    late = make_request("late", PROMPT)
    core.engine.add(late)
    assert core.replies[number] is None and not core.journal
    core.run()
    assert core.replies[number] == (None,)
    for request in running:
        core.engine.assert_output(request)
    assert ChoiceId("late") not in core.engine.finished and core.journal[-1].is_paused
    core.call("resume")
    core.run()
    core.engine.assert_output(late)
    assert not core.journal[-1].is_paused


@pytest.mark.parametrize("clear_cache", [True, False])
@pytest.mark.parametrize("depth", [1, 3])
def test_keep_goes_on_where_it_was(clear_cache: bool, depth: int) -> None:
    core = Core(depth=depth)
    requests = [
        make_request("a", PROMPT, max_tokens=20, ignore_eos=True),
        make_request("forks", [3] * 10, n=3, max_tokens=12, ignore_eos=True),
        make_request("long", [5] * 40, max_tokens=5, ignore_eos=True),
    ]
    for request in requests:
        core.engine.add(request)
    for _ in range(4):
        core.engine.step()
    while core.engine.in_flight:
        core.engine.deliver()
    assert core.call("pause", mode="keep", clear_cache=clear_cache) is None
    before = len(core.engine.tokens[ChoiceId("a")])
    assert core.engine.schedule() is None and core.engine.scheduler.check_integrity() == []
    core.call("resume")
    core.run()
    assert before < 20
    for request in requests:
        for choice in request.choices:
            core.engine.assert_output(request, choice.index)
    core.engine.assert_idle()


def test_resume_ends_a_pause_that_waits() -> None:
    core = Core()
    core.engine.add(make_request("a", PROMPT, max_tokens=30, ignore_eos=True))
    number = core.begin("pause", mode="wait")
    core.call("resume")
    assert isinstance(core.replies[number][0], WrongStateError)
    core.run()
    assert not core.call("is_paused")


@pytest.mark.parametrize("level", [0, 1, 2])
def test_sleep_and_wake(level: int) -> None:
    core = Core()
    assert core.generate("before") == 0
    assert core.call("sleep", level=level) is None and core.call("is_sleeping")
    released = [("release_kv_cache",), ("release_weights", level, True)] if level else []
    assert core.workers.calls == released
    held = make_request("held", PROMPT)
    core.engine.add(held)
    assert not core.has_work()
    with pytest.raises(WrongStateError, match="sleeps"):
        core.call("resume")
    assert core.journal[-1].sleep_level == level
    status = core.call("wake_up")["status"]
    if level == 2:
        assert status == "sleeping" and not core.has_work()
        core.call("reload_weights")
    else:
        assert status == "awake"
    assert not core.call("is_sleeping")
    core.run()
    core.engine.assert_output(held)
    cached = core.engine.finished[ChoiceId("held")].num_cached_tokens
    assert cached == (0 if level else 12), "what the cache held is gone with its memory"
    assert core.journal[-1] == CoreState()


def test_what_was_kept_sleeps_too_and_goes_on() -> None:
    core = Core()
    request = make_request("a", PROMPT, max_tokens=20, ignore_eos=True)
    core.engine.add(request)
    core.engine.step()
    core.call("pause", mode="keep")
    core.call("sleep")
    core.call("wake_up")
    assert not core.has_work()
    core.call("resume")
    core.run()
    core.engine.assert_output(request)


def test_waking_partly() -> None:
    core = Core()
    core.call("sleep")
    assert core.call("wake_up", tags=["weights"])["status"] == "sleeping"
    assert core.call("wake_up", tags=["scheduling"])["status"] == "sleeping"
    assert core.call("is_paused") and "restore_kv_cache" not in core.workers.methods
    assert core.call("wake_up", tags=["kv_cache"])["status"] == "awake"
    assert not core.call("is_paused")
    with pytest.raises(InvalidRequestError, match="tags"):
        core.call("wake_up", tags=["gpu"])
    core.call("sleep", level=0)
    core.call("sleep", level=2)  # twice: a warning
    assert core.workers.methods.count("release_weights") == 1
    core.call("wake_up", tags=["scheduling"])
    assert not core.call("is_sleeping")


def test_a_pause_outlives_sleep() -> None:
    core = Core()
    core.call("pause")
    core.call("release_kv_cache_memory")
    assert core.call("wake_up", tags=["kv_cache"])["status"] == "awake" and core.call("is_paused")
    core.call("sleep")
    core.call("wake_up")
    assert core.call("is_paused")
    core.call("resume")
    with pytest.raises(WrongStateError, match="paused"):
        core.call("release_kv_cache_memory")


def test_a_full_disk_wakes_the_engine_again() -> None:
    core = Core()
    core.workers.failing = {"release_weights"}
    with pytest.raises(RequestFailedError, match="release_weights"):
        core.call("sleep")
    assert not core.call("is_sleeping") and core.workers.methods[-1] == "restore_kv_cache"
    assert core.generate("after") == 0


def test_weights_changed_by_a_script_are_not_read_again() -> None:
    core = Core()
    core.maintenance.note_modified()
    core.call("sleep")
    assert core.workers.calls[-1] == ("release_weights", 1, False)
    core.call("wake_up")
    core.maintenance.note_reloaded()
    core.call("sleep")
    assert core.workers.calls[-1] == ("release_weights", 1, True)


def test_sleep_needs_its_mode() -> None:
    core = Core()
    core.config = replace(core.config, sleep_config=SleepConfig())
    core.maintenance = core.make_maintenance()
    for method in ("sleep", "wake_up", "release_kv_cache_memory"):
        with pytest.raises(WrongStateError, match="enable-sleep-mode"):
            core.call(method)


def test_an_update_under_load_never_mixes(checkpoint: Path) -> None:
    """PP21: what runs ends with the old weights, what comes waits; a warm cache finds nothing."""
    core = Core(root=checkpoint.parent)
    assert core.generate("cold") == 0 and core.generate("warm") == 12
    running = make_request("running", PROMPT, max_tokens=20, ignore_eos=True)
    core.engine.add(running)
    core.engine.step()
    core.call("start_weight_update")
    core.call("update_weights", update_info={"path": "new.gguf"})
    assert core.maintenance.weight_version == "default"
    number = core.begin("finish_weight_update", weight_version="v2")
    held = make_request("held", PROMPT)
    core.engine.add(held)
    assert core.replies[number] is None
    while core.replies[number] is None:
        core.engine.step()
        if not core.has_work():
            core.maintenance.advance()
    assert (
        ChoiceId("running") in core.engine.finished and ChoiceId("held") not in core.engine.finished
    )
    assert core.maintenance.weight_version == "v2"
    core.run()
    core.engine.assert_output(running)
    core.engine.assert_output(held)
    assert core.engine.finished[ChoiceId("held")].num_cached_tokens == 0
    assert core.generate("warm again") == 12
    source = read_source(checkpoint)
    assert core.replies[number][0]["digest"] == source.digest
    assert core.workers.methods == [
        "begin_weight_update", "put_weights_of_path", "prepare_weights", "commit_weights",
    ]  # fmt: skip
    state = core.journal[-1]
    assert state.has_new_weights and state.weight_version == "v2"
    assert state.source is not None and state.source.path == str(checkpoint)


def test_an_old_name_for_new_weights_finds_no_old_prefixes(checkpoint: Path) -> None:
    core = Core(root=checkpoint.parent)
    core.generate("a")
    for version in ("v2", "default"):
        core.call("start_weight_update")
        core.call("update_weights", update_info={"path": str(checkpoint)})
        core.call("finish_weight_update", weight_version=version)
        assert core.generate(f"{version} first") == 0


def test_kept_requests_go_on_with_the_new_weights(checkpoint: Path) -> None:
    core = Core(root=checkpoint.parent)
    request = make_request("a", PROMPT, max_tokens=20, ignore_eos=True)
    core.engine.add(request)
    for _ in range(3):
        core.engine.step()
    core.call("pause", mode="keep", clear_cache=False)
    forwards = core.engine.worker.forwards
    core.call("start_weight_update")
    core.call("update_weights", update_info={"path": str(checkpoint)})
    core.call("finish_weight_update")
    assert not core.has_work() and core.call("is_paused")
    core.call("resume")
    core.run()
    core.engine.assert_output(request)
    assert core.engine.worker.forwards > forwards
    core.engine.assert_idle()


@pytest.mark.parametrize("failing", ["put_weights_of_path", "prepare_weights"])
def test_a_failed_update_is_rolled_back_everywhere(checkpoint: Path, failing: str) -> None:
    core = Core(root=checkpoint.parent)
    core.generate("a")
    core.workers.failing = {failing}
    core.call("start_weight_update")
    with pytest.raises(RequestFailedError, match=failing):
        core.call("update_weights", update_info={"path": str(checkpoint)})
        core.call("finish_weight_update")
    assert core.workers.methods[-1] == "rollback_weights"
    assert "commit_weights" not in core.workers.methods and core.journal == []
    assert core.maintenance.weight_version == "default" and not core.call("is_paused")
    assert core.generate("b") == 12
    with pytest.raises(WrongStateError, match="no weight update"):
        core.call("finish_weight_update")


def test_files_that_change_before_the_end_are_not_taken(checkpoint: Path) -> None:
    core = Core(root=checkpoint.parent)
    core.call("start_weight_update")
    core.call("update_weights", update_info={"path": str(checkpoint)})
    checkpoint.write_bytes(b"others now")
    with pytest.raises(HeadraceError, match="has changed"):
        core.call("finish_weight_update")
    assert "commit_weights" not in core.workers.methods


def test_calls_in_the_wrong_order(checkpoint: Path) -> None:
    core = Core(root=checkpoint.parent, backend="gloo")
    for method, kwargs in (
        ("update_weights", {"update_info": {}}), ("finish_weight_update", {}),
        ("rollback_weight_update", {}),
    ):  # fmt: skip
        with pytest.raises(WrongStateError, match="no weight update"):
            core.call(method, **kwargs)
    core.call("init_weight_transfer_engine", init_info={"master_address": "::1", "master_port": 9})
    assert core.workers.calls == [("join_weight_group", "::1", 9, 1, 2, 300.0)]
    with pytest.raises(WrongStateError, match="already"):
        core.call("init_weight_transfer_engine", init_info={})
    core.call("start_weight_update")
    for method in ("start_weight_update", "shutdown_weight_transfer_engine", "sleep"):
        with pytest.raises(WrongStateError, match=r"already|going on"):
            core.call(method)
    with pytest.raises(InvalidRequestError, match="default"):
        core.call("finish_weight_update", weight_version="default")
    core.call("rollback_weight_update")
    core.call("shutdown_weight_transfer_engine")
    core.call("shutdown_weight_transfer_engine")
    assert core.workers.methods.count("leave_weight_group") == 1
    with pytest.raises(InvalidRequestError, match="moed"):
        core.call("pause", moed="wait")
    with pytest.raises(InvalidRequestError, match="mode"):
        core.call("pause", mode="now")


@pytest.mark.parametrize(
    ("info", "error", "text"),
    [
        ({"path": "../new.gguf"}, InvalidRequestError, "cannot be used|leads out"),
        ({"path": "nowhere"}, InvalidRequestError, "cannot be used"),
        ({"path": "new.gguf", "digest": "0"}, InvalidRequestError, "digest"),
        ({"path": 3}, InvalidRequestError, "string"),
        ([{}], UnsupportedFeatureError, "one object"),
        ({"ipc_handles": ["x"]}, UnsupportedFeatureError, "GPUs"),
        ({"names": ["a"], "packed": True}, UnsupportedFeatureError, "packed"),
        ({"names": ["a"], "dtype_names": [], "shapes": [[1]]}, InvalidRequestError, "as many"),
        ({"names": ["a"], "dtype_names": ["f"], "shapes": [[0]]}, InvalidRequestError, "positive"),
        ({"names": ["a"], "dtype_names": ["f"], "shapes": [[1]]}, WrongStateError, "trainer"),
        ({}, InvalidRequestError, "path"),
    ],
)
def test_update_infos_that_are_refused(
    checkpoint: Path, info: Any, error: type[HeadraceError], text: str
) -> None:
    core = Core(root=checkpoint.parent, backend="gloo")
    core.call("start_weight_update")
    with pytest.raises(error, match=text):
        core.call("update_weights", update_info=info)
    assert core.workers.methods == ["begin_weight_update", "rollback_weights"]


def test_without_options_nothing_is_taken() -> None:
    core = Core()
    with pytest.raises(WrongStateError, match="weight-update-root"):
        core.call("start_weight_update")
    with pytest.raises(WrongStateError, match="weight-transfer-config"):
        core.call("init_weight_transfer_engine", init_info={})
    with pytest.raises(UnsupportedFeatureError):
        core.call("start_draft_weight_update")


def test_new_weights_wake_an_engine_that_had_none(checkpoint: Path) -> None:
    core = Core(root=checkpoint.parent)
    core.call("sleep", level=2)
    core.call("wake_up", tags=["kv_cache"])
    core.call("start_weight_update")
    core.call("update_weights", update_info={"path": str(checkpoint)})
    assert core.call("is_sleeping")
    core.call("finish_weight_update", weight_version="v2")
    assert not core.call("is_sleeping") and core.generate("a") == 0


def test_a_failed_reload_keeps_the_engine_asleep() -> None:
    core = Core()
    core.workers.failing = {"reload_weights"}
    with pytest.raises(RequestFailedError):
        core.call("reload_weights")
    assert core.call("is_sleeping") and core.call("is_paused")
    core.workers.failing = set()
    core.call("reload_weights")
    assert not core.call("is_sleeping") and core.generate("a") == 0


def test_the_journal_brings_a_fresh_engine_core_to_the_same_state(checkpoint: Path) -> None:
    old = Core(root=checkpoint.parent)
    old.call("start_weight_update")
    old.call("update_weights", update_info={"path": str(checkpoint)})
    old.call("finish_weight_update", weight_version="v2")
    old.call("pause")
    old.call("sleep", level=1)
    old.call("wake_up", tags=["weights"])
    new = Core(root=checkpoint.parent)
    new.maintenance.restore(old.journal[-1])
    assert new.maintenance.state() == old.journal[-1]
    assert new.workers.methods == [
        "release_weights", "begin_weight_update", "put_weights_of_path", "prepare_weights",
        "commit_weights", "release_kv_cache",
    ]  # fmt: skip
    new.call("wake_up")
    assert new.call("is_paused")
    new.call("resume")
    assert new.generate("a") == 0 and new.maintenance.weight_version == "v2"


@pytest.mark.parametrize("how", ["changed", "gone", "sent"])
def test_weights_that_cannot_be_had_again_are_not_pretended(
    checkpoint: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    source: WeightSource | None = read_source(checkpoint)
    if how == "changed":
        checkpoint.write_bytes(b"others")
    elif how == "gone":
        checkpoint.unlink()
    else:
        source = None
    core = Core(root=checkpoint.parent)
    core.maintenance.restore(CoreState("v2", True, source, is_paused=True))
    assert core.maintenance.weight_version == "default" and core.call("is_paused")
    assert core.workers.calls == [] and "v2" in caplog.text


@pytest.mark.parametrize("failing", ["put_weights_of_path", "prepare_weights"])
def test_weights_that_cannot_be_loaded_again_make_room_for_the_first_ones(
    checkpoint: Path, failing: str
) -> None:
    core = Core(root=checkpoint.parent)
    core.workers.failing = {failing}
    core.maintenance.restore(CoreState("v2", True, read_source(checkpoint)))
    assert core.maintenance.weight_version == "default"
    assert core.workers.methods[-2:] == ["rollback_weights", "reload_weights"]
    assert core.generate("a") == 0


def test_another_name_for_the_same_weights() -> None:
    core = Core()
    assert core.generate("a") == 0
    core.call("update_weight_version", new_version="v1")
    assert core.call("weight_info") == {"weight_version": "v1", "path": None, "digest": None}
    assert core.generate("b") == 12
    fresh = Core()
    fresh.maintenance.restore(core.journal[-1])
    assert fresh.maintenance.weight_version == "v1" and fresh.workers.calls == []
