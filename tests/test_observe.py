"""Phases, logging, the progress bar."""

from __future__ import annotations

import io
import logging
import sys
import time

import pytest

from octavo.observe import LOGGER, Count, NullProgress, Phases, progress, setup_logging


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


@pytest.mark.parametrize("test", ["first", "second"])
def test_logging_is_set_up_once(test: str) -> None:
    """In a process; in one of tests by each, whose conftest.py takes it down: else it went to another test's stderr."""
    assert (LOGGER.handlers, LOGGER.propagate, LOGGER.level) == ([], True, logging.NOTSET)
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


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def _count_at(times: list[float], stream: io.StringIO) -> None:
    """So many things, one at each time, of a clock that begins at 0."""
    now = [0.0]
    count = Count("compiling", stream, lambda: now[0])
    for done, now[0] in enumerate(times):
        count(done + 1, len(times), f"kernel {done}")
    count.close()


def test_what_is_done_at_once_shows_no_count(caplog: pytest.LogCaptureFixture) -> None:
    stream = _Terminal()
    _count_at([0.1, 0.5, 0.9], stream)
    _count_at([0.1, 0.5, 0.9], io.StringIO())
    assert not stream.getvalue() and not caplog.records


def test_a_count_is_a_line_now_and_then_in_the_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LOGGER, "propagate", True)
    monkeypatch.setattr(LOGGER, "handlers", [])
    _count_at([0.5, 1.5, 2.0, 3.0, 3.6, 3.7], io.StringIO())
    assert [record.getMessage() for record in caplog.records] == [
        "compiling: 2 of 6 after 1.5 s (kernel 1)",
        "compiling: 5 of 6 after 3.6 s (kernel 4)",  # 2 s later
        "compiling: 6 of 6 after 3.7 s (kernel 5)",  # the last one
        "compiling: 6 of 6 in 3.7 s, kept for later starts",
    ]


def test_a_count_is_one_line_on_a_terminal(caplog: pytest.LogCaptureFixture) -> None:
    stream = _Terminal()
    _count_at([1.5, 1.55, 2.0], stream)
    assert not caplog.records
    assert stream.getvalue().count("\n") == 1 and stream.getvalue().endswith("compiling: 3 of 3 in 2.0 s\x1b[K\n")
    assert "1 of 3 after 1.5 s (kernel 0)" in stream.getvalue() and "2 of 3" not in stream.getvalue()
