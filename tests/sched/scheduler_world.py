"""A world for Scheduler, KVManager and BlockPool, small enough for everything to collide, and what must be true of it.

The model: each request gives the tokens that its history alone implies, whatever happens around it. FakeWorker checks
at every step that each query reads its own history, made with weights no older than its request's begin; FakeConnector
that nobody else touches what it moves; `CheckedDriver` that each plan says of its rows what follows from them, and
leaves out nobody; `World.check` that no block is lost, free twice, or owned unshared by two; `World.finish` that
everyone finishes and every block is free.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

from answers import VOCAB, expected_answer
from fake_connector import Clock, FakeConnector
from octavo.cache.groups import CacheGroup
from octavo.plan import StepPlan
from octavo.request.request import FinishReason, Request, Status
from octavo.sched.scheduler import Scheduler
from sched_harness import Driver, late, make_request, make_scheduler, smallest_pool
from step_words import entries_of

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
    max_len: int = MAX_LEN
    cheap_tokens: int = 0  # see Depth: other than 0, rows have drafts by what was accepted
    lookahead: int = 0  # tokens behind a step that a drafter's layers are written for
    saves_running: bool = False
    whole_prompts: bool = False

    @property
    def budget(self) -> int:
        """Tokens of a step."""
        in_pieces = self.chunked and not self.whole_prompts
        return self.max_num_batched_tokens if in_pieces else max(self.max_num_batched_tokens, self.max_len)

    @property
    def drafts(self) -> int:
        """Of two steps in flight, drafts and all, less than a chunk: see InputsPolicy."""
        chunks = [group.block_size for group in self.groups if group.kind == "state"]
        return min([self.num_drafts, *(chunk // 2 - 1 for chunk in chunks)])


class CheckedDriver(Driver):
    """Holds each plan against its requests as they were before."""

    num_cut = num_beside = 0  # prompts that were cut, in how many plans beside a preemption

    def __init__(self, scheduler: Scheduler, groups: tuple[CacheGroup, ...]) -> None:
        super().__init__(scheduler, groups)
        self._reach: dict[object, int] = {}  # what KVManager keeps of a request with blocks -> tokens planned at most

    def issue(self) -> StepPlan:
        scheduler = self.scheduler
        before = [(own, own.row, own.num_computed, own.num_tokens + own.num_in_flight) for own in scheduler.running]
        num_preemptions, num_scheduled = scheduler.num_preemptions, scheduler.num_scheduled_tokens
        loading = self._loading()  # by number: a load that ends may be followed by another one of its request
        plan = super().issue()
        rows, num_tokens = plan.rows.tolist(), plan.num_tokens.tolist()
        drafts = plan.num_drafts.tolist() or [0] * len(rows)
        assert len(set(rows)) == len(rows) == len(num_tokens) == len(drafts) and min(num_tokens, default=1) > 0
        assert len(plan.computed) in (0, len(rows)) and sum(num_tokens) <= scheduler._max_num_tokens
        assert scheduler.num_scheduled_tokens - num_scheduled == sum(num_tokens)
        if plan.has_work:
            assert scheduler._outstanding[plan.step].num_sampling == len(self.in_flight[-1][1].rows)
        num_old = len(rows) - len(plan.new_rows)
        work = {row: own for row, *own in zip(rows, num_tokens, drafts, strict=True)}
        assert [new.row for new in plan.new_rows] == rows[num_old:], "new rows come last"
        was_full = scheduler.num_preemptions > num_preemptions or sum(num_tokens) == scheduler._max_num_tokens
        was_full |= not loading.issuperset(self._loading())  # loads that begin count for tokens of the step
        in_order, num_cut = [], self.num_cut
        for request, row, start, known in before:
            if request.status is not Status.RUNNING:
                assert row not in work
                continue
            if row not in work:
                assert was_full or start == known or known == request.num_prompt + request.max_tokens, "it was passed"
                continue
            in_order.append(row)
            self._check_row(request, start, known, *work[row], was_full=was_full)
        assert in_order == rows[:num_old], "rows are served in the order of the policy"
        for new in plan.new_rows:
            request = scheduler._running.owners[new.row]
            self._check_row(request, new.num_computed, len(new.token_ids), *work[new.row], was_full=was_full)
        self.num_beside += scheduler.num_preemptions > num_preemptions and self.num_cut > num_cut
        return plan

    def _loading(self) -> set[int]:
        return {load.transfer.number for load in self.scheduler.loads._loading.values()}

    def _check_row(
        self, request: Request, start: int, known: int, num_new: int, num_drafts: int, *, was_full: bool
    ) -> None:
        """It computed `num_new` tokens from `start` on, of `known` ones and drafts."""
        scheduler, end = self.scheduler, start + num_new
        samples = end - num_drafts == known
        assert request.num_computed == end and (samples or not num_drafts)
        assert request.num_tokens + request.num_in_flight == known + num_drafts + samples
        cut = scheduler.kv.cut if scheduler._cuts else max
        assert cut(start, end - num_drafts) == end - num_drafts, "all kept borders are kept"
        assert was_full or end - num_drafts == cut(start, known), "a step computes what it can"
        ahead = scheduler.drafting.lookahead if scheduler.drafting._ahead else 0
        reach = min(end + ahead, scheduler._max_model_len)
        entry = scheduler.kv._entries[request.request_id]
        most = max(self._reach.get(entry, 0), min(end + scheduler.drafting.lookahead, scheduler._max_model_len))
        self._reach[entry] = most
        for group, table in zip(self.worker.groups, entry.tables, strict=True):
            assert len(table) >= group.num_blocks(reach), "it has room for what a drafter writes as well"
            assert len(table) <= group.num_blocks(most), "it has none before a step may need it"
        self.num_cut += end == cut(start, known) < known


class World:
    """One scheduler, the requests that were given to it, and what must be true of them."""

    def __init__(self, shape: Shape) -> None:
        self.clock = Clock()
        loadable = shape.transfers and not any(group.kind == "encoder_only" for group in shape.groups)
        self.max_len = shape.max_len
        unit = max(group.block_size for group in shape.groups if group.kind != "state")
        groups = late(shape.groups) if shape.drafts else shape.groups
        self.connector = FakeConnector(saves_running=shape.saves_running, save_unit=unit) if loadable else None
        options = {"connector": self.connector, "clock": self.clock, "load_timeout": 10.0} if loadable else {}
        self.max_num_seqs = shape.max_num_seqs
        self.advances = not shape.drafts and self.connector is None and shape.max_num_seqs % 2 > 0
        scheduler = make_scheduler(
            groups,
            advances=self.advances,
            num_blocks=smallest_pool(
                groups, shape.max_len, shape.budget + shape.drafts + shape.lookahead, drafts=shape.drafts > 0
            )
            + shape.spare_blocks,
            max_num_seqs=shape.max_num_seqs,
            max_num_batched_tokens=shape.budget,
            max_model_len=shape.max_len,
            policy=shape.policy,
            priority_aging=shape.max_num_seqs % 3,
            enable_chunked_prefill=shape.chunked,
            enable_prefix_caching=shape.caching,
            num_drafts=shape.drafts,
            num_next_tokens=shape.spare_blocks % 3 if shape.drafts else 0,
            num_lookahead=shape.lookahead if shape.drafts else 0,
            cheap_tokens=shape.cheap_tokens,
            whole_prompts=shape.whole_prompts,
            **options,
        )
        self.driver = CheckedDriver(scheduler, groups)
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
        request = make_request(prompt[: self.max_len - 1] or [1], max_tokens, **options)
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
            prompt = [*past.tokens, 3][: self.max_len - 1]
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

    def hold(self, choice: int) -> None:
        """The next rows that would sample, so many, draw nothing: their forms' masks come late.

        Here no request says that it has a form, so that states of any may advance where they are.
        """
        self.driver.worker.hold_next = 0 if self.advances else 1 + choice % 3

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
        answer, updates = expected_answer(request, self.max_len), self.driver.updates[request.request_id]
        output = self.driver.output(request)
        ends = [update.finish_reason for update in updates if update.finish_reason]
        assert output == answer.tokens[: len(output)]
        told_once = sum(bool(update.tokens) for update in updates) <= 1
        assert request.num_output == len(output) or (request.coalesce_updates and not ends and told_once)
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


def take_walk(rng: random.Random, shape: Shape, num_steps: int) -> World:
    """A random walk with the weights of a busy server."""
    world = World(shape)
    for _ in range(num_steps):
        dice = rng.random()
        if dice < 0.15 and len(world.unfinished) < 12:
            own = [rng.randrange(VOCAB) for _ in range(rng.randrange(6))]
            world.add(
                rng.randrange(2),
                rng.randrange(shape.max_len * 3 // 4),
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
        elif dice < 0.28:
            world.hold(rng.randrange(100))
        elif world.connector is not None and dice < 0.36:
            world.transfer(rng.randrange(100), rng.randrange(9))
        elif dice < 0.62:
            world.issue()
        else:
            world.collect()
        world.check()
    world.finish()
    return world
