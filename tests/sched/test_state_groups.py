"""Groups of states beside attention: what is found again, where steps are cut, and what a step may read."""

from __future__ import annotations

import dataclasses
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.cache import policies
from octavo.cache.groups import CacheGroup
from octavo.cache.parts import WHOLE_BLOCKS
from octavo.cache.policies import CUT_TOKENS, MOST_SNAPSHOTS, make_policies
from octavo.sched.kv_manager import KVManager
from sched_harness import Driver, full, make_request, make_scheduler, nothing, sliding, smallest_pool, states
from test_preemption import preempt_at_next_growth

HYBRID = (full(), sliding(6), *states(16, blocks=3))


def run_one(driver: Driver, prompt: list[int], max_tokens: int = 1) -> int:
    """Run a request to its end; how many of its tokens were found."""
    request = make_request(prompt, max_tokens)
    driver.add(request)
    driver.run()
    return request.num_cached


def make_driver(groups: tuple[CacheGroup, ...], **options) -> Driver:
    return Driver(make_scheduler(groups, **{"max_model_len": 1024, "max_num_batched_tokens": 1024, **options}), groups)


@pytest.mark.parametrize("length", [3, 9, 15, 16, 17, 33, 40, 64, 100])
def test_H_4_a_prompt_is_found_again_up_to_its_last_block(length: int) -> None:
    """As a pure attention model would find it: behind a kept state the open chunk's inputs are found too."""
    prompt = list(range(1000, 1000 + length))
    for groups in ((full(),), (full(), sliding(6)), HYBRID):
        driver = make_driver(groups)
        assert run_one(driver, prompt) == 0
        assert run_one(driver, prompt) == (length - 1) // 4 * 4
        assert run_one(driver, [*prompt, 7, 8, 9]) == length // 4 * 4


def test_H_4_a_hit_is_the_longest_border_that_all_groups_share() -> None:
    """Of prompts that part at 40 tokens the third chunk's inputs are nobody's: the hit ends at the border before."""
    shared = list(range(1000, 1040))
    driver = make_driver(HYBRID)
    run_one(driver, shared + list(range(2000, 2060)))
    assert run_one(driver, shared + list(range(3000, 3060))) == 32
    driver = make_driver((full(), *states(16, interval=2)))
    run_one(driver, list(range(1000, 1100)))
    assert run_one(driver, [*range(1000, 1060), 1]) == 32, "every second border is kept"
    assert run_one(driver, [*range(1000, 1090), 1]) == 64
    assert run_one(driver, list(range(1000, 1100))) == 96, "and the prompt's last"


@pytest.mark.parametrize("length", [32, 33, 80])
@pytest.mark.parametrize("first", [3, 8, 10, 12, 15])
def test_H_4_of_a_chunk_that_two_steps_compute_those_blocks_are_found_that_the_first_one_fills(
    first: int, length: int
) -> None:
    """The second step passes the next chunk, and of chunks before it keeps nothing."""
    groups = (full(), *states(16, interval=0))
    driver = make_driver(groups, max_num_batched_tokens=100)
    prompt = list(range(1000, 1000 + length))
    driver.add(make_request(100 - first, 1), make_request(prompt, 1))
    driver.run()
    assert run_one(driver, [*prompt[:15], 1, 2]) == first // 4 * 4


def test_a_longer_turn_finds_the_last_state_of_the_request_before() -> None:
    driver = make_driver((full(), *states(16, interval=0, blocks=2)))
    first = make_request(30, 40)
    driver.add(first)
    driver.run()
    assert run_one(driver, [*first.tokens, 1, 2, 3]) == 68, "64, and inputs behind them"
    assert run_one(driver, first.tokens[:50]) == 28, "16, the prompt's last border, and inputs behind it"


def test_a_state_is_not_read_in_the_step_that_writes_it() -> None:
    """Rows of a step run side by side: K and V are stored before any is read, a state is not."""
    driver = make_driver(HYBRID)
    prompt = list(range(1000, 1040))
    one, other = make_request([*prompt, 1]), make_request([*prompt, 2])
    driver.add(one, other)
    plan = driver.step()
    assert len(plan.new_rows) == 2
    assert [new.num_computed for new in plan.new_rows] == [0, 0]
    driver.run()
    assert run_one(driver, [*prompt, 3]) == 40


