"""What the tests of the small GPU operators share, and what Triton's interpreter checks of them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import torch
import triton.language as tl
from torch import Tensor

from octavo.ops import activation, embedding, norm, rope
from octavo.ops import sampling as sample
from octavo.ops.activation import gpu as gpu_activation
from octavo.ops.cache_write import copy_blocks_gpu as gpu_copy
from octavo.ops.cache_write import zero_blocks_gpu as gpu_zero
from octavo.ops.cache_write.zero_blocks import zero_blocks_eager
from octavo.ops.copying import BlockCopy
from octavo.ops.embedding import gpu as gpu_embedding
from octavo.ops.inputs.tensors import RowTensors
from octavo.ops.lookup import gpu as gpu_lookup
from octavo.ops.lookup import look_up_eager
from octavo.ops.norm import gpu as gpu_norm
from octavo.ops.norm.groups import group_norm
from octavo.ops.rope import gpu as gpu_rope
from octavo.ops.sampling import bitmask as gpu_bitmask
from octavo.ops.sampling import gpu as gpu_sample
from octavo.ops.sampling import ranking as gpu_ranking
from octavo.ops.sampling import topk_topp as gpu_truncate
from octavo.ops.sampling import topk_topp_small as gpu_few
from octavo.ops.sampling import truncation_gpu as gpu_cut

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
# (heads, KV heads, head size, rotary size)
HEADS = ((16, 8, 128, 0), (4, 2, 64, 0), (5, 1, 80, 0), (3, 3, 256, 0), (6, 2, 64, 32), (2, 1, 96, 24), (4, 2, 15, 14))


def heavy(rows: int, width: int, dtype: torch.dtype, device: str, seed: int = 0) -> Tensor:
    """Signed, heavy-tailed rows with a gap between them, so that another order of a sum shows."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, width + 16, generator=generator)
    values *= torch.exp2(torch.rand(rows, width + 16, generator=generator) * 16 - 10)
    return values.to(dtype).to(device)[:, :width]


def assert_close(ours: Tensor, expected: Tensor, ulps: int = 1) -> None:
    """Within `ulps` of a 16-bit dtype, or 4e-6 relative in float32."""
    rtol = {BF16: 2**-7, F16: 2**-10, F32: 4e-6}[ours.dtype] * (1 if ours.dtype == F32 else ulps)
    torch.testing.assert_close(ours, expected, rtol=rtol, atol=1e-6 * float(expected.float().abs().max()))


def assert_equal(ours: Tensor, expected: Tensor) -> None:
    """The same bits; under the interpreter, which cuts what it rounds to few bits, nearly the same."""
    if ours.device.type == "cuda" or ours.dtype == F32:
        assert torch.equal(ours, expected)
    else:
        rtol, atol = (2**-7, 0) if ours.dtype == BF16 else (0.6, 2**-6)
        torch.testing.assert_close(ours.float(), expected.float(), rtol=rtol, atol=atol)


def check_norm(device: str, width: int, dtype: torch.dtype, rows: int = 5) -> None:
    x, residual = heavy(rows, width, dtype, device), heavy(rows, width, dtype, device, 1)
    weight = torch.randn(width, generator=torch.Generator().manual_seed(2)).to(device)
    assert_close(gpu_norm.rms_norm(x, weight, 1e-6), norm.rms_norm_reference(x, weight, 1e-6))
    normed, total = gpu_norm.add_rms_norm(x, residual, weight, 1e-6)
    expected, expected_total = norm.add_rms_norm_reference(x, residual, weight, 1e-6)
    assert_equal(total, expected_total)
    assert_close(normed, expected, 1 if device == "cuda" else 2)
    for narrow in (weight.to(BF16), weight.to(F16)):  # a trainer's weights are widened by the kernel
        assert torch.equal(gpu_norm.rms_norm(x, narrow, 1e-6), gpu_norm.rms_norm(x, narrow.float(), 1e-6))


