"""What transformers makes of a config.json: what its class writes out again, with all fields, read by us."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping
from typing import Any

import pytest

from hybrid_configs import HYBRIDS
from model_rig import FAMILIES
from octavo.checkpoint.arch import Arch
from octavo.checkpoint.config_reader.checkpoint import arch_from_config
from octavo.checkpoint.config_reader.fields import Fields

NAMES = sorted({name for name, _ in [*FAMILIES.values(), *HYBRIDS.values()]})
TEXTS = {text: f"{text}TextConfig" for text in ("Gemma3", "Qwen3_5", "Qwen3_5Moe")}
BASES: Mapping[str, Mapping[str, Any]] = {  # where transformers' defaults make no model
    "DeepseekV2": {"num_experts_per_tok": 6, "topk_method": "greedy"},
    "SeedOss": {"hidden_size": 5120},
    "Lfm2Moe": {"layer_types": ["conv", "full_attention"] * 16},
}


def read(config: Mapping[str, Any]) -> Arch | str:
    """Or the refusal."""
    try:
        return arch_from_config(json.loads(json.dumps(config)))
    except ValueError as error:
        return str(error)


@functools.cache
def transformers_class(name: str) -> Any:
    import transformers

    return getattr(transformers, TEXTS.get(name, f"{name}Config"))


def _infinite(value: dict[str, Any]) -> Any:
    """What their files write for infinity."""
    return math.inf if value == {"__float__": "Infinity"} else value


def written(name: str, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """By transformers' class, all fields; None: it refuses the file."""
    given = {field: value for field, value in config.items() if field not in ("architectures", "model_type")}
    given = json.loads(json.dumps(given), object_hook=_infinite)  # a copy: their class writes into what it is given
    try:
        found = json.loads(transformers_class(name)(**given).to_json_string(use_diff=False))
    except Exception:  # of several libraries
        return None
    return {**found, "architectures": [f"{name}ForCausalLM"]}


def fields_read(config: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The names that the reader asks for."""
    seen: set[str] = set()
    get = Fields.get

    def note(self: Fields, name: str, default: Any = None) -> Any:
        seen.add(name)
        return get(self, name, default)

    with monkeypatch.context() as patch:
        patch.setattr(Fields, "get", note)
        assert isinstance(read(config), Arch), read(config)
    return seen - {"architectures"}
