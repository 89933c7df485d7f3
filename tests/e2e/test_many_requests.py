"""Traffic with drafts of every method, 1 to 64 rows at once: tokens and log-probabilities have the bits of no drafts.

Requests of any length, greedy and sampled, in chunks, from the prefix cache, preempted, with a step in flight. What is
said of a run is asserted of its plans and results: how many rows a step had, and how many of them verified drafts.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from drafter_rig import METHODS, make
from octavo.frontend.engine import Engine
from octavo.plan import StepPlan
from test_drafts import LONG, Counts, Job, facts, params, run

Reference = tuple[list[Job], dict[str, Any]]  # what is asked, and what is given

ROWS = 64
NARROW: dict[str, Any] = {"max_num_batched_tokens": 160, "num_gpu_blocks_override": 60}
# a step in which all rows verify has room for chunks of prompts
WIDE: dict[str, Any] = {"max_num_batched_tokens": 400, "max_num_seqs": ROWS}
# where all rows find blocks, but not for as long as they get; blocks of a drafter with windows hold one layer's
SCARCE = dict.fromkeys(METHODS, 720) | {"ngram": 600, "dflash": 3200}


class Seen(Counts):
    """By step, how many rows it had and how many of them verified drafts; rows of chunks, which sample nothing."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.num_chunks = 0
        update = engine.scheduler.update

        def counted(plan: StepPlan, result: Any) -> Any:
            self.num_chunks += len(plan.rows) - len(result.rows)
            return update(plan, result)

        engine.scheduler.update = counted  # type: ignore[method-assign]

    @property
    def rows(self) -> set[int]:
        return {len(plan.rows) for plan in self.plans}

    @property
    def most_verifying(self) -> int:
        return max(int((plan.num_drafts > 0).sum()) for plan in self.plans)


def traffic(count: int, prompts: list[str], seed: int, shortest: int = 1, longest: int = 90) -> list[Job]:
    """Requests of any length and kind."""
    rng = random.Random(seed)
    jobs: list[Job] = []
    for index in range(count):
        prompt = rng.choice(prompts)[: rng.randint(20, 300)]
        features: dict[str, Any] = rng.choice(
            [
                {},
                {},
                {"frequency_penalty": 0.5},
                {"min_tokens": 9},
                {"n": 2},
                {"bad_words": ["self"]},
                {"stop": ["re"]},
                {"top_p": 0.9},
            ]
        )
        fields = {
            "temperature": rng.choice([0.0, 0.7, 1.0]),
            "max_tokens": rng.randint(max(features.get("min_tokens", 1), shortest), longest),
        }
        jobs.append((prompt, params(**fields, seed=index, logprobs=rng.choice([None, 0, 2]), **features)))
    return jobs


def various(prompts: list[str]) -> list[Job]:
    """500: the last hundred say so much that not all who begin beside each other can go on."""
    return [*traffic(400, prompts, 11), *traffic(100, prompts, 12, 70, 110)]


@functools.cache
def without_drafts(make_jobs: Callable[[list[str]], list[Job]], prompts: tuple[str, ...], dtype: str) -> Reference:
    """Requests, and what they are given in one batch, as it comes."""
    jobs = make_jobs(list(prompts))
    engine = make(None, max_model_len=256, block_size=8, dtype=dtype, kv_cache_memory_bytes=64 << 20)
    expected = facts(run(engine, jobs))
    assert engine.scheduler.num_preemptions == 0
    engine.close()
    return jobs, expected


def compare(reference: Reference, sizes: list[int], given: dict[str, Any], **fields: Any) -> tuple[Engine, Seen]:
    """Batches of these sizes, one behind the other, give what one batch gives without drafts.

    The engine that had drafts, closed, and what was seen of it.
    """
    jobs, expected = reference
    engine = make(given, max_model_len=256, block_size=8, async_scheduling=True, **fields)
    seen, found = Seen(engine), dict[str, Any]()
    for size in sizes:
        first = len(found)
        part = facts(run(engine, jobs[first : first + size]))
        found |= {f"r{first + int(key[1:])}": value for key, value in part.items()}
    assert found == expected
    assert engine.scheduler.kv.stats.hits > 0 and seen.num_chunks > 0
    engine.close()
    return engine, seen


def test_S_2_traffic_in_a_small_pool(held_out_prompts: list[str]) -> None:
    """As deep as drafts are good; and what is told of drafts adds up."""
    reference = without_drafts(functools.partial(traffic, 60, seed=7), (*held_out_prompts, LONG), "bfloat16")
    given = METHODS["ngram"](Path()) | {"adaptive_depth": True}
    engine, seen = compare(reference, [1, 4, 40, 15], given, dtype="bfloat16", **NARROW)
    assert engine.scheduler.num_preemptions > 0
    assert seen.num_drafted > 180 and seen.num_accepted > 30
    stats = engine.scheduler.stats()
    assert 0 < stats.num_accepted_tokens == sum(stats.accepted_per_position) < stats.num_draft_tokens
    assert stats.accepted_per_position == sorted(stats.accepted_per_position, reverse=True)


def short(prompts: list[str]) -> list[Job]:
    return traffic(66, prompts, 8, 15, 16)


@pytest.mark.parametrize("name", METHODS)
def test_S_2_64_rows_each_of_which_verifies(name: str, tmp_path: Path, held_out_prompts: list[str]) -> None:
    reference = without_drafts(short, tuple(held_out_prompts[:9]), "float32")
    _, seen = compare(reference, [1, 65], METHODS[name](tmp_path), num_gpu_blocks_override=SCARCE[name], **WIDE)
    assert max(seen.rows) == seen.most_verifying == ROWS


@pytest.mark.slow
@pytest.mark.parametrize("adapts", [True, False], ids=["adaptive", "fixed"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", METHODS)
def test_S_2_500_requests(name: str, dtype: str, adapts: bool, tmp_path: Path, held_out_prompts: list[str]) -> None:
    """Batches of 1 to 64 rows."""
    reference = without_drafts(various, (*held_out_prompts, LONG), dtype)
    fields = {"dtype": dtype, "num_gpu_blocks_override": SCARCE[name], **WIDE}
    given = METHODS[name](tmp_path) | {"adaptive_depth": adapts}
    engine, seen = compare(reference, [1, 2, 4, 8, 16, 32, 337, 100], given, **fields)
    assert engine.scheduler.num_preemptions > 0
    assert {1, 2, 4, 8, 16, 32, ROWS} <= seen.rows and max(seen.rows) == ROWS and len(seen.rows) > 48
    if adapts:  # 48 tokens of a step are cheap on a CPU
        assert seen.num_drafted > 100 and seen.most_verifying <= 24
    else:
        assert seen.num_drafted > 10000 and seen.most_verifying == ROWS
    if name not in ("eagle", "dflash"):  # which know nothing
        assert seen.num_accepted > 0.04 * seen.num_drafted
