"""The figures of `octavo bench serve`: from what each request saw to vLLM's table and JSON keys.

Owns the statistics. Times are seconds in, milliseconds out. Invariant: a request that failed counts in `failed` and in
nothing else.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

METRICS = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}
GOODPUT_METRICS = ("ttft", "tpot", "e2el")


@dataclasses.dataclass(slots=True)
class Outcome:
    """One request as the client saw it. `start` is a clock's time, the rest are seconds and counts."""

    start: float = 0.0
    ttft: float = 0.0
    latency: float = 0.0  # to the last chunk with a token
    itl: list[float] = dataclasses.field(default_factory=list)
    prompt_len: int = 0
    output_len: int = 0
    text: str = ""
    error: str = ""  # empty: a success

    @property
    def tpot(self) -> float:
        """Seconds per token after the first; 0 for a single token."""
        return (self.latency - self.ttft) / (self.output_len - 1) if self.output_len > 1 else 0.0


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear between the two nearest values; 0 for none."""
    if not values:
        return 0.0
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def summarize(
    outcomes: Sequence[Outcome],
    duration: float,
    *,
    metrics: Sequence[str],
    percentiles: Sequence[float],
    goodput: Mapping[str, float],
) -> dict[str, Any]:
    """vLLM's keys. `goodput` maps metric names to their limits in milliseconds."""
    good = [outcome for outcome in outcomes if not outcome.error]
    total_input, total_output = (
        sum(getattr(outcome, f"{way}_len") for outcome in good) for way in ("prompt", "output")
    )
    peak_tokens, peak_requests = _peaks(good)
    met = sum(_meets(outcome, goodput) for outcome in good)
    result: dict[str, Any] = {
        "duration": duration,
        "completed": len(good),
        "failed": len(outcomes) - len(good),
        "total_input_tokens": total_input,
        "total_output_tokens": total_output,
        "request_throughput": len(good) / duration,
        "request_goodput": met / duration if goodput else None,
        "output_throughput": total_output / duration,
        "total_token_throughput": (total_input + total_output) / duration,
        "input_lens": [outcome.prompt_len for outcome in outcomes],
        "output_lens": [outcome.output_len for outcome in outcomes],
        "ttfts": [outcome.ttft for outcome in outcomes],
        "itls": [outcome.itl for outcome in outcomes],
        "generated_texts": [outcome.text for outcome in outcomes],
        "errors": [outcome.error for outcome in outcomes],
        "max_output_tokens_per_s": peak_tokens,
        "max_concurrent_requests": peak_requests,
    }
    seen = {
        "ttft": [outcome.ttft for outcome in good],
        "tpot": [outcome.tpot for outcome in good if outcome.output_len > 1],
        "itl": list(itertools.chain.from_iterable(outcome.itl for outcome in good)),
        "e2el": [outcome.latency for outcome in good],
    }
    for name in metrics:
        result |= _statistics(name, seen[name], percentiles)
    return result


_DRAFTS = re.compile(r"^vllm:spec_decode_(num_\w+?)_total(?:\{(.*?)\})? (\S+)$", re.MULTILINE)
_PLACE = re.compile(r'position="(\d+)"')


def read_drafts(page: str) -> Counter[str]:
    """What a page of metrics counts of drafts, of all engines together; empty: nothing, as without drafts."""
    counts: Counter[str] = Counter()
    for name, labels, value in _DRAFTS.findall(page):
        place = _PLACE.search(labels)
        counts[f"{name} {place[1]}" if place else name] += int(float(value))
    return counts if any(" " in name for name in counts) or counts.total() else Counter()


def drafts_between(before: Counter[str], after: Counter[str]) -> dict[str, Any]:
    """vLLM's keys of speculative decoding, of what was counted between two pages; empty: the server has no drafts."""
    if not after:
        return {}
    drafts, proposed, accepted = (
        after[name] - before[name] for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
    )
    of_place = {
        int(place): after[name] - before[name] for name in after for _, found, place in [name.partition(" ")] if found
    }
    return {
        "spec_decode_acceptance_rate": 100 * accepted / max(proposed, 1),
        "spec_decode_acceptance_length": 1 + accepted / max(drafts, 1),
        "spec_decode_num_drafts": drafts,
        "spec_decode_draft_tokens": proposed,
        "spec_decode_accepted_tokens": accepted,
        "spec_decode_per_position_acceptance_rates": [of_place[place] / max(drafts, 1) for place in sorted(of_place)],
    }


