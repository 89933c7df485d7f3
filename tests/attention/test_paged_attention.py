"""Native paged attention against its reference implementation, and the bits that must not move."""

from __future__ import annotations

import random
from typing import Any
from unittest import mock

import pytest
import torch

from batches import Batch, History, make_batch, make_history
from octavo.ops import attention, native
from octavo.ops.attention import LEAF, TILE, paged_attention, paged_attention_eager
from octavo.ops.attention.mask_spec import MaskSpec

needs_native = pytest.mark.skipif(not native.available(), reason="the native library is not built")


@pytest.fixture(autouse=True)
def _keep_threads():
    before = native.num_threads()
    yield
    if native.available():
        native.set_num_threads(before)


def attend(batch: Batch, operator: Any = paged_attention, **options) -> torch.Tensor:
    out = torch.full_like(batch.q, 7.0)
    others = {name: options.pop(name) for name in ("alibi_slopes", "sinks", "in_pairs") if name in options}
    operator(*batch.args(), out, mask_spec=MaskSpec(batch.q.shape[2] ** -0.5, **options), **others)
    return out


@needs_native
@pytest.mark.parametrize("seed", range(40))
def test_native_equals_the_reference(seed: int) -> None:
    rng = random.Random(seed)
    group, kv_heads = rng.choice([1, 2, 3, 4, 5, 8]), rng.choice([1, 2, 3])
    head_size, dtype = rng.choice([15, 16, 24, 64, 80, 128, 256]), rng.choice([torch.float32, torch.bfloat16])
    options = {"window": rng.choice([0, 0, 1, 17, 100, 513]), "soft_cap": rng.choice([0.0, 30.0, 5.0])}
    rows = []
    for _ in range(rng.randrange(1, 5)):
        seq_len = rng.randrange(1, rng.choice([40, 700, 1300]))
        history = make_history(rng.randrange(10**6), seq_len, group * kv_heads, kv_heads, head_size, dtype)
        rows.append((history, seq_len, min(seq_len, rng.choice([1, 1, 5, rng.randrange(1, 90)]))))
    batch = make_batch(rows, rng.choice([1, 8, 16, 48, 64]), seed=seed, heads_last=rng.random() < 0.5)
    expected = torch.empty(batch.q.shape)
    paged_attention_eager(*batch.args(), expected, mask_spec=MaskSpec(head_size**-0.5, **options))
    tolerance = {"atol": 1e-5, "rtol": 0} if dtype == torch.float32 else {"atol": 1e-3, "rtol": 2**-8}
    torch.testing.assert_close(attend(batch, **options).float(), expected, **tolerance)
    in_pairs = attend(batch, in_pairs=True, **options)
    if dtype == torch.float32:
        assert torch.equal(in_pairs, attend(batch, **options)), "pairs are of bfloat16 alone"
    else:  # the softmax's weights have 8 bits
        torch.testing.assert_close(in_pairs.float(), expected, atol=4e-3, rtol=2**-7)


def _history(dtype: torch.dtype = torch.float32, num_tokens: int = 1200) -> History:
    return make_history(5, num_tokens, 6, 2, 64, dtype)


def _eager_as_on_a_gpu(*arguments: Any, **options: Any) -> None:
    with mock.patch.object(attention, "_TILE", attention._LARGE_TILE):
        paged_attention_eager(*arguments, **options)


def _in_pairs(*arguments: Any, **options: Any) -> None:
    paged_attention(*arguments, in_pairs=True, **options)


EDGES = sorted({1, 2, TILE - 1, TILE, TILE + 1, LEAF - 1, LEAF, LEAF + 1, 2 * LEAF + 5, 1200})


DTYPES = [torch.float32, torch.bfloat16]
OPERATORS = [
    pytest.param(paged_attention, marks=needs_native, id="native"),
    pytest.param(_in_pairs, marks=needs_native, id="in pairs"),
    pytest.param(paged_attention_eager, id="eager"),
    pytest.param(_eager_as_on_a_gpu, id="eager, large tiles"),
]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"window": 70},
    {"window": 600, "soft_cap": 20.0},
    {"chunk": 300},
    {"alibi_slopes": (0.5, 0.25, 0.1, 0.05, 0.02, 0.01), "sinks": torch.linspace(-2, 4, 6)},
]
CASES = [
    pytest.param(*operator.values, dtype, options, marks=operator.marks, id=f"{options}-{dtype}-{operator.id}")
    for place, options in enumerate(OPTIONS)
    for operator in OPERATORS
    for turn, dtype in enumerate(DTYPES)
    if "eager" not in str(operator.id) or turn == place % 2  # the slow ones compute in float32, whatever they read
]


