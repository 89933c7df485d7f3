"""Method ngram: transformers' prompt lookup, on the device; whatever it drafts, outputs have the bits of no drafts."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from drafter_rig import METHODS, SPEAKERS, make
from octavo.ops.inputs.tensors import RowTensors
from octavo.ops.lookup import look_up
from octavo.request.sampling_params import SamplingParams
from test_drafts import EVERYTHING, LONG, PROMPTS, Counts, Job, facts, params, run

NGRAM = METHODS["ngram"](Path())


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
        ([1, 2, 3], 3, 1, [3] * 4),  # none: the last token
        ([1, 2, 9, 2], 3, 2, [2] * 4),  # a run that is too short
        ([8], 3, 1, [8] * 4),
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


def test_who_had_a_row_before_does_not_matter() -> None:
    """Where no run stood before: what lies behind the row's tokens is the same request's answer, of its first time."""
    engine = make({**NGRAM, "prompt_lookup_min": 60, "prompt_lookup_max": 64}, max_num_seqs=1)
    jobs: list[Job] = [(LONG[:50], SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True))]
    seen = []
    for _ in range(2):
        counts = Counts(engine)
        outputs = run(engine, jobs)
        seen.append((len(counts.plans), counts.num_drafted, counts.num_accepted, facts(outputs)))
    engine.close()
    assert seen[0] == seen[1] and seen[0][1] > 0


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
