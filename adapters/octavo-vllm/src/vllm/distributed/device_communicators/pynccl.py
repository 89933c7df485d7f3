"""PyNcclCommunicator: a trainer's end of a group whose other members are engines of Octavo."""

from __future__ import annotations

from typing import Any

import torch

from octavo.rl.transport import TIMEOUT
from octavo.rl.transport.gloo import make_gloo
from octavo.rl.transport.group import Group
from octavo.rl.transport.nccl import make_nccl
from vllm.distributed.utils import StatelessProcessGroup


class PyNcclCommunicator:
    """By NCCL on a GPU, by gloo on a CPU. Raises WeightTransferError where the others are not met in time."""

    def __init__(self, group: StatelessProcessGroup, device: Any = None) -> None:
        """Waits for all."""
        on_cpu = not torch.cuda.is_available() or str(device) == "cpu"
        make = make_gloo if on_cpu else make_nccl
        self._group = Group(make, group.host, group.port, group.rank, group.world_size, TIMEOUT, store=group.store)

    def broadcast(self, tensor: torch.Tensor, src: int = 0, stream: object = None) -> None:
        """Send a tensor's bytes, from rank 0."""
        assert src == 0, "rank 0 sends"
        self._group.broadcast(tensor.detach().contiguous().reshape(-1).view(torch.uint8), "a tensor", TIMEOUT)

    def destroy(self) -> None:
        """Leave."""
        self._group.close()
