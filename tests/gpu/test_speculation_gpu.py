"""Speculation on a CUDA device: the tokens and log-probabilities of none, and never a wait (S.2, S.13, M5.7)."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "ops"))

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

import gpu_rig
from insides import runner_of
from octavo import LLM, SamplingParams, StructuredOutputsParams
from sync_guard import no_waits

pytestmark = pytest.mark.gpu
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "adaptive_depth": False}
LINES = [
    "x = [1, 2, 3]\ny = [1, 2, 3]\nz = [1, 2,",
    "def f(a):\n    return a\n\ndef g(a):\n",
    "import os\nimport sys\n",
]
SETTINGS: dict[str, dict[str, Any]] = {
    "graphs": {},
    "no graphs": {"enforce_eager": True},
    "chunks of 64": {"max_num_batched_tokens": 64},
    "waiting for each step": {"async_scheduling": False},
    "few blocks": {"num_gpu_blocks_override": 24, "max_model_len": 256},
    "adaptive": {"speculative_config": {**NGRAM, "adaptive_depth": True}},
    "16 drafts": {"speculative_config": {**NGRAM, "num_speculative_tokens": 16}},
    "16 drafts, adaptive": {"speculative_config": {**NGRAM, "num_speculative_tokens": 16, "adaptive_depth": True}},
}
Answers = list[tuple[list[int], list[float]]]


@contextlib.contextmanager
def make_llm(**fields: Any) -> Iterator[LLM]:
    cache = {} if "num_gpu_blocks_override" in fields else {"kv_cache_memory_bytes": 1 << 28}
    settings = {"max_model_len": 512, "max_num_seqs": 40, "dtype": "bfloat16", **cache, **fields}
    with LLM(device="cuda", **settings) as llm, no_waits():
        yield llm


def answers(llm: LLM, count: int = 37) -> Answers:
    """Rows that only draw, greedy and not, beside rows with features."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.8},
        {"temperature": 1.0, "top_p": 0.9, "logprobs": 0},
        {"temperature": 0.7, "frequency_penalty": 0.4, "repetition_penalty": 1.2, "logprobs": 0},
        {"temperature": 0.0, "logit_bias": {7: 2.0}, "min_tokens": 5, "bad_words": ["return"]},
    ]
    params = [
        SamplingParams(
            max_tokens=48, ignore_eos=True, seed=index, **kinds[index % len(kinds) if count > 5 else index % 2]
        )
        for index in range(count)
    ]
    found = []
    for output in llm.generate([LINES[index % len(LINES)] for index in range(count)], params, use_tqdm=False):
        one = output.outputs[0]
        entries = one.logprobs or []
        lines = [entry[token].logprob for entry, token in zip(entries, one.token_ids, strict=bool(entries))]
        found.append((list(one.token_ids), lines))
    return found


@pytest.fixture(scope="module")
def plain() -> dict[int, Answers]:
    with make_llm() as llm:
        return {count: answers(llm, count) for count in (3, 37)}


@pytest.mark.parametrize("name", SETTINGS)
def test_S_2_on_is_off_in_every_setting(plain: dict[int, Answers], name: str) -> None:
    with make_llm(**{"speculative_config": NGRAM, **SETTINGS[name]}) as llm:
        for count in (3, 37):
            assert answers(llm, count) == plain[count], name
        stats = llm.engine.scheduler.stats()
        assert stats.num_accepted_tokens > 20, "n-grams of code come again"


def test_S_13_rows_that_only_draw_take_whole_graphs(plain: dict[int, Answers]) -> None:
    with make_llm(speculative_config=NGRAM) as llm:
        runner = runner_of(llm.engine)
        seen: list[Any] = []
        replay = runner._graphs.replay
        runner._graphs.replay = lambda key, *own: seen.append(key) or replay(key, *own)  # type: ignore[func-returns-value]
        assert answers(llm, 3) == plain[3]
        whole = [key for key in seen if key.num_drafts and key.is_decode]
        assert len(whole) > 5 and {key.num_rows for key in whole} <= {1, 2, 4}


def test_S_10_forms_behind_drafts_say_what_they_say_without() -> None:
    """Masks are made of copies of tokens and drafts: no step waits."""
    forms = [{"regex": "[a-d ]{20,40}"}, {"choice": ["return a", "return b"]}, None]
    params = [
        SamplingParams(
            temperature=0.8 * (index % 2),
            seed=index,
            max_tokens=40,
            structured_outputs=form and StructuredOutputsParams(**form),
        )
        for index, form in enumerate(forms * 4)
    ]
    found = []
    for own in ({}, {"speculative_config": NGRAM}):
        with make_llm(**own) as llm:
            outputs = llm.generate([LINES[index % len(LINES)] for index in range(12)], params, use_tqdm=False)
            found.append([list(output.outputs[0].token_ids) for output in outputs])
            drafted = llm.engine.scheduler.stats().num_accepted_tokens
    assert found[0] == found[1] and drafted > 0


def test_prompt_lookup_equals_its_reference() -> None:
    for width in (40, 3001):
        gpu_rig.check_look_up("cuda", width)
