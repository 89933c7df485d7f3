"""Attention over the paged cache: one operator for prefill, decode and verification.

Owns the canonical order of the sums and the checks of its inputs. Does not know requests, layers or plans: a row has
queries, a length and a line of the block table. Invariant: the bits of a (query, head) depend on its own q and on its
own K and V in logical order, never on the batch, the chunk, the block size, where blocks lie, or the thread count.

The canonical order (native code; `paged_attention_eager` has one of its own): absolute tiles of TILE tokens from
position 0 inside absolute leaves of LEAF tokens. Within a leaf an online softmax over the tiles in ascending order;
leaves are folded in ascending order. A dot product is 16 lane sums, then a fixed tree. All in float32. What a query
does not see is never read for it and takes part in no sum, so a tile that is seen in part equals any other way to see
that part.

`in_pairs`, of bfloat16 over a bfloat16 cache: a dot product is the chain of pairs of `octavo.ops.gemm` over the
channels. The softmax's weights are rounded to bfloat16 before they are summed. Values are added in that chain too, by
pairs of tokens (2t, 2t + 1), where a token that is not seen counts as weight 0 and value 0.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from octavo.ops import native
from octavo.ops.attention.mask_spec import MaskSpec
from octavo.ops.native import F32, I32, I64, PTR

TILE = 32  # tokens per step of the online softmax; the native source holds the same number
_NARROW = (torch.bfloat16, torch.float8_e4m3fn, torch.int8)  # caches that native code widens
LEAF = 512  # tokens per independent partial result; a multiple of TILE
# (queries, keys) of the reference implementation's tiles: on a CPU, and where launches cost more than what they compute
_TILE, _LARGE_TILE = (16, 256), (256, 2048)

# (scores [kv_heads, group, queries, keys], row, positions [queries], keys' positions [keys]) -> scores, -inf if hidden
ChangeScores = Callable[[torch.Tensor, int, torch.Tensor, torch.Tensor], torch.Tensor]

native.declare("octavo_paged_attention", [PTR] * 6 + [I64] * 15 + [F32] * 2 + [PTR, I32])


class _Extras(ctypes.Structure):
    """`octavo::AttentionExtras` of operators.h."""

    _fields_ = (
        ("chunk", I64),
        *((name, PTR) for name in ("alibi", "sinks", "key_scale", "value_scale")),
        ("causal", I32),
        ("kv_dtype", I32),
        ("in_pairs", I32),
    )


@functools.cache
def _slopes(alibi_slopes: tuple[float, ...]) -> torch.Tensor:
    """As a tensor that stays."""
    return torch.tensor(alibi_slopes, dtype=torch.float32)


def paged_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    out: torch.Tensor,
    *,
    mask_spec: MaskSpec,
    value_size: int = 0,
    alibi_slopes: tuple[float, ...] = (),
    sinks: torch.Tensor | None = None,
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
    in_pairs: bool = False,
) -> None:
    """Attention of each row's queries, the last of its `seq_lens[row]` tokens, written to `out`.

    q, out: [tokens, heads, head_size] float32 or bfloat16; kv: [blocks, kv_heads, block_size, 2 * head_size], K then V,
    of the same dtype, bfloat16, float8_e4m3fn or int8; q, out and kv have any strides but a contiguous last axis.
    query_start: [rows + 1], seq_lens: [rows], block_table: [rows, width], all int32. Tokens of a row with seq_len 0
    become 0; tokens beyond `query_start[-1]` stay as they are.

    alibi_slopes, one per head, add slope * (key - query) to the capped score. sinks: [heads] float32, a logit that
    joins the softmax and has no value. value_size: latent attention: kv is [blocks, 1, block_size, head_size], V is
    K's first `value_size` channels, out [tokens, heads, value_size]. key_scale, value_scale: [kv_heads] float32, what a
    quantized cache's K and V are multiplied with. in_pairs: sum as a processor that multiplies pairs does, where q and
    kv are bfloat16; the reference implementation does not know it.
    """
    library = native.lib()
    if not library or q.dtype not in native.DTYPE_CODES or kv.dtype not in {q.dtype, *_NARROW}:
        paged_attention_eager(
            q,
            kv,
            query_start,
            seq_lens,
            block_table,
            out,
            mask_spec=mask_spec,
            value_size=value_size,
            alibi_slopes=alibi_slopes,
            sinks=sinks,
            key_scale=key_scale,
            value_scale=value_scale,
        )
        return
    _, num_heads, head_size = q.shape
    _, num_kv_heads, block_size, _ = kv.shape
    assert q.dtype == out.dtype, "queries and output share a dtype"
    extras = None
    if in_pairs or mask_spec.chunk or alibi_slopes or sinks is not None or not mask_spec.causal or kv.dtype != q.dtype:
        tensors = (sinks, key_scale, value_scale)
        extras = ctypes.byref(_extras(mask_spec, alibi_slopes, tensors, kv.dtype, in_pairs))
    library.octavo_paged_attention(
        q.data_ptr(), out.data_ptr(), kv.data_ptr(), query_start.data_ptr(), seq_lens.data_ptr(),
        block_table.data_ptr(), *q.stride()[:2], *out.stride()[:2], *kv.stride()[:3],
        block_table.stride(0), seq_lens.shape[0], num_heads, num_kv_heads, head_size, block_size, mask_spec.window,
        value_size, mask_spec.scale, mask_spec.soft_cap, extras, native.DTYPE_CODES[q.dtype],
    )  # fmt: skip


def _extras(
    mask_spec: MaskSpec,
    alibi_slopes: tuple[float, ...],
    tensors: tuple[torch.Tensor | None, ...],
    dtype: torch.dtype,
    in_pairs: bool,
) -> _Extras:
    """What most calls go without; tensors: sinks, scales of K and of V; dtype: of the cache."""
    return _Extras(
        mask_spec.chunk,
        _slopes(alibi_slopes).data_ptr() if alibi_slopes else None,
        *(None if each is None else each.data_ptr() for each in tensors),
        mask_spec.causal,
        native.CACHE_CODES[dtype],
        in_pairs,
    )


def paged_attention_eager(
    q: torch.Tensor,
    kv: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    out: torch.Tensor,
    *,
    mask_spec: MaskSpec,
    value_size: int = 0,
    alibi_slopes: Sequence[float] = (),
    sinks: torch.Tensor | None = None,
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
    change: ChangeScores | None = None,
) -> None:
    """The reference implementation of `paged_attention`: per row a gather of K and V, then softmax attention in torch.

    Any float dtypes; kv may be float8_e4m3fn or int8 as well. change: what else is done to the scores. A query that
    sees nothing gets 0. Products and sums are of absolute tiles of one shape, whatever the chunk: where a library chose
    by shape, bits would depend on it. Hidden keys weigh 0, which leaves every sum as it is.
    """
    starts, bias = query_start.tolist(), _Bias(mask_spec, tuple(alibi_slopes))
    num_queries, num_keys = _TILE if q.device.type == "cpu" else _LARGE_TILE
    for row, seq_len in enumerate(seq_lens.tolist()):
        begin, end = starts[row], starts[row + 1]
        if seq_len == 0:
            out[begin:end] = 0
        if begin == end or seq_len == 0:
            continue
        start = seq_len - (end - begin)  # position of the first query
        first = bias.first_seen(start)
        tokens = _gather(kv, block_table[row], first, seq_len, num_keys)
        keys, values = (
            part.split(num_keys, dim=1) for part in _split(tokens, q.shape[2], value_size, key_scale, value_scale)
        )
        for tile in range(start // num_queries * num_queries, seq_len, num_queries):
            low, high = max(tile, start), min(tile + num_queries, seq_len)
            mine = slice(begin + low - start, begin + high - start)
            queries = q.new_zeros((num_queries, *q.shape[1:]), dtype=torch.float32)
            queries[low - tile : high - tile] = q[mine]
            position = torch.arange(tile, tile + num_queries, device=q.device).clamp(low, high - 1)
            scores: list[torch.Tensor] = []
            for at in range(first // num_keys * num_keys, high if mask_spec.causal else seq_len, num_keys):
                column = torch.arange(at, at + num_keys, device=q.device)
                known = column.clamp(first, seq_len - 1)
                part = bias(queries, keys[len(scores)], position[:, None], known[None, :])
                part = part if change is None else change(part, row, position, known)
                scores.append(part.masked_fill(column != known, float("-inf")))
            out[mine] = _average(scores, values, sinks)[low - tile : high - tile].to(out.dtype)


class _Bias(NamedTuple):
    """Scores, and what of them depends on the positions of query and key alone."""

    mask_spec: MaskSpec
    alibi_slopes: tuple[float, ...]

    def first_seen(self, position: int) -> int:
        """The first key that a query sees."""
        first = max(0, position + 1 - self.mask_spec.window) if self.mask_spec.window else 0
        return max(first, position // self.mask_spec.chunk * self.mask_spec.chunk) if self.mask_spec.chunk else first

    def __call__(
        self, queries: torch.Tensor, keys: torch.Tensor, position: torch.Tensor, column: torch.Tensor
    ) -> torch.Tensor:
        """Scores [kv_heads, group, queries, keys], -inf where hidden.

        queries: [queries, heads, head_size], at position [queries, 1]; keys: [kv_heads, keys, head_size], at column
        [1, keys].
        """
        groups = queries.unflatten(1, (len(keys), -1))  # [queries, kv_heads, group, head_size]
        scores = torch.einsum("tkgd,ksd->kgts", groups, keys) * self.mask_spec.scale
        if self.mask_spec.soft_cap:
            scores = self.mask_spec.soft_cap * torch.tanh(scores / self.mask_spec.soft_cap)
        if self.alibi_slopes:
            slopes = torch.tensor(self.alibi_slopes, device=scores.device).view(*scores.shape[:2], 1, 1)
            scores = scores + slopes * (column - position)
        hidden = column > position if self.mask_spec.causal else torch.zeros_like(column > position)
        if self.mask_spec.window:
            hidden = (
                hidden | (column <= position - self.mask_spec.window) | (column >= position + self.mask_spec.window)
            )
        if self.mask_spec.chunk:
            hidden = hidden | (column // self.mask_spec.chunk != position // self.mask_spec.chunk)
        return scores.masked_fill(hidden, float("-inf"))


def _gather(kv: torch.Tensor, table: torch.Tensor, first: int, last: int, num_keys: int) -> torch.Tensor:
    """Tokens first .. last - 1 of a block table's line, in whole tiles: [kv_heads, tokens, channels] float32.

    What else the tiles would have is 0: nobody may have written it.
    """
    raw = kv.view(torch.uint8) if kv.dtype == torch.float8_e4m3fn else kv  # torch indexes no float8
    size, base = kv.shape[2], first // num_keys * num_keys
    blocks = raw[table[first // size : -(-last // size)].long()]
    found = blocks.view(kv.dtype).float().transpose(0, 1).flatten(1, 2)[:, first % size :]
    tokens = found.new_zeros((len(found), -(-(last - base) // num_keys) * num_keys, found.shape[2]))
    tokens[:, first - base : last - base] = found[:, : last - first]
    return tokens


def _split(
    tokens: torch.Tensor,
    head_size: int,
    value_size: int,
    key_scale: torch.Tensor | None,
    value_scale: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V, scaled, of tokens [kv_heads, keys, channels]."""
    keys = tokens[..., :head_size]
    if key_scale is not None:
        keys = keys * key_scale[:, None, None]
    values = keys[..., :value_size] if value_size else tokens[..., head_size:]
    if value_scale is not None and not value_size:
        values = values * value_scale[:, None, None]
    return keys, values


def _average(
    scores: Sequence[torch.Tensor], values: Sequence[torch.Tensor], sinks: torch.Tensor | None
) -> torch.Tensor:
    """The values weighted by the softmax over all keys: [queries, heads, channels]. A sink takes its share of the sum.

    scores: [kv_heads, group, queries, keys] and values: [kv_heads, keys, channels], tiles of keys in order.
    """
    best = torch.stack([part.amax(dim=-1) for part in scores]).amax(dim=0)  # [kv_heads, group, queries]
    sink = best.new_tensor(float("-inf")) if sinks is None else sinks.float().view(*best.shape[:2], 1)
    best = torch.maximum(best, sink)
    best = best.masked_fill(best == float("-inf"), 0.0)
    total = torch.exp(sink - best)
    result = torch.zeros((), device=best.device)
    for part, own in zip(scores, values[: len(scores)], strict=True):
        weights = torch.exp(part - best[..., None])
        total = total + weights.sum(dim=-1)
        result = result + torch.einsum("kgts,ksd->tkgd", weights, own)
    total = total.masked_fill(total == 0.0, 1.0)  # of a query that sees nothing
    return (result / total.permute(2, 0, 1)[..., None]).flatten(1, 2)
