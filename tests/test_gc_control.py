"""The collector is the process's own again after a batch, and after what is loaded."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from octavo.startup import gc_control


@pytest.fixture(autouse=True)
def own_collector() -> Iterator[None]:
    before = gc.get_threshold()
    gc.unfreeze()  # what tests of servers in this process have frozen
    yield
    gc.set_threshold(*before)


def test_collections_are_seldom_within_and_as_before_behind() -> None:
    gc.set_threshold(700, 10, 10)
    with pytest.raises(RuntimeError), gc_control.relaxed():
        with gc_control.relaxed():
            assert gc.get_threshold()[0] > 700
        assert gc.get_threshold()[0] > 700
        raise RuntimeError
    assert gc.get_threshold() == (700, 10, 10)


@pytest.mark.parametrize("own", [(0, 10, 10), (10**6, 5, 5)])
def test_a_process_with_its_own_idea_keeps_it(own: tuple[int, int, int]) -> None:
    gc.set_threshold(*own)
    with gc_control.relaxed():
        assert gc.get_threshold() == own
    assert gc.get_threshold() == own


class _Ring:
    """Garbage in a cycle, once nobody holds it."""

    def __init__(self) -> None:
        self.itself = self


def test_nothing_is_collected_while_something_is_loaded_and_garbage_goes_later() -> None:
    gc.set_threshold(700, 10, 10)
    with pytest.raises(RuntimeError), gc_control.loading():
        rings = [_Ring() for _ in range(1000)]
        gone = weakref.ref(rings[0])
        with gc_control.loading():
            rings.clear()
        assert not gc.isenabled() and gone() is not None
        raise RuntimeError
    assert gc.isenabled() and gc.get_threshold() == (700, 10, 10) and not gc.get_freeze_count()
    gc.collect(1)
    assert gone() is not None, "the young are few"
    gc.collect()
    assert gone() is None


def test_a_process_that_collects_for_itself_does_so_while_something_is_loaded() -> None:
    gc.disable()
    try:
        with gc_control.loading():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()
    gc.freeze()
    try:
        with gc_control.loading():
            assert gc.isenabled()
        assert gc.get_freeze_count()
    finally:
        gc.unfreeze()
