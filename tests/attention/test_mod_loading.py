"""The setting attention_mods: what is no mods is told apart, and no file of a user's ends the process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import octavo.attention as A
from octavo import LLM, AttentionMods
from octavo.attention.mods.loading import load_mods, mods_of_layers
from octavo.config.settings import ConfigError


def mask(b, h, q_idx, kv_idx):
    return kv_idx >= 0


def score(value, b, h, q_idx, kv_idx):
    return value


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        (mask, r"is a function of 4 arguments.*octavo.AttentionMods\(mask_mod=mask\)"),
        (score, r"is a function of 5 arguments.*octavo.AttentionMods\(score_mod=score\)"),
        (AttentionMods, r"is the class.*octavo.AttentionMods\(mask_mod="),
        (lambda layer: {}[layer], r"of layer 0 fails: KeyError: 0"),
        (lambda layer: exit(3), r"of layer 0 fails: SystemExit: 3"),
        (lambda layer: mask, r"of layer 0 must be AttentionMods or None, got function"),
        (lambda: A.causal(), r"of layer 0 fails: TypeError"),
    ],
    ids=["mask", "score", "class", "raises", "exits", "gives a function", "takes nothing"],
)
def test_objects_that_are_no_mods(wish: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mods_of_layers(load_mods(wish), 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mods = (\n", r"own.py, line 1: '\(' was never closed"),
        ("import sys\nsys.exit(7)\n", r"it ends the program \(SystemExit: 7\), line 2"),
        ("\n\nx = 1 / 0\n", r"ZeroDivisionError: division by zero, line 3"),
        ("import no_such_module_at_all\n", r"ModuleNotFoundError: No module named 'no_such_module_at_all', line 1"),
        ("mod = 3\n", r"has no 'mods', did you mean mod\?"),
        ("from octavo import AttentionMods\nmods = AttentionMods(causal='yes')\n", r"causal must be True or False"),
        ("from octavo import AttentionMods as mods\n", "is the class"),
    ],
)
def test_files_that_do_not_load(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "own.py").write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        load_mods(f"{tmp_path}/own.py:mods")
    assert "\n" not in str(error.value)


def test_the_start_says_so_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("raise SystemExit\n")
    with pytest.raises(ConfigError, match=r"^attention_mods=.*it ends the program") as error:
        LLM(dtype="float32", num_threads=1, attention_mods=f"{tmp_path}/own.py:mods")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"causal": "yes"}, "causal must be True or False, got 'yes'"),
        ({"causal": None}, "causal must be True or False, got None"),
        ({"fields": ("kind",)}, r"fields must be made by request_field\(...\), got 'kind'"),
        ({"fields": "kind"}, r"fields must be made by request_field\(...\), got 'kind'"),
        ({"fields": 3}, r"fields must be made by request_field\(...\), got 3"),
        ({"name": 3}, "name must be a string, got int"),
        ({"some": 3}, "some must be a function, got int"),
    ],
)
def test_parts_of_the_wrong_type(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AttentionMods(**{"mask_mod": mask, **fields})


def test_one_field_needs_no_tuple() -> None:
    field = A.request_field("kind")
    assert AttentionMods(mask_mod=mask, fields=field).fields == (field,)  # type: ignore[arg-type]
