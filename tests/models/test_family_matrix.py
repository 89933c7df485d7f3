"""The matrix of families on a GPU: no family is missing from it. The runs themselves are in tests/gpu."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "gpu"))

from families import ARCHITECTURES, CASES, FAMILIES, MAX_MODEL_LEN, STEP_TOKENS, write_model
from octavo import models


def test_every_architecture_is_in_the_matrix() -> None:
    assert set(ARCHITECTURES) == set(models.ARCHITECTURES)
    assert set(ARCHITECTURES.values()) <= set(FAMILIES)


@pytest.mark.parametrize("architecture", [name for name in ARCHITECTURES if "ForConditionalGeneration" not in name])
def test_a_family_is_written_as_its_architecture(architecture: str, tmp_path: Path) -> None:
    write_model(ARCHITECTURES[architecture], tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    num_layers = config.get("num_hidden_layers") or len(config["layers_block_type"])
    assert config["architectures"] == [architecture] and num_layers >= 4, "a rehearsal leaves some out"


def test_the_cases_are_what_they_are_called() -> None:
    sizes = {name: [len(prompt) for prompt in prompts] for name, (prompts, _) in CASES.items()}
    assert [len(sizes[name]) for name in ("1 row", "17 rows", "64 rows", "1,000 tokens")] == [1, 17, 64, 1]
    assert sizes["1,000 tokens"] == [1000] and sum(sizes["mixed step"]) > STEP_TOKENS
    assert all(
        max(own) + count <= MAX_MODEL_LEN for own, (_, count) in zip(sizes.values(), CASES.values(), strict=True)
    )
