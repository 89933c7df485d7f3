"""Sampling defaults of a checkpoint: generation_config.json, and what the user puts over it.

Owns the translation of its field names to SamplingParams. Invariant: a value that SamplingParams refuses stops the
start with one line that names the file and the field.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octavo.checkpoint.config_reader.fields import read_json
from octavo.config.engine_config import EngineConfig
from octavo.config.settings import ConfigError
from octavo.request.sampling_params import ParameterError, SamplingParams

_FIELDS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "max_new_tokens": "max_tokens",
}


def default_sampling(folder: Path, config: EngineConfig) -> SamplingParams:
    """The parameters of a request that gives none. Raises ValueError naming the source and the field."""
    path, given = folder / "generation_config.json", config.generation_config
    values: dict[str, Any] = {}
    if given not in ("auto", "vllm"):
        path = Path(given).expanduser() / "generation_config.json"
        if not path.is_file():
            limit = "must be auto, vllm, or a folder that holds a generation_config.json"
            raise ConfigError("generation_config", given, limit)
    if given != "vllm" and path.exists():
        values = _params(read_json(path), str(path))
    return SamplingParams(**values | _params(config.override_generation_config, "override_generation_config"))


def _params(raw: Mapping[str, Any], where: str) -> dict[str, Any]:
    values = {ours: raw[theirs] for theirs, ours in _FIELDS.items() if raw.get(theirs) is not None}
    try:
        SamplingParams(**values)
    except ParameterError as error:
        raise ValueError(f"{where}: {error}") from None
    return values
