"""What the gated delta rule's kernels in CUDA C++ share: layers that they serve, and constants; and their texts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from octavo.ops.gemm.gemm_pipeline import is_hopper
from octavo.ops.scan.cuda_kernel import CudaKernel
from octavo.ops.scan.kept import Form

_SIZE, _CHUNK = 128, 64  # of a head's keys and values; tokens
_MOST_HEADS = 4  # of one key
_TYPES = (torch.bfloat16, torch.float16)
_FOLDER = Path(__file__).parent


def _kernel(name: str, *texts: str) -> CudaKernel:
    files = (_FOLDER / f"{each}.cu" for each in ("delta_token", *texts, name))
    instead = "the gated delta rule runs on other kernels, which may be slower"
    return CudaKernel(name, (_FOLDER.parent / "kept.cu", *files), instead)


KERNELS = {
    each.name: each
    for each in (
        _kernel("delta_step", "delta_scout", "delta_border"),
        _kernel("delta_prompts"),
        _kernel("delta_prepare"),
    )
}


def serves(heads: tuple[int, int], sizes: tuple[int, int], chunk: int, qkv: Tensor, kept: Sequence[Tensor]) -> bool:
    """Whether a layer's decoding runs here. heads: of values and keys; sizes: of a key and a value.

    kept: states, keys, values, updates, each head's and each token's in one line.
    """
    if not (qkv.is_cuda and qkv.dtype in _TYPES and kept[0].dtype == torch.float32 and is_hopper(qkv.device)):
        return False
    return fits(heads, sizes, chunk, qkv, kept)


def fits(heads: tuple[int, int], sizes: tuple[int, int], chunk: int, qkv: Tensor, kept: Sequence[Tensor]) -> bool:
    """Whether the shape is one that the kernel knows, and lies on bounds of 16 bytes."""
    per = heads[0] // heads[1]
    if sizes != (_SIZE, _SIZE) or chunk != _CHUNK or per > _MOST_HEADS or qkv.stride(1) != 1:
        return False
    steps = [step * each.element_size() for each in kept for step in (*each.stride()[:3],)]
    steps += [each.data_ptr() for each in (*kept, qkv)] + [qkv.stride(0) * qkv.element_size()]
    return all(each.dtype == qkv.dtype for each in kept[1:]) and not any(step % 16 for step in steps)


def macros(heads: tuple[int, int], block_size: int, forms: Sequence[Form], dtype: torch.dtype) -> dict[str, int | str]:
    """A layer's. forms: of what is kept."""
    names = "STATE_FORM", "KEY_FORM", "VALUE_FORM", "UPDATE_FORM", "TOTAL_FORM", "RATE_FORM"
    return {
        "HEADS": heads[0],
        "KEY_HEADS": heads[1],
        "PER": heads[0] // heads[1],
        "BLOCK": block_size,
        "HALF": int(dtype == torch.float16),
        **{name: ",".join(map(str, form)) for name, form in zip(names, forms, strict=True)},
    }
