"""Kernels compiled side by side, for a GPU that is not there."""

from __future__ import annotations

import ast
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime import driver  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

from octavo.ops.compile import launch, nvrtc, side_by_side  # noqa: E402
from octavo.ops.gemm import cluster_gemm  # noqa: E402
from octavo.ops.gemm import gpu as matmul  # noqa: E402
from octavo.ops.scan import conv_decode  # noqa: E402

pytestmark = pytest.mark.skipif(not side_by_side.can_compile(), reason="this Triton compiles nothing aside")
BF16 = torch.bfloat16


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[SimpleNamespace]:
    """A driver of a Hopper that is not there; nothing is compiled on disk. `device` may be changed for another."""
    state = SimpleNamespace(device=f"for {tmp_path}")
    active = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: state.device,
        get_current_stream=lambda device: 0,
    )
    monkeypatch.setattr(driver, "_active", active)
    monkeypatch.setattr(launch, "_has_pdl", lambda device: True)
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path / "triton"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield state


def multiply(num_rows: int, n: int = 64, k: int = 64) -> torch.Tensor:
    """One product, whose kernel is another for one row than for 200."""
    x, weight = torch.ones(num_rows, k, dtype=BF16), torch.ones(n, k, dtype=BF16)
    tile = matmul.tile_for(num_rows, n, k, BF16)
    return matmul.linear(x, weight, None, torch.empty(num_rows, n, dtype=BF16), tile)


def test_a_pass_compiles_each_kernel_once_and_launches_none(no_gpu: SimpleNamespace) -> None:
    told: list[tuple[int, int, str]] = []
    with side_by_side.compiling(lambda *facts: told.append(facts), 2) as made:
        for _ in range(2):
            assert not multiply(1).any() and not multiply(200).any(), "new tensors are zero"
    assert [future.exception() for future in made._futures] == [None] * 2 and made.num_made == 2
    assert {name for _, _, name in told} == {"product"}
    assert told[-1][:2] == (2, 2) and [done for done, *_ in told] == sorted(done for done, *_ in told)
    assert side_by_side.current() is None
    kernels = matmul.product.kernel.device_caches[no_gpu.device][0].values()
    assert sorted(type(kernel).__name__ for kernel in kernels) == ["CompiledKernel"] * 2, "a launch finds them"


def test_what_is_on_disk_is_not_compiled_again(no_gpu: SimpleNamespace) -> None:
    for num_made, settled in ((1, False), (0, True)):
        no_gpu.device += "'"  # as another process, whose memory knows no kernel
        with side_by_side.compiling(lambda *_: None) as made:
            multiply(1)
            assert made.is_settled(60) == settled
        assert made.num_made == num_made


def test_threads_compile_at_the_same_time(no_gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    both = threading.Barrier(2)
    compile_one = JITFunction.create_binder

    def create_binder(self: Any) -> Any:
        found = compile_one(self)
        really = self.compile

        def wait_and_compile(*args: Any, **options: Any) -> Any:
            both.wait(60)
            return really(*args, **options)

        self.compile = wait_and_compile
        return found

    monkeypatch.setattr(JITFunction, "create_binder", create_binder)
    with side_by_side.compiling(lambda *_: None, 2) as made:
        multiply(1)
        multiply(200)
    assert [future.exception() for future in made._futures] == [None] * 2 and not both.broken
    assert made.num_made == 2


def test_one_thread_at_a_time_parses(no_gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.11 raises SystemError, "recursion depth mismatch", where two threads build trees and one is cut off."""
    alone, parse = [], ast.parse

    def told(source: Any, *args: Any, **options: Any) -> Any:
        if "def product" in str(source):
            alone.append(side_by_side._PARSING.locked())
        return parse(source, *args, **options)

    monkeypatch.setattr(ast, "parse", told)
    with side_by_side.compiling(lambda *_: None, 2):
        multiply(1)
        multiply(200)
    assert len(alone) >= 2 and all(alone)


def test_other_threads_launch_as_ever(no_gpu: SimpleNamespace) -> None:
    launched: list[str] = []
    real = JITFunction.run

    def run(self: Any, *args: Any, warmup: bool, **options: Any) -> None:
        launched.append(f"{self.__name__}, warmup={warmup}")

    JITFunction.run = run
    try:
        with side_by_side.compiling(lambda *_: None):
            multiply(1)
            other = threading.Thread(target=multiply, args=[1])
            other.start()
            other.join()
        assert JITFunction.run is run and launched == ["product, warmup=True", "product, warmup=False"]
    finally:
        JITFunction.run = real


@triton.jit
def broken(x, SIZE: triton.language.constexpr):
    triton.language.static_assert(SIZE == 1, "only one will do")


def test_a_kernel_that_does_not_compile_is_told_by_its_launch(no_gpu: SimpleNamespace) -> None:
    with side_by_side.compiling(lambda *_: None):
        broken[(1,)](torch.zeros(2), SIZE=2)
        multiply(1)
    with pytest.raises(triton.CompilationError):
        broken[(1,)](torch.zeros(2), SIZE=2)


def test_the_kernels_in_cuda_of_a_weight_are_compiled_and_not_run(
    no_gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled, (n, k) = [], (192, 64)
    monkeypatch.setattr(
        cluster_gemm.nvrtc,
        "compile_cubin",
        lambda source, macros, arch: compiled.append(macros) or b"code",
    )
    monkeypatch.setattr(cluster_gemm, "is_hopper", lambda device: True)
    kind = cluster_gemm._Kind(BF16, None)
    weights = kind, torch.device("cpu"), n, k
    tile = cluster_gemm.tile_for(64, n, k, False)
    assert tile is not None
    x, weight, out = torch.ones(64, k, dtype=BF16), torch.ones(n, k, dtype=BF16), torch.zeros(64, n, dtype=BF16)
    asked, tiles_of = [], cluster_gemm._tiles
    monkeypatch.setattr(cluster_gemm, "_tiles", lambda *of: asked.append(of) or tiles_of(*of))
    for _ in range(2):
        with side_by_side.compiling(lambda *_: None) as made:
            for _ in range(3):
                assert cluster_gemm._is_loaded(tile, weights)
                assert cluster_gemm.product(x, weight, out) is out and not out.any()
    assert len(asked) == 2, "once in a pass"
    assert len(compiled) == len(tiles_of(kind, n, k)) and made.num_made == 0
    assert not any(name[1] == kind and name[2] is None for name in cluster_gemm._functions)


def test_a_kernel_in_cuda_that_is_kept_is_not_missing(no_gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """It counted as compiled in every start, each of which then went through all steps."""
    compiled = list[object]()
    monkeypatch.setattr(nvrtc, "compile_cubin", lambda source, macros, arch: compiled.append(macros) or b"code")
    own = conv_decode.macros((4, 96, 16), 64, [(1536, 768, 96, 1, 1, 1, 2, 1)] * 2, BF16, (True, True))
    for num_made in (1, 0):
        with side_by_side.compiling(lambda *_: None) as made:
            for _ in range(2):
                assert conv_decode.is_loaded(own, torch.device("cpu"))
            assert made.is_settled(60) == (num_made == 0)
        assert made.num_made == num_made and compiled == [own]
    assert not conv_decode.KERNEL._functions, "nothing was loaded"
