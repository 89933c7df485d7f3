"""Linear: y = x W^T + b, alone or as several projections fused into one product.

Owns the fused weight's shards and the moment of packing. Does not know what the projections mean or how the
product is computed (ops.gemm). Invariant: after `finalize` the weight exists once, packed.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from octavo.layers.base import Layer, WeightForm
from octavo.ops.gemm import LinearWeight, linear, pack_linear, unpack


class Linear(Layer):
    """One weight [out, in]; `out` is an int, or names and sizes of the projections that it fuses, in order."""

    kind = "linear"
    widens_exactly = frozenset({"weight"})
    copied_by_finalize = frozenset({"weight"})
    packed: LinearWeight  # set by finalize
    rest: LinearWeight | None  # its projections from `rest_from` on, where they can be had apart; set by finalize
    bias: torch.Tensor | None  # [out] float32

    def __init__(
        self,
        in_size: int,
        out: int | Mapping[str, int],
        dtype: torch.dtype,
        *,
        bias: bool | str = False,
        quantize: bool = True,
        out_dtype: torch.dtype | None = None,
        rest_from: str | None = None,
    ) -> None:
        """`quantize=False`: never quantized, whatever `finalize` is asked; `out_dtype` None: as the input.

        bias: whether there is one; or the one projection that has one, 0 being added to the others.
        rest_from: a projection. None: there is no `rest`.
        """
        super().__init__()
        sizes = {"": out} if isinstance(out, int) else dict(out)
        self._shards: dict[str, tuple[int, int]] = {}
        rows = 0
        for name, size in sizes.items():
            self._shards[name] = (rows, size)
            rows += size
        self.declare("weight", (rows, in_size), dtype)
        self._biased = {bias: self._shards[bias]} if isinstance(bias, str) else dict(self._shards)
        if bias:
            self.declare("bias", (sum(size for _, size in self._biased.values()),), torch.float32)
        else:
            self.bias = None
        self._rows = rows
        self._quantize, self.rest_from = quantize, rest_from
        self.out_dtype = out_dtype

    def shards(self, name: str) -> Mapping[str, tuple[int, int]]:
        """The projections' rows; of a bias, those that have one."""
        if name == "weight" or len(self._biased) == len(self._shards):
            return self._shards
        return {projection: (0, size) for projection, (_, size) in self._biased.items()}

    def weight_bytes(self, form: WeightForm) -> int:
        """The packed weight, and a bias of every output."""
        n, k = self.get_parameter("weight").shape
        bias = 4 * n if "bias" in self._parameters else 0
        return form.packed_bytes(n, k, form.matrix_dtype, quantize=self._quantize) + bias

    def live(self, name: str) -> torch.Tensor | None:
        """A weight of which nothing is packed, as on a GPU; a bias of all outputs."""
        if type(self).finalize is not Linear.finalize:
            return None
        if name == "weight":
            whole = self.packed.storage
            return whole if whole.shape == (self.packed.n, self.packed.k) and self.packed.kind != "int8" else None
        return self.bias if len(self._biased) == len(self._shards) else None

    def declared(self, name: str) -> torch.Tensor | None:
        """Also of a weight that is packed; what int8 has of it, where it is quantized."""
        if name != "weight" or type(self).finalize is not Linear.finalize:
            return self.live(name)
        return unpack(self.packed)

    def finalize(self, quantization: str | None) -> None:
        """Pack the weight and drop the original. The bias becomes a plain attribute."""
        super().finalize(quantization)
        if self.bias is not None and len(self.bias) < self._rows:
            ((start, size),) = self._biased.values()
            own, self.bias = self.bias, self.bias.new_zeros(self._rows)
            self.bias[start : start + size] = own
        weight, before = self.__dict__.pop("weight"), self.__dict__.get("packed")
        self.packed = pack_linear(weight, quantization if self._quantize else None, into=before)
        self.rest = None if self.rest_from is None else self.packed.behind(self._shards[self.rest_from][0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, in] -> [tokens, out]."""
        return linear(x, self.packed, self.bias, self.out_dtype)
