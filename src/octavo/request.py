"""Request: the host truth of one sequence that is being generated.

Owns the tokens of a request, how far they are computed, and its status. Knows nothing of blocks, rows of tensors, text
or torch. Invariant: `num_computed <= num_tokens + num_in_flight`; while a step is in flight the lengths are upper
bounds of what the device has finished, after `Scheduler.update` they are exact.
"""

from __future__ import annotations

import enum
import itertools

from octavo.sampling_params import SamplingParams

_ARRIVALS = itertools.count()


class Status(enum.IntEnum):
    """Where a request stands. Everything from FINISHED on has ended."""

    WAITING = 0
    RUNNING = 1
    PREEMPTED = 2  # waits again; its tokens are kept, its blocks are not
    FINISHED = 3


class FinishReason(enum.StrEnum):
    """Why a request ended, in the field's words."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    REPETITION = "repetition"  # SamplingParams.repetition_detection saw a loop


class Request:
    """One sequence: its prompt, its output so far, and its progress.

    `tokens` holds the prompt and every known output token. `num_computed` counts tokens that scheduled steps have
    computed or will have computed. `num_in_flight` counts sampled tokens that a step in flight will give.
    """

    __slots__ = (
        "arrival", "block_hashes", "cache_salt", "check_from", "end_token_ids", "eos_token_ids", "error",
        "finish_reason", "max_tokens", "num_cached", "num_computed", "num_in_flight", "num_preemptions", "num_prompt",
        "num_prompt_logprobs", "params", "priority", "request_id", "row", "seed", "status", "stop_reason",
        "stop_token_ids", "tokens",
    )  # fmt: skip

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        max_tokens: int,
        seed: int,
        eos_token_ids: frozenset[int] = frozenset(),
        priority: int = 0,
        cache_salt: str = "",
    ) -> None:
        """`max_tokens` and `seed` are resolved: the room in the context is counted in, the seed is never None."""
        assert prompt_token_ids, "an empty prompt is refused before a Request is made"
        assert max_tokens >= 1, "a request generates at least one token"
        self.request_id = request_id
        self.params = params
        self.tokens = list(prompt_token_ids)
        self.num_prompt = len(prompt_token_ids)
        self.max_tokens = max_tokens
        self.seed = seed
        # a structured output may be followed by EOS alone once it is complete, so there EOS always ends it
        goes_on = params.ignore_eos and params.structured_outputs is None
        self.eos_token_ids = frozenset() if goes_on else eos_token_ids
        self.stop_token_ids = frozenset(params.stop_token_ids or ())
        self.end_token_ids = self.eos_token_ids | self.stop_token_ids  # one look-up per token tells whether it may end
        self.check_from = 0  # known tokens from which any token may end it; set with `max_tokens` by the scheduler
        self.priority = priority
        self.cache_salt = cache_salt
        self.arrival = next(_ARRIVALS)
        self.status = Status.WAITING
        self.row = -1
        self.num_computed = 0
        self.num_in_flight = 0
        self.num_cached = 0  # prompt tokens found in the prefix cache at first admission
        self.num_preemptions = 0
        self.num_prompt_logprobs = 0  # prompt positions whose log-probabilities were delivered
        self.block_hashes: list[bytes] = []  # of full blocks, extended by the KV manager
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.error = ""

    @property
    def num_tokens(self) -> int:
        """Known tokens: prompt and output."""
        return len(self.tokens)

    @property
    def num_output(self) -> int:
        """Known output tokens."""
        return len(self.tokens) - self.num_prompt

    @property
    def finished(self) -> bool:
        """Whether the request has ended, for whatever reason."""
        return self.status is Status.FINISHED

    def __repr__(self) -> str:
        """Printable without content."""
        return (
            f"Request({self.request_id}, {self.status.name}, prompt={self.num_prompt}, output={self.num_output}, "
            f"computed={self.num_computed}, in_flight={self.num_in_flight})"
        )
