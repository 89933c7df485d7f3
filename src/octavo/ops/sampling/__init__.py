"""Row-wise kernels over logits: counter-based noise, sampling, log-probabilities, top-k, top-p and min-p masks.

Owns the random stream (a pure function of seed, position and token id) and the order of every sum. Does not know
requests or sampling parameters beyond the plain numbers of a row. Invariant: a row's result depends on its own logits
and numbers only, never on the other rows, their count or the thread count. Ties always go to the lower token id.

Logits are [rows, vocab] float32 with a contiguous last axis; rows may be strided. Each operator has an reference
implementation, `<name>_eager`, in plain torch; integers agree bit for bit, floats within rounding. On a GPU noise and
the weights of top-p have the bits of the native operators; a draw multiplies by 1 / temperature and adds the noise in
one rounding.
"""

from __future__ import annotations

import math

import torch

from octavo.ops import native
from octavo.ops.native import I64, PTR
from octavo.ops.sampling.truncation import FEW, TruncationRows

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as int64
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB
_LOW = 0xFFFFFFFF
_NEG_INF = float("-inf")
_MAX_NATIVE_TOP = 256  # above, a sort beats insertion

_ROWS = [PTR, I64, I64, I64]  # logits, row stride, rows, vocab
native.declare("octavo_sample_rows", [*_ROWS, PTR, PTR, PTR, PTR])
native.declare("octavo_logprob_stats", [*_ROWS, PTR, PTR])
native.declare("octavo_token_logprobs", [*_ROWS, PTR, PTR, PTR])
native.declare("octavo_top_logprobs", [*_ROWS, I64, PTR, PTR])
native.declare("octavo_nan_rows", [*_ROWS, PTR])
native.declare("octavo_top_k_top_p_mask", [*_ROWS, PTR, PTR, PTR])


