"""Dense products: one fused chain over K whatever the rows, threads or vectors; exact packing; the reference."""

import contextlib
from pathlib import Path

import pytest
import torch
from torch import Tensor

from octavo.ops import native
from octavo.ops.embedding import embed_rows, embed_rows_reference
from octavo.ops.gemm import linear, linear_reference, pack_linear, unpack

needs_native = pytest.mark.skipif(not native.available(), reason="no native library is built")
KINDS = ["float32", "bfloat16", "int8"]


def heavy_tailed(*shape: int, seed: int = 0) -> Tensor:
    """Signed values over 16 binades: a change of summation order shows."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.empty(shape).uniform_(-8, 8, generator=generator)
    return torch.randn(shape, generator=generator) * torch.exp2(exponents)


def pack(values: Tensor, kind: str):
    return pack_linear(values.bfloat16() if kind == "bfloat16" else values, "int8" if kind == "int8" else None)


def chain(row: Tensor, weight: Tensor) -> Tensor:
    """acc = fma(x[k], w[k], acc): the product is exact in float64, the sum is rounded to float32 at each step."""
    acc = torch.zeros(weight.shape[0])
    for k in range(weight.shape[1]):
        acc = (acc.double() + row[k].double() * weight[:, k].double()).float()
    return acc


@needs_native
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "k"), [(7, 33), (33, 64), (96, 301)])
def test_output_is_the_sequential_fma_chain(kind: str, n: int, k: int) -> None:
    weight = pack(heavy_tailed(n, k), kind)
    x, bias = heavy_tailed(29, k, seed=1), torch.randn(n)
    values = unpack(weight)
    for m in (1, 3, 29):
        assert torch.equal(linear(x[:m], weight, bias)[m - 1], chain(x[m - 1], values) + bias)


@needs_native
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16])
def test_row_bits_do_not_depend_on_the_rows_beside_it(kind: str, x_dtype: torch.dtype) -> None:
    """All row counts to 67 and some above, 600 k (more than two blocks), threads 1 and 2, every instruction set."""
    n, k = 200, 600
    weight = pack(heavy_tailed(n, k), kind)
    rows = heavy_tailed(801, k + 3, seed=1).to(x_dtype)[:, :k]
    target, bias = rows[800], torch.randn(n)
    alone = linear(rows[800:], weight, bias, torch.float32)[0]
    before = native.num_threads()
    for isa in native.built_isas():
        with native.using(isa):
            for threads in (1, 2):
                native.set_num_threads(threads)
                for m in [*range(1, 68), 191, 193, 769, 800]:
                    x = rows[:m].clone()
                    x[m * 7 // 11] = target
                    y = linear(x, weight, bias, torch.float32)[m * 7 // 11]
                    assert torch.equal(y, alone), f"{isa}, {threads} threads, {m} rows"
    native.set_num_threads(before)


@needs_native
@pytest.mark.parametrize("kind", KINDS)
def test_a_weight_that_comes_from_memory_has_the_same_chain(kind: str) -> None:
    """More than 2 MiB, where one row walks fewer panels at a time; an odd number of panels, the last not full."""
    n, k = {"float32": 1000, "bfloat16": 2000, "int8": 4000}[kind] + 21, 600
    weight = pack(heavy_tailed(n, k), kind)
    assert weight.num_bytes > 2 << 20
    rows, some = heavy_tailed(5, k, seed=1), torch.tensor([0, 31, 32, 500, n - 1])
    for isa in native.built_isas():
        with native.using(isa):
            alone = torch.cat([linear(row[None], weight) for row in rows])
            assert torch.equal(alone, linear(rows, weight)), isa
            assert torch.equal(alone[4, some], chain(rows[4], unpack(weight)[some])), isa


@needs_native
def test_a_changed_summation_order_would_be_caught() -> None:
    """The positive control: the same product summed by torch differs in bits on these inputs."""
    weight = pack(heavy_tailed(200, 600), "float32")
    x = heavy_tailed(8, 600, seed=1)
    assert not torch.equal(linear(x, weight), x @ unpack(weight).t())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "k"), [(1536, 256), (70, 100)])
def test_eager_twin_keeps_row_bits_and_is_close(kind: str, n: int, k: int) -> None:
    """Within 1e-5 of the sum of absolute products, and a row's bits do not depend on the row count."""
    with native.disabled():
        plain = pack(heavy_tailed(n, k), kind)
    packed = pack(heavy_tailed(n, k), kind)
    assert torch.equal(unpack(plain), unpack(packed))
    x, bias = heavy_tailed(67, k, seed=1), torch.randn(n)
    scale = x.abs() @ unpack(packed).abs().t() + bias.abs()
    with native.disabled():
        alone = linear(x[:1], plain, bias)[0]
        for m in range(1, 68):
            rows = x[:m].clone()
            rows[m * 7 // 11] = x[0]
            assert torch.equal(linear(rows, plain, bias)[m * 7 // 11], alone)
        reference = linear(x, plain, bias)
        assert torch.equal(linear(x, packed, bias), reference), (
            "a packed weight serves the reference implementation too"
        )
    assert ((linear(x, packed, bias) - reference).abs() / scale).max() < 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_output_is_the_float32_output_rounded_once(kind: str) -> None:
    weight, x = pack(heavy_tailed(70, 100), kind), heavy_tailed(20, 100).bfloat16()
    for m in (1, 5, 20):
        assert torch.equal(linear(x[:m], weight), linear(x[:m], weight, out_dtype=torch.float32).bfloat16())


def test_linear_reads_strided_rows_and_writes_a_given_output() -> None:
    weight, wide = pack(heavy_tailed(70, 100), "float32"), heavy_tailed(20, 150)
    for m in (1, 5, 20):
        out = torch.full((m, 90), 7.0)
        linear(wide[:m, 20:120], weight, out=out[:, :70])
        assert torch.equal(out[:, :70], linear(wide[:m, 20:120].contiguous(), weight))
        assert bool((out[:, 70:] == 7.0).all())


@pytest.mark.parametrize("is_native", [pytest.param(True, marks=needs_native), False])
def test_a_given_output_is_rounded_to_its_own_dtype_once(is_native: bool) -> None:
    """Whatever dtype the rows have, and whichever is asked for where nothing is given."""
    with contextlib.nullcontext() if is_native else native.disabled():
        weight, x, bias = pack(heavy_tailed(70, 100), "bfloat16"), heavy_tailed(5, 100).bfloat16(), torch.randn(70)
        exact = linear(x, weight, bias, out_dtype=torch.float32)
        assert not torch.equal(exact.bfloat16().float(), exact)
        for out_dtype in (None, torch.bfloat16, torch.float32):
            wide, narrow = torch.empty(5, 70), torch.empty(5, 70, dtype=torch.bfloat16)
            assert linear(x, weight, bias, out_dtype, wide) is wide and torch.equal(wide, exact)
            assert torch.equal(linear(x, weight, bias, out_dtype, narrow), exact.bfloat16())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_native", [pytest.param(True, marks=needs_native), False])
def test_a_weight_behind_some_channels_gives_the_others(kind: str, is_native: bool) -> None:
    """Unless they end inside a panel. Of behind, too; some of them; and the whole weight may be gone."""
    with contextlib.nullcontext() if is_native else native.disabled():
        whole, x = pack(heavy_tailed(140, 100), kind), heavy_tailed(20, 100)
        expected = linear(x, whole)
        assert (whole.behind(33) is None) is is_native
        some = whole.behind(64)
        del whole
        assert some is not None and torch.equal(linear(x, some), expected[:, 64:])
        fewer = some.behind(64)
        assert fewer is not None and torch.equal(linear(x, fewer), expected[:, 128:])
        for count in (1, 32, 40, 76) if is_native else (64, 76):
            few = some.behind(0, count)
            assert few is not None and torch.equal(linear(x, few), expected[:, 64 : 64 + count])


def test_linear_of_no_rows_is_empty() -> None:
    assert linear(torch.empty(0, 64), pack(torch.randn(33, 64), "float32")).shape == (0, 33)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (31, 5), (33, 64), (100, 96)])
def test_packing_is_exact(dtype: torch.dtype, n: int, k: int) -> None:
    values = torch.randn(n, k + 2).to(dtype)
    for weight in (values[:, :k], values[:, 1 : k + 1], values.t().contiguous().t()):
        assert torch.equal(unpack(pack_linear(weight)), weight.float())


def test_int8_weights_are_exact_in_15_bits_and_close() -> None:
    """An error of at most half a step (1/127 of the largest of 32), and no more significant bits than a float holds."""
    values = heavy_tailed(40, 70)
    values[3] = 0.0
    widened = unpack(pack_linear(values, "int8"))
    groups = torch.nn.functional.pad(values, (0, 26)).view(40, 3, 32).abs().amax(2, keepdim=True)
    steps = (groups / 127).expand(40, 3, 32).reshape(40, 96)[:, :70]
    assert bool(((widened - values).abs() <= steps * 0.76).all())  # half a step, and 0.25 where the scale rounds down
    mantissa, _ = torch.frexp(widened)
    assert bool((mantissa * 2**15 == (mantissa * 2**15).round()).all())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
def test_embedding_rows_equal_the_unpacked_weight(kind: str, out_dtype: torch.dtype) -> None:
    weight = pack(heavy_tailed(100, 70), kind)
    ids = torch.tensor([0, 99, 31, 32, 31, 63, 64])
    rows = embed_rows(ids, weight, out_dtype)
    assert torch.equal(rows, unpack(weight)[ids].to(out_dtype))
    assert torch.equal(rows, embed_rows_reference(ids, weight, out_dtype))


def test_unknown_quantization_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"'int3'.*int8"):
        pack_linear(torch.randn(4, 4), "int3")


