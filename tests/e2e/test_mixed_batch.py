"""Requests with every feature at once, in one batch: each gives, bit for bit, what it gives alone."""

from __future__ import annotations

from typing import Any

import pytest

from eager_graphs import EagerGraphs
from engine_checks import assert_idle
from insides import runner_of
from octavo import LLM, SamplingParams
from octavo.device.graphs import decode_keys, mixed_keys
from octavo.request.outputs import CompletionOutput, LogprobsDict
from octavo.request.sampling_params import RepetitionDetectionParams
from settings_matrix import SMALL_POOL

Answer = tuple[list[LogprobsDict | None] | None, list[CompletionOutput]]

WISHES: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": 5},
    {"temperature": 1.0, "logprobs": 0, "top_p": 0.8},
    {"temperature": 0.7, "top_k": 5, "min_p": 0.05, "logprobs": 2},
    {"temperature": 1.5, "presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.2, "logprobs": 1},
    {"temperature": 0.0, "repetition_penalty": 1.5, "prompt_logprobs": 2},
    {"temperature": 1.0, "logit_bias": {16: 5.0, 201: -100.0}, "logprobs": 1},
    {"temperature": 1.0, "allowed_token_ids": [16, 201, 260, 377], "logprobs": 3},
    {"temperature": 1.0, "bad_words": ["self", "return"], "logprobs": 0},
    {"temperature": 1.0, "n": 3, "logprobs": 1},
    {"temperature": 1.0, "min_tokens": 10, "ignore_eos": False, "logit_bias": {0: 4.0}},
    {"temperature": 0.5, "stop": ["self", "\n"], "include_stop_str_in_output": True},
    {"temperature": 1.0, "stop_token_ids": [16, 201], "prompt_logprobs": 0, "logprobs": 20},
    {"temperature": 1.0, "logprob_token_ids": [5, 6, 7], "detokenize": False},
    {"temperature": 1.0, "repetition_detection": RepetitionDetectionParams(max_pattern_size=3, min_count=3)},
    {"temperature": 1e-4, "skip_special_tokens": False, "prompt_logprobs": 20},
]


def _params(number: int) -> SamplingParams:
    return SamplingParams(**{"seed": number, "max_tokens": 28, "ignore_eos": True, **WISHES[number % len(WISHES)]})


def _answers(llm: LLM, prompts: list[str], first: int = 0) -> list[Answer]:
    params = [_params(first + index) for index in range(len(prompts))]
    return [(output.prompt_logprobs, output.outputs) for output in llm.generate(prompts, params)]


@pytest.fixture(scope="module")
def alone(held_out_prompts: list[str]) -> list[Answer]:
    """Each request by itself, without a cache."""
    with LLM(dtype="float32", enable_prefix_caching=False) as llm:
        return [_answers(llm, [prompt], index)[0] for index, prompt in enumerate(held_out_prompts[: 2 * len(WISHES)])]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"max_num_batched_tokens": 24, "max_num_seqs": 24},
        {**SMALL_POOL, "async_scheduling": True},
    ],
    ids=["together", "chunks of 24", "small pool, asynchronous"],
)
def test_each_is_as_alone(
    make_llm: Any, held_out_prompts: list[str], alone: list[Answer], fields: dict[str, Any]
) -> None:
    llm = make_llm(**fields)
    for _ in range(2):  # the second time the prefix cache is warm
        assert _answers(llm, held_out_prompts[: len(alone)]) == alone
        assert_idle(llm)
    assert not fields.get("num_gpu_blocks_override") or llm.engine.scheduler.num_preemptions > 0


def test_the_wishes_are_granted(alone: list[Answer]) -> None:
    """What the comparison compares is not empty."""
    reasons = {completion.finish_reason for _, outputs in alone for completion in outputs}
    assert {"stop", "length"} <= reasons
    assert sum(prompt_logprobs is not None for prompt_logprobs, _ in alone) == 6
    assert sum(len(outputs) for _, outputs in alone) == len(alone) + 4


def test_padded_as_for_graphs(make_llm: Any, held_out_prompts: list[str], alone: list[Answer]) -> None:
    """Decode steps whole and mixed steps up to their hidden states, as on a GPU; requests come and go meanwhile."""
    llm = make_llm(dtype="float32", max_num_seqs=11, max_num_batched_tokens=40)
    runner = runner_of(llm.engine)
    pool = runner._graphs = EagerGraphs(runner, [*decode_keys(11, drawn=range(2, 9)), *mixed_keys(11, 40)])
    runner.capture()
    prompts = held_out_prompts[: len(alone)]
    assert _answers(llm, prompts) == alone
    outputs = llm.generate(prompts[:1] * 5, [_params(0)] * 5)  # steps of rows that only draw
    assert [(output.prompt_logprobs, output.outputs) for output in outputs] == [alone[0]] * 5
    assert pool.replayed_kinds == {(True, True), (True, False), (False, True)}
    assert_idle(llm)
