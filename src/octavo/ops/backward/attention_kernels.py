"""The way back through attention on a GPU: kernels over tiles of queries and of keys. `attention` launches them.

Owns their arithmetic (FlashAttention's, of Dao 2023): scores are computed again, tile by tile, and turned into weights
by the logarithm of their sum. A program owns its results whole: those of a tile of queries, or of a tile of keys and of
all heads that share it. So nothing is added up by atomics, and gradients are the same from run to run. Scores, sums and
results are float32; weights and their gradients are rounded to the tensors' type before they are multiplied.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, assignment"
from __future__ import annotations

import triton
import triton.language as tl

from octavo.ops.compile.launch import launched

EVERYTHING, WINDOW, CHUNK = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # what a query sees
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _scores(
    raw,
    query,
    key,
    length,
    reach,
    slope,
    score,
    cap,
    SEES: tl.constexpr,
    CAUSAL: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    SLOPES: tl.constexpr,
    MASK: tl.constexpr,
):
    """(scores times log2(e), -inf where hidden; the share of its cap that each score has) of raw products.

    query, key: positions, whose shapes broadcast to that of `raw`; score, cap: see `backward_of_queries`.
    """
    share = raw
    if SOFT_CAP:
        share = 1.0 - 2.0 / (tl.exp2(raw * cap) + 1.0)  # tanh
    value = share * score
    if SLOPES:
        value += slope * (key - query).to(tl.float32)
    if MASK:
        hidden = key >= length
        if CAUSAL:
            hidden = hidden | (key > query)
        if SEES == WINDOW:
            hidden = hidden | (key <= query - reach) | (key >= query + reach)
        elif SEES == CHUNK:
            hidden = hidden | (key // reach != query // reach)
        value = tl.where(hidden, float("-inf"), value)
    return value, share


@triton.jit
def _rows(base, position, length, row, HEAD: tl.constexpr, PADDED: tl.constexpr):
    """The channels of some positions, 0 behind the row's end: [N, PADDED]."""
    channel = tl.arange(0, PADDED)
    inside = (position < length)[:, None]
    if HEAD < PADDED:
        inside = inside & (channel < HEAD)[None, :]
    return tl.load(base + position[:, None] * row + channel[None, :], mask=inside, other=0.0)


