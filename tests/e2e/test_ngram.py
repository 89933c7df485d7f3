"""Method ngram: transformers' prompt lookup, on the device; whatever it drafts, outputs have the bits of no drafts."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.frontend.engine import Engine
from octavo.ops.inputs.tensors import RowTensors
from octavo.ops.lookup import look_up
from octavo.request.sampling_params import SamplingParams
from test_drafters import SPEAKERS, make
from test_drafts import EVERYTHING, LONG, PROMPTS, Counts, Job, facts, params, run

NGRAM: dict[str, Any] = {"method": "ngram", "prompt_lookup_max": 3}
SMALL: dict[str, Any] = {"max_model_len": 256, "num_gpu_blocks_override": 60, "block_size": 8}


def drafts_of(tokens: list[int], *, longest: int, num_drafts: int, shortest: int = 1) -> list[int]:
    """What is written behind the one row's tokens; -1 where nothing is."""
    width = len(tokens) + num_drafts
    token_ids = torch.full((2, width), -1, dtype=torch.int32)
    token_ids[0, : len(tokens)] = torch.tensor(tokens)
    totals = torch.tensor([len(tokens), 0], dtype=torch.int32)
    table = RowTensors(token_ids, totals, totals)
    rows, live = torch.tensor([0]), torch.tensor([True])
    look_up(table, rows, live, shortest=shortest, longest=longest, num_drafts=num_drafts)
    found: list[int] = token_ids[0, len(tokens) :].tolist()
    return found


def test_it_looks_up_what_transformers_does() -> None:
    """Its candidates, where it has any; where known tokens end, ours go on."""
    candidates = pytest.importorskip("transformers.generation.candidate_generator")
    rng = random.Random(4)
    num_found = 0
    for _ in range(300):
        tokens = [rng.randrange(6) for _ in range(rng.randrange(2, 40))]
        longest, num_drafts = rng.randrange(1, 5), rng.randrange(1, 6)
        theirs = candidates.PromptLookupCandidateGenerator(
            max_matching_ngram_size=longest, num_output_tokens=num_drafts, max_length=1000, vocab_size=1 << 20
        )
        expected = theirs.get_candidates(torch.tensor([tokens]))[0][0, len(tokens) :].tolist()
        found = drafts_of(tokens, longest=longest, num_drafts=num_drafts)
        assert found[: len(expected)] == expected, (tokens, longest)
        num_found += bool(expected)
    assert num_found > 200


@pytest.mark.parametrize(
    ("tokens", "longest", "shortest", "expected"),
    [
        ([1, 2, 3, 9, 1, 2, 3], 3, 1, [9, 1, 2, 3]),
        ([1, 2, 5, 1, 2, 6, 1, 2], 2, 1, [5, 1, 2, 6]),  # the first place
        ([7, 2, 5, 1, 2, 6, 1, 2], 2, 1, [6, 1, 2, 6]),  # the longest run
        ([4, 4, 4], 3, 1, [4, 4, 4, 4]),  # again where known tokens end
        ([1, 2, 3], 3, 1, [-1] * 4),
        ([1, 2, 9, 2], 3, 2, [-1] * 4),  # a run that is too short
        ([8], 3, 1, [-1] * 4),
    ],
)
def test_the_longest_run_at_its_first_place(
    tokens: list[int], longest: int, shortest: int, expected: list[int]
) -> None:
    assert drafts_of(tokens, longest=longest, shortest=shortest, num_drafts=4) == expected


