"""Scheduler, KVManager and BlockPool together against a simple model, by hypothesis and by a long random walk.

The model and what must be true of it are in `scheduler_world`. Worlds whose prompts are cut are in
test_scheduler_cuts.py.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from answers import VOCAB
from octavo.request.request import FinishReason
from sched_harness import (
    EOS,
    chunked,
    full,
    nothing,
    sliding,
    states,
)
from scheduler_world import Shape, World, take_walk

GROUPS = [
    (full(),),
    (sliding(5),),
    (full(), sliding(6)),
    (full(), sliding(1)),
    (full(), sliding(3), sliding(10)),
    (full(), full(), sliding(9), sliding(9)),
    (full(), chunked(8)),
    (chunked(6), sliding(5)),
    (full(), sliding(7, block_size=8)),
    (sliding(6), full(block_size=16), chunked(10, block_size=8)),
    (full(), *states(8)),
    (full(block_size=8), sliding(6), nothing(), *states(16, interval=2, blocks=3)),
    states(4, blocks=2),
    (full(), sliding(6), chunked(8), *states(8, interval=0)),
    (full(block_size=16), *states(8, unit=4)),
]


class SchedulerMachine(RuleBasedStateMachine):
    """Any order of the public verbs, with at most one step planned ahead."""

    @initialize(
        groups=st.sampled_from(GROUPS),
        spare_blocks=st.integers(0, 12),
        max_num_seqs=st.integers(1, 5),
        budget=st.integers(1, 24),
        policy=st.sampled_from(["fcfs", "priority"]),
        chunked=st.booleans(),
        caching=st.sampled_from([True, True, True, False]),
        num_drafts=st.sampled_from([0, 1, 2, 5]),
        transfers=st.booleans(),
    )
    def start(self, groups, spare_blocks, max_num_seqs, budget, policy, chunked, caching, num_drafts, transfers):
        self.world = World(
            Shape(groups, spare_blocks, max_num_seqs, budget, policy, chunked, caching, num_drafts, transfers)
        )

    @rule(
        family=st.integers(0, 1),
        shared=st.integers(0, 30),
        own=st.lists(st.integers(0, VOCAB - 1), max_size=6),
        max_tokens=st.integers(1, 20),
        priority=st.integers(0, 2),
        salt=st.sampled_from(["", "", "tenant"]),
        stops=st.lists(st.integers(0, VOCAB - 1), max_size=2),
        eos=st.booleans(),
        scored=st.sampled_from([None, None, 1]),
        coalesce_updates=st.booleans(),
    )
    def add(self, family, shared, own, max_tokens, priority, salt, stops, eos, scored, coalesce_updates):
        options = {
            "priority": priority,
            "salt": salt,
            "eos": eos,
            "prompt_logprobs": scored,
            "coalesce_updates": coalesce_updates,
        }
        self.world.add(family, shared, own, max_tokens, stop_token_ids=stops, min_tokens=1, **options)

    @rule(choice=st.integers(0, 100), max_tokens=st.integers(1, 20))
    def follow(self, choice, max_tokens):
        self.world.follow(choice, max_tokens)

    @rule()
    def issue(self):
        self.world.issue()

    @rule()
    def collect(self):
        self.world.collect()

    @rule(num_steps=st.integers(1, 8), depth=st.integers(0, 1))
    def steps(self, num_steps, depth):
        for _ in range(num_steps):
            self.world.driver.step(depth)

    @rule(choice=st.integers(0, 100))
    def abort(self, choice):
        self.world.abort(choice)

    @rule(choice=st.integers(0, 100), bad=st.integers(0, 8))
    def transfer(self, choice, bad):
        self.world.transfer(choice, bad)

    @rule(keep_kv=st.booleans(), back=st.booleans())
    def update_weights(self, keep_kv, back):
        self.world.update_weights(keep_kv, back)

    @rule(choice=st.integers(0, 100))
    def break_one(self, choice):
        self.world.break_one(choice)

    @rule(choice=st.integers(0, 2))
    def hold(self, choice):
        self.world.hold(choice)

    @rule()
    def reset(self):
        self.world.reset()

    @rule()
    def squeeze(self):
        self.world.squeeze = True

    @precondition(lambda self: self.world.unfinished)
    @rule()
    def fail(self):
        self.world.driver.worker.fail_next = True

    @invariant()
    def holds(self):
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self):
        if hasattr(self, "world"):
            self.world.finish()


SchedulerMachine.TestCase.settings = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestSchedulerModel = SchedulerMachine.TestCase


def walk(seed: int, num_steps: int) -> World:
    """A seeded random walk."""
    rng = random.Random(seed)
    shape = Shape(
        groups=rng.choice(GROUPS),
        spare_blocks=rng.randrange(10),
        max_num_seqs=rng.randint(1, 8),
        max_num_batched_tokens=rng.randint(1, 24),
        policy=rng.choice(["fcfs", "priority"]),
        chunked=rng.random() < 0.7,
        caching=rng.random() < 0.9,
        num_drafts=seed % 2 * rng.choice([1, 3, 7]),
        transfers=seed % 4 > 1,
    )
    return take_walk(rng, shape, num_steps)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("few", [0, 4], ids=["all rows at once", "few rows one by one"])
def test_random_walk(seed, few, monkeypatch):
    monkeypatch.setattr("octavo.sched.results._FEW", few)
    monkeypatch.setattr("octavo.sched.running._FEW", few)
    walk(seed, 600)


def test_the_walks_meet_what_they_are_for():
    """Preemption with and without a token in flight, prefix hits, failures, aborts, drafts: else they prove little."""
    worlds = [walk(seed, 400) for seed in range(100, 124)]
    requests = [request for world in worlds for request in world.driver.requests.values()]
    assert sum(world.scheduler.num_preemptions for world in worlds) > 40
    assert sum(world.scheduler.kv.stats.hits for world in worlds) > 200
    num_drafted, num_accepted = (
        sum(getattr(world.driver.worker, name) for world in worlds) for name in ("num_drafted", "num_accepted")
    )
    assert 100 < num_accepted < num_drafted - 100
    stats = [world.scheduler.stats() for world in worlds]
    assert sum(own.num_loaded_tokens for own in stats) > 400
    assert sum(own.num_load_failures for own in stats) > 10 and sum(own.num_expired_holds for own in stats) > 0
    assert sum(world.driver.worker.version for world in worlds) > 10
    reasons = {request.finish_reason for request in requests}
    assert reasons >= {FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT, FinishReason.ERROR}
    assert any(EOS in request.tokens[request.num_prompt :] for request in requests)