@triton.jit
def _sum_weights(
    keys, q, query, low, high, top, total, length, reach, slope, score, cap,
    KV_ROW: tl.constexpr, HEAD: tl.constexpr, PADDED: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
    SEES: tl.constexpr, CAUSAL: tl.constexpr, SOFT_CAP: tl.constexpr, SLOPES: tl.constexpr, MASK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """(largest score, sum of the weights relative to it) of queries, with those of the keys from low to high."""
    for at in tl.range(low, high, BN, num_stages=STAGES):
        key = at + tl.arange(0, BN)
        k = _rows(keys, key, length, KV_ROW, HEAD, PADDED)
        raw = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        value, _ = _scores(
            raw, query[:, None], key[None, :], length, reach, slope, score, cap, SEES, CAUSAL, SOFT_CAP, SLOPES, MASK
        )
        best = tl.maximum(top, tl.max(value, 1))
        safe = tl.where(best == float("-inf"), 0.0, best)
        total = total * tl.exp2(top - safe) + tl.sum(tl.exp2(value - safe[:, None]), 1)
        top = best
    return top, total


@triton.jit
def _add_queries(
    keys, q, own, result, query, low, high, log_sum, delta, length, reach, slope, score, cap,
    KV_ROW: tl.constexpr, HEAD: tl.constexpr, PADDED: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
    SEES: tl.constexpr, CAUSAL: tl.constexpr, SOFT_CAP: tl.constexpr, SLOPES: tl.constexpr, MASK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of queries, not scaled, with what the keys from low to high give."""
    for at in tl.range(low, high, BN, num_stages=STAGES):
        key = at + tl.arange(0, BN)
        k = _rows(keys, key, length, KV_ROW, HEAD, PADDED)
        v = _rows(keys + HEAD, key, length, KV_ROW, HEAD, PADDED)
        raw = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        of_weight = tl.dot(own, tl.trans(v), input_precision=PRECISION)
        value, share = _scores(
            raw, query[:, None], key[None, :], length, reach, slope, score, cap, SEES, CAUSAL, SOFT_CAP, SLOPES, MASK
        )
        of_score = tl.exp2(value - log_sum[:, None]) * (of_weight - delta[:, None])
        if SOFT_CAP:
            of_score *= 1.0 - share * share
        result = tl.dot(of_score.to(k.dtype), k, result, input_precision=PRECISION)
    return result


@launched(triton.jit)
def backward_of_queries(
    q, states, grad, out, grad_q, log_sums, deltas, tiles, row_token, row_slot, row_length, slopes, sinks, num_tokens,
    reach, scale, score, cap,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD: tl.constexpr, PADDED: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, STAGES: tl.constexpr, SEES: tl.constexpr, CAUSAL: tl.constexpr, SOFT_CAP: tl.constexpr,
    SLOPES: tl.constexpr, SINKS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (head, tile): BM queries of a row: their gradient, their logarithms of sums and their deltas.

    q, grad, out, grad_q: [tokens, HEADS, HEAD]; states: [slots, KV_HEADS, 2 * HEAD]; log_sums (to the base 2) and
    deltas: [HEADS, tokens] float32. tiles: [tiles, 2] int32, a row and its first query. A score is `score` times its
    product, or, with a cap, times tanh(product * cap / 2 * ln 2); scale: of the gradient.
    """
    head, tile = tl.program_id(0), tl.program_id(1)
    row, begin = tl.load(tiles + 2 * tile), tl.load(tiles + 2 * tile + 1)
    token, slot = tl.load(row_token + row).to(tl.int64), tl.load(row_slot + row).to(tl.int64)
    length = tl.load(row_length + row)
    kv_head = head // (HEADS // KV_HEADS)
    Q_ROW: tl.constexpr = HEADS * HEAD
    KV_ROW: tl.constexpr = KV_HEADS * 2 * HEAD
    offset = token * Q_ROW + head * HEAD
    keys = states + slot * KV_ROW + kv_head * 2 * HEAD
    query = begin + tl.arange(0, BM)
    own_q = _rows(q + offset, query, length, Q_ROW, HEAD, PADDED)
    own = _rows(grad + offset, query, length, Q_ROW, HEAD, PADDED)
    before = _rows(out + offset, query, length, Q_ROW, HEAD, PADDED)
    delta = tl.sum(own.to(tl.float32) * before.to(tl.float32), 1)
    slope = 0.0
    if SLOPES:
        slope = tl.load(slopes + head) * _LOG2_E
    low, high = 0, length
    if SEES == WINDOW:
        low = tl.maximum(begin + 1 - reach, 0)
        if not CAUSAL:
            high = tl.minimum(begin + BM - 1 + reach, length)
    elif SEES == CHUNK:
        low = begin // reach * reach
        if not CAUSAL:
            high = tl.minimum(((begin + BM - 1) // reach + 1) * reach, length)
    if CAUSAL:
        high = tl.minimum(begin + BM, length)
    low = low // BN * BN
    middle = low  # before it, every query sees every key
    if SEES == EVERYTHING:
        middle = (tl.minimum(begin + 1, length) if CAUSAL else length) // BN * BN
    top = tl.full((BM,), float("-inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    if SINKS:
        top = tl.zeros((BM,), tl.float32) + tl.load(sinks + head) * _LOG2_E
        total += 1.0
    if SEES == EVERYTHING:
        top, total = _sum_weights(
            keys, own_q, query, low, middle, top, total, length, reach, slope, score, cap,
            KV_ROW, HEAD, PADDED, BN, STAGES, SEES, CAUSAL, SOFT_CAP, SLOPES, False, PRECISION,
        )  # fmt: skip
    top, total = _sum_weights(
        keys, own_q, query, middle, high, top, total, length, reach, slope, score, cap,
        KV_ROW, HEAD, PADDED, BN, STAGES, SEES, CAUSAL, SOFT_CAP, SLOPES, True, PRECISION,
    )  # fmt: skip
    log_sum = tl.where(query < length, top + tl.log2(total), float("inf"))
    place = head.to(tl.int64) * num_tokens + token + query
    tl.store(log_sums + place, log_sum, mask=query < length)
    tl.store(deltas + place, delta, mask=query < length)
    result = tl.zeros((BM, PADDED), tl.float32)
    if SEES == EVERYTHING:
        result = _add_queries(
            keys, own_q, own, result, query, low, middle, log_sum, delta, length, reach, slope, score, cap,
            KV_ROW, HEAD, PADDED, BN, STAGES, SEES, CAUSAL, SOFT_CAP, SLOPES, False, PRECISION,
        )  # fmt: skip
    result = _add_queries(
        keys, own_q, own, result, query, middle, high, log_sum, delta, length, reach, slope, score, cap,
        KV_ROW, HEAD, PADDED, BN, STAGES, SEES, CAUSAL, SOFT_CAP, SLOPES, True, PRECISION,
    )  # fmt: skip
    channel = tl.arange(0, PADDED)
    inside = (query < length)[:, None] & (channel < HEAD)[None, :]
    place = grad_q + offset + query[:, None] * Q_ROW + channel[None, :]
    tl.store(place, (result * scale).to(grad_q.dtype.element_ty), mask=inside)


@triton.jit
def _add_keys(
    queries, grads, log_sums, deltas, k, v, of_key, of_value, key, low, high, length, reach, slope, score, cap,
    Q_ROW: tl.constexpr, HEAD: tl.constexpr, PADDED: tl.constexpr, BM: tl.constexpr, STAGES: tl.constexpr,
    SEES: tl.constexpr, CAUSAL: tl.constexpr, SOFT_CAP: tl.constexpr, SLOPES: tl.constexpr, MASK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradients of keys, not scaled, and of values, with what a head's queries from low to high give."""
    for at in tl.range(low, high, BM, num_stages=STAGES):
        query = at + tl.arange(0, BM)
        q = _rows(queries, query, length, Q_ROW, HEAD, PADDED)
        own = _rows(grads, query, length, Q_ROW, HEAD, PADDED)
        log_sum = tl.load(log_sums + query, mask=query < length, other=float("inf"))
        delta = tl.load(deltas + query, mask=query < length, other=0.0)
        raw = tl.dot(k, tl.trans(q), input_precision=PRECISION)
        value, share = _scores(
            raw, query[None, :], key[:, None], length, reach, slope, score, cap, SEES, CAUSAL, SOFT_CAP, SLOPES, MASK
        )
        weight = tl.exp2(value - log_sum[None, :])
        of_value = tl.dot(weight.to(own.dtype), own, of_value, input_precision=PRECISION)
        of_weight = tl.dot(v, tl.trans(own), input_precision=PRECISION)
        of_score = weight * (of_weight - delta[None, :])
        if SOFT_CAP:
            of_score *= 1.0 - share * share
        of_key = tl.dot(of_score.to(q.dtype), q, of_key, input_precision=PRECISION)
    return of_key, of_value


@launched(triton.jit)
def backward_of_keys(
    q, states, grad, grad_states, log_sums, deltas, tiles, row_token, row_slot, row_length, row_room, slopes,
    num_tokens, reach, scale, score, cap,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD: tl.constexpr, PADDED: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, STAGES: tl.constexpr, SEES: tl.constexpr, CAUSAL: tl.constexpr, SOFT_CAP: tl.constexpr,
    SLOPES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (KV head, tile): BN keys of a row: the gradients of K and V, 0 in what its room has behind it.

    row_room: slots of a row; tiles: as above, by keys. See `backward_of_queries`.
    """
    kv_head, tile = tl.program_id(0), tl.program_id(1)
    row, begin = tl.load(tiles + 2 * tile), tl.load(tiles + 2 * tile + 1)
    token, slot = tl.load(row_token + row).to(tl.int64), tl.load(row_slot + row).to(tl.int64)
    length = tl.load(row_length + row)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    Q_ROW: tl.constexpr = HEADS * HEAD
    KV_ROW: tl.constexpr = KV_HEADS * 2 * HEAD
    place = slot * KV_ROW + kv_head * 2 * HEAD
    key = begin + tl.arange(0, BN)
    k = _rows(states + place, key, length, KV_ROW, HEAD, PADDED)
    v = _rows(states + place + HEAD, key, length, KV_ROW, HEAD, PADDED)
    low, high = 0, length
    if SEES == WINDOW:
        high = tl.minimum(begin + BN - 1 + reach, length)
        low = tl.maximum(begin + 1 - reach, 0)
    elif SEES == CHUNK:
        high = tl.minimum(((begin + BN - 1) // reach + 1) * reach, length)
        low = begin // reach * reach
    if CAUSAL:
        low = begin
    low = low // BM * BM
    middle = high  # from it on, every query sees every key
    if SEES == EVERYTHING:
        if CAUSAL:
            middle = tl.minimum(tl.cdiv(begin + BN - 1, BM) * BM, high)
        elif begin + BN <= length:
            middle = low
    of_key = tl.zeros((BN, PADDED), tl.float32)
    of_value = tl.zeros((BN, PADDED), tl.float32)
    for member in range(GROUP):
        head = kv_head * GROUP + member
        offset = token * Q_ROW + head * HEAD
        line = head.to(tl.int64) * num_tokens + token
        slope = 0.0
        if SLOPES:
            slope = tl.load(slopes + head) * _LOG2_E
        of_key, of_value = _add_keys(
            q + offset, grad + offset, log_sums + line, deltas + line, k, v, of_key, of_value, key, low, middle, length,
            reach, slope, score, cap,
            Q_ROW, HEAD, PADDED, BM, STAGES, SEES, CAUSAL, SOFT_CAP, SLOPES, True, PRECISION,
        )  # fmt: skip
        if SEES == EVERYTHING:
            of_key, of_value = _add_keys(
                q + offset, grad + offset, log_sums + line, deltas + line, k, v, of_key, of_value, key, middle, high,
                length, reach, slope, score, cap,
                Q_ROW, HEAD, PADDED, BM, STAGES, SEES, CAUSAL, SOFT_CAP, SLOPES, False, PRECISION,
            )  # fmt: skip
    channel = tl.arange(0, PADDED)
    inside = (key < tl.load(row_room + row))[:, None] & (channel < HEAD)[None, :]
    stored = grad_states + place + key[:, None] * KV_ROW + channel[None, :]
    tl.store(stored, (of_key * scale).to(grad_states.dtype.element_ty), mask=inside)
    tl.store(stored + HEAD, of_value.to(grad_states.dtype.element_ty), mask=inside)
