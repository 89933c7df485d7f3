"""The two halves of a decoder layer, around its attention, and a whole decoder on the CPU's paged attention.

Owns how the operators of a layer are joined: `pre_attention` is (residual addition,) RMS norm, qkv product, q and k
norm, rotation and store of K and V; `post_attention` is output product, residual addition, norm, gated MLP. Does not
know models, requests or backends. Invariant: a half's bits are those of the separate operators, its `*_composed`
reference implementation, which serves wherever the one native call does not.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from octavo.ops import native
from octavo.ops.activation import GATED_KINDS
from octavo.ops.attention import paged_attention
from octavo.ops.attention.mask_spec import MaskSpec
from octavo.ops.gemm import LinearWeight, linear
from octavo.ops.gemm.fused import activated_linear, linear_add_at_once, normed_linear
from octavo.ops.inputs.tensors import LogitTokens
from octavo.ops.norm import add_rms_norm, rms_norm
from octavo.ops.rope import Rotation, qk_norm_rope_store

_P, _I, _C, _F = native.PTR, native.I64, native.I32, native.F32
native.declare("octavo_enter_attention", [_P, _P, _P, _P, _P, _I, _P, _I, _P, _P, _I, _C])
native.declare("octavo_leave_attention", [_P, _P, _P, _I, _P, _P, _I, _C])
native.declare("octavo_decode", [_P, _P, _I, _P, _P, _P, _P, _P, _F, _P, _I, _P, _I, _P, _P, _C])


class _LayerHeader(ctypes.Structure):
    """`octavo::DecoderLayer` of decoder.cpp."""

    _fields_ = (
        *((name, _P) for name in ("input_norm", "attention_norm", "mlp_norm", "mlp_out_norm")),
        *((name, _P) for name in ("qkv", "output", "gate_up", "down", "net")),
        *((name, _P) for name in ("qkv_bias", "output_bias", "q_norm", "k_norm", "cos_sin")),
        *((name, _I) for name in ("num_heads", "num_kv_heads", "head_size", "rotary_size", "window")),
        *((name, _F) for name in ("eps", "head_eps", "scale", "soft_cap")),
        *((name, _C) for name in ("activation", "in_pairs", "gated")),
    )


class _CacheHeader(ctypes.Structure):
    """`octavo::LayerCache` of decoder.cpp."""

    _fields_ = (("kv", _P), ("block", _I), ("head", _I), ("token", _I), ("block_size", _I), ("group", _I))


class _RowsHeader(ctypes.Structure):
    """`octavo::GroupRows` of decoder.cpp."""

    _fields_ = (
        ("query_start", _P),
        ("seq_lens", _P),
        ("block_table", _P),
        ("slots", _P),
        ("num_rows", _I),
        ("table_row", _I),
    )


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PostOperands:
    """What a decoder layer computes with behind what mixes its tokens. Norm weights are [size] float32.

    Biases are [out] float32. Without `gate_up` and `down` the MLP is somebody else's, and `post_attention` gives what
    it takes.
    """

    eps: float
    output: LinearWeight
    output_bias: Tensor | None
    attention_norm: Tensor | None  # of what attention leaves, before it is added to the residual
    mlp_norm: Tensor
    gate_up: LinearWeight | None
    down: LinearWeight | None
    activation: str
    mlp_out_norm: Tensor | None  # of what an MLP in the operands leaves

    @functools.cached_property
    def header(self) -> _LayerHeader | None:
        """The C form; None where a weight has none."""
        return _post_header(self)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class DeltaLayerOperands(PostOperands):
    """What a whole decoder layer with a gated delta net computes with."""

    input_norm: Tensor
    mix: Callable[[Tensor], Tensor]  # of the normed tokens: what `output` takes, by operators of its own
    net: int  # the C form of the same, of one engine's layer; 0: there is none

    @functools.cached_property
    def header(self) -> _LayerHeader | None:
        """The C form; None where there is none."""
        header = _post_header(self) if self.net else None
        if header is not None:
            header.input_norm, header.net = self.input_norm.data_ptr(), self.net
        return header


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class DecoderLayerOperands(PostOperands):
    """What a whole decoder layer with attention computes with."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    input_norm: Tensor
    qkv: LinearWeight
    keys_values: LinearWeight | None  # the channels of qkv behind those of q; None: they cannot be had apart
    qkv_bias: Tensor | None
    q_norm: Tensor | None  # [head_size]
    k_norm: Tensor | None  # [head_size]
    head_eps: float  # of q_norm and k_norm
    cos_sin: Tensor  # rope_table
    scale: float  # of attention
    window: int = 0
    soft_cap: float = 0.0
    mix: Callable[[Tensor], Tensor] | None = None  # as DeltaLayerOperands', of gated attention: qkv ends with the gates
    key_scale: Tensor | None = None  # [kv_heads] float32, of a quantized cache
    value_scale: Tensor | None = None

    @property
    def in_pairs(self) -> bool:
        """Whether attention sums as the products do, in pairs."""
        return self.qkv.kind == "bfloat16 pairs"

    def rotation(self, positions: Tensor, slot_mapping: Tensor) -> Rotation:
        """What becomes of the projection of tokens."""
        return Rotation(
            positions=positions,
            cos_sin=self.cos_sin,
            q_norm=self.q_norm,
            k_norm=self.k_norm,
            eps=self.head_eps,
            slot_mapping=slot_mapping,
            key_scale=self.key_scale,
            value_scale=self.value_scale,
        )

    @functools.cached_property
    def without_queries(self) -> DecoderLayerOperands:
        """The same for K and V alone; itself where those cannot be had apart."""
        if self.keys_values is None:
            return self
        bias = None if self.qkv_bias is None else self.qkv_bias[-self.keys_values.n :]
        return dataclasses.replace(self, num_heads=0, qkv=self.keys_values, qkv_bias=bias, q_norm=None)

    @functools.cached_property
    def header(self) -> _LayerHeader | None:
        """The C form; None where a weight has none."""
        weights = {"qkv": self.qkv, "output": self.output, "gate_up": self.gate_up, "down": self.down}
        if any(weight is not None and not weight.header for weight in weights.values()):
            return None
        names = (
            "input_norm",
            "attention_norm",
            "mlp_norm",
            "mlp_out_norm",
            "qkv_bias",
            "output_bias",
            "q_norm",
            "k_norm",
            "cos_sin",
        )
        return _LayerHeader(
            **{name: _address(getattr(self, name)) for name in names},
            **{name: None if weight is None else weight.header for name, weight in weights.items()},
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            rotary_size=self.cos_sin.shape[1],
            window=self.window,
            eps=self.eps,
            head_eps=self.head_eps,
            scale=self.scale,
            soft_cap=self.soft_cap,
            activation=GATED_KINDS[self.activation],
            in_pairs=self.in_pairs,
            gated=self.mix is not None,
        )


