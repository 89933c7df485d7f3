"""What a connector is offered of requests that run: as soon as it is computed, once, and as it is (C.8)."""

from __future__ import annotations

import random

import pytest

from block_states import BlockState, state_of
from fake_connector import Clock, FakeConnector
from octavo.kv_connector import Transfer
from sched_harness import BLOCK, Driver, full, make_request, make_scheduler, sliding, smallest_pool, states

PLAIN, WINDOWS = (full(),), (full(), sliding(6), sliding(13))
STATES = (full(), sliding(6), *states(16, blocks=2))


class Store(FakeConnector):
    """Keeps what it saved, by name and group, when a save ends."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.saves = self.saves_running = True
        self.kept: dict[tuple[bytes, int], object] = {}

    def finished(self, save: Transfer) -> bool:
        begins = super().finished(save)
        memory = self.worker.memory
        assert all(memory[place] == value for place, value in self._content(save)), "what is saved is computed"
        return begins

    def arrive(self, number: int, bad: object = None) -> None:
        save = self.begun[number]
        for index, (group, table) in enumerate(zip(self.worker.groups, save.blocks, strict=True)):
            size, num = group.block_size, group.parts.blocks
            for place in range(save.start // size, save.end // size):
                if blocks := [block for block in table[place * num : (place + 1) * num] if block]:
                    offsets = (0,) if group.kind == "state" else range(size)
                    content = [self.worker.memory[block, offset][:3] for block in blocks for offset in offsets]
                    name = save.names[(place + 1) * size // BLOCK - 1]
                    assert self.kept.setdefault((name, index), content) == content
        super().arrive(number)


def drive(groups=PLAIN, **options) -> tuple[Driver, Store]:
    connector = Store()
    driver = Driver(make_scheduler(groups, connector=connector, clock=Clock(), load_timeout=1e9, **options), groups)
    return driver, connector


@pytest.mark.parametrize("groups", [PLAIN, WINDOWS], ids=["plain", "windows"])
def test_C_8_a_prompt_is_offered_when_it_is_computed_and_the_rest_as_it_comes(groups):
    driver, connector = drive(groups, max_num_batched_tokens=10)
    connector.hurries = True
    request = make_request(22, 30)
    driver.add(request)
    for _ in range(5):
        driver.step()
    early = {place for place, _ in connector.kept}
    assert len(early) == 5 and not request.finished, "all full blocks of the prompt, while it runs"
    driver.run()
    assert len({place for place, _ in connector.kept}) == 51 // BLOCK
    if groups is WINDOWS:  # of every window too, though it slid on
        assert len([group for _, group in connector.kept if group == 1]) == 51 // BLOCK
    driver.audit_idle()


def test_C_8_blocks_that_are_saved_are_nobody_elses_until_the_save_has_ended():
    driver, connector = drive(num_blocks=17, max_model_len=60)
    request = make_request(22, 4)
    driver.add(request)
    driver.step()
    driver.step()
    (save,) = connector.begun.values()
    driver.scheduler.abort([request.request_id])
    pool = driver.scheduler.kv._pool
    assert {state_of(pool, block) for block in save.blocks[0][:5]} == {BlockState.HELD}
    driver.add(make_request(40, 2))
    for _ in range(3):
        driver.step()
    connector.hurries = True
    for number in list(connector.begun):
        connector.arrive(number)
    driver.run()
    driver.audit_idle()


@pytest.mark.parametrize("groups", [PLAIN, WINDOWS, STATES], ids=["plain", "windows", "states"])
@pytest.mark.parametrize("seed", range(6))
def test_C_8_random_preemptions_and_slow_saves_keep_what_was_computed(groups, seed):
    rng = random.Random(seed)
    driver, connector = drive(
        groups,
        num_blocks=smallest_pool(groups, 60, 24) + 4,
        max_model_len=60,
        max_num_seqs=5,
        max_num_batched_tokens=24,
    )
    requests = [make_request(rng.randint(3, 30), rng.randint(2, 25)) for _ in range(14)]
    for step in range(400):
        if requests and rng.random() < 0.4:
            driver.add(requests.pop())
        driver.step(depth=rng.randint(0, 1))
        if rng.random() < 0.1 and driver.scheduler.running:
            driver.scheduler.abort([rng.choice(driver.scheduler.running).request_id])
        if rng.random() < 0.1 and driver.scheduler.running:
            driver.scheduler._preempt(driver.scheduler.running[-1])
        for number in list(connector.begun):
            if rng.random() < 0.3:
                connector.arrive(number)
        if step % 20 == 0:
            driver.scheduler.kv.check()
    connector.hurries = True
    for number in list(connector.begun):
        connector.arrive(number)
    driver.run()
    driver.audit_idle()
    assert connector.kept and driver.scheduler.num_preemptions > 0


def test_C_8_what_a_failed_step_was_to_compute_is_not_saved():
    driver, connector = drive()
    connector.hurries = True
    request = make_request(22, 8)
    driver.add(request)
    driver.worker.break_next = request.request_id
    driver.issue()
    driver.collect()
    driver.run()
    assert request.error == "mod_failed" and not connector.kept
    driver.audit_idle()


def test_C_8_what_is_named_by_the_token_behind_it_is_offered_when_that_is_known():
    """For drafters that read it: a prompt that ends at a block's border loses no block, nor does the output."""
    driver, connector = drive(max_num_batched_tokens=10, num_next_tokens=1)
    connector.hurries = True
    request = make_request(5 * BLOCK, 7 * BLOCK)
    driver.add(request)
    driver.run()
    assert len({place for place, _ in connector.kept}) == 12 - 1, "the last token of all is never computed"
    again = make_request(list(request.tokens), 3)
    driver.scheduler.reset_prefix_cache()
    driver.add(again)
    driver.run()
    driver.audit_idle()


@pytest.mark.parametrize("caching", [True, False])
def test_C_8_what_a_held_row_computes_again_under_new_weights_is_not_saved_as_the_old_ones(caching):
    """Its mask comes late, and between its two tries the weights change: the old K and V are being saved by then."""
    driver, connector = drive(enable_prefix_caching=caching)
    held, other = make_request(6 * BLOCK, 8), make_request(6 * BLOCK + 1, 8)
    driver.add(held, other)
    driver.worker.hold_next = 1
    driver.step()
    driver.scheduler.take_loads()
    assert {(save.request, save.end) for save in connector.begun.values()} == {(held, 24), (other, 24)}
    driver.worker.version += 1
    driver.scheduler.set_weights_version("1", keep_kv=True)
    driver.step()
    for number in list(connector.begun):
        connector.arrive(number)
    connector.hurries = True
    driver.run()
    assert (held.num_preemptions, other.num_preemptions) == (1, 0), "who computes nothing twice goes on"
    driver.audit_idle()
