"""Products of bfloat16 in pairs: what vdpbf16ps computes, bit for bit, by the processor and by its emulation."""

from __future__ import annotations

import contextlib
import math
import random
import struct
from collections.abc import Iterator
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from octavo.ops import native
from octavo.ops.embedding import embed_rows, embed_rows_reference
from octavo.ops.gemm import LinearWeight, linear, pack_linear, packed_bytes, unpack
from test_matmul import heavy_tailed

pytestmark = pytest.mark.skipif(not native.available(), reason="no native library is built")
ISAS = native.built_isas()
EMULATING = tuple(isa for isa in ISAS if isa != native.MULTIPLIES_PAIRS)
needs_pairs = pytest.mark.skipif(native.MULTIPLIES_PAIRS not in ISAS, reason="this processor multiplies no pairs")


@contextlib.contextmanager
def chain_set(name: str) -> Iterator[None]:
    native.set_bfloat16_chain(name)
    try:
        yield
    finally:
        native.set_bfloat16_chain("auto")


@pytest.fixture(autouse=True)
def _keep_threads() -> Iterator[None]:
    before = native.num_threads()
    yield
    native.set_num_threads(before)


def pack(values: Tensor) -> LinearWeight:
    with chain_set("pairs"):
        return pack_linear(values)


def dot_pairs(sums: Tensor, x: Tensor, w: Tensor, *, emulated: bool = True) -> Tensor:
    """One step for each of float32 sums and words (int32), all of one shape."""
    sums, x, w = (each.contiguous() for each in torch.broadcast_tensors(sums, x, w))
    out = torch.empty_like(sums)
    native.lib().octavo_dot_pairs(*(each.data_ptr() for each in (sums, x, w, out)), out.numel(), emulated)
    return out


def words(rows: Tensor) -> Tensor:
    """bfloat16 [M, K] -> int32 [M, ceil(K / 2)]: a last word that is half a pair gets a zero."""
    return torch.nn.functional.pad(rows, (0, rows.shape[1] % 2)).contiguous().view(torch.int32)


def chain(x: Tensor, weight: Tensor) -> Tensor:
    """The product's definition: x [M, K], weight [N, K] bfloat16 -> [M, N] float32, a pair after another."""
    acc = torch.zeros(x.shape[0], weight.shape[0])
    for a, b in zip(words(x).unbind(1), words(weight).unbind(1), strict=True):
        acc = dot_pairs(acc, a[:, None], b[None, :])
    return acc


def same(left: Tensor, right: Tensor) -> bool:
    """In every bit, all NaNs being alike."""
    as_int = {2: torch.int16, 4: torch.int32}[left.element_size()]
    equal = (left.view(as_int) == right.view(as_int)) | (left.isnan() & right.isnan())
    return left.shape == right.shape and bool(equal.all())


def rounded(exact: Fraction, sign: float) -> float:
    """To 24 bits, ties to even; below 2^-126 zero. `sign` of a zero."""
    if exact == 0:
        return math.copysign(0.0, sign)
    exponent = abs(exact.numerator).bit_length() - exact.denominator.bit_length()
    while abs(exact) >= Fraction(2) ** (exponent + 1):
        exponent += 1
    while abs(exact) < Fraction(2) ** exponent:
        exponent -= 1
    unit = Fraction(2) ** (exponent - 23)
    result = round(exact / unit) * unit  # Fraction rounds ties to even
    if abs(result) < Fraction(2) ** -126:
        return math.copysign(0.0, exact)
    return math.copysign(math.inf, exact) if abs(result) >= Fraction(2) ** 128 else float(result)


def step(a: float, b: float, c: float) -> float:
    """fma(a, b, c) without denormals, in exact arithmetic."""
    if not all(map(math.isfinite, (a, b, c))):
        return a * b + c if math.isinf(c) or not math.isfinite(a * b) else math.nan
    product_sign = math.copysign(1.0, a) * math.copysign(1.0, b)
    sign = product_sign if product_sign == math.copysign(1.0, c) and (a == 0 or b == 0) and c == 0 else 1.0
    return rounded(Fraction(a) * Fraction(b) + Fraction(c), sign)


