"""Sampler: equal to the oracle, and a row's result is its own."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from octavo.ops import sampling as sample
from octavo.sampling import sampler
from octavo.sampling.logprobs import MODES, to_token_logprobs
from octavo.sampling.sampler import FAILURES, as_int64

V = 97


def random_params(rng: random.Random) -> dict[str, Any]:
    """A mix in which every feature is common, alone and with others."""

    def ids(num: int) -> list[int]:
        return rng.sample(range(V), num)

    options: dict[str, Any] = {
        "temperature": rng.choice([0.0, 0.3, 1.0, 1.7]),
        "logit_bias": {token: rng.uniform(-20, 20) for token in ids(5)},
        "allowed_token_ids": ids(60),
        "min_tokens": rng.randint(1, 6),
        "stop_token_ids": ids(30),
        "repetition_penalty": rng.uniform(0.5, 2),
        "frequency_penalty": rng.uniform(-2, 2),
        "presence_penalty": rng.uniform(-2, 2),
        "bad_words_token_ids": [ids(1), ids(1), [rng.randrange(4), rng.randrange(4)], [0, 1, 2], ids(3)],
        "min_p": rng.choice([0.02, 0.2]),
        "top_k": rng.choice([-1, 1, 3, 40, V, 1000]),
        "top_p": rng.choice([0.05, 0.5, 0.95]),
        "logprobs": rng.choice([0, 1, 5, 20]),
        "logprob_token_ids": ids(4),
    }
    return {name: value for name, value in options.items() if rng.random() < 0.35}


def random_request(rng: random.Random) -> dict[str, Any]:
    """Arguments of World.add: few distinct tokens, so that words and repetitions occur."""
    return {
        "prompt": [rng.randrange(6) for _ in range(rng.randint(1, 12))],
        "output": [rng.randrange(6) for _ in range(rng.choice([0, 0, 1, 9]))],
        "seed": rng.getrandbits(64),
        "eos": [V - 1],
        **random_params(rng),
    }


def random_logits(num_rows: int, seed: int) -> torch.Tensor:
    """Spread like a model's, [num_rows, V] float32."""
    return torch.randn(num_rows, V, generator=torch.Generator().manual_seed(seed)) * 3


def close(entry: Any, wanted: Any) -> bool:
    return (
        entry.token_ids == wanted.token_ids
        and entry.ranks == wanted.ranks
        and np.allclose(entry.logprobs, wanted.logprobs, rtol=1e-6, atol=1e-6)
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(6))
def test_random_mixes_equal_the_oracle(make_world, mode, seed):
    rng = random.Random(seed)
    world = make_world(logprobs_mode=mode)
    rows = rng.sample(range(40), 24)
    for row in rows:
        world.add(row, **random_request(rng))
    for step in range(5):
        rng.shuffle(rows)
        part = rows[: rng.randint(1, len(rows))]
        logits = random_logits(len(part), 100 * seed + step)
        output = world.sample(part, logits)
        assert not output.failed.any()
        found = to_token_logprobs(output.logprobs)
        for at, row in enumerate(part):
            token, entry = world.expected(row, logits[at])
            assert output.tokens[at] == token, world.requests[row].sampling
            assert (entry is None) == (at not in found)
            assert entry is None or close(found[at], entry)
            world.commit(row, token)


@pytest.mark.parametrize("mode", MODES)
def test_a_row_has_the_same_bits_alone_and_in_any_batch(make_world, mode):
    rng = random.Random(5)
    world = make_world(logprobs_mode=mode)
    for row in range(40):
        world.add(row, **random_request(rng))
    logits = random_logits(40, 1)
    together = world.sample(range(40), logits)
    numbers = to_token_logprobs(together.logprobs)
    for rows in ([row] for row in range(40)):
        alone = world.sample(rows, logits[rows])
        assert alone.tokens[0] == together.tokens[rows[0]]
        assert to_token_logprobs(alone.logprobs).get(0) == numbers.get(rows[0])
    for _ in range(5):
        rows = rng.sample(range(40), 17)
        some = world.sample(rows, logits[rows])
        assert torch.equal(some.tokens, together.tokens[rows])
        found = to_token_logprobs(some.logprobs)
        assert [found.get(at) for at in range(17)] == [numbers.get(row) for row in rows]


def test_preemption_changes_nothing(make_world):
    rng = random.Random(3)
    requests = [random_request(rng) for _ in range(12)]
    steady, broken = make_world(), make_world()
    for row, request in enumerate(requests):
        steady.add(row, **request)
        broken.add(row, **request)
    place = {index: index for index in range(12)}
    for step in range(8):
        logits = random_logits(12, step)
        one = steady.sample(range(12), logits)
        two = broken.sample([place[index] for index in range(12)], logits)
        assert torch.equal(one.tokens, two.tokens)
        assert to_token_logprobs(one.logprobs) == to_token_logprobs(two.logprobs)
        for index, token in enumerate(one.tokens.tolist()):
            steady.commit(index, token)
            broken.commit(place[index], token)
        for index in rng.sample(range(12), 4):  # preempted, and resumed in another row with its output replayed
            tokens, num_prompt = broken.known[place[index]], broken.requests[place[index]].num_prompt
            broken.remove(place[index])
            place[index] = next(row for row in rng.sample(range(40), 40) if row not in broken.requests)
            again = {**requests[index], "prompt": tokens[:num_prompt], "output": tokens[num_prompt:]}
            broken.add(place[index], **again)


