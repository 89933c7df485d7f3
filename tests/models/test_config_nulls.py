"""Every field of a config.json that a family's reader looks at, absent and null: transformers' answer, or a refusal."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from config_rig import BASES, NAMES, fields_read, read, written
from octavo.checkpoint.arch import Arch

# Numbers of which null means something, where transformers' class keeps the null, or is strict about it of late.
MEANINGS: Mapping[str, Callable[[Mapping[str, Any]], Any]] = {
    "num_key_value_heads": lambda config: config["num_attention_heads"],
    "head_dim": lambda config: config["hidden_size"] // config["num_attention_heads"],
    "attention_multiplier": lambda config: (config["hidden_size"] // config["num_attention_heads"]) ** -0.5,
    "partial_rotary_factor": lambda config: 1.0,
    "original_max_position_embeddings": lambda config: config["max_position_embeddings"],
}
MEAN_NONE = ("q_lora_rank", "sliding_window")  # no number says what null says: tests of parity have it
# as transformers, which has SiLU and its own there
UNREAD = (("Lfm2", "hidden_act"), ("Lfm2Moe", "hidden_act"), ("Lfm3", "hidden_act"), ("NemotronH", "hidden_act"))
UNSAID = ("bos_token_id", "eos_token_id")  # ids are those that a file names: a family has none of its own
# a file says its sizes; transformers' defaults for them are those of some published model
NEEDED = ("hidden_size", "intermediate_size", "max_position_embeddings", "num_attention_heads", "num_hidden_layers")
NEEDED += ("vocab_size", "num_experts", "num_local_experts", "moe_intermediate_size")


@pytest.mark.parametrize("name", NAMES)
def test_absent_and_null_mean_what_transformers_takes_them_for(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    base = written(name, BASES.get(name, {}))
    assert base is not None
    wrong = []
    for field in sorted(fields_read(base, monkeypatch)):
        rest = {own: value for own, value in base.items() if own != field}
        absent = read(rest)
        theirs = written(name, rest)
        has_answer = theirs is not None and not (theirs.get(field, 0) is None and isinstance(read(theirs), str))
        is_free = field in UNSAID or (field in NEEDED and isinstance(absent, str))
        if theirs is not None and has_answer and not is_free and absent != read(theirs):
            wrong.append(f"{field} absent: {str(absent)[:90]}")
        null, theirs, usual = read({**base, field: None}), written(name, {**base, field: None}), base.get(field)
        if isinstance(null, str):
            if f"unsupported {field}=null" not in null and theirs is not None:
                wrong.append(f"{field} null is refused as {null[:90]}")
            continue
        if theirs is not None and theirs.get(field) is not None and field not in UNSAID:
            meant: Arch | str = read(theirs)
        elif type(usual) is bool:
            meant = read({**base, field: False})
        elif type(usual) in (int, float) and field not in (*UNSAID, *MEAN_NONE):
            meant = read({**base, field: MEANINGS[field](base)}) if field in MEANINGS else "no number"
        else:
            meant = null if field in (*UNSAID, *MEAN_NONE) else absent
        if null != meant:
            wrong.append(f"{field} null")
    assert not wrong


PAGE = (Path(__file__).parents[2] / "docs/models.md").read_text(encoding="utf-8")
REFUSED = [
    (name, field, json.loads(value))
    for families, refused in re.findall(r"^\| ([\w, ]+) \| (.*) \|$", PAGE, re.MULTILINE)
    for name in (NAMES if families == "all" else families.split(", "))
    for field, value in re.findall(r'`"(\w+)": ([^`]+)`', refused)
]


@pytest.mark.parametrize("name", NAMES)
def test_the_page_of_models_tells_what_is_refused(name: str) -> None:
    """Each by name; what transformers computes with beside these is computed."""
    base = written(name, BASES.get(name, {}))
    assert base is not None
    for own, field, value in REFUSED:
        if own != name or (field == "hidden_act" and field not in base) or (name, field) in UNREAD:
            continue
        found = read({**base, field: value})
        assert isinstance(found, str), (field, value)
        assert f"unsupported {field}=" in found
    assert not {own for own, _, _ in REFUSED} - set(NAMES), "names of transformers' classes"
    if any((own, field) == (name, "mlp_bias") for own, field, _ in REFUSED):
        return
    assert isinstance(read({**base, "mlp_bias": True}), Arch), f"docs/models.md has no mlp_bias of {name} as refused"