@needs_native
def test_reference_function_agrees_with_the_disabled_library() -> None:
    weight, x = pack(heavy_tailed(70, 100), "bfloat16"), heavy_tailed(3, 100)
    with native.disabled():
        served = linear(x, weight)
    assert torch.equal(served, linear_reference(x, weight))


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[int, ...]]:
    """The shapes that were compared with the library, which is said to be wrong for 40 channels, by a process anew."""
    pytest.importorskip("triton")
    from octavo.ops.gemm import gpu

    shapes: list[tuple[int, ...]] = []

    def agrees(weight: torch.Tensor) -> bool:
        shapes.append(tuple(weight.shape))
        return weight.shape[0] != 40

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(gpu, "_agrees", agrees)
    monkeypatch.setattr(gpu.validation_cache, "_facts", lambda device: ["a library"])
    _forget(monkeypatch)
    return shapes


def _forget(monkeypatch: pytest.MonkeyPatch) -> None:
    from octavo.ops.gemm import gpu

    monkeypatch.setattr(gpu, "_checked", set())
    monkeypatch.setattr(gpu, "_without_library", set())


def test_the_library_is_compared_once_and_its_answer_kept(
    compared: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from octavo.ops.gemm import gpu

    good, bad = torch.zeros(8, 16), torch.zeros(40, 16)
    for _ in range(2):
        caplog.clear()
        for weight in (good, bad, good):
            assert gpu.check_library(weight) is (weight is good)
        assert caplog.text.count("sums in another order") == 1, "told in every process"
        assert compared == [(8, 16), (40, 16)]
        _forget(monkeypatch)
    assert gpu.check_library(torch.zeros(16, 16)) and gpu.check_library(torch.zeros(8, 16, dtype=torch.bfloat16))
    assert compared[2:] == [(16, 16), (8, 16)]


def test_a_comparison_that_fails_leaves_the_library_unchecked(
    compared: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one without memory does, whose engine may start again with other settings."""
    from octavo.ops.gemm import gpu

    def fail(weight: torch.Tensor) -> bool:
        raise torch.OutOfMemoryError

    bad = torch.zeros(40, 16)
    with monkeypatch.context() as patch:
        patch.setattr(gpu, "_agrees", fail)
        with pytest.raises(torch.OutOfMemoryError):
            gpu.check_library(bad)
    assert not gpu.check_library(bad) and compared == [(40, 16)]
