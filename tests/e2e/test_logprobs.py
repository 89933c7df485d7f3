"""Log-probabilities as users see them: right, consistent, and the same in every setting."""

from __future__ import annotations

import math
from importlib import resources
from typing import Any

import pytest
import torch

from engine_checks import assert_idle
from octavo import LLM, SamplingParams
from octavo.request.outputs import FlatLogprobs, LogprobsDict
from settings_matrix import SMALL_POOL

PROMPT = "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n"
NUM_OUTPUT = 16
FORCED = 377


def greedy(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": NUM_OUTPUT, "ignore_eos": True, **fields})


def assert_consistent(position: LogprobsDict, num_top: int) -> None:
    """The most likely ones with their ranks and falling values; the sampled one first, whatever its rank."""
    sampled, *_ = position.values()
    by_rank = sorted(position.values(), key=lambda entry: entry.rank or 0)
    top = by_rank[:num_top]
    assert [entry.rank for entry in top] == list(range(1, num_top + 1))
    assert sampled in top or (by_rank[num_top:] == [sampled] and (sampled.rank or 0) > num_top)
    values = [entry.logprob for entry in by_rank]
    assert values == sorted(values, reverse=True) and sum(map(math.exp, values)) <= 1 + 1e-5


@pytest.mark.parametrize("temperature", [0.0, 2.0])
def test_ranks_and_values_are_consistent(llm: LLM, temperature: float) -> None:
    (output,) = llm.generate(PROMPT, greedy(logprobs=5, prompt_logprobs=3, temperature=temperature, seed=1))
    completion = output.outputs[0]
    assert completion.logprobs is not None and output.prompt_logprobs is not None
    assert [next(iter(position)) for position in completion.logprobs] == completion.token_ids
    for position in completion.logprobs:
        assert_consistent(position, 5)
    assert output.prompt_logprobs[0] is None
    for token, entry in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True):
        assert entry is not None and next(iter(entry)) == token
        assert_consistent(entry, 3)
    chosen = [p[t].logprob for p, t in zip(completion.logprobs, completion.token_ids, strict=True)]
    assert completion.cumulative_logprob == pytest.approx(sum(chosen))
    if temperature == 0:
        assert all(p[t].rank == 1 for p, t in zip(completion.logprobs, completion.token_ids, strict=True))
    else:
        assert any(p[t].rank != 1 for p, t in zip(completion.logprobs, completion.token_ids, strict=True))


def test_values_are_those_of_transformers(llm: LLM) -> None:
    transformers = pytest.importorskip("transformers")
    folder = str(resources.files("octavo").joinpath("assets/octavo-tiny"))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    (output,) = llm.generate(PROMPT, greedy(logprobs=5, prompt_logprobs=5))
    completion = output.outputs[0]
    ids = output.prompt_token_ids + completion.token_ids
    with torch.no_grad():
        expected = torch.log_softmax(model(torch.tensor([ids])).logits[0], -1)
    assert completion.logprobs is not None and output.prompt_logprobs is not None
    for index, position in enumerate([*output.prompt_logprobs[1:], *completion.logprobs]):
        assert position is not None
        for token, entry in position.items():
            assert entry.logprob == pytest.approx(expected[index, token].item(), abs=1e-3)


def test_wanted_tokens_come_with_the_sampled_one(llm: LLM) -> None:
    completion = llm.generate(PROMPT, greedy(max_tokens=2, logprobs=0, logprob_token_ids=[5, 6]))[0].outputs[0]
    assert completion.logprobs is not None
    for position, token in zip(completion.logprobs, completion.token_ids, strict=True):
        assert list(position) == [token, 5, 6] and {e.rank for e in position.values()}.isdisjoint({None})


def _prompt_logprobs(llm: LLM, prompt: Any = PROMPT) -> list[LogprobsDict | None]:
    (output,) = llm.generate(prompt, greedy(max_tokens=1, prompt_logprobs=3))
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    return output.prompt_logprobs


def test_prompt_logprobs_do_not_depend_on_what_is_cached(llm: LLM) -> None:
    llm.reset_prefix_cache()
    cold = _prompt_logprobs(llm)
    assert llm.generate(PROMPT, greedy(max_tokens=1))[0].num_cached_tokens, "the cache is warm"
    assert _prompt_logprobs(llm) == cold


def test_flat_logprobs_hold_the_same(llm: LLM) -> None:
    wishes = {"logprobs": 2, "prompt_logprobs": 3, "n": 2, "temperature": 1.0, "seed": 3}
    (plain,), (flat,) = (llm.generate(PROMPT, greedy(**wishes, flat_logprobs=each)) for each in (False, True))
    assert isinstance(plain.prompt_logprobs, list) and isinstance(flat.prompt_logprobs, FlatLogprobs)
    assert flat.prompt_logprobs == plain.prompt_logprobs and flat.prompt_logprobs[0] is None
    for ours, theirs in zip(flat.outputs, plain.outputs, strict=True):
        assert isinstance(ours.logprobs, FlatLogprobs) and isinstance(theirs.logprobs, list)
        assert list(ours.logprobs) == theirs.logprobs and ours.logprobs[-1] == theirs.logprobs[-1]
        assert ours.logprobs[3:5] == theirs.logprobs[3:5]
        starts, ends = ours.logprobs.start_indices, ours.logprobs.end_indices
        assert starts[1:] == ends[:-1] and len(ours.logprobs.token_ids) == ends[-1]
        assert ours.logprobs.decoded_tokens[0] == theirs.logprobs[0][ours.token_ids[0]].decoded_token


