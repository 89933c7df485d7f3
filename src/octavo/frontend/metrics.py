"""metrics: what a core counts, by vLLM's names, for `LLM.get_metrics` and for a server's /metrics alike.

Owns the names of a core's figures and the forms in which `LLM.get_metrics` tells them. Knows neither Prometheus nor
what a server counts beside them. Invariant: a name means the same wherever it is told.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from octavo.frontend.messages import EngineStats
from octavo.frontend.request_metrics import LABELS, RequestCounts

# (name, field of EngineStats)
GAUGES = (
    ("vllm:num_requests_running", "num_running"),
    ("vllm:num_requests_waiting", "num_waiting"),
    ("vllm:kv_cache_usage_perc", "cache_usage"),
    ("octavo:num_free_blocks", "num_free_blocks"),
    ("octavo:engine_resident_memory_bytes", "rss_bytes"),
    ("octavo:kv_stored_bytes", "kv_stored_bytes"),
)
COUNTERS = (
    ("vllm:num_preemptions", "num_preemptions"),
    ("vllm:prefix_cache_queries", "num_prefix_queries"),
    ("vllm:prefix_cache_hits", "num_prefix_hits"),
    ("vllm:spec_decode_num_drafts", "num_drafts"),
    ("vllm:spec_decode_num_draft_tokens", "num_draft_tokens"),
    ("vllm:spec_decode_num_accepted_tokens", "num_accepted_tokens"),
    ("vllm:external_prefix_cache_queries", "num_matched_tokens"),
    ("vllm:external_prefix_cache_hits", "num_loaded_tokens"),
    ("octavo:kv_load_failures", "num_load_failures"),
    ("octavo:kv_load_misses", "num_load_misses"),
    ("octavo:kv_expired_holds", "num_expired_holds"),
    ("octavo:kv_saved_blocks", "num_kv_saved_blocks"),
    ("octavo:kv_loaded_blocks", "num_kv_loaded_blocks"),
    ("octavo:kv_saved_bytes", "kv_saved_bytes"),
    ("octavo:kv_loaded_bytes", "kv_loaded_bytes"),
    ("octavo:kv_save_seconds", "kv_save_seconds"),
    ("octavo:kv_load_seconds", "kv_load_seconds"),
    ("octavo:kv_evicted_blocks", "num_kv_evicted_blocks"),
    ("octavo:kv_errors", "num_kv_errors"),
    ("octavo:kv_late_lookups", "num_kv_late_lookups"),
    ("octavo:weight_updates", "num_weight_updates"),
    ("octavo:failed_weight_updates", "num_failed_weight_updates"),
    ("octavo:weight_update_seconds", "weight_update_seconds"),
    ("octavo:weight_pause_seconds", "weight_pause_seconds"),
)
ACCEPTED_PER_PLACE = "vllm:spec_decode_num_accepted_tokens_per_pos"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """A figure's name, as of vLLM's metric without `_total`, and its labels."""

    name: str
    labels: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Counter(Metric):
    """What only grows while the engine lives."""

    value: int | float  # a float where seconds are counted


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Gauge(Metric):
    """What goes up and down."""

    value: float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Vector(Metric):
    """Counters that differ in their place alone."""

    values: list[int]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Histogram(Metric):
    """How many values there were, their sum, and by upper bound how many were at most that; "+Inf" last."""

    count: int
    sum: float
    buckets: dict[str, int]


def metrics_of_requests(counts: RequestCounts, labels: Mapping[str, str]) -> list[Metric]:
    """What was counted of requests. Where a prompt's tokens came from is left out: their readers are not told."""
    found: list[Metric] = []
    for name, values in counts.values.items():
        for value, number in values.items() if name != "prompt_tokens_by_source" else ():
            own = {**labels, LABELS[name]: value} if name in LABELS else dict(labels)
            found.append(Counter(name=f"vllm:{name}", labels=own, value=int(number)))
    for name, told in counts.histograms.items():
        buckets = {bound: int(number) for bound, number in told.cumulative()}
        count = buckets["+Inf"]
        found.append(Histogram(name=f"vllm:{name}", labels=dict(labels), count=count, sum=told.sum, buckets=buckets))
    return found


def metrics_of(stats: EngineStats, labels: Mapping[str, str]) -> list[Metric]:
    """All figures of a core, gauges first. labels: what each of them is given."""
    found: list[Metric] = [
        Gauge(name=name, labels=dict(labels), value=float(getattr(stats, field))) for name, field in GAUGES
    ]
    found += [Counter(name=name, labels=dict(labels), value=getattr(stats, field)) for name, field in COUNTERS]
    return [*found, Vector(name=ACCEPTED_PER_PLACE, labels=dict(labels), values=list(stats.accepted_per_position))]
