"""Packed forms of a trainer's weights: what `octavo.ops.gemm.linear` multiplies by.

Owns when a weight is packed anew: when its bits changed, and never else. Bits are compared by a sum over rows and one
over columns, since nothing else tells surely: a parameter's version counter does not count what is written through
`.data`, nor what FSDP gathers into it. That costs 1 to 3 % of packing. Invariant: what `packed` gives has the weight's
bits of now. On a GPU a weight is taken as it lies.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from octavo.ops import native
from octavo.ops.gemm import LinearWeight, pack_linear

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16}
_Forms = dict[int, tuple[int, torch.dtype, bool, LinearWeight]]
_PACKED = WeakTensorKeyDictionary()  # weight -> of each of its matrices: digest, dtype of the rows, chain, form


def packed(weight: Tensor, dtype: torch.dtype, matrix: int | None = None) -> LinearWeight:
    """The form of weight [n, k], or of `weight[matrix]` of [matrices, n, k], for rows of `dtype`.

    A wider weight is rounded to bfloat16 for rows of bfloat16, as an engine of that dtype rounds it; a bfloat16 weight
    stays so for rows of float32. Raises ValueError for float16 on a CPU.
    """
    values = (weight if matrix is None else weight[matrix]).detach()
    if values.is_cuda:
        return pack_linear(rounded(values, dtype))
    if dtype == torch.float16:
        raise ValueError("float16 runs on a GPU only: take bfloat16 or float32 on a CPU")
    forms: _Forms = _PACKED.setdefault(weight, {})
    key, follows = -1 if matrix is None else matrix, (_digest(values), dtype, native.multiplies_in_pairs())
    found = forms.get(key)
    if found is None or found[:3] != follows:
        forms.pop(key, None)
        found = forms[key] = *follows, pack_linear(rounded(values, dtype))
    return found[3]


def rounded(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """A weight as an engine of `dtype` keeps it: never wider than its activations."""
    return weight.to(dtype) if weight.element_size() > dtype.itemsize else weight


def _digest(values: Tensor) -> int:
    """A number that stands for the bits of values [n, k]: where any lies counts as well."""
    rows = values.contiguous()
    width = next(size for size in _WORDS if size >= values.element_size() and rows[0].nbytes % size == 0)
    words = rows.view(_WORDS[width])
    return int(_weighted(words.sum(1)) * 31 + _weighted(words.sum(0)))


def _weighted(sums: Tensor) -> Tensor:
    """The sum of integers, each times an odd number of its own, modulo 2^64."""
    return (sums * (torch.arange(sums.numel()) * 0x9E3779B97F4A7C0 + 0x1234567)).sum()
