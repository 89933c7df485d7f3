"""/metrics: vLLM's names, what each event counts, and that nothing a client sends adds a series."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from octavo.frontend.messages import EngineInfo
from octavo.frontend.request_metrics import FINISH_REASONS, RequestFacts
from octavo.request.sampling_params import SamplingParams
from octavo.serve import metric_families
from octavo.serve.metrics import ServerMetrics

LABELS = {"model_name": "m", "engine": "0"}
GRAFANA = Path(metric_families.__file__).with_name("grafana.json")
ROUTES = [("GET", "/health"), ("POST", "/v1/completions"), ("POST", "/detokenize/{name}")]

# What dashboards, autoscalers and gateways made for vLLM look for.
EXPECTED = """
num_requests_running num_requests_waiting num_requests_waiting_by_reason kv_cache_usage_perc engine_sleep_state
prompt_tokens_total generation_tokens_total request_success_total num_preemptions_total prefix_cache_queries_total
prefix_cache_hits_total external_prefix_cache_queries_total external_prefix_cache_hits_total mm_cache_queries_total
mm_cache_hits_total prompt_tokens_cached_total prompt_tokens_by_source_total admission_rejections_total
corrupted_requests_total time_to_first_token_seconds_bucket inter_token_latency_seconds_bucket
request_time_per_output_token_seconds_sum e2e_request_latency_seconds_count request_queue_time_seconds_bucket
request_inference_time_seconds_bucket request_prefill_time_seconds_bucket request_decode_time_seconds_bucket
request_prompt_tokens_bucket request_generation_tokens_bucket request_max_num_generation_tokens_bucket
request_params_n_bucket request_params_max_tokens_bucket request_prefill_kv_computed_tokens_bucket
iteration_tokens_total_bucket gpu_cache_usage_perc gpu_prefix_cache_queries_total gpu_prefix_cache_hits_total
time_per_output_token_seconds_bucket
"""


class Engine:
    """What the metrics read of an AsyncEngine."""

    def __init__(self) -> None:
        self.observers: list[Any] = []
        self.info: EngineInfo | None = None
        names = (
            "num_running",
            "num_waiting",
            "cache_usage",
            "num_free_blocks",
            "rss_bytes",
            "num_requests",
            "num_restarts",
            "num_preemptions",
            "num_prefix_queries",
            "num_prefix_hits",
            "num_steps",
            "num_scheduled_tokens",
            "weight_bytes_by_gloo",
            "weight_seconds_by_gloo",
            "num_kept_at_update",
        )
        self.weights_version = "default"
        self.stats: dict[str, float] = dict.fromkeys(names, 0)


def _facts(**changes: Any) -> RequestFacts:
    facts = {
        "request_id": "r",
        "params": SamplingParams(max_tokens=16),
        "num_prompt_tokens": 10,
        "max_tokens": 16,
        "arrival": 100.0,
        "num_cached_tokens": 4,
        "num_loaded_tokens": 3,
        "num_output_tokens": 5,
        "num_new_tokens": 1,
        "queue_seconds": 0.25,
        "first_token_at": 101.0,
        "previous_token_at": 101.5,
        "last_token_at": 103.0,
        "finished_at": 103.5,
        "finish_reasons": {0: "stop"},
    }
    return RequestFacts(**{**facts, **changes})


def _samples(metrics: ServerMetrics) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(metrics.render().decode())
        for sample in family.samples
    }


def _value(metrics: ServerMetrics, name: str, **labels: str) -> float:
    return _samples(metrics)[f"vllm:{name}", frozenset((LABELS | labels).items())]


def _places(metrics: ServerMetrics) -> list[str]:
    """Of drafts, in order of their lines."""
    name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    return [dict(labels)["position"] for each, labels in _samples(metrics) if each == name]


@pytest.fixture
def metrics() -> ServerMetrics:
    return ServerMetrics("m", max_model_len=2048, num_drafts=4, routes=ROUTES)


def test_the_names_that_others_look_for(metrics: ServerMetrics) -> None:
    metrics.http("GET", "/health", 200, 0.1)
    names = {name for name, _ in _samples(metrics)}
    assert {f"vllm:{name}" for name in EXPECTED.split()} <= names
    assert {"http_requests_total", "http_request_duration_seconds_bucket", "process_resident_memory_bytes"} <= names


def test_types_and_buckets(metrics: ServerMetrics) -> None:
    text = metrics.render().decode()
    assert "# TYPE vllm:kv_cache_usage_perc gauge" in text
    assert "# TYPE vllm:generation_tokens_total counter" in text
    assert "# TYPE vllm:time_to_first_token_seconds histogram" in text

    def bounds(name: str) -> list[float]:
        return [float(each) for each in re.findall(rf'vllm:{name}_bucket{{.*?le="([^"]+)"', text)]

    assert bounds("time_to_first_token_seconds")[:4] == [0.001, 0.005, 0.01, 0.02]
    assert bounds("e2e_request_latency_seconds")[0] == 0.3 and bounds("e2e_request_latency_seconds")[-2] == 7680
    assert bounds("request_prompt_tokens") == [
        1,
        2,
        5,
        10,
        20,
        50,
        100,
        200,
        500,
        1000,
        2000,
        float("inf"),
    ]
    assert bounds("iteration_tokens_total")[:3] == [1, 8, 16]


def test_a_request_from_first_token_to_end(metrics: ServerMetrics) -> None:
    metrics.observe("added", _facts())
    metrics.observe("first_token", _facts(num_new_tokens=1, num_output_tokens=1))
    for _ in range(4):
        metrics.observe("tokens", _facts())
    metrics.observe("finished", _facts())
    assert _value(metrics, "prompt_tokens_total") == 10
    assert _value(metrics, "prompt_tokens_cached_total") == 4
    sources = [("local_compute", 6), ("local_cache_hit", 1), ("external_kv_transfer", 3)]
    assert all(_value(metrics, "prompt_tokens_by_source_total", source=name) == count for name, count in sources)
    assert _value(metrics, "generation_tokens_total") == 5
    assert _value(metrics, "time_to_first_token_seconds_sum") == 1.0
    assert _value(metrics, "inter_token_latency_seconds_sum") == 6.0
    assert _value(metrics, "inter_token_latency_seconds_count") == 4
    assert _value(metrics, "time_per_output_token_seconds_count") == 4
    assert _value(metrics, "e2e_request_latency_seconds_sum") == 3.5
    assert _value(metrics, "request_queue_time_seconds_sum") == 0.25
    assert _value(metrics, "request_prefill_time_seconds_sum") == 0.75
    assert _value(metrics, "request_decode_time_seconds_sum") == 2.0
    assert _value(metrics, "request_inference_time_seconds_sum") == 2.75
    assert _value(metrics, "request_time_per_output_token_seconds_sum") == 0.5
    assert _value(metrics, "request_success_total", finished_reason="stop") == 1
    assert _value(metrics, "request_prefill_kv_computed_tokens_sum") == 6
    assert _value(metrics, "e2e_request_latency_seconds_bucket", le="2.5") == 0
    assert _value(metrics, "e2e_request_latency_seconds_bucket", le="5.0") == 1


def test_a_value_on_a_bound_is_within_it(metrics: ServerMetrics) -> None:
    metrics.observe("first_token", _facts(arrival=0.0, first_token_at=0.25))
    assert _value(metrics, "time_to_first_token_seconds_bucket", le="0.1") == 0
    assert _value(metrics, "time_to_first_token_seconds_bucket", le="0.25") == 1


@pytest.mark.parametrize(
    ("event", "reasons", "counted"),
    [
        ("aborted", {}, {"abort": 3}),
        ("aborted", {0: "stop"}, {"stop": 1, "abort": 2}),
        ("failed", {}, {"error": 3}),
        ("finished", {0: "stop", 1: "length", 2: "error"}, {"stop": 1, "length": 1, "error": 1}),
        ("finished", {0: "something new", 1: "stop", 2: "stop"}, {"error": 1, "stop": 2}),
    ],
)
def test_every_completion_has_one_reason(
    metrics: ServerMetrics, event: str, reasons: dict[int, str], counted: dict[str, int]
) -> None:
    params = SamplingParams(n=3, max_tokens=4, temperature=1.0)
    metrics.observe(event, _facts(params=params, finish_reasons=reasons))
    for reason in FINISH_REASONS:
        value = _value(metrics, "request_success_total", finished_reason=reason)
        assert value == counted.get(reason, 0), reason


def test_a_request_that_never_began(metrics: ServerMetrics) -> None:
    facts = _facts(first_token_at=None, last_token_at=None, previous_token_at=None, queue_seconds=None)
    metrics.observe("aborted", facts)
    metrics.observe("rejected", _facts(finish_reasons={0: "tokens"}))
    assert _value(metrics, "e2e_request_latency_seconds_count") == 0
    assert _value(metrics, "admission_rejections_total", reason="queued_tokens") == 1


def test_the_engines_figures_are_read_when_asked_for(metrics: ServerMetrics) -> None:
    engine = Engine()
    metrics.watch(engine)
    assert engine.observers == [metrics.observe]
    engine.stats |= {"num_running": 3, "num_waiting": 2, "cache_usage": 0.5, "num_steps": 10}
    engine.stats |= {"num_scheduled_tokens": 100, "num_preemptions": 7}
    assert _value(metrics, "num_requests_running") == 3
    assert _value(metrics, "num_requests_waiting_by_reason", reason="capacity") == 2
    assert _value(metrics, "gpu_cache_usage_perc") == _value(metrics, "kv_cache_usage_perc") == 0.5
    assert _value(metrics, "iteration_tokens_total_sum") == 100
    assert _value(metrics, "iteration_tokens_total_bucket", le="8.0") == 0
    assert _value(metrics, "iteration_tokens_total_bucket", le="16.0") == 10
    engine.stats |= {"num_preemptions": 2, "num_steps": 1, "num_scheduled_tokens": 5}  # a new engine process
    assert _value(metrics, "num_preemptions_total") == 9
    assert _value(metrics, "iteration_tokens_total_sum") == 105


def test_S_12_drafts_are_counted_under_the_fields_names(metrics: ServerMetrics) -> None:
    """How often rows had any, how many, how many were accepted, and at which place; over a new engine process, too."""
    engine = Engine()
    metrics.watch(engine)
    engine.stats |= {"num_drafts": 10, "num_draft_tokens": 40, "num_accepted_tokens": 25}
    engine.stats |= {"num_accepted_at_0": 9, "num_accepted_at_1": 8, "num_accepted_at_2": 8}
    for name, value in (("drafts", 10), ("draft_tokens", 40), ("accepted_tokens", 25)):
        assert _value(metrics, f"spec_decode_num_{name}_total") == value
    per_position = "spec_decode_num_accepted_tokens_per_pos_total"
    assert [_value(metrics, per_position, position=str(place)) for place in range(3)] == [9, 8, 8]
    assert _places(metrics) == ["0", "1", "2"], "4 were asked for, and its speculator has 3"
    engine.stats |= {"num_accepted_at_0": 2}
    assert _value(metrics, per_position, position="0") == 11


@pytest.mark.parametrize("num_drafts", [0, 1, 16])
def test_S_12_each_place_of_a_draft_is_a_series(num_drafts: int) -> None:
    assert _places(ServerMetrics("m", num_drafts=num_drafts)) == [str(place) for place in range(num_drafts)]


def test_weights_are_told_by_version_transport_and_operation(metrics: ServerMetrics) -> None:
    """RL.M1: vLLM's names for calls, and the engine's own of what updates brought; one version at a time."""
    engine = Engine()
    metrics.watch(engine)
    metrics.observe("first_token", _facts(num_new_tokens=3))
    engine.stats |= {"weight_bytes_by_gloo": 1000, "weight_seconds_by_gloo": 0.5, "num_kept_at_update": 2}
    text = metrics.render().decode()
    assert 'octavo:weight_update_bytes_total{engine="0",model_name="m",transport="gloo"} 1000.0' in text
    assert 'octavo:weight_update_bytes_total{engine="0",model_name="m",transport="nccl"} 0.0' in text
    assert 'octavo:weight_receive_seconds_total{engine="0",model_name="m",transport="gloo"} 0.5' in text
    assert 'octavo:weight_update_requests_total{engine="0",model_name="m",outcome="kept"} 2.0' in text
    assert 'octavo:weights_version_info{engine="0",model_name="m",version="default"} 1.0' in text
    engine.weights_version = "step-1"
    metrics.render()
    metrics.observe("tokens", _facts(num_new_tokens=4))
    text = metrics.render().decode()
    assert 'octavo:weights_version_tokens{engine="0",model_name="m",version="step-1"} 4.0' in text
    assert "default" not in text
    with pytest.raises(ValueError, match="goes on"), metrics.updating("finish"):
        name = 'vllm:rl_weight_update_operations_in_flight{engine="0",model_name="m",operation="finish"}'
        assert f"{name} 1.0" in metrics.render().decode()
        raise ValueError("goes on")
    with metrics.sleeping("wake_up"):
        pass
    text = metrics.render().decode()
    assert f"{name} 0.0" in text
    for made in ("rl_weight_update_operation_duration_seconds_count", "sleep_mode_operation_duration_seconds_count"):
        assert re.search(rf'vllm:{made}{{engine="0",model_name="m",operation="(finish|wake_up)"}} 1\.0', text)


def test_the_cache_is_described_once_the_engine_is_ready(metrics: ServerMetrics) -> None:
    engine = Engine()
    metrics.watch(engine)
    assert b"cache_config_info" not in metrics.render()
    engine.info = EngineInfo(
        device="cpu",
        dtype="float32",
        attention_backend="cpu",
        vocab_size=9,
        max_model_len=99,
        max_logprobs=5,
        max_num_seqs=2,
        max_num_batched_tokens=64,
        enable_prefix_caching=True,
        block_size=16,
        num_blocks=33,
    )
    (line,) = re.findall(r"vllm:cache_config_info{.*", metrics.render().decode())
    assert 'block_size="16"' in line and 'num_gpu_blocks="33"' in line and line.endswith(" 1.0")


def test_http_is_counted_by_template(metrics: ServerMetrics) -> None:
    metrics.http("POST", "/v1/completions", 200, 0.2)
    metrics.http("POST", "/v1/completions", 404, 0.0)
    metrics.http("DELETE", "/v1/completions", 405, 0.0)
    metrics.http("GET", None, 404, 0.0)
    metrics.http("BREW", "/made/up", 499, 0.0)
    found = _samples(metrics)

    def count(method: str, handler: str, status: str) -> float:
        labels = {"method": method, "handler": handler, "status": status}
        return found["http_requests_total", frozenset(labels.items())]

    assert count("POST", "/v1/completions", "2xx") == count("POST", "/v1/completions", "4xx") == 1
    assert count("other", "/v1/completions", "4xx") == 1
    assert count("other", "other", "4xx") == 2
    times = {"method": "POST", "handler": "/v1/completions"}
    assert found["http_request_duration_seconds_sum", frozenset(times.items())] == pytest.approx(0.2)


def test_routes_that_nobody_asked_for_have_no_series(metrics: ServerMetrics) -> None:
    """A server has dozens of routes, of several statuses each: their zeros were most of the page."""
    untouched = metrics.render()
    assert b"\n# TYPE http_requests_total counter\n" in untouched
    assert b"handler=" not in untouched
    metrics.http("GET", "/health", 200, 0.1)
    handlers = [dict(labels) for name, labels in _samples(metrics) if name == "http_requests_total"]
    assert handlers == [{"method": "GET", "handler": "/health", "status": "2xx"}]


def test_traffic_adds_no_series_but_of_routes(metrics: ServerMetrics) -> None:
    for status in (200, 304, 404, 503):  # of the unknown ones
        metrics.http("X", None, status, 0.1)
    before = set(_samples(metrics))
    for index in range(50):
        metrics.http(f"M{index}", f"/p{index}", 100 + 10 * index, 0.1)
        metrics.observe("finished", _facts(finish_reasons={0: f"r{index}"}, request_id=f"r{index}"))
        metrics.observe("rejected", _facts(finish_reasons={0: f"r{index}"}))
        metrics.observe(f"event {index}", _facts())
    assert set(_samples(metrics)) == before


def test_label_values_are_escaped() -> None:
    name = 'a"b\\c\nd'
    found = _samples(ServerMetrics(name))
    assert found["vllm:num_requests_running", frozenset({"model_name": name, "engine": "0"}.items())] == 0


def test_two_servers_in_one_process_share_nothing(metrics: ServerMetrics) -> None:
    other = ServerMetrics("m", max_model_len=2048, routes=ROUTES)
    metrics.http("GET", "/health", 200, 0.0)
    metrics.observe("finished", _facts())
    assert _value(other, "request_success_total", finished_reason="stop") == 0


def _queries() -> list[str]:
    dashboard = json.loads(GRAFANA.read_text())
    targets = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    return targets + [each["definition"] for each in dashboard["templating"]["list"] if "definition" in each]


def test_the_dashboard_queries_what_there_is(metrics: ServerMetrics) -> None:
    metrics.http("GET", "/health", 200, 0.1)
    names = {name for name, _ in _samples(metrics)}
    asked = {name for query in _queries() for name in re.findall(r"\b(?:vllm:|http_)\w+", query)}
    assert len(asked) > 15
    assert asked <= names


def test_the_dashboard_is_a_grafana_model() -> None:
    dashboard = json.loads(GRAFANA.read_text())
    assert dashboard["title"] and dashboard["uid"] and dashboard["schemaVersion"] >= 36
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids) == 12
    for panel in dashboard["panels"]:
        assert panel["type"] == "timeseries" and panel["title"] and panel["targets"]
        assert set(panel["gridPos"]) == {"h", "w", "x", "y"}
        assert all(target["refId"] and target["expr"] for target in panel["targets"])
    assert {each["name"] for each in dashboard["templating"]["list"]} == {"datasource", "model_name"}
    assert all("$model_name" in query for query in _queries() if "vllm:" in query and "label_values" not in query)


def test_no_thread_is_started(metrics: ServerMetrics) -> None:
    before = set(threading.enumerate())  # those of other tests may end meanwhile
    metrics.render()
    assert set(threading.enumerate()) <= before


def test_all_who_ask_within_a_while_share_one_rendering(
    metrics: ServerMetrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And each sees what was counted before it asked."""
    made: list[bytes] = []
    render = metrics.render
    monkeypatch.setattr(metrics, "render", lambda: made.append(render()) or made[-1])

    async def ask() -> None:
        await metrics.rendered()
        metrics.http("GET", "/health", 200, 0.1)
        texts = await asyncio.gather(*(metrics.rendered() for _ in range(100)))
        assert len(made) == 2 and set(texts) == {made[1]} and made[0] != made[1]

    asyncio.run(ask())
