"""The collector's thresholds are the process's own again after a batch."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from octavo import collector


@pytest.fixture(autouse=True)
def thresholds() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


def test_collections_are_seldom_within_and_as_before_behind() -> None:
    gc.set_threshold(700, 10, 10)
    with pytest.raises(RuntimeError), collector.seldom():
        with collector.seldom():
            assert gc.get_threshold()[0] > 700
        assert gc.get_threshold()[0] > 700
        raise RuntimeError
    assert gc.get_threshold() == (700, 10, 10)


@pytest.mark.parametrize("own", [(0, 10, 10), (10**6, 5, 5)])
def test_a_process_with_its_own_idea_keeps_it(own: tuple[int, int, int]) -> None:
    gc.set_threshold(*own)
    with collector.seldom():
        assert gc.get_threshold() == own
    assert gc.get_threshold() == own
