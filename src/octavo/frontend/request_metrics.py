"""Request metrics: what is counted of each request, by vLLM's names, in a server and inside an LLM alike.

Owns the families that follow from requests alone, their buckets, and which event of a request counts where. Knows
neither Prometheus nor who asks. Invariants: counters never go back; nothing is counted of a request in a step that
brings nothing of it to its reader.
"""

from __future__ import annotations

import bisect
import collections
import itertools
import math
import threading
from collections.abc import Sequence

import msgspec

from octavo.frontend.frontend import Checked
from octavo.request.outputs import NOT_THE_MODELS, RequestOutput
from octavo.request.sampling_params import SamplingParams

LATENCY = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
FIRST_TOKEN = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
PER_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
COUNTS = (1, 2, 5, 10, 20)
TOKENS: tuple[float, ...] = ()  # stands for 1-2-5 steps up to max_model_len
MOST_DUE = 4096  # events that wait to be counted
FINISH_REASONS = ("stop", "length", "abort", "error", "repetition")

# Counters -> the values of their one label, "" where they have none.
COUNTERS_OF_REQUESTS = {
    "prompt_tokens": ("",),
    "generation_tokens": ("",),
    "request_success": FINISH_REASONS,
    "corrupted_requests": ("",),
    "prompt_tokens_cached": ("",),
    "prompt_tokens_by_source": ("local_compute", "local_cache_hit", "external_kv_transfer"),
}
LABELS = {"request_success": "finished_reason", "prompt_tokens_by_source": "source"}
# Histograms -> their buckets' bounds.
HISTOGRAMS_OF_REQUESTS: dict[str, tuple[float, ...]] = {
    "time_to_first_token_seconds": FIRST_TOKEN,
    "inter_token_latency_seconds": PER_TOKEN,
    "request_time_per_output_token_seconds": PER_TOKEN,
    "e2e_request_latency_seconds": LATENCY,
    "request_queue_time_seconds": LATENCY,
    "request_inference_time_seconds": LATENCY,
    "request_prefill_time_seconds": LATENCY,
    "request_decode_time_seconds": LATENCY,
    "request_prompt_tokens": TOKENS,
    "request_generation_tokens": TOKENS,
    "request_max_num_generation_tokens": TOKENS,
    "request_prefill_kv_computed_tokens": TOKENS,
    "request_params_n": COUNTS,
    "request_params_max_tokens": TOKENS,
}


class RequestFacts(msgspec.Struct, kw_only=True):
    """A request in figures. Times are of one clock, whose differences count."""

    request_id: str
    params: SamplingParams
    num_prompt_tokens: int
    max_tokens: int  # as resolved: what the context leaves
    arrival: float
    num_cached_tokens: int = 0
    num_loaded_tokens: int = 0  # those of them that a connector brought
    num_output_tokens: int = 0  # of all completions
    num_new_tokens: int = 0  # of them, those that the last event brought
    queue_seconds: float | None = None  # until the engine first ran it
    first_token_at: float | None = None
    previous_token_at: float | None = None  # the event with tokens before the last one
    last_token_at: float | None = None
    finished_at: float | None = None
    is_corrupted: bool = False  # failed, and not for wishes that exclude each other
    finish_reasons: dict[int, str] = {}  # by completion; complete once finished; "rejected": {0: reason}


class Histogram:
    """Counts per bucket and a sum. A bucket holds what is at most its bound."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        """`bounds` ascend; a last bucket without bound is added."""
        self.bounds, self.counts, self.sum = tuple(bounds), [0] * (len(bounds) + 1), 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Count `value`, `count` times."""
        self.counts[bisect.bisect_left(self.bounds, value)] += count
        self.sum += value * count

    def cumulative(self) -> list[tuple[str, float]]:
        """(upper bound, how many are at most that) for every bucket, +Inf last."""
        names = [*(str(float(bound)) for bound in self.bounds), "+Inf"]
        return list(zip(names, map(float, itertools.accumulate(self.counts)), strict=True))


