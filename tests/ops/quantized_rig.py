"""Checks of what Triton's stores leave in a quantized cache, for a GPU, and of their quotients, for the interpreter."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from octavo.ops.cache_write.quantize import quantize
from octavo.ops.rope import gpu as gpu_rope
from octavo.ops.rope import rope_table

_SIZE, _BLOCK = 256, 16
USUAL = (1.0, 0.25, 0.02, 0.1 / 3, 1e-6, 1.9999999, 1.0000001, 2.0**-59, 7e17)
UNUSUAL = (0.0, -0.5, 2.0**-60, 1e-42, 3e38, float("inf"), float("nan"))


def _values() -> torch.Tensor:
    """All of bfloat16."""
    return torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


@triton.jit
def _quotients(x, scale, out, N: tl.constexpr):
    """Of a scale for a program, or for each of the values: as `store_rounded` is given one."""
    at, of_value = tl.arange(0, N), tl.zeros((N,), tl.int32)
    values = tl.load(x + at)
    tl.store(out + at, gpu_rope._divided(values, tl.load(scale)))
    tl.store(out + N + at, gpu_rope._divided(values, tl.load(scale + of_value)))


def check_quotients(device: str, scales: tuple[float, ...]) -> None:
    """Exact where they round to more than 0 and are not cut, and of the right sign everywhere."""
    x = _values().float()
    for scale in scales:
        out = torch.zeros(2, len(x), device=device)
        _quotients[(1,)](x.to(device), torch.tensor([scale], device=device), out, N=len(x))
        expected = x / torch.tensor(scale)
        size = expected.abs()
        is_cut, is_zero = (size >= 2.0**59) & ~expected.isnan(), size <= 2.0**-59
        for got in out.cpu():
            assert torch.equal(got.isnan(), expected.isnan()), scale
            is_right = (got.view(torch.int32) == expected.view(torch.int32)) | expected.isnan()
            is_right |= (got.signbit() == expected.signbit()) & torch.where(is_zero, got.abs() <= 2.0**-58, is_cut)
            is_right &= ~is_cut | (got.abs() >= 2.0**58)
            assert is_right.all(), (scale, x[~is_right][:5], got[~is_right][:5], expected[~is_right][:5])


def check_every_value(device: str, scales: tuple[float, ...]) -> None:
    """All bfloat16 values as V of heads with these scales: the bits of `quantize`, a zero's sign too.

    Not for the interpreter, which rounds to float8 otherwise.
    """
    values, scale = _values().view(-1, 1, _SIZE).expand(-1, len(scales), -1), torch.tensor(scales)
    tokens, heads, _ = values.shape
    qkv = torch.cat([torch.zeros(tokens, (1 + heads) * _SIZE, dtype=torch.bfloat16), values.flatten(1)], dim=1)
    given = (qkv, torch.zeros(tokens, dtype=torch.int64), rope_table(_SIZE, 1), torch.arange(tokens), scale)
    there, positions, table, slots, of_heads = (tensor.to(device) for tensor in given)
    for stored in (torch.float8_e4m3fn, torch.int8):
        kv = torch.zeros(tokens // _BLOCK, heads, _BLOCK, 2 * _SIZE).to(stored).to(device)
        gpu_rope.qk_norm_rope_store(
            there, positions, table, None, None, 1e-6, 1, heads, _SIZE, kv, slots, 1.0, of_heads, of_heads
        )
        got = kv.cpu().transpose(1, 2).flatten(0, 1)[..., _SIZE:].contiguous()
        expected = quantize(values, stored, scale)
        is_nan = expected.float().isnan()  # which has two signs in float8
        assert torch.equal(is_nan, got.float().isnan()), stored
        differ = (got.view(torch.uint8) != expected.view(torch.uint8)) & ~is_nan
        assert not differ.any(), (stored, values[differ][:5], got[differ][:5], expected[differ][:5])


def check_usual_scales() -> None:
    check_quotients("cpu", USUAL)


def check_unusual_scales() -> None:
    check_quotients("cpu", UNUSUAL)


INTERPRETED = {check.__name__: check for check in (check_usual_scales, check_unusual_scales)}