@pytest.mark.parametrize(("operator", "dtype", "options"), CASES)
def test_decode_prefill_and_chunks_have_the_same_bits(
    operator: Any, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    history = _history(dtype)
    whole = attend(make_batch([(history, 1200, 1200)], 16), operator, **options)
    for end in EDGES:
        assert torch.equal(attend(make_batch([(history, end, 1)], 16), operator, **options)[0], whole[end - 1]), end
    position = 0
    for chunk in (3, 13, 48, 64, 500, 572):
        position += chunk
        out = attend(make_batch([(history, position, chunk)], 16), operator, **options)
        assert torch.equal(out, whole[position - chunk : position]), position


@needs_native
@pytest.mark.parametrize("cache", [torch.float8_e4m3fn, torch.int8])
def test_decode_prefill_and_chunks_of_a_quantized_cache_have_the_same_bits(cache: torch.dtype) -> None:
    """And near the reference implementation."""
    history, scale = _history(), {"key_scale": torch.tensor([0.02, 0.03]), "value_scale": torch.tensor([0.03, 0.01])}

    def run(end: int, queries: int, function: Any = paged_attention) -> torch.Tensor:
        batch = make_batch([(history, end, queries)], 16)
        kv = (batch.kv.nan_to_num(9.0) / 0.03).clamp(-127, 127)
        batch.kv = (kv.round() if cache == torch.int8 else kv).to(cache)
        out = torch.full_like(batch.q, 7.0)
        function(*batch.args(), out, mask_spec=MaskSpec(0.125), **scale)
        return out

    whole = run(1200, 1200)
    torch.testing.assert_close(whole, run(1200, 1200, paged_attention_eager), atol=2e-5, rtol=0)
    for end in EDGES:
        assert torch.equal(run(end, 1)[0], whole[end - 1]), end
    assert torch.equal(run(700, 333), whole[367:700])


@needs_native
def test_neighbours_do_not_move_bits() -> None:
    history, others = _history(), [make_history(seed, 900, 6, 2, 64, torch.float32) for seed in (8, 9)]
    row = (history, 1111, 3)
    alone = attend(make_batch([row], 16))
    crowd = attend(make_batch([(others[0], 900, 200), (others[1], 17, 1), row, (others[1], 640, 5)], 16, seed=1))
    assert torch.equal(crowd[201:204], alone)


FORMS = pytest.mark.parametrize(
    ("dtype", "in_pairs"), [(torch.float32, False), (torch.bfloat16, True)], ids=["float32", "in pairs"]
)


@needs_native
@FORMS
def test_block_size_placement_and_layout_do_not_move_bits(dtype: torch.dtype, in_pairs: bool) -> None:
    rows = [(_history(dtype), 1111, 70), (_history(dtype), 33, 1)]
    expected = attend(make_batch(rows, 16), in_pairs=in_pairs)
    for seed, block_size in enumerate((8, 16, 64, 7)):
        for heads_last in (False, True):
            batch = make_batch(rows, block_size, seed=seed, heads_last=heads_last)
            assert torch.equal(attend(batch, in_pairs=in_pairs), expected), (block_size, heads_last)


@needs_native
@FORMS
@pytest.mark.parametrize("rows", [[(1200, 1)], [(1200, 400)], [(1200, 1), (1100, 2), (5, 5)]])
def test_threads_do_not_move_bits(rows: list[tuple[int, int]], dtype: torch.dtype, in_pairs: bool) -> None:
    batch = make_batch([(make_history(4, 1200, 16, 2, 128, dtype), *row) for row in rows], 16)
    native.set_num_threads(1)
    expected = attend(batch, in_pairs=in_pairs)
    for threads in (2, 3, 8):
        native.set_num_threads(threads)
        assert torch.equal(attend(batch, in_pairs=in_pairs), expected), threads


@needs_native
@pytest.mark.parametrize("in_pairs", [False, True])
def test_instruction_sets_have_the_same_bits(in_pairs: bool) -> None:
    if len(native.built_isas()) < 2:
        pytest.skip("only one instruction set is built and runs here")
    for head_size in (16, 33, 40, 128):
        history = make_history(6, 700, 8, 2, head_size, torch.bfloat16)
        batch = make_batch([(history, 700, 90), (history, 40, 1)], 16)
        results = []
        for isa in native.built_isas():
            with native.using(isa):
                results.append(attend(batch, soft_cap=10.0, window=300, in_pairs=in_pairs))
        assert all(torch.equal(result, results[0]) for result in results[1:])


@needs_native
@FORMS
@pytest.mark.parametrize("first", [60, 61])
def test_a_later_token_with_nan_does_not_reach_earlier_queries(first: int, dtype: torch.dtype, in_pairs: bool) -> None:
    history = _history(dtype, num_tokens=100)
    clean = attend(make_batch([(history, 100, 100)], 16), in_pairs=in_pairs)
    history.kv[first:] = float("nan")
    seen = attend(make_batch([(history, 100, 100)], 16), in_pairs=in_pairs)
    assert torch.equal(seen[:first], clean[:first]) and seen[first:].isnan().all()


@needs_native
def test_slid_out_blocks_are_not_read() -> None:
    batch = make_batch([(_history(), 1000, 4)], 16)
    expected = attend(batch, window=100)
    batch.block_table[0, : (1000 - 4 + 1 - 100) // 16] = 2**31 - 1
    assert torch.equal(attend(batch, window=100), expected)


@pytest.mark.parametrize("eager", [False, True])
def test_a_padding_token_becomes_zero_and_tokens_beyond_the_rows_stay(eager: bool) -> None:
    batch = make_batch([(_history(), 9, 2)], 16)
    batch.query_start = torch.tensor([0, 2, 3], dtype=torch.int32)
    batch.seq_lens = torch.tensor([9, 0], dtype=torch.int32)
    batch.block_table = torch.cat([batch.block_table, torch.zeros_like(batch.block_table)])
    batch.q = torch.cat([batch.q, batch.q])
    out = torch.full_like(batch.q, 7.0)
    (paged_attention_eager if eager else paged_attention)(*batch.args(), out, mask_spec=MaskSpec(0.1))
    assert (out[:2] != 7).all() and (out[2] == 0).all() and (out[3] == 7).all()