DETAILS = ("input_lens", "output_lens", "ttfts", "itls", "generated_texts", "errors")


def _statistics(name: str, seconds: Sequence[float], percentiles: Sequence[float]) -> dict[str, float]:
    values = [second * 1000 for second in seconds]
    row = {
        f"mean_{name}_ms": statistics.fmean(values) if values else 0.0,
        f"median_{name}_ms": statistics.median(values) if values else 0.0,
        f"std_{name}_ms": statistics.pstdev(values) if values else 0.0,
    }
    return row | {f"p{percent:g}_{name}_ms": percentile(values, percent) for percent in percentiles}


def _meets(outcome: Outcome, goodput: Mapping[str, float]) -> bool:
    times = {"ttft": outcome.ttft, "tpot": outcome.tpot, "e2el": outcome.latency}
    return all(times[name] * 1000 <= limit for name, limit in goodput.items())


def _peaks(good: Sequence[Outcome]) -> tuple[float, int]:
    """Most tokens and most requests within one second of the run.

    A request's chunks count as equally many tokens: as one each, or as more where a server sends the tokens of a step
    together, as it does with drafts.
    """
    if not good:
        return 0.0, 0
    begin = min(outcome.start for outcome in good)
    tokens: dict[int, float] = {}
    requests: dict[int, int] = {}
    for outcome in good:
        moment = outcome.start - begin
        for second in range(int(moment), int(moment + outcome.latency) + 1):
            requests[second] = requests.get(second, 0) + 1
        share = outcome.output_len / (1 + len(outcome.itl))
        for gap in (outcome.ttft, *outcome.itl):
            moment += gap
            tokens[int(moment)] = tokens.get(int(moment), 0.0) + share
    return max(tokens.values()), max(requests.values())


def table(result: Mapping[str, Any], metrics: Sequence[str], percentiles: Sequence[float]) -> str:
    """The result for people."""
    rows: list[tuple[str, Any]] = [
        ("Successful requests:", result["completed"]),
        ("Failed requests:", result["failed"]),
        ("Benchmark duration (s):", result["duration"]),
        ("Total input tokens:", result["total_input_tokens"]),
        ("Total generated tokens:", result["total_output_tokens"]),
        ("Request throughput (req/s):", result["request_throughput"]),
        ("Request goodput (req/s):", result["request_goodput"]),
        ("Output token throughput (tok/s):", result["output_throughput"]),
        ("Peak output token throughput (tok/s):", result["max_output_tokens_per_s"]),
        ("Peak concurrent requests:", result["max_concurrent_requests"]),
        ("Total token throughput (tok/s):", result["total_token_throughput"]),
    ]
    lines = [f"{' Serving Benchmark Result ':=^50}", *(_row(name, value) for name, value in rows if value is not None)]
    for name in metrics:
        lines.append(f"{METRICS[name]:-^50}")
        lines += [
            _row(f"{word} {name.upper()} (ms):", result[f"{word.lower()}_{name}_ms"]) for word in ("Mean", "Median")
        ]
        lines += [_row(f"P{each:g} {name.upper()} (ms):", result[f"p{each:g}_{name}_ms"]) for each in percentiles]
    return "\n".join([*lines, *_table_of_drafts(result), "=" * 50])


def _table_of_drafts(result: Mapping[str, Any]) -> list[str]:
    if "spec_decode_num_drafts" not in result:
        return []
    rows: list[tuple[str, Any]] = [
        ("Acceptance rate (%):", result["spec_decode_acceptance_rate"]),
        ("Acceptance length:", result["spec_decode_acceptance_length"]),
        ("Drafts:", result["spec_decode_num_drafts"]),
        ("Draft tokens:", result["spec_decode_draft_tokens"]),
        ("Accepted tokens:", result["spec_decode_accepted_tokens"]),
    ]
    places = enumerate(result["spec_decode_per_position_acceptance_rates"])
    rows += [(f"Position {place} acceptance (%):", 100.0 * rate) for place, rate in places]
    return [f"{'Speculative Decoding':-^50}", *(_row(name, value) for name, value in rows)]


def _row(name: str, value: Any) -> str:
    return f"{name:<40} {value:<10.2f}" if isinstance(value, float) else f"{name:<40} {value:<10}"
