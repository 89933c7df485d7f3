"""The sampler's reference implementation: one logits row of one request, the slow and obvious way.

Owns the meaning of every sampling parameter in plain numpy; the tests hold Sampler to it. Knows no rows, batches or
devices. Shares one thing with the fast path: the noise, whose recipe is in ops.sampling. Invariant: the answer is a
pure function of the logits, the tokens before the position, the parameters and the seed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from octavo.ops.sampling import gumbel_noise
from octavo.plan import TokenLogprobs
from octavo.request.sampling_params import SamplingParams
from octavo.sampling.sampler import as_int64

FloatArray = NDArray[np.float32]
_NEG_INF = np.float32(-np.inf)


def process(
    logits: FloatArray, params: SamplingParams, tokens: Sequence[int], num_prompt: int, eos_token_ids: Sequence[int]
) -> FloatArray:
    """The logits that the token is drawn from: all stages in their order, temperature included. [V] float32."""
    x = logits.copy()
    for token, bias in (params.logit_bias or {}).items():
        x[token] += np.float32(bias)
    if params.allowed_token_ids:
        x[np.setdiff1d(np.arange(len(x)), params.allowed_token_ids)] = _NEG_INF
    output = list(tokens[num_prompt:])
    if len(output) < params.min_tokens:
        x[sorted({*eos_token_ids, *(params.stop_token_ids or ())})] = _NEG_INF
    counts = Counter(output)
    for token in set(tokens):
        factor = np.float32(params.repetition_penalty)
        x[token] = x[token] / factor if x[token] > 0 else x[token] * factor
        x[token] -= np.float32(params.frequency_penalty) * np.float32(counts[token])
        x[token] -= np.float32(params.presence_penalty) * np.float32(counts[token] > 0)
    for word in params.bad_words_token_ids or ():
        prefix = list(word[:-1])
        if len(prefix) <= len(output) and output[len(output) - len(prefix) :] == prefix:
            x[word[-1]] = _NEG_INF
    return x if params.greedy else truncate(x / np.float32(params.temperature), params)


def truncate(x: FloatArray, params: SamplingParams) -> FloatArray:
    """min_p, then top_k, then top_p over what is left. Equal logits: the lower token id counts as greater."""
    x = x.copy()
    if params.min_p > 0:
        x[x < x.max() + np.log(np.float32(params.min_p))] = _NEG_INF
    order = np.argsort(-x, kind="stable")
    if 0 < params.top_k < len(x):
        x[order[params.top_k :]] = _NEG_INF
    if params.top_p < 1:
        weights = np.exp(x[order] - x[order[0]]).astype(np.float64)
        before = np.cumsum(weights) - weights
        dropped = before >= float(np.float32(params.top_p)) * weights.sum()
        dropped[0] = False
        x[order[dropped]] = _NEG_INF
    return x


def draw(x: FloatArray, params: SamplingParams, seed: int, position: int) -> int:
    """The token: the lowest id of the greatest logit, with noise unless greedy."""
    if not params.greedy:
        seeds, positions = torch.tensor([as_int64(seed)]), torch.tensor([position])
        x = x + gumbel_noise(seeds, positions, torch.arange(len(x))).numpy()
    return int(np.argmax(x))


def log_probabilities(source: FloatArray, token: int, params: SamplingParams, *, as_logits: bool) -> TokenLogprobs:
    """The sampled token, the likeliest that were asked for, the named ones; in float64."""
    num_top = len(source) if params.logprobs == -1 else params.logprobs or 0
    top = np.argsort(-source, kind="stable")[:num_top].tolist()
    ids = [token, *top, *(params.logprob_token_ids or ())]
    exact = source.astype(np.float64)
    if not as_logits:
        exact = exact - exact.max()
        exact -= np.log(np.exp(exact).sum())
    return TokenLogprobs(ids, exact[ids].tolist(), [1 + int((source > source[token]).sum()) for token in ids])


def sample_reference(
    logits: FloatArray,
    params: SamplingParams,
    *,
    tokens: Sequence[int],
    num_prompt: int,
    seed: int,
    eos_token_ids: Sequence[int] = (),
    logprobs_mode: str = "raw_logprobs",
) -> tuple[int, TokenLogprobs | None]:
    """Sample the token after `tokens` (prompt and output) from `logits` ([V] float32, all finite)."""
    processed = process(logits, params, tokens, num_prompt, eos_token_ids)
    token = draw(processed, params, seed, len(tokens))
    if params.logprobs is None and params.logprob_token_ids is None:
        return token, None
    source = logits if logprobs_mode.startswith("raw_") else processed
    return token, log_probabilities(source, token, params, as_logits=logprobs_mode.endswith("_logits"))
