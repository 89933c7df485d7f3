"""A worker without a model, and the answers that it must give.

FakeWorker executes plans literally on a memory of (block, offset) -> what was stored there. What stands for K and V is
a fingerprint of all tokens up to the position, so a query that reads anything but its own history is caught where it
reads. The next token is a function of the history alone, so every output can be computed beforehand.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import random
from collections.abc import Iterable, Sequence
from typing import Any

from answers import VOCAB, fingerprint, history, next_token
from octavo.cache.groups import CacheGroup
from octavo.cache.parts import WHOLE_BLOCKS
from octavo.cache.policies import blocks_for_request
from octavo.kv_connector import NO_CONNECTOR
from octavo.plan import StepLimits, StepPlan, StepResult, TokenLogprobs
from octavo.request.request import Request
from octavo.request.sampling_params import SamplingParams
from octavo.request.updates import RequestUpdate
from octavo.sched.kv_manager import KVManager
from octavo.sched.scheduler import Scheduler
from step_words import blocks_by_row, result_of, scores_of

Place = tuple[int, int]  # (block, offset)
BLOCK = 4
_MOST_DRAFTS = 8
EOS = 7


def full(block_size: int = BLOCK) -> CacheGroup:
    return CacheGroup(kind="full", window=0, block_size=block_size, layers=(0,))


def sliding(window: int, block_size: int = BLOCK) -> CacheGroup:
    return CacheGroup(kind="sliding", window=window, block_size=block_size, layers=(0,))


def chunked(chunk: int, block_size: int = BLOCK) -> CacheGroup:
    return CacheGroup(kind="chunked", chunk=chunk, block_size=block_size, layers=(0,))


def states(
    chunk: int, block_size: int = BLOCK, *, interval: int = 1, blocks: int = 1, unit: int = BLOCK
) -> tuple[CacheGroup, CacheGroup]:
    """Inputs and states of a layer. blocks: of an entry of either; unit: see CacheGroup, and with drafts `late`."""
    parts = dataclasses.replace(WHOLE_BLOCKS, blocks=blocks)
    return (
        CacheGroup(kind="inputs", chunk=chunk, block_size=block_size, layers=(0,), parts=parts),
        CacheGroup(kind="state", block_size=chunk, layers=(0,), parts=parts, unit=unit, interval=interval),
    )


def late(groups: tuple[CacheGroup, ...]) -> tuple[CacheGroup, ...]:
    """As an engine with drafts has them: a state gets its blocks in the step that may write it."""
    return tuple(dataclasses.replace(group, unit=1) if group.kind == "state" else group for group in groups)


def nothing() -> CacheGroup:
    return CacheGroup(kind="encoder_only", block_size=BLOCK, layers=(0,))


def first_seen(group: CacheGroup, position: int) -> int:
    """The first token that a query reads in a group of tokens."""
    if group.chunk:
        return position // group.chunk * group.chunk
    return max(0, position - group.window + 1) if group.window else 0


def make_scheduler(
    groups: tuple[CacheGroup, ...] = (full(),),
    *,
    num_blocks: int = 1000,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 64,
    max_model_len: int = 64,
    policy: str = "fcfs",
    priority_aging: int = 0,
    enable_chunked_prefill: bool = True,
    enable_prefix_caching: bool = True,
    whole_prompts: bool = False,
    num_drafts: int = 0,
    num_next_tokens: int = 0,
    num_lookahead: int = 0,
    advances: bool = False,
    **options: Any,
) -> Scheduler:
    limits = StepLimits(
        max_num_rows=max_num_seqs,
        max_num_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        max_num_drafts=num_drafts,
        num_next_tokens=num_next_tokens,
        num_lookahead=num_lookahead,
    )
    kv = KVManager(
        groups,
        num_blocks,
        enable_prefix_caching=enable_prefix_caching,
        secret=b"test",
        num_next_tokens=num_next_tokens,
        advances=advances,
        num_unsure=limits.num_unsure,
    )
    return Scheduler(
        kv,
        limits,
        policy=policy,
        priority_aging=priority_aging,
        enable_chunked_prefill=enable_chunked_prefill,
        whole_prompts=whole_prompts,
        **options,
    )


def smallest_pool(groups: tuple[CacheGroup, ...], max_model_len: int, max_new: int, *, drafts: bool = False) -> int:
    return 1 + blocks_for_request(groups, max_model_len, max_new, drafts=drafts)


_IDS = itertools.count()


def make_request(
    prompt: list[int] | int,
    max_tokens: int = 4,
    *,
    eos: bool = False,
    priority: int = 0,
    salt: str = "",
    coalesce_updates: bool = False,
    waits_for: str = "",
    **params: object,
) -> Request:
    """`prompt` as a number: so many tokens, distinct from those of any other request made so."""
    number = next(_IDS)
    if isinstance(prompt, int):
        prompt = [1000 * (number + 1) + i for i in range(prompt)]
    return Request(
        f"r{number}",
        prompt,
        SamplingParams(max_tokens=max_tokens, **params),
        max_tokens=max_tokens,
        seed=0,
        eos_token_ids=frozenset([EOS]) if eos else frozenset(),
        priority=priority,
        cache_salt=salt,
        coalesce_updates=coalesce_updates,
        waits_for=waits_for,
    )


@dataclasses.dataclass
class _Row:
    request_id: str
    tokens: list[int]  # known to the device: one ahead of the host while a step is in flight
    history: list[int]
    num_prompt: int
    num_computed: int
    tables: list[list[int]]
    owed: int  # next prompt position whose log-probabilities are wanted; -1: none
    drafts: list[int] = dataclasses.field(default_factory=list)  # proposed behind `tokens`
    since: int = 0  # the weights' version when it began
    garbage: bool = False  # it has read what a failed row did not write: what it samples is to be dropped


class FakeWorker:
    """Executes plans at once, in order; the caller may hand the results on later."""

    def __init__(self, groups: tuple[CacheGroup, ...], salts: dict[str, str]) -> None:
        """`salts`: request id -> cache salt, which a real worker does not know."""
        self.groups = groups
        self.most_tokens = max(group.block_size for group in groups)
        self.salts = salts
        self.memory: dict[Place, tuple[int, ...]] = {}  # (group, position, fingerprint, weights' version)
        self.version = 0  # of the weights
        self.foreign: set[int] = set()  # blocks that a load fills
        self.touched: dict[int, set[int]] = {}  # step -> blocks that it reads or writes
        self.written: dict[int, set[int]] = {}
        self.new_states: dict[Place, tuple[int, ...]] = {}  # of the step in hand
        self.rows: dict[int, _Row] = {}
        self.computed: collections.Counter[str] = collections.Counter()  # request id -> tokens, over all its rows
        self.fail_next = False
        self.hold_next = 0  # rows that draw nothing, though they would sample
        self.break_next = ""  # a request whose next step fails before it writes anything
        self.unwritten: set[Place] = set()  # (block, offset) that failed rows and their readers left
        self.num_drafted = self.num_accepted = 0
        self._propose = random.Random(len(salts))
        self._next_step = 0

    def execute(self, plan: StepPlan) -> StepResult:
        assert plan.step == self._next_step, "steps are numbered without gaps"
        self._next_step += 1
        for row in plan.finished_rows:
            del self.rows[row]
        for block in plan.zero_blocks:
            for offset in range(self.most_tokens):
                self.memory.pop((block, offset), None)
        for new in plan.new_rows:
            assert new.row not in self.rows, "a row has one request at a time"
            past = history(new.token_ids, self.salts[new.request_id])
            owed, tables = new.prompt_logprobs_start, [list(ids) for ids in new.block_ids]
            self.rows[new.row] = _Row(
                new.request_id,
                list(new.token_ids),
                past,
                new.num_prompt,
                new.num_computed,
                tables,
                owed,
                since=self.version,
            )
        assert len(plan.new_blocks) in (0, len(self.groups))
        for index, new_blocks in enumerate(plan.new_blocks):
            for row, ids in blocks_by_row(new_blocks).items():
                assert row not in [new.row for new in plan.new_rows], "new rows come whole"
                self.rows[row].tables[index] += ids
        self.touched[plan.step], self.written[plan.step] = set(), set()
        work = list(zip(plan.rows.tolist(), plan.num_tokens.tolist(), strict=True))
        assert len(dict(work)) == len(work), "a row computes once per step"
        drafted = dict(zip(plan.rows.tolist(), plan.num_drafts.tolist(), strict=True)) if len(plan.num_drafts) else {}
        bounds = dict(zip(plan.rows.tolist(), plan.computed.tolist(), strict=True)) if len(plan.computed) else {}
        for number, num_new in work:
            row = self.rows[number]
            assert bounds.get(number, row.num_computed) >= row.num_computed, "a bound is none below"
            row.tokens += row.drafts[: drafted.get(number, 0)]  # as if all were known, until they are verified
            row.history = history(row.tokens, self.salts[row.request_id])
            self._store(row, num_new, drafted.get(number, 0))
        before = -1
        while before != len(self.unwritten):  # readers of garbage write garbage, which others read
            before = len(self.unwritten)
            for number, num_new in work:
                self._attend(self.rows[number], num_new)
        self.memory.update(self.new_states)  # rows of a step run side by side: none reads a state that it writes
        self.new_states.clear()
        broken = [number for number, _ in work if self.rows[number].request_id == self.break_next]
        result = self._sample(plan, work, drafted)
        for number in broken:
            result.failed[number], self.break_next = "mod_failed", ""
        return result

    def _store(self, row: _Row, num_new: int, num_drafts: int) -> None:
        assert num_new > num_drafts, "a row in a plan has work"
        assert row.num_computed + num_new <= len(row.tokens), "only tokens that the device knows are computed"
        assert not num_drafts or row.num_computed + num_new == len(row.tokens), "drafts stand at the end"
        self.computed[row.request_id] += num_new
        for block, offset, content, is_state in self._stored(row, num_new):
            place = block, offset
            assert block not in self.foreign, "nobody else writes where a load does"
            self.touched[self._next_step - 1].add(block)
            value = *content, self.version
            if self.memory.get(place) != value:  # a row that was held writes again what is there
                self.written[self._next_step - 1].add(block)
            (self.new_states if is_state else self.memory)[place] = value
            self.unwritten.discard(place)
            if row.garbage or row.request_id == self.break_next:
                self.unwritten.add(place)

    def _stored(self, row: _Row, num_new: int) -> Iterable[tuple[int, int, tuple[int, ...], bool]]:
        """What a step stores for a row: (block, offset, content, whether it is a state).

        Of inputs no more than every operator keeps: see InputsPolicy.
        """
        end = row.num_computed + num_new
        for index, (group, table) in enumerate(zip(self.groups, row.tables, strict=True)):
            if group.kind == "encoder_only":
                continue
            if group.kind == "state":
                for border in range(row.num_computed // group.block_size + 1, end // group.block_size + 1):
                    past = row.history[border * group.block_size]
                    for block in self._entry(group, table, border - 1):
                        yield block, 0, (index, border, past), True
                continue
            kept = end // group.chunk * group.chunk - group.chunk if group.kind == "inputs" else 0
            for position in range(max(row.num_computed, kept), end):
                blocks = self._entry(group, table, position // group.block_size)
                assert blocks or group.kind == "inputs", "nothing is stored in the null block"
                for block in blocks:
                    yield block, position % group.block_size, (index, position, row.history[position + 1]), False

    @staticmethod
    def _entry(group: CacheGroup, table: list[int], index: int) -> list[int]:
        """The blocks of a group's entry: all of them, or none."""
        num = group.parts.blocks
        blocks = table[index * num : (index + 1) * num]
        assert len(blocks) == num and all(blocks) == any(blocks)
        assert not any(blocks) or len(set(blocks)) == num, "blocks of an entry are different ones"
        return blocks if any(blocks) else []

    def content(
        self, request: Request, blocks: Sequence[Sequence[int]], start: int, end: int
    ) -> Iterable[tuple[Place, tuple[int, ...]]]:
        """Where tokens of a request lie, and what is there once they are computed. Null blocks are skipped."""
        past = history(request.tokens, request.cache_salt)
        for index, (group, table) in enumerate(zip(self.groups, blocks, strict=True)):
            size = group.block_size
            if group.kind == "state":
                for border in range(start // size + 1, end // size + 1):
                    for block in self._entry(group, list(table), border - 1):
                        yield (block, 0), (index, border, past[border * size], self.version)
                continue
            for position in range(start, end) if group.kind != "encoder_only" else ():
                for block in self._entry(group, list(table), position // size):
                    yield (block, position % size), (index, position, past[position + 1], self.version)

    def _attend(self, row: _Row, num_new: int) -> None:
        """The step's queries together read from the first one's window to the last one's position.

        A state is read as the step found it; of the inputs those that lie before the step's own tokens.
        """
        for block, offset, content in self._read(row, num_new):
            found = self.memory.get((block, offset))
            assert found is not None, "a query reads what was written"
            assert found[:3] == content, "a query reads its own history"
            assert found[3] >= row.since, "nobody begins with blocks of older weights"
            assert block not in self.foreign, "nobody reads what has not arrived"
            self.touched[self._next_step - 1].add(block)
            row.garbage |= (block, offset) in self.unwritten
        if row.garbage:
            self.unwritten.update((block, offset) for block, offset, *_ in self._stored(row, num_new))

    def _read(self, row: _Row, num_new: int) -> Iterable[tuple[int, int, tuple[int, ...]]]:
        """What a step reads for a row: (block, offset, what is to be there)."""
        start, end = row.num_computed, row.num_computed + num_new
        for index, (group, table) in enumerate(zip(self.groups, row.tables, strict=True)):
            if group.kind == "encoder_only":
                continue
            if group.kind == "state":
                border = start // group.block_size
                blocks = self._entry(group, table, border - 1) if border else []
                assert blocks or not border, "the state before a query is there"
                yield from ((block, 0, (index, border, row.history[border * group.block_size])) for block in blocks)
                continue
            for position in range(first_seen(group, start), start if group.kind == "inputs" else end):
                blocks = self._entry(group, table, position // group.block_size)
                assert blocks, "what is read has a block"
                content = (index, position, row.history[position + 1])
                yield from ((block, position % group.block_size, content) for block in blocks)

    def _sample(self, plan: StepPlan, work: list[tuple[int, int]], drafted: dict[int, int]) -> StepResult:
        tokens: dict[int, list[int]] = {}
        held: set[int] = set()
        failed, prompt_logprobs = {}, {}
        for number, num_new in work:
            row = self.rows[number]
            entries = []
            while 0 < row.owed < row.num_prompt and row.owed <= row.num_computed + num_new:
                entries.append(TokenLogprobs([row.owed], [float(row.history[row.owed])], [1]))
                row.owed += 1
            if entries:
                prompt_logprobs[number] = scores_of(entries)
            row.num_computed += num_new
            tokens[number] = []
            if row.num_computed == len(row.tokens):
                if self.hold_next and row.request_id != self.break_next:
                    self.hold_next -= 1
                    held.add(number)
                    self._hold(row, drafted.get(number, 0))
                    continue
                tokens[number] = self._verify(row, drafted.get(number, 0))
                if self.fail_next:
                    failed[number] = "nan_logits"
                    self.fail_next = False
        order = sorted(tokens, key=lambda number: (number % 2, number))  # like the real one: not the plan's
        return result_of(
            plan.step,
            order,
            [tokens[number] for number in order],
            logprobs={
                number: [TokenLogprobs([token], [0.0], [1]) for token in tokens[number]]
                for number in order
                if tokens[number]
            },
            prompt_logprobs=prompt_logprobs,
            failed=failed,
            held=held,
            num_drafts=plan.num_drafts,
        )

    def _hold(self, row: _Row, num_drafts: int) -> None:
        """Draw nothing: the last token is computed again, and the same drafts stand behind it."""
        known = len(row.tokens) - num_drafts
        row.drafts, row.tokens, row.history = row.tokens[known:], row.tokens[:known], row.history[: known + 1]
        row.num_computed = known - 1
        self._go_on(row)

    def _verify(self, row: _Row, num_drafts: int) -> list[int]:
        """The accepted drafts, which are the last known tokens until now, and one token more; then propose anew."""
        first = len(row.tokens) - num_drafts
        drafts, row.tokens, row.history = row.tokens[first:], row.tokens[:first], row.history[: first + 1]
        for draft in [*drafts, None]:
            token = (next_token(row.history[-1]) + row.garbage) % VOCAB
            row.tokens.append(token)
            row.history.append(fingerprint(row.history[-1], token))
            if token != draft:
                break
        row.num_computed = len(row.tokens) - 1
        self.num_drafted += num_drafts
        self.num_accepted += len(row.tokens) - first - 1
        row.drafts = []
        self._go_on(row)
        return row.tokens[first:]

    def _go_on(self, row: _Row) -> None:
        """Propose behind the drafts that there are."""
        before = row.history[-1]
        for draft in row.drafts:
            before = fingerprint(before, draft)
        while len(row.drafts) < _MOST_DRAFTS:  # mostly what will be said
            right = next_token(before)
            row.drafts.append(right if self._propose.random() < 0.8 else (right + 1) % VOCAB)
            before = fingerprint(before, row.drafts[-1])


class Driver:
    """Scheduler and FakeWorker with up to one step in flight, and a record of what each request was given."""

    def __init__(self, scheduler: Scheduler, groups: tuple[CacheGroup, ...] = (full(),)) -> None:
        self.scheduler = scheduler
        self.salts: dict[str, str] = {}
        self.worker = FakeWorker(groups, self.salts)
        self.in_flight: collections.deque[tuple[StepPlan, StepResult]] = collections.deque()
        self.requests: dict[str, Request] = {}
        self.updates: dict[str, list[RequestUpdate]] = collections.defaultdict(list)
        self.plans: list[StepPlan] = []
        self.connector = scheduler.loads.connector
        if self.connector is not NO_CONNECTOR:
            self.connector.attach(self)

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.requests[request.request_id] = request
            self.salts[request.request_id] = request.cache_salt
            self.scheduler.add(request)

    def issue(self) -> StepPlan:
        for update in self.scheduler.take_loads():
            self.updates[update.request_id].append(update)
        plan = self.scheduler.schedule()
        if plan.has_work:
            self.plans.append(plan)
            self.in_flight.append((plan, self.worker.execute(plan)))
        return plan

    def collect(self) -> None:
        for update in self.scheduler.update(*self.in_flight.popleft()):
            self.updates[update.request_id].append(update)

    def step(self, depth: int = 0) -> StepPlan:
        """Like the engine's: issue one step, then take in results until `depth` steps are in flight."""
        while len(self.in_flight) > 1:
            self.collect()
        plan = self.issue()
        issued = plan.has_work
        while len(self.in_flight) > (depth if issued else 0):
            self.collect()
        return plan

    def run(self, depth: int = 0, max_steps: int = 10_000) -> None:
        """To the end of everything, and an audit."""
        for _ in range(max_steps):
            if not self.scheduler.has_work and not self.in_flight:
                break
            self.step(depth)
        else:
            raise AssertionError("the requests do not finish")
        self.audit_idle()

    def output(self, request: Request) -> list[int]:
        return [token for update in self.updates[request.request_id] for token in update.tokens]

    def audit_idle(self) -> None:
        scheduler = self.scheduler
        scheduler.kv.check()
        assert scheduler.num_unfinished == 0 and not scheduler.running and not scheduler.waiting
        assert scheduler.kv.usage == 0.0, "idle means that every block is free"
        assert not scheduler._requests and not scheduler._results.queued_at and not scheduler._results.queue_times
        assert not self.worker.rows, "every row was reported finished, once"
