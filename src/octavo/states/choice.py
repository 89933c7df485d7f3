"""Which operators run layers with states on a device."""

from __future__ import annotations

import torch

from octavo.states.base import StateBackend
from octavo.states.cpu import CpuStates


def state_backend(device: torch.device) -> StateBackend:
    """Compiled operators on a CPU, Triton's kernels on a GPU."""
    if device.type == "cuda":
        from octavo.states.gpu import GpuStates  # Triton, which a CPU need not have

        return GpuStates()
    return CpuStates()
