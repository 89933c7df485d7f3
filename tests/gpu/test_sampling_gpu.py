"""Drawing, log-probabilities and masks on a CUDA device: the CPU's tokens, and the same bits in every batch."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "ops"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "sampling"))

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

import gpu_rig
from octavo.ops import sampling as sample
from octavo.request.sampling_params import StructuredOutputsParams
from octavo.sampling.logprobs import MODES, to_token_logprobs
from row_counts import assert_rows_keep_their_bits
from sync_guard import no_waits
from test_grammar_mask import EOS, grammar_world
from test_sampler import random_logits, random_request
from world import World

pytestmark = pytest.mark.gpu
VOCAB = 151936


@pytest.fixture(name="no_waits")
def guarded() -> Iterator[None]:
    with no_waits():
        yield


@pytest.mark.parametrize("vocab_size", [7, 33, 4096, 32001, VOCAB])
def test_draws_equal_the_cpus(vocab_size: int) -> None:
    gpu_rig.check_draw("cuda", vocab_size)


@pytest.mark.parametrize("vocab_size", [7, 33, 4097, VOCAB])
def test_logprobs_equal_float64(vocab_size: int) -> None:
    gpu_rig.check_logprobs("cuda", vocab_size)


@pytest.mark.parametrize("vocab_size", [7, 500, 32001, VOCAB])
def test_cuts_and_masks_equal_the_cpus(vocab_size: int) -> None:
    gpu_rig.check_cuts("cuda", vocab_size)
    gpu_rig.check_bits("cuda", vocab_size + 40)


def test_flat_logits_draw_like_the_cpu() -> None:
    """Where noise decides: 4,096 draws."""
    rows = 4096
    logits, seeds = torch.randn(1, 2000).expand(rows, 2000).contiguous() * 0.1, torch.arange(rows)
    ones = torch.ones(rows)
    ours = sample.sample_rows(logits.cuda(), ones.cuda(), seeds.cuda(), seeds.cuda())
    assert torch.equal(ours.cpu(), sample.sample_rows(logits, ones, seeds, seeds))


def test_draws_and_log_probabilities_of_a_row() -> None:
    case = gpu_rig.Logits(32000, 40)
    values, ids = case.values.cuda(), torch.arange(40, device="cuda") * 700
    tables = [x.cuda() for x in (case.temperatures, case.seeds)]
    positions = case.positions.cuda()

    def call(pick: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits = values[pick]
        drawn, failed = sample.draw(logits, pick, *tables, positions[pick])
        logprobs, ranks = sample.token_logprobs(logits, ids[pick])
        return drawn, failed, *sample.logprob_stats(logits), logprobs, ranks

    assert_rows_keep_their_bits(call, 40)


def test_cuts_masks_and_top_logprobs_of_a_row() -> None:
    case = gpu_rig.Logits(8200, 40)
    values, seeds, ones = case.values.cuda(), case.seeds.cuda(), torch.ones(40, device="cuda")
    truncation = sample.TruncationRows(**{name: x.cuda() for name, x in gpu_rig.cut_tables(case).items()})
    words = torch.randint(-(2**31), 2**31, (40, 8200 // 32 + 1), generator=torch.Generator().manual_seed(0))
    words = words.int().cuda()

    def call(pick: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits, at = values[pick], torch.arange(len(pick), device="cuda")
        ids, best = sample.top_logprobs(logits, 5)
        tokens, failed = sample.draw(logits, pick, ones, seeds, pick, truncation)
        cut, masked = logits.clone(), logits.clone()
        sample.cut_(cut, pick, truncation)
        sample.allow_bits_(masked, at, words[pick])
        return ids, best, tokens, failed, cut, masked

    assert_rows_keep_their_bits(call, 40)


def test_a_captured_cut_follows_its_tables() -> None:
    """Rows that begin and end to be cut; the lists of the run before leave nothing behind."""
    case = gpu_rig.Logits(VOCAB, 40)
    logits, seeds, ones = case.values[:8].cuda(), case.seeds.cuda(), torch.ones(40, device="cuda")
    truncation = sample.TruncationRows(**{name: x.cuda() for name, x in gpu_rig.cut_tables(case).items()})
    rows = torch.arange(8, device="cuda")
    sample.draw(logits, rows, ones, seeds, rows, truncation)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens, _ = sample.draw(logits, rows, ones, seeds, rows, truncation)
    seen = []
    for step in range(4):
        rows.add_(step)
        truncation.divisors[step + 1] = 0.0
        graph.replay()
        seen.append((tokens.clone(), sample.draw(logits, rows, ones, seeds, rows, truncation)[0]))
    for ours, expected in seen:
        assert torch.equal(ours, expected)


def test_a_captured_draw_follows_its_inputs(no_waits: None) -> None:
    """The null row of a table pads a graph: it changes nothing for the others."""
    logits = torch.randn(8, VOCAB, device="cuda")
    temperatures, seeds = torch.ones(10, device="cuda"), torch.arange(10, device="cuda")
    temperatures[9:].zero_()
    rows, positions = torch.full((8,), 9, device="cuda"), torch.zeros(8, dtype=torch.int64, device="cuda")
    sample.draw(logits, rows, temperatures, seeds, positions)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens, failed = sample.draw(logits, rows, temperatures, seeds, positions)
    seen = []
    for step in range(3):
        rows[:5].copy_(torch.arange(5, device="cuda") + step)
        positions[:5].fill_(step + 7)
        graph.replay()
        expected, _ = sample.draw(logits[:5].contiguous(), rows[:5], temperatures, seeds, positions[:5])
        seen.append((tokens.clone(), failed.clone(), expected))
    torch.cuda.set_sync_debug_mode("default")
    for tokens, failed, expected in seen:
        assert torch.equal(tokens[:5], expected) and not failed.any()
        assert tokens[5:].tolist() == logits[5:].argmax(1).tolist()


@pytest.mark.parametrize("mode", MODES)
def test_random_mixes_equal_the_cpu_and_do_not_depend_on_neighbours(mode: str) -> None:
    rng = random.Random(7)
    ours, cpu = World(device="cuda", logprobs_mode=mode), World(logprobs_mode=mode)
    for row in range(40):
        request = random_request(rng)
        ours.add(row, **request)
        cpu.add(row, **request)
    for step in range(4):
        logits = random_logits(40, step)
        together, expected = ours.sample(range(40), logits), cpu.sample(range(40), logits)
        assert torch.equal(together.tokens.cpu(), expected.tokens) and not together.failed.any()
        numbers, exact = to_token_logprobs(together.logprobs), to_token_logprobs(expected.logprobs)
        assert set(numbers) == set(exact)
        for at, entry in numbers.items():
            assert entry.token_ids == exact[at].token_ids and entry.ranks == exact[at].ranks
            assert entry.logprobs == pytest.approx(exact[at].logprobs, abs=4e-6, rel=1e-6)
        for rows in ([rng.randrange(40)], rng.sample(range(40), 17)):
            some = ours.sample(rows, logits[rows])
            assert torch.equal(some.tokens, together.tokens[rows])
            found = to_token_logprobs(some.logprobs)
            assert [found.get(at) for at in range(len(rows))] == [numbers.get(row) for row in rows]
        for row, token in enumerate(expected.tokens.tolist()):
            ours.commit(row, token)
            cpu.commit(row, token)


def test_features_wait_for_nothing() -> None:
    rng, world = random.Random(3), World(device="cuda")
    for row in range(40):
        world.add(row, **random_request(rng))
    logits = random_logits(40, 0)
    expected = world.sample(range(40), logits).tokens
    batch = world.batch(range(40))
    ready = logits.cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = world.sampler(ready, batch).tokens
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(again, expected)


def test_nan_fails_its_row_only() -> None:
    world = World(device="cuda")
    for row in range(20):
        world.add(row, temperature=row % 3 / 2)
    logits = random_logits(20, 6)
    whole = world.sample(range(20), logits)
    logits[7, 33] = float("nan")
    output = world.sample(range(20), logits)
    others = [row for row in range(20) if row != 7]
    assert output.failed.tolist() == [int(row == 7) for row in range(20)]
    assert torch.equal(output.tokens[others], whole.tokens[others])


def test_grammars_follow_the_cpu_without_waiting_for_the_forward_pass() -> None:
    """Rows come, go and are replaced while a token is on its way."""
    form = {"structured_outputs": StructuredOutputsParams(regex="[abc]{2,9}"), "eos": [EOS]}
    rng = random.Random(5)
    ours, cpu = grammar_world("cuda"), grammar_world("cpu")
    for world in (ours, cpu):
        for row in range(12):
            world.add(row, seed=row, **(form if row % 3 else {}))
    for step in range(8):
        logits = random_logits(12, step)
        together, expected = ours.sample(range(12), logits), cpu.sample(range(12), logits)
        assert torch.equal(together.tokens.cpu(), expected.tokens)
        assert torch.equal(together.failed.cpu(), expected.failed)
        for row, token in enumerate(expected.tokens.tolist()):
            ours.commit(row, token)
            cpu.commit(row, token)
        if step % 3 == 1:  # one row ends, another is preempted and comes back with its output
            row, other = rng.sample(range(12), 2)
            tokens, num_prompt = cpu.known[other], cpu.requests[other].num_prompt
            for world in (ours, cpu):
                world.add(row, seed=step, **form)
                world.add(other, tokens[:num_prompt], tokens[num_prompt:], seed=other, **(form if other % 3 else {}))
