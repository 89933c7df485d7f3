"""Packed forms of a trainer's weights: what `octavo.ops.gemm.linear` multiplies by.

Owns when a weight is packed anew: when its bits changed, and never else. Bits are compared by a hash of all of them,
since nothing else tells surely: a parameter's version counter does not count what is written through `.data`, nor what
FSDP gathers into it. That costs some per cent of packing. Invariant: what `packed` gives has the weight's
bits of now. On a GPU a weight is taken as it lies.
"""

from __future__ import annotations

import torch
import xxhash
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from octavo.ops import native
from octavo.ops.gemm import LinearWeight, pack_linear

_Forms = dict[int, tuple[bytes, torch.dtype, bool, LinearWeight]]
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


def _digest(values: Tensor) -> bytes:
    """16 bytes that stand for the bits of values [n, k]."""
    return xxhash.xxh3_128_digest(values.contiguous().view(-1).view(torch.uint8).numpy().data)
