"""The stop rules: whether a request ends with its last token, and why.

Owns their order. Knows no queues, rows or blocks. Invariant: the answer is a function of the request's tokens and
parameters alone.
"""

from __future__ import annotations

from octavo.request import FinishReason, Request
from octavo.sampling_params import ends_in_repetition


def end_of(request: Request, token: int) -> tuple[FinishReason, int | None] | None:
    """Why `request` ends with `token`, its last one, and the stop token's id if that is why; None: it goes on."""
    enough = request.num_output >= request.params.min_tokens
    if enough and token in request.eos_token_ids:
        return FinishReason.STOP, None
    if enough and token in request.stop_token_ids:
        return FinishReason.STOP, token
    if request.num_output >= request.max_tokens:
        return FinishReason.LENGTH, None
    if enough and _loops(request):
        return FinishReason.REPETITION, None
    return None


def _loops(request: Request) -> bool:
    """Whether the output ends in the repetition that its parameters call an end."""
    detection = request.params.repetition_detection
    if detection is None:
        return False
    longest = detection.max_pattern_size * detection.min_count
    return ends_in_repetition(request.tokens[max(request.num_prompt, request.num_tokens - longest) :], detection)
