"""Per-kind policies: what is needed, what is an acceptable hit, how many blocks at most."""

from __future__ import annotations

import itertools

import pytest

from octavo.cache.policies import make_policies
from sched_harness import chunked, full, sliding

NAMES = [bytes([i]) for i in range(8)]


def acceptable(policy, cached, num_blocks, block_size):
    """Policy's definition, read literally."""
    first = policy.first_needed(num_blocks * block_size)
    return all(NAMES[i] in cached for i in range(first, num_blocks))


@pytest.mark.parametrize(
    "group",
    [full(), *map(sliding, (1, 2, 4, 5, 6, 9, 100)), *map(chunked, (1, 3, 4, 6, 8, 100))],
    ids=lambda group: f"{group.kind}{group.window or group.chunk}",
)
def test_the_longest_hit_is_the_longest_acceptable_one(group):
    """All subsets of 8 blocks, and all limits."""
    (policy,) = make_policies([group])
    for bits in itertools.product([False, True], repeat=8):
        cached = {name for name, bit in zip(NAMES, bits, strict=True) if bit}
        for limit in (0, 3, 8):
            found = [n for n in range(limit + 1) if acceptable(policy, cached, n, 4)]
            assert policy.longest_hit(cached, NAMES, limit * 4) == max(found) * 4


@pytest.mark.parametrize(("position", "first"), [(0, 0), (5, 0), (8, 0), (9, 1), (12, 1), (13, 2)])
def test_a_window_of_six_needs_its_last_six_tokens(position, first):
    (policy,) = make_policies([sliding(6)])
    assert policy.first_needed(position) == first


@pytest.mark.parametrize("size", [1, 4, 5, 6, 16])
@pytest.mark.parametrize("max_new", [1, 3, 4, 7, 20])
@pytest.mark.parametrize("make", [sliding, chunked])
def test_peak_blocks_bounds_what_any_walk_holds(make, size, max_new):
    """A walk from any hit by steps of at most max_new; what slid out by the step's first query is given back."""
    (policy,) = make_policies([make(size)])
    for start in range(0, 40, 4):
        for position in range(start, 40, max_new):
            end = min(position + max_new, 40)
            held = -(-end // 4) - policy.first_needed(max(position - 1, 0))
            assert held <= policy.peak_entries(40, max_new, drafts=False)
