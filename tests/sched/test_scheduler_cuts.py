"""Worlds whose prompts are cut by groups of states, though the step has budget left, by hypothesis and by random walks.

A policy cuts where a step would pass more kept borders than it keeps. With MOST_SNAPSHOTS as it is that takes prompts
of some length; with fewer, prompts of the other worlds' length are cut nearly always, beside whatever happens.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule, run_state_machine_as_test

from answers import VOCAB
from octavo.cache import policies
from sched_harness import chunked, full, sliding, states
from scheduler_world import Shape, World, take_walk
from test_scheduler_model import SchedulerMachine

GROUPS = [
    (full(), *states(4)),
    (full(), *states(8, interval=3)),
    (full(), sliding(6), *states(8, blocks=2)),
    (sliding(5), *states(4, interval=3, blocks=3)),
    (full(block_size=16), *states(8, unit=4)),
    (sliding(6), full(block_size=8), chunked(10), *states(16)),
    states(4, blocks=2),
    (full(), *states(4), *states(8, interval=0)),
    (full(), sliding(9), *states(4, interval=3), *states(16, interval=1)),
]
LENGTHS = {1: 48, 2: 64, 8: 144}  # of requests, by MOST_SNAPSHOTS


class CutsMachine(SchedulerMachine):
    """As SchedulerMachine, in worlds whose prompts are cut."""

    @initialize(
        groups=st.sampled_from(GROUPS),
        spare_blocks=st.integers(0, 12),
        max_num_seqs=st.integers(2, 5),
        budget=st.integers(20, 200),
        policy=st.sampled_from(["fcfs", "priority"]),
        caching=st.sampled_from([True, True, True, False]),
        num_drafts=st.sampled_from([0, 1, 2, 7]),
        adaptive=st.booleans(),
        lookahead=st.sampled_from([0, 0, 3]),
        transfers=st.sampled_from([0, 1, 2]),
    )
    def start(
        self, groups, spare_blocks, max_num_seqs, budget, policy, caching, num_drafts, adaptive, lookahead, transfers
    ):
        self.world = World(
            Shape(
                groups,
                spare_blocks,
                max_num_seqs,
                budget,
                policy,
                chunked=True,
                caching=caching,
                num_drafts=num_drafts,
                transfers=transfers > 0,
                max_len=LENGTHS[policies.MOST_SNAPSHOTS],
                cheap_tokens=8 * adaptive,
                lookahead=lookahead,
                saves_running=transfers > 1,
            )
        )

    @rule(
        own=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=3),
        num_steps=st.integers(1, 3),
        depth=st.integers(0, 1),
        max_tokens=st.integers(2, 12),
    )
    def preempt_beside_a_cut(self, own, num_steps, depth, max_tokens):
        """A long prompt, a short one behind it, and soon no block is left."""
        world = self.world
        world.add(0, world.max_len * 3 // 4, own, 2)
        world.add(1, 4, own, max_tokens)
        for _ in range(num_steps):
            world.driver.step(depth)
        world.squeeze = True
        world.driver.step(depth)


@pytest.mark.parametrize("most_snapshots", [1, 2])
def test_prompts_are_cut_beside_anything(most_snapshots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policies, "MOST_SNAPSHOTS", most_snapshots)
    monkeypatch.setattr(policies, "CUT_TOKENS", 0)
    health = [HealthCheck.too_slow, HealthCheck.filter_too_much]
    run_state_machine_as_test(
        CutsMachine,
        settings=settings(max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=health),
    )


def walk(seed: int, num_steps: int) -> World:
    """A seeded random walk where prompts are cut."""
    rng = random.Random(seed)
    shape = Shape(
        groups=GROUPS[seed % len(GROUPS)],
        spare_blocks=rng.randrange(12),
        max_num_seqs=rng.randint(2, 8),
        max_num_batched_tokens=rng.randint(20, 200),
        policy=rng.choice(["fcfs", "priority"]),
        chunked=rng.random() < 0.95,
        caching=rng.random() < 0.9,
        num_drafts=seed % 2 * rng.choice([1, 3, 7]),
        transfers=seed % 3 > 0,
        max_len=LENGTHS[policies.MOST_SNAPSHOTS],
        cheap_tokens=rng.choice([0, 8]),
        lookahead=rng.choice([0, 0, 2, 5]),
        saves_running=seed % 3 > 1,
        whole_prompts=rng.random() < 0.05,
    )
    return take_walk(rng, shape, num_steps)


@pytest.mark.parametrize("most_snapshots", [1, 2, 8])
def test_random_walks_that_cut(most_snapshots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts are cut there, some of them beside a preemption, and beside rows that decode: else they prove little."""
    monkeypatch.setattr(policies, "MOST_SNAPSHOTS", most_snapshots)
    monkeypatch.setattr(policies, "CUT_TOKENS", 0)
    monkeypatch.setattr("octavo.sched.results._FEW", most_snapshots % 4)
    worlds = [walk(seed, 300) for seed in range(20)]
    drivers = [world.driver for world in worlds]
    assert sum(driver.num_cut for driver in drivers) > 60
    assert sum(driver.num_beside for driver in drivers) > 2
    assert sum(driver.worker.num_accepted for driver in drivers) > 50
    assert sum(world.scheduler.num_preemptions for world in worlds) > 20
    assert sum(world.scheduler.stats().num_loaded_tokens for world in worlds) > 50
