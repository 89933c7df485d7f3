"""The GPU backend: Octavo's own Triton kernels over the paged cache.

Owns the step's plans, one per spec, and the scratch memory that they share; `octavo.ops.attention.paged` does the
work. `prepare` launches one small kernel per spec, which a graph captures with the layers, and never waits for the
device. Invariant: a query's bits depend on its own row only (the canonical order is stated there), so every bound that
`prepare` takes from the host is free.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from octavo.attention.base import NO_SETUP, AttentionInputs, Capability, LayerTensors, Setup, mask_spec_of
from octavo.attention.frame import BackendFrame
from octavo.cache.kernel_blocks import MultipleOf
from octavo.cache.specs import AttentionSpec
from octavo.ops.attention import rope_decode
from octavo.ops.attention.paged import paged_attention
from octavo.ops.attention.paged_plan import (
    BLOCK_MULTIPLE,
    LEAST_FLOAT32,
    MAX_HEAD_SIZE,
    Heads,
    Planner,
    Scratch,
    can_run_on,
    shared_bytes,
)
from octavo.ops.rope import Rotation


class PagedBackend(BackendFrame):
    """An AttentionBackend for CUDA: heads of up to 256, block sizes that 16 divides, 8-bit caches with scales."""

    name = "paged"
    capability = Capability(
        devices=("cuda",),
        dtypes=(torch.bfloat16, torch.float16, torch.float32),
        kernel_block_sizes=(MultipleOf(BLOCK_MULTIPLE),),
        graphs=frozenset({"decode", "mixed"}),
        compiles_ahead=True,
        chunk=True,
        alibi=True,
        sinks=True,
        non_causal=True,
        cache_dtypes=(torch.float8_e4m3fn, torch.int8),
    )

    def __init__(
        self, specs: Sequence[AttentionSpec], dtype: torch.dtype, device: torch.device, setup: Setup = NO_SETUP
    ) -> None:
        """See BackendFrame. Raises ValueError for larger heads, and for a window and chunks together, too.

        And for float32 heads of more than 128 on a GPU with too little shared memory for their tiles.
        """
        super().__init__(specs, dtype, device, setup)
        for spec in specs:
            if spec.head_size > MAX_HEAD_SIZE:
                raise ValueError(
                    f"attention backend 'paged' takes heads of at most {MAX_HEAD_SIZE}, got {spec.head_size}: "
                    "set attention_backend='reference'"
                )
            least = LEAST_FLOAT32 if dtype == torch.float32 and spec.head_size > 128 else 0
            if (shared := shared_bytes(device)) < least:
                raise ValueError(
                    f"attention backend 'paged' takes float32 heads of {spec.head_size} in {least >> 10} KiB of "
                    f"shared memory, this GPU has {shared >> 10}: set dtype='bfloat16', or "
                    "attention_backend='reference'"
                )
            if spec.window and spec.chunk:
                raise ValueError(
                    "attention backend 'paged' takes a window or chunks, not both: set attention_backend='reference'"
                )
        self._scratch = Scratch(device)
        self._planners: dict[AttentionSpec, Planner] = {}
        self._slopes: dict[AttentionSpec, torch.Tensor | None] = {}
        for spec in specs:
            heads = Heads(spec.num_heads, spec.num_kv_heads, spec.head_size)
            self._planners[spec] = Planner(
                heads, mask_spec_of(spec), dtype, device, self._scratch, cache_dtype=setup.cache_dtype
            )
            slopes = torch.tensor(spec.alibi_slopes, device=device) if spec.alibi_slopes else None
            self._slopes[spec] = slopes

    def runs_on(self, device: torch.device) -> bool:
        """See BackendFrame."""
        return can_run_on(device)

    def prepare(self, inputs: AttentionInputs, *, for_capture: bool = False) -> None:
        """Plan from the host's bounds. Inside a graph's capture it is a part of the graph, which keeps its memory."""
        super().prepare(inputs, for_capture=for_capture)
        self._rows, self._is_captured = inputs.live, for_capture
        self._plans = {
            spec: planner.plan(
                *self._rows[:2],
                num_tokens=inputs.num_tokens,
                max_query_len=inputs.max_query_len,
                min_query_len=inputs.min_query_len,
                max_seq_len=inputs.max_seq_len,
                for_capture=for_capture,
                is_padded=inputs.is_padded,
            )
            for spec, planner in self._planners.items()
        }

    def attend(
        self, q: torch.Tensor, kv: torch.Tensor, spec: AttentionSpec, out: torch.Tensor, layer: LayerTensors
    ) -> None:
        """See BackendFrame."""
        paged_attention(
            q,
            kv,
            *self._rows,
            out,
            mask_spec=self._planners[spec].mask_spec,
            plan=self._plans[spec],
            scratch=self._scratch,
            key_scale=layer.key_scale,
            value_scale=layer.value_scale,
            sinks=layer.sinks if spec.sinks else None,
            slopes=self._slopes[spec],
        )

    def rotates(self, rotation: Rotation, kv: torch.Tensor, spec: AttentionSpec) -> bool:
        """See FusedRopeBackend.

        Only in graphs, whose rows of one query compute the token that was sampled last, and whose rows that are apart
        that and drafts. Elsewhere such a row may be the end of a prompt that shares a block with a row which completes
        that block in the same step: there every K and V is to be stored before any is read.
        """
        if not self._is_captured or kv.device.type != "cuda" or spec.sinks or spec.alibi_slopes:
            return False
        if self.inputs.max_query_len > 1 and not self.inputs.apart:
            return False
        planner = self._planners[spec]
        return rope_decode.serves(planner.heads, planner.mask_spec, self._plans[spec], kv, rotation)

    def run_fused_rope(
        self, projected: torch.Tensor, rotation: Rotation, kv: torch.Tensor, spec: AttentionSpec, out: torch.Tensor
    ) -> None:
        """See FusedRopeBackend."""
        self.inputs.check_call(projected, kv, out)
        rope_decode.fused_rope_decode(
            projected,
            rotation,
            kv,
            *self._rows,
            out,
            mask_spec=self._planners[spec].mask_spec,
            plan=self._plans[spec],
            scratch=self._scratch,
        )
