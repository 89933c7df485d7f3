"""Attention over the paged cache: one operator for prefill, decode and verification.

Owns the canonical order of the sums and the checks of its inputs. Does not know requests, layers or plans: a row has
queries, a length and a line of the block table. Invariant: the bits of a (query, head) depend on its own q and on its
own K and V in logical order, never on the batch, the chunk, the block size, where blocks lie, or the thread count.

The canonical order (native code; `paged_attention_eager` is independent of it): absolute tiles of TILE tokens from
position 0 inside absolute leaves of LEAF tokens. Within a leaf an online softmax over the tiles in ascending order;
leaves are folded in ascending order. A dot product is 16 lane sums, then a fixed tree. All in float32. What a query
does not see is never read for it and takes part in no sum, so a tile that is seen in part equals any other way to see
that part.
"""

from __future__ import annotations

import torch

from octavo.ops import native
from octavo.ops.native import F32, I32, I64, PTR

TILE = 32  # tokens per step of the online softmax; the native source holds the same number
LEAF = 512  # tokens per independent partial result; a multiple of TILE

native.declare("octavo_paged_attention", [PTR] * 6 + [I64] * 15 + [F32] * 2 + [I32])


def paged_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    out: torch.Tensor,
    *,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    value_size: int = 0,
) -> None:
    """Causal attention of each row's queries, the last of its `seq_lens[row]` tokens, written to `out`.

    q, out: [tokens, heads, head_size] float32 or bfloat16; kv: [blocks, kv_heads, block_size, 2 * head_size] of the
    same dtype, K then V; q, out and kv have any strides but a contiguous last axis. query_start: [rows + 1], seq_lens:
    [rows], block_table: [rows, width], all int32. Tokens of a row with seq_len 0 become 0; tokens beyond
    `query_start[-1]` stay as they are. window: tokens that a query sees, itself included, 0 for all.
    soft_cap: scores become cap * tanh(score / cap), 0 for none.
    value_size: latent attention: kv is [blocks, 1, block_size, head_size], V is K's first `value_size` channels and
    out [tokens, heads, value_size]; 0: V stands beside K.
    """
    library = native.lib()
    if not library or q.dtype not in native.DTYPE_CODES:
        paged_attention_eager(
            q,
            kv,
            query_start,
            seq_lens,
            block_table,
            out,
            scale=scale,
            window=window,
            soft_cap=soft_cap,
            value_size=value_size,
        )
        return
    _, num_heads, head_size = q.shape
    _, num_kv_heads, block_size, _ = kv.shape
    q_token, q_head, _ = q.stride()
    out_token, out_head, _ = out.stride()
    kv_block, kv_head, kv_token, _ = kv.stride()
    assert kv.dtype == q.dtype == out.dtype, "queries, cache and output share a dtype"
    library.octavo_paged_attention(
        q.data_ptr(), out.data_ptr(), kv.data_ptr(), query_start.data_ptr(), seq_lens.data_ptr(),
        block_table.data_ptr(), q_token, q_head, out_token, out_head, kv_block, kv_head, kv_token,
        block_table.stride(0), seq_lens.shape[0], num_heads, num_kv_heads, head_size, block_size, window,
        value_size, scale, soft_cap, native.DTYPE_CODES[q.dtype],
    )  # fmt: skip


def paged_attention_eager(
    q: torch.Tensor,
    kv: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    out: torch.Tensor,
    *,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    value_size: int = 0,
) -> None:
    """The twin of `paged_attention` in plain torch: per row a gather of its K and V, then softmax attention.

    value_size: latent attention: kv [blocks, 1, block_size, head_size], V is K's first `value_size` channels; 0: none.
    """
    num_kv_heads, block_size = kv.shape[1], kv.shape[2]
    head_size = q.shape[2]
    starts = query_start.tolist()
    for row, seq_len in enumerate(seq_lens.tolist()):
        begin, end = starts[row], starts[row + 1]
        if begin == end:
            continue
        if seq_len == 0:
            out[begin:end] = 0
            continue
        first = max(0, seq_len - (end - begin) + 1 - window) if window else 0  # what the first query sees
        first_block, last_block = first // block_size, -(-seq_len // block_size)
        blocks = kv[block_table[row, first_block:last_block].long()]  # [blocks, kv_heads, block, 2 * head_size]
        tokens = blocks.transpose(0, 1).flatten(1, 2)[:, first - first_block * block_size :]
        tokens = tokens[:, : seq_len - first].float()
        keys, values = tokens[..., :head_size], tokens[..., :value_size] if value_size else tokens[..., head_size:]
        queries = q[begin:end].float().unflatten(1, (num_kv_heads, -1))  # [tokens, kv_heads, group, head_size]
        scores = torch.einsum("tkgd,ksd->kgts", queries, keys) * scale
        if soft_cap:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        position = torch.arange(seq_len - (end - begin), seq_len, device=q.device)[:, None]
        column = torch.arange(first, seq_len, device=q.device)[None, :]
        hidden = column > position
        if window:
            hidden |= column <= position - window
        weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
        result = torch.einsum("kgts,ksd->tkgd", weights, values)
        out[begin:end] = result.flatten(1, 2).to(out.dtype)
