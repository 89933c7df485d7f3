"""How many log-probabilities a request may ask for, and all open requests together.

Owns the count of a request before it runs, the refusal of what would not fit, and the return of freed memory to the
system. Knows no route and no engine. Invariant: what is held comes back when the answer was sent, or not sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
from collections.abc import Sequence

from octavo.request.sampling_params import Limits, ParameterError, RequestOutputKind, SamplingParams
from octavo.serve.errors import queue_full

_SOON = 0.1  # seconds
_WIDE = 64  # ids that a sampling mask without top_k is reckoned at
_MANY = 1 << 18  # held log-probabilities, 12 bytes each, after which freed memory is given back


class LogprobBudget:
    """The log-probabilities of a server. Used on its event loop."""

    def __init__(self, max_request: int, max_open: int) -> None:
        """max_request: of one request; max_open: of the prompts of all open ones."""
        self.num_open = 0
        self._max_request, self._max_open = max_request, max_open

    def held(self, params: SamplingParams, limits: Limits, prompt_lengths: Sequence[int]) -> HeldLogprobs:
        """Within, a request's log-probabilities count. Raises ParameterError if they are too many, ApiError 503."""
        of_prompts, of_outputs = count_logprobs(params, limits, prompt_lengths)
        total = of_prompts * params.n + of_outputs
        if total > self._max_request:
            name = "prompt_logprobs" if of_prompts * params.n > of_outputs else "logprobs"
            message = f"{total} log-probabilities of {len(prompt_lengths)} prompts with n {params.n} exceed"
            raise ParameterError(name, f"{message} {self._max_request} (--max-request-logprobs)", "too_many_logprobs")
        if self.num_open and self.num_open + of_prompts > self._max_open:
            raise queue_full(f"too many log-probabilities are on their way: at most {self._max_open}", 5.0)
        return HeldLogprobs(self, of_prompts, total)


class HeldLogprobs:
    """Within, a request's log-probabilities count. No generator: those take more memory, as long as a stream lasts."""

    __slots__ = ("_budget", "_of_prompts", "_total")

    def __init__(self, budget: LogprobBudget, of_prompts: int, total: int) -> None:
        """of_prompts: those of the total that count."""
        self._budget, self._of_prompts, self._total = budget, of_prompts, total

    def __enter__(self) -> None:
        """Begin."""
        self._budget.num_open += self._of_prompts

    def __exit__(self, *_: object) -> None:
        """End."""
        self._budget.num_open -= self._of_prompts
        if self._total > _MANY:  # once whoever answered has let go of them
            asyncio.get_running_loop().call_later(_SOON, give_back)


def count_logprobs(params: SamplingParams, limits: Limits, prompt_lengths: Sequence[int]) -> tuple[int, int]:
    """Most log-probabilities that a request's prompts have, and those of outputs that are kept until the end."""

    def width(num_top: int) -> int:
        return 1 + (limits.vocab_size if num_top == -1 else num_top)

    of_prompts = of_outputs = 0
    if params.prompt_logprobs is not None:
        of_prompts = sum(prompt_lengths) * width(params.prompt_logprobs)
    wanted = params.logprobs is not None or params.logprob_token_ids is not None
    if wanted and params.output_kind is not RequestOutputKind.DELTA:
        each = width(params.logprobs or 0) + len(params.logprob_token_ids or ())
        of_outputs = params.n * _num_tokens(params, limits, prompt_lengths) * each
    if params.return_sampling_mask and params.output_kind is not RequestOutputKind.DELTA:  # 4 bytes an id
        of_outputs += params.n * _num_tokens(params, limits, prompt_lengths) * (max(params.top_k, 0) or _WIDE) // 3
    if params.return_routed_experts:
        num_layers, num_ranks = limits.experts
        num_tokens = sum(prompt_lengths) + _num_tokens(params, limits, prompt_lengths)
        of_outputs += params.n * num_tokens * num_layers * num_ranks // 6
    return of_prompts, of_outputs


def _num_tokens(params: SamplingParams, limits: Limits, prompt_lengths: Sequence[int]) -> int:
    """Most tokens of one completion of each prompt, together."""
    most = params.max_tokens or limits.max_model_len
    return sum(min(most, max(limits.max_model_len - length, 0)) for length in prompt_lengths)


def give_back() -> None:
    """Let the allocator return to the system what is free; where it cannot be asked, nothing happens."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
