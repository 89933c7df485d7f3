"""InPlace: values that go to where they belong as they come, for transports that have no room to keep them all.

Owns what waits for the rest of its layer. Invariant: memory beside the model is that of layers of which a part has
come; layers whose memory is the checkpoint's own rows take none.
"""

from __future__ import annotations

import secrets

import torch

from octavo.rl.plan import Incoming, Staged, WeightPlan, check_finite


class InPlace(Staged):
    """One session's."""

    def __init__(self, plan: WeightPlan, quantization: str | None, device: torch.device, *, of: Staged) -> None:
        """`of`: the session that nothing has come to."""
        super().__init__(plan, partial=of.partial, device=device)
        self._quantization, self._device = quantization, device
        self.has_overwritten = False
        self._left = dict(plan.num_parts)
        self._live = {path: self._live_parameters(path) for path in plan.by_layer}

    def put(self, incoming: Incoming, tensor: torch.Tensor, *, given: bool = False) -> None:
        """Take in a tensor: into its rows of the model, or with the others of its layer, once they are all there.

        given: is of no use, since a buffer is not kept for a layer of which a part is in it.
        """
        if self._plan.pieces(incoming.name):  # each of them comes here by itself
            super().put(incoming, tensor)
            return
        known = self._plan.known(incoming.name)
        if known is None or known in self.arrived:
            return  # the other name of a tied weight: nothing is kept to compare it with
        target = self._plan.targets[known]
        path = target.parameter.rpartition(".")[0]
        live = self._live[path].get(target.parameter)
        if live is not None:
            rows = live[target.start : target.start + target.shape[0]]
            value = tensor.to(device=rows.device, dtype=rows.dtype)
            check_finite(incoming.name, value)
            self.has_overwritten = True
            rows.copy_(value)
            self.arrived[known] = None
            return
        super().put(incoming, tensor)
        self._left[path] -= 1
        if not self._left[path]:
            self.has_overwritten = True
            self._apply_layer(path, self._quantization, self._device)

    def _complete(self, parameter: str) -> None:
        """The values go on at once: nobody asks for their digest."""

    def identity(self, before: str) -> str:
        """A name that comes once: the values are gone."""
        return secrets.token_hex(16)

    def _live_parameters(self, path: str) -> dict[str, torch.Tensor]:
        """All parameters of a layer, if each has memory as it was declared; else none."""
        plan, found = self._plan, dict[str, torch.Tensor]()
        for name in plan.by_layer[path]:
            live = plan.layer(path).live(name.rpartition(".")[2])
            if live is None or live.dtype is not plan.dtypes[name] or tuple(live.shape) != plan.shapes[name]:
                return {}
            found[name] = live
        return found
