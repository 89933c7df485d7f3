"""The GPU backend: Octavo's own Triton kernels over the paged cache.

Owns the step's launches, one set per variant, and the scratch memory that they share; `octavo.ops.paged_attention`
does the work. Makes no device work in `prepare` and never waits for the device. Invariant: a query's bits depend on
its own row only (the canonical order is stated there), so every bound that `prepare` takes from the host is free.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from octavo.attention.base import (
    NO_SETUP,
    NO_TENSORS,
    AttentionInputs,
    Capability,
    LayerTensors,
    Setup,
    Variant,
    check_variants,
)
from octavo.kv_cache.kernel_blocks import MultipleOf
from octavo.ops.paged_attention import (
    BLOCK_MULTIPLE,
    MAX_HEAD_SIZE,
    Launch,
    Scratch,
    can_run_on,
    num_processors,
    paged_attention,
    plan_launches,
)


class PagedBackend:
    """An AttentionBackend for CUDA; any head size up to 256, window, soft cap, and block sizes that 16 divides."""

    capability = Capability(
        devices=("cuda",),
        dtypes=(torch.bfloat16, torch.float16, torch.float32),
        kernel_block_sizes=(MultipleOf(BLOCK_MULTIPLE),),
        graphs=frozenset({"decode", "mixed"}),
    )

    def __init__(
        self, variants: Sequence[Variant], dtype: torch.dtype, device: torch.device, setup: Setup = NO_SETUP
    ) -> None:
        """Raises ValueError for another device, dtype or head size."""
        if not can_run_on(device):
            raise ValueError(
                f"attention backend 'paged' runs on device cuda, got {device}: set attention_backend='cpu'"
            )
        check_variants("paged", self.capability, variants, dtype, setup)
        for variant in variants:
            if variant.head_size > MAX_HEAD_SIZE:
                raise ValueError(
                    f"attention backend 'paged' takes heads of at most {MAX_HEAD_SIZE}, got {variant.head_size}: "
                    "set attention_backend='reference'"
                )
        self._variants, self._dtype, self._device = tuple(variants), dtype, device
        self._scratch = Scratch(device)

    def prepare(self, inputs: AttentionInputs, *, for_capture: bool = False) -> None:
        """Choose the launches from the host's bounds. A graph captured after `for_capture` keeps its scratch memory.

        Raises ValueError for a block size that 16 does not divide.
        """
        if inputs.block_size % BLOCK_MULTIPLE:
            raise ValueError(
                f"attention backend 'paged' takes block sizes that {BLOCK_MULTIPLE} divides, got {inputs.block_size}: "
                "set block_size"
            )
        rows = inputs.num_rows
        self._rows = inputs.query_start[: rows + 1], inputs.seq_lens[:rows], inputs.block_table[:rows]
        self._launches = {variant: self._plan(inputs, variant, for_capture) for variant in self._variants}

    def _plan(self, inputs: AttentionInputs, variant: Variant, for_capture: bool) -> tuple[Launch, ...]:
        launches = plan_launches(
            num_rows=inputs.num_rows,
            num_tokens=inputs.num_tokens,
            max_query_len=inputs.max_query_len,
            max_seq_len=inputs.max_seq_len,
            num_heads=variant.num_heads,
            num_kv_heads=variant.num_kv_heads,
            head_size=variant.head_size,
            window=variant.window,
            dtype=self._dtype,
            scratch=self._scratch,
            processors=num_processors(self._device),
        )
        for launch in launches:
            self._scratch.reserve(launch.num_parts, launch.part_size, for_capture=for_capture)
        return launches

    def run(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        variant: Variant,
        out: torch.Tensor,
        layer: LayerTensors = NO_TENSORS,
    ) -> None:
        """Attend; see AttentionBackend."""
        paged_attention(
            q, kv, *self._rows, out, scale=variant.scale, window=variant.window, soft_cap=variant.soft_cap,
            launches=self._launches[variant], scratch=self._scratch,
        )  # fmt: skip
