"""LLM.get_metrics: a core's figures by vLLM's names, in vLLM's forms, and as a server would tell them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from octavo import LLM, SamplingParams
from octavo.frontend.frontend import Checked, Prompt
from octavo.frontend.metrics import ACCEPTED_PER_PLACE, COUNTERS, GAUGES, Counter, Gauge, Histogram, Metric, Vector
from octavo.frontend.request_metrics import MOST_DUE, RequestLog
from octavo.request.outputs import CompletionOutput, RequestMetrics, RequestOutput
from octavo.serve.metric_families import FAMILIES

PROMPT = "def first(values):\n    return values[0]\n\n\n" * 8
PARAMS = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


def values_of(llm: LLM) -> dict[str, Metric]:
    found = llm.get_metrics()
    labels = {"model_name": "octavo-tiny", "engine": "0"}
    assert len({(metric.name, *metric.labels.values()) for metric in found}) == len(found)
    assert all(metric.labels.items() >= labels.items() for metric in found)
    more = {name: set(metric.labels) - set(labels) for metric in found if (name := metric.name)}
    assert {name for name, others in more.items() if others} == {"vllm:request_success"}
    return {"/".join([metric.name, *list(metric.labels.values())[2:]]): metric for metric in found}


def counted(llm: LLM, name: str) -> float:
    metric = values_of(llm)[name]
    assert isinstance(metric, Counter)
    return metric.value


def test_names_and_kinds_are_the_servers() -> None:
    kinds = {family.prefix + family.name: family.kind for family in FAMILIES}
    assert all(kinds[name] == "gauge" for name, _ in GAUGES)
    assert all(kinds[name] == "counter" for name, _ in [*COUNTERS, (ACCEPTED_PER_PLACE, "")])


def test_each_of_n_completions_looks_the_prompt_up(make_llm: Callable[..., LLM]) -> None:
    """As docs/serving.md tells: beside prompt_tokens, which counts it once."""
    llm = make_llm(model="octavo-tiny", max_model_len=512)
    (output,) = llm.generate(PROMPT, SamplingParams(n=3, max_tokens=4, seed=1))
    num_prompt = len(output.prompt_token_ids)
    assert counted(llm, "vllm:prefix_cache_queries") == 3 * num_prompt
    assert counted(llm, "vllm:prompt_tokens") == num_prompt


def test_counts_grow_by_what_was_done_and_gauges_come_back(make_llm: Callable[..., LLM]) -> None:
    drafter = {"method": "ngram", "num_speculative_tokens": 3}
    llm = make_llm(model="octavo-tiny", max_model_len=512, speculative_config=drafter)
    (output,) = llm.generate(PROMPT, PARAMS)
    num_prompt = len(output.prompt_token_ids)
    assert counted(llm, "vllm:prefix_cache_queries") == num_prompt
    assert counted(llm, "vllm:prefix_cache_hits") == 0
    (again,) = llm.generate(PROMPT, PARAMS)
    assert counted(llm, "vllm:prefix_cache_queries") == 2 * num_prompt
    assert counted(llm, "vllm:prefix_cache_hits") == again.num_cached_tokens > 0
    found = values_of(llm)
    accepted, drafts = found[ACCEPTED_PER_PLACE], counted(llm, "vllm:spec_decode_num_drafts")
    assert isinstance(accepted, Vector) and len(accepted.values) == 3
    assert drafts >= accepted.values[0] >= accepted.values[1] >= accepted.values[2]
    assert sum(accepted.values) == counted(llm, "vllm:spec_decode_num_accepted_tokens") > 0
    for name in ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"):
        gauge = found[name]
        assert isinstance(gauge, Gauge) and gauge.value == 0.0


def test_requests_that_run_are_seen_meanwhile(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(model="octavo-tiny", max_model_len=512)
    stream = llm.stream(PROMPT, PARAMS)
    next(stream)
    running, usage = (values_of(llm)[name] for name in ("vllm:num_requests_running", "vllm:kv_cache_usage_perc"))
    assert isinstance(running, Gauge) and isinstance(usage, Gauge)
    assert running.value == 1.0 and 0.0 < usage.value <= 1.0
    stream.close()


def test_requests_are_counted_as_a_server_counts_them(make_llm: Callable[..., LLM]) -> None:
    """Whole ones, streams, one that is dropped and one that is refused; with tokens, ends, sizes and times."""
    llm = make_llm(model="octavo-tiny", max_model_len=512)
    before = values_of(llm)
    assert all(metric.count == 0 for metric in before.values() if isinstance(metric, Histogram))
    params = SamplingParams(n=2, temperature=1.0, seed=1, max_tokens=9, ignore_eos=True)
    outputs = llm.generate([PROMPT, [5, 6, 7]], params)
    num_prompt = sum(len(each.prompt_token_ids) for each in outputs)
    parts = list(llm.stream([5, 6, 7], SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)))
    dropped = llm.stream([5, 6], PARAMS)
    num_reported = len(next(dropped).outputs[0].token_ids)
    dropped.close()
    with pytest.raises(ValueError, match="max_tokens"):
        llm.generate("a", SamplingParams(max_tokens=-1))
    found = values_of(llm)

    def histogram(name: str) -> Histogram:
        metric = found[f"vllm:{name}"]
        assert isinstance(metric, Histogram) and list(metric.buckets)[-1] == "+Inf"
        assert metric.buckets["+Inf"] == metric.count
        return metric

    assert counted(llm, "vllm:prompt_tokens") == num_prompt + 3 + 2
    assert counted(llm, "vllm:generation_tokens") == 2 * 2 * 9 + 6 + num_reported
    assert counted(llm, "vllm:request_success/length") == 2 * 2 + 1
    assert counted(llm, "vllm:request_success/abort") == 1 and counted(llm, "vllm:request_success/stop") == 0
    assert histogram("request_prompt_tokens").sum == num_prompt + 3 + 2
    assert histogram("request_params_n").count == 4 and histogram("request_generation_tokens").count == 4
    for name in ("e2e_request_latency_seconds", "request_decode_time_seconds", "request_queue_time_seconds"):
        assert histogram(name).count == 3 and 0 <= histogram(name).sum < 600
    assert histogram("time_to_first_token_seconds").count == 4
    assert histogram("inter_token_latency_seconds").count == len(parts) - 1
    slowest = max(each.metrics.finished_time - each.metrics.arrival_time for each in outputs)
    assert histogram("e2e_request_latency_seconds").sum >= slowest
    assert not llm._shared.log._open


def test_requests_that_end_are_counted_when_somebody_looks_or_they_are_many() -> None:
    log = RequestLog(64)
    prompt, params = Prompt([1, 2, 3]), SamplingParams()
    for index in range(MOST_DUE):
        log.begin(str(index), Checked(prompt, params, 2, 0))
        completion = CompletionOutput(0, "", [4, 5], None, None, "length")
        metrics = RequestMetrics(0.0, 1.0, 2.0, 2.0, 0.5)
        log.take(RequestOutput(str(index), None, [1, 2, 3], None, [completion], finished=True, metrics=metrics))
    assert log._counts.values["request_success"]["length"] == MOST_DUE // 2, "two events each: the oldest were counted"
    assert log.counts.values["request_success"]["length"] == MOST_DUE
    assert log.counts.values["generation_tokens"][""] == 2 * MOST_DUE
    assert log.counts.histograms["request_queue_time_seconds"].sum == 0.5 * MOST_DUE
