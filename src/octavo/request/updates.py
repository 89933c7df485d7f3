"""The word from the scheduler to the text layer: what one step gave to one request.

Owns RequestUpdate. Frozen and msgpack-able, so that text processing may live in another process than the
engine. It knows neither text nor devices. Invariant: the updates of a request, in order, hold each of its output
tokens exactly once; the one with a `finish_reason` is the last.
"""

from __future__ import annotations

from typing import Any

import msgspec

from octavo.plan import NO_EXPERTS, NO_PROMPT_LOGPROBS, PromptLogprobs, RoutedExperts, TokenLogprobs


class RequestUpdate(msgspec.Struct, frozen=True, omit_defaults=True):
    """New tokens of one request (one, or several with speculation), and its end if it has ended."""

    request_id: str
    tokens: list[int] = []  # output tokens of this step, a stop token included
    logprobs: list[TokenLogprobs] = []  # one per token if the request asks for them, else empty
    prompt_logprobs: PromptLogprobs = NO_PROMPT_LOGPROBS  # the next prompt positions in order, counted from position 1
    supports: list[bytes] = []  # as logprobs: StepResult's
    experts: RoutedExperts = NO_EXPERTS  # of tokens that were computed; what comes later for a position counts
    finish_reason: str | None = None  # "stop", "length", "abort", "error", "repetition"; None: goes on
    stop_reason: int | str | None = None  # the stop token's id or the stop string; None for EOS
    num_cached: int = 0  # prompt tokens that a prefix hit saved; a request's are those of its first completion
    num_loaded: int = 0  # those of them that a connector brought
    queue_time: float | None = None  # seconds from add to the first schedule, in one update at most
    weights_version: str = ""  # of the weights that draw its tokens from this update on; empty: as before
    weights_mixed: bool = False  # these tokens attend K and V of older weights too
    kv_transfer_params: dict[str, Any] | None = None  # with a finish_reason: where its blocks are to be had
    error: str = ""  # with finish_reason "error": the reason, e.g. "nan_logits"


def once_each(updates: list[RequestUpdate]) -> list[list[RequestUpdate]]:
    """Updates in parts that hold each sequence once: where steps arrive together, each still makes its own output."""
    parts: list[list[RequestUpdate]] = [[]]
    seen: set[str] = set()
    for update in updates:
        if update.request_id in seen:
            parts.append([])
            seen.clear()
        seen.add(update.request_id)
        parts[-1].append(update)
    return parts
