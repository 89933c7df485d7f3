"""The stop rules: whether a request ends with its last token, and why.

Owns their order. Knows no queues, rows or blocks. Invariant: the answer is a function of the request's tokens and
parameters alone.
"""

from __future__ import annotations

from octavo.request.repetition import ends_in_repetition
from octavo.request.request import FinishReason, Request


def ends(request: Request, token: int) -> bool:
    """Whether `request` ends with `token`, its last one. Notes why: a stop token with its id."""
    num_output = request.num_output
    enough = num_output >= request.params.min_tokens
    if enough and token in request.eos_token_ids:
        request.finish_reason = FinishReason.STOP
    elif enough and token in request.stop_token_ids:
        request.finish_reason, request.stop_reason = FinishReason.STOP, token
    elif num_output >= request.max_tokens:
        request.finish_reason = FinishReason.LENGTH
    elif enough and _loops(request):
        request.finish_reason, request.stop_reason = FinishReason.REPETITION, "repetition_detected"
    return request.finish_reason is not None


def _loops(request: Request) -> bool:
    """Whether the output ends in the repetition that its parameters call an end."""
    detection = request.params.repetition_detection
    if detection is None:
        return False
    longest = detection.max_pattern_size * detection.min_count
    return ends_in_repetition(request.tokens[max(request.num_prompt, request.num_tokens - longest) :], detection)
