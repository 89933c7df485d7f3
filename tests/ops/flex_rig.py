"""Kernels around torch's FlexAttention against their references, under the interpreter and, from tests/gpu, a GPU."""

from __future__ import annotations

import math

import torch

from octavo.ops import flex
from octavo.ops.flex import gpu
from octavo.ops.flex.mask_rows import Geometry, Kind, MaskRows, Reach

CPU = torch.device("cpu")


def check(
    group: int, lines: int, num_leaves: int, dtype: torch.dtype, *, sinks: bool, seed: int, device: torch.device = CPU
) -> None:
    """Random mask rows over a random batch: some tiles start within a request, some are empty."""
    generator = torch.Generator().manual_seed(seed)
    shape = Geometry(group=group, lines=lines, block=16, stride=1, columns=2, q_block=16)
    tiles, kv_heads, size, tokens = 4, 2, 24, 3 * shape.tokens + 2
    rows = MaskRows(tiles * num_leaves + 3, shape, device)
    first = torch.tensor([0, 2, 5, 0]) * shape.tokens
    low = first + torch.tensor([0, shape.tokens - 1, 0, 0])
    high = first + torch.tensor([shape.tokens - 1, shape.tokens - 1, min(1, shape.tokens - 1), -1])
    token = torch.tensor([2, 0, shape.tokens + 2, 0])
    start = 3
    for buffer, value in ((rows.first, first), (rows.low, low), (rows.high, high), (rows.token, token)):
        buffer[start:] = value.repeat_interleave(num_leaves)
    rows.length.fill_(10**6)
    rows.partial_num.fill_(1)
    count = tiles * num_leaves
    q = torch.randn(tokens, group * kv_heads, size, generator=generator).to(device, dtype)
    lines_of_q = gpu.gather_lines(q, rows, shape, start, count)
    assert torch.equal(lines_of_q, flex.gather_lines_reference(q, rows, shape, start, count)), "gather"
    parts = torch.randn(lines_of_q.shape, generator=generator).to(device, dtype)
    lse = 8 * torch.randn(lines_of_q.shape[:3], generator=generator)
    lse[torch.rand(lse.shape, generator=generator) < 0.3] = float("-inf")
    lse = lse.to(device)
    parts[lse == float("-inf")] = 0.0
    heads = torch.randn(group * kv_heads, generator=generator).to(device) if sinks else None
    scale = torch.tensor([0.5, 3.0], device=device) if seed % 3 == 1 else None
    outs = [torch.full_like(q, 7.0) for _ in range(2)]
    for merge, out in zip((gpu.merge_lines, flex.merge_lines_reference), outs, strict=True):
        merge(parts, lse, rows, shape, out, start=start, num_leaves=num_leaves, sinks=heads, value_scale=scale)
    torch.testing.assert_close(*outs, atol=2e-2 if dtype == torch.bfloat16 else 1e-5, rtol=1e-2)
    if num_leaves == 1 and not sinks and scale is None:
        assert torch.equal(*outs), "a leaf that is alone keeps its bits"


def check_order(device: torch.device = CPU) -> None:
    """A tile's bits do not depend on how many leaves the batch's longest request has."""
    shape = Geometry(group=4, lines=16, block=16, stride=1, columns=2, q_block=16)
    generator, outs = torch.Generator().manual_seed(3), []
    parts, lse = (torch.randn(70, 1, 16, *rest, generator=generator).to(device) for rest in ((24,), ()))
    for num_leaves in (3, 4, 9, 40, 70):
        rows = MaskRows(num_leaves, shape, device)
        rows.first.fill_(60)
        rows.low.fill_(60)
        rows.high.fill_(63)
        rows.length.fill_(3 * shape.leaf - 1)
        outs.append(torch.zeros(4, 4, 24, device=device))
        gpu.merge_lines(
            parts[:num_leaves].contiguous(),
            lse[:num_leaves].contiguous(),
            rows,
            shape,
            outs[-1],
            start=0,
            num_leaves=num_leaves,
        )
    assert all(torch.equal(out, outs[0]) for out in outs) and outs[0].any(), "the longest request moved bits"


