"""Engines on the bundled model, closed when a test ends; the prompts that it never saw; the command line."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM
from octavo.cli import main as cli
from octavo.model_state.default import DefaultModelState
from unpromised import spoil

NUM_PROMPTS = 50


@pytest.fixture(autouse=True)
def nothing_unpromised(monkeypatch: pytest.MonkeyPatch) -> None:
    """No engine of this process keeps what operators need not keep of inputs of states."""
    finish = DefaultModelState.finish

    def finish_and_spoil(self: DefaultModelState) -> None:
        finish(self)
        if self._keeps_states:
            spoil(layer.states for layer in self._layers)

    monkeypatch.setattr(DefaultModelState, "finish", finish_and_spoil)


@pytest.fixture(scope="session")
def held_out_prompts() -> list[str]:
    """Cut from files that the bundled model was not trained on."""
    text = resources.files("octavo").joinpath("assets/octavo-tiny/held_out_prompts.json").read_text()
    return json.loads(text)[:NUM_PROMPTS]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """octavo-tiny in float32 with default settings, shared by a module's tests: each leaves it idle."""
    with LLM(dtype="float32") as made:
        yield made


@pytest.fixture
def make_llm() -> Iterator[Callable[..., LLM]]:
    """LLM on octavo-tiny with given settings.

    A look-up that is late since its thread had no processor is no miss, unless a test says so: it has its time.
    """
    made: list[LLM] = []

    def make(**fields: Any) -> LLM:
        if transfer := fields.get("kv_transfer_config"):
            fields["kv_transfer_config"] = {"kv_lookup_timeout": 3600, **transfer}
        llm = LLM(**{"dtype": "float32", **fields})
        made.append(llm)
        return llm

    yield make
    for llm in made:
        llm.close()


@pytest.fixture
def octavo(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str, str]]:
    """Run the command in this process; gives exit code, stdout and stderr."""
    for name in [name for name in os.environ if name.startswith("OCTAVO_")]:
        monkeypatch.delenv(name)

    def run(*argv: object) -> tuple[int, str, str]:
        code = cli.main([str(argument) for argument in argv])
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    """A copy of octavo-tiny that a test may spoil."""
    folder = tmp_path / "model"
    with resources.as_file(resources.files("octavo").joinpath("assets/octavo-tiny")) as bundled:
        shutil.copytree(bundled, folder)
    return folder
