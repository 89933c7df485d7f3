"""States that get their blocks in the step that may write them, as those of rows with drafts do.

The worker that executes the plans keeps no more than operators promise, and ends a test where a step writes a state
that has no place in its row's table. So what is looked at here is when blocks come and go.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.cache.groups import CacheGroup
from octavo.cache.policies import most_decoding
from octavo.request.request import Request
from sched_harness import chunked, full, late, make_request, make_scheduler, sliding, smallest_pool, states
from scheduler_world import CheckedDriver, Shape, World, take_walk

CHUNKS_AND_BLOCKS = [(4, 4), (8, 4), (16, 4), (16, 16), (16, 64), (64, 16), (64, 64), (64, 128)]
GROUPS = [
    (full(), *states(8)),
    (full(block_size=8), *states(8, block_size=8, blocks=3)),
    (full(block_size=16), *states(8, block_size=16)),
    (full(block_size=32), *states(8, block_size=16)),
    (full(), sliding(6), chunked(8), *states(16, interval=2, blocks=2)),
    (full(), *states(8, interval=0), *states(16)),
    states(8, blocks=2),
]


def held_by(driver: CheckedDriver, request: Request, index: int) -> tuple[int, int]:
    """Of group `index`: the entries of a request's table, and how many of them have blocks."""
    num, table = driver.worker.groups[index].parts.blocks, driver.scheduler.kv.tables(request)[index]
    return len(table) // num, sum(map(bool, table)) // num


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(CHUNKS_AND_BLOCKS),
    st.integers(1, 9),
    st.integers(0, 7),
    st.integers(1, 150),
    st.integers(0, 1),
    st.booleans(),
    st.integers(0, 2**32),
)
def test_a_state_has_blocks_in_each_step_that_may_write_it_and_none_before(
    sizes: tuple[int, int], num_drafts: int, lookahead: int, budget: int, depth: int, caching: bool, seed: int
) -> None:
    """Several rows in a pool that one request fills, or nearly: hits, preemptions, results that come late."""
    rng, (chunk, block_size) = random.Random(seed), sizes
    num_drafts = min(num_drafts, chunk // 2 - 1)
    lookahead = min(lookahead, num_drafts)
    groups = late((full(block_size), *states(chunk, block_size, blocks=2)))
    scheduler = make_scheduler(
        groups,
        num_drafts=num_drafts,
        num_lookahead=lookahead,
        num_blocks=smallest_pool(groups, 200, budget + num_drafts + lookahead, drafts=True) + rng.choice([0, 0, 5, 60]),
        max_model_len=200,
        max_num_batched_tokens=budget,
        max_num_seqs=min(budget, 4),
        enable_prefix_caching=caching,
        cheap_tokens=rng.choice([0, 0, 8]),
    )
    driver, shared = CheckedDriver(scheduler, groups), list(range(5000, 5100))
    for _ in range(4):
        prompt = shared[: rng.randrange(100)] + [rng.randrange(1000) for _ in range(rng.randint(1, 30))]
        driver.add(make_request(prompt, rng.randint(1, 70), ignore_eos=True))
    most: dict[object, int] = {}  # by what KVManager keeps of a request: how far plans have brought it
    while scheduler.num_unfinished:
        while len(driver.in_flight) > depth:
            driver.collect()
        plan = driver.issue()
        for row in plan.rows.tolist():
            request = scheduler._running.owners[row]
            entry, end = scheduler.kv._entries[request.request_id], request.num_computed
            most[entry] = max(most.get(entry, 0), min(end + lookahead, 200))
            num_entries, _ = held_by(driver, request, -1)
            assert end // chunk <= num_entries <= most[entry] // chunk
        if not plan.has_work and driver.in_flight:
            driver.collect()
    driver.run()


@pytest.mark.parametrize("num_drafts", [1, 7])
@pytest.mark.parametrize("depth", [0, 1], ids=["alone", "one in flight"])
@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
def test_a_row_has_two_states_only_around_a_border(block_size: int, depth: int, num_drafts: int) -> None:
    """And inputs of two chunks: from the step that may pass it until it is known that the row has."""
    chunk = 64
    groups = late((full(block_size), *states(chunk, block_size, blocks=3)))
    scheduler = make_scheduler(
        groups, num_drafts=num_drafts, max_model_len=1024, max_num_batched_tokens=128, enable_prefix_caching=False
    )
    driver, request = CheckedDriver(scheduler, groups), make_request(70, 500, ignore_eos=True)
    driver.add(request)
    num_unsure, around, held = 2 * (1 + num_drafts), 0, [0, 0, 0]
    while len(request.tokens) < 550:
        driver.step(depth)
        _, num_states = held_by(driver, request, -1)
        if len(request.tokens) > 2 * chunk:
            held[num_states] += 1
            is_near = (request.num_computed + num_drafts) % chunk < num_unsure + num_drafts  # some may be taken back
            around += is_near
            assert num_states == 1 or is_near
            _, num_inputs = held_by(driver, request, -2)
            assert num_inputs <= max(chunk // block_size, 1) or is_near
    assert 0 < held[2] <= around < held[1] + held[2] and most_decoding(groups[-1], num_unsure) == 2
    scheduler.abort([request.request_id])


@pytest.mark.parametrize("lookahead", [0, 2])
@pytest.mark.parametrize("depth", [0, 1], ids=["alone", "one in flight"])
@pytest.mark.parametrize(("chunk", "block_size"), [(16, 16), (16, 64), (64, 16), (64, 64), (64, 128)])
def test_rows_that_repeat_steps_without_drafts_cross_borders(
    chunk: int, block_size: int, depth: int, lookahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where all drafts are wrong rows pause them, and a step is planned as the one before without a closer look."""
    groups = late((full(block_size), *states(chunk, block_size)))
    scheduler = make_scheduler(
        groups,
        num_drafts=3,
        num_lookahead=lookahead,
        max_model_len=400,
        max_num_batched_tokens=64,
        cheap_tokens=64,
        enable_prefix_caching=False,
    )
    driver = CheckedDriver(scheduler, groups)
    monkeypatch.setattr(driver.worker._propose, "random", lambda: 1.0)
    driver.add(*(make_request(20 + row, 300, ignore_eos=True) for row in range(3)))
    num_repeated, num_one, num_two, before = 0, 0, 0, None
    while scheduler.num_unfinished:
        plan = driver.step(depth)
        is_plain = before is not None and plan.has_work and not len(plan.num_drafts)
        num_repeated += is_plain and plan.num_tokens is before.num_tokens
        before = plan if plan.has_work else before
        if is_plain:
            counts = [held_by(driver, request, -1)[1] for request in scheduler.running]
            num_one, num_two = num_one + counts.count(1), num_two + counts.count(2)
    driver.run()
    assert num_repeated > 100 and num_two > 5
    assert num_one > 3 * num_two or chunk == 16, "they give back what is behind a border then too"


def walk(seed: int, groups: tuple[CacheGroup, ...]) -> World:
    """A seeded random walk of rows with drafts, many of them with a pool that one request fills."""
    rng = random.Random(seed)
    shape = Shape(
        groups=groups,
        spare_blocks=rng.choice([0, 0, 4, 12]),
        max_num_seqs=rng.randint(2, 6),
        max_num_batched_tokens=rng.randint(6, 90),
        policy=rng.choice(["fcfs", "priority"]),
        chunked=rng.random() < 0.9,
        caching=rng.random() < 0.9,
        num_drafts=rng.choice([1, 2, 3]),
        transfers=seed % 3 > 1,
        max_len=rng.choice([40, 90]),
        cheap_tokens=rng.choice([0, 0, 8]),
        lookahead=rng.choice([0, 1, 3]),
        saves_running=seed % 2 > 0,
    )
    return take_walk(rng, shape, 250)


def test_random_walks_of_rows_with_drafts() -> None:
    """Found by hash is only what was written, whatever happens: preemption, late results, loads, other weights."""
    worlds = [walk(seed, groups) for groups in GROUPS for seed in range(6)]
    workers = [world.driver.worker for world in worlds]
    assert sum(world.scheduler.num_preemptions for world in worlds) > 100
    assert sum(world.scheduler.kv.stats.hits for world in worlds) > 1000
    assert sum(worker.num_accepted for worker in workers) > 1000
    assert sum(worker.num_drafted - worker.num_accepted for worker in workers) > 1000
    assert sum(world.scheduler.stats().num_loaded_tokens for world in worlds) > 100
