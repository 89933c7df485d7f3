"""The GPU backend of latent attention: absorbed queries over compressed states, prefill and decode alike.

Owns the step's split and the scratch memory of split rows; `octavo.ops.latent.gpu` does the work. Makes no device work
in `prepare` and never waits for the device. Invariant: a query's bits depend on its own row only (the canonical order
is stated there), so every bound that `prepare` takes from the host is free.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from octavo.attention.base import NO_SETUP, AttentionInputs, Capability, LayerTensors, Setup
from octavo.attention.frame import BackendFrame
from octavo.cache.specs import AttentionSpec
from octavo.ops.attention.paged_plan import can_run_on, num_processors
from octavo.ops.latent.gpu import LEAF, latent_attention, part_floats

_PROGRAMS = 2  # for each processor, where few queries make splitting pay
_SCRATCH_BYTES = 256 << 20  # a step that needs more is not split


class MlaBackend(BackendFrame):
    """An AttentionBackend for CUDA and latent specs of any size and block size."""

    name = "mla"
    capability = Capability(
        devices=("cuda",),
        dtypes=(torch.bfloat16, torch.float16, torch.float32),
        window=False,
        soft_cap=False,
        latent=True,
        compiles_ahead=True,
        cache_dtypes=(torch.float8_e4m3fn, torch.int8),
    )

    def __init__(
        self, specs: Sequence[AttentionSpec], dtype: torch.dtype, device: torch.device, setup: Setup = NO_SETUP
    ) -> None:
        """See BackendFrame. Raises ValueError for layers whose attention is not latent, too."""
        super().__init__(specs, dtype, device, setup)
        for spec in specs:
            if not spec.value_size:
                raise ValueError("attention backend 'mla' serves latent attention only: set attention_backend='paged'")
        self._device = device
        self._num_heads = max(spec.num_heads for spec in specs)
        self._latent_size = max(spec.value_size for spec in specs)
        self._scratch = torch.empty(0, dtype=torch.float32, device=device)
        self._captured: list[torch.Tensor] = []  # what graphs were captured with

    def runs_on(self, device: torch.device) -> bool:
        """See BackendFrame."""
        return can_run_on(device)

    def prepare(self, inputs: AttentionInputs, *, for_capture: bool = False) -> None:
        """Choose the split from the host's bounds."""
        super().prepare(inputs, for_capture=for_capture)
        self._max_leaves = -(-inputs.max_seq_len // LEAF)
        programs = inputs.num_tokens * -(-self._num_heads // 64)
        self._splits = min(self._max_leaves, -(-_PROGRAMS * num_processors(self._device) // max(programs, 1)))
        floats = part_floats(inputs.num_tokens, self._num_heads, self._latent_size, self._max_leaves)
        if self._splits <= 1 or 4 * floats > _SCRATCH_BYTES:
            self._splits = 1
            return
        if self._scratch.numel() < floats:
            self._scratch = torch.empty(floats, dtype=torch.float32, device=self._device)
        if for_capture and not any(memory is self._scratch for memory in self._captured):
            self._captured.append(self._scratch)

    def attend(
        self, q: torch.Tensor, kv: torch.Tensor, spec: AttentionSpec, out: torch.Tensor, layer: LayerTensors
    ) -> None:
        """See BackendFrame."""
        num_tokens = self.inputs.num_tokens
        latent_attention(
            q[:num_tokens],
            kv,
            *self.inputs.live,
            out[:num_tokens],
            scale=spec.scale,
            splits=self._splits,
            max_leaves=self._max_leaves,
            scratch=self._scratch,
            key_scale=layer.key_scale,
        )
