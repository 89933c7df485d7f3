"""Every field of a config.json that a family's reader looks at, said otherwise, by each name: transformers' answer.

A configuration class may overwrite what a file says, replace one field by another, or know a field by two names.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from config_rig import NAMES, fields_read, read, transformers_class, written
from hybrid_configs import HYBRIDS
from model_rig import FAMILIES, SMALL
from octavo.checkpoint.arch import Arch

ROPE = ("rope_theta", "rope_scaling", "rope_local_base_freq", "partial_rotary_factor")
SCALING = {"rope_type": "linear", "factor": 4.0}
# Read beside transformers' class: no file of a model names them, and the classes keep what they do not know.
FREE = ("type", "rope_type", "bos_token_id", "eos_token_id")


def variants(name: str) -> list[dict[str, Any]]:
    """A family's tiny configurations, as files say them."""
    found = [own for known, own in [*FAMILIES.values(), *HYBRIDS.values()] if known == name]
    merged = ({**SMALL, **own} for own in found)
    return [{key: value for key, value in one.items() if value is not None} for one in copy.deepcopy(list(merged))]


def bases(name: str) -> Iterator[dict[str, Any]]:
    """Of the first two variants: what a file says; all that transformers writes; that in older words of rotation."""
    for said in variants(name)[:2]:
        all_fields = written(name, said)
        assert all_fields is not None, said
        yield {**said, "architectures": all_fields["architectures"]}
        yield all_fields
        yield {field: value for field, value in all_fields.items() if field != "rope_parameters"}


def others(usual: Any) -> list[Any]:
    """Values that a field may have where this one is `usual`."""
    if isinstance(usual, bool):
        return [not usual]
    if isinstance(usual, int):
        return sorted({usual * 2, usual // 2, usual + 1, 1, 2})
    if isinstance(usual, float):
        return [usual / 2, usual * 2, 0.25]
    if isinstance(usual, list) and len(usual) > 1:
        return [usual[::-1]]
    return [0.25, 2, 16, True, SCALING, {**SCALING, "rope_theta": 123.0}] if usual is None else []


@pytest.mark.parametrize("name", NAMES)
def test_what_a_file_says_counts_as_with_transformers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever both take the file: a field that the class overwrites is of no effect, one that it keeps is of ours."""
    names: Mapping[str, str] = transformers_class(name).attribute_map
    wrong, compared = set(), 0
    for base in bases(name):
        fields = {*fields_read(base, monkeypatch), *ROPE, *names} - {*FREE}
        for field in sorted(fields):
            for value in others(base.get(field, base.get(names.get(field, field)))):
                config = json.loads(json.dumps({**base, field: value}))
                ours = read(config)
                known = written(name, config) if isinstance(ours, Arch) else None
                if known is not None:
                    compared += 1
                    if ours != read(known):
                        wrong.add(f"{field}={value}")
    assert compared > 20
    assert not wrong
