"""The digest of a model: what its own code is counts, where it lies does not."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from octavo.checkpoint.digest import WeightsDigest
from octavo.config.speculative import NO_SPECULATION
from octavo.worker.identity import model_digest

CODE = """
import torch
from strange.parts import FACTOR

class Model(torch.nn.Module):
    def forward(self, x):
        return x * FACTOR
"""


def digest(folder: Path, monkeypatch: pytest.MonkeyPatch, factor: int) -> str:
    """Of a model of the package `strange`, whose parts lie in a module of their own."""
    (folder / "strange").mkdir(parents=True)
    (folder / "strange/model.py").write_text(CODE)
    (folder / "strange/parts.py").write_text(f"FACTOR = {factor}\n")
    with monkeypatch.context() as patch:
        patch.syspath_prepend(str(folder))
        model: Any = importlib.import_module("strange.model").Model()
        model.arch = SimpleNamespace(layers=[], max_position=8)
        resolved = cast(Any, SimpleNamespace(load_format="auto", seed=0, speculative=NO_SPECULATION))
        found = model_digest(model, {}, resolved, None, WeightsDigest())
    for name in [name for name in sys.modules if name.partition(".")[0] == "strange"]:
        del sys.modules[name]
    return found


def test_a_package_that_computes_something_else_names_its_blocks_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, again, other = (
        digest(tmp_path / str(number), monkeypatch, factor) for number, factor in enumerate((2, 2, 3))
    )
    assert first == again != other
