"""Penalties: the formulas, and that nothing is left between steps."""

from __future__ import annotations

import torch

from octavo.sampling.logprobs import to_token_logprobs

V = 97


def values_of(world, row, logits):
    output = world.sample([row], logits)
    entry = to_token_logprobs(output.logprobs)[0]
    values = torch.empty(V)
    values[entry.token_ids] = torch.tensor(entry.logprobs)
    return values


def test_formulas_by_hand(make_world):
    world = make_world(logprobs_mode="processed_logits", max_logprobs=-1)
    world.add(
        0,
        prompt=[1, 2],
        output=[2, 3, 3],
        temperature=0.0,
        logprobs=V,
        repetition_penalty=2.0,
        frequency_penalty=0.25,
        presence_penalty=0.5,
    )
    logits = torch.full((1, V), 4.0)
    logits[0, 3] = -4.0
    values = values_of(world, 0, logits)
    assert values[1] == 2.0  # in the prompt only: repetition alone
    assert values[2] == 2.0 - 0.25 - 0.5
    assert values[3] == -8.0 - 2 * 0.25 - 0.5
    assert (values[4:] == 4.0).all() and values[0] == 4.0


def test_each_committed_token_counts_once(make_world):
    world = make_world(logprobs_mode="processed_logits", max_logprobs=-1)
    world.add(0, prompt=[1], temperature=0.0, logprobs=V, frequency_penalty=1.0)
    for step in range(5):
        assert values_of(world, 0, torch.zeros(1, V))[6] == -step
        world.commit(0, 6)


def test_more_rows_than_the_scratch_table_holds(make_world):
    world = make_world()
    for row in range(40):
        world.add(row, prompt=[row], output=[row + 1] * (row % 5 + 1), temperature=0.0, presence_penalty=2.0)
    logits = torch.zeros(40, V)
    logits[torch.arange(40), torch.arange(40) + 1] = 1.5  # pushed below 0 by the penalty, so token 0 wins
    logits[:, 0] += 0.1
    assert not world.sample(range(40), logits).tokens.any()


def test_the_scratch_table_is_clean_between_steps_and_freed_after_the_last_user(world):
    from octavo.sampling.penalties import Penalties

    penalties = next(stage for stage in world.sampler._stages if isinstance(stage, Penalties))
    assert penalties._counts.numel() == 0
    world.add(0, output=[4, 4], presence_penalty=1.0)
    world.add(1, output=[5], frequency_penalty=1.0)
    world.sample([0, 1], torch.zeros(2, V))
    assert penalties._counts.numel() and not penalties._counts.any()
    world.remove(0)
    world.remove(1)
    assert penalties._counts.numel() == 0
