"""LLMEngine: an engine that its owner steps, with vLLM's names."""

from __future__ import annotations

import types
from collections.abc import Iterable, Mapping
from typing import Any

from octavo.frontend.control import ResetOrder
from octavo.frontend.engine import Engine
from octavo.frontend.frontend import Prompt
from octavo.request.outputs import RequestOutput
from octavo.request.sampling_params import ParameterError, SamplingParams
from vllm.arguments import EngineArgs


class LLMEngine:
    """One engine, for one thread."""

    def __init__(self, args: EngineArgs) -> None:
        """Loads the model. Raises ValueError, in one line."""
        self._engine = Engine(args.config())
        one = types.SimpleNamespace(world_size=1, data_parallel_size=1, tensor_parallel_size=1, data_parallel_rank=0)
        self.vllm_config = types.SimpleNamespace(parallel_config=one)
        self.renderer = types.SimpleNamespace(render_cmpl=list, shutdown=lambda: None)

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, **_: Any) -> LLMEngine:
        """See the class."""
        return cls(engine_args)

    def add_request(self, request_id: str, prompt: Any, params: SamplingParams, **options: Any) -> None:
        """Queue a request. Raises ParameterError. options: `priority`."""
        ids = prompt.get("prompt_token_ids") if isinstance(prompt, Mapping) else prompt
        if not isinstance(ids, list):
            raise ParameterError("prompt", "must be token ids, or an object with prompt_token_ids", "invalid_type")
        frontend = self._engine.frontend
        frontend.queue(request_id, frontend.check(Prompt(ids), params, priority=options.get("priority", 0)))

    def abort_request(self, request_ids: Iterable[str]) -> None:
        """End requests."""
        self._engine.abort(request_ids)

    def has_unfinished_requests(self) -> bool:
        """Whether a step has anything to do."""
        return self._engine.has_unfinished

    def step(self) -> list[RequestOutput]:
        """One step; its outputs."""
        return self._engine.step()

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """See octavo.LLM."""
        order = ResetOrder(reset_running_requests, reset_connector)
        return self._engine.ask("reset_prefix_cache", order).success

    def close(self) -> None:
        """Release it."""
        self._engine.close()
