"""What comes out of the engine: plain data with vLLM's names.

Owns RequestOutput, CompletionOutput, Logprob and RequestMetrics. Knows nothing of how they are made. Invariant: all of
it is msgpack-able, and an output that was handed out is never changed afterwards.
"""

from __future__ import annotations

import msgspec

NO_TOKEN = "no_token_allowed"  # the stop_reason of an output whose wishes exclude each other: no failure of the model


class Logprob(msgspec.Struct, frozen=True, gc=False):
    """Log-probability of one token at one position."""

    logprob: float
    rank: int | None = None  # 1 is the most likely
    decoded_token: str | None = None


LogprobsDict = dict[int, Logprob]  # token id -> Logprob; the sampled (or prompt) token first


class RequestMetrics(msgspec.Struct):
    """When things happened: seconds since the epoch, whose differences come from a monotonic clock."""

    arrival_time: float
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    time_in_queue: float | None = None  # seconds


class CompletionOutput(msgspec.Struct):
    """One completion of a request, as a whole or the part since the last output (RequestOutputKind.DELTA)."""

    index: int  # of the request's n completions
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None  # of all sampled tokens so far, if logprobs were asked for
    logprobs: list[LogprobsDict] | None  # one per token of token_ids
    finish_reason: str | None = None  # "stop", "length", "abort", "error", "repetition"; None: goes on
    stop_reason: int | str | None = None  # the stop string, the stop token's id, or the error's reason
    lora_request: None = None

    def finished(self) -> bool:
        """Whether the completion has ended."""
        return self.finish_reason is not None


class RequestOutput(msgspec.Struct):
    """What is known of a request: the prompt and its completions."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[LogprobsDict | None] | None  # per prompt token, None for the first; DELTA: given once
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics | None = None
    lora_request: None = None
    num_cached_tokens: int | None = None