def rectangles(reach: Reach):
    """The tests of `reach` as `plan_mask_rows` takes them."""

    def behind(b, kv):
        return kv < reach.prompts[b]

    def some(b, q, q_last, kv, kv_last):
        seen = (kv <= q_last) | (behind(b, kv) if reach.prompts is not None else torch.tensor(not reach.causal))
        if reach.window:
            seen = seen & (q - kv_last < reach.window)
        if reach.chunk:
            seen = seen & (q // reach.chunk <= kv_last // reach.chunk) & (kv // reach.chunk <= q_last // reach.chunk)
        return seen

    def every(b, q, q_last, kv, kv_last):
        seen = (kv_last <= q) | (behind(b, kv_last) if reach.prompts is not None else torch.tensor(not reach.causal))
        seen = seen & torch.tensor(reach.exact)
        if reach.window:
            seen = seen & (q_last - kv < reach.window)
        if reach.chunk:
            own = q // reach.chunk
            seen = seen & (q_last // reach.chunk == own) & (kv // reach.chunk == own) & (kv_last // reach.chunk == own)
        return seen

    return some, every


def check_plan(
    reach: Reach,
    queries: list[int],
    lengths: list[int],
    columns: int,
    device: torch.device = CPU,
    kind: Kind = Kind.ALL,
    block: int = 16,
    kv_block: int = 16,
) -> None:
    """The kernel's mask rows are the reference's."""
    shape = Geometry(
        group=4,
        lines=16,
        block=block,
        stride=3,
        columns=columns,
        q_block=16,
        kv_block=kv_block,
        unit=math.gcd(block, kv_block),
    )
    width, num = max(lengths) // block + 2, len(lengths)
    table = torch.randperm(num * width).view(num, width).int().to(device)
    table[:, 1] = 0  # a block that was given back
    lens, start = torch.tensor(lengths).int().to(device), torch.tensor([0, *queries]).cumsum(0).int().to(device)
    tiles = flex.max_tiles(num, sum(queries), max(queries), shape.tokens) + 1
    leaves = -(-max(lengths) // shape.leaf) + 1
    options = {
        "num_tiles": tiles,
        "num_leaves": leaves,
        "query_start": start,
        "seq_lens": lens,
        "block_table": table,
        "table_rows": torch.arange(num, device=device) + 5,
        "kind": kind,
    }
    ours, expected = (MaskRows(tiles * leaves, shape, device) for _ in range(2))
    gpu.plan_mask_rows(ours, shape, reach, **options)
    some, every = rectangles(reach)
    flex.plan_mask_rows(expected, shape, some=some, every=every, **options)
    there = expected.high >= expected.low
    assert torch.equal(ours.high >= ours.low, there), "tiles"
    used = sum(n == 1 if kind is Kind.SINGLE else n > (kind is Kind.LONG) for n in queries)
    assert used <= there.view(tiles, leaves)[:, 0].sum() and there.any() == (used > 0)
    sizes = [(ours.partial_num, expected.partial_num), (ours.full_num, expected.full_num)]
    lists = [(ours.partial, expected.partial), (ours.full, expected.full)]
    scalars = [(getattr(ours, name), getattr(expected, name)) for name in ("row", "first", "low", "high", "token")]
    for one, other in sizes + lists + scalars:
        kept, wanted = one[ours.high >= ours.low], other[there]
        assert torch.equal(kept, wanted), (reach, queries)
    assert not ours.partial_num[ours.high < ours.low].any() and not ours.full_num[ours.high < ours.low].any()


def check_plans() -> None:
    for reach in (
        Reach(causal=True),
        Reach(causal=True, window=41),
        Reach(causal=True, chunk=48, exact=False),
        Reach(causal=False),
        Reach(causal=False, prompts=torch.tensor([0] * 5 + [40, 1, 160, 33, 5, 64, 9], dtype=torch.int32)),
    ):
        check_plan(reach, [1, 1, 1, 0], [70, 1, 160, 0], 3, kind=Kind.SINGLE)
        check_plan(reach, [5, 0, 30, 1], [70, 0, 33, 160], 4)
        for block, kv_block in ((16, 64), (48, 64), (64, 16), (144, 64)):
            check_plan(reach, [5, 0, 6, 1], [70, 0, 33, 175], 2, block=block, kv_block=kv_block)
        for kind in Kind:
            check_plan(reach, [1, 1, 1, 2, 5, 9, 0], [70, 160, 70, 33, 5, 90, 0], 4, kind=kind)
        for queries, kind in (([1, 1], Kind.LONG), ([3, 2], Kind.SINGLE), ([0, 0], Kind.ALL)):
            check_plan(reach, queries, [9, 4], 4, kind=kind)


def check_lines() -> None:
    for seed, (group, lines, num_leaves) in enumerate(
        [(4, 16, 1), (4, 16, 3), (1, 16, 2), (3, 64, 2), (8, 32, 1), (4, 16, 11)]
    ):
        for dtype in (torch.float32, torch.bfloat16):
            check(group, lines, num_leaves, dtype, sinks=seed % 2 == 1, seed=seed)


INTERPRETED = {"plans": check_plans, "lines": check_lines, "order": check_order}
