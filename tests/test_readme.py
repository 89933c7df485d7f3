"""README.md shows what is printed: its Python program and its first command run here as they stand."""

from __future__ import annotations

import importlib
import re
import shlex
import sys
from pathlib import Path

import pytest

import octavo
from octavo.cli.main import main as cli

README = (Path(__file__).resolve().parents[1] / "README.md").read_text(encoding="utf-8")


def _blocks(heading: str) -> list[str]:
    """What stands in code blocks under a heading, in order."""
    return re.findall(r"```[a-z]*\n(.*?)```", README.partition(f"## {heading}\n")[2].partition("\n## ")[0], re.DOTALL)


def test_the_program_prints_what_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    program, shown = _blocks("From Python")[:2]
    exec(program, {})
    assert capsys.readouterr().out == shown


def test_the_first_command_prints_what_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """The same on every processor: the command says float32."""
    command, shown = _blocks("From a terminal")[:2]
    assert cli(shlex.split(command)[1:]) == 0
    assert capsys.readouterr().out.strip() == shown.strip()


@pytest.mark.parametrize("name", ["attention", "rl"])
def test_the_packages_of_the_pages_are_there_after_import_octavo(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/ write `octavo.attention.draw`: no import of its own is needed."""
    importlib.import_module(f"octavo.{name}")
    monkeypatch.delattr(octavo, name)
    assert getattr(octavo, name) is sys.modules[f"octavo.{name}"]
    assert name in dir(octavo)
