"""Soundness: whether what an engine reports can be what a model said.

Owns the check that stands between the engine's updates and text. Knows nothing of streams. Invariant: an update that
passes can be turned into text and JSON without an error.
"""

from __future__ import annotations

import math

import numpy as np

from octavo.plan import PromptLogprobs
from octavo.request.request import FinishReason
from octavo.request.sampling_params import Limits, SamplingParams
from octavo.request.updates import RequestUpdate

_FINISH_REASONS = frozenset(FinishReason)


def validate_update(update: RequestUpdate, limits: Limits, params: SamplingParams) -> bool:
    """Whether an update can be what a model said: known tokens, real numbers, as many as were asked for."""
    vocab_size = limits.vocab_size
    for token in update.tokens:
        if not 0 <= token < vocab_size:
            return False
    if update.finish_reason is not None and update.finish_reason not in _FINISH_REASONS:
        return False
    wanted = params.logprobs is not None or params.logprob_token_ids is not None
    if wanted and len(update.logprobs) != len(update.tokens):
        return False
    for entry in update.logprobs:
        if not len(entry.token_ids) == len(entry.logprobs) == len(entry.ranks) >= 1:
            return False
        if any(map(math.isnan, entry.logprobs)):
            return False
        if not all(0 <= token < vocab_size for token in entry.token_ids):
            return False
    return _are_sound(update.prompt_logprobs, vocab_size)


def _are_sound(part: PromptLogprobs, vocab_size: int) -> bool:
    if part.width < 1 or len(part.token_ids) % (4 * part.width):
        return False
    if not len(part.token_ids) == len(part.logprobs) == len(part.ranks):
        return False
    token_ids, values, _ = part.arrays()
    return not np.isnan(values).any() and bool(((token_ids >= 0) & (token_ids < vocab_size)).all())
