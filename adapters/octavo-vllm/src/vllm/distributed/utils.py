"""StatelessProcessGroup: where the members of a group meet."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]


@dataclasses.dataclass(frozen=True)
class StatelessProcessGroup:
    """A place, and who one is there."""

    host: str
    port: int
    rank: int
    world_size: int
    store: Any  # rank 0's own

    @staticmethod
    def create(host: str, port: int, rank: int, world_size: int, **_: Any) -> StatelessProcessGroup:
        """Rank 0 opens the store; others meet it when they make a communicator."""
        store = None
        if rank == 0:
            store = TCPStore(host, port, world_size, True, wait_for_workers=False, multi_tenant=False)
        return StatelessProcessGroup(host, port, rank, world_size, store)
