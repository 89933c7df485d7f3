"""The fast CPU backend: native attention over the paged cache.

Owns nothing; `octavo.ops.attention.paged_attention` does the work, one native call per layer.
Invariant: a query's bits depend on its own row only, whatever the batch, the chunk, the block size or the thread count
(the canonical order is stated there).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from octavo.attention.base import NO_SETUP, Capability, LayerTensors, Setup, mask_spec_of
from octavo.attention.frame import BackendFrame
from octavo.cache.specs import AttentionSpec
from octavo.ops import native
from octavo.ops.attention import paged_attention


class CpuBackend(BackendFrame):
    """An AttentionBackend for float32 and bfloat16 on CPU that takes every AttentionSpec and block size."""

    name = "cpu"
    capability = Capability(
        devices=("cpu",),
        dtypes=(torch.float32, torch.bfloat16),
        chunk=True,
        alibi=True,
        sinks=True,
        non_causal=True,
        latent=True,
        cache_dtypes=(torch.bfloat16, torch.float8_e4m3fn, torch.int8),
        paged_operator=True,
    )

    def __init__(
        self, specs: Sequence[AttentionSpec], dtype: torch.dtype, device: torch.device, setup: Setup = NO_SETUP
    ) -> None:
        """See BackendFrame. Raises ValueError where the native library is not built, too."""
        super().__init__(specs, dtype, device, setup)
        if not native.available():
            raise ValueError(
                "attention backend 'cpu' needs the native library, which is not built or is switched off: build it "
                "with `python setup.py build_ext --inplace`, or set attention_backend='reference'"
            )
        self._in_pairs = native.multiplies_in_pairs()  # as the weights were packed

    def attend(
        self, q: torch.Tensor, kv: torch.Tensor, spec: AttentionSpec, out: torch.Tensor, layer: LayerTensors
    ) -> None:
        """See BackendFrame."""
        paged_attention(
            q,
            kv,
            *self.inputs.live,
            out,
            mask_spec=mask_spec_of(spec),
            value_size=spec.value_size,
            alibi_slopes=spec.alibi_slopes,
            sinks=layer.sinks,
            key_scale=layer.key_scale,
            value_scale=layer.value_scale,
            in_pairs=self._in_pairs,
        )