class RequestCounts:
    """The figures of all requests that one front end has had. One thread at a time counts."""

    def __init__(self, max_model_len: int) -> None:
        """All of them are zero. max_model_len: the largest bucket of tokens."""
        self.values = {name: dict.fromkeys(labels, 0.0) for name, labels in COUNTERS_OF_REQUESTS.items()}
        self.histograms = {
            name: Histogram(bounds or token_buckets(max_model_len)) for name, bounds in HISTOGRAMS_OF_REQUESTS.items()
        }

    def observe(self, event: str, facts: RequestFacts) -> None:
        """Take an event: the first tokens of a request, further ones, or its end."""
        match event:
            case "first_token":
                self._first_token(facts)
            case "tokens":
                self._tokens(facts)
            case "finished" | "aborted" | "failed":
                self._ended(event, facts)

    def _first_token(self, facts: RequestFacts) -> None:
        values, cached = self.values, min(facts.num_cached_tokens, facts.num_prompt_tokens)
        if facts.first_token_at is not None:
            self.histograms["time_to_first_token_seconds"].observe(facts.first_token_at - facts.arrival)
        values["prompt_tokens"][""] += facts.num_prompt_tokens
        values["prompt_tokens_cached"][""] += cached
        loaded, by_source = min(facts.num_loaded_tokens, cached), values["prompt_tokens_by_source"]
        by_source["external_kv_transfer"] += loaded
        by_source["local_cache_hit"] += cached - loaded
        by_source["local_compute"] += facts.num_prompt_tokens - cached
        values["generation_tokens"][""] += facts.num_new_tokens

    def _tokens(self, facts: RequestFacts) -> None:
        self.values["generation_tokens"][""] += facts.num_new_tokens
        if facts.last_token_at is not None and facts.previous_token_at is not None:
            self.histograms["inter_token_latency_seconds"].observe(facts.last_token_at - facts.previous_token_at)

    def _ended(self, event: str, facts: RequestFacts) -> None:
        successes, seen, n = self.values["request_success"], self.histograms, facts.params.n
        missing = "abort" if event == "aborted" else "error"
        self.values["corrupted_requests"][""] += facts.is_corrupted
        for index in range(n):
            reason = facts.finish_reasons.get(index, missing)
            successes[reason if reason in FINISH_REASONS else "error"] += 1
        seen["request_params_n"].observe(n)
        seen["request_params_max_tokens"].observe(facts.max_tokens)
        seen["request_prompt_tokens"].observe(facts.num_prompt_tokens)
        seen["request_prefill_kv_computed_tokens"].observe(max(facts.num_prompt_tokens - facts.num_cached_tokens, 0))
        seen["request_generation_tokens"].observe(facts.num_output_tokens)
        seen["request_max_num_generation_tokens"].observe(math.ceil(facts.num_output_tokens / n))
        if event == "finished":
            self._times(facts)

    def _times(self, facts: RequestFacts) -> None:
        """Where the time of a request went that came to its end."""
        seen, queue = self.histograms, facts.queue_seconds or 0.0
        if facts.finished_at is not None:
            seen["e2e_request_latency_seconds"].observe(facts.finished_at - facts.arrival)
        seen["request_queue_time_seconds"].observe(queue)
        if facts.first_token_at is None or facts.last_token_at is None:
            return
        prefill = max(facts.first_token_at - facts.arrival - queue, 0.0)
        decode = facts.last_token_at - facts.first_token_at
        seen["request_prefill_time_seconds"].observe(prefill)
        seen["request_decode_time_seconds"].observe(decode)
        seen["request_inference_time_seconds"].observe(prefill + decode)
        if facts.num_output_tokens > facts.params.n:
            per_token = decode * facts.params.n / (facts.num_output_tokens - facts.params.n)
            seen["request_time_per_output_token_seconds"].observe(per_token)


class RequestLog:
    """Counts the requests of who has their outputs alone, and no other word of the engine's.

    Those that end are counted later, when there is time or somebody looks: a whole batch may end in one step.
    """

    def __init__(self, max_model_len: int) -> None:
        """No request yet."""
        self._counts = RequestCounts(max_model_len)
        self._open: dict[str, RequestFacts] = {}
        self._due = collections.deque[tuple[str, RequestFacts]]()  # events of requests that have ended
        self._lock = threading.Lock()

    def forget_threads(self) -> None:
        """For a forked process: none of those that counted is there."""
        self._lock = threading.Lock()

    @property
    def counts(self) -> RequestCounts:
        """The figures of this moment."""
        self.count(len(self._due))
        return self._counts

    def count(self, most: int) -> None:
        """Take in up to so many events of requests that have ended. For any thread."""
        with self._lock:
            for _ in range(min(most, len(self._due))):
                self._counts.observe(*self._due.popleft())

    def begin(self, request_id: str, request: Checked) -> None:
        """A request was queued."""
        prompt, params, max_tokens, _ = request
        self._open[request_id] = RequestFacts(
            request_id=request_id,
            params=params,
            num_prompt_tokens=len(prompt.token_ids),
            max_tokens=max_tokens,
            arrival=0.0,
        )

    def take(self, output: RequestOutput) -> None:
        """An output on its way to its reader: deltas, or one output at the end."""
        facts, metrics = self._open.get(output.request_id), output.metrics
        if facts is None or metrics is None:
            return
        num_new, event = sum([len(completion.token_ids) for completion in output.outputs]), ""
        if num_new:
            event = "tokens" if facts.num_output_tokens else "first_token"
            facts.num_new_tokens, facts.num_output_tokens = num_new, facts.num_output_tokens + num_new
            facts.arrival, facts.queue_seconds = metrics.arrival_time, metrics.time_in_queue
            facts.first_token_at, facts.num_cached_tokens = metrics.first_token_time, output.num_cached_tokens or 0
            facts.previous_token_at, facts.last_token_at = facts.last_token_at, metrics.last_token_time
        for completion in output.outputs:
            if completion.finish_reason is not None:
                facts.finish_reasons = facts.finish_reasons | {completion.index: completion.finish_reason}
                failed = completion.finish_reason == "error"
                facts.is_corrupted |= failed and completion.stop_reason not in NOT_THE_MODELS
        if output.finished:
            facts.arrival, facts.finished_at = metrics.arrival_time, metrics.finished_time
            facts.queue_seconds = metrics.time_in_queue
            del self._open[output.request_id]
            self._due.append((event, facts))
            self._due.append(("finished", facts))
            self.count(len(self._due) - MOST_DUE)
        else:
            self._observe(event, facts)

    def drop(self, request_ids: list[str]) -> None:
        """Requests whose reader has left."""
        for request_id in request_ids:
            facts = self._open.pop(request_id, None)
            if facts is not None:
                self._observe("aborted", facts)

    def _observe(self, event: str, facts: RequestFacts) -> None:
        with self._lock:
            self._counts.observe(event, facts)


def token_buckets(max_model_len: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, 50, ... up to `max_model_len`."""
    found: list[float] = []
    power = 1
    while power <= max_model_len:
        found += [step * power for step in (1, 2, 5) if step * power <= max_model_len]
        power *= 10
    return tuple(found)
