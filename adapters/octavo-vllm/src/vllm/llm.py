"""LLM: Octavo's, with the arguments that trainers give vLLM's, and the path by which they load weights.

Owns the session that `load_weights` fills. Invariant: tensors of several calls become new weights together, when the
engine is next used; until then the old ones serve.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Sequence
from typing import Any

import torch

import octavo
from vllm.arguments import kept


class LLM(octavo.LLM):
    """vLLM's LLM, as trainers use it."""

    def __init__(self, model: str | None = None, **fields: Any) -> None:
        """See octavo.LLM. Raises ParameterError for more than one device."""
        super().__init__(model, **kept(fields))
        self._names: list[str] = []  # of the tensors that have come since the last update
        self._is_loading = False
        # vLLM's path to the model, of which trainers use the end
        model_runner = types.SimpleNamespace(model=types.SimpleNamespace(load_weights=self.load_weights))
        worker = types.SimpleNamespace(model_runner=model_runner)
        self.llm_engine = types.SimpleNamespace(
            model_executor=types.SimpleNamespace(driver_worker=worker), reset_prefix_cache=self.reset_prefix_cache
        )

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Take tensors by their checkpoint's names; those that were taken. See the module."""
        if not self._is_loading:
            self.start_weight_update(partial=self.is_whole)
            self._is_loading = True
        taken = set()
        try:
            for name, tensor in weights:
                self._load_weight(name, tensor.detach())
                taken.add(name)
        except BaseException:
            self._is_loading = False  # it is over
            raise
        return taken

    def generate(self, prompts: Any, sampling_params: Any = None, **options: Any) -> Any:
        """See octavo.LLM."""
        self._finish()
        return super().generate(prompts, sampling_params, **options)

    def chat(self, messages: Any, sampling_params: Any = None, **options: Any) -> Any:
        """See octavo.LLM."""
        self._finish()
        return super().chat(messages, sampling_params, **options)

    def reset_prefix_cache(self, *flags: bool, **options: bool) -> bool:
        """See octavo.LLM."""
        self._finish()
        return super().reset_prefix_cache(*flags, **options)

    def wake_up(self, tags: Sequence[str] | None = None) -> bool:
        """See octavo.LLM."""
        self._finish()
        return super().wake_up(tags)

    def sleep(self, level: int = 1, mode: str = "abort", tags: Sequence[str] | None = None) -> None:
        """See octavo.LLM."""
        self._finish()
        super().sleep(level, mode, tags)

    @property
    def is_whole(self) -> bool:
        """Whether the engine has weights of which a part may be changed."""
        return not self.engine.core.gate.lost

    def _finish(self) -> None:
        if self._is_loading:
            self._is_loading = False
            self.finish_weight_update()
