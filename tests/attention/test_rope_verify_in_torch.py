"""Rotation, store and attention of rows that verify in the kernel in Gluon, run in torch, against a row of one query.

Here both kernels multiply in one order, as they do on a GPU: so a token's bits are the same, alone and beside drafts.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")
import fused_rope_rig
import gluon_in_torch
from octavo.ops.attention import rope_decode_kernel, rope_verify_kernel
from octavo.ops.attention.mask_spec import MaskSpec
from octavo.ops.attention.paged_plan import Heads, Planner, Scratch

CPU, BF16, HEAD, PROCESSORS = torch.device("cpu"), torch.bfloat16, 128, 48


@pytest.fixture
def in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = (rope_decode_kernel, "_rotate_and_attend"), (rope_verify_kernel, "_rotate_and_attend_columns")
    for module, kernel in kernels:
        monkeypatch.setattr(module, kernel, gluon_in_torch.InTorch(getattr(module, kernel)))
        monkeypatch.setattr(module, "num_processors", lambda device: PROCESSORS)
        monkeypatch.setattr(module, "chained", lambda device: {"PDL": True})


def attend(module: Any, heads: Heads, projected: torch.Tensor, rotation: Any, kv: Any, rows: Any, queries: int) -> Any:
    """[tokens, heads, HEAD], 7 where nothing is written."""
    scratch, spec = Scratch(CPU), MaskSpec(scale=HEAD**-0.5)
    plan = Planner(heads, spec, BF16, CPU, scratch, 256).plan(
        *rows[:2], num_tokens=len(projected), max_query_len=queries, max_seq_len=int(rows[1].max())
    )
    assert plan.rows is not None and plan.rows.max_leaves, "rows are few"
    out = torch.full((len(projected), heads.num_heads, HEAD), 7.0, dtype=BF16)
    module.fused_rope_decode(projected, rotation, kv, *rows, out, mask_spec=spec, plan=plan, scratch=scratch)
    assert not scratch.parts(0, 0, 0)[2].any(), "counters are 0 between launches"
    return out


def one_by_one(heads: Heads, projected: torch.Tensor, rotation: Any, kv: torch.Tensor, rows: Any) -> torch.Tensor:
    """The same tokens, each as its row's only query, in the order of the text."""
    start, lengths, table = rows
    out = torch.full((len(projected), heads.num_heads, HEAD), 7.0, dtype=BF16)
    for row, length in enumerate(lengths.tolist()):
        first, end = start[row : row + 2].tolist()
        for token in range(first, end):
            alone = (
                torch.tensor([0, 1], dtype=torch.int32),
                torch.tensor([length - (end - 1 - token)], dtype=torch.int32),
                table[row : row + 1],
            )
            of_token = fused_rope_rig.part_of(rotation, slice(token, token + 1))
            part = projected[token : token + 1]
            out[token] = attend(rope_decode_kernel, heads, part, of_token, kv, alone, 1)[0]
    return out


@pytest.mark.parametrize(
    ("lengths", "group", "block_size", "queries"),
    [
        ([5], 2, 16, 5),  # nothing old
        ([66, 0, 3], 4, 64, 5),  # across a tile; padding; more queries than others
        ([258, 300], 2, 16, 4),  # across a leaf's border, and behind it
        ([256], 7, 128, 3),  # a whole leaf
        ([275], 4, 16, 16),
        ([1283], 3, 64, 4),  # across halves of a leaf
    ],
)
def test_tokens_have_the_bits_of_tokens_alone(
    lengths: list[int], group: int, block_size: int, queries: int, in_torch: None
) -> None:
    """And the cache holds the same: what was in its place until then counts nowhere."""
    heads = Heads(group, 1, HEAD)
    projected, rotation, kv, rows, newest = fused_rope_rig.make(
        lengths,
        group,
        1,
        block_size,
        HEAD,
        BF16,
        queries=queries,
        device=CPU,
        normed=group != 7,
        seed=sum(lengths),
        heads_last=block_size == 16,
    )
    kv[newest] = float("nan")
    expected_kv, num_live = kv.clone(), len(newest[0])
    expected = one_by_one(heads, projected, rotation, expected_kv, rows)
    kv[newest] = float("nan")
    found = attend(rope_verify_kernel, heads, projected, rotation, kv, rows, queries)
    assert torch.equal(found.view(torch.int16), expected.view(torch.int16))
    assert torch.equal(kv.view(torch.int16), expected_kv.view(torch.int16))
    assert not found[:num_live].isnan().any()


def test_programs_are_as_many_as_columns_need() -> None:
    """5 queries of 2 heads are 10 columns, of 4 heads 20, of which a program has 8; of 7 heads it has 7."""
    rows: Any = SimpleNamespace(max_queries=5)
    assert [rope_verify_kernel.splits_of(rows, group) for group in (1, 2, 4, 7)] == [1, 2, 3, 5]
