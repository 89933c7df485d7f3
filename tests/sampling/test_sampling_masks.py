"""Logit bias, allowed tokens, min_tokens, bad words and their order, on numbers that can be checked by hand."""

from __future__ import annotations

import torch

from octavo.sampling.logprobs import to_token_logprobs

V = 97


def processed(world, row, logits=None):
    """All processed logits of a greedy row, through the public way: processed_logits of the whole vocabulary."""
    output = world.sample([row], torch.zeros(1, V) if logits is None else logits)
    entry = to_token_logprobs(output.logprobs)[0]
    values = torch.empty(V)
    values[entry.token_ids] = torch.tensor(entry.logprobs)
    return values


def add(make_world, **request):
    world = make_world(logprobs_mode="processed_logits", max_logprobs=-1)
    world.add(0, temperature=0.0, logprobs=V, **request)
    return world


def forbidden(values):
    return [token for token, value in enumerate(values.tolist()) if value == float("-inf")]


def test_logit_bias_adds(make_world):
    values = processed(add(make_world, logit_bias={5: 2.5, 90: -100.0}), 0)
    assert values[5] == 2.5 and values[90] == -100 and values.abs().sum() == 102.5


def test_allowed_tokens_keep_their_logits(make_world):
    logits = torch.arange(V, dtype=torch.float32)[None]
    values = processed(add(make_world, allowed_token_ids=[3, 50, 3]), 0, logits)
    assert values[3] == 3 and values[50] == 50 and len(forbidden(values)) == V - 2


def test_min_tokens_hold_back_eos_and_stop_tokens(make_world):
    world = add(make_world, prompt=[1, 2], min_tokens=2, stop_token_ids=[8], eos=[9, 8])
    assert forbidden(processed(world, 0)) == [8, 9]
    world.commit(0, 4)
    assert forbidden(processed(world, 0)) == [8, 9]
    world.commit(0, 4)
    assert forbidden(processed(world, 0)) == []


def test_min_tokens_count_output_replayed_after_preemption(make_world):
    request = {"min_tokens": 2, "eos": [9], "prompt": [1, 2]}
    assert forbidden(processed(add(make_world, output=[5], **request), 0)) == [9]
    assert forbidden(processed(add(make_world, output=[5, 5], **request), 0)) == []


def test_bad_words_forbid_the_last_token_after_its_prefix(make_world):
    words = [[7], [1, 2, 30], [2, 31], [2, 2, 32], [9, 1, 2, 33]]
    world = add(make_world, prompt=[9], output=[1, 2], bad_words_token_ids=words)
    assert forbidden(processed(world, 0)) == [7, 30, 31]  # the 9 of the prompt is no output
    world.commit(0, 2)
    assert forbidden(processed(world, 0)) == [7, 31, 32]


def test_bad_words_with_one_last_token_forbid_it_if_one_matches(make_world):
    world = add(make_world, output=[5], bad_words_token_ids=[[5, 40], [6, 40], [4, 40]])
    assert forbidden(processed(world, 0)) == [40]


def test_the_order_of_stages(make_world):
    """Bias comes before the penalties (and is divided with the logit), masks last however large the bias."""
    world = add(
        make_world,
        prompt=[5],
        output=[6],
        logit_bias={5: 8.0, 6: 8.0, 7: 100.0, 8: 100.0},
        repetition_penalty=2.0,
        frequency_penalty=1.0,
        presence_penalty=0.5,
        min_tokens=3,
        eos=[7],
        bad_words_token_ids=[[8]],
    )
    values = processed(world, 0)
    assert values[5] == 4.0  # 8 / 2
    assert values[6] == 2.5  # 8 / 2 - 1 - 0.5
    assert forbidden(values) == [7, 8]


def test_temperature_divides_before_min_p_and_min_p_before_top_p(make_world):
    world = make_world(logprobs_mode="processed_logits", max_logprobs=-1)
    # probabilities at temperature 2 are 1 : 1/2 : 1/8; min_p 0.25 leaves two of them, top_p 0.7 of 1.5 needs both
    logits = torch.full((1, V), -200.0)
    logits[0, :3] = 2 * torch.tensor([1.0, 0.5, 0.125]).log()
    world.add(0, temperature=2.0, min_p=0.25, top_p=0.7, logprobs=V)
    values = processed(world, 0, logits)
    assert torch.allclose(values[:2], torch.tensor([1.0, 0.5]).log())
    assert forbidden(values) == list(range(2, V))


def test_features_of_a_neighbour_leave_every_other_logit_alone(make_world):
    world = make_world(logprobs_mode="processed_logits", max_logprobs=-1)
    world.add(0, temperature=0.0, logprobs=V)
    world.add(
        1,
        prompt=[5],
        output=[6, 6],
        logit_bias={5: 8.0},
        repetition_penalty=1.3,
        allowed_token_ids=list(range(50)),
        min_tokens=9,
        eos=[7],
        bad_words_token_ids=[[6, 8]],
        top_k=3,
        top_p=0.9,
        min_p=0.01,
        temperature=0.7,
    )
    logits = torch.randn(2, V, generator=torch.Generator().manual_seed(0))
    logits[0, 3] = -0.0
    output = world.sample([1, 0], logits.flip(0))
    entry = to_token_logprobs(output.logprobs)[1]
    assert torch.equal(torch.tensor(entry.logprobs).view(torch.int32), logits[0, entry.token_ids].view(torch.int32))