JOBS: list[Job] = [(PROMPTS[index % len(PROMPTS)], each) for index, each in enumerate(EVERYTHING)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_S_2_S_10_every_feature_gives_the_bits_of_no_drafts(dtype: str) -> None:
    """Stop strings too; alone and with a step in flight; in chunks, and from the prefix cache."""
    text = "value_3 = 9  # the square of 3\nvalue_4 ="
    jobs = [*JOBS, *((text, params(stop=[stop], temperature=0.0, max_tokens=40)) for stop in ("5", "squ", "\n"))]
    reference = make(None, dtype=dtype)
    expected = facts(run(reference, jobs))
    reference.close()
    for in_flight in (False, True):
        engine = make(NGRAM, dtype=dtype, async_scheduling=in_flight, max_num_batched_tokens=48, max_num_seqs=20)
        counts = Counts(engine)
        for _ in range(2):
            assert facts(run(engine, jobs)) == expected
        assert counts.num_accepted > 50
        engine.close()


def traffic(count: int, prompts: list[str], seed: int) -> list[Job]:
    """Requests of any length and kind."""
    rng = random.Random(seed)
    jobs: list[Job] = []
    for index in range(count):
        prompt = rng.choice(prompts)[: rng.randint(20, 300)]
        features: dict[str, Any] = rng.choice(
            [{}, {}, {"frequency_penalty": 0.5}, {"min_tokens": 9}, {"n": 2}, {"bad_words": ["self"]}, {"stop": ["re"]}]
        )
        fields = {
            "temperature": rng.choice([0.0, 0.7, 1.0]),
            "max_tokens": rng.randint(features.get("min_tokens", 1), 90),
        }
        jobs.append((prompt, params(**fields, seed=index, logprobs=rng.choice([None, 0, 2]), **features)))
    return jobs


def same_in_a_small_pool(jobs: list[Job], dtype: str, sizes: list[int], given: dict[str, Any]) -> Engine:
    """Batches of these sizes, one after the other, give what all of them give at once without drafts."""
    reference = make(None, **SMALL, dtype=dtype)
    expected = facts(run(reference, jobs))
    reference.close()
    engine = make(given, **SMALL, dtype=dtype, max_num_batched_tokens=160, async_scheduling=True)
    counts, found = Counts(engine), dict[str, Any]()
    for size in sizes:
        first = len(found)
        part = facts(run(engine, jobs[first : first + size]))
        found |= {f"r{first + int(key[1:])}": value for key, value in part.items()}
    assert found == expected
    assert engine.scheduler.num_preemptions > 0 and engine.scheduler.kv.stats.hits > 0
    assert counts.num_drafted > 3 * len(jobs) and counts.num_accepted > len(jobs) // 2
    return engine


def test_S_2_traffic_in_a_small_pool(held_out_prompts: list[str]) -> None:
    """Batches of 1 to 40, chunks, hits, preemption, a step in flight, as deep as drafts are good."""
    jobs = traffic(60, [*held_out_prompts, LONG], 7)
    engine = same_in_a_small_pool(jobs, "bfloat16", [1, 4, 40, 15], {**NGRAM, "adaptive_depth": True})
    stats = engine.scheduler.stats()
    assert 0 < stats.num_accepted_tokens == sum(stats.accepted_per_position) < stats.num_draft_tokens
    assert stats.accepted_per_position == sorted(stats.accepted_per_position, reverse=True)
    engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("adapts", [True, False], ids=["adaptive", "fixed"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_500_requests(dtype: str, adapts: bool, held_out_prompts: list[str]) -> None:
    jobs = traffic(500, [*held_out_prompts, LONG], 11)
    same_in_a_small_pool(jobs, dtype, [1, 3, 60, 436], {**NGRAM, "adaptive_depth": adapts}).close()


def test_S_9_blocks_of_other_drafters_have_other_names(tmp_path: Path) -> None:
    """A drafter's entries lie in the blocks that leave the process: who has another one finds none of them."""
    secret = tmp_path / "secret"
    secret.write_bytes(b"0123456789" * 4)
    names = []
    for given in (None, NGRAM, SPEAKERS["eagle3"], SPEAKERS["mtp"], SPEAKERS["mtp"]):
        engine = make(given, prefix_cache_secret_file=str(secret))
        names.append(engine.scheduler.kv.identity.encode())
        engine.close()
    assert names[0] == names[1] and names[3] == names[4]
    assert len({names[0], names[2], names[3]}) == 3


def test_a_batch_of_many_rows_verifies_nothing() -> None:
    """Where tokens are not cheap any more steps are plain ones, and become deep again as rows leave."""
    engine = make({**NGRAM, "adaptive_depth": True}, max_num_seqs=64, kv_cache_memory_bytes=64 << 20)
    counts = Counts(engine)
    short, long = SamplingParams(max_tokens=9, ignore_eos=True), SamplingParams(max_tokens=30, ignore_eos=True)
    run(engine, [*((PROMPTS[0], short) for _ in range(50)), (LONG, long)])
    drafted = [int(plan.num_drafts.sum()) for plan in counts.plans]
    many = [count for plan, count in zip(counts.plans, drafted, strict=True) if len(plan.rows) > 40]
    assert many and not any(many)
    assert any(drafted[len(many) :])
    engine.close()
