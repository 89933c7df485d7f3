"""States of rows that decode go on in the blocks that they have: how many rows fit, and what stays right."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import msgspec
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

from burst import nemotron_groups
from octavo.bench.shapes import SHAPES
from octavo.cache.groups import CacheGroup, block_bytes
from octavo.cache.policies import most_decoding
from octavo.config.engine_config import DEFAULT_BLOCK_SIZE
from octavo.request.request import Request
from octavo.request.structured_outputs import StructuredOutputsParams
from octavo.request.thinking import Thinking
from octavo.sched.growth import Growth
from octavo.sched.kv_manager import KVManager
from octavo.sched.scheduler import Scheduler
from octavo.sched.work import PlanBuilder
from sched_harness import full, late, make_request, make_scheduler, states
from step_words import result_of

GIB = 1 << 30


def decode(scheduler: Scheduler) -> tuple[int, int]:
    """Run what was added to its end, one step in flight: (steps, the most blocks that were in use)."""
    steps, most, before, table = 0, 0, None, scheduler._running.rows
    while scheduler.num_unfinished:
        known, plan = table.num_known - table.num_tokens, scheduler.schedule()
        entered = [new.row for new in plan.new_rows]
        known[entered] = 0
        drawn = plan.rows[(table.num_known - table.num_tokens > known)[plan.rows]].tolist()
        most = max(most, scheduler.kv._pool.num_blocks - 1 - scheduler.kv.num_free_blocks)
        steps += len(plan.rows) > 0
        if before is not None:
            scheduler.update(*before)
        before = (plan, result_of(plan.step, drawn, [[7]] * len(drawn))) if plan.has_work else None
    return steps, most


def run_shape(
    num_rows: int, num_bytes: int, block_size: int = DEFAULT_BLOCK_SIZE["cuda"], **options
) -> tuple[int, int, int]:
    """Requests of 16 tokens that decode 256, on Nemotron-H's shape: (steps, preemptions, most bytes in use)."""
    groups = nemotron_groups(SHAPES["mamba2"], block_size)
    size = block_bytes(groups, 2)
    scheduler = make_scheduler(
        groups,
        num_blocks=num_bytes // size,
        max_num_seqs=num_rows,
        max_num_batched_tokens=8192,
        max_model_len=4096,
        **options,
    )
    for _ in range(num_rows):
        scheduler.add(make_request(16, 256, ignore_eos=True))
    steps, most = decode(scheduler)
    return steps, scheduler.num_preemptions, most * size


def test_512_rows_of_mamba_2_fit_what_an_h200_leaves_its_cache() -> None:
    """105 GiB beside 15 of weights. A row has one state, 104 MiB, the inputs of one chunk, 60, and five of K and V."""
    assert run_shape(512, 105 * GIB, enable_prefix_caching=False, advances=True) == (256, 0, 512 * 169 << 20)


@pytest.mark.parametrize("caching", [False, True], ids=["forgets", "caches"])
@pytest.mark.parametrize("block_size", [16, 64])
def test_rows_that_are_admitted_together_stay_where_each_has_one_state(caching: bool, block_size: int) -> None:
    """Of 32 rows of 169 MiB 31 fit 5.2 GiB. With hashes what they keep for others goes before any row does."""
    fields = {"block_size": block_size, "enable_prefix_caching": caching, "advances": True}
    assert run_shape(31, 31 * 187 << 20, **fields)[:2] == (256, 0)
    steps, preempted, most = run_shape(31, 31 * 600 << 20, **fields)
    assert (steps, preempted) == (256, 0)
    assert (most > 31 * 250 << 20) == caching, "where there is room for all, a state that a hash may find stays"


def test_without_it_rows_that_cross_a_border_together_have_three_states() -> None:
    """So drafts may be rejected behind it; and as many are admitted as do not drive each other out."""
    steps, preempted, most = run_shape(32, 32 * 450 << 20, enable_prefix_caching=False)
    assert (steps, preempted, most) == (256, 0, 32 * (3 * 104 + 2 * 60 + 5) << 20)
    assert run_shape(32, 32 * 200 << 20, enable_prefix_caching=False)[1] <= 2


