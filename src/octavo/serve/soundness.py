"""Soundness: whether what an engine reports can be what a model said.

Owns the check that stands between the engine's updates and text. Knows nothing of streams. Invariant: an update that
passes can be turned into text and JSON without an error.
"""

from __future__ import annotations

import math

from octavo.request import FinishReason
from octavo.sampling_params import Limits, SamplingParams
from octavo.updates import RequestUpdate

_FINISH_REASONS = frozenset(FinishReason)


def is_sound(update: RequestUpdate, limits: Limits, params: SamplingParams) -> bool:
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
    for entry in (*update.logprobs, *update.prompt_logprobs):
        if not len(entry.token_ids) == len(entry.logprobs) == len(entry.ranks) >= 1:
            return False
        if any(map(math.isnan, entry.logprobs)):
            return False
        if not all(0 <= token < vocab_size for token in entry.token_ids):
            return False
    return True
