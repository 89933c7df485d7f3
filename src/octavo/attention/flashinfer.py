"""The FlashInfer backend: `flashinfer-python`'s paged prefill and decode over the one cache.

Owns the wrappers, one per spec, and the page lists of a step; FlashInfer does the work. FlashInfer plans on the
host, so `prepare` waits for the device once per step and cannot be captured in a graph. The cache is shown to it as two
views of the same bytes, K and V, of pages [heads, tokens, channels] with any strides: both layouts, no copy.
Not reproducible: FlashInfer splits rows by the batch.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch

from octavo.attention.base import NO_SETUP, AttentionInputs, Capability, LayerTensors, Setup
from octavo.attention.frame import BackendFrame
from octavo.cache.specs import AttentionSpec

_WORKSPACE_BYTES = 256 << 20
_KERNELS = ("fa2", "fa3", "auto")  # of prefill; decode has the first


def _load() -> Any:
    try:
        return importlib.import_module("flashinfer")
    except ImportError as error:
        raise ValueError(
            f"attention backend 'flashinfer' needs the package flashinfer-python ({error}): install it, or set "
            "attention_backend='paged'"
        ) from error


class FlashInferBackend(BackendFrame):
    """An AttentionBackend for CUDA; kernel blocks of 16, 32 or 64 tokens."""

    name = "flashinfer"
    capability = Capability(
        devices=("cuda",),
        dtypes=(torch.bfloat16, torch.float16),
        head_sizes=(64, 128, 256),
        kernel_block_sizes=(16, 32, 64),
        reproducible=False,
    )

    def __init__(
        self, specs: Sequence[AttentionSpec], dtype: torch.dtype, device: torch.device, setup: Setup = NO_SETUP
    ) -> None:
        """See BackendFrame. Raises ValueError where the package is missing, too."""
        super().__init__(specs, dtype, device, setup)
        library, self._dtype = _load(), dtype
        kernels = setup.options.get("flashinfer_kernels", "fa2")
        if kernels not in _KERNELS:
            raise ValueError(
                f"attention_config flashinfer_kernels must be one of {', '.join(_KERNELS)}, got {kernels!r}: fa3 are "
                "those for Hopper, auto leaves the choice to FlashInfer"
            )
        workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._prefill = {
            spec: library.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND", backend=kernels) for spec in specs
        }
        self._decode = {
            spec: library.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=True) for spec in specs
        }

    def prepare(self, inputs: AttentionInputs, *, for_capture: bool = False) -> None:
        """Plan on the host, from lengths that are fetched from the device. Raises ValueError for a graph."""
        if for_capture:
            raise ValueError("attention backend 'flashinfer' plans on the host, not in a graph: set enforce_eager=True")
        super().prepare(inputs, for_capture=for_capture)
        rows = inputs.num_rows
        lengths = torch.cat([inputs.seq_lens[:rows], inputs.query_start[: rows + 1]]).cpu()  # the one wait
        seq_lens, query_start = lengths.split([rows, rows + 1])
        pages = (seq_lens + inputs.block_size - 1) // inputs.block_size
        columns = torch.arange(inputs.block_table.shape[1], device=inputs.block_table.device)
        indices = inputs.block_table[:rows][columns < pages.to(columns.device)[:, None]]
        page_start = torch.cat([pages.new_zeros(1), pages.cumsum(0)]).to(torch.int32)
        last_page = torch.where(seq_lens > 0, (seq_lens - 1) % inputs.block_size + 1, 0).to(torch.int32)
        self._is_decode, self._num_queries = bool((query_start.diff() == 1).all()), int(query_start[-1])
        for spec in self._prefill:
            heads = (spec.num_heads, spec.num_kv_heads, spec.head_size, inputs.block_size)
            words = {
                "sm_scale": spec.scale,
                "window_left": spec.window - 1,
                "logits_soft_cap": spec.soft_cap,
                "q_data_type": self._dtype,
                "kv_data_type": self._dtype,
            }
            if self._is_decode:
                self._decode[spec].plan(page_start, indices, last_page, *heads, **words)
            else:
                self._prefill[spec].plan(query_start, page_start, indices, last_page, *heads, causal=True, **words)

    def attend(
        self, q: torch.Tensor, kv: torch.Tensor, spec: AttentionSpec, out: torch.Tensor, layer: LayerTensors
    ) -> None:
        """See BackendFrame."""
        tokens = self._num_queries  # FlashInfer refuses those of padding, which no row has
        wrapper = (self._decode if self._is_decode else self._prefill)[spec]
        wrapper.run(q[:tokens], (kv[..., : spec.head_size], kv[..., spec.head_size :]), out=out[:tokens])
