"""InPlace: values that go to where they belong as they come, for transports that have no room to keep them all.

Owns what waits for the rest of its layer. Invariant: memory beside the model is that of layers of which a part has
come; tensors whose memory is the checkpoint's own rows take none.
"""

from __future__ import annotations

import secrets

import torch

from octavo.rl.plan import Incoming, Staged, WeightPlan


class InPlace(Staged):
    """One session's."""

    def __init__(self, plan: WeightPlan, quantization: str | None, device: torch.device, *, of: Staged) -> None:
        """`of`: the session that nothing has come to."""
        super().__init__(plan, partial=of.partial)
        self._quantization, self._device = quantization, device
        self.has_overwritten = False
        self._left = dict(plan.num_parts)

    def put(self, incoming: Incoming, tensor: torch.Tensor) -> None:
        """Take in a tensor; a layer that has all of its own gets them at once."""
        known = self._plan.known(incoming.name)
        if known is None or known in self.arrived:
            return  # the other name of a tied weight: nothing is kept to compare it with
        super().put(incoming, tensor)
        path = self._plan.targets[known].parameter.rpartition(".")[0]
        self._left[path] -= 1
        if not self._left[path]:
            self.has_overwritten = True
            self._apply_layer(path, self._quantization, self._device)

    def identity(self, before: str) -> str:
        """A name that comes once: the values are gone."""
        return secrets.token_hex(16)
