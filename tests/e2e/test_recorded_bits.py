"""Tokens and log-probabilities of 200 fixed requests are those that were recorded: a refactor moves no bit."""

from __future__ import annotations

import pytest

import recorded
from octavo.ops import native


def test_bits_are_those_recorded() -> None:
    key = recorded.key("cpu")
    expected = recorded.recorded().get(key)
    if expected is None or not native.available():
        pytest.skip(f"nothing is recorded for {key}; see tests/e2e/recorded.py")
    assert sum(map(len, expected.values())) == 200
    seen = recorded.observe("cpu")
    moved = {name: [i for i, own in enumerate(expected[name]) if own != seen[name][i]] for name in expected}
    assert {name: places for name, places in moved.items() if places} == {}
