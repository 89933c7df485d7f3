"""The names of /metrics: vLLM's, so that dashboards and autoscalers made for it find what they look for.

Owns name, kind, label, buckets and older names of every family. Holds no values. Invariant: the set of series follows
from this table, the table of routes and the number of drafts alone, so no text of a client becomes one.
"""

from __future__ import annotations

import dataclasses

from octavo.frontend.request_metrics import COUNTERS_OF_REQUESTS, HISTOGRAMS_OF_REQUESTS, LABELS, TOKENS
from octavo.rl.session import BACKENDS

VLLM, OWN = "vllm:", "octavo:"  # prefixes
ACCEPTED_PER_PLACE = "spec_decode_num_accepted_tokens_per_pos"
STEP_TOKENS = (1, *(2**power for power in range(3, 15)))
HTTP = (0.01, 0.05, 0.1, 0.5, 1, 5, 30, 120)

UPDATE = (0.01, 0.1, 1, 10, 30, 60, 120, 300, 600)
OPERATIONS = ("init", "shutdown", "start", "update", "finish", "abort", "version")  # of a weight update


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """One metric. `label` is one label beside model_name and engine, with all the `values` that it takes."""

    name: str  # without the prefix; counters get _total when they are written
    kind: str  # gauge | counter | histogram
    help: str
    label: str = ""
    values: tuple[str, ...] = ("",)
    buckets: tuple[float, ...] = TOKENS
    alias: str = ""  # an older name of it, still written
    prefix: str = VLLM


def _gauge(name: str, help: str, label: str = "", values: tuple[str, ...] = ("",), alias: str = "") -> Family:
    return Family(name=name, kind="gauge", help=help, label=label, values=values, alias=alias)


def _counter(name: str, help: str, label: str = "", values: tuple[str, ...] = ("",), alias: str = "") -> Family:
    return Family(name=name, kind="counter", help=help, label=label, values=values, alias=alias)


def _histogram(name: str, help: str, buckets: tuple[float, ...] = TOKENS, alias: str = "") -> Family:
    return Family(name=name, kind="histogram", help=help, buckets=buckets, alias=alias)


def _of_requests(name: str, help: str, alias: str = "") -> Family:
    if name in HISTOGRAMS_OF_REQUESTS:
        return _histogram(name, help, HISTOGRAMS_OF_REQUESTS[name], alias)
    return _counter(name, help, LABELS.get(name, ""), COUNTERS_OF_REQUESTS[name])


