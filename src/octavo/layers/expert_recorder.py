"""ExpertRecorder: which experts the tokens of the last step were sent to, layer by layer.

Owns one buffer, whose address a graph may capture, and which layers write to it. Does not know requests. Invariant: a
model without a recorder computes as ever; with one, a layer of experts copies its choices and nothing else changes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn


class ExpertRecorder:
    """Of one model. Without layers, or tokens, it records nothing."""

    def __init__(self, model: nn.Module, shape: tuple[int, int], max_num_tokens: int, device: torch.device) -> None:
        """`shape`: layers, and experts of a token in each; zeros: nothing is recorded."""
        self.rows: set[int] = set()  # of the request table, that want to be told
        num_layers, num_ranks = shape
        self._chosen = torch.full(
            (num_layers, max_num_tokens if num_layers else 0, num_ranks), -1, dtype=torch.int16, device=device
        )
        if not num_layers:
            return
        from octavo.layers.moe import MoeMlp

        for path, layer in model.named_modules():
            if isinstance(layer, MoeMlp):
                number = next(int(part) for part in path.split(".") if part.isdigit())
                layer.record = self._chosen[number]

    def of(self, tokens: torch.Tensor) -> torch.Tensor:
        """The choices of some tokens of the last step ([n] int64, their places), [n, layers, ranks] int16."""
        return self._chosen.index_select(1, tokens).transpose(0, 1).contiguous()


@contextlib.contextmanager
def unrecorded(model: nn.Module) -> Iterator[None]:
    """Within: passes of the model that are no steps. They record nothing, and may have more tokens than a step."""
    from octavo.layers.moe import MoeMlp

    kept = [(layer, layer.record) for layer in model.modules() if isinstance(layer, MoeMlp)]
    try:
        for layer, _ in kept:
            layer.record = None
        yield
    finally:
        for layer, record in kept:
            layer.record = record
