"""The frame that Octavo's own backends share: what each checks at its start, once per step and once per layer.

Owns the checks against a backend's Capability and the step's inputs. Knows no kernel. Invariant: `attend` gets tensors
that fit the inputs that `prepare` saw last.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence

import torch

from octavo.attention.base import NO_SETUP, NO_TENSORS, AttentionInputs, Capability, LayerTensors, Setup, check_specs
from octavo.cache.kernel_blocks import takes_size
from octavo.cache.specs import AttentionSpec


def wrong_device(name: str, capability: Capability, device: str) -> str:
    """Why a backend does not run here, and what to set."""
    instead = "paged" if device == "cuda" else "cpu"
    devices = " or ".join(capability.devices)
    return f"attention backend {name!r} runs on device {devices}, got {device}: set attention_backend={instead!r}"


class BackendFrame(abc.ABC):
    """An AttentionBackend but for its name, its capability and `attend`; one that plans adds to `prepare`."""

    name: str  # for messages
    capability: Capability
    inputs: AttentionInputs  # of the step

    def __init__(
        self, specs: Sequence[AttentionSpec], dtype: torch.dtype, device: torch.device, setup: Setup = NO_SETUP
    ) -> None:
        """Raises ValueError for a device, dtype, head size, cache or feature that the backend does not state."""
        if not self.runs_on(device):
            raise ValueError(wrong_device(self.name, self.capability, device.type))
        check_specs(self.name, self.capability, specs, dtype, setup)

    def runs_on(self, device: torch.device) -> bool:
        """Whether it takes tensors of `device`."""
        return device.type in self.capability.devices

    def prepare(self, inputs: AttentionInputs, *, for_capture: bool = False) -> None:
        """Take in the step's inputs; see AttentionBackend.

        Raises ValueError for inputs that contradict each other and for kernel blocks of a size that is not stated.
        """
        if not takes_size(self.capability.kernel_block_sizes, inputs.block_size):
            sizes = ", ".join(map(str, self.capability.kernel_block_sizes))
            raise ValueError(
                f"attention backend {self.name!r} takes kernel blocks of {sizes} tokens, got {inputs.block_size}: set "
                "block_size or attention_config={'kernel_block_size': ...}"
            )
        inputs.check()
        self.inputs = inputs

    def run(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        spec: AttentionSpec,
        out: torch.Tensor,
        layer: LayerTensors = NO_TENSORS,
    ) -> None:
        """Attend; see AttentionBackend. Raises ValueError for tensors that are not the step's."""
        self.inputs.check_call(q, kv, out)
        self.attend(q, kv, spec, out, layer)

    @abc.abstractmethod
    def attend(
        self, q: torch.Tensor, kv: torch.Tensor, spec: AttentionSpec, out: torch.Tensor, layer: LayerTensors
    ) -> None:
        """The work of `run`, with tensors that fit `inputs`."""
