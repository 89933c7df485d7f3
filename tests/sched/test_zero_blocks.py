"""Fresh blocks of groups that need zeroing are reported once, by the plan that first uses them (2.16)."""

from __future__ import annotations

import dataclasses

from sched_harness import Driver, full, make_request, make_scheduler, sliding

GROUPS = (full(), dataclasses.replace(sliding(6), zero_fresh_blocks=True))


def reported(driver: Driver) -> list[tuple[set[int], set[int], set[int]]]:
    """Per step until all is done: (zeroed, new blocks of group 0, new blocks of group 1)."""
    steps = []
    while driver.scheduler.num_unfinished:
        plan = driver.step()
        new: tuple[set[int], set[int]] = (set(), set())
        for row in plan.new_rows:
            for group, ids in enumerate(row.block_ids):
                new[group].update(ids[row.num_computed // 4 :])  # what lies before is a prefix hit
        for group, new_blocks in enumerate(plan.new_blocks):
            new[group].update(new_blocks.block_ids.tolist())
        assert len(plan.zero_blocks) == len(set(plan.zero_blocks))
        steps.append((set(plan.zero_blocks), *new))
    return steps


def test_only_the_fresh_blocks_of_the_group_are_reported() -> None:
    driver = Driver(make_scheduler(GROUPS), GROUPS)
    prompt = list(range(100, 119))
    driver.add(make_request(prompt, 9))
    steps = reported(driver)
    assert len([zeroed for zeroed, _, _ in steps if zeroed]) >= 3
    assert all(zeroed == second and not zeroed & first for zeroed, first, second in steps)
    driver.add(make_request(prompt, 9))
    again = reported(driver)
    assert all(zeroed == second for zeroed, _, second in again)
    assert len(again[0][0]) < len(steps[0][0]), "what is found by hash is not fresh"


def test_nothing_is_reported_where_no_group_needs_it() -> None:
    driver = Driver(make_scheduler((full(), sliding(6))), (full(), sliding(6)))
    driver.add(make_request(19, 9))
    assert not any(zeroed for zeroed, _, _ in reported(driver))