def test_all_log_probabilities(make_llm: Any) -> None:
    llm = make_llm(max_logprobs=-1)
    (output,) = llm.generate([[5, 6, 7]], greedy(logprobs=-1, prompt_logprobs=-1, max_tokens=2))
    for position in (*output.prompt_logprobs[1:], *output.outputs[0].logprobs):
        assert sorted(position) == list(range(llm.engine.arch.vocab_size))
        assert sum(math.exp(entry.logprob) for entry in position.values()) == pytest.approx(1, abs=1e-4)


def test_the_cache_is_not_read_if_asked(llm: LLM) -> None:
    llm.generate(PROMPT, greedy())
    (read,), (skipped,) = (llm.generate(PROMPT, greedy(skip_reading_prefix_cache=each)) for each in (False, True))
    assert read.num_cached_tokens and skipped.num_cached_tokens == 0
    assert skipped.outputs[0].token_ids == read.outputs[0].token_ids


def test_a_truncated_prompt_answers_as_its_end(llm: LLM) -> None:
    ids = llm.get_tokenizer().encode(PROMPT)
    (end,) = llm.generate([ids[-9:]], greedy())
    for prompt in (PROMPT, ids, {"prompt_token_ids": ids * 200}):
        (cut,) = llm.generate(prompt, greedy(truncate_prompt_tokens=9))
        assert cut.prompt_token_ids == ids[-9:] and cut.outputs[0].token_ids == end.outputs[0].token_ids
    book = "x = 1\n" * 20_000  # more bytes than fit, whatever their tokens are
    whole = llm.get_tokenizer().encode(book)
    (cut,) = llm.generate(book, greedy(truncate_prompt_tokens=-1))
    assert cut.prompt_token_ids == whole[-len(cut.prompt_token_ids or []) :] and len(whole) > 2048
    assert len(cut.prompt_token_ids or []) == 2048 - (greedy().max_tokens or 0)
    (cut,) = llm.chat([{"role": "user", "content": book}], greedy(truncate_prompt_tokens=20))
    assert len(cut.prompt_token_ids or []) == 20


def test_prompt_logprobs_do_not_depend_on_chunks(llm: LLM, make_llm: Any) -> None:
    chunked = make_llm(max_num_batched_tokens=16, max_num_seqs=16)
    assert _prompt_logprobs(chunked) == _prompt_logprobs(llm)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_prompt_logprobs_survive_preemption(
    llm: LLM, make_llm: Any, held_out_prompts: list[str], async_scheduling: bool
) -> None:
    small = make_llm(**SMALL_POOL, async_scheduling=async_scheduling, max_num_batched_tokens=50)
    prompts = held_out_prompts[:12]
    together = small.generate(prompts, greedy(max_tokens=32, prompt_logprobs=2, logprobs=1))
    assert small.engine.scheduler.num_preemptions > 0
    for prompt, output in zip(prompts, together, strict=True):
        (alone,) = llm.generate(prompt, greedy(max_tokens=32, prompt_logprobs=2, logprobs=1))
        assert output.prompt_logprobs == alone.prompt_logprobs
        assert output.outputs == alone.outputs
    assert_idle(small)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_prompt_logprobs_are_those_of_generating_the_same_text(make_llm: Any, dtype: str) -> None:
    llm = make_llm(dtype=dtype)
    (output,) = llm.generate(PROMPT, greedy(logprobs=3))
    completion = output.outputs[0]
    replayed = _prompt_logprobs(llm, [output.prompt_token_ids + completion.token_ids])
    assert replayed[len(output.prompt_token_ids) :] == completion.logprobs


MODES = ("raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits")


@pytest.fixture(scope="module")
def by_mode() -> dict[str, LogprobsDict]:
    """The first position of one request in each mode; its bias makes one token likeliest."""
    found = {}
    for mode in MODES:
        with LLM(dtype="float32", logprobs_mode=mode) as llm:
            params = greedy(max_tokens=1, logprobs=0, logprob_token_ids=[5, 6], logit_bias={FORCED: 100.0})
            completion = llm.generate(PROMPT, params)[0].outputs[0]
            assert completion.logprobs is not None and completion.token_ids == [FORCED]
            found[mode] = completion.logprobs[0]
    return found


def test_modes_differ_by_what_was_done_to_the_logits(by_mode: dict[str, LogprobsDict]) -> None:
    values = {mode: {token: entry.logprob for token, entry in found.items()} for mode, found in by_mode.items()}
    assert values["processed_logprobs"][FORCED] == pytest.approx(0, abs=1e-3)
    assert values["raw_logprobs"][FORCED] < -0.1
    bias = {token: values["processed_logits"][token] - values["raw_logits"][token] for token in (5, 6, FORCED)}
    assert bias == pytest.approx({5: 0, 6: 0, FORCED: 100}, abs=1e-4)
    for kind in ("raw", "processed"):
        differences = {values[f"{kind}_logits"][t] - values[f"{kind}_logprobs"][t] for t in (5, 6, FORCED)}
        assert max(differences) - min(differences) < 1e-3, "a log-probability is a logit less one number"


def test_ranks_are_those_of_the_mode(by_mode: dict[str, LogprobsDict]) -> None:
    ranks = {mode: found[FORCED].rank for mode, found in by_mode.items()}
    assert ranks["processed_logprobs"] == ranks["processed_logits"] == 1
    assert ranks["raw_logprobs"] == ranks["raw_logits"] != 1
