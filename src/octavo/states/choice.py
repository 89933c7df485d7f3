"""Which operators run layers with states on a device.

Loads them when they are asked for, and not for a model that has no such layer: the GPU's are two dozen kernels.
"""

from __future__ import annotations

import torch

from octavo.cache.pool import KVCachePool
from octavo.states.base import StateBackend


def state_backend(device: torch.device) -> StateBackend:
    """Compiled operators on a CPU; kernels of Triton, and in CUDA C++ where those serve, on a GPU."""
    if device.type == "cuda":
        from octavo.states.gpu import GpuStates  # Triton, which a CPU need not have

        return GpuStates()
    from octavo.states.cpu import CpuStates

    return CpuStates()


def backend_of(pool: KVCachePool) -> StateBackend | None:
    """Those of a pool's layers with states, if it has any."""
    return state_backend(pool.buffer.device) if pool.states else None
