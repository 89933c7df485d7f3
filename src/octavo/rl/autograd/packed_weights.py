"""Packed forms of a trainer's weights: what `octavo.ops.gemm.linear` multiplies by.

Owns when a weight is packed anew: when its bits changed, and never else. Bits are compared by a hash of all of them,
since nothing else tells surely: a parameter's version counter does not count what is written through `.data`, nor what
FSDP gathers into it. That costs some per cent of packing. Invariant: what `packed` gives has the weight's
bits of now. On a GPU a weight is taken as it lies.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch
import xxhash
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from octavo.ops import native
from octavo.ops.gemm import LinearWeight, pack_linear
from octavo.ops.gemm.head_linear import HeadWeights, pack_heads

_Form = TypeVar("_Form")
_Forms = dict[Hashable, tuple[tuple[bytes, torch.dtype, bool], Any]]
_PACKED = WeakTensorKeyDictionary()  # weight -> of each of its matrices: (digest, dtype of the rows, chain), form


def packed(weight: Tensor, dtype: torch.dtype, matrix: int | None = None) -> LinearWeight:
    """The form of weight [n, k], or of `weight[matrix]` of [matrices, n, k], for rows of `dtype`.

    A weight of another type is rounded to bfloat16 for rows of bfloat16, as an engine of that dtype rounds it; a
    bfloat16 weight stays so for rows of float32. Raises ValueError for float16 on a CPU.
    """
    values = (weight if matrix is None else weight[matrix]).detach()
    return _kept(weight, matrix, values, dtype, lambda: pack_linear(rounded(values, dtype)))


def packed_heads(weight: Tensor, dtype: torch.dtype, heads: int, rows: slice, *, transposed: bool) -> HeadWeights:
    """The form of weight [heads * size, C] for a product a head with `rows` of its rows, or with them transposed.

    It has the type of the rows of x, as the engine keeps it. Raises ValueError for float16 on a CPU.
    """
    values = weight.detach()

    def pack() -> HeadWeights:
        matrices = values.to(dtype).unflatten(0, (heads, -1))[:, rows]
        return pack_heads(matrices.transpose(1, 2) if transposed else matrices)

    return _kept(weight, (heads, rows.start, rows.stop, transposed), values, dtype, pack)


def _kept(weight: Tensor, key: Hashable, values: Tensor, dtype: torch.dtype, pack: Callable[[], _Form]) -> _Form:
    """What `pack` makes of `values` of a weight, or made of the same bits before."""
    if values.is_cuda:
        return pack()
    if dtype == torch.float16:
        raise ValueError("float16 runs on a GPU only: take bfloat16 or float32 on a CPU")
    forms: _Forms = _PACKED.setdefault(weight, {})
    follows = _digest(values), dtype, native.multiplies_in_pairs()
    if key not in forms or forms[key][0] != follows:
        forms.pop(key, None)
        forms[key] = follows, pack()
    form: _Form = forms[key][1]
    return form


def rounded(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """A weight as an engine of `dtype` keeps it: in the type of its activations, or narrower, which widens exactly."""
    own = weight.dtype
    return weight if own == dtype or own.itemsize < dtype.itemsize else weight.to(dtype)


def _digest(values: Tensor) -> bytes:
    """16 bytes that stand for the bits of values [n, k]."""
    flat = values.contiguous()
    # an array of NumPy would do, but storages that it has seen cannot be resized any more, as FSDP does
    return xxhash.xxh3_128_digest((ctypes.c_ubyte * flat.nbytes).from_address(flat.data_ptr()))