def decode_with_drafts(scheduler: Scheduler, rng: random.Random) -> tuple[dict[str, int], int, int]:
    """Run to the end, one step in flight, any number of drafts accepted.

    The most entries of any row by kind of group, the most rows at once, and the drafts that were planned.
    """
    most, most_rows, num_drafts, before = {"inputs": 0, "state": 0}, 0, 0, None
    table, kv = scheduler._running.rows, scheduler.kv
    while scheduler.num_unfinished:
        known, plan = table.num_known - table.num_tokens, scheduler.schedule()
        known[[new.row for new in plan.new_rows]] = 0
        drawn = [row for row in plan.rows.tolist() if table.num_known[row] - table.num_tokens[row] > known[row]]
        drafts = dict(zip(plan.rows.tolist(), plan.num_drafts.tolist(), strict=False))
        num_drafts += sum(drafts.values())
        tokens = [[7] * (1 + rng.randint(0, drafts.get(row, 0))) for row in drawn]
        decoding = [one for one in scheduler.running if one.num_computed > one.num_prompt]
        for group, index in [(group, at) for at, group in enumerate(kv._groups) if group.kind in most]:
            held = [sum(map(bool, kv.tables(one)[index])) // group.parts.blocks for one in decoding]
            most[group.kind] = max([most[group.kind], *held])
        most_rows = max(most_rows, len(scheduler.running))
        if before is not None:
            scheduler.update(*before)
        before = (plan, result_of(plan.step, drawn, tokens)) if plan.has_work else None
    return most, most_rows, num_drafts


@pytest.mark.parametrize(("chunk", "num_drafts"), [(64, 1), (64, 4), (64, 16), (16, 4), (16, 7)])
@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_a_row_with_drafts_has_no_more_at_once_than_is_kept_for_it(
    chunk: int, num_drafts: int, block_size: int
) -> None:
    """And comes to have as much: what is kept is no more than it takes."""
    _, inputs, state = groups = late((full(block_size), *states(chunk, block_size, blocks=3)))
    fields = {"num_drafts": num_drafts, "num_lookahead": num_drafts, "enable_prefix_caching": False}
    scheduler = make_scheduler(groups, num_blocks=4000, max_model_len=1024, max_num_batched_tokens=512, **fields)
    for _ in range(8):
        scheduler.add(make_request(16, 900, ignore_eos=True))
    most, _, count = decode_with_drafts(scheduler, random.Random(3))
    unsure = 2 * (1 + num_drafts) + num_drafts
    assert count > 1000 and most["state"] == most_decoding(state, unsure) == 2 + (unsure > chunk)
    assert most_decoding(inputs, unsure) - 1 <= most["inputs"] <= most_decoding(inputs, unsure)


@pytest.mark.parametrize(("block_size", "num_rows"), [(16, 8), (64, 15)])
def test_rows_with_drafts_fill_a_small_pool_and_keep_their_drafts(block_size: int, num_rows: int) -> None:
    """Of 40 rows 8 fit; 6 would, if three states and two chunks were kept for each. Of large blocks 12 would."""
    scheduler = make_scheduler(
        late((full(block_size), *states(64, block_size, blocks=14))),
        num_blocks=900,
        max_model_len=1024,
        max_num_batched_tokens=512,
        max_num_seqs=40,
        num_drafts=4,
        enable_prefix_caching=False,
    )
    for _ in range(40):
        scheduler.add(make_request(70, 200, ignore_eos=True))
    _, most_rows, count = decode_with_drafts(scheduler, random.Random(5))
    assert (most_rows, scheduler.num_preemptions) == (num_rows, 0) and count > 1.2 * 40 * 200


@pytest.mark.parametrize("groups", [[full()], [full(), *states(16, blocks=2)]], ids=["attention", "states"])
def test_each_newcomer_adds_its_own_headroom(groups: list[CacheGroup], monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[int] = []
    added = Growth.headroom

    def headroom(growth: Growth, num: int, work: PlanBuilder) -> int:
        known = added(growth, num, work)
        assert added(growth, num, PlanBuilder(0)) == known, "what is summed anew"
        found.append(known)
        return known

    monkeypatch.setattr(Growth, "headroom", headroom)
    scheduler = make_scheduler(groups, num_blocks=4000, max_num_seqs=40, max_num_batched_tokens=300, max_model_len=128)
    for length in range(1, 40):
        scheduler.add(make_request(length, 20, ignore_eos=True))
    decode(scheduler)
    assert len(found) == 39 and len(set(found)) > 20


def test_the_last_entries_are_given_back_first() -> None:
    """As if each block were sorted by where the tokens of its entry end, in the order of the groups."""
    groups = [full(), *states(16, blocks=3)]
    kv = KVManager(groups, 200, advances=True, enable_prefix_caching=False)
    request = make_request(16, 100)
    assert kv.admit(request, kv.match(request, 15), 16, max_new=100, keep_free=0) is not None
    request.num_computed = 16
    grow(kv, request, 45)
    blocks = [
        ((index // group.parts.blocks + 1) * group.block_size, block)
        for group, table in zip(groups, kv.tables(request), strict=True)
        for index, block in enumerate(table)
    ]
    expected = [block for _, block in sorted(blocks, key=lambda each: each[0], reverse=True) if block]
    kv.release(request)
    assert kv._pool._free_uncached[-len(expected) :] == expected


def make_pair(**fields) -> tuple[KVManager, Request]:
    """A manager of small blocks, and a request of 16 tokens that has computed 15 of 16."""
    kv = KVManager((full(), *states(16, blocks=2)), 100, advances=True, **fields)
    request = make_request(16, 100)
    assert kv.admit(request, kv.match(request, 15), 15, max_new=100, keep_free=0) is not None
    request.num_computed = 15
    return kv, request


def grow(kv: KVManager, request: Request, end: int, *, checks: bool = True) -> list[int]:
    """One token at a time up to `end`: the blocks of its states, nulls too."""
    while request.num_computed < end:
        if request.num_computed == request.num_tokens:
            request.append(1)
        assert kv.reserve(request, 1) is not None
        request.num_computed += 1
        kv.publish(request, request.num_computed)
        kv.take_fresh()
        if checks:
            kv.check()
    return kv.tables(request)[2]


def test_a_new_state_takes_the_blocks_of_the_one_before_it() -> None:
    kv, request = make_pair(enable_prefix_caching=False)
    first = grow(kv, request, 20)
    assert len(first) == 2 and all(first)
    assert grow(kv, request, 28) == first
    assert grow(kv, request, 29) == [0, 0, *first]
    assert grow(kv, request, 80) == [0] * 8 + first


def test_what_a_hash_finds_stays_where_there_is_room_and_goes_where_there_is_none() -> None:
    kv, request = make_pair()
    first = grow(kv, request, 28)
    second = grow(kv, request, 29)
    assert second[:2] == first and not set(second[2:]) & set(first)
    assert grow(kv, request, 40)[2:] == second[2:]
    taken = kv._pool.reserve(kv.num_free_blocks - 6)
    assert grow(kv, request, 45, checks=False) == [0] * 4 + second[2:]
    assert kv._pool._hashes.keys().isdisjoint(second[2:]), "no hash finds what will be overwritten"
    kv._pool.release(taken)
    other = make_request([*request.tokens, 9])
    assert kv.match(other, other.max_hit).num_tokens <= 31, "the state at 32 is nobody's any more"


@pytest.mark.parametrize("why", ["a form", "reasoning", "a reader", "a prompt", "no", "a step of several tokens"])
def test_a_state_stays_where_somebody_may_read_it_again(why: str) -> None:
    """A row that a form holds computes its token again; a prompt's step has several tokens, whose places race."""
    kv, request = make_pair(enable_prefix_caching=False)
    if why == "a form":
        request.params = msgspec.structs.replace(request.params, structured_outputs=StructuredOutputsParams(regex="a+"))
    if why == "reasoning":
        request.params = msgspec.structs.replace(
            request.params, thinking=Thinking(closing="</a>", closing_ids=[3], is_open=True)
        )
    blocks = grow(kv, request, 28)
    if why == "a reader":
        for block in blocks:
            kv._pool.share(block)
    if request.num_computed == request.num_tokens:
        request.append(1)
    if why in ("a prompt", "a step of several tokens"):
        request.append(1)
    assert kv.reserve(request, 2 if why == "a step of several tokens" else 1) is not None
    assert (kv.tables(request)[2] == [0, 0, *blocks]) == (why == "no")
