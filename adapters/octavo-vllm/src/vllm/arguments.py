"""EngineArgs: vLLM's arguments of an engine, as Octavo takes them.

Owns which of them change nothing here, and which are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.config.engine_config import EngineConfig, load_config
from octavo.request.sampling_params import ParameterError

# About more than one process or device, or about how vLLM is built: nothing follows from them here.
_NO_EFFECT = frozenset((
    "model_impl", "distributed_executor_backend", "tensor_parallel_size", "data_parallel_size",
    "worker_extension_cls", "disable_custom_all_reduce", "enable_expert_parallel", "compilation_config",
    "disable_log_stats", "disable_log_requests", "attention_config",
))  # fmt: skip


def kept(fields: Mapping[str, Any]) -> dict[str, Any]:
    """What Octavo reads of vLLM's arguments. Raises ParameterError for more devices, and for a trainer's own model."""
    for name in ("tensor_parallel_size", "data_parallel_size", "pipeline_parallel_size"):
        if fields.get(name, 1) != 1:
            raise ParameterError(name, "must be 1: an engine of Octavo uses one device")
    for name in ("worker_cls", "config_format"):
        if fields.get(name) not in (None, "auto", "hf"):
            raise ParameterError(
                name, f"{str(fields[name])[:80]} names a model of a trainer's own, run by vLLM's worker"
            )
    return {name: value for name, value in fields.items() if name not in _NO_EFFECT and value is not None}


class EngineArgs:
    """What an engine is made with."""

    def __init__(self, model: str | None = None, **fields: Any) -> None:
        """vLLM's names."""
        self.fields = {**({"model": model} if model is not None else {}), **fields}

    def config(self) -> EngineConfig:
        """As Octavo has it. Raises ValueError, in one line."""
        config, _ = load_config(python_kwargs=kept(self.fields))
        return config


class AsyncEngineArgs(EngineArgs):
    """The same of an AsyncLLMEngine."""