def _post_header(layer: PostOperands) -> _LayerHeader | None:
    weights = {"output": layer.output, "gate_up": layer.gate_up, "down": layer.down}
    if any(weight is not None and not weight.header for weight in weights.values()):
        return None
    names = ("attention_norm", "mlp_norm", "mlp_out_norm", "output_bias")
    return _LayerHeader(
        **{name: _address(getattr(layer, name)) for name in names},
        **{name: None if weight is None else weight.header for name, weight in weights.items()},
        eps=layer.eps,
        activation=GATED_KINDS[layer.activation],
    )


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _cache_header(kv: Tensor, group: int) -> _CacheHeader:
    block, head, token, _ = kv.stride()
    return _CacheHeader(kv.data_ptr(), block, head, token, kv.shape[2], group)


def pre_attention(
    layer: DecoderLayerOperands,
    x: Tensor,
    residual: Tensor | None,
    positions: Tensor,
    kv: Tensor,
    slot_mapping: Tensor,
) -> tuple[Tensor, Tensor]:
    """(q [tokens, heads, head_size], residual [tokens, size]) of what the layer before left; K and V are stored.

    x, residual: [tokens, size], rows may be strided; residual None: x is also the residual. positions,
    kv, slot_mapping: as `qk_norm_rope_store`'s.
    """
    library = native.lib()
    code = native.DTYPE_CODES.get(x.dtype)
    if not library or code is None or layer.header is None or kv.dtype != x.dtype:
        return enter_attention_composed(layer, x, residual, positions, kv, slot_mapping)
    tokens = x.shape[0]
    q = torch.empty((tokens, layer.num_heads, layer.head_size), dtype=x.dtype)
    cache = ctypes.byref(_cache_header(kv, 0))
    slots, at = slot_mapping.data_ptr(), positions.data_ptr()
    total = x if residual is None else torch.empty(x.shape, dtype=x.dtype)
    before, stride = (None, 0) if residual is None else (residual.data_ptr(), residual.stride(0))
    library.octavo_enter_attention(
        ctypes.byref(layer.header),
        cache,
        slots,
        at,
        x.data_ptr(),
        x.stride(0),
        before,
        stride,
        total.data_ptr(),
        q.data_ptr(),
        tokens,
        code,
    )
    return q, total


