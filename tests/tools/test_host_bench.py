"""bench/host.py and bench/burst.py: their stand-ins are worth a figure only as long as they fit the runner."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"


@pytest.mark.parametrize("drafts", [[], ["--drafts", "2"], ["--drafts", "2", "--fixed-depth"]], ids=" ".join)
def test_every_scenario_runs(
    drafts: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    monkeypatch.setattr(sys, "argv", ["host.py", "--requests", "3", "--steps", "2", *drafts])
    runpy.run_path(str(BENCH / "host.py"), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    scenarios = ["steady", "growing", "aligned", "streamed", "churning"]
    names = [name for name in scenarios for _ in range(2 if drafts else 1)]  # plain steps beside those with drafts
    assert [line.split()[0] for line in lines[:-1]] == names
    assert sum("of plain" in line for line in lines[:-1]) == len(names) - len(scenarios)


@pytest.mark.parametrize("options", [[], ["--prefix-caching"]], ids=" ".join)
def test_a_burst_begins_and_ends(
    options: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    monkeypatch.setattr(sys, "argv", ["burst.py", "--requests", "3", "--rounds", "2", *options])
    runpy.run_path(str(BENCH / "burst.py"), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:-1]] == ["attention", "attention", "states", "states"]
    assert all(
        f"  {part} " in line for line in lines[:-1] for part in ("check", "schedule", "border", "update", "leave")
    )
