"""The halves of a decoder layer, and a whole decoder, in one native call each: the bits of the separate operators."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from octavo.ops import decoder, native
from octavo.ops.decoder import (
    BoundDecoder,
    DecoderLayerOperands,
    enter_attention_composed,
    enter_attention_of_few,
    leave_attention_composed,
    post_attention,
    pre_attention,
)
from octavo.ops.gemm import LinearWeight, pack_linear
from octavo.ops.gemm.fused import linear_add
from octavo.ops.inputs.tensors import LogitTokens
from octavo.ops.norm import add_rms_norm
from octavo.ops.rope import rope_table

SIZE, INNER, HEADS, KV_HEADS, HEAD, BLOCK = 72, 88, 4, 2, 24, 4
MANY = [1, 2, 3, 5, 12, 13, 16, 24, 25, 40]
needs_native = pytest.mark.skipif(not native.available(), reason="the native library is not built")
pytestmark = pytest.mark.usefixtures("isas")


@pytest.fixture(params=[pytest.param(isa, marks=needs_native) for isa in native.built_isas()] or ["none"])
def isas(request: pytest.FixtureRequest) -> Any:
    with native.using(request.param) if request.param != "none" else native.disabled():
        yield


def _operands(dtype: torch.dtype, quantization: str | None, *, seed: int = 0, **options: bool) -> DecoderLayerOperands:
    torch.manual_seed(seed)

    def weight(n: int, k: int) -> Any:
        return pack_linear((torch.randn(n, k) / k**0.5).to(dtype), quantization)

    def vector(size: int, name: str = "") -> Any:
        return 1 + 0.3 * torch.randn(size) if not name or options.get(name) else None

    qkv = weight(width := (HEADS + 2 * KV_HEADS) * HEAD, SIZE)
    mlp = not options.get("no_mlp")
    return DecoderLayerOperands(
        num_heads=HEADS, num_kv_heads=KV_HEADS, head_size=HEAD, eps=1e-5, input_norm=vector(SIZE),
        qkv=qkv, keys_values=None if options.get("whole") else qkv.behind(HEADS * HEAD),
        qkv_bias=vector(width, "bias"), q_norm=vector(HEAD, "qk_norm"),
        k_norm=vector(HEAD, "qk_norm"), head_eps=1e-6, cos_sin=rope_table(HEAD, 128, rotary_size=16),
        output=weight(SIZE, HEADS * HEAD), output_bias=vector(SIZE, "bias"), attention_norm=vector(SIZE, "out_norms"),
        mlp_norm=vector(SIZE), gate_up=weight(2 * INNER, SIZE) if mlp else None,
        down=weight(SIZE, INNER) if mlp else None, activation="gelu_tanh" if options.get("gelu") else "silu",
        mlp_out_norm=vector(SIZE, "out_norms"), scale=HEAD**-0.5, window=7 if options.get("window") else 0,
        soft_cap=2.0 if options.get("soft_cap") else 0.0,
    )  # fmt: skip


OPTIONS: list[dict[str, bool]] = [
    {},
    {"bias": True},
    {"qk_norm": True, "window": True},
    {"qk_norm": True, "out_norms": True, "gelu": True, "soft_cap": True},
]
DTYPES = [(torch.float32, None), (torch.bfloat16, None), (torch.float32, "int8"), (torch.bfloat16, "int8")]


def _cache(dtype: torch.dtype) -> torch.Tensor:
    return torch.full((40, KV_HEADS, BLOCK, 2 * HEAD), torch.nan, dtype=dtype)


def _same(first: torch.Tensor, second: torch.Tensor) -> bool:
    return torch.equal(first.nan_to_num(-77.0), second.nan_to_num(-77.0))


@pytest.mark.parametrize("options", [*OPTIONS, {"no_mlp": True}, {"whole": True}])
@pytest.mark.parametrize(("dtype", "quantization"), DTYPES)
def test_halves_equal_the_separate_operators(
    dtype: torch.dtype, quantization: str | None, options: dict[str, bool]
) -> None:
    layer = _operands(dtype, quantization, **options)
    for count in MANY:
        wide = torch.randn(count, 3 * SIZE).to(dtype)
        x, residual = wide[:, :SIZE], wide[:, 2 * SIZE :]  # strided rows
        positions = torch.randint(0, 128, (count,))
        slots = torch.randperm(40 * BLOCK)[:count]
        slots[count // 2] = -1
        for before in (None, residual):
            cache, expected_cache = _cache(dtype), _cache(dtype)
            q, total = pre_attention(layer, x, before, positions, cache, slots)
            expected_q, expected_total = enter_attention_composed(layer, x, before, positions, expected_cache, slots)
            assert torch.equal(q, expected_q) and torch.equal(total, expected_total)
            assert _same(cache, expected_cache)
            few, own_cache = torch.tensor([0, count // 3, count - 1]), _cache(dtype)
            own_q, own_total = enter_attention_of_few(layer, x, before, positions, own_cache, slots, few)
            assert torch.equal(own_q, q[few]) and torch.equal(own_total, total[few])
            assert _same(own_cache, cache)
        attended = torch.randn(count, HEADS, HEAD).to(dtype)
        found, expected = (f(layer, attended, residual) for f in (post_attention, leave_attention_composed))
        assert all(map(torch.equal, found, expected))
        assert not found[0].isnan().any()


@pytest.mark.parametrize("options", [{}, {"bias": True}, {"out_norms": True}, {"no_mlp": True}], ids=str)
@pytest.mark.parametrize("served", [("output",), ("down",), ("output", "down")], ids=str)
def test_a_product_that_adds_leaves_the_norm_the_sum(
    served: tuple[str, ...], options: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each by itself: where there is no such kernel, the norm behind adds, and nothing else does."""
    layer = _operands(torch.bfloat16, None, **options)
    attended, residual = torch.randn(5, HEADS, HEAD).bfloat16(), torch.randn(5, SIZE).bfloat16()
    separate = leave_attention_composed(layer, attended, residual)
    assert separate[1] is not None
    weights = [weight for name in served if (weight := getattr(layer, name)) is not None]
    asked: list[LinearWeight] = []
    normed: list[torch.Tensor] = []

    def at_once(x: Any, weight: LinearWeight, bias: Any, before: torch.Tensor) -> torch.Tensor | None:
        asked.append(weight)
        return linear_add(x, weight, bias, before) if weight in weights else None

    def adding_norm(*operands: Any) -> Any:
        normed.append(operands[0])
        return add_rms_norm(*operands)

    monkeypatch.setattr(decoder, "linear_add_at_once", at_once)
    monkeypatch.setattr(decoder, "add_rms_norm", adding_norm)
    x, total = leave_attention_composed(layer, attended, residual)
    adds_output = "output" in served and not options.get("out_norms")
    assert len(normed) == (not adds_output)
    if options.get("out_norms"):
        assert not asked, "what is added is not the product"
    if "down" in served and not options.get("out_norms") and layer.down is not None:
        assert total is None
        assert torch.equal(x, (separate[0].float() + separate[1].float()).bfloat16())
    else:
        assert total is not None and torch.equal(total, separate[1]) and torch.equal(x, separate[0])


