"""The table of backends and features in docs/attention.md names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]


def test_every_cell_is_backed_by_a_test() -> None:
    text = (TESTS.parent / "docs/attention.md").read_text(encoding="utf-8")
    known = {
        name
        for folder in ("attention", "e2e", "gpu", "kv_cache")
        for path in (TESTS / folder).glob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    }
    table = [
        line
        for line in text.partition("## What each backend does")[2].partition("\n## ")[0].splitlines()
        if line.startswith("| ") and not line.startswith("| feature ")
    ]
    assert len(table) > 30
    for line in table:
        for cell in line.split("|")[2:-1]:
            named = re.findall(r"`(test_\w+)`", cell)
            assert named or "no promise" in cell, line
            assert set(named) <= known, line
