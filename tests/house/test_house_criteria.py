"""Every numbered criterion of the cache, of its kernel blocks and of its layouts is named by a test."""

from __future__ import annotations

import re

from house import ROOT

CRITERIA = [
    *(f"B2_{number}" for number in range(1, 12)), *(f"B2_G{number}" for number in range(1, 5)),
    *(f"L3_{number}" for number in range(1, 13)), *(f"L3_G{number}" for number in range(1, 5)),
    "INV_1", "INV_5", "INV_6",
]  # fmt: skip


def test_a_test_names_each_criterion() -> None:
    texts = [file.read_text(encoding="utf-8") for file in (ROOT / "tests").rglob("test_*.py")]
    names = [name for text in texts for name in re.findall(r"def (test_\w+)", text)]
    unnamed = [own for own in CRITERIA if not any(re.search(rf"_{own}(_|$)", name) for name in names)]
    assert not unnamed
