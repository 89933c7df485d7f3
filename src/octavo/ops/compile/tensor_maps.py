"""Descriptors for Hopper's copy engine, and whether a device takes the kernels that need them.

Owns what they have in common. Does not know what the tensors mean. Invariant: a descriptor keeps no memory alive; it
travels in a launch's arguments, by value, so that a graph may capture it.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from typing import Any

import torch

_LOG = logging.getLogger(__name__)
ALIGNED = 16  # bytes, of what the copy engine steps over


@dataclasses.dataclass(frozen=True, slots=True)
class _Place:
    """Where a descriptor's tensor begins: what of a tensor a launch needs."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        """As a tensor's."""
        return self.address


@functools.lru_cache(maxsize=4096)
def describe(
    address: int, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...]
) -> Any:
    """The descriptor of a tensor of a 16-bit dtype that is copied in boxes, at most 128 bytes wide in shared memory."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    place, layout = _Place(address, dtype), _layout(len(box), min(128, 2 * box[-1]))
    descriptor: Any = TensorDescriptor(place, list(shape), list(strides), list(box), layout)
    descriptor.compiled_for = dtype, box  # see launch.Direct
    return descriptor


@functools.cache
def _layout(rank: int, width: int) -> Any:
    from triton.experimental.gluon.language import NVMMASharedLayout

    return NVMMASharedLayout(swizzle_byte_width=width, element_bitwidth=16, rank=rank)


@functools.cache
def takes_gluon(device: torch.device) -> bool:
    """Whether a device runs the kernels in Gluon for Hopper."""
    if device.type != "cuda" or torch.version.hip or torch.cuda.get_device_capability(device)[0] != 9:
        return False
    try:
        from triton.experimental.gluon.language.nvidia.hopper import (  # noqa: F401
            fence_async_shared,
            mbarrier,
            tma,
            warpgroup_mma,
            warpgroup_mma_wait,
        )
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor  # noqa: F401
    except ImportError as error:  # Gluon's names are not settled
        _LOG.warning("decode and prompts run plainly: this Triton's Gluon is another (%s)", error)
        return False
    return True