def check_activation(device: str, kind: str, dtype: torch.dtype, width: int = 200) -> None:
    x = heavy(6, 2 * width, dtype, device)
    x[0, :4] = torch.tensor([0.0, -300.0, 300.0, 1e-30]).to(x)
    assert_close(
        gpu_activation.gated_activation(x, tanh=kind == "gelu_tanh"), activation.gated_activation_reference(x, kind), 2
    )
    gate, value = x.chunk(2, 1)  # rows of both lie apart
    for own in (kind, "sigmoid"):
        assert_close(gpu_activation.gated_by(value, gate, own), activation.gated_by_reference(value, gate, own), 2)
    positive = x.float().clamp(min=0.0)
    assert_equal(gpu_activation.squared_relu(x[:, :width]), (positive * positive).to(dtype)[:, :width])


def check_group_norm(device: str, dtype: torch.dtype, groups: int = 3, size: int = 40) -> None:
    """Against the operators one by one, of rows that lie apart."""
    x, gate = heavy(5, 2 * groups * size, dtype, device).chunk(2, 1)
    weight = torch.randn(groups * size, generator=torch.Generator().manual_seed(2)).to(device)
    gated = gpu_activation.gated_by(x, gate, "silu")
    for own, given in ((x, None), (gated, gate)):
        parts = [
            gpu_norm.rms_norm(part, scale, 1e-6)
            for part, scale in zip(own.chunk(groups, 1), weight.chunk(groups), strict=True)
        ]
        found = gpu_norm.group_norm(x, weight, 1e-6, given, num_groups=groups, gates_first=True)
        assert_equal(found, torch.cat(parts, 1))
        plain = group_norm(x.cpu(), weight.cpu(), groups, 1e-6, None if given is None else gate.cpu())
        assert_close(found.cpu(), plain, 4)
    normed = gpu_norm.rms_norm(x.reshape(-1, size), weight[:size], 1e-6).view_as(gated)
    found = gpu_norm.group_norm(x, weight[:size], 1e-6, gate, num_groups=groups, gates_first=False)
    assert_equal(found, gpu_activation.gated_by(normed, gate, "silu"))


def check_embedding(device: str, dtype: torch.dtype, width: int = 1100) -> None:
    table = heavy(50, width, dtype, device).contiguous()
    ids = torch.tensor([3, 49, 0, 3]).to(device)
    for out_dtype, scale in ((dtype, 1.0), (F32, 1.0), (dtype, 33.5)):
        ours = gpu_embedding.gather_rows(ids, table, out_dtype, scale)
        assert_equal(ours, embedding.gather_rows_reference(ids, table, out_dtype, scale))


