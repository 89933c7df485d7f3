"""Log-probabilities: which entries, their ranks, the modes, and independence of neighbours and chunks."""

from __future__ import annotations

import pytest
import torch

from octavo.sampling.logprobs import prompt_chunks, to_prompt_logprobs, to_token_logprobs
from step_words import entries_of

V = 97


def logits_of(num_rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, V, generator=torch.Generator().manual_seed(seed)) * 3


def test_each_row_gets_exactly_what_it_asked_for(make_world):
    world = make_world(max_logprobs=-1)
    wants = [
        {},
        {"logprobs": 0},
        {"logprobs": 1},
        {"logprobs": 20},
        {"logprobs": V},
        {"logprob_token_ids": [9, 4]},
        {"logprobs": 3, "logprob_token_ids": [0]},
    ]
    for row, want in enumerate(wants):
        world.add(row, **want)
    logits = logits_of(len(wants))
    output = world.sample(range(len(wants)), logits)
    found = to_token_logprobs(output.logprobs)
    assert sorted(found) == [1, 2, 3, 4, 5, 6]
    assert [len(found[at].token_ids) for at in sorted(found)] == [1, 2, 21, V + 1, 3, 5]
    for at, entry in found.items():
        assert entry.token_ids[0] == output.tokens[at]
        assert len(entry.token_ids) == len(entry.logprobs) == len(entry.ranks)
        assert torch.allclose(torch.tensor(entry.logprobs), logits[at].log_softmax(0)[entry.token_ids], atol=1e-5)
    assert found[5].token_ids[1:] == [9, 4] and found[6].token_ids[4:] == [0]
    assert found[3].token_ids[1:] == logits[3].topk(20).indices.tolist() and found[3].ranks[1:] == list(range(1, 21))


def test_a_token_named_twice_has_one_value_and_one_rank(make_world):
    world = make_world()
    world.add(0, temperature=0.0, logprobs=2, logprob_token_ids=[12])
    logits = torch.zeros(1, V)
    logits[0, [12, 40, 60]] = 2.0  # equal logits share a rank
    entry = to_token_logprobs(world.sample([0], logits).logprobs)[0]
    assert entry.token_ids == [12, 12, 40, 12]
    assert entry.ranks == [1, 1, 1, 1] and len(set(entry.logprobs)) == 1


def test_bits_do_not_depend_on_how_many_are_asked_for(make_world):
    """The kernel for a few of the likeliest and the sort for many give one token one value, to the last bit."""
    world = make_world(vocab_size=700, max_logprobs=-1)
    wants = [
        {"logprobs": 0},
        {"logprobs": 5},
        {"logprobs": 256},
        {"logprobs": 257},
        {"logprobs": 700},
        {"logprobs": 3, "logprob_token_ids": list(range(100))},
        {"logprob_token_ids": [7]},
    ]
    for row, want in enumerate(wants):
        world.add(row, **want)
    logits = torch.randn(1, 700, generator=torch.Generator().manual_seed(1)) * 4
    found = to_token_logprobs(world.sample(range(len(wants)), logits.expand(len(wants), 700).contiguous()).logprobs)
    seen: dict[int, set] = {}
    for entry in found.values():
        for token, value, rank in zip(entry.token_ids, entry.logprobs, entry.ranks, strict=True):
            seen.setdefault(token, set()).add((value, rank))
    assert len(seen) == 700 and all(len(numbers) == 1 for numbers in seen.values())


def test_ranks_skip_over_equal_logits(make_world):
    world = make_world()
    world.add(0, temperature=0.0, logprobs=4)
    logits = torch.zeros(1, V)
    logits[0, :5] = torch.tensor([3.0, 2.0, 2.0, 1.0, 0.5])
    assert to_token_logprobs(world.sample([0], logits).logprobs)[0].ranks == [1, 1, 2, 2, 4]


@pytest.mark.parametrize("greedy", [True, False])
def test_modes(make_world, greedy):
    logits = logits_of(1, 3)
    params = {"temperature": 0.0 if greedy else 0.5, "logit_bias": {11: 50.0}, "logprobs": 1}
    biased = logits.clone()
    biased[0, 11] += 50
    processed = biased if greedy else biased / 0.5
    wanted = {
        "raw_logprobs": logits.log_softmax(1),
        "raw_logits": logits,
        "processed_logprobs": processed.log_softmax(1),
        "processed_logits": processed,
    }
    for mode, source in wanted.items():
        world = make_world(logprobs_mode=mode)
        world.add(0, **params)
        entry = to_token_logprobs(world.sample([0], logits).logprobs)[0]
        assert entry.token_ids == [11, int(source.argmax())]
        assert torch.allclose(torch.tensor(entry.logprobs), source[0, entry.token_ids], atol=1e-5)


def test_raw_numbers_do_not_see_the_stages(make_world):
    world = make_world()
    logits = logits_of(2, 5)[:1].expand(2, V).contiguous()
    world.add(0, temperature=0.0, logprobs=5)
    world.add(1, temperature=0.9, top_k=1, allowed_token_ids=[int(logits[0].argmax())], logprobs=5)
    found = to_token_logprobs(world.sample([0, 1], logits).logprobs)
    assert found[0] == found[1]


def test_more_than_max_logprobs_never_gets_here(make_world):
    with pytest.raises(AssertionError, match="logprobs 6 > max_logprobs 5"):
        make_world(max_logprobs=5).add(0, logprobs=6)


def test_prompt_logprobs_do_not_depend_on_chunks(world):
    logits, targets = logits_of(50, 8), torch.arange(50)
    whole = to_prompt_logprobs([world.sampler.prompt_logprobs(logits, targets, 4)])
    chunks = [world.sampler.prompt_logprobs(logits[part], targets[part], 4) for part in prompt_chunks(50, 16)]
    assert to_prompt_logprobs(chunks) == whole and whole.num_positions == 50
    exact = logits.double().log_softmax(1)
    for at, entry in enumerate(entries_of(whole)):
        assert entry.token_ids == [at, *logits[at].topk(4).indices.tolist()]
        assert torch.allclose(torch.tensor(entry.logprobs), exact[at, entry.token_ids].float(), atol=1e-5)
        assert entry.ranks == [1 + int((logits[at] > logits[at, at]).sum()), 1, 2, 3, 4]


@pytest.mark.parametrize(("num_top", "length"), [(0, 1), (-1, V + 1), (V + 9, V + 1)])
def test_prompt_logprobs_for_few_and_for_all(world, num_top, length):
    scored = [world.sampler.prompt_logprobs(logits_of(2), torch.tensor([3, 4]), num_top)]
    entries = entries_of(to_prompt_logprobs(scored))
    assert [len(entry.ranks) for entry in entries] == [length] * 2


def test_prompt_and_sampled_numbers_are_the_same_bits(world):
    world.add(0, temperature=0.0, logprobs=3)
    logits = logits_of(1, 2)
    output = world.sample([0], logits)
    prompt = to_prompt_logprobs([world.sampler.prompt_logprobs(logits, output.tokens, 3)])
    assert entries_of(prompt) == [to_token_logprobs(output.logprobs)[0]]