@dataclasses.dataclass
class _Rows:
    num_rows: int
    query_start: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor


def _rows(lengths: list[int], seed: int) -> _Rows:
    """Prompts of the given lengths at position 0, and a padding row behind them."""
    torch.manual_seed(seed)
    count, width = len(lengths), -(-max(lengths) // BLOCK)
    table = (torch.randperm(39)[: count * width] + 1).view(count, width).to(torch.int32)
    slots = [int(table[r, p // BLOCK]) * BLOCK + p % BLOCK for r, length in enumerate(lengths) for p in range(length)]
    starts = torch.tensor([0, *lengths, 0]).cumsum(0).to(torch.int32)
    starts[-1] = sum(lengths)
    seq_lens = torch.tensor([*lengths, 0], dtype=torch.int32)
    padded = torch.cat((table, torch.zeros(1, width, dtype=torch.int32)))
    return _Rows(count, starts, seq_lens, padded, torch.tensor(slots))


@pytest.mark.parametrize("lengths", [[1], [1, 1, 1], [9, 1, 5], [21, 19]])
@pytest.mark.parametrize(("dtype", "quantization"), DTYPES)
def test_a_whole_decoder_equals_the_separate_operators(
    dtype: torch.dtype, quantization: str | None, lengths: list[int]
) -> None:
    layers = [_operands(dtype, quantization, seed=seed, **options) for seed, options in enumerate(OPTIONS)]
    norm, count, groups = torch.rand(SIZE), sum(lengths), [0, 1, 0, 1]
    x = torch.randn(count, SIZE).to(dtype)
    kept = x.clone()
    positions = torch.cat([torch.arange(length) for length in lengths])
    rows = [_rows(lengths, seed) for seed in (1, 2)]
    caches, expected_caches = ([_cache(dtype) for _ in layers] for _ in range(2))
    found = BoundDecoder(layers, norm, 1e-5, caches, groups)(x, positions, rows)
    expected = BoundDecoder(layers, norm, 1e-5, expected_caches, groups).composed(x, positions, rows)
    assert torch.equal(found, expected) and not found.isnan().any()
    assert all(map(_same, caches, expected_caches))
    assert torch.equal(x, kept), "the embedding is the caller's"
    tokens, start = torch.tensor(lengths).cumsum(0) - 1, torch.arange(len(lengths) + 1, dtype=torch.int32)
    last = LogitTokens(tokens, start[:-1].long(), positions[tokens] + 1, start)
    for num_layers in (1, 4):
        decoder = BoundDecoder(layers[:num_layers], norm, 1e-5, caches[:num_layers], groups[:num_layers])
        own = rows[: max(groups[:num_layers]) + 1]
        every = decoder(x, positions, own)
        assert torch.equal(decoder(x, positions, own, last), every[last.tokens])
        assert torch.equal(decoder.composed(x, positions, own, last), every[last.tokens])
        assert torch.equal(x, kept) and all(map(_same, caches, expected_caches))


@needs_native
def test_without_the_library_halves_are_close() -> None:
    """The eager operators of the same weights: sums in another order, the same values."""
    layer = _operands(torch.float32, None, bias=True, qk_norm=True)
    x, positions, slots = torch.randn(5, SIZE), torch.arange(5), torch.arange(5)
    cache, eager_cache = (torch.zeros(40, KV_HEADS, BLOCK, 2 * HEAD) for _ in range(2))
    q, total = pre_attention(layer, x, None, positions, cache, slots)
    found = post_attention(layer, q, total)
    with native.disabled():
        eager_q, eager_total = pre_attention(layer, x, None, positions, eager_cache, slots)
        eager = post_attention(layer, eager_q, eager_total)
    torch.testing.assert_close(q, eager_q, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(cache, eager_cache, atol=1e-5, rtol=1e-5)
    for one, other in zip(found, eager, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
