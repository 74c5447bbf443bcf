"""Pausing, sleep and weight updates in the engines' Python API; `docs/weights.md` explains them."""

from collections.abc import Mapping
from typing import Any

from headrace.configs.config import EngineConfig
from headrace.configs.errors import EngineNotReadyError
from headrace.frontend.start_engine import Client


def check_sleep_mode(config: EngineConfig) -> None:
    """AssertionError unless the engine may sleep."""
    if not config.sleep_config.is_enabled:
        raise AssertionError("sleep mode is not enabled: start the engine with enable_sleep_mode")


class MaintenanceCalls:
    """Mixed into the blocking engine, which has `config` and `_client`."""

    config: EngineConfig
    _client: Client
    _holds_requests = False

    def pause_generation(self, mode: str = "abort", clear_cache: bool = True) -> None:
        """Hold new requests, and return when nothing runs.

        What runs ends with reason "abort", is finished ("wait"), or is kept for `resume_generation`
        ("keep"). `clear_cache` forgets cached prefixes; kept requests then compute theirs again.
        """
        self._change("pause", mode=mode, clear_cache=clear_cache)

    def resume_generation(self) -> None:
        """Run what was held. Idempotent."""
        self._change("resume")

    def is_paused(self) -> bool:
        """Whether new requests are held."""
        return bool(self._client.call("is_paused"))

    def is_sleeping(self) -> bool:
        """Whether some memory, or scheduling, is still asleep."""
        return self.config.sleep_config.is_enabled and bool(self._client.call("is_sleeping"))

    def sleep(self, level: int = 1) -> None:
        """Give memory back: 1 keeps the weights in their files or on disk, 2 drops them.

        Level 0 only holds requests. What runs is aborted, unless `pause_generation` came first.
        Cached prefixes are lost. The memory is free when this returns. AssertionError without sleep
        mode.
        """
        check_sleep_mode(self.config)
        self._change("sleep", level=level)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Bring back "weights", "kv_cache" or, by default, everything; ValueError for other tags.

        Requests run when all is back; after level 2 the weights have to be loaded, too.
        """
        check_sleep_mode(self.config)
        self._change("wake_up", tags=tags)

    def reload_weights(self) -> None:
        """Read the weights of this version again from their files, as after `sleep(2)`."""
        self._change("reload_weights")

    def init_weight_transfer_engine(self, init_info: Mapping[str, Any] | None = None) -> None:
        """Meet the trainer that sends weights; it waits for that."""
        self._change("init_weight_transfer_engine", init_info=dict(init_info or {}))

    def shutdown_weight_transfer_engine(self) -> None:
        """Leave the trainer."""
        self._change("shutdown_weight_transfer_engine")

    def start_weight_update(self) -> None:
        """Begin to take new weights; those that serve go on."""
        self._change("start_weight_update")

    def update_weights(self, update_info: Mapping[str, Any]) -> None:
        """Take new weights; after an error the update is rolled back.

        From a checkpoint: `path` (and `digest`). From the trainer's group: `names`, `dtype_names`,
        `shapes`; from shared memory also `memory`, its path.
        """
        self._change("update_weights", update_info=dict(update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> str:
        """Have the new weights serve; returns their version. After an error the old ones do.

        Unless the engine is paused, what runs is finished with the old ones first.
        """
        info = self._change("finish_weight_update", weight_version=weight_version)
        return str(info["weight_version"])

    def rollback_weight_update(self) -> None:
        """Drop the new weights; the old ones serve as before."""
        self._change("rollback_weight_update")

    @property
    def weight_version(self) -> str:
        """Of the weights that serve."""
        return str(self._client.call("weight_info")["weight_version"])

    def check_serving(self) -> None:
        """EngineNotReadyError while requests are held: waiting for their outputs would not end."""
        if self._holds_requests:  # unless a call of the workers has loaded the weights meanwhile
            self._holds_requests = self.is_paused()
        if self._holds_requests:
            raise EngineNotReadyError(
                "the engine is paused or asleep, and this thread would wait for ever: call "
                "resume_generation() or wake_up() first, and load weights after sleep(2)"
            )

    def _change(self, method: str, **kwargs: Any) -> Any:
        try:
            return self._client.call(method, kwargs=kwargs)
        finally:
            self._holds_requests = bool(self._client.call("is_paused"))