class RopeCase:
    """Arguments of `qk_norm_rope_store` for `tokens` tokens; the cache has another layout where `heads_last`."""

    def __init__(
        self,
        device: str,
        dtype: torch.dtype,
        shape: tuple[int, int, int, int],
        tokens: int,
        *,
        norm: bool = True,
        cache: torch.dtype | None = None,
        heads_last: bool = False,
    ) -> None:
        heads, kv_heads, size, rotary = shape
        generator = torch.Generator().manual_seed(tokens)
        self.qkv = heavy(tokens, (heads + 2 * kv_heads) * size, dtype, device)
        self.positions = torch.randint(0, 300, (tokens,), generator=generator).to(device)
        self.table = rope.rope_table(size, 300, rotary_size=rotary).to(device)
        weights = 1 + 0.1 * torch.randn(2, size, generator=generator).to(device)
        self.norms = (weights[0], weights[1]) if norm else (None, None)
        self.shape = (heads, kv_heads, size)
        blocks = tokens // 16 + 2
        kv = torch.zeros((blocks, 16, kv_heads, 2 * size) if heads_last else (blocks, kv_heads, 16, 2 * size))
        kv = kv.to(cache or dtype).to(device)
        self.kv = kv.transpose(1, 2) if heads_last else kv
        self.slots = (torch.randperm((blocks - 1) * 16, generator=generator)[:tokens] + 16).to(device)
        self.slots[2::7] = -1
        scales = torch.rand(2, kv_heads, generator=generator).to(device) + 0.5
        self.scales = (scales[0], scales[1]) if cache else (None, None)

    def call(self, function: Callable[..., Tensor], pick: slice | Tensor = slice(None)) -> tuple[Tensor, Tensor]:
        """(q, the cache's bytes) of the picked tokens."""
        kv = self.kv.clone(memory_format=torch.preserve_format)
        q = function(
            self.qkv[pick],
            self.positions[pick],
            self.table,
            *self.norms,
            1e-6,
            *self.shape,
            kv,
            self.slots[pick],
            0.7,
            *self.scales,
        )
        return q, kv

    def in_lines(self) -> Tensor:
        """q, taken from tiles of 16 lines."""
        heads, kv_heads, size = self.shape
        group = heads // kv_heads
        tile = gpu_rope.Tile(group, 16, 16 // group, len(self.positions) + 1)
        q, _ = self.call(functools.partial(gpu_rope.qk_norm_rope_store, tile=tile))
        lines = q.view(tile.num, kv_heads, 16, size)[:-1]
        line = (self.positions % tile.tokens)[:, None] * group + torch.arange(group, device=q.device)  # [tokens, group]
        picked = lines.gather(2, line[:, None, :, None].expand(-1, kv_heads, -1, size))
        return picked.reshape(len(picked), heads, size)


def check_rope(device: str, dtype: torch.dtype, shape: tuple[int, int, int, int], tokens: int = 9) -> None:
    for options in (
        {"norm": True},
        {"norm": False, "heads_last": True},
        {"cache": torch.float8_e4m3fn},
        {"cache": torch.int8},
    ):
        case = RopeCase(device, dtype, shape, tokens, **options)
        q, kv = case.call(gpu_rope.qk_norm_rope_store)
        assert_equal(case.in_lines(), q)
        if options.get("norm"):
            first, second = (weight.to(BF16) for weight in case.norms if weight is not None)
            answers = []
            for case.norms in ((first, second), (first.float(), second.float())):
                answers.append(case.call(gpu_rope.qk_norm_rope_store))
            assert all(torch.equal(*same) for same in zip(*answers, strict=True)), "a kernel widens weights otherwise"
            case = RopeCase(device, dtype, shape, tokens, **options)
        expected_q, expected_kv = case.call(rope.qk_norm_rope_store_eager)
        # a normed channel may round the other way, which the rotation mixes into two
        scale = float(expected_q.float().abs().max())
        step = {BF16: 2**-7, F16: 2**-10, F32: 1e-5}[dtype]
        torch.testing.assert_close(q, expected_q, rtol=step, atol=step * scale)
        assert_equal(kv[..., case.shape[2] :].contiguous(), expected_kv[..., case.shape[2] :].contiguous())
        kv, expected_kv = kv.float(), expected_kv.float()
        step = (2**-3 if device == "cuda" else 0.6) if "cache" in options else step
        torch.testing.assert_close(kv, expected_kv, rtol=step, atol=step * float(expected_kv.abs().max()) * 0.5)
        assert torch.equal((kv == 0).all(-1), (expected_kv == 0).all(-1)), "another set of slots was written"


class Logits:
    """Strided logits rows of every kind, with a temperature, seed, position and cuts for each, on the CPU."""

    def __init__(self, vocab_size: int, rows: int = 24) -> None:
        generator = torch.Generator().manual_seed(vocab_size)
        self.values = 3 * torch.randn(rows, vocab_size + 16, generator=generator)[:, :vocab_size]
        self.values[4, 1::2] = float("-inf")
        self.values[5] = float("-inf")
        self.values[7] = torch.randint(0, 3, (vocab_size,), generator=generator).float()
        self.values[8] = 0.0
        self.temperatures = torch.rand(rows, generator=generator) * 2 + 0.01
        self.temperatures[::5] = 0
        self.seeds = torch.randint(-(2**62), 2**62, (rows,), generator=generator) * 2 + 1
        self.positions = torch.randint(0, 2**31, (rows,), generator=generator)
        self.top_k = torch.randint(-1, vocab_size + 2, (rows,), generator=generator)
        self.top_k[:16] = torch.randint(1, 9, (16,), generator=generator)
        self.top_p = torch.rand(rows, generator=generator)
        self.min_p = torch.rand(rows, generator=generator) * 0.3


def _few(values: Tensor, order: Tensor, *tables: Tensor) -> list[tuple[Tensor, ...]]:
    """Logits, rows and positions by a few lines."""
    return [*zip(values.split(5), order.split(5), tables[-1].split(5), strict=True)]


def check_draw(device: str, vocab_size: int) -> None:
    case = Logits(vocab_size)
    case.values[9, vocab_size // 2] = case.values[10, -1] = float("nan")
    order = torch.arange(23, -1, -1)
    arguments = [x.to(device) for x in (case.values, order, case.temperatures, case.seeds, case.positions)]
    tokens, failed = gpu_sample.draw(*arguments)
    expected, expected_failed = sample.draw(case.values, order, case.temperatures, case.seeds, case.positions)
    assert torch.equal(tokens.cpu(), expected)
    assert torch.equal(failed.cpu(), expected_failed)
    few = [gpu_sample.draw(values, at, *arguments[2:4], places, ready=True) for values, at, places in _few(*arguments)]
    assert torch.equal(torch.cat([one for one, _ in few]).cpu(), expected), "other tokens where noise is ready"
    assert torch.equal(torch.cat([one for _, one in few]).cpu(), expected_failed)
    later = sample.draw(case.values, order, case.temperatures, case.seeds, case.positions, ahead=3)[0]
    assert torch.equal(gpu_sample.draw(*arguments, ahead=3)[0].cpu(), later) and not torch.equal(later, expected)
    at_places = case.temperatures, case.seeds, case.positions + 3
    assert torch.equal(sample.draw(case.values, order, *at_places)[0], later)


def check_logprobs(device: str, vocab_size: int, ks: tuple[int, ...] = (1, 5, 20, sample.FEW + 1)) -> None:
    case = Logits(vocab_size)
    logits = case.values.to(device)
    ids = torch.randint(0, vocab_size, (24,), generator=torch.Generator().manual_seed(3))
    ids[4] = 0
    finite = [row for row in range(24) if row != 5]
    exact = case.values.double().log_softmax(dim=1)

    def compare(ours: Tensor, expected: Tensor) -> None:
        torch.testing.assert_close(ours.cpu().double()[finite], expected[finite], atol=4e-6, rtol=1e-6)

    largest, log_sum = gpu_sample.logprob_stats(logits)
    assert torch.equal(largest.cpu(), case.values.amax(dim=1))
    compare(log_sum, case.values.double().logsumexp(dim=1))
    logprobs, ranks = gpu_sample.token_logprobs(logits, ids.to(device))
    compare(logprobs, exact.gather(1, ids[:, None])[:, 0])
    assert torch.equal(ranks.cpu(), sample.token_logprobs_eager(case.values, ids)[1])
    for k in ks:
        k = min(k, vocab_size)
        top, top_values = gpu_sample.top_logprobs(logits, k, few=k <= sample.FEW)
        assert torch.equal(top.cpu(), sample.top_logprobs_eager(case.values, k)[0])
        compare(top_values, exact.gather(1, top.cpu()))
        for at in (0, k - 1):
            alone = gpu_sample.token_logprobs(logits, top[:, at].contiguous())[0]
            assert torch.equal(top_values[finite, at], alone[finite]), "other bits than token_logprobs"


def cut_tables(case: Logits) -> dict[str, Tensor]:
    """TruncationRows of all kinds together, for most rows."""
    divisors = case.temperatures + 0.2
    divisors[1::8] = 0.0
    return {"divisors": divisors, "top_k": case.top_k, "top_p": case.top_p, "min_p": case.min_p}


def check_cuts(device: str, vocab_size: int, kinds: slice = slice(None)) -> None:
    """Each cut alone and all together, a small top-k too; rows without cuts between them, and every kind of logits."""
    case, off, generator = Logits(vocab_size), torch.zeros(24), torch.Generator().manual_seed(1)
    case.values[11], case.values[12], case.values[13] = float("-inf"), 2.0, case.values[13] * 8
    case.values[11, :3] = case.values[12, -2:] = 1.0
    case.values[14, :8] += 30
    few = torch.randint(1, min(64, vocab_size) + 1, (24,), generator=generator)
    tables = cut_tables(case)
    logits, rows = case.values[3:15], torch.randperm(24, generator=generator)[:12]
    draws = (off + 1, case.seeds, case.positions[:12])
    for top_k, top_p, min_p in (
        (case.top_k, case.top_p, case.min_p),
        (off.long(), 0.9 + 0.1 * case.top_p, off),
        (few, off + 0.95, off),
        (case.top_k, off + 1, off),
        (off.long() + 1, off + 1e-9, off),
        (off.long(), off + 1, case.min_p),
        (off.long(), off + 0.9999, off),
        (few, case.top_p, 0.1 * case.min_p),
        (off.long(), case.top_p, off),
    )[kinds]:
        tables |= {"top_k": top_k, "top_p": top_p, "min_p": min_p}
        truncation = sample.TruncationRows(**tables)
        there = sample.TruncationRows(**{name: x.to(device) for name, x in tables.items()})
        expected, ours = logits.clone(), logits.to(device, copy=True)
        sample.cut_(expected, rows, truncation)
        gpu_cut.cut_(ours, rows.to(device), there)
        assert torch.equal(ours.cpu(), expected), (ours.cpu() != expected).any(1).nonzero().flatten()
    tokens, _ = gpu_sample.draw(logits.to(device), rows.to(device), *(x.to(device) for x in draws), there)
    assert torch.equal(tokens.cpu(), sample.draw(logits, rows, *draws, truncation)[0])


def check_bits(device: str, vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = Logits(vocab_size).values.contiguous()
    words = torch.randint(-(2**31), 2**31, (5, vocab_size // 32 + 2), generator=generator).int()
    at = torch.tensor([3, 0, 23, 9, 5])
    expected, ours = logits.clone(), logits.to(device)
    sample.allow_bits_(expected, at, words)
    gpu_bitmask.allow_bits_(ours, at.to(device), words.to(device))
    assert torch.equal(ours.cpu(), expected)
    for line, row in enumerate(at.tolist()):
        for token in (0, 31, 32, vocab_size - 1):
            allowed = int(words[line, token // 32]) >> (token % 32) & 1
            assert expected[row, token] == (logits[row, token] if allowed else float("-inf"))


def check_zero_blocks(device: str, pages: int, num_blocks: int, size: int, ids: list[int]) -> None:
    """Poison everywhere, and no other byte changes."""
    data = torch.full((pages, num_blocks, size), 0x7F, dtype=torch.uint8, device=device)
    expected = data.clone()
    gpu_zero.zero_blocks(data, ids)
    zero_blocks_eager(expected, ids)
    assert torch.equal(data, expected)


def check_copy_blocks(device: str, pages: tuple[int, int], part: int, kernel: Any = gpu_copy) -> None:
    """Blocks of one cache into another's, whose pages lie together (1 of them) or apart; no other byte changes."""
    parts, counts, offset = max(pages), (9, 7), 16
    generator = torch.Generator().manual_seed(part)
    own, theirs = (
        torch.randint(256, (page, count, part * parts // page), dtype=torch.uint8, generator=generator).to(device)
        for page, count in zip(pages, counts, strict=True)
    )
    beside = torch.cat([theirs.new_zeros(offset), theirs.view(-1)])  # no block begins where an allocation does
    blocks = np.array([[8, 0, 3], [2, 6, 1]])
    expected = own.clone()
    for here, there in blocks.T.tolist():
        expected[:, here] = theirs[:, there].reshape(-1).view(pages[0], -1)
    strides = [
        (part * (count if page == parts else 1), part if page == parts else part * parts)
        for page, count in zip(pages, counts, strict=True)
    ]
    copy = BlockCopy(own, beside.data_ptr() + offset, blocks, (strides[0], strides[1]), parts, part)
    kernel.copy_blocks(copy)
    assert torch.equal(own, expected)


def interpreted_copy_blocks() -> None:
    with mock.patch.multiple(gpu_copy, _BLOCK=32, _PROGRAMS=5):
        for pages in ((3, 3), (1, 1), (3, 1), (1, 3)):
            check_copy_blocks("cpu", pages, 400)
        check_copy_blocks("cpu", (2, 1), 33)


def interpreted_norm() -> None:
    for width in (1, 17, 96, 256):
        check_norm("cpu", width, F32)
        check_norm("cpu", width, BF16)
    check_group_norm("cpu", F32)
    check_group_norm("cpu", BF16, 1, 96)


def interpreted_activation() -> None:
    check_activation("cpu", "silu", F32)
    check_activation("cpu", "gelu_tanh", BF16)


def interpreted_embedding() -> None:
    check_embedding("cpu", F32)
    check_embedding("cpu", BF16)


def interpreted_rope() -> None:
    for shape in HEADS[1:]:
        check_rope("cpu", F32, shape)


def interpreted_rows() -> None:
    x, weight = heavy(7, 272, F32, "cpu"), torch.ones(272)
    whole = gpu_norm.rms_norm(x, weight, 1e-6)
    for i in range(7):
        assert torch.equal(gpu_norm.rms_norm(x[i : i + 1], weight, 1e-6), whole[i : i + 1])


def interpreted_draw() -> None:
    gpu_sample._PROGRAMS = 48  # few enough that a program passes several tiles, and rows are still split
    for vocab_size in (7, 3000):
        check_draw("cpu", vocab_size)


def interpreted_logprobs() -> None:
    gpu_few._ROOM = 64
    check_logprobs("cpu", 60, (1, 5))
    check_logprobs("cpu", 4200, (sample.FEW + 1,))


def interpreted_cuts() -> None:
    """Also with lists too small for what is near a cut, and with none near enough."""
    gpu_ranking._SCAN = tl.constexpr(256)
    gpu_few._MAX_LEAVES, gpu_few._ROOM = 16, 64
    for vocab_size, room, margin, num_kinds in ((7, 64, 16, 4), (700, 64, 16, 3), (200, 8, 64, 2), (200, 64, 1, 2)):
        gpu_truncate._ROOM, gpu_truncate._MARGIN = tl.constexpr(room), tl.constexpr(margin)
        check_cuts("cpu", vocab_size, slice(num_kinds))


def interpreted_lists() -> None:
    """Ordinary rows, and such with tokens far ahead, are cut without a search of the row."""
    gpu_truncate._PROGRAMS, gpu_truncate._ROOM, gpu_truncate._MARGIN = 8, tl.constexpr(512), tl.constexpr(64)
    logits = 2 * torch.randn(5, 9000, generator=torch.Generator().manual_seed(1))
    logits[1, 5], logits[2, :3], logits[3, 300:] = 14.0, 25.0, float("-inf")
    tables = {"divisors": torch.tensor([1.0, 1.0, 0.7, 1.5, 2.0]), "min_p": torch.tensor([0.0, 0.0, 0.01, 0.0, 0.0])}
    for top_k, top_p in ((0, 0.9), (1000, 0.5)):
        truncation = sample.TruncationRows(
            **tables, top_k=torch.full((5,), top_k), top_p=torch.full((5,), top_p), few=False
        )
        expected, ours = logits.clone(), logits.clone()
        sample.cut_(expected, torch.arange(5), truncation)
        with mock.patch.object(gpu_truncate, "search_row", None):
            gpu_cut.cut_(ours, torch.arange(5), truncation)
        assert torch.equal(ours, expected)


def interpreted_bits() -> None:
    check_bits("cpu", 100)


def interpreted_zero_blocks() -> None:
    check_zero_blocks("cpu", 3, 7, 96, [5, 1])
    check_zero_blocks("cpu", 1, 4, 20_000, [3])
    check_zero_blocks("cpu", 2, 5, 33, [0, 4, 2])


def check_look_up(device: str, width: int) -> None:
    """Rows of few words, so that runs of every length come again; some end at the table's end, some are not live."""
    generator = torch.Generator().manual_seed(width)
    token_ids = torch.randint(0, 5, (9, width), generator=generator, dtype=torch.int32)
    totals = torch.tensor([width - 4, width, width - 1, 1, 2, 3, width // 2, width - 9, 0], dtype=torch.int32)
    rows, live = torch.tensor([7, 0, 1, 2, 3, 4, 5, 6, 8, 8]), torch.tensor([True] * 7 + [False, True, False])
    for shortest, longest, num_drafts in ((1, 4, 3), (3, 3, 7), (2, 9, 1)):
        table = RowTensors(token_ids.clone(), totals, totals)
        look_up_eager(table, rows, live, shortest=shortest, longest=longest, num_drafts=num_drafts)
        ours = RowTensors(token_ids.to(device).clone(), totals.to(device), totals.to(device))
        gpu_lookup.look_up_rows(ours, rows.to(device), live.to(device), shortest, longest, num_drafts)
        assert torch.equal(ours.token_ids.cpu(), table.token_ids)
        assert shortest > 1 or not torch.equal(table.token_ids, token_ids)
        assert (
            table.token_ids[3, 1 : 1 + num_drafts] == token_ids[3, 0]
        ).all()  # of a row of one token nothing is found


def interpreted_look_up() -> None:
    gpu_lookup._BLOCK = 16
    check_look_up("cpu", 70)


INTERPRETED = {name: check for name, check in list(globals().items()) if name.startswith("interpreted_")}
