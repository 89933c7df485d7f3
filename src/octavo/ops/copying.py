"""Copies that wait for nobody: of a CPU made by the thread that asks if they are small, to a GPU from pinned memory.

Owns how a copy is cut into parts that torch does not share out among threads of OpenMP, and how many pieces cross the
bus in one call; and BlockCopy, the word for blocks that a kernel copies. Each thread that asks has a
team of its own, of as many threads as the machine has cores; where others use the cores, a copy of a tenth of a
millisecond waits for the last of them to be given one. Invariant: the values are those of `Tensor.copy_`.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

_LOG = logging.getLogger(__name__)

_PART = (1 << 15) - 64  # elements: one less than torch shares out, in whole lines of a cache
_MAX_ALONE = 1 << 22  # elements of which one thread is not long in making a copy


class BlockCopy(NamedTuple):
    """Parts of blocks, from memory at an address into a cache."""

    own: torch.Tensor  # uint8, contiguous
    address: int
    blocks: NDArray[np.int64]  # [2, count]: here, and there
    strides: tuple[tuple[int, int], tuple[int, int]]  # bytes from part to part, and block to block; here, and there
    num_parts: int
    part_bytes: int


def copy_alone(target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """`target.copy_(source)`, of one shape and any types and devices; what is large is shared out. The target."""
    if (
        _PART < target.numel() <= _MAX_ALONE
        and target.device.type == source.device.type == "cpu"
        and target.shape == source.shape
        and target.is_contiguous()
        and source.is_contiguous()
        and torch.get_num_threads() > 1
    ):
        parts = zip(target.view(-1).split(_PART), source.view(-1).split(_PART), strict=True)
        for own, other in parts:
            own.copy_(other)
        return target
    return target.copy_(source)


def to_device(array: NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """`array` as a tensor on `device`, without waiting for it. On CPU the tensor shares the array's bytes."""
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def can_copy_pieces(device: torch.device) -> bool:
    """Whether `copy_pieces` copies between `device` and pinned memory: tried each way, and waited for."""
    from octavo.ops.compile import driver

    if device.type != "cuda" or not driver.copies_in_batches():
        return False
    host = torch.arange(8, pin_memory=True)
    own, back = torch.zeros_like(host, device=device), torch.zeros_like(host, pin_memory=True)
    try:
        with torch.cuda.device(device):
            stream = torch.cuda.Stream(device)
            stream.wait_stream(torch.cuda.current_stream(device))
            for target, source in ((own, host), (back, own)):
                addresses = [np.array([tensor.data_ptr()], np.uint64) for tensor in (target, source)]
                copy_pieces(addresses[0], addresses[1], host.nbytes, stream.cuda_stream)
            stream.synchronize()
    except driver.DriverError as error:
        _LOG.info("copies over the bus are ordered one by one: %s", error)
        return False
    return torch.equal(back, host)


def copy_pieces(targets: NDArray[np.uint64], sources: NDArray[np.uint64], num_bytes: int, stream: int) -> None:
    """Order copies from addresses to addresses [pieces], of `num_bytes` each, in one call that does not wait for them.

    Of a GPU's memory, which is the current device, and of pinned memory. stream: CUDA's. Raises DriverError.
    """
    from octavo.ops.compile import driver

    driver.copy_batch(targets, sources, np.full(len(targets), num_bytes, np.uint64), stream)