def no_denormal(number: float) -> float:
    return math.copysign(0.0, number) if 0 < abs(number) < 2.0**-126 else number


def value(bits: int) -> float:
    """Of a float32's bits, without denormals."""
    return no_denormal(struct.unpack("<f", struct.pack("<I", bits))[0])


def as_defined(total: float, x: int, w: int) -> float:
    """The definition in exact arithmetic, from the bits."""
    after_high = step(value(x & 0xFFFF0000), value(w & 0xFFFF0000), no_denormal(total))
    return step(value(x << 16 & 0xFFFF0000), value(w << 16 & 0xFFFF0000), after_high)


def operands(count: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """float32 sums and two words: around 1, all exponents, small ones, sums that cancel, NaN and infinities."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(1 << 31), 1 << 31, (3, count), generator=generator, dtype=torch.int64).to(torch.int32)
    part = count // 4
    bits[:, :part] = (bits[:, :part] & -0x7F807F81) | 0x3F803F80  # around 1: sums that round and cancel
    bits[0, part : 2 * part] &= -0x7C000001  # small sums of small products
    bits[1:, part : 2 * part] = (bits[1:, part : 2 * part] & -0x7F807F81) | 0x20002000
    special = torch.tensor([0, -(1 << 31), 0x7F800000, -0x800000, 0x7FC00000, 1, 0x00010001, 0x3F800000, 0x7F807F80])
    chosen = special.to(torch.int32)[torch.randint(0, len(special), (3, part), generator=generator)]
    bits[:, 2 * part : 3 * part] = chosen
    # The least normal number, less what rounds up to it among denormals only
    bits[:, -1] = torch.tensor([0x00800000, -0x5E400000, 0x12000000], dtype=torch.int32)
    return bits[0].view(torch.float32), bits[1], bits[2]


def test_the_emulation_is_the_definition() -> None:
    sums, x, w = operands(2000, 1)
    expected = [as_defined(*each) for each in zip(sums.tolist(), x.tolist(), w.tolist(), strict=True)]
    for isa in ISAS:
        with native.using(isa):
            assert same(dot_pairs(sums, x, w), torch.tensor(expected)), isa


@needs_pairs
def test_the_processor_agrees_with_the_emulation() -> None:
    for seed in range(8):
        sums, x, w = operands(1 << 17, seed)
        with native.using(native.MULTIPLIES_PAIRS):
            assert same(dot_pairs(sums, x, w, emulated=False), dot_pairs(sums, x, w)), seed


def _rows(kind: str, m: int, k: int, seed: int) -> Tensor:
    values = heavy_tailed(m, k, seed=seed)
    if kind == "cancelling":  # neighbours and halves of the row all but cancel
        values[:, 1::2] = -values[:, : k // 2 * 2 : 2] * (1 + 2**-8 * torch.randn(values[:, 1::2].shape))
    if kind == "special":
        generator = random.Random(seed)
        for special in (math.nan, math.inf, -math.inf, 1e-39, -3e-40, 3e38, -0.0):
            values[generator.randrange(m), generator.randrange(k)] = special
    if kind == "tiny":
        values *= 1e-19
    return values.bfloat16()


@pytest.mark.parametrize("kind", ["heavy-tailed", "cancelling", "special", "tiny"])
@pytest.mark.parametrize(("n", "k"), [(70, 1025), (33, 2), (1, 1), (7, 77)])
def test_every_row_count_gives_the_chain(kind: str, n: int, k: int) -> None:
    """1 to 257 rows, on one thread and two; where it is emulated, some of them."""
    x, weight = _rows(kind, 257, k, 1), _rows(kind, n, k, 2)
    packed, expected = pack(weight), chain(x, weight)
    assert packed.kind == "bfloat16 pairs" and same(unpack(packed), weight.float())
    for isa in ISAS:
        counts = range(1, 258) if isa == native.MULTIPLIES_PAIRS else (1, 2, 5, 6, 12, 13, 25, 64, 257)
        for m in counts:
            native.set_num_threads(1 + m % 2)
            with native.using(isa):
                first = 257 - m
                assert same(linear(x[first:], packed, None, torch.float32), expected[first:]), (isa, m)


def test_a_weight_that_comes_from_memory_gives_the_chain() -> None:
    """More than 2 MiB: few rows walk it in another way. An odd number of panels, the last not full; 800 rows too."""
    x, weight = _rows("heavy-tailed", 800, 600, 1), _rows("heavy-tailed", 2021, 600, 2)
    packed, some = pack(weight), torch.tensor([0, 31, 32, 500, 2020])
    expected = chain(x, weight[some])
    for isa in ISAS:
        with native.using(isa):
            for m in (1, 2, 3, 4, 5, 6, 7, 12, *((800,) if isa == ISAS[0] else ())):
                assert same(linear(x[:m], packed, None, torch.float32)[:, some], expected[:m]), (isa, m)


@pytest.mark.parametrize("m", [1, 5, 12, 40])
def test_bias_rounding_strides_and_a_given_output(m: int) -> None:
    weight, wide, bias = _rows("heavy-tailed", 70, 101, 1), _rows("heavy-tailed", m, 160, 2), torch.randn(70)
    packed, x, out = pack(weight), wide[:, 31:132], torch.full((m, 90), 7.0).bfloat16()
    exact = chain(x, weight) + bias
    assert same(linear(x, packed, bias, torch.float32), exact)
    assert same(linear(x, packed, bias, out=out[:, :70]).contiguous(), exact.bfloat16())
    assert bool((out[:, 70:] == 7.0).all())


@pytest.mark.parametrize("m", [1, 5, 13, 300])
@pytest.mark.parametrize("k", [1, 77, 600])
def test_float32_rows_follow_the_chain_of_single_k(m: int, k: int) -> None:
    weight, x = _rows("heavy-tailed", 70, k, 1), heavy_tailed(m, k, seed=2)
    with chain_set("single"):
        single = pack_linear(weight)
    assert single.kind == "bfloat16"
    for isa in ISAS:
        with native.using(isa):
            assert torch.equal(linear(x, pack(weight)), linear(x, single))


def test_both_chains_differ_and_are_close() -> None:
    """The control: these inputs tell the chains apart."""
    weight, x = _rows("heavy-tailed", 70, 600, 1), _rows("heavy-tailed", 30, 600, 2)
    with chain_set("single"):
        single = linear(x, pack_linear(weight), out_dtype=torch.float32)
    pairs, scale = linear(x, pack(weight), out_dtype=torch.float32), x.float().abs() @ weight.float().abs().t()
    assert not torch.equal(pairs, single) and ((pairs - single).abs() / scale).max() < 1e-5


@pytest.mark.parametrize("k", [70, 71])
def test_rows_parts_and_bytes_of_a_packed_weight(k: int) -> None:
    weight, x, ids = _rows("heavy-tailed", 100, k, 1), _rows("heavy-tailed", 9, k, 2), torch.tensor([0, 99, 31, 32, 64])
    packed = pack(weight)
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(embed_rows(ids, packed, dtype), weight[ids].to(dtype))
        assert torch.equal(embed_rows_reference(ids, packed, dtype), weight[ids].to(dtype))
    rest = packed.behind(64)
    assert rest is not None and torch.equal(linear(x, rest), linear(x, packed)[:, 64:])
    assert packed.num_bytes == packed_bytes(100, k, torch.bfloat16, None, "cpu", native=True)


def test_the_chain_is_known_by_its_name() -> None:
    with pytest.raises(ValueError, match=r"'triples'.*pairs, single"):
        native.set_bfloat16_chain("triples")
    with chain_set("pairs"), native.disabled():
        assert not native.multiplies_in_pairs() and pack_linear(torch.ones(2, 2).bfloat16()).kind == "bfloat16"
