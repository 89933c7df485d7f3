"""Which operators run layers with states on a device."""

from __future__ import annotations

import torch

from octavo.states.base import StateBackend
from octavo.states.cpu import CpuStates
from octavo.states.reference import ReferenceStates


def state_backend(device: torch.device) -> StateBackend:
    """Of a device."""
    return CpuStates() if device.type == "cpu" else ReferenceStates()
