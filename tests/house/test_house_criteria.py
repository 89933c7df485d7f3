"""Every numbered criterion of the cache, its kernel blocks and layouts, of flex and its sizes is named by a test."""

from __future__ import annotations

import re

from house import ROOT

CRITERIA = [
    *(f"B2_{number}" for number in range(1, 12)), *(f"B2_G{number}" for number in range(1, 5)),
    *(f"L3_{number}" for number in range(1, 13)), *(f"L3_G{number}" for number in range(1, 5)),
    "INV_1", "INV_5", "INV_6",
]  # fmt: skip
NAMED_OR_TOLD = [  # by a test's name, or in what it says of itself
    *(f"F1_{number}" for number in range(1, 11)), *(f"F1_G{number}" for number in range(1, 8)),
    *(f"K4_{number}" for number in range(1, 10)), *(f"K4_G{number}" for number in range(1, 8)),
]  # fmt: skip


def test_a_test_names_each_criterion() -> None:
    texts = [file.read_text(encoding="utf-8") for file in (ROOT / "tests").rglob("test_*.py")]
    names = [name for text in texts for name in re.findall(r"def (test_\w+)", text)]
    unnamed = [own for own in CRITERIA if not any(re.search(rf"_{own}(_|$)", name) for name in names)]
    assert not unnamed


def test_a_test_tells_each_criterion_of_flex() -> None:
    texts = [file.read_text(encoding="utf-8") for file in (ROOT / "tests").rglob("test_*.py")]
    told = [text for text in texts for text in re.findall(r'def test_\w+|"""(?s:.*?)"""', text)]
    untold = [own for own in NAMED_OR_TOLD if not any(re.search(_pattern(own), text) for text in told)]
    assert not untold


def _pattern(criterion: str) -> str:
    return rf"(_|\b){criterion.replace('_', '[_.]')}(?![0-9])"