def test_what_the_open_chunk_brings_is_not_read_in_the_step_that_writes_it() -> None:
    """An update follows from those before it, which a row beside is computing: no state is needed for 40 of 64."""
    driver = make_driver((full(), *states(64, blocks=2)))
    prompt = list(range(1000, 1040))
    one, other = make_request([*prompt, 1]), make_request([*prompt, 2])
    driver.add(one, other)
    assert [new.num_computed for new in driver.step().new_rows] == [0, 0]
    driver.run()
    assert run_one(driver, [*prompt, 3]) == 40


@pytest.mark.parametrize("interval", [0, 1, 3])
def test_a_step_passes_so_many_kept_borders_that_all_are_kept(interval: int) -> None:
    groups = (full(), *states(16, interval=interval))
    driver = make_driver(groups)
    prompt = list(range(2000, 2000 + 900))
    driver.add(make_request(prompt, 1))
    ends, done = [], 0
    while driver.scheduler.num_unfinished:
        done += int(driver.step().num_tokens.sum())
        ends.append(done)
    step = 16 * interval
    most = max(MOST_SNAPSHOTS, CUT_TOKENS // max(step, 1)) * step
    assert ends == ([*range(most, 900 - step, most), 900] if interval else [900])
    for length in range(20, 900, 37) if interval else (900,):
        kept = (length - 1) // step * step if interval else (length - 1) // 16 * 16
        assert run_one(driver, prompt[:length]) >= kept
    assert run_one(make_driver(groups, enable_chunked_prefill=False), prompt) == 0, "whole prompts are not cut"


@pytest.mark.parametrize("depth", [0, 1], ids=["sync", "async"])
@pytest.mark.parametrize("num_steps", range(1, 5))
def test_a_row_that_is_preempted_beside_a_prompt_that_is_cut_does_not_sample(num_steps: int, depth: int, monkeypatch):
    """The prompt's row does not sample in such a step: places among rows are none among those that sample."""
    monkeypatch.setattr(policies, "CUT_TOKENS", 0)
    groups = (full(), *states(16, interval=1))
    driver = make_driver(groups)
    first, second = make_request(900, 6), make_request(20, 40)
    driver.add(first, second)
    for _ in range(num_steps):
        driver.step(depth)
    assert first.num_computed < 900
    preempt_at_next_growth(driver, monkeypatch)
    driver.run(depth)
    assert (first.num_preemptions, second.num_preemptions) == (0, 1)
    assert [len(request.tokens) for request in (first, second)] == [906, 60]


@pytest.mark.parametrize("unit", [1, 16])
@pytest.mark.parametrize("lookahead", [0, 1, 7])
@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
def test_one_request_fits_the_smallest_pool_wherever_its_steps_end(block_size: int, lookahead: int, unit: int) -> None:
    """Inputs of a chunk before a step, of the one behind it, and of tokens ahead of both may lie in a block each."""
    inputs, state = states(16, block_size, blocks=20, unit=unit)
    groups = (full(block_size), inputs, dataclasses.replace(state, parts=WHOLE_BLOCKS))
    for budget in (30, 48, 65, 95, 96, 126):
        driver = make_driver(
            groups,
            num_drafts=7,
            num_lookahead=lookahead,
            num_blocks=smallest_pool(groups, 520, budget + 7 + lookahead, drafts=True),
            max_model_len=520,
            max_num_batched_tokens=budget,
        )
        driver.add(make_request(400, 119))
        driver.run(1)


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from([(4, 4), (16, 4), (16, 16), (16, 64), (64, 16)]),
    st.sampled_from([0, 0, 1, 7]),
    st.integers(0, 7),
    st.integers(1, 70),
    st.booleans(),
    st.integers(0, 1),
    st.integers(0, 2**32),
)
def test_no_row_ever_has_more_inputs_or_states_than_a_plan_counts(
    sizes: tuple[int, int], num_drafts: int, lookahead: int, budget: int, caching: bool, depth: int, seed: int
) -> None:
    """Several rows, hits, preemptions and results that come late, in a pool that one request fills."""
    chunk, block_size = sizes
    rng = random.Random(seed)
    num_drafts = min(num_drafts, chunk // 2 - 1)
    unit = 1 if num_drafts else min(sizes)
    lookahead = min(lookahead, chunk) * (num_drafts > 0)
    groups = (full(block_size), *states(chunk, block_size, blocks=2, unit=unit))
    policies, most = make_policies(groups), budget + num_drafts + lookahead
    driver = make_driver(
        groups,
        num_drafts=num_drafts,
        num_lookahead=lookahead,
        num_blocks=smallest_pool(groups, 160, most, drafts=num_drafts > 0) + rng.choice([0, 0, 5, 100]),
        max_model_len=160,
        max_num_batched_tokens=budget,
        max_num_seqs=min(budget, 4),
        enable_prefix_caching=caching,
        advances=not num_drafts and rng.random() < 0.5,
    )
    shared = list(range(5000, 5100))
    for _ in range(6):
        prompt = shared[: rng.randrange(100)] + [rng.randrange(1000) for _ in range(rng.randint(1, 40))]
        driver.add(make_request(prompt, rng.randint(1, 20)))
    for _ in range(6000):
        if not driver.scheduler.num_unfinished:
            return
        driver.step(depth)
        for entry in driver.scheduler.kv._entries.values():
            for group, table, policy in list(zip(groups, entry.tables, policies, strict=True))[1:]:
                held = sum(block != 0 for block in table) / group.parts.blocks
                assert held <= policy.peak_entries(160, most, drafts=num_drafts > 0)
    pytest.fail("a request waits for ever")


def test_without_drafts_two_entries_of_inputs_are_enough_where_a_chunk_fits_a_block() -> None:
    """Four were counted: two of them for tokens ahead of what is known, and there are none."""
    inputs, _ = states(16, 64)
    (policy,) = make_policies([inputs])
    assert [policy.peak_entries(1000, 512, drafts=drafts) for drafts in (False, True)] == [2, 4]
    driver = make_driver((full(64), *states(16, 64, unit=16)), max_num_batched_tokens=100)
    driver.add(make_request(1000, 1))
    held = []
    while driver.scheduler.num_unfinished:
        driver.step()
        held += [sum(map(bool, entry.tables[1])) for entry in driver.scheduler.kv._entries.values()]
    assert max(held) == 2


def test_attention_cuts_nowhere() -> None:
    assert not KVManager((full(), sliding(6)), 100).cuts
    assert all(policy.cut(3, 1000) == 1000 for policy in make_policies((full(), sliding(6), *states(16, interval=0))))


KINDS = [(full(),), (full(8),), (sliding(9),), states(8), states(16, blocks=2), states(8, interval=3), states(32, 8)]


@settings(deadline=None, max_examples=80)
@given(st.lists(st.sampled_from(KINDS), min_size=1, max_size=3), st.integers(0, 2**32))
def test_H_4_a_hit_is_the_longest_that_all_groups_can_continue_from(kinds, seed: int) -> None:
    """Against all lengths, one by one, after some traffic and with some blocks lost."""
    found = [group for kind in kinds for group in kind]
    unit = min(group.block_size for group in found)
    groups = tuple(dataclasses.replace(group, unit=unit) if group.kind == "state" else group for group in found)
    rng = random.Random(seed)
    kv = KVManager(groups, 400, secret=b"test")
    tokens = [rng.randrange(100) for _ in range(90)]
    for _ in range(4):
        request = make_request([*tokens[: rng.randrange(1, 90)], 500 + rng.randrange(3)])
        hit = kv.match(request, request.max_hit)
        assert kv.admit(request, hit, request.num_tokens, max_new=100, keep_free=0) is not None
        request.num_computed = request.num_tokens
        kv.publish(request, request.num_computed)
        kv.take_fresh()
        kv.release(request)
        kv.check()
    for cached in kv._pool._cached:
        for name in [name for name in cached if rng.random() < 0.1]:
            del kv._pool._hashes[cached.pop(name)]
    request = make_request(tokens)
    hit = kv.match(request, 89)
    names: list[bytes] = []
    kv._chain.extend(names, tokens, "", len(tokens) // kv.block_size)
    column = 0
    is_there: list[list[bool]] = []
    for group in groups:
        ratio = group.block_size // kv.block_size
        columns = [kv._pool.cached(column + j) for j in range(group.parts.blocks)]
        is_there.append([all(name in own for own in columns) for name in names[ratio - 1 :: ratio]])
        column += len(columns)

    def accepted(length: int) -> bool:
        for group, policy, own in zip(groups, make_policies(groups), is_there, strict=True):
            if group.kind != "state" and length % group.block_size:
                return False
            if not all(own[policy.first_needed(length) : group.num_entries(length)]):
                return False
        return True

    assert hit.num_tokens == max(length for length in range(90) if accepted(length))
    for group, table in zip(groups, hit.tables, strict=True):
        assert len(table) == group.num_blocks(hit.num_tokens)


def test_H_5_what_a_failed_load_gives_back_is_zeroed_when_it_is_handed_out_again() -> None:
    """And what a load fills is not: its bytes come whole."""
    groups = tuple(dataclasses.replace(group, zero_fresh_blocks=True) for group in (full(), *states(16, blocks=2)))
    kv = KVManager(groups, 100)
    assert kv.can_load and not KVManager((full(), nothing()), 100).can_load
    request = make_request(70)
    tables = kv.admit(request, kv.match(request, 69), 64, max_new=70, keep_free=0, loads=True)
    assert tables is not None and not kv.take_fresh()
    attention, inputs, kept = ([block for block in table if block] for table in tables)
    assert (len(attention), len(inputs), len(kept)) == (16, 0, 2), "of states the one at the border"
    assert kv.finish_load(request, 0, 64, frozenset(kept[1:])) == 0, "half a state is none"
    assert [sum(map(bool, table)) for table in kv.tables(request)] == [0, 0, 0]
    assert kv.reserve(request, 20) is not None
    assert sorted(kv.take_fresh()) == sorted(block for table in kv.tables(request) for block in table if block)


@pytest.mark.parametrize(
    ("end", "bad", "found"),
    [
        (64, (), 64),
        (64, ((2, 3),), 24),  # the state at 64: what the hit before it reads goes on
        (64, ((0, 9),), 24),  # K and V of 36 to 39: no state behind 24 is there
        (70, ((1, 17),), 68),  # what 68 and 69 bring to the next state
        (70, ((0, 6),), 24),
        (32, ((0, 6),), 24),
        (40, ((1, 9),), 36),
        (40, ((2, 1),), 24),
    ],
)
def test_C_6_a_count_falls_to_where_a_state_is(end: int, bad: tuple[tuple[int, int], ...], found: int) -> None:
    """A request of 75 tokens, of which 24 were found here, behind a state at 16. bad: (group, entry)."""
    groups = (full(), *states(16, blocks=2))
    kv = KVManager(groups, 200)
    first, request = make_request(list(range(500, 530))), make_request([*range(500, 524), *range(900, 951)])
    assert kv.admit(first, kv.match(first, 29), 24, max_new=100, keep_free=0) is not None
    first.num_computed = 24
    kv.publish(first, 24)
    kv.take_fresh()
    hit = kv.match(request, 74)
    assert hit.num_tokens == 24
    tables = kv.admit(request, hit, end, max_new=100, keep_free=0, loads=True)
    assert tables is not None
    lost = frozenset(tables[group][entry * groups[group].parts.blocks] for group, entry in bad)
    assert 0 not in lost
    assert kv.finish_load(request, 24, end, lost if bad else None) == found
    kv.check()
    state = kv.tables(request)[2]
    assert all(state[2 * (found // 16 - 1) :][:2]) and not any(state[: 2 * (found // 16 - 1)])
    kv.release(request)
    kv.release(first)
    kv.check()
    assert kv.usage == 0.0
