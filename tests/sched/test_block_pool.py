"""BlockPool and HashChain."""

from __future__ import annotations

import pytest

from octavo.sched.block_pool import BlockPool, HashChain


def test_the_null_block_is_never_handed_out():
    pool = BlockPool(5, 1)
    assert sorted(pool.reserve(4)) == [1, 2, 3, 4]
    assert pool.num_free == 0


def test_taking_more_than_is_free_is_a_bug():
    with pytest.raises(AssertionError, match="num_free"):
        BlockPool(3, 1).reserve(3)


def test_the_least_recently_released_findable_block_is_reused_first():
    pool = BlockPool(4, 1)
    a, b, c = pool.reserve(3)
    for block in (a, b, c):
        pool.publish([block], 0, [bytes([block])])
    pool.release([b])
    pool.release([c, a])
    assert pool.reserve(3) == [b, c, a]


def test_a_block_without_a_hash_is_reused_before_any_findable_one():
    pool = BlockPool(3, 1)
    a, b = pool.reserve(2)
    pool.publish([a], 0, [b"a"])
    pool.release([a])
    pool.release([b])
    assert pool.reserve(1) == [b]
    assert b"a" in pool.cached(0)


def test_a_freed_block_is_found_until_it_is_handed_out():
    pool = BlockPool(2, 1)
    (block,) = pool.reserve(1)
    pool.publish([block], 0, [b"h"])
    pool.release([block])
    assert pool.cached(0)[b"h"] == block
    pool.reserve(1)
    assert b"h" not in pool.cached(0)


def test_a_shared_block_is_free_after_its_last_owner():
    pool = BlockPool(2, 1)
    (block,) = pool.reserve(1)
    pool.share(block)
    pool.release([block])
    assert pool.num_free == 0
    pool.release([block])
    assert pool.num_free == 1


def test_sharing_takes_a_free_block_off_the_free_list():
    pool = BlockPool(3, 1)
    block, _ = pool.reserve(2)
    pool.publish([block], 0, [b"h"])
    pool.release([block])
    pool.share(block)
    assert pool.num_free == 0
    pool.check([[block], [2]])


def test_groups_do_not_find_each_others_blocks():
    pool = BlockPool(3, 2)
    a, b = pool.reserve(2)
    pool.publish([a], 0, [b"h"])
    assert b"h" not in pool.cached(1)
    pool.publish([b], 1, [b"h"])
    assert (pool.cached(0)[b"h"], pool.cached(1)[b"h"]) == (a, b)


def test_the_second_block_of_equal_content_stays_without_a_hash():
    pool = BlockPool(3, 1)
    a, b = pool.reserve(2)
    pool.publish([a], 0, [b"h"])
    pool.publish([b], 0, [b"h"])
    pool.release([b])
    assert pool.cached(0)[b"h"] == a
    pool.check([[a]])


def test_forgotten_content_is_found_in_no_group():
    pool = BlockPool(3, 2)
    a, b = pool.reserve(2)
    pool.publish([a], 0, [b"h"])
    pool.publish([b], 1, [b"h"])
    pool.unpublish(b"h")
    assert not pool.cached(0) and not pool.cached(1)
    pool.check([[a, b]])


def test_reset_waits_for_the_last_owner():
    pool = BlockPool(2, 1)
    (block,) = pool.reserve(1)
    pool.publish([block], 0, [b"h"])
    assert not pool.reset_prefix_cache()
    assert b"h" in pool.cached(0)
    pool.release([block])
    assert pool.reset_prefix_cache()
    assert not pool.cached(0)
    pool.check([])


def test_the_check_sees_a_reference_without_an_owner():
    pool = BlockPool(3, 1)
    a, b = pool.reserve(2)
    with pytest.raises(AssertionError, match=f"block {b}"):
        pool.check([[a]])


def test_the_check_sees_an_owner_without_a_reference():
    pool = BlockPool(3, 1)
    (block,) = pool.reserve(1)
    with pytest.raises(AssertionError, match=f"block {block}"):
        pool.check([[block], [block]])


def names(chain: HashChain, tokens: list[int], salt: str = "") -> list[bytes]:
    hashes: list[bytes] = []
    chain.extend(hashes, tokens, salt, len(tokens) // chain.block_size)
    return hashes


def test_a_block_is_named_by_its_tokens_and_all_before_them():
    chain = HashChain(2, secret=b"s")
    a, b = names(chain, [1, 2, 3, 4]), names(chain, [9, 2, 3, 4])
    assert a[1] != b[1]
    assert names(chain, [1, 2, 3, 5])[0] == a[0]


def test_names_do_not_depend_on_how_they_were_extended():
    chain, hashes = HashChain(2, secret=b"s"), []
    for num_blocks in (1, 1, 3):
        chain.extend(hashes, [1, 2, 3, 4, 5, 6], "", num_blocks)
    assert hashes == names(chain, [1, 2, 3, 4, 5, 6])


@pytest.mark.parametrize(
    ("chain", "salt"),
    [
        (HashChain(2, secret=b"s"), "tenant"),
        (HashChain(2, secret=b"other"), ""),
        (HashChain(2, secret=b"s", identity=b"adapter"), ""),
        (HashChain(2), ""),
    ],
    ids=["salt", "secret", "identity", "drawn secret"],
)
def test_names_differ_by_salt_secret_and_identity(chain, salt):
    assert names(chain, [1, 2], salt) != names(HashChain(2, secret=b"s"), [1, 2])


def test_identity_and_salt_do_not_run_together():
    a, b = HashChain(2, secret=b"s", identity=b"ab"), HashChain(2, secret=b"s", identity=b"a")
    assert a.root("c") != b.root("bc")


def test_token_ids_use_all_32_bits():
    chain = HashChain(1, secret=b"s")
    assert len({names(chain, [token])[0] for token in (0, 1, 2**16, 2**24, 2**32 - 1)}) == 5


def test_a_block_may_be_named_by_tokens_behind_it_as_well():
    """As the entries of some drafters' layers follow from them."""
    chain, plain = HashChain(2, secret=b"s", num_ahead=1), HashChain(2, secret=b"s")
    assert [chain.num_named(count) for count in range(6)] == [0, 0, 0, 1, 1, 2]
    hashes: dict[int, list[bytes]] = {behind: [] for behind in (5, 6)}
    for behind, own in hashes.items():
        chain.extend(own, [1, 2, 3, 4, behind], "", 2)
    assert hashes[5][0] == hashes[6][0] and hashes[5][1] != hashes[6][1]
    assert names(plain, [1, 2, 3, 4])[0] != hashes[5][0]
    with pytest.raises(AssertionError, match="known tokens"):
        chain.extend([], [1, 2], "", 1)
