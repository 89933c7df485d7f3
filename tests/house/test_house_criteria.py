"""Every numbered criterion of docs/criteria.md is named by a test, and tests name no other."""

from __future__ import annotations

import re
from functools import cache

from house import ROOT

_NUMBER = r"(?:INV-|(?:B2|L3|F1|K4|M5|C|V|H|E|O|U|P|D|S|T)\.|RL\.[A-Z])G?\d+"
_NAMED = r"(?<![A-Za-z0-9])((?:(?:INV|B2|L3|F1|K4|M5|C|V|H|E|O|U|S|T)[_.-]|RL[_.][A-Z])G?\d+)"
_LINE = re.compile(rf"^- \*\*({_NUMBER})\*\* \S.*\.$", re.MULTILINE)


@cache
def _criteria() -> list[str]:
    return _LINE.findall((ROOT / "docs" / "criteria.md").read_text(encoding="utf-8"))


@cache
def _told() -> str:
    """The names of all tests, and what they and their modules say of themselves."""
    texts = [file.read_text(encoding="utf-8") for file in (ROOT / "tests").rglob("test_*.py") if file != _own()]
    return "\n".join(text for own in texts for text in re.findall(r'def test_\w+|"""(?s:.*?)"""', own))


def _own() -> object:
    return ROOT / "tests" / "house" / "test_house_criteria.py"


def test_a_line_says_one_criterion_once() -> None:
    text = (ROOT / "docs" / "criteria.md").read_text(encoding="utf-8")
    assert len(set(_criteria())) == len(_criteria()) == len(re.findall(r"^- ", text, re.MULTILINE)) > 70


def test_a_test_names_each_criterion() -> None:
    unnamed = [own for own in _criteria() if not re.search(rf"(_|\b){re.sub('[.-]', '[_.-]', own)}(?![0-9])", _told())]
    assert not unnamed


def test_what_tests_name_stands_in_the_docs() -> None:
    named = {re.sub(r"_", "-" if own.startswith("INV") else ".", own, count=1) for own in re.findall(_NAMED, _told())}
    assert named - set(_criteria()) == set()


def test_the_loops_table_names_tests_that_exist_and_misses_no_criterion() -> None:
    text = (ROOT / "docs" / "rl_criteria.md").read_text(encoding="utf-8")
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text)
    assert len(named) > 60
    missing = [
        f"{path}::{name}"
        for path, name in named
        if not (ROOT / path).exists() or f"def {name}(" not in (ROOT / path).read_text(encoding="utf-8")
    ]
    assert not missing
    numbers = re.findall(r"^\| (RL\.[A-Z]\d+) \| \S.* \| \S.* \|$", text, re.MULTILINE)
    assert len(set(numbers)) == len(numbers) == len(re.findall(r"^\| RL", text, re.MULTILINE))
    assert {own for own in _criteria() if own.startswith("RL.")} <= set(numbers)
