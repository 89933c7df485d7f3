"""rl.Drawn: a sampler's tokens as one pack, its log-probabilities beside the trainer's, whoever told them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from octavo import LLM, SamplingParams, rl
from octavo.request.sampling_params import RequestOutputKind
from rl_rig import TINY, random_ids, tiny

PROMPTS = random_ids(3, 41, 17)
IDS = [[5, 6, 7], [8, 9], [1]], [[10, 11], [], [12]], [[-1.0, -2.0], [], [-3.0]]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(TINY, dtype="float32", max_model_len=256, logprobs_mode="processed_logprobs") as made:
        yield made


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return rl.convert(tiny(torch.float32))


def draw(llm: LLM, **own: Any) -> list[Any]:
    fields = {"max_tokens": 9, "n": 3, "seed": 3, "logprobs": 0, "detokenize": False} | own
    prompts: Any = [{"prompt_token_ids": ids} for ids in PROMPTS]
    return llm.generate(prompts, SamplingParams(**fields), use_tqdm=False)


@pytest.mark.parametrize("own", [{}, {"logprobs": 4}, {"flat_logprobs": True}, {"temperature": 0.6}], ids=str)
def test_all_ratios_are_one(llm: LLM, model: torch.nn.Module, own: dict[str, Any]) -> None:
    """Of prompts of different lengths, three completions each, in the order of the outputs."""
    outputs = draw(llm, **own)
    drawn = rl.Drawn.of(outputs)
    assert drawn.token_ids == [each.token_ids for output in outputs for each in output.outputs]
    ratio = (drawn.logprobs(model, own.get("temperature", 1.0)) - drawn.old).exp()
    assert len(ratio) == sum(drawn.lengths) and torch.equal(ratio, torch.ones_like(ratio))


def test_a_sampling_mask_is_the_support_of_the_drawn_tokens(llm: LLM, model: torch.nn.Module) -> None:
    """Ratios are 1 under it, and under the cut that made it; not without."""
    cut = {"temperature": 0.7, "top_p": 0.9, "top_k": 40}
    drawn = rl.Drawn.of(draw(llm, **cut, return_sampling_mask=True))
    for support in (drawn.support, rl.Truncation(top_p=0.9, top_k=40)):
        assert torch.equal(drawn.logprobs(model, 0.7, support), drawn.old)
    assert not torch.equal(drawn.logprobs(model, 0.7), drawn.old)
    plain = rl.Drawn.of(draw(llm, return_sampling_mask=True))
    assert (plain.support == rl.NO_TOKEN).all() and torch.equal(plain.logprobs(model, 1.0, plain.support), plain.old)


def test_gradients_are_those_of_all_tokens_whose_prompts_are_left_out(llm: LLM, model: torch.nn.Module) -> None:
    drawn = rl.Drawn.of(draw(llm))
    weight = model.get_parameter("model.layers.0.mlp.down_proj.weight")
    numbers = torch.arange(9.0)
    (drawn.logprobs(model) * drawn.spread(numbers)).sum().backward()
    found, weight.grad = weight.grad, None
    loss = torch.zeros(())
    for each, own, number in zip(
        drawn.completions, drawn.pack.split(rl.logprobs(model, drawn.pack).logprobs), numbers, strict=True
    ):
        loss = loss + own[len(each.prompt) - 1 : -1].sum() * number
    loss.backward()
    # the head's products are of other numbers of rows, and the library's order of sums may follow them
    assert (found - weight.grad).norm() <= 2e-6 * weight.grad.norm()
    model.zero_grad()


def test_parts_have_the_bits_of_the_whole(llm: LLM, model: torch.nn.Module) -> None:
    """Microbatches of any completions in any order."""
    drawn = rl.Drawn.of(draw(llm))
    whole = drawn.split(drawn.logprobs(model))
    for numbers in ([4, 0, 8], range(3, 7)):
        part = drawn.part(numbers)
        assert part.token_ids == [drawn.token_ids[number] for number in numbers]
        assert torch.equal(part.logprobs(model), torch.cat([whole[number] for number in numbers]))
        assert torch.equal(part.old, torch.cat([drawn.split(drawn.old)[number] for number in numbers]))


def test_a_part_is_named_by_numbers_or_by_a_bool_for_each() -> None:
    drawn = rl.Drawn.of_ids(*IDS)
    for mask in ([True, False, True], np.array([1, 0, 1]) > 0, torch.tensor([1, 0, 1]) > 0):
        assert drawn.part(mask).token_ids == [drawn.token_ids[0], drawn.token_ids[2]]
    for numbers in ([2, 0], np.array([2, 0]), torch.tensor([2, 0])):
        assert drawn.part(numbers).token_ids == [drawn.token_ids[2], drawn.token_ids[0]]
    with pytest.raises(ValueError, match=r"must be 3 bools, one for each completion, got 2"):
        drawn.part([True, False])
    for wrong in (3, -1, 0.5):
        with pytest.raises(ValueError, match=rf"must be whole ones in \[0, 2\], got {wrong}"):
            drawn.part([0, wrong])  # type: ignore[list-item]


def test_text_is_no_prompt() -> None:
    for prompt in ("def", ["def"]):
        with pytest.raises(ValueError, match=r"token_ids\[0\] has a prompt of text, expected its token ids"):
            rl.Drawn.of_ids([prompt], [[10]], [[-1.0]])  # type: ignore[list-item]


def test_completions_without_tokens_keep_their_number(model: torch.nn.Module) -> None:
    """An aborted request's, say: nothing is computed for it, and its number is spread over nothing."""
    drawn = rl.Drawn.of_ids(*IDS)
    assert drawn.lengths == (2, 0, 1) and drawn.pack.lengths == (5, 2)
    assert drawn.spread([1.0, 2.0, 3.0]).tolist() == [1.0, 1.0, 3.0]
    assert [each.tolist() for each in drawn.split(drawn.old)] == [[-1.0, -2.0], [], [-3.0]]
    assert drawn.targets.tolist() == [-1, -1, 10, 11, -1, 12, -1] and drawn.places.tolist() == [2, 3, 5]
    assert drawn.pick(torch.arange(7)).tolist() == [2, 3, 5]
    assert [len(each) for each in drawn.split(drawn.logprobs(model))] == [2, 0, 1]


