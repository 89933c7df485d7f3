"""New weights for an engine process: `octavo.frontend.weights.WeightMethods` as coroutines, with the same words.

Owns nothing but the waiting. An answer comes when the core has done what was asked.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any

import msgspec

from octavo.frontend.control import standing_after
from octavo.frontend.weights import message, rows_of, told
from octavo.rl.session import check_version, result_of
from octavo.serve.engine.control import AsyncControl


class AsyncWeightMethods(abc.ABC):
    """For AsyncEngine. They raise EngineDeadError too, if the engine is down or goes away."""

    control: AsyncControl

    @abc.abstractmethod
    async def call(self, name: str, payload: bytes = b"") -> bytes:
        """Ask the core between two steps."""

    async def _moved(self, name: str, payload: bytes = b"") -> bytes:
        """The same; then how the engine stands is known, for an update may leave it without whole weights."""
        answer = await self.call(name, payload)
        self.control.learn(standing_after(answer))
        return answer

    async def init_weight_transfer_engine(self, request: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """See WeightMethods."""
        return dict(result_of(await self._moved("init_weight_transfer_engine", told("init_info", request))))

    async def shutdown_weight_transfer_engine(self) -> None:
        """See WeightMethods."""
        result_of(await self._moved("shutdown_weight_transfer_engine"))

    async def start_weight_update(
        self, *, partial: bool = False, on_running: str = "recompute", is_checkpoint_format: bool = True
    ) -> str:
        """See WeightMethods."""
        fields = {"partial": partial, "on_running": on_running, "is_checkpoint_format": is_checkpoint_format}
        return str(result_of(await self._moved("start_weight_update", message(**fields)))["session"])

    async def update_weights(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """See WeightMethods."""
        return dict(result_of(await self._moved("update_weights", told("update_info", request))))

    async def finish_weight_update(
        self, weight_version: str | None = None, *, on_running: str | None = None, session: str | None = None
    ) -> dict[str, Any]:
        """See WeightMethods."""
        fields = {"weight_version": weight_version, "on_running": on_running, "session": session}
        return dict(result_of(await self._moved("finish_weight_update", message(**fields))))

    async def abort_weight_update(self, *, session: str | None = None) -> None:
        """See WeightMethods."""
        result_of(await self._moved("abort_weight_update", message(session=session)))

    async def update_weight_version(self, weight_version: str) -> None:
        """See WeightMethods."""
        check_version(weight_version)
        result_of(await self._moved("update_weight_version", msgspec.msgpack.encode(weight_version)))

    async def get_weight_version(self) -> str:
        """See WeightMethods."""
        return str((await self.weight_state())["weight_version"])

    async def get_weight_checksums(self) -> dict[str, Any]:
        """See WeightMethods."""
        return dict(result_of(await self.call("weight_checksums")))

    async def get_weights_by_name(self, name: str, truncate_size: int = 100) -> list[Any]:
        """See WeightMethods."""
        return list(result_of(await self.call("weight_values", rows_of(name, truncate_size))))

    async def weight_state(self) -> dict[str, Any]:
        """See WeightMethods."""
        return dict(result_of(await self.call("weight_state")))
