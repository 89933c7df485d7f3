"""LLM.get_metrics: a core's figures by vLLM's names, in vLLM's forms, and as a server would tell them."""

from __future__ import annotations

from collections.abc import Callable

from octavo import LLM, SamplingParams
from octavo.frontend.metrics import ACCEPTED_PER_PLACE, COUNTERS, GAUGES, Counter, Gauge, Metric, Vector
from octavo.serve.metric_families import FAMILIES

PROMPT = "def first(values):\n    return values[0]\n\n\n" * 8
PARAMS = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


def values_of(llm: LLM) -> dict[str, Metric]:
    found = llm.get_metrics()
    assert len({metric.name for metric in found}) == len(found)
    assert all(metric.labels == {"model_name": "octavo-tiny", "engine": "0"} for metric in found)
    return {metric.name: metric for metric in found}


def counted(llm: LLM, name: str) -> float:
    metric = values_of(llm)[name]
    assert isinstance(metric, Counter)
    return metric.value


def test_names_and_kinds_are_the_servers() -> None:
    kinds = {family.prefix + family.name: family.kind for family in FAMILIES}
    assert all(kinds[name] == "gauge" for name, _ in GAUGES)
    assert all(kinds[name] == "counter" for name, _ in [*COUNTERS, (ACCEPTED_PER_PLACE, "")])


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
