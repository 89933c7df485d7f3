"""Rotation, store and attention of decoding rows in the kernel in Gluon, run in torch, against the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")
import fused_rope_rig
import gluon_in_torch
from octavo.ops.attention import paged_attention_eager, rope_decode_kernel
from octavo.ops.attention.mask_spec import MaskSpec
from octavo.ops.attention.paged_plan import Heads, Planner, Scratch
from octavo.ops.rope import Rotation, qk_norm_rope_store_eager

CPU, BF16, HEAD = torch.device("cpu"), torch.bfloat16, 128
PROCESSORS = 32


def use_torch(monkeypatch: pytest.MonkeyPatch, module: Any, kernel: str) -> None:
    """Launches of a module's kernel run in torch, as on a GPU that launches early."""
    monkeypatch.setattr(module, kernel, gluon_in_torch.InTorch(getattr(module, kernel)))
    monkeypatch.setattr(module, "num_processors", lambda device: PROCESSORS)
    monkeypatch.setattr(module, "chained", lambda device: {"PDL": True})


def attend(
    run: Any, heads: Heads, projected: torch.Tensor, rotation: Rotation, kv: torch.Tensor, rows: Any, queries: int
) -> torch.Tensor:
    """What `run` gives, of the form of `fused_rope_decode`: [tokens, heads, HEAD], 7 where it writes nothing."""
    scratch, spec = Scratch(CPU), MaskSpec(scale=HEAD**-0.5)
    plan = Planner(heads, spec, BF16, CPU, scratch, PROCESSORS).plan(
        *rows[:2], num_tokens=len(projected), max_query_len=queries, max_seq_len=int(rows[1].max())
    )
    out = torch.full((len(projected), heads.num_heads, HEAD), 7.0, dtype=BF16)
    run(projected, rotation, kv, *rows, out, mask_spec=spec, plan=plan, scratch=scratch)
    assert not scratch.parts(0, 0, 0)[2].any(), "counters are 0 between launches"
    return out


def expect(
    heads: Heads, projected: torch.Tensor, rotation: Rotation, kv: torch.Tensor, rows: Any, num_live: int
) -> torch.Tensor:
    """`attend` by the reference implementations, one behind the other; nothing of padding rows."""
    sizes = heads.num_heads, heads.num_kv_heads, heads.size
    norms, table = (rotation.q_norm, rotation.k_norm, rotation.eps), (kv, rotation.slot_mapping)
    q = qk_norm_rope_store_eager(projected, rotation.positions, rotation.cos_sin, *norms, *sizes, *table)
    out = torch.full_like(q, 7.0)
    paged_attention_eager(q, kv, *rows, out, mask_spec=MaskSpec(scale=HEAD**-0.5))
    out[num_live:] = 7.0
    return out


@pytest.mark.parametrize(
    ("lengths", "group", "block_size"),
    [
        ([1], 2, 16),  # nothing old
        ([66, 0, 3], 4, 64),  # across a tile; padding
        ([256], 7, 128),  # a whole leaf
        ([300, 257], 1, 16),  # across a leaf's border
    ],
)
def test_a_row_is_near_the_reference(
    lengths: list[int], group: int, block_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And in the cache is what the reference puts there: what was in its place until then counts nowhere."""
    use_torch(monkeypatch, rope_decode_kernel, "_rotate_and_attend")
    heads = Heads(group, 1, HEAD)
    made: dict[str, Any] = {"normed": group != 7, "seed": sum(lengths), "heads_last": block_size == 16}
    projected, rotation, kv, rows, newest = fused_rope_rig.make(
        lengths, group, 1, block_size, HEAD, BF16, queries=1, device=CPU, **made
    )
    kv[newest] = float("nan")
    expected_kv, num_live = kv.clone(), len(newest[0])
    expected = expect(heads, projected, rotation, expected_kv, rows, num_live)
    found = attend(rope_decode_kernel.fused_rope_decode, heads, projected, rotation, kv, rows, 1)
    torch.testing.assert_close(found, expected, rtol=2**-6, atol=2**-6)
    torch.testing.assert_close(kv, expected_kv, rtol=2**-7, atol=1e-6, equal_nan=True)
    assert not found[:num_live].isnan().any()