def sample_rows(
    logits: torch.Tensor, temperatures: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """One token per row, int64: argmax(logits / temperature + noise), or argmax(logits) at temperature 0.

    temperatures: [rows] float32; seeds: [rows] int64 or uint64; positions: [rows] int64, absolute. The noise is
    `gumbel_noise` of (seed, position, token id). -inf and NaN never win; a row of nothing else gives 0.
    """
    if logits.is_cuda:
        from octavo.ops.sampling import gpu

        return gpu.draw(logits, None, temperatures, seeds.view(torch.int64), positions)[0]
    library = native.lib()
    if not library:
        return sample_rows_eager(logits, temperatures, seeds, positions)
    tokens = torch.empty(logits.shape[0], dtype=torch.int64)
    library.octavo_sample_rows(
        *_rows(logits), temperatures.data_ptr(), seeds.data_ptr(), positions.data_ptr(), tokens.data_ptr()
    )
    return tokens


def draw(
    logits: torch.Tensor,
    rows: torch.Tensor,
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    truncation: TruncationRows | None = None,
    ahead: int = 0,
    *,
    ready: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(`sample_rows` of tables, whether the logits hold a NaN): [S] int64, [S] uint8. The logits stay as they are.

    rows: [S] int64, the place of each logits row in `temperatures` (float32) and `seeds` (int64); positions: [S] int64,
    or so many places before, as `ahead` says. With cuts the tokens are those of logits after `cut_`. On a GPU one
    kernel, with cuts some more, fit for a graph once a launch has run outside of one; launches must not overlap. ready:
    whether rows, positions and tables were there before the forward pass that gives the logits; it moves no token.
    """
    if logits.is_cuda:
        from octavo.ops.sampling import gpu

        return gpu.draw(logits, rows, temperatures, seeds, positions, truncation, ahead, ready=ready)
    left = logits
    if truncation is not None:
        left = logits.clone()
        cut_(left, rows, truncation)
    at = positions + ahead if ahead else positions
    tokens = sample_rows(left, temperatures.index_select(0, rows), seeds.index_select(0, rows), at)
    return tokens, nan_rows(logits).view(torch.uint8)


def logprob_stats(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(max, log of the sum of exponentials) of each row, float32. NaN is no maximum, but makes the second NaN."""
    if logits.is_cuda:
        from octavo.ops.sampling import gpu

        return gpu.logprob_stats(logits)
    library = native.lib()
    if not library:
        return logprob_stats_eager(logits)
    largest, log_sum_exp = torch.empty(2, logits.shape[0], dtype=torch.float32)
    library.octavo_logprob_stats(*_rows(logits), largest.data_ptr(), log_sum_exp.data_ptr())
    return largest, log_sum_exp


def token_logprobs(logits: torch.Tensor, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(log-probability float32, rank int64) of one token per row. Rank: 1 + the number of larger logits."""
    if logits.is_cuda:
        from octavo.ops.sampling import gpu

        return gpu.token_logprobs(logits, token_ids)
    library = native.lib()
    if not library:
        return token_logprobs_eager(logits, token_ids)
    logprobs = torch.empty(logits.shape[0], dtype=torch.float32)
    ranks = torch.empty(logits.shape[0], dtype=torch.int64)
    library.octavo_token_logprobs(*_rows(logits), token_ids.data_ptr(), logprobs.data_ptr(), ranks.data_ptr())
    return logprobs, ranks


def token_stats(logits: torch.Tensor, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(`token_logprobs`' log-probabilities, `logprob_stats`' logarithms of sums), at once where that costs less."""
    if logits.is_cuda:
        from octavo.ops.sampling import gpu

        return gpu.token_stats(logits, token_ids)
    return token_logprobs(logits, token_ids)[0], logprob_stats(logits)[1]


def top_logprobs(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(token ids int64, log-probabilities float32), both [rows, min(k, vocab)], most likely first."""
    k = min(k, logits.shape[1])
    if logits.is_cuda:
        from octavo.ops.sampling import gpu

        return gpu.top_logprobs(logits, k, few=0 < k <= FEW)
    library = native.lib()
    if not library or not 0 < k <= _MAX_NATIVE_TOP:
        return top_logprobs_eager(logits, k)
    token_ids = torch.empty(logits.shape[0], k, dtype=torch.int64)
    logprobs = torch.empty(logits.shape[0], k, dtype=torch.float32)
    library.octavo_top_logprobs(*_rows(logits), k, token_ids.data_ptr(), logprobs.data_ptr())
    return token_ids, logprobs


def nan_rows(logits: torch.Tensor) -> torch.Tensor:
    """Whether a row holds a NaN: [rows] bool."""
    if logits.is_cuda:
        return logits.amax(dim=1).isnan()  # amax lets NaN through
    library = native.lib()
    if not library:
        return nan_rows_eager(logits)
    found = torch.empty(logits.shape[0], dtype=torch.bool)
    library.octavo_nan_rows(*_rows(logits), found.data_ptr())
    return found


def top_k_top_p_mask_(logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor) -> None:
    """Set what min-p, then top-k, then top-p exclude to -inf, in place, on (already scaled) logits.

    top_k: [rows] int64, off where <= 0 or >= vocab; top_p: [rows] float32, off where >= 1; min_p: [rows] float32, off
    where 0. Entries are ordered by (value descending, id ascending). min-p drops probabilities below min_p times the
    largest; top-k keeps the first k; top-p keeps an entry while what precedes it holds less than top_p of what is
    left. For top-p a probability is the integer floor(e^(x - max) * 2^40), so its sums are exact in any order. Rows
    whose maximum is not finite stay as they are. For the CPU; `cut_` is for any device.
    """
    library = native.lib()
    if not library:
        top_k_top_p_mask_eager_(logits, top_k, top_p, min_p)
        return
    library.octavo_top_k_top_p_mask(*_rows(logits), top_k.data_ptr(), top_p.data_ptr(), min_p.data_ptr())


def cut_(logits: torch.Tensor, rows: torch.Tensor, truncation: TruncationRows) -> None:
    """Divide the rows that have cuts by their divisors, then `top_k_top_p_mask_` them, in place.

    rows: [S] int64, the place of each logits row in the tables. A row with a NaN may keep anything.
    """
    if logits.is_cuda:
        from octavo.ops.sampling import truncation_gpu as cut

        cut.cut_(logits, rows, truncation)
        return
    divisors = truncation.divisors.index_select(0, rows)
    at = divisors.nonzero().flatten()
    whole = len(at) == len(logits)
    part = logits if whole else logits.index_select(0, at)
    part.div_(divisors.index_select(0, at)[:, None])
    rows = rows.index_select(0, at)
    top_k_top_p_mask_(
        part, *(table.index_select(0, rows) for table in (truncation.top_k, truncation.top_p, truncation.min_p))
    )
    if not whole:
        logits.index_copy_(0, at, part)


def allow_bits_(logits: torch.Tensor, at: torch.Tensor, words: torch.Tensor) -> None:
    """Set the tokens whose bit is not set to -inf, in place, in the rows `at` of `logits`.

    at: [n] int64, each once; words: [n, at least vocab / 32] int32, bit i % 32 of word i // 32 is token i.
    """
    if logits.is_cuda:
        from octavo.ops.sampling import bitmask

        bitmask.allow_bits_(logits, at, words)
        return
    allow_bits_eager_(logits, at, words)


def _rows(logits: torch.Tensor) -> tuple[int, int, int, int]:
    """The C arguments (address, row stride, rows, vocab) of float32 logits."""
    assert logits.dtype == torch.float32 and logits.stride(1) == 1, "logits are float32, a row is contiguous"
    return logits.data_ptr(), logits.stride(0), logits.shape[0], logits.shape[1]


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift of int64 words."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix64(x: torch.Tensor) -> torch.Tensor:
    """SplitMix64's finaliser (Steele, Lea and Flood 2014) on int64 words, wrapping."""
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def uniform_bits(seeds: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """The stream's 32-bit words, as int64: seeds and positions int64 (broadcast), token ids int64 (broadcast).

    The recipe, on unsigned words that wrap. 64 bits, once per (seed, position), G = 0x9E3779B97F4A7C15:
        key = mix(mix(seed + G) + position * G),
        mix(x): x ^= x >> 30; x *= 0xBF58476D1CE4E5B9; x ^= x >> 27; x *= 0x94D049BB133111EB; x ^= x >> 31.
    32 bits, once per token id, k0 = low half of key, k1 = high half:
        h = id + k0; h ^= h >> 16; h *= 0x21F0AAAD; h ^= h >> 15; h ^= k1; h *= 0xD35A2D97; h ^= h >> 15
    (the 32-bit rounds and constants are Wellons' lowbias32 search; k1 enters between them so that two keys never give
    shifted copies of one sequence).
    """
    key = _mix64(_mix64(seeds + _GOLDEN) + positions * _GOLDEN)
    h = (token_ids + (key & _LOW)) & _LOW
    h = ((h ^ (h >> 16)) * 0x21F0AAAD) & _LOW
    h = h ^ (h >> 15) ^ _shift_right(key, 32)
    h = (h * 0xD35A2D97) & _LOW
    return h ^ (h >> 15)


def gumbel_noise(seeds: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Gumbel noise, float32: -log(-log1p(-w)), w = clamp(float32(bits) * 2^-32, 2^-33, 1 - 2^-24).

    `bits` are `uniform_bits`, rounded once to float32. The form in w keeps full resolution where noise is large; it is
    finite, at most 22.9.
    """
    w = (uniform_bits(seeds, positions, token_ids).to(torch.float32) * 2.0**-32).clamp(2.0**-33, 1 - 2.0**-24)
    return -torch.log(-torch.log1p(-w))


def _first_argmax(x: torch.Tensor) -> torch.Tensor:
    """The lowest index of each row's maximum; NaN and -inf never win; 0 where nothing does."""
    x = torch.where(x.isnan(), _NEG_INF, x)
    best = x.amax(dim=1, keepdim=True)
    index = torch.arange(x.shape[1], device=x.device)
    first = torch.where((x == best) & (best > _NEG_INF), index, x.shape[1]).amin(dim=1)
    return torch.where(first == x.shape[1], 0, first)


def sample_rows_eager(
    logits: torch.Tensor, temperatures: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """The reference implementation of `sample_rows`."""
    greedy = temperatures == 0
    token_ids = torch.arange(logits.shape[1], device=logits.device)
    noise = gumbel_noise(seeds.view(torch.int64)[:, None], positions[:, None], token_ids)
    scaled = logits / torch.where(greedy, 1.0, temperatures)[:, None]
    return _first_argmax(torch.where(greedy[:, None], logits, scaled + noise))


def logprob_stats_eager(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The reference implementation of `logprob_stats`."""
    return torch.where(logits.isnan(), _NEG_INF, logits).amax(dim=1), logits.logsumexp(dim=1)


def token_logprobs_eager(logits: torch.Tensor, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The reference implementation of `token_logprobs`."""
    chosen = logits.gather(1, token_ids[:, None])
    return logits.log_softmax(dim=1).gather(1, token_ids[:, None])[:, 0], 1 + (logits > chosen).sum(dim=1)


def top_logprobs_eager(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The reference implementation of `top_logprobs`."""
    order = torch.where(logits.isnan(), _NEG_INF, logits).sort(dim=1, descending=True, stable=True).indices[:, :k]
    return order, logits.log_softmax(dim=1).gather(1, order)


def nan_rows_eager(logits: torch.Tensor) -> torch.Tensor:
    """The reference implementation of `nan_rows`."""
    return logits.isnan().any(dim=1)


def allow_bits_eager_(logits: torch.Tensor, at: torch.Tensor, words: torch.Tensor) -> None:
    """The reference implementation of `allow_bits_`."""
    bits = (words[:, :, None] >> torch.arange(32, device=words.device)) & 1
    hidden = bits.flatten(1)[:, : logits.shape[1]] == 0
    logits.index_copy_(0, at, logits.index_select(0, at).masked_fill_(hidden, _NEG_INF))


def top_k_top_p_mask_eager_(
    logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> None:
    """The reference implementation of `top_k_top_p_mask_`."""
    vocab_size = logits.shape[1]
    for row, k, p, relative in zip(logits, top_k.tolist(), top_p.tolist(), min_p.tolist(), strict=True):
        largest = torch.where(row.isnan(), _NEG_INF, row).max()
        if not largest.isfinite():
            continue
        if relative > 0:
            row[row < largest + torch.tensor(relative, dtype=torch.float32).log()] = _NEG_INF
        if 0 < k < vocab_size:
            row[row.sort(descending=True, stable=True).indices[k:]] = _NEG_INF
        if p < 1:
            values, order = row.sort(descending=True, stable=True)
            weights = ((values - largest).exp().double() * 2**40).long()
            target = max(math.ceil(p * float(weights.sum())), 1)
            row[order[weights.cumsum(0) - weights >= target]] = _NEG_INF
