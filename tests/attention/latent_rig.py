"""The Triton kernels of latent attention against their references, under the interpreter and, from tests/gpu, a GPU."""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Sequence
from unittest import mock

import torch

from octavo.attention.base import BACKENDS, NO_SETUP, NO_TENSORS, AttentionInputs, LayerTensors
from octavo.attention.mla import MlaBackend
from octavo.cache.specs import AttentionSpec
from octavo.ops.attention import paged_attention_eager
from octavo.ops.attention.mask_spec import MaskSpec
from octavo.ops.latent import gpu as latent
from octavo.ops.latent import latent_rope_store_reference
from octavo.ops.latent.state import LatentState
from octavo.ops.rope import rope_table

BLOCK = 16
HEADS, LATENT, ROPE = 3, 24, 8
STATE = LATENT + ROPE
SCALE = 0.2
CPU = torch.device("cpu")


class Batch:
    """Rows of (seq_len, queries) over one cache of shuffled blocks; what no row owns is NaN."""

    def __init__(
        self,
        rows: Sequence[tuple[int, int]],
        dtype: torch.dtype,
        device: torch.device,
        seed: int = 0,
        block: int = BLOCK,
    ) -> None:
        longest = max(seq_len for seq_len, _ in rows)
        history, queries = [], []
        for row in range(len(rows)):
            generator = torch.Generator().manual_seed(row)
            history.append(torch.randn(1024, STATE, generator=generator))
            queries.append(torch.randn(1024, HEADS, STATE, generator=generator))
        blocks = list(range(1, 4 + sum(-(-seq_len // block) for seq_len, _ in rows)))
        random.Random(seed).shuffle(blocks)
        width = -(-longest // block) + 1
        self.kv = torch.full((len(blocks) + 1, 1, block, STATE), torch.nan)
        table = torch.randint(0, len(blocks), (len(rows), width), dtype=torch.int32)
        parts, starts = [], [0]
        for row, (seq_len, count) in enumerate(rows):
            for first in range(0, seq_len, block):
                own = table[row, first // block] = blocks.pop()
                part = history[row][first : min(first + block, seq_len)]
                self.kv[own, 0, : len(part)] = part
            parts.append(queries[row][seq_len - count : seq_len])
            starts.append(starts[-1] + count)
        self.kv = self.kv.to(device, dtype)
        self.q = torch.cat(parts).to(device, dtype)
        ints = {"dtype": torch.int32, "device": device}
        self.inputs = AttentionInputs(
            num_rows=len(rows),
            num_tokens=len(self.q),
            max_query_len=max(count for _, count in rows),
            max_seq_len=longest,
            block_size=block,
            query_start=torch.tensor(starts, **ints),
            seq_lens=torch.tensor([seq_len for seq_len, _ in rows], **ints),
            block_table=table.to(device),
            slot_mapping=torch.full((len(self.q),), -1, device=device),
        )

    def run(self, backend: str, splits: int = 0, layer: LayerTensors = NO_TENSORS) -> torch.Tensor:
        spec = AttentionSpec(num_heads=HEADS, num_kv_heads=1, head_size=STATE, scale=SCALE, value_size=LATENT)
        setup = dataclasses.replace(NO_SETUP, cache_dtype=self.kv.dtype)
        made = BACKENDS.resolve(backend)((spec,), self.q.dtype, self.q.device, setup)
        made.prepare(self.inputs)
        out = torch.full((len(self.q), HEADS, LATENT), 7.0, dtype=self.q.dtype, device=self.q.device)
        if splits:
            floats = latent.part_floats(len(self.q), HEADS, LATENT, made._max_leaves)
            made._splits, made._scratch = splits, torch.empty(floats, device=self.q.device)
        made.run(self.q, self.kv, spec, out, layer)
        return out


def check_attention_equals_the_reference(device: torch.device, dtype: torch.dtype) -> None:
    batch = Batch([(700, 1), (40, 40), (1, 1), (513, 5), (512, 1)], dtype, device)
    expected = torch.empty(len(batch.q), HEADS, LATENT, device=device)
    inputs = batch.inputs
    paged_attention_eager(
        batch.q,
        batch.kv.float().nan_to_num(),
        inputs.query_start,
        inputs.seq_lens,
        inputs.block_table,
        expected,
        mask_spec=MaskSpec(SCALE),
        value_size=LATENT,
    )
    for splits in (1, 2, 5):
        got = batch.run("mla", splits).float()
        tolerance = {"atol": 2e-5, "rtol": 0.0} if dtype == torch.float32 else {"atol": 1e-2, "rtol": 2**-6}
        torch.testing.assert_close(got, expected, **tolerance)


def check_heads_of_several_tiles(device: torch.device, dtype: torch.dtype) -> None:
    batch = Batch([(600, 2), (40, 3)], dtype, device)
    inputs, heads = batch.inputs, torch.arange(70, device=device) % HEADS
    q, out = batch.q[:, heads], batch.q.new_empty(len(batch.q), 70, LATENT)
    expected = batch.run("mla", 1)[:, heads].float()
    for splits in (1, 2):
        latent.latent_attention(
            q,
            batch.kv,
            inputs.query_start,
            inputs.seq_lens,
            inputs.block_table,
            out,
            scale=SCALE,
            splits=splits,
            max_leaves=2,
            scratch=torch.empty(latent.part_floats(len(q), 70, LATENT, 2), device=device),
        )
        tolerance = {"atol": 2e-5, "rtol": 0.0} if dtype == torch.float32 else {"atol": 1e-2, "rtol": 2**-6}
        torch.testing.assert_close(out.float(), expected, **tolerance)


def check_a_grid_of_many_tokens_is_one_that_cuda_takes(device: torch.device, dtype: torch.dtype) -> None:
    batch = Batch([(30, 1)], dtype, device)
    inputs, q = batch.inputs, batch.q.expand(70_000, -1, -1)
    with mock.patch.object(latent, "_attend", mock.MagicMock()) as kernel:
        latent.latent_attention(
            q,
            batch.kv,
            inputs.query_start,
            inputs.seq_lens,
            inputs.block_table,
            q[..., :LATENT],
            scale=SCALE,
            splits=1,
            max_leaves=1,
            scratch=q.new_empty(0),
        )
    (grid,) = kernel.__getitem__.call_args.args
    assert max(grid[1:], default=1) <= 65_535, grid


def check_a_quantized_cache_is_its_numbers_times_the_scale(device: torch.device, dtype: torch.dtype) -> None:
    layer = LayerTensors(key_scale=torch.tensor([0.02], device=device), value_scale=torch.tensor([7.0], device=device))
    for stored in (torch.float8_e4m3fn, torch.int8):
        batch = Batch([(700, 1), (40, 40), (513, 5)], dtype, device)
        batch.kv = (batch.kv * 30).clamp(-120, 120).nan_to_num(-99).round().to(stored)
        expected = batch.run("reference", layer=layer).float()
        for splits in (1, 3):
            got = batch.run("mla", splits, layer).float()
            assert (got - expected).norm() / expected.norm() < (1e-5 if dtype == torch.float32 else 5e-3), stored


def check_bits_depend_on_the_row_only(device: torch.device, dtype: torch.dtype) -> None:
    """Split or not, other blocks, alone or not, decoded or prefilled: the last query's bits stay."""
    alone = Batch([(600, 1)], dtype, device).run("mla", 1)
    for rows, splits, seed in (([(600, 1)], 2, 1), ([(600, 30)], 1, 2), ([(600, 1), (77, 3)], 2, 3)):
        got = Batch(rows, dtype, device, seed).run("mla", splits)
        place = rows[0][1] - 1
        assert torch.equal(got[place], alone[0]), f"{rows} split by {splits} moves bits"


def check_no_bit_depends_on_the_block_size(device: torch.device, dtype: torch.dtype) -> None:
    rows, sizes = [(700, 1), (40, 9), (530, 3)], (8, 16, 48, 528)
    outs = [Batch(rows, dtype, device, seed, block).run("mla", 1) for seed, block in enumerate(sizes)]
    assert all(torch.equal(out, outs[0]) for out in outs)


def check_padding_rows_are_left_alone(device: torch.device, dtype: torch.dtype) -> None:
    batch = Batch([(30, 1), (20, 2)], dtype, device)
    expected = batch.run("mla")
    inputs = batch.inputs
    inputs.query_start = torch.cat([inputs.query_start, inputs.query_start[-1:]])
    inputs.seq_lens = torch.cat([inputs.seq_lens, torch.zeros_like(inputs.seq_lens[:1])])
    inputs.block_table = torch.cat([inputs.block_table, torch.zeros_like(inputs.block_table[:1])])
    inputs.num_rows, inputs.num_tokens = 3, 4
    inputs.slot_mapping = torch.full((4,), -1, device=device)
    batch.q = torch.cat([batch.q, torch.full_like(batch.q[:1], torch.nan)])
    got = batch.run("mla")
    assert torch.equal(got[:3], expected) and (got[3] == 7).all()


def check_store_equals_the_reference(device: torch.device, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    tokens = 5
    query = torch.randn(tokens, HEADS, 16 + ROPE, generator=generator).to(device, dtype)[..., 16:]
    state = torch.randn(tokens, STATE + 4, generator=generator).to(device, dtype)[:, 4:]
    cos_sin = rope_table(ROPE, 64).to(device)
    weight = torch.randn(LATENT, generator=generator).to(device)
    positions = torch.tensor([0, 3, 63, 9, 9], device=device)
    slots = torch.tensor([17, 3, -1, 40, 0], device=device)
    for interleaved in (False, True):
        results = []
        for operator in (latent.latent_rope_store, latent_rope_store_reference):
            kv = torch.full((4, 1, BLOCK, STATE), 7.0, dtype=dtype, device=device)
            rotated = torch.zeros(tokens, HEADS, LATENT + ROPE, dtype=dtype, device=device)
            layer = LatentState(cos_sin, weight, 1e-6, interleaved)
            operator(layer, query, state, positions, rotated[..., LATENT:], kv, slots)
            results.append((kv.float(), rotated.float()))
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        for got, expected in zip(*results, strict=True):
            torch.testing.assert_close(got, expected, atol=tolerance, rtol=0)
        assert (results[0][0] == 7).sum() == (results[1][0] == 7).sum(), "the same slots are written"
        scale = torch.tensor([0.01], device=device)
        for stored in (torch.float8_e4m3fn, torch.int8):
            results = []
            for operator in (latent.latent_rope_store, latent_rope_store_reference):
                kv = torch.full((4, 1, BLOCK, STATE), 7.0, device=device).to(stored)
                rotated = torch.zeros(tokens, HEADS, ROPE, dtype=dtype, device=device)
                layer = LatentState(cos_sin, weight, 1e-6, interleaved, scale)
                operator(layer, query, state, positions, rotated, kv, slots)
                results.append(kv.float())
            step = results[1].abs() * 2**-3 if stored == torch.float8_e4m3fn else torch.ones_like(results[1])
            assert ((results[0] - results[1]).abs() <= step).all(), "one rounding step apart at most"
            assert (results[0] != results[1]).float().mean() < 0.01


def check_head_linear_rows_keep_their_bits(device: torch.device, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(40, HEADS, 50, generator=generator).to(device, dtype)
    weight = torch.randn(HEADS, 70, 50, generator=generator).to(device, dtype)
    out = latent.head_linear(x, weight, x.new_empty(40, HEADS, 70))
    expected = torch.einsum("thk,hnk->thn", x.float(), weight.float())
    torch.testing.assert_close(out.float(), expected, atol=1e-4 if dtype == torch.float32 else 0.2, rtol=0)
    one = latent.head_linear(x[23:24], weight, x.new_empty(1, HEADS, 70))
    assert torch.equal(one[0], out[23])


CHECKS = {name: check for name, check in list(globals().items()) if name.startswith("check_")}
INTERPRETED = {name: functools.partial(check, CPU, torch.float32) for name, check in CHECKS.items()}
assert MlaBackend.capability.latent
