"""Tokens and log-probabilities of 200 fixed requests are those that were recorded: a refactor moves no bit."""

from __future__ import annotations

import pytest

import recorded
from octavo.ops import native


@pytest.mark.parametrize(("group", "count"), [("", 180), (recorded.OF_TORCH, 20)], ids=["ours", "of torch"])
def test_bits_are_those_recorded(group: str, count: int) -> None:
    key = recorded.key("cpu", group)
    expected = recorded.recorded().get(key)
    if expected is None or not native.available():
        pytest.skip(f"nothing is recorded for {key}; see tests/e2e/recorded.py")
    assert sum(map(len, expected.values())) == count
    seen = recorded.observe("cpu", of_torch=bool(group))
    moved = {name: [i for i, own in enumerate(expected[name]) if own != seen[name][i]] for name in expected}
    assert {name: places for name, places in moved.items() if places} == {}
