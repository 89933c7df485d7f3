"""Layer: the module that every layer is.

Owns how a layer is born (parameters declared on the meta device, in named shards), what it will weigh
(`weight_bytes`), how it gets its values
(`finalize`, once, when a loader has put a real tensor behind every parameter; `join`, once, when all layers have
theirs) and why calling it is cheap. Does not know files, requests or batches. Invariants: after `finalize` a layer has
no torch parameters left: what `forward` reads are plain attributes, laid out for the operators; `forward` leaves no
tensor behind but its results: one that a graph's capture made would hold nothing before that graph runs, and a copy
from the host would be repeated from memory that is others' by then.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from octavo.layers.chain import Symbol
from octavo.ops.copying import copy_alone
from octavo.ops.gemm import packed_bytes


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WeightForm:
    """How the weights of a model lie in memory once they are loaded."""

    matrix_dtype: torch.dtype  # of parameters that may stay as they are stored
    quantization: str | None
    device: str  # cpu | cuda
    native: bool  # compiled operators of a CPU are in use

    def packed_bytes(self, n: int, k: int, dtype: torch.dtype, *, quantize: bool = True) -> int:
        """Bytes of a matrix [n, k] that is made ready for products."""
        quantization = self.quantization if quantize else None
        return packed_bytes(n, k, dtype, quantization, self.device, native=self.native)


def _copy_values(source: object, target: object) -> None:
    """Copy every tensor within `source` to where `target` has one: of one structure, as `finalize` makes it twice."""
    if source is target:
        return
    if isinstance(source, torch.Tensor):
        if isinstance(target, torch.Tensor) and source.data_ptr() != target.data_ptr():
            copy_alone(target, source)
    elif isinstance(source, tuple | list) and isinstance(target, tuple | list):
        for own, other in zip(source, target, strict=True):
            _copy_values(own, other)
    elif dataclasses.is_dataclass(source) and type(source) is type(target):
        for field in dataclasses.fields(source):
            _copy_values(getattr(source, field.name), getattr(target, field.name))


class Layer(nn.Module):
    """An nn.Module whose children and finalized values are plain attributes.

    `nn.Module.__getattr__` and `__call__` cost about half a microsecond each, a decode step makes hundreds of
    them: so children are also kept in the instance dictionary, and layers call each other's `forward`.
    """

    # Parameters that may stay bfloat16 where float32 is declared: the layer's operator widens them exactly.
    widens_exactly: frozenset[str] = frozenset()
    # Parameters whose memory is free again after `finalize`.
    copied_by_finalize: frozenset[str] = frozenset()
    # Parameters of which no attribute is left, on any device: `finalize` makes others of them.
    remade_by_finalize: frozenset[str] = frozenset()

    # What a call of it is among a layer's lines (`octavo.layers.chain`).
    kind: str = "own"

    def __init_subclass__(cls) -> None:
        """What has another forward is no longer of its base's kind."""
        super().__init_subclass__()
        if "forward" in cls.__dict__ and "kind" not in cls.__dict__:
            cls.kind = "own"

    def __call__(self, x: Any, *rest: Any) -> Any:
        """`forward`, or a line of a layer whose lines are being learned."""
        if isinstance(x, Symbol) and not rest:
            return x.record(self.called_as, self, self.forward)
        return self.forward(x, *rest)

    @property
    def called_as(self) -> str:
        """Its kind, unless this very layer was given another forward."""
        return "own" if "forward" in self.__dict__ else self.kind

    def __init__(self) -> None:
        """No parameters yet."""
        super().__init__()
        self.dummy_values: dict[str, float] = {}  # parameters that dummy weights set to a constant

    def __setattr__(self, name: str, value: Any) -> None:
        """As nn.Module's; a child module is also a plain attribute."""
        super().__setattr__(name, value)
        if isinstance(value, nn.Module):
            self.__dict__[name] = value

    def declare(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, dummy: float | None = None) -> None:
        """Declare a parameter: shape and dtype are known, bytes are not there yet."""
        if dummy is not None:
            self.dummy_values[name] = dummy
        self.register_parameter(name, nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=False))

    def shards(self, name: str) -> Mapping[str, tuple[int, int]]:
        """Shard name -> (first row, rows) of the parameter `name`; one that is not fused is one shard, ""."""
        return {"": (0, self._parameters[name].shape[0])}  # type: ignore[union-attr]

    def fault_of(self, name: str, values: torch.Tensor) -> str:
        """Why `values`, a checkpoint's, on the host, of the parameter `name` cannot be run; empty: they can.

        "[place]=value (reason)". A parameter of integers has its range here: what indexes something is known to fit
        before a step uses it.
        """
        return ""

    def weight_bytes(self, form: WeightForm) -> int:
        """Bytes that this layer's own parameters, declared by now, will take once they are finalized."""
        return sum(
            parameter.numel() * (form.matrix_dtype if name in self.widens_exactly else parameter.dtype).itemsize
            for name, parameter in self.named_parameters(recurse=False)
        )

    def finalize(self, quantization: str | None) -> None:
        """Turn the parameters, real by now, into plain attributes. `quantization`: for layers that multiply."""
        for name in list(self._parameters):
            self.unwrap(name)

    def live(self, name: str) -> torch.Tensor | None:
        """Once finalized: the memory that holds the parameter `name` row for row, as it was declared, if any does.

        None too for a layer that makes more of its parameters than attributes.
        """
        return self.__dict__.get(name) if type(self).finalize is Layer.finalize else None

    def declared(self, name: str) -> torch.Tensor | None:
        """Once finalized: the values of the parameter `name`, row for row as it was declared; None: they are not kept.

        They are for reading, and may share memory with the layer.
        """
        return self.live(name)

    def refill(self, values: Mapping[str, torch.Tensor], quantization: str | None) -> None:
        """Give a finalized layer other values of all its parameters, in the memory that it has.

        values: of each parameter as it was declared, on the layer's device; their memory is the layer's from now on.
        What comes of them is what `finalize` makes of them, so that a layer of any family can be filled again; where
        it is packed into its old memory at once (`pack_linear`) nothing is there twice, else this layer is.
        """
        fresh = type(self).__new__(type(self))
        fresh.__dict__.update(self.__dict__)
        parameters = {name: nn.Parameter(value, requires_grad=False) for name, value in values.items()}
        fresh.__dict__["_parameters"] = parameters
        for name in parameters:
            fresh.__dict__.pop(name, None)
        fresh.finalize(quantization)
        for name, value in fresh.__dict__.items():
            before = self.__dict__.get(name)
            if value is not before and not isinstance(value, nn.Module):
                _copy_values(value, before)

    def join(self) -> None:
        """Make what the operators need of several layers' values. All layers are finalized; no step has run."""

    def unwrap(self, name: str) -> torch.Tensor:
        """Replace the parameter `name` by its tensor as a plain attribute, and return that."""
        parameter = self._parameters.pop(name)
        assert parameter is not None and not parameter.is_meta, f"{name} is finalized before it is loaded"
        tensor = parameter.detach()
        self.__dict__[name] = tensor
        return tensor