def test_several_logits_rows_of_one_row_equal_single_steps(world):
    """Drafts: position p sees the tokens before p, whether they are committed or drafted."""
    rng = random.Random(11)
    for row in range(8):
        world.add(row, **{**random_request(rng), "output": [rng.randrange(6) for _ in range(8)]})
    rows = [row for row in range(8) for _ in range(4)]
    positions = [len(world.known[row]) - 3 + j for row in range(8) for j in range(4)]
    logits = random_logits(32, 2)
    output = world.sample(rows, logits, positions)
    found = to_token_logprobs(output.logprobs)
    for at, (row, position) in enumerate(zip(rows, positions, strict=True)):
        token, entry = world.expected(row, logits[at], position)
        assert output.tokens[at] == token
        assert entry is None or close(found[at], entry)


def test_a_reused_row_forgets_everything(world):
    rng = random.Random(8)
    logits = random_logits(1, 4)
    world.add(0, seed=5)
    fresh = world.sample([0], logits).tokens
    for _ in range(30):
        world.add(3, **random_request(rng))
        world.sample([3], logits)
        world.add(3, seed=5)
        output = world.sample([3], logits)
        assert torch.equal(output.tokens, fresh) and not output.logprobs


def test_nan_fails_its_row_only(world):
    rng = random.Random(2)
    for row in range(20):
        world.add(row, **random_request(rng))
    logits = random_logits(20, 6)
    whole = world.sample(range(20), logits)
    logits[7, 33] = float("nan")
    output = world.sample(range(20), logits)
    others = [row for row in range(20) if row != 7]
    assert FAILURES[output.failed[7]] == "nan_logits" and not output.failed[others].any()
    assert torch.equal(output.tokens[others], whole.tokens[others])
    assert 0 <= output.tokens[7] < V


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 1.0}, {"top_p": 0.5, "min_p": 0.1}])
def test_a_row_that_may_say_nothing_fails(world, params):
    world.add(0)
    world.add(1, allowed_token_ids=[4, 5], bad_words_token_ids=[[4], [5]], **params)
    output = world.sample([0, 1], random_logits(2, 0))
    assert [FAILURES[code] for code in output.failed.tolist()] == ["", "no_token_allowed"]


def test_top_k_one_and_tiny_temperatures_are_greedy(world):
    logits = random_logits(4, 9)
    wants = [{"top_k": 1}, {"temperature": 1e-6}, {"temperature": 0.0, "top_k": 3}, {"top_p": 1e-9}]
    for row, params in enumerate(wants):
        world.add(row, **params)
    assert torch.equal(world.sample(range(4), logits).tokens, logits.argmax(1))


def test_greedy_ties_go_to_the_lowest_id(world):
    world.add(0, temperature=0.0)
    logits = torch.zeros(1, V)
    logits[0, [60, 12, 90]] = 1.0
    assert world.sample([0], logits).tokens.tolist() == [12]


@pytest.mark.parametrize("params", [{}, {"top_k": 8}, {"presence_penalty": 1.0, "min_p": 1e-6}])
def test_samples_follow_the_distribution(world, params):
    """Chi-square over 8 tokens, 50 positions of 400 seeds: 29.9 is the 0.9999 quantile of 7 degrees of freedom."""
    row = torch.full((V,), -30.0)
    row[:8] = torch.linspace(-1, 1, 8)
    counts = torch.zeros(8)
    for seed in range(400):
        world.add(0, prompt=[90], output=[91] * 55, temperature=0.8, seed=seed * 7919 - 2**62, **params)
        counts += world.sample([0] * 50, row.expand(50, V), range(3, 53)).tokens.bincount(minlength=8)
    wanted = (row[:8] / 0.8).softmax(0) * 20_000
    assert ((counts - wanted) ** 2 / wanted).sum() < 29.9


def test_seeds_keep_their_64_bits():
    assert as_int64(2**64 - 1) == -1 and as_int64(-1) == -1 and as_int64(2**63) == -(2**63) and as_int64(5) == 5
    assert as_int64(2**64 + 5) == 5


def test_seed_and_position_change_the_draw(world):
    draws = {}
    for seed in range(20):
        world.add(0, output=[5] * 9, seed=seed)
        for position in (4, 5):
            draws[seed, position] = int(world.sample([0], torch.zeros(1, V), [position]).tokens)
    assert len(set(draws.values())) > 20  # 97 tokens, equally likely
    world.add(9, output=[8, 8], seed=3)
    assert int(world.sample([9], torch.zeros(1, V), [5]).tokens) == draws[3, 5]  # neither row nor tokens enter


def test_an_unknown_logprobs_mode_is_refused(make_world):
    with pytest.raises(ValueError, match="'log' is unknown; known: raw_logprobs"):
        make_world(logprobs_mode="log")


class NoWaiting(TorchDispatchMode):
    """Refuses the operators by which the host would wait for a device."""

    banned = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "item", "equal", "unique")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert not any(word in func.__name__ for word in self.banned), f"{func.__name__} waits for the device"
        return func(*args, **(kwargs or {}))


def test_sampling_waits_for_nothing(make_world, monkeypatch):
    for module in (sample, sampler):
        monkeypatch.setattr(module, "cut_", lambda *args: None)  # the kernels answer for themselves
    rng = random.Random(4)
    for mode in MODES:
        world = make_world(logprobs_mode=mode)
        for row in range(20):
            world.add(row, **random_request(rng))
        logits = random_logits(20, 0)
        with NoWaiting():
            world.sample(range(20), logits)
