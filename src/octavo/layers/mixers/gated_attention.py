"""Attention whose result a gate weights: of a head's own size, beside its query; or one number for a whole head.

Owns the way of the gate around `Attention`, which does the rest. Where gates are of a head's size, checkpoints store a
head's query and gate beside each other: rows are put into the order query heads, gates, keys, values once, when they
are loaded. Does not know blocks, rows or backends. Invariant: as `Attention`'s.
"""

from __future__ import annotations

import torch

from octavo.cache.specs import AttentionSpec
from octavo.checkpoint.arch import Arch
from octavo.layers.attention import Attention, RotaryTable
from octavo.layers.linear import Linear
from octavo.ops.activation import gated_by
from octavo.ops.gemm import LinearWeight
from octavo.ops.gemm.fused import linear_of_few


class _GatedLinear(Linear):
    """Queries with their gates, keys and values in one product; the gates come last."""

    keys_values: LinearWeight | None  # these alone, in the same memory, where they can be had apart; set by finalize

    def __init__(self, size: int, spec: AttentionSpec, dtype: torch.dtype, *, bias: bool) -> None:
        """`size`: of the hidden state."""
        q_size, kv_size = spec.num_heads * spec.head_size, spec.num_kv_heads * spec.head_size
        super().__init__(size, {"q": 2 * q_size, "k": kv_size, "v": kv_size}, dtype, bias=bias)
        self._heads = spec.num_heads, 2, spec.head_size
        self._num_gated = 2 * q_size

    def finalize(self, quantization: str | None) -> None:
        """Put all queries first and all gates last, then pack."""
        for parameter in self.parameters(recurse=False):
            queries, gates = parameter[: self._num_gated].unflatten(0, self._heads).unbind(1)
            parameter.copy_(torch.cat((queries.flatten(0, 1), parameter[self._num_gated :], gates.flatten(0, 1))))
        super().finalize(quantization)
        self.keys_values = self.packed.behind(self._num_gated // 2, self._rows - self._num_gated)


class GatedAttention(Attention):
    """Attention of layer number `index`, with norms on the heads of q and k; a Layer of one line."""

    def __init__(
        self, index: int, spec: AttentionSpec, rotary: RotaryTable, arch: Arch, dtype: torch.dtype, norm_offset: float
    ) -> None:
        """`norm_offset`: as RMSNorm's."""
        super().__init__(index, spec, rotary, arch, dtype, qk_norm=True, norm_offset=norm_offset)
        self.qkv = _GatedLinear(arch.hidden_size, spec, dtype, bias=arch.attention_bias)
        self._size = spec.num_heads * spec.head_size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, size] -> [tokens, heads * head_size], which `out` takes."""
        both = self.qkv.forward(x)
        seen = self.attend(self.rope_and_store(both[:, : -self._size]))
        return gated_by(seen, both[:, -self._size :], "sigmoid")

    def store(self, x: torch.Tensor) -> None:
        """See Attention. Neither queries nor gates are computed, where keys and values can be had apart."""
        assert isinstance(self.qkv, _GatedLinear), "as it was made"
        apart, bias = self.qkv.keys_values, self.qkv.bias
        if apart is None:
            self.rope_and_store(self.qkv.forward(x)[:, : -self._size])
            return
        bias = None if bias is None else bias[self._size : self._size + apart.n]
        self._rope_and_store(linear_of_few(x, apart, bias), 0)

    @property
    def out(self) -> Linear:
        """The last product, by the name that other mixers give it."""
        return self.output


class HeadGatedAttention(Attention):
    """Attention of layer number `index`, with norms on the heads of q and k; a Layer of one line.

    A sigmoid of the hidden state weights each head's result, if `gated`.
    """

    def __init__(
        self, index: int, spec: AttentionSpec, rotary: RotaryTable, arch: Arch, dtype: torch.dtype, *, gated: bool
    ) -> None:
        """As Attention's."""
        super().__init__(index, spec, rotary, arch, dtype, qk_norm=True)
        self.gates = Linear(arch.hidden_size, spec.num_heads, dtype) if gated else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, size] -> [tokens, heads * head_size], which `out` takes."""
        seen = self.attend(self.rope_and_store(self.qkv.forward(x)))
        if self.gates is None:
            return seen
        return self.weigh(seen, self.gates.forward(x).repeat_interleave(self.spec.head_size, 1))

    def weigh(self, seen: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        """seen times a sigmoid of gates, both [tokens, heads * head_size]."""
        return gated_by(seen, gates, "sigmoid")

    @property
    def out(self) -> Linear:
        """The last product, by the name that other mixers give it."""
        return self.output
