"""Scores of sequences that fill the context: what the engine draws, it scores, in the same bits."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from octavo import LLM, SamplingParams
from octavo.frontend.control import WrongStateError
from octavo.request.outputs import RequestOutput
from octavo.request.sampling_params import ParameterError

LENGTH = 64
DRAWN = SamplingParams(max_tokens=100, temperature=1.0, seed=3, logprobs=0, ignore_eos=True, flat_logprobs=True)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("octavo-tiny", dtype="float32", max_model_len=LENGTH, max_num_batched_tokens=24, max_num_seqs=4) as made:
        yield made


@pytest.fixture(scope="module")
def full(llm: LLM) -> list[RequestOutput]:
    found = llm.generate([[5, 6, 7], list(range(9, 9 + LENGTH - 1))], DRAWN)
    assert [len(each.prompt_token_ids) + len(each.outputs[0].token_ids) for each in found] == [LENGTH, LENGTH]
    return found


def test_what_fills_the_context_is_scored_as_it_was_drawn(llm: LLM, full: list[RequestOutput]) -> None:
    ids = [[*each.prompt_token_ids, *each.outputs[0].token_ids] for each in full]
    for each, sequence in zip(full, ids, strict=True):
        start = len(each.prompt_token_ids)
        assert llm.score([sequence], start=start) == [each.outputs[0].logprobs.logprobs.tolist()]
    one_by_one = [llm.score([each])[0] for each in (*ids, ids[0][:-1])]
    assert llm.score([*ids, ids[0][:-1]]) == one_by_one and [len(each) for each in one_by_one] == [63, 63, 62]
    assert one_by_one[2] == one_by_one[0][:-1]
    warm = llm.score(ids, temperature=0.5)
    assert warm != one_by_one[:2] and llm.score([ids[0]], 0.5)[0][:-1] == llm.score([ids[0][:-1]], 0.5)[0]
    assert llm.score([[3]]) == [[]] and llm.score([ids[0]], start=LENGTH) == [[]]


def test_a_context_of_one_token_is_scored() -> None:
    with LLM("octavo-tiny", dtype="float32", max_model_len=2) as small:
        assert len(small.score([[5, 6]])[0]) == 1 and small.score([[5]]) == [[]]


@pytest.mark.parametrize(
    ("prompts", "more", "told"),
    [
        ([[1] * (LENGTH + 1)], {}, r"prompts\[0\]: 65 tokens exceed max_model_len 64"),
        ([[1, 2], [3, 9999]], {}, r"prompts\[1\]: token id at index 1 must be in \[0, \d+\), got 9999"),
        ([[1, 2], []], {}, r"prompts\[1\]: must not be empty"),
        ([5, 6], {}, r"prompts\[0\]: must be a list of token ids, as in \[\[5, 6\]\], got int"),
        ([5, 6.5], {}, r"prompts\[0\]: must be a list of token ids"),
        ("text", {}, r"prompts: must be a list of sequences of token ids, .*texts are not compared\), got str"),
        ("a", {"temperature": "b"}, r"prompts: must be a list of sequences of token ids, .*texts are not compared"),
        (["a"], {"temperature": ["b"]}, r"prompts\[0\]: must be a list of token ids, .*texts are not compared"),
        (["text"], {}, r"prompts\[0\]: must be a list of token ids.* got str"),
        ([{"prompt_token_ids": [1]}], {}, r"prompts\[0\]: must be a list of token ids"),
        (None, {}, r"prompts: must be a list of sequences of token ids, got NoneType"),
        ([[1, 2]], {"temperature": 0}, r"temperature: must be in \[1e-05, 1e\+30\], got 0"),
        ([[1, 2]], {"temperature": "x"}, r"temperature: must be a number"),
        ([[1, 2]], {"start": -1}, r"start: must be an index, at least 0, got -1"),
    ],
)
def test_a_score_is_refused_by_its_own_arguments(llm: LLM, prompts: object, more: dict, told: str) -> None:
    with pytest.raises(ParameterError, match=f"^{told}") as error:
        llm.score(prompts, **more)  # type: ignore[arg-type]
    assert "answer" not in str(error.value) and error.value.field == re.split(":", str(error.value))[0]


def test_generate_still_wants_room_for_an_answer(llm: LLM) -> None:
    with pytest.raises(ParameterError, match=r"leave no room for an answer|> max_model_len 64"):
        llm.generate([[1] * LENGTH], SamplingParams(max_tokens=1, prompt_logprobs=0))
    with pytest.raises(ParameterError, match="scored_token_id"):
        SamplingParams.from_optional(scored_token_id=3)


def test_a_sleeper_refuses_a_score_by_name(llm: LLM) -> None:
    llm.sleep(1)
    try:
        with pytest.raises(WrongStateError, match=r"^score: the engine sleeps"):
            llm.score([[1, 2]])
        with pytest.raises(WrongStateError, match=r"^chat: the engine sleeps"):
            llm.chat([{"role": "user", "content": "a"}])
        with pytest.raises(WrongStateError, match=r"^generate: the engine sleeps"):
            llm.generate([[1, 2]])
        with pytest.raises(WrongStateError, match=r"^stream: the engine sleeps"):
            next(llm.stream([1, 2]))
    finally:
        llm.wake_up()