def test_tensors_and_arrays_are_lists_too() -> None:
    prompts, ids, values = IDS
    drawn = rl.Drawn.of_ids(
        [torch.tensor(each) for each in prompts], [np.array(each, dtype=int) for each in ids], values
    )
    assert drawn.token_ids == ids and drawn.pack.lengths == (5, 2)


def test_experts_lie_where_their_tokens_lie() -> None:
    """Behind a sequence's last token nothing ran."""
    said = SimpleNamespace(token_ids=[4, 5], logprobs=[{4: SimpleNamespace(logprob=-1.0)}] * 2, cumulative_logprob=None)
    said.logprobs[1] = {5: SimpleNamespace(logprob=-2.0)}
    said.routed_experts = np.arange(12, dtype=np.int16).reshape(3, 2, 2)
    outputs: Any = [SimpleNamespace(prompt_token_ids=[2, 3], finished=True, outputs=[said, said])]
    experts = rl.Drawn.of(outputs).routed_experts
    assert experts[:3].tolist() == said.routed_experts.tolist() and torch.equal(experts[:4], experts[4:])
    assert (experts[3] == -1).all() and experts.dtype == torch.int16


def test_what_attention_mods_read_goes_with_its_completion() -> None:
    drawn = rl.Drawn.of_ids(*IDS, fields={"weight": torch.tensor([1.0, 2.0, 3.0])})
    assert drawn.pack.tables["weight"].tolist() == [1.0, 3.0]
    assert drawn.part([2]).pack.tables["weight"].tolist() == [3.0]
    with pytest.raises(ValueError, match=r"fields\['weight'\] must be 3, one a completion, got 2"):
        rl.Drawn.of_ids(*IDS, fields={"weight": torch.ones(2)})


def said_of_ids(**other: Any) -> dict[str, Any]:
    content = {"content": [{"token": "token_id:10", "logprob": -1.0}, {"token": "token_id:11", "logprob": -2.0}]}
    choice = {"index": 0, "token_ids": [10, 11], "logprobs": content, "finish_reason": "length"}
    return {"choices": [choice | other]}


