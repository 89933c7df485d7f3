"""The group of a trainer and an engine's workers: rank 0 is the trainer's, and holds the store."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed import TCPStore

from octavo.rl.transport import TIMEOUT, UNTOLD_BYTES
from octavo.rl.transport.gloo import make_gloo
from octavo.rl.transport.group import Group
from octavo.rl.transport.nccl import make_nccl


class Communicator:
    """What `trainer_init` gives. `group` has the attributes that trainers clear when they leave."""

    class _Handles:
        store: Any = None
        socket: Any = None

    def __init__(self, group: Group, buffer_bytes: int) -> None:
        """Of rank 0."""
        self.own, self.buffer_bytes, self.group = group, buffer_bytes, Communicator._Handles()

    def broadcast(self, tensor: torch.Tensor, src: int = 0, stream: object = None) -> None:
        """Send one buffer."""
        assert src == 0, "rank 0 sends"
        self.own.broadcast(tensor, "a buffer", TIMEOUT)


def trainer_init(init_info: Mapping[str, Any]) -> Communicator:
    """Meet the workers, within a deadline. Raises WeightTransferError."""
    address, port, size = init_info["master_address"], int(init_info["master_port"]), int(init_info["world_size"])
    store = TCPStore(address, port, size, True, wait_for_workers=False, multi_tenant=False)
    make = make_nccl if torch.cuda.is_available() else make_gloo
    group = Group(make, address, port, 0, size, TIMEOUT, store=store)
    return Communicator(group, int(init_info.get("packed_buffer_size_bytes", UNTOLD_BYTES)))