def enter_attention_of_few(
    layer: DecoderLayerOperands,
    x: Tensor,
    residual: Tensor | None,
    positions: Tensor,
    kv: Tensor,
    slot_mapping: Tensor,
    few: Tensor,
) -> tuple[Tensor, Tensor]:
    """`pre_attention`, whose results are those of the tokens at `few` [S] int64 alone: K and V of all are stored.

    Of these few they are stored twice: the same bits.
    """
    _, total = pre_attention(layer.without_queries, x, residual, positions, kv, slot_mapping)
    x, positions, slot_mapping = (each.index_select(0, few) for each in (total, positions, slot_mapping))
    return pre_attention(layer, x, None, positions, kv, slot_mapping)


def post_attention(layer: PostOperands, attended: Tensor, residual: Tensor) -> tuple[Tensor, Tensor | None]:
    """(x, residual), both [tokens, size], of attended [tokens, heads, head_size] and the residual before it.

    x is what the layer leaves for the next one, residual None if x holds it already; without an MLP in the operands, x
    is what the MLP takes.
    """
    library = native.lib()
    code = native.DTYPE_CODES.get(attended.dtype)
    if not library or code is None or layer.header is None or not attended.is_contiguous():
        return leave_attention_composed(layer, attended, residual)
    x = torch.empty(residual.shape, dtype=attended.dtype)
    total = torch.empty(residual.shape, dtype=attended.dtype)
    library.octavo_leave_attention(
        ctypes.byref(layer.header),
        attended.data_ptr(),
        residual.data_ptr(),
        residual.stride(0),
        total.data_ptr(),
        x.data_ptr(),
        attended.shape[0],
        code,
    )
    return x, total


def enter_attention_composed(
    layer: DecoderLayerOperands,
    x: Tensor,
    residual: Tensor | None,
    positions: Tensor,
    kv: Tensor,
    slot_mapping: Tensor,
) -> tuple[Tensor, Tensor]:
    """`pre_attention` as separate operators, any device."""
    projected, total = project(layer, x, residual)
    q = qk_norm_rope_store(
        projected,
        positions,
        layer.cos_sin,
        layer.q_norm,
        layer.k_norm,
        layer.head_eps,
        layer.num_heads,
        layer.num_kv_heads,
        layer.head_size,
        kv,
        slot_mapping,
        key_scale=layer.key_scale,
        value_scale=layer.value_scale,
    )
    return q, total


