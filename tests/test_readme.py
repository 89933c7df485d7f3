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
from octavo.serve.app import ROUTES

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


def test_what_is_not_there_is_not_there_and_says_what_is() -> None:
    told = README.partition("What is not there:")[2].partition("of a server's routes")
    names = [name for name in re.findall(r"`(\w+)`", told[0]) if name != "logits_processors"]
    assert len(names) > 6
    for name in names:
        assert not hasattr(octavo.LLM, name)
        with pytest.raises(AttributeError, match=rf"LLM has no {name}: ."):
            getattr(octavo.LLM.__new__(octavo.LLM), name)
    routes = re.findall(r"`(?:POST )?(/[\w./]+)`", told[2].partition("`LLM.get_metrics`")[0])
    assert len(routes) == 6 and not {route.path for route in ROUTES} & set(routes)
    public = README.partition("All names are imported from `octavo` itself")[2].partition("Code that imports")[0]
    assert {*re.findall(r"`([A-Z]\w+)`", public), "LLM", "__version__"} == set(octavo.__all__)


@pytest.mark.parametrize("name", ["attention", "rl"])
def test_the_packages_of_the_pages_are_there_after_import_octavo(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/ write `octavo.attention.draw`: no import of its own is needed."""
    importlib.import_module(f"octavo.{name}")
    monkeypatch.delattr(octavo, name)
    assert getattr(octavo, name) is sys.modules[f"octavo.{name}"]
    assert name in dir(octavo)
