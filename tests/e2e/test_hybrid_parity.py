"""octavo-tiny-hybrid, whose layers mostly keep states: its greedy output equals transformers', in many settings."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from importlib import resources
from typing import Any

import pytest
import torch

from eager_graphs import EagerGraphs
from insides import runner_of
from octavo import LLM, SamplingParams
from octavo.attention.paged import PagedBackend
from octavo.device.graphs import decode_keys, mixed_keys
from octavo.plan import StepLimits
from octavo.worker.assembly import _graph_keys

MODEL, NUM_OUTPUT = "octavo-tiny-hybrid", 24
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUT, ignore_eos=True)
SETTINGS: dict[str, dict[str, Any]] = {
    "pieces of 7": {"max_num_batched_tokens": 7, "max_num_seqs": 7},
    "pieces of 100": {"max_num_batched_tokens": 100, "max_num_seqs": 64},
    "blocks of 64": {"block_size": 64},
    "last states": {"snapshot_interval": 0},
    "every second state": {"snapshot_interval": 2},
    "steps in flight": {"async_scheduling": True},
}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(MODEL, dtype="float32", enable_prefix_caching=False) as made:
        yield made


@pytest.fixture(scope="module")
def alone(llm: LLM, held_out_prompts: list[str]) -> list[list[int]]:
    """The greedy continuation of each prompt by itself."""
    prompts = held_out_prompts[:50]
    return [list(llm.generate(prompt, GREEDY, use_tqdm=False)[0].outputs[0].token_ids) for prompt in prompts]


def test_H_6_alone(held_out_prompts: list[str], alone: list[list[int]]) -> None:
    """Each token is the likeliest that transformers finds behind those before it, of 50 held-out prompts."""
    transformers = pytest.importorskip("transformers")
    folder = str(resources.files("octavo").joinpath(f"assets/{MODEL}"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.Qwen3_5ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert len(alone) == 50
    for prompt, tokens in zip(held_out_prompts, alone, strict=False):
        ids = tokenizer(prompt).input_ids
        with torch.inference_mode():
            logits = model(torch.tensor([ids + tokens[:-1]])).logits[0, len(ids) - 1 :]
        assert logits.argmax(dim=1).tolist() == tokens


@pytest.mark.parametrize("name", SETTINGS)
def test_H_8_together(held_out_prompts: list[str], alone: list[list[int]], name: str) -> None:
    """Twice: what the first round left is found in the second."""
    with LLM(MODEL, dtype="float32", **SETTINGS[name]) as llm:
        for _ in range(2):
            outputs = llm.generate(held_out_prompts[:12], GREEDY, use_tqdm=False)
            assert [list(output.outputs[0].token_ids) for output in outputs] == alone[:12]


@pytest.mark.parametrize("count", [pytest.param(8, id="8"), pytest.param(1000, id="1000", marks=pytest.mark.slow)])
def test_H_8_a_request_behind_a_disturbing_one_keeps_its_bits(llm: LLM, count: int) -> None:
    """A, B, A: what B leaves in blocks, states and caches changes nothing of A's second answer."""
    rng = random.Random(count)
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=6, ignore_eos=True, logprobs=0, detokenize=False)

    def answer(llm: LLM, prompt: list[int]) -> list[tuple[int, float]]:
        completion = llm.generate(prompt, params, use_tqdm=False)[0].outputs[0]
        assert completion.logprobs is not None
        chosen = zip(completion.token_ids, completion.logprobs, strict=True)
        return [(token, entry[token].logprob) for token, entry in chosen]

    with LLM(MODEL, dtype="float32", kv_cache_memory_bytes=18 << 20, max_model_len=512) as cached:
        for _ in range(count):
            first = rng.choices(range(4096), k=rng.randint(1, 300))
            other = first[: rng.randrange(len(first))] + rng.choices(range(4096), k=rng.randint(1, 150))
            before = answer(cached, first)
            answer(cached, other)
            assert answer(cached, first) == before
        assert before == answer(llm, first)
        assert cached.engine.scheduler.stats().num_prefix_hits > 0


def test_H_4_hits_are_as_long_as_those_of_a_model_that_only_attends(held_out_prompts: list[str]) -> None:
    """With blocks of a chunk's size: a state is kept at every border, so both find all but the last block."""
    prompt = [index % 4000 + 3 for index in range(500)]
    params = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)
    found = []
    for model in (MODEL, "octavo-tiny"):
        with LLM(model, dtype="float32", block_size=64) as llm:
            for cut in (500, 500, 450, 385, 384, 130, 65, 64):
                llm.generate(prompt[:cut], params, use_tqdm=False)
            found.append(llm.engine.scheduler.stats().num_prefix_hits)
    assert found[0] == found[1] == 448 + 448 + 384 + 320 + 128 + 64


@pytest.mark.parametrize("block_size", [16, 64])
def test_H_4_prompts_that_share_a_beginning_find_all_of_it(block_size: int) -> None:
    """16 prompts that share 512 of 544 tokens, at once: as many tokens are found as in a model that only attends."""
    rng = random.Random(3)
    shared, params = rng.choices(range(4000), k=512), SamplingParams(temperature=0.0, max_tokens=2, detokenize=False)
    prompts = [shared + rng.choices(range(4000), k=32) for _ in range(16)]
    for model in (MODEL, "octavo-tiny"):
        with LLM(model, dtype="float32", block_size=block_size) as llm:
            llm.generate(prompts, params, use_tqdm=False)
            assert llm.engine.scheduler.stats().num_prefix_hits == 15 * 512, model


def test_H_4_drafts_lose_no_hit(llm: LLM) -> None:
    """Right ones, wrong ones and none: as many tokens are found as without, in prompts and in what was said."""
    prompt, found = [*range(100, 140)] * 5, []
    params = SamplingParams(temperature=0.0, max_tokens=80, ignore_eos=True, detokenize=False)
    drafts = {"method": "ngram", "num_speculative_tokens": 4}
    for own in ({}, {"speculative_config": drafts}, {"speculative_config": {**drafts, "num_speculative_tokens": 1}}):
        with LLM(MODEL, dtype="float32", **own) as llm:
            (output,) = llm.generate([prompt], params, use_tqdm=False)
            llm.generate([[*prompt, *output.outputs[0].token_ids, 7], prompt[:130]], params, use_tqdm=False)
            stats = llm.engine.scheduler.stats()
            found.append(stats.num_prefix_hits)
            assert (stats.num_draft_tokens > 0) == bool(own)
    assert found == [found[0]] * 3 and found[0] >= 272 + 128


def test_padded_as_for_graphs(held_out_prompts: list[str], alone: list[list[int]]) -> None:
    """Decode steps whole, and steps with prompts up to their hidden states, as a GPU holds both in graphs."""
    with LLM(MODEL, dtype="float32", enable_prefix_caching=False, max_num_seqs=5, max_num_batched_tokens=40) as llm:
        runner = runner_of(llm.engine)
        pool = runner._graphs = EagerGraphs(runner, [*decode_keys(5), *mixed_keys(5, 40)])
        runner.capture()
        outputs = llm.generate(held_out_prompts[:9], GREEDY, use_tqdm=False)
        assert [list(output.outputs[0].token_ids) for output in outputs] == alone[:9]
        assert {(True, True), (False, True)} <= pool.replayed_kinds
        resolved = dataclasses.replace(llm.engine.resolved, device="cuda")
        limits = StepLimits(max_num_rows=5, max_num_tokens=40, max_model_len=2048)
        keys = _graph_keys(runner.model, resolved, limits, [PagedBackend.capability])
        assert {key.is_decode for key in keys} == {True, False}