def project(layer: DecoderLayerOperands, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    """(qkv [tokens, channels], residual): what `pre_attention` does up to the norm of q and k."""
    if residual is None:
        return normed_linear(x, layer.input_norm, layer.eps, layer.qkv, layer.qkv_bias), x
    normed, total = add_rms_norm(x, residual, layer.input_norm, layer.eps)
    return linear(normed, layer.qkv, layer.qkv_bias), total


def _mix_composed(
    layer: DeltaLayerOperands | DecoderLayerOperands,
    mix: Callable[[Tensor], Tensor],
    x: Tensor,
    residual: Tensor | None,
    few: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """(x, residual) behind a layer whose tokens `mix` mixes. few: the tokens that go on; None: all."""
    if residual is None:
        mixed, residual = mix(rms_norm(x, layer.input_norm, layer.eps)), x
    else:
        normed, residual = add_rms_norm(x, residual, layer.input_norm, layer.eps)
        mixed = mix(normed)
    if few is not None:
        mixed, residual = mixed.index_select(0, few), residual.index_select(0, few)
    return leave_attention_composed(layer, mixed, residual)


def leave_attention_composed(layer: PostOperands, attended: Tensor, residual: Tensor) -> tuple[Tensor, Tensor | None]:
    """`post_attention` as separate operators, any device."""
    x, total, normed = attended.view(attended.shape[0], -1), None, None
    if layer.attention_norm is None:
        total = linear_add_at_once(x, layer.output, layer.output_bias, residual)
    if total is None:
        x = linear(x, layer.output, layer.output_bias)
        if layer.attention_norm is not None:
            x = rms_norm(x, layer.attention_norm, layer.eps)
        normed, total = add_rms_norm(x, residual, layer.mlp_norm, layer.eps)
    if layer.gate_up is None or layer.down is None:
        return rms_norm(total, layer.mlp_norm, layer.eps) if normed is None else normed, total
    if normed is None:
        gated = normed_linear(total, layer.mlp_norm, layer.eps, layer.gate_up, activation=layer.activation)
    else:
        gated = activated_linear(normed, layer.gate_up, layer.activation)
    if layer.mlp_out_norm is not None:
        return rms_norm(linear(gated, layer.down), layer.mlp_out_norm, layer.eps), total
    whole = linear_add_at_once(gated, layer.down, None, total)
    return (linear(gated, layer.down), total) if whole is None else (whole, None)


def last_norm(x: Tensor, residual: Tensor | None, norm: Tensor, eps: float) -> Tensor:
    """The norm [tokens, size] of what a last layer left."""
    return rms_norm(x, norm, eps) if residual is None else add_rms_norm(x, residual, norm, eps)[0]


class PagedRows(Protocol):
    """A step's rows in one cache group: `paged_attention`'s tensors, padding rows allowed, and the tokens' slots."""

    num_rows: int
    query_start: Tensor
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor


def no_step() -> int:
    """Of a decoder whose layers keep no states."""
    return 0


class BoundDecoder:
    """A decoder and what it keeps: every layer with `paged_attention` or a delta net, then a last norm.

    One native call where that can serve.
    """

    def __init__(
        self,
        layers: Sequence[DecoderLayerOperands | DeltaLayerOperands],
        norm: Tensor,
        eps: float,
        caches: Sequence[Tensor],
        tables: Sequence[int],
        step: Callable[[], int] = no_step,
    ) -> None:
        """`norm`: [size] float32; `caches[i]`: layer i's, as `paged_attention`'s, of block table `tables[i]`.

        Of a layer that attends, that is. step: gives the C form of a step's rows for layers with states.
        """
        self._layers, self._norm, self._eps = layers, norm, eps
        self._kv, self._groups, self._step = caches, tables, step
        headers = [layer.header for layer in layers if layer.header is not None and layer.gate_up is not None]
        attends = [isinstance(layer, DecoderLayerOperands) for layer in layers]
        dtypes = {kv.dtype for kv, own in zip(caches, attends, strict=True) if own}
        self._dtype = dtypes.pop() if len(dtypes) == 1 and len(headers) == len(layers) else None
        if self._dtype is not None:
            last = layers[-1]
            keys = last.without_queries.header if isinstance(last, DecoderLayerOperands) else None
            self._headers = (_LayerHeader * len(layers))(*headers)
            self._last_keys = ctypes.byref(keys or headers[-1])
            facts = zip(caches, tables, attends, strict=True)
            cache_headers = [_cache_header(kv, table) if own else _CacheHeader() for kv, table, own in facts]
            self._caches = (_CacheHeader * len(layers))(*cache_headers)
            self._rows = (_RowsHeader * (max(tables) + 1))()

    def __call__(
        self, x: Tensor, positions: Tensor, rows: Sequence[PagedRows], last: LogitTokens | None = None
    ) -> Tensor:
        """x [tokens, size] contiguous, positions [tokens] int64, rows per cache group -> [tokens, size].

        last: these alone attend in the last layer and go on, and the result is theirs, [L, size].
        """
        if last is not None and last.max_per_row > 1:  # the native operator knows one a row: it computes all
            return self(x, positions, rows).index_select(0, last.tokens)
        library = native.lib()
        if not library or x.dtype != self._dtype or x.dtype not in native.DTYPE_CODES:
            return self.composed(x, positions, rows, last)
        for header, group in zip(self._rows, rows[: len(self._rows)], strict=True):  # others are other layers'
            header.query_start, header.seq_lens = group.query_start.data_ptr(), group.seq_lens.data_ptr()
            header.block_table, header.slots = group.block_table.data_ptr(), group.slot_mapping.data_ptr()
            header.num_rows, header.table_row = group.num_rows, group.block_table.stride(0)
        out = torch.empty_like(x) if last is None else x.new_empty(len(last.tokens), x.shape[1])
        few, count = (None, 0) if last is None else (last.tokens.data_ptr(), len(last.tokens))
        library.octavo_decode(
            self._headers,
            self._caches,
            len(self._layers),
            self._rows,
            self._step(),
            positions.data_ptr(),
            x.data_ptr(),
            self._norm.data_ptr(),
            self._eps,
            out.data_ptr(),
            x.shape[0],
            few,
            count,
            None if last is None else last.query_start.data_ptr(),
            self._last_keys,
            native.DTYPE_CODES[x.dtype],
        )
        return out

    def composed(
        self, x: Tensor, positions: Tensor, rows: Sequence[PagedRows], last: LogitTokens | None = None
    ) -> Tensor:
        """The same as separate operators."""
        residual: Tensor | None = None
        for layer, kv, index in zip(self._layers, self._kv, self._groups, strict=True):
            if layer.mix is not None:
                few = last.tokens if last is not None and layer is self._layers[-1] else None
                x, residual = _mix_composed(layer, layer.mix, x, residual, few)
                continue
            assert isinstance(layer, DecoderLayerOperands), "what does not attend mixes by itself"
            group = rows[index]
            q, residual = enter_attention_composed(layer, x, residual, positions, kv, group.slot_mapping)
            start, count = group.query_start, group.num_rows
            if last is not None and layer is self._layers[-1]:
                q, residual, start = q[last.tokens], residual[last.tokens], last.query_start
            attended = torch.empty_like(q)
            paged_attention(
                q,
                kv,
                start[: count + 1],
                group.seq_lens[:count],
                group.block_table[:count],
                attended,
                mask_spec=MaskSpec(layer.scale, layer.window, soft_cap=layer.soft_cap),
                key_scale=layer.key_scale,
                value_scale=layer.value_scale,
                in_pairs=layer.in_pairs,
            )
            x, residual = leave_attention_composed(layer, attended, residual)
        return last_norm(x, residual, self._norm, self._eps)
