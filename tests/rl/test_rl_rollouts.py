"""Rollouts over several calls: turns, partial rollouts that go on elsewhere, siblings, labels and salts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.request.outputs import CompletionOutput
from octavo.request.seeds import sample_seed
from rl_rig import TINY, random_ids

FIELDS: dict[str, Any] = {"dtype": "float32", "max_model_len": 256, "block_size": 16}
(PROMPT,) = random_ids(40)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(TINY, **FIELDS) as made:
        yield made


def draw(llm: LLM, ids: list[int], **own: Any) -> CompletionOutput:
    fields = {"max_tokens": 60, "seed": 9, "logprobs": 0, "ignore_eos": True, "detokenize": False} | own
    (output,) = llm.generate([{"prompt_token_ids": ids}], SamplingParams(**fields), use_tqdm=False)
    return output.outputs[0]


def told(completion: CompletionOutput) -> list[tuple[int, float]]:
    assert completion.logprobs is not None
    pairs = zip(completion.token_ids, completion.logprobs, strict=True)
    return [(token, entry[token].logprob) for token, entry in pairs]


OWN = [{"temperature": 0.0}, {"temperature": 1.0}, {"top_p": 0.9, "temperature": 0.7}, {"repetition_penalty": 1.3}]


@pytest.mark.parametrize("own", OWN, ids=str)
def test_rl_g4_a_partial_rollout_goes_on_elsewhere(llm: LLM, own: dict[str, Any]) -> None:
    """RL.G4: by ids and seed, on this engine, with what it has cached, and on one that has just started."""
    whole = told(draw(llm, PROMPT, **own))
    first = told(draw(llm, PROMPT, max_tokens=25, **own))
    ids = PROMPT + [token for token, _ in first]
    assert first + told(draw(llm, ids, max_tokens=35, **own)) == whole
    with LLM(TINY, **FIELDS) as other:
        assert first + told(draw(other, ids, max_tokens=35, **own)) == whole


def test_rl_g2_a_turn_is_found_in_the_cache_and_changes_no_bit(llm: LLM) -> None:
    """RL.G2: prompt, output and new ids are a hit of all full blocks, and score as one prompt that had all ids."""
    ids = [*PROMPT, *draw(llm, PROMPT).token_ids, *random_ids(7, seed=3)[0]]
    params = SamplingParams(max_tokens=8, seed=4, logprobs=0, ignore_eos=True, detokenize=False)
    (output,) = llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
    assert output.num_cached_tokens == 96, "the last token of the turn before was never computed"
    with LLM(TINY, **FIELDS) as other:
        (cold,) = other.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
    assert cold.num_cached_tokens == 0 and told(cold.outputs[0]) == told(output.outputs[0])


def test_rl_g5_a_sibling_is_the_request_of_its_own_seed(llm: LLM) -> None:
    """RL.G5: by the formula of `octavo.request.seeds`; siblings of one seed differ."""
    params = SamplingParams(n=4, max_tokens=12, seed=9, ignore_eos=True, detokenize=False)
    (output,) = llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)
    siblings = [each.token_ids for each in output.outputs]
    assert len(set(map(tuple, siblings))) == 4
    alone = [draw(llm, PROMPT, max_tokens=12, seed=sample_seed(9, index)).token_ids for index in range(4)]
    assert alone == siblings


def test_rl_p3_a_label_alone_aborts_nothing(llm: LLM) -> None:
    """RL.P3: a request that runs goes on, its later tokens say the new label, and no block is lost."""
    whole = draw(llm, PROMPT).token_ids
    params = SamplingParams(max_tokens=60, seed=9, ignore_eos=True, detokenize=False)
    before, found = llm.get_weight_version(), []
    for number, output in enumerate(llm.stream({"prompt_token_ids": PROMPT}, params)):
        found.append(output.outputs[0])
        if number == 10:
            llm.update_weight_version("another")
    assert [token for part in found for token in part.token_ids] == whole
    assert {span.version for part in found for span in part.weight_versions} == {before, "another"}
    (again,) = llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)
    assert again.num_cached_tokens == 32 and again.outputs[0].token_ids == whole
    llm.update_weight_version(before)


def test_rl_v5_salts_still_part_caches(llm: LLM) -> None:
    """RL.V5: and change no token."""
    (ids,) = random_ids(50, seed=5)
    params = SamplingParams(max_tokens=4, seed=1, ignore_eos=True, detokenize=False)
    asked = [{"prompt_token_ids": ids, "cache_salt": salt} for salt in ("a", "a", "b")]
    outputs = [llm.generate([one], params, use_tqdm=False)[0] for one in asked]
    assert [each.num_cached_tokens for each in outputs] == [0, 48, 0]
    assert len({tuple(each.outputs[0].token_ids) for each in outputs}) == 1