FAMILIES = (
    _gauge("num_requests_running", "Requests with a row in the current step"),
    _gauge("num_requests_waiting", "Requests that wait to run"),
    _gauge(
        "num_requests_waiting_by_reason", "Waiting requests by what they wait for", "reason", ("capacity", "deferred")
    ),
    _gauge("kv_cache_usage_perc", "Share of the cache's blocks in use, 0 to 1", alias="gpu_cache_usage_perc"),
    _gauge(
        "engine_sleep_state",
        "1 for the state that the engine is in",
        "sleep_state",
        ("awake", "weights_offloaded", "discard_all"),
    ),
    _of_requests("prompt_tokens", "Prompt tokens of requests that began to answer, once of each request"),
    _of_requests("generation_tokens", "Tokens generated"),
    _of_requests("request_success", "Requests that ended, by reason"),
    _of_requests(
        "corrupted_requests", "Requests that failed alone: logits that were not numbers, tokens that do not exist"
    ),
    _counter("num_preemptions", "Times that a running request lost its blocks"),
    _counter(
        "prefix_cache_queries",
        "Prompt tokens looked up in the prefix cache, by each of n completions",
        alias="gpu_prefix_cache_queries",
    ),
    _counter(
        "prefix_cache_hits",
        "Prompt tokens found in the prefix cache, by each of n completions",
        alias="gpu_prefix_cache_hits",
    ),
    _counter("external_prefix_cache_queries", "Prompt tokens looked up in a connector's cache"),
    _counter("external_prefix_cache_hits", "Prompt tokens found in a connector's cache"),
    _counter("spec_decode_num_drafts", "Times that a request had drafts verified"),
    _counter("spec_decode_num_draft_tokens", "Drafts that were verified"),
    _counter("spec_decode_num_accepted_tokens", "Drafts that were accepted"),
    _counter(  # of the places that there are
        ACCEPTED_PER_PLACE, "Drafts that were accepted, by their place behind the last token", "position", ()
    ),
    _counter("mm_cache_queries", "Media items looked up"),
    _counter("mm_cache_hits", "Media items found"),
    _of_requests("prompt_tokens_cached", "Prompt tokens that were not computed again"),
    _of_requests("prompt_tokens_by_source", "Prompt tokens by where their keys and values came from"),
    _counter(
        "admission_rejections",
        "Requests refused because the queue was full",
        "reason",
        ("queued_reqs", "queued_tokens"),
    ),
    _of_requests("time_to_first_token_seconds", "From arrival to the first token"),
    _of_requests("inter_token_latency_seconds", "Between two outputs of a request", "time_per_output_token_seconds"),
    _of_requests("request_time_per_output_token_seconds", "A request's mean time per token after the first"),
    _of_requests("e2e_request_latency_seconds", "From arrival to the end"),
    _of_requests("request_queue_time_seconds", "From arrival to the first step"),
    _of_requests("request_inference_time_seconds", "From the first step to the last token"),
    _of_requests("request_prefill_time_seconds", "From the first step to the first token"),
    _of_requests("request_decode_time_seconds", "From the first token to the last"),
    _of_requests("request_prompt_tokens", "A request's prompt tokens"),
    _of_requests("request_generation_tokens", "A request's generated tokens"),
    _of_requests("request_max_num_generation_tokens", "Generated tokens of a request's completion, the mean of n"),
    _of_requests("request_prefill_kv_computed_tokens", "A request's prompt tokens that the cache did not hold"),
    _of_requests("request_params_n", "The parameter n"),
    _of_requests("request_params_max_tokens", "The parameter max_tokens"),
    Family(
        name="rl_weight_update_operation_duration_seconds",
        kind="histogram",
        help="A call for new weights",
        label="operation",
        values=OPERATIONS,
        buckets=UPDATE,
    ),
    _gauge(
        "rl_weight_update_operations_in_flight",
        "Calls for new weights that are being answered",
        "operation",
        OPERATIONS,
    ),
    Family(
        name="sleep_mode_operation_duration_seconds",
        kind="histogram",
        help="A move to sleep, or to wake",
        label="operation",
        values=("sleep", "wake_up"),
        buckets=UPDATE,
    ),
    _gauge("sleep_mode_operations_in_flight", "Moves that are being made", "operation", ("sleep", "wake_up")),
    _histogram("iteration_tokens_total", "Tokens of a step; buckets hold the means between two readings", STEP_TOKENS),
    Family(name="num_free_blocks", kind="gauge", prefix=OWN, help="Blocks of the cache that no request holds"),
    Family(name="num_requests_open", kind="gauge", prefix=OWN, help="Requests that the front end has not finished"),
    Family(name="paused", kind="gauge", prefix=OWN, help="1 while generation is paused"),
    Family(name="num_tasks", kind="gauge", prefix=OWN, help="Tasks of the front end's event loop"),
    Family(name="engine_resident_memory_bytes", kind="gauge", prefix=OWN, help="Memory of the engine process"),
    Family(name="weight_updates", kind="counter", prefix=OWN, help="Updates of the weights that were applied"),
    Family(name="failed_weight_updates", kind="counter", prefix=OWN, help="Updates of the weights that failed"),
    Family(
        name="weight_update_bytes",
        kind="counter",
        prefix=OWN,
        help="Bytes of weights that were received",
        label="transport",
        values=BACKENDS,
    ),
    Family(name="weight_update_seconds", kind="counter", prefix=OWN, help="From the start of updates to their ends"),
    Family(
        name="weight_receive_seconds",
        kind="counter",
        prefix=OWN,
        help="Spent receiving weights",
        label="transport",
        values=BACKENDS,
    ),
    Family(
        name="weight_update_requests",
        kind="counter",
        prefix=OWN,
        help="Requests that ran at an update",
        label="outcome",
        values=("kept", "recomputed", "aborted"),
    ),
    Family(name="weights_lost", kind="counter", prefix=OWN, help="Times that weights went away with their engine"),
    Family(name="weights_missing", kind="gauge", prefix=OWN, help="1 while requests are refused for want of them"),
    Family(name="weight_pause_seconds", kind="counter", prefix=OWN, help="In which weights were applied"),
    Family(name="kv_load_failures", kind="counter", prefix=OWN, help="Loads of blocks that were lost on the way"),
    Family(name="kv_load_misses", kind="counter", prefix=OWN, help="Loads of blocks that were not there any more"),
    Family(name="kv_expired_holds", kind="counter", prefix=OWN, help="Transfers that did not end in time"),
    Family(name="kv_saved_blocks", kind="counter", prefix=OWN, help="Blocks that a connector took"),
    Family(name="kv_loaded_blocks", kind="counter", prefix=OWN, help="Blocks that a connector brought"),
    Family(name="kv_saved_bytes", kind="counter", prefix=OWN, help="Bytes of blocks that a connector took"),
    Family(name="kv_loaded_bytes", kind="counter", prefix=OWN, help="Bytes of blocks that a connector brought"),
    Family(name="kv_save_seconds", kind="counter", prefix=OWN, help="Seconds with a save under way, waits included"),
    Family(name="kv_load_seconds", kind="counter", prefix=OWN, help="Seconds with a load under way, waits included"),
    Family(name="kv_evicted_blocks", kind="counter", prefix=OWN, help="Blocks that gave way in a connector's memory"),
    Family(name="kv_errors", kind="counter", prefix=OWN, help="Errors of a store, a disk or a connector's own code"),
    Family(name="kv_late_lookups", kind="counter", prefix=OWN, help="Requests that a store did not answer in time"),
    Family(name="kv_stored_bytes", kind="gauge", prefix=OWN, help="Bytes of blocks that a connector keeps"),
    Family(name="engine_restarts", kind="counter", prefix=OWN, help="Times that the engine process was replaced"),
)
