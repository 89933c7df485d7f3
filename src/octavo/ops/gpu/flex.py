"""Lines of queries and the folding of partial results on a GPU; `octavo.ops.flex` says what they give.

Owns two kernels around torch's own. Invariant: leaves are folded in ascending order, in float32, so a query's bits do
not depend on how many leaves its neighbours have.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, assignment"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.flex import Geometry, MaskRows


@triton.jit(do_not_specialize=["start"])
def _gather(
    q, out, first, low, high, token, start, q_token, q_head,
    GROUP: tl.constexpr, LINES: tl.constexpr, HEAD: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    num_kv_heads = tl.num_programs(1)
    line, channel = tl.arange(0, LINES), tl.arange(0, PADDED)
    lowest = tl.load(low + start + row)
    highest = tl.maximum(tl.load(high + start + row), lowest)
    position = tl.load(first + start + row) + line // GROUP
    at = tl.load(token + start + row) + tl.minimum(tl.maximum(position, lowest), highest) - lowest
    head = kv_head * GROUP + line % GROUP
    inside = (channel < HEAD)[None, :]
    source = q + at.to(tl.int64)[:, None] * q_token + head[:, None] * q_head + channel[None, :]
    target = out + ((row * num_kv_heads + kv_head) * LINES + line)[:, None] * HEAD + channel[None, :]
    tl.store(target, tl.load(source, mask=inside), mask=inside)


@triton.jit(do_not_specialize=["start", "num_leaves"])
def _merge(
    parts, lse, out, sinks, first, low, high, token, start, num_leaves, out_token, out_head,
    GROUP: tl.constexpr, LINES: tl.constexpr, HEAD: tl.constexpr, PADDED: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    num_kv_heads = tl.num_programs(1)
    row = tile * num_leaves
    line, channel = tl.arange(0, LINES), tl.arange(0, PADDED)
    lowest, highest = tl.load(low + start + row), tl.load(high + start + row)
    position = tl.load(first + start + row) + line // GROUP
    valid = (position >= lowest) & (position <= highest) & (line < LINES // GROUP * GROUP)
    head = kv_head * GROUP + line % GROUP
    most = tl.full((LINES,), float("-inf"), tl.float32)
    if SINKS:
        sink = tl.load(sinks + head, mask=valid, other=0.0)
        most = sink
    for leaf in range(num_leaves):
        place = ((row + leaf) * num_kv_heads + kv_head) * LINES + line
        most = tl.maximum(most, tl.load(lse + place, mask=valid, other=float("-inf")))
    most = tl.where(most == float("-inf"), 0.0, most)
    total = tl.zeros((LINES,), tl.float32)
    if SINKS:
        total = tl.exp(sink - most)
    inside = valid[:, None] & (channel < HEAD)[None, :]
    result = tl.zeros((LINES, PADDED), tl.float32)
    for leaf in range(num_leaves):
        place = ((row + leaf) * num_kv_heads + kv_head) * LINES + line
        weight = tl.exp(tl.load(lse + place, mask=valid, other=float("-inf")) - most)
        total += weight
        part = tl.load(parts + place[:, None] * HEAD + channel[None, :], mask=inside & (weight > 0)[:, None], other=0.0)
        result += weight[:, None] * part.to(tl.float32)
    result = result / tl.where(total == 0.0, 1.0, total)[:, None]
    at = tl.load(token + start + row) + position - lowest
    target = out + at.to(tl.int64)[:, None] * out_token + head[:, None] * out_head + channel[None, :]
    tl.store(target, result.to(out.dtype.element_ty), mask=inside)


def gather_lines(q: Tensor, rows: MaskRows, shape: Geometry, start: int, count: int) -> Tensor:
    """See `octavo.ops.flex.gather_lines`."""
    _, heads, size = q.shape
    kv_heads = heads // shape.group
    out = torch.empty((count, kv_heads, shape.lines, size), dtype=q.dtype, device=q.device)
    _gather[(count, kv_heads)](
        q, out, rows.first, rows.low, rows.high, rows.token, start, q.stride(0), q.stride(1), GROUP=shape.group,
        LINES=shape.lines, HEAD=size, PADDED=triton.next_power_of_2(size), num_warps=4,
    )  # fmt: skip
    return out


def merge_lines(
    parts: Tensor,
    lse: Tensor,
    rows: MaskRows,
    shape: Geometry,
    out: Tensor,
    *,
    start: int,
    num_leaves: int,
    sinks: Tensor | None = None,
) -> None:
    """See `octavo.ops.flex.merge_lines`."""
    count, kv_heads, lines, size = parts.shape
    assert parts.is_contiguous() and lse.is_contiguous(), "the kernel's own outputs"
    _merge[(count // num_leaves, kv_heads)](
        parts, lse, out, lse if sinks is None else sinks, rows.first, rows.low, rows.high, rows.token, start,
        num_leaves, out.stride(0), out.stride(1), GROUP=shape.group, LINES=lines, HEAD=size,
        PADDED=triton.next_power_of_2(size), SINKS=sinks is not None, num_warps=4,
    )  # fmt: skip
