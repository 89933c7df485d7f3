"""Scheduler, KVManager and BlockPool together against a simple model, by hypothesis and by a long random walk.

The model: each request gives the tokens that its history alone implies, whatever happens around it. FakeWorker checks
at every step that each query reads its own history, made with weights no older than its request's begin; FakeConnector
that nobody else touches what it moves; `World.check` that no block is lost, free twice, or owned unshared by two; the
end of each run that everyone finished and every block is free.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fake_connector import Clock, FakeConnector
from octavo.request.request import FinishReason, Request, Status
from sched_harness import (
    EOS,
    VOCAB,
    Driver,
    chunked,
    expected_answer,
    full,
    make_request,
    make_scheduler,
    nothing,
    sliding,
    smallest_pool,
    states,
)
from step_words import entries_of

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
MAX_LEN = 40


@dataclasses.dataclass(frozen=True)
class Shape:
    """A scheduler's settings, small enough for everything to collide."""

    groups: tuple
    spare_blocks: int  # beyond what one longest request needs
    max_num_seqs: int
    max_num_batched_tokens: int
    policy: str
    chunked: bool
    caching: bool
    num_drafts: int = 0
    transfers: bool = False  # there is a connector

    @property
    def drafts(self) -> int:
        """Of two steps in flight, drafts and all, less than a chunk: see InputsPolicy."""
        chunks = [group.block_size for group in self.groups if group.kind == "state"]
        return min([self.num_drafts, *(chunk // 2 - 1 for chunk in chunks)])


class World:
    """One scheduler, the requests that were given to it, and what must be true of them."""

    def __init__(self, shape: Shape) -> None:
        self.clock = Clock()
        loadable = shape.transfers and not any(group.kind == "encoder_only" for group in shape.groups)
        self.connector = FakeConnector() if loadable else None
        options = {"connector": self.connector, "clock": self.clock, "load_timeout": 10.0} if loadable else {}
        budget = shape.max_num_batched_tokens if shape.chunked else max(shape.max_num_batched_tokens, MAX_LEN)
        self.max_num_seqs = shape.max_num_seqs
        scheduler = make_scheduler(
            shape.groups,
            num_blocks=smallest_pool(shape.groups, MAX_LEN, budget + shape.drafts) + shape.spare_blocks,
            max_num_seqs=shape.max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=MAX_LEN,
            policy=shape.policy,
            priority_aging=shape.max_num_seqs % 3,
            enable_chunked_prefill=shape.chunked,
            enable_prefix_caching=shape.caching,
            num_drafts=shape.drafts,
            num_next_tokens=shape.spare_blocks % 3 if shape.drafts else 0,
            **options,
        )
        self.driver = Driver(scheduler, shape.groups)
        self.settled: set[str] = set()
        self.squeeze = False  # the next growth finds no block, once: the newest is preempted, full pool or not
        self._reserve, self._reserve_each = scheduler.kv.reserve, scheduler.kv.reserve_each
        scheduler.kv.reserve, scheduler.kv.reserve_each = self.reserve, self.reserve_each

    def reserve(self, request: Request, num_new: int, ahead: int = 0):
        if self.squeeze and len(self.scheduler.running) > 1:
            self.squeeze = False
            return None
        return self._reserve(request, num_new, ahead)

    def reserve_each(self, requests: Sequence[Request], starts: Sequence[int], ends: Sequence[int]):
        return None if self.squeeze else self._reserve_each(requests, starts, ends)

    @property
    def scheduler(self):
        return self.driver.scheduler

    @property
    def unfinished(self) -> list[Request]:
        return [request for request in self.driver.requests.values() if not request.finished]

    def add(self, family: int, shared: int, own: list[int], max_tokens: int, **options) -> None:
        """A prompt that begins like the others of its family."""
        prompt = [(family * 7 + i * i) % VOCAB for i in range(shared)] + own
        request = make_request(prompt[: MAX_LEN - 1] or [1], max_tokens, **options)
        if self.connector is not None and own:
            self.connector.offers[request.request_id] = sum(own)
            if own[0] % 4 == 0:
                self.connector.later.add(request.request_id)
        self.driver.add(request)

    def follow(self, choice: int, max_tokens: int) -> None:
        """A prompt that goes on from the output of a request that has ended: the next turn of a chat."""
        ended = [request for request in self.driver.requests.values() if request.finished]
        if ended:
            past = ended[choice % len(ended)]
            prompt = [*past.tokens, 3][: MAX_LEN - 1]
            self.driver.add(make_request(prompt, max_tokens, salt=past.cache_salt))

    def issue(self) -> None:
        if len(self.driver.in_flight) < 2:
            self.driver.issue()

    def collect(self) -> None:
        if self.driver.in_flight:
            self.driver.collect()

    def abort(self, choice: int) -> None:
        if self.unfinished:
            self.scheduler.abort([self.unfinished[choice % len(self.unfinished)].request_id, "nobody"])

    def transfer(self, choice: int, bad: int) -> None:
        """Something happens to transfers: one ends, well or not, the clock goes on, the connector changes its mind."""
        connector = self.connector
        if connector is None:
            return
        connector.later.clear()
        connector.saves, connector.stops = choice % 3 != 0, choice % 5 < 3
        if choice % 7 == 0:
            self.clock.now += 11.0 if choice % 2 else 4.0
        elif connector.begun:
            number = sorted(connector.begun)[choice % len(connector.begun)]
            blocks = [block for table in connector.begun[number].blocks for block in table if block]
            fails = bad % 3 == 0 and number not in connector.saving
            connector.arrive(number, blocks[bad % 5 :: 3] if fails else None)

    def update_weights(self, keep_kv: bool, back: bool) -> None:
        """The weights change, mostly to ones that never were."""
        worker = self.driver.worker
        worker.version += not back
        self.scheduler.set_weights_version(str(worker.version), keep_kv=keep_kv)

    def break_one(self, choice: int) -> None:
        """The next step of a request fails before it writes anything."""
        if self.unfinished and not self.driver.scheduler.drafting.most:
            new = [request for request in self.unfinished if not request.num_computed] or self.unfinished
            self.driver.worker.break_next = new[choice % len(new)].request_id

    def reset(self) -> None:
        assert self.scheduler.kv.reset_prefix_cache() == (self.scheduler.kv.usage == 0.0)

    def finish(self) -> None:
        if self.connector is not None:
            self.connector.hurries = True
            for number in list(self.connector.begun):
                self.connector.arrive(number)
            self.connector.later.clear()
        for depth in (1, 0):
            self.driver.run(depth, max_steps=4000)
        self.check()
        assert len(self.settled) == len(self.driver.requests), "everyone finishes"

    def check(self) -> None:
        scheduler = self.scheduler
        scheduler.kv.check()
        rows = [request.row for request in scheduler.running]
        assert len(set(rows)) == len(rows) <= self.max_num_seqs and all(row >= 0 for row in rows)
        for queue in (scheduler.running, scheduler.waiting):
            keys = [scheduler._order(request) for request in queue]
            assert keys == sorted(keys)
        num_known = len(scheduler.running) + len(scheduler.waiting) + scheduler.stats().num_loading
        assert scheduler.num_unfinished == num_known == len(self.unfinished)
        for request in self.driver.requests.values():
            if request.request_id not in self.settled:
                self._check_request(request)

    def _check_request(self, request: Request) -> None:
        answer, updates = expected_answer(request, MAX_LEN), self.driver.updates[request.request_id]
        output = self.driver.output(request)
        ends = [update.finish_reason for update in updates if update.finish_reason]
        assert output == answer.tokens[: len(output)]
        assert request.num_output == len(output) or (request.coalesce_updates and not ends and len(output) <= 1)
        assert request.num_computed <= request.num_tokens + request.num_in_flight
        assert (request in self.scheduler.running) == (request.status is Status.RUNNING)
        scored = [entry.token_ids[0] for update in updates for entry in entries_of(update.prompt_logprobs)]
        assert scored == list(range(1, len(scored) + 1)), "prompt positions are scored in order, each once"
        assert sum(update.queue_time is not None for update in updates) <= 1
        if not request.finished:
            assert not ends
            return
        self.settled.add(request.request_id)
        if request.finish_reason is FinishReason.ABORT:
            assert not ends
        elif request.finish_reason is FinishReason.ERROR:
            assert ends == ["error"] and updates[-1].error in ("nan_logits", "mod_failed")
        else:
            assert ends == [answer.finish_reason] and updates[-1].finish_reason
            assert (output, request.stop_reason) == (answer.tokens, answer.stop_reason)
            if request.params.prompt_logprobs is not None:
                assert len(scored) == request.num_prompt - 1


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
    """A seeded random walk with the weights of a busy server."""
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
    world = World(shape)
    for _ in range(num_steps):
        dice = rng.random()
        if dice < 0.15 and len(world.unfinished) < 12:
            own = [rng.randrange(VOCAB) for _ in range(rng.randrange(6))]
            world.add(
                rng.randrange(2),
                rng.randrange(30),
                own,
                rng.randint(1, 39),
                priority=rng.randrange(3),
                salt=rng.choice(["", "", "", "tenant"]),
                eos=rng.random() < 0.5,
                stop_token_ids=[rng.randrange(VOCAB)] if rng.random() < 0.2 else [],
                prompt_logprobs=1 if rng.random() < 0.2 else None,
                coalesce_updates=rng.random() < 0.5,
            )
        elif dice < 0.2 and len(world.unfinished) < 12:
            world.follow(rng.randrange(100), rng.randint(1, 20))
        elif dice < 0.22:
            world.abort(rng.randrange(100))
        elif dice < 0.225:
            world.driver.worker.fail_next = True
        elif dice < 0.23:
            world.reset()
        elif dice < 0.25:
            world.squeeze = True
        elif dice < 0.255:
            world.update_weights(keep_kv=rng.random() < 0.5, back=rng.random() < 0.2)
        elif dice < 0.27:
            world.break_one(rng.randrange(100))
        elif world.connector is not None and dice < 0.36:
            world.transfer(rng.randrange(100), rng.randrange(9))
        elif dice < 0.62:
            world.issue()
        else:
            world.collect()
        world.check()
    world.finish()
    return world


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
