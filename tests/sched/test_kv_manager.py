"""KVManager: hits that suit all groups, what slides out, what becomes findable and when."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from block_states import BlockState, state_of
from octavo.request.request import Request
from octavo.sched.kv_manager import KVManager
from sched_harness import BLOCK, chunked, first_seen, full, make_request, nothing, sliding

PROMPT = list(range(100, 120))  # 5 blocks


def make_kv(*groups, num_blocks=100, caching=True):
    return KVManager(groups or (full(),), num_blocks, enable_prefix_caching=caching, secret=b"test")


def admit(kv: KVManager, request: Request, num_new: int | None = None, *, max_new: int = 1000, keep_free: int = 0):
    """Like the scheduler: match, admit, publish, count as computed. Returns (hit tokens, block ids)."""
    hit = kv.match(request, request.num_tokens - 1)
    num_tokens = request.num_tokens if num_new is None else hit.num_tokens + num_new
    blocks = kv.admit(request, hit, num_tokens, max_new=max_new, keep_free=keep_free)
    if blocks is not None:
        kv.publish(request, num_tokens)
        request.num_computed = num_tokens
    kv.check()
    return hit.num_tokens, blocks


def compute(kv: KVManager, request: Request, num_new: int):
    blocks = kv.reserve(request, num_new)
    if blocks is not None:
        kv.publish(request, request.num_computed + num_new)
        request.num_computed += num_new
    kv.check()
    return blocks


def generate(kv: KVManager, request: Request, num_tokens: int) -> None:
    for token in range(num_tokens):
        request.tokens.append(token)
        if request.num_computed % BLOCK == 0:
            assert compute(kv, request, 1) is not None
        else:
            request.num_computed += 1


@pytest.mark.parametrize("caching", [True, False])
def test_reserving_for_many_is_reserving_for_each(caching):
    each, all_at_once = make_kv(caching=caching), make_kv(caching=caching)
    pairs = [
        (make_request(PROMPT), make_request(PROMPT)),
        (make_request(list(range(BLOCK))), make_request(list(range(BLOCK)))),
    ]
    for request, other in pairs:
        admit(each, request)
        admit(all_at_once, other)
    for _ in range(3):
        starts = [other.num_computed for _, other in pairs]
        expected = [compute(each, request, 1) for request, _ in pairs]
        assert all_at_once.reserve_each([other for _, other in pairs], starts, [at + 1 for at in starts]) == [
            blocks[0][0] for blocks in expected
        ]
        for request, other in pairs:
            other.num_computed += 1
            for one in (request, other):
                one.tokens.extend(range(BLOCK))
                one.num_computed += BLOCK - 1
        all_at_once.check()
    probe = make_request([*pairs[0][0].tokens, 1])
    found = [kv.match(probe, probe.num_tokens - 1).num_tokens for kv in (each, all_at_once)]
    assert found == [caching * (20 + 2 * BLOCK)] * 2


def test_what_takes_a_look_at_each_is_not_reserved_for_many():
    for kv in (make_kv(full(), full()), make_kv(sliding(8))):
        request = make_request(PROMPT)
        admit(kv, request)
        assert kv.reserve_each([request], [request.num_computed], [request.num_computed + 1]) is None
    kv = make_kv(num_blocks=1 + 5 + 2)
    requests = [make_request(PROMPT[:BLOCK]) for _ in range(2)]
    for request in requests:
        admit(kv, request, BLOCK)
    others = make_request(list(range(300, 300 + 4 * BLOCK)))
    admit(kv, others)
    assert (
        kv.num_free_blocks == 1
        and kv.reserve_each(requests, [BLOCK, BLOCK], [BLOCK + 1] * 2) is None
        and kv.num_free_blocks == 1
    )
    assert kv.reserve_each(requests[:1], [BLOCK], [BLOCK + 1]) is not None
    assert kv.reserve_each(requests[:1], [BLOCK], [BLOCK + 1]) is None  # its last block has room


def test_a_hit_leaves_one_token_to_compute():
    kv = make_kv()
    admit(kv, make_request(PROMPT))
    assert admit(kv, make_request(PROMPT))[0] == len(PROMPT) - BLOCK
    assert admit(kv, make_request([*PROMPT, 1]))[0] == len(PROMPT)


def test_a_hit_shares_blocks_with_their_owner():
    kv = make_kv()
    _, first = admit(kv, make_request(PROMPT))
    free = kv.num_free_blocks
    _, second = admit(kv, make_request([*PROMPT, 1]))
    assert second[0][:5] == first[0]
    assert free - kv.num_free_blocks == 1


def test_only_tokens_of_planned_steps_can_be_hit():
    kv = make_kv()
    admit(kv, make_request(PROMPT), num_new=10)
    assert admit(kv, make_request(PROMPT))[0] == 8


def test_generated_tokens_can_be_hit():
    kv = make_kv()
    request = make_request(PROMPT)
    admit(kv, request)
    generate(kv, request, 4)  # fills a block exactly: it is committed when it is freed, if not before
    kv.release(request)
    assert admit(kv, make_request([*request.tokens, 1]))[0] == 24


def test_a_token_in_flight_is_not_committed():
    """The last of 20 computed tokens is not known yet: its block has no name."""
    kv = make_kv()
    request = make_request(PROMPT[:19])
    admit(kv, request)
    request.num_in_flight, request.num_computed = 1, 20
    kv.release(request)
    assert admit(kv, make_request([*PROMPT, 1]))[0] == 16


def test_freed_blocks_are_hit_until_they_are_reused():
    kv = make_kv(num_blocks=7)
    request = make_request(PROMPT)
    admit(kv, request)
    kv.release(request)
    other = make_request(16)  # 4 blocks and room for one token: one fresh block, then three from the tail
    admit(kv, other)
    kv.release(other)
    assert admit(kv, make_request(PROMPT))[0] == 2 * BLOCK


def test_salts_do_not_share():
    kv = make_kv()
    admit(kv, make_request(PROMPT, salt="a"))
    assert admit(kv, make_request(PROMPT, salt="b"))[0] == 0
    assert admit(kv, make_request(PROMPT, salt="a"))[0] == 16


def test_nothing_is_hit_with_caching_off():
    kv = make_kv(caching=False)
    admit(kv, make_request(PROMPT))
    assert admit(kv, make_request(PROMPT))[0] == 0


def test_a_failed_request_leaves_nothing_to_hit():
    kv = make_kv(full(), sliding(6))
    request = make_request(PROMPT)
    admit(kv, request)
    generate(kv, request, 9)  # what slid out is free already, and findable
    kv.discard(request)
    kv.check()
    assert kv.usage == 0.0
    assert admit(kv, make_request(request.tokens))[0] == 0


def test_reset_waits_until_nothing_is_held():
    kv = make_kv()
    request = make_request(PROMPT)
    admit(kv, request)
    assert not kv.reset_prefix_cache()
    kv.release(request)
    assert kv.reset_prefix_cache()
    assert admit(kv, make_request(PROMPT))[0] == 0


def test_admission_asks_for_room_for_all_known_tokens_and_one_more():
    kv = make_kv(num_blocks=6)
    assert admit(kv, make_request(PROMPT), num_new=4) == (0, None)
    assert kv.num_free_blocks == 5
    assert admit(kv, make_request(PROMPT[:19]), num_new=4)[1] == [[1]]


def test_admission_leaves_the_blocks_that_are_to_stay_free():
    kv = make_kv(num_blocks=8)
    assert admit(kv, make_request(PROMPT), keep_free=2)[1] is None
    assert admit(kv, make_request(PROMPT), keep_free=1)[1] is not None


def test_a_hit_on_held_blocks_counts_as_room():
    kv = make_kv(num_blocks=8)
    admit(kv, make_request(PROMPT))
    assert admit(kv, make_request([*PROMPT, 1]))[1] is not None


def test_a_hit_on_free_blocks_does_not_count_as_room():
    kv = make_kv(num_blocks=8)
    request = make_request(PROMPT)
    admit(kv, request)
    kv.release(request)
    assert admit(kv, make_request(8), num_new=8)[1] is not None  # leaves 5 blocks, of which the hit needs all
    assert admit(kv, make_request([*PROMPT, 1])) == (20, None)


def test_growth_that_does_not_fit_takes_nothing():
    kv = make_kv(num_blocks=7)
    request = make_request(PROMPT)
    admit(kv, request)
    request.tokens.extend(range(9))
    assert compute(kv, request, 9) is None
    assert kv.num_free_blocks == 1
    assert compute(kv, request, 4) == [[6]]


def test_a_step_inside_a_block_needs_no_block():
    kv = make_kv()
    request = make_request(PROMPT[:10])
    admit(kv, request, num_new=5)
    assert compute(kv, request, 3) == []


def test_what_slid_out_of_the_window_is_given_back():
    """At a window of 6 the query at 20 reads from 15 on: blocks 0 to 2 of the sliding group are dead."""
    kv = make_kv(full(), sliding(6))
    request = make_request(PROMPT)
    admit(kv, request)
    free = kv.num_free_blocks
    request.tokens.append(1)
    new = compute(kv, request, 1)
    assert [len(ids) for ids in new] == [1, 1]
    assert kv.num_free_blocks == free + 3 - 2


def test_a_long_decode_holds_no_more_than_its_window():
    kv = make_kv(sliding(6))
    request = make_request(PROMPT)
    admit(kv, request)
    generate(kv, request, 60)
    assert 99 - kv.num_free_blocks <= 3


def test_a_hit_holds_null_blocks_before_the_window():
    kv = make_kv(full(), sliding(6))
    _, first = admit(kv, make_request(PROMPT))
    num_hit, second = admit(kv, make_request([*PROMPT, 1]))
    assert num_hit == 20
    assert second[0][:5] == first[0]
    assert second[1][:5] == [0, 0, 0, *first[1][3:]]


def test_a_window_continues_where_only_its_last_blocks_are_left():
    """The first blocks of the sliding group were handed on; the window does not need them."""
    kv = make_kv(sliding(6), num_blocks=7)
    request = make_request(PROMPT)
    admit(kv, request)
    generate(kv, request, 1)
    admit(kv, make_request(8))
    kv.release(request)
    assert admit(kv, make_request([*PROMPT, 1]))[0] == 20


def test_a_hit_is_the_longest_that_all_groups_take():
    """Each window has its own end; the common one is found by going round until no group shortens it."""
    kv = make_kv(full(), sliding(6), sliding(14), num_blocks=200)
    request = make_request(PROMPT)
    admit(kv, request)
    kv.release(request)
    pool, names = kv._pool, request.block_hashes
    assert admit(kv, make_request([*PROMPT, 1]))[0] == 20
    pool._unpublish(pool.cached(1)[names[4]])  # the window of 6 has blocks 0 to 3: at most 16
    assert kv.match(make_request([*PROMPT, 1]), 20).num_tokens == 16
    pool._unpublish(pool.cached(2)[names[2]])  # the window of 14 needs 3 full blocks and a half: at most 8
    assert kv.match(make_request([*PROMPT, 1]), 20).num_tokens == 8
    pool._unpublish(pool.cached(1)[names[0]])  # at 8 the window of 6 reads from 3 on: 0
    assert kv.match(make_request([*PROMPT, 1]), 20).num_tokens == 0


def test_hits_are_counted_once_per_request():
    kv = make_kv()
    admit(kv, make_request(PROMPT))
    request = make_request(PROMPT)
    admit(kv, request)
    kv.release(request)
    request.num_preemptions = 1
    admit(kv, request)
    assert (kv.stats.queries, kv.stats.hits) == (40, 16)


def test_one_request_is_admitted_once():
    kv = make_kv()
    request = make_request(PROMPT)
    admit(kv, request)
    with pytest.raises(AssertionError, match="admitted once"):
        admit(kv, request)


def test_block_sizes_divide_each_other():
    with pytest.raises(AssertionError, match="divide each other"):
        make_kv(full(4), sliding(6, 6))


def test_a_hit_ends_where_a_block_of_every_group_ends():
    kv = make_kv(full(), sliding(6, block_size=8))
    _, blocks = admit(kv, make_request(PROMPT))
    assert [len(table) for table in blocks] == [5, 3]
    hit, blocks = admit(kv, make_request([*PROMPT, 1]))
    assert hit == 16
    assert [len(table) for table in blocks] == [6, 3]


def test_a_chunk_needs_nothing_of_the_chunks_before_it():
    kv = make_kv(chunked(8))
    request = make_request(PROMPT)  # 20 tokens: what is left of the chunks before the last one is free
    admit(kv, request)
    generate(kv, request, 5)
    kv.release(request)
    assert kv.match(make_request([*request.tokens, 1]), 25).tables == [[0, 0, 0, 0, 0, 0]]
    assert kv.match(make_request([*PROMPT, 1]), 20).tables[0][:4] == [0] * 4


@pytest.mark.parametrize("groups", [(nothing(),), (full(), nothing()), (full(), sliding(6), nothing())])
def test_no_prefix_is_found_where_a_group_cannot_continue(groups):
    kv = make_kv(*groups)
    request = make_request(PROMPT)
    assert [len(table) for table in admit(kv, request)[1]] == [group.num_blocks(20) for group in groups]
    kv.release(request)
    assert admit(kv, make_request(PROMPT))[0] == 0


KINDS = [full(), full(8), sliding(1), sliding(6), sliding(9, 8), sliding(30), chunked(4), chunked(6), chunked(8, 16)]


@given(st.lists(st.sampled_from(KINDS), min_size=1, max_size=3), st.integers(0, 2**32), st.integers(0, 48))
def test_a_hit_is_the_longest_that_all_groups_accept(groups, seed, limit):
    """Against all lengths, one by one: every token that a next query reads lies in a findable block."""
    rng = random.Random(seed)
    kv = make_kv(*groups)
    tokens = list(range(100, 148))
    admit(kv, make_request(tokens))
    for name in {rng.randrange(len(groups)): None for _ in range(4)}:  # blocks of single groups are lost
        cached = kv._pool._cached[name]
        for found in [found for found in cached if rng.random() < 0.3]:
            del kv._pool._hashes[cached.pop(found)]
    request = make_request(tokens)
    hit = kv.match(request, limit)
    names: list[bytes] = []
    kv._chain.extend(names, tokens, "", len(tokens) // kv.block_size)
    findable = [
        [
            names[(index + 1) * group.block_size // kv.block_size - 1] in kv._pool.cached(g)
            for index in range(limit // group.block_size)
        ]
        for g, group in enumerate(groups)
    ]

    def accepted(length: int) -> bool:
        return all(
            length % group.block_size == 0
            and all(findable[g][p // group.block_size] for p in range(first_seen(group, length), length))
            for g, group in enumerate(groups)
        )

    assert hit.num_tokens == max(length for length in range(limit + 1) if accepted(length))
    for group, table in zip(groups, hit.tables, strict=True):
        assert len(table) == hit.num_tokens // group.block_size
        first = first_seen(group, hit.num_tokens) // group.block_size
        assert all(block == 0 for block in table[:first]) and all(table[first:])


@pytest.mark.parametrize("size", [48, 144, 528])
def test_K4_G3_blocks_of_any_size_stand_beside_layers_that_keep_nothing(size) -> None:
    kv = make_kv(full(size), nothing())
    request = make_request(list(range(100, 100 + size + 1)))
    found, blocks = admit(kv, request)
    assert found == 0 and [len(table) for table in blocks] == [2, 0]
    kv.release(request)
    kv.check()
    assert kv.num_free_blocks == 99


def test_V_2_no_block_of_older_weights_is_found_and_V_4_a_version_that_comes_back_finds_its_own():
    kv = make_kv()
    for version in ("", "1"):
        assert kv.set_weights_version(version) is (version != "")
        request = make_request(PROMPT)
        assert admit(kv, request)[0] == 0
        kv.release(request)
    for version in ("", "1"):
        kv.set_weights_version(version)
        assert kv.match(make_request([*PROMPT, 1]), 20).num_tokens == 20
    kv.set_weights_version("2")
    assert kv.match(make_request([*PROMPT, 1]), 20).num_tokens == 0


def test_V_3_blocks_of_a_request_that_runs_through_an_update_are_not_published():
    kv = make_kv()
    request = make_request(PROMPT)
    admit(kv, request, 10)
    kv.set_weights_version("1")
    assert compute(kv, request, 10) == [[4, 5]]
    generate(kv, request, 9)
    kv.release(request)
    assert request.block_hashes == [] and kv.match(make_request([*PROMPT, 1]), 20).num_tokens == 0
    kv.set_weights_version("")
    assert kv.match(make_request([*PROMPT, 1]), 20).num_tokens == 8


def test_what_is_held_is_found_and_not_handed_on():
    kv = make_kv(num_blocks=7)
    request = make_request(PROMPT)
    _, blocks = admit(kv, request)
    hold = kv.hold(request, until=1.0)
    kv.check()
    assert {state_of(kv._pool, block) for block in blocks[0]} == {BlockState.HELD}
    assert (kv.num_held_blocks, kv.num_free_blocks, hold.until) == (5, 1, 1.0)
    assert admit(kv, make_request(8))[1] is None
    sharing = make_request([*PROMPT, 1])
    assert admit(kv, sharing)[0] == 20 and kv.num_held_blocks == 0
    kv.release_hold(hold)
    kv.check()
    kv.release(sharing)
    assert kv.usage == 0.0
    with pytest.raises(AssertionError, match="released before"):
        kv.release_hold(hold)


@pytest.mark.parametrize("num_next", [1, 2])
def test_a_hit_is_of_blocks_behind_which_the_same_tokens_stood(num_next):
    """For drafters whose entries follow from them: only where texts part at a border one block fewer is shared."""
    kv = KVManager((full(),), 100, secret=b"test", num_next_tokens=num_next)
    first = make_request(PROMPT)
    admit(kv, first)
    generate(kv, first, 3 * BLOCK)
    known = first.tokens
    published = (len(known) - BLOCK + 1 - num_next) // BLOCK * BLOCK  # output is named as its next block is reserved
    for end in range(num_next + 1, len(known) - num_next):
        parted = make_request([*known[:end], 7777, 7778])
        hit = kv.match(parted, parted.num_tokens - 1)
        assert hit.num_tokens == min(end - num_next, published) // BLOCK * BLOCK
    # both texts have their own block in front of the border, and those behind find it
    other = make_request([*PROMPT[:12], *range(200, 210)])
    assert admit(kv, other)[0] == 12 - BLOCK
    assert admit(kv, make_request([*other.tokens, 1, 2]))[0] == 20
    kv.release(first)
    assert admit(kv, make_request([*known, 5, 6]))[0] == 28, "what stands behind the last block nobody knew"
    assert kv.reserve_each([], [], []) is None, "each is looked at: a name may wait"


@pytest.mark.parametrize("caching", [True, False])
def test_reserving_for_drafts_of_many_is_reserving_for_each(caching):
    """Rows whose drafts reach into their next block: the same blocks, and the same content is found."""
    each, all_at_once = make_kv(caching=caching), make_kv(caching=caching)
    rows = [list(range(start, start + 6)) for start in (100, 200, 300)]
    ones, others = ([make_request(tokens) for tokens in rows] for _ in range(2))
    for kv, requests in ((each, ones), (all_at_once, others)):
        for request in requests:
            admit(kv, request)
            request.tokens.append(7)
    for kv, requests in ((each, ones), (all_at_once, others)):
        if kv is each:
            expected = [compute(kv, request, 4)[0][0] for request in requests]
        else:
            assert kv.reserve_each(requests, [6] * 3, [10] * 3) == expected
            assert kv.reserve_each(requests, [6] * 3, [10] * 3) is None, "there is room"
            assert kv.reserve_each(requests, [6] * 3, [18] * 3) is None, "more than a block"
        kv.check()
        found = [kv.match(make_request([*tokens, 7, 8, 9]), 8).num_tokens for tokens in rows]
        assert found == [BLOCK if caching else 0] * 3
