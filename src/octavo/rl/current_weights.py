"""CurrentWeights: the weights that a model has now, by their checkpoint's names, and a checksum of each.

Owns the checksum's formula and how a parameter's values are found again in the form that its layer computes with. Does
not know sessions. Invariant: equal values have equal checksums, on every device and in every type that holds them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch

from octavo.checkpoint.loader import Target
from octavo.config.quoted import MAX_NAME, quoted
from octavo.layers.base import Layer
from octavo.rl.plan import WeightPlan
from octavo.rl.session import WeightUpdateError

_MASK = (1 << 64) - 1
_CHUNK = 1 << 22  # values that are hashed at a time
_FACTORS = tuple(
    factor - (1 << 64) for factor in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)  # odd, as int64


def checksum(tensor: torch.Tensor) -> str:
    """16 hexadecimal digits of a tensor's values as float32, in their order; the shape is not in it.

    A sum over values of a mix of each one's bits and place, computed on the tensor's device in int64, modulo 2^64.
    """
    flat, total = tensor.detach().reshape(-1), tensor.numel()
    for start in range(0, len(flat), _CHUNK):
        bits = flat[start : start + _CHUNK].float().view(torch.int32).to(torch.int64)
        places = torch.arange(start + 1, start + 1 + len(bits), device=bits.device)
        mixed = bits.mul_(_FACTORS[0]).add_(places.mul_(_FACTORS[1]))
        for shift in (29, 32):
            mixed = mixed.bitwise_xor_(mixed >> shift).mul_(_FACTORS[2])
        total += int(mixed.sum().item())
    return f"{total & _MASK:016x}"


class CurrentWeights:
    """Of one model, between two steps."""

    def __init__(self, plan: WeightPlan) -> None:
        """Nothing is read yet."""
        self._plan = plan

    def checksums(self) -> tuple[dict[str, str], list[str]]:
        """Of each of a checkpoint's tensors; and the names of those whose layer keeps them in a form of its own.

        The checksums of the latter are of that form: they tell other weights, and are not a file's.
        """
        found, own = {}, []
        values: dict[str, torch.Tensor | None] = {}
        for name, target in self._plan.targets.items():
            if target.parameter not in values:
                values = {target.parameter: self._declared(target.parameter)}  # one at a time is kept
            value = values[target.parameter]
            if value is None:
                own.append(name)
                found[name] = "".join(checksum(part) for part in self._as_kept(target))
            else:
                found[name] = checksum(value[target.start : target.start + target.shape[0]])
        return found, own

    def values(self, name: str, num_rows: int) -> torch.Tensor:
        """The first rows of a checkpoint's tensor. Raises WeightUpdateError for a name that there is not."""
        known = self._plan.known(name)
        if known is None:
            raise WeightUpdateError(f"name: the model has no weight {quoted(name, MAX_NAME)}")
        target = self._plan.targets[known]
        value = self._declared(target.parameter)
        if value is None:
            raise WeightUpdateError(f"name: the layer of {name} keeps it in another form, of which nothing can be told")
        return value[target.start : target.start + min(num_rows, target.shape[0])]

    def _declared(self, parameter: str) -> torch.Tensor | None:
        path, _, name = parameter.rpartition(".")
        return self._plan.layer(path).declared(name)

    def _as_kept(self, target: Target) -> Iterator[torch.Tensor]:
        path, _, name = target.parameter.rpartition(".")
        layer = self._plan.layer(path)
        kept = layer.__dict__.get(name)
        if isinstance(kept, torch.Tensor):
            yield kept[target.start : target.start + target.shape[0]]
        else:
            yield from _tensors([value for key, value in sorted(vars(layer).items()) if not isinstance(value, Layer)])


def _tensors(value: object) -> Iterator[torch.Tensor]:
    """Those within a finalized layer's attribute that hold numbers."""
    if isinstance(value, torch.Tensor) and not value.is_meta:
        yield value.view(torch.uint8) if value.element_size() == 1 else value
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _tensors(part)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _tensors(getattr(value, field.name))
