"""QueueBounds: how much may wait for an engine, and when to come back where it is too much.

Owns both limits, the count of prompt tokens that wait, and the pace at which requests finish. Knows no text and no
process. Invariant: a single prompt that comes while nothing waits is taken, whatever the limits are.
"""

from __future__ import annotations

import collections
import math
import time

from octavo.request.sampling_params import ParameterError
from octavo.serve.engine.refusals import QueueFullError
from octavo.serve.engine.stream import RequestFacts

_PACE_WINDOW = 64  # finished requests from which the pace is told


class QueueBounds:
    """One server's. All of it is used on one event loop."""

    def __init__(self, max_num_reqs: int, max_num_tokens: int | None) -> None:
        """Of what may wait: sequences beyond those that run, and prompt tokens without a first output token."""
        self.max_num_seqs = 0  # that run at once, as far as it is known
        self.num_tokens = 0  # that wait
        self._max_num_reqs, self._max_num_tokens = max_num_reqs, max_num_tokens
        self._finish_times: collections.deque[float] = collections.deque(maxlen=_PACE_WINDOW)

    def num_queued(self, num_open: int) -> int:
        """Of so many open sequences, those beyond what can run at once."""
        return max(num_open - self.max_num_seqs, 0)

    def check(self, facts: RequestFacts, num_open: int) -> None:
        """Raise QueueFullError if the request would have to wait behind too much. `num_open`: sequences."""
        if num_open + facts.params.n > self.max_num_seqs + self._max_num_reqs and num_open:
            raise QueueFullError("requests", self._max_num_reqs, self._retry_after(num_open))
        most = self._max_num_tokens
        if most is not None and self.num_tokens + facts.num_prompt_tokens > most and self.num_tokens:
            raise QueueFullError("tokens", most, self._retry_after(num_open))

    def check_run(self, lengths: list[int], n: int) -> None:
        """Raise ParameterError for prompts of these lengths that the queue could never take together."""
        num_prompts, running, waiting = len(lengths), self.max_num_seqs, self._max_num_reqs
        if num_prompts == 1:
            return
        if num_prompts * n > running + waiting:
            asked = f"{num_prompts} prompts" + (f" x n {n} = {num_prompts * n}" if n > 1 else "")
            message = f"{asked} are more than run and wait at once: max_num_seqs {running} + "
            message += f"max_num_queued_reqs {waiting}; send fewer at a time, or raise --max-num-queued-reqs"
            raise ParameterError("prompt", message, "too_many_prompts")
        if self._max_num_tokens is not None and sum(lengths) > self._max_num_tokens:
            message = f"{sum(lengths)} tokens of all prompts exceed {self._max_num_tokens} (max_num_queued_tokens)"
            raise ParameterError("prompt", message, "too_many_prompts")

    def watch(self, event: str, facts: RequestFacts) -> None:
        """As AsyncEngine's observer."""
        ended = event in ("finished", "aborted", "failed")
        if event == "added":
            self.num_tokens += facts.num_prompt_tokens
        elif event == "first_token" or (ended and facts.first_token_at is None):
            self.num_tokens -= facts.num_prompt_tokens
        if event == "finished":
            self._finish_times.append(time.monotonic())

    def _retry_after(self, num_open: int) -> float:
        """Seconds until a part of the queue is gone at today's pace."""
        times = self._finish_times
        pace = len(times) / max(time.monotonic() - times[0], 1e-3) if times else 1.0  # requests per second
        return float(min(max(math.ceil(self.num_queued(num_open) / 4 / pace), 1), 60))
