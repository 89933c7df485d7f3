"""Phases, logging, the progress bar."""

from __future__ import annotations

import io
import logging
import sys
import time

import pytest

from octavo.observe import LOGGER, NullProgress, Phases, progress, setup_logging


def test_phases_are_listed_in_order_with_their_depth() -> None:
    phases = Phases()
    first = len(phases.entries)
    with phases("outer"):
        with phases("inner"):
            time.sleep(0.01)
    with pytest.raises(KeyError), phases("fails"):
        raise KeyError
    names = [(name, depth) for name, _, depth in phases.entries[first:]]
    assert names == [("outer", 0), ("inner", 1), ("fails", 0)]
    assert phases.entries[first][1] >= phases.entries[first + 1][1] >= 0.01


def test_phases_count_from_the_start_of_the_process() -> None:
    phases = Phases()
    assert phases.total >= sum(seconds for _, seconds, depth in phases.entries if depth == 0)
    assert "total" in phases.table() and "other" in phases.table()


def test_logging_is_set_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LOGGER, "handlers", [])
    monkeypatch.setattr(LOGGER, "propagate", True)
    monkeypatch.setattr(LOGGER, "level", logging.NOTSET)
    setup_logging("info")
    setup_logging("debug")
    assert len(LOGGER.handlers) == 1 and LOGGER.level == logging.DEBUG


def test_no_bar_where_no_terminal_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with progress(3) as bar:
        bar.add(1, 2, 3)
    assert isinstance(bar, NullProgress) and sys.stderr.getvalue() == ""  # type: ignore[union-attr]


def test_a_bar_that_is_asked_for_shows_the_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.setenv("COLUMNS", "200")
    with progress(2, wanted=True) as bar:
        bar.add(1, 10, 5)
        bar.add(1, 10, 5)
    shown = sys.stderr.getvalue()  # type: ignore[union-attr]
    assert "2/2" in shown and "prompts/s" in shown and "output" in shown