def test_answers_of_three_routes_say_the_same() -> None:
    expected = rl.Drawn.of_ids([[5, 6, 7]], [[10, 11]], [[-1.0, -2.0]], [[[10, 12], None]])
    scores = {"tokens": ["a", "b"], "token_logprobs": [-1.0, -2.0], "top_logprobs": None}
    meta = {
        "output_token_logprobs": [[-1.0, 10, None], [-2.0, 11, None]],
        "output_token_sampling_mask": [[10, 12], None],
    }
    for answer, prompts in (
        (said_of_ids(sampling_mask=[[10, 12], None]), [[5, 6, 7]]),
        (said_of_ids(logprobs=scores, prompt_token_ids=[5, 6, 7], sampling_mask=[[10, 12], None]), None),
        ({"output_ids": [10, 11], "meta_info": meta}, [[5, 6, 7]]),
    ):
        drawn = rl.Drawn.of_answers([answer], prompts)
        assert [dataclasses.replace(each, where="") for each in drawn.completions] == [
            dataclasses.replace(each, where="") for each in expected.completions
        ]
        assert torch.equal(drawn.old, expected.old) and torch.equal(drawn.support, expected.support)
    assert expected.support.tolist() == [[-1, -1], [-1, -1], [10, 12], [-1, -1], [-1, -1]]


def answers(*found: Any, prompts: Any = ([5, 6, 7],)) -> Callable[[LLM], Any]:
    return lambda _: rl.Drawn.of_answers(found, prompts)


def ids(**own: Any) -> Callable[[LLM], Any]:
    given = {"prompts": [[5, 6]], "token_ids": [[7, 8]], "logprobs": [[-1.0, -2.0]]} | own
    return lambda _: rl.Drawn.of_ids(**given)


def streamed(llm: LLM, kind: RequestOutputKind) -> list[Any]:
    params = SamplingParams(max_tokens=9, logprobs=0, seed=3, output_kind=kind, ignore_eos=True)
    return list(llm.stream({"prompt_token_ids": PROMPTS[0]}, params))


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda llm: rl.Drawn.of(draw(llm, logprobs=None)), r"ask for them with SamplingParams\(logprobs=0\)"),
        (lambda llm: rl.Drawn.of(draw(llm)[0]), "outputs must be a list .* got one RequestOutput"),
        (lambda llm: rl.Drawn.of(streamed(llm, RequestOutputKind.CUMULATIVE)[:1]), "goes on"),
        (lambda llm: rl.Drawn.of(streamed(llm, RequestOutputKind.DELTA)[-1:]), "a part of a completion"),
        (lambda llm: rl.Drawn.of(draw(llm)).support, r"SamplingParams\(return_sampling_mask=True\)"),
        (lambda llm: rl.Drawn.of(draw(llm)).routed_experts, r"SamplingParams\(return_routed_experts=True\)"),
        (lambda llm: rl.Drawn.of(draw(llm)).spread([1.0, 2.0]), r"must be \[9\], one for each completion, got \[2\]"),
        (lambda llm: rl.Drawn.of(draw(llm)).pick(torch.zeros(3)), "one a token of the pack, got 3"),
        (lambda _: rl.Drawn.of([]), "no token was drawn: 0 completions"),
        (ids(token_ids=[[]], logprobs=[[]]), "no token was drawn: 1 completions"),
        (ids(prompts=[[]]), r"token_ids\[0\] has an empty prompt"),
        (ids(logprobs=[[-1.0]]), r"token_ids\[0\] has 2 tokens and 1 log-probabilities"),
        (ids(logprobs=[[-1.0, float("nan")]]), "has the log-probability nan at its token 1"),
        (ids(logprobs=[]), "logprobs must be 1, one for each list of token_ids, got 0"),
        (answers(said_of_ids(logprobs=None)), r'answers\[0\].choices\[0\] has no log-probabilities: .* "logprobs": 0'),
        (answers(said_of_ids(token_ids=None)), '"return_token_ids": true'),
        (answers(said_of_ids(), prompts=None), "does not tell its prompt: give prompts"),
        (answers(said_of_ids(prompt_token_ids=[5])), "is of another prompt"),
        (answers({"output_ids": [1], "meta_info": {}}), "return_logprob"),
        (answers({"error": {"message": "too long"}}), "has no choices: a completion was expected, got .*too long"),
        (answers(said_of_ids(), said_of_ids()), "prompts must be 2 lists of ids, one for each answer, got 1"),
        (lambda _: rl.Drawn.of_answers(said_of_ids()), "answers must be a list of bodies"),
    ],
)
def test_what_is_no_draw_is_refused_with_what_to_ask_for(llm: LLM, call: Callable[[LLM], Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        call(llm)
