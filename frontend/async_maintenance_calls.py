"""`maintenance_calls.py` for the asyncio engine: the same calls, to be awaited."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from headrace.configs.config import EngineConfig
from headrace.frontend.async_engine import AsyncEngine
from headrace.frontend.maintenance_calls import check_sleep_mode


class AsyncMaintenanceCalls(ABC):
    """Mixed into the asyncio engine, which has `config` and `engine`.

    Requests that come while the engine is paused or asleep are accepted, and wait.
    """

    config: EngineConfig
    engine: AsyncEngine

    async def pause_generation(self, mode: str = "abort", clear_cache: bool = True) -> None:
        """As `LLMEngine.pause_generation`."""
        await self._call("pause", mode=mode, clear_cache=clear_cache)

    async def resume_generation(self) -> None:
        """Run what was held. Idempotent."""
        await self._call("resume")

    async def is_paused(self) -> bool:
        """Whether new requests are held."""
        return bool(await self._call("is_paused"))

    async def is_sleeping(self) -> bool:
        """Whether some memory, or scheduling, is still asleep."""
        return self.config.sleep_config.is_enabled and bool(await self._call("is_sleeping"))

    async def sleep(self, level: int = 1) -> None:
        """As `LLMEngine.sleep`."""
        check_sleep_mode(self.config)
        await self._call("sleep", level=level)

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """As `LLMEngine.wake_up`."""
        check_sleep_mode(self.config)
        await self._call("wake_up", tags=tags)

    async def reload_weights(self) -> None:
        """As `LLMEngine.reload_weights`."""
        await self._call("reload_weights")

    async def init_weight_transfer_engine(self, init_info: Mapping[str, Any] | None = None) -> None:
        """As `LLMEngine.init_weight_transfer_engine`."""
        await self._call("init_weight_transfer_engine", init_info=dict(init_info or {}))

    async def shutdown_weight_transfer_engine(self) -> None:
        """Leave the trainer."""
        await self._call("shutdown_weight_transfer_engine")

    async def start_weight_update(self) -> None:
        """Begin to take new weights; those that serve go on."""
        await self._call("start_weight_update")

    async def update_weights(self, update_info: Mapping[str, Any]) -> None:
        """As `LLMEngine.update_weights`."""
        await self._call("update_weights", update_info=dict(update_info))

    async def finish_weight_update(self, weight_version: str | None = None) -> str:
        """As `LLMEngine.finish_weight_update`."""
        info = await self._call("finish_weight_update", weight_version=weight_version)
        return str(info["weight_version"])

    async def rollback_weight_update(self) -> None:
        """Drop the new weights; the old ones serve as before."""
        await self._call("rollback_weight_update")

    async def get_weight_version(self) -> str:
        """Of the weights that serve."""
        return str((await self._call("weight_info"))["weight_version"])

    async def _call(self, method: str, **kwargs: Any) -> Any:
        self._require_running()
        return await self.engine.call(method, kwargs)

    @abstractmethod
    def _require_running(self) -> None:
        """Receive the engine core's messages, on the running event loop."""
