"""A head's product that draws: its tiles, its compilation, and what runs where it does not. No GPU."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from octavo.layers.embedding import OutputHead
from octavo.ops import sampling as sample
from octavo.ops.compile import nvrtc
from octavo.ops.compile.driver import DriverError
from octavo.ops.compile.stream_scratch import StreamScratch
from octavo.ops.gemm import fused, linear, pack_linear
from octavo.ops.gemm.gemm_pipeline import Tile, macros, source
from octavo.ops.sampling import fused_lm_head_sampling
from octavo.ops.sampling.fused_lm_head_sampling import MAX_ROWS, ROWS, SHARED_ROWS, SHARED_WEIGHTS, tile_for

PROCESSORS, LARGEST_SHARED = 132, 232448  # of an H200


def test_pairs_of_row_tiles_share_weights_and_others_rows() -> None:
    for rows in range(1, MAX_ROWS + 1):
        tile = tile_for(rows)
        assert (rows in ROWS) == (rows % 128 >= 112 or rows % 128 == 0), "tiles are nearly full"
        row_tiles = -(-rows // tile.rows)
        assert tile is (SHARED_ROWS if row_tiles in (1, 3) else SHARED_WEIGHTS)
        assert row_tiles % tile.second_shared == 0, "no block is without rows"
        row_clusters = row_tiles // tile.second_shared
        assert PROCESSORS // 2 % row_clusters == 0, "no processor is idle"
    for tile in (SHARED_ROWS, SHARED_WEIGHTS):
        assert (tile.rows, tile.channels, tile.stages) == (128, 256, 4)
        assert tile.shared_bytes <= LARGEST_SHARED


@pytest.mark.parametrize("tile", [SHARED_ROWS, SHARED_WEIGHTS], ids=["rows", "weights"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_kernel_keeps_its_sums_in_registers(tile: Tile, dtype: torch.dtype) -> None:
    """And the matrix unit's steps on their way: the compiler tells where it makes each wait for the one before."""
    try:
        nvrtc._library()
    except nvrtc.CompileError:
        pytest.skip("needs the compiler that comes with torch's CUDA packages")
    text = source(tile, dtype, "../sampling/fused_lm_head_sampling.cu")
    told = nvrtc.compile_told(text, macros(tile, dtype), "sm_90a", "--ptxas-options=-v")[1]
    assert "0 bytes spill stores, 0 bytes spill loads" in told
    assert "wgmma" not in told and "warning" not in told.lower(), told


@pytest.mark.parametrize("soft_cap", [0.0, 5.0])
def test_a_cpu_multiplies_then_draws(soft_cap: float) -> None:
    num_rows, vocab, size = 70, 300, 32
    torch.manual_seed(1)
    weight, x = torch.randn(vocab, size), torch.randn(num_rows, size)
    tables = torch.arange(num_rows), torch.arange(num_rows) % 3 / 2, torch.arange(num_rows), torch.arange(num_rows) * 5
    head = OutputHead(vocab, size, torch.float32, soft_cap=soft_cap)
    head.__dict__["packed"] = pack_linear(weight)
    assert head.fused_sampling_rows() == fused.fused_sampling_rows(head.packed) == ()
    expected = sample.draw(head.forward(x), *tables)
    assert expected[0].unique().numel() > 30
    assert all(map(torch.equal, head.draw(x, *tables), expected))
    plain = sample.draw(linear(x, head.packed), *tables)
    assert all(map(torch.equal, fused.fused_linear_sampling(x, head.packed, *tables), plain))
    assert (plain[0] == expected[0]).all() == (not soft_cap), "a soft cap moves draws"


def test_a_cpu_has_no_such_kernel() -> None:
    weight = torch.empty(1 << 16, 64, dtype=torch.bfloat16)
    assert not fused_lm_head_sampling.supports(weight)
    assert not fused_lm_head_sampling.serves(torch.empty(128, 64, dtype=torch.bfloat16), weight)


# compilation, loading and what is found


class Machine:
    """A GPU that draws right, or not, as far as `fused_lm_head_sampling` can tell; counts what it is asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.right, self.capturing, self.compared, self.loaded = True, False, [], []  # type: ignore[var-annotated]
        self._monkeypatch = monkeypatch
        monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
        monkeypatch.setattr(fused_lm_head_sampling, "is_hopper", lambda device: True)
        monkeypatch.setattr(fused_lm_head_sampling, "SCRATCH", StreamScratch(lambda device: ()))
        monkeypatch.setattr(fused_lm_head_sampling, "_agrees", self._agrees)
        monkeypatch.setattr(fused_lm_head_sampling.validation_cache, "_facts", lambda device: ["a GPU"])
        monkeypatch.setattr(
            fused_lm_head_sampling.driver, "load", lambda code, *_: self.loaded.append(code) or len(self.loaded)
        )
        monkeypatch.setattr(nvrtc, "compile_cubin", lambda source, macros, _: str(macros).encode())
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.capturing)
        self.forget()

    def forget(self) -> None:
        """From now on as a process anew."""
        for name in ("_are_found", "_functions"):
            self._monkeypatch.setattr(fused_lm_head_sampling, name, {})
        fused_lm_head_sampling.machine_codes.cache_clear()
        self.compared.clear()
        self.loaded.clear()

    def _agrees(self, tile: Tile, weight: torch.Tensor) -> bool:
        self.compared.append(tile)
        return self.right


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Machine]:
    yield Machine(monkeypatch, tmp_path)
    fused_lm_head_sampling.machine_codes.cache_clear()


def test_kernels_are_compared_once_a_machine_and_loaded_where_they_serve(machine: Machine) -> None:
    weight, x = torch.empty(1 << 16, 64, dtype=torch.bfloat16), torch.empty(256, 64, dtype=torch.bfloat16)
    for compared in ([SHARED_ROWS, SHARED_WEIGHTS], []):
        assert fused_lm_head_sampling.supports(weight) == fused_lm_head_sampling.supports(weight) == ROWS
        assert machine.compared == compared
        assert not machine.loaded
        machine.capturing = True
        assert not fused_lm_head_sampling.serves(x, weight), "nothing is loaded while a graph is captured"
        fused_lm_head_sampling.load_for(128)
        assert not machine.loaded
        machine.capturing = False
        fused_lm_head_sampling.load_for(64)
        assert not machine.loaded, "so many rows are not drawn here"
        for _ in range(2):
            fused_lm_head_sampling.load_for(128)
        assert len(machine.loaded) == 1
        machine.capturing = True
        assert fused_lm_head_sampling.serves(x[:128], weight)
        assert not fused_lm_head_sampling.serves(x, weight)
        machine.capturing = False
        assert fused_lm_head_sampling.serves(x, weight)
        assert len(set(machine.loaded)) == 2
        machine.forget()
    fused_lm_head_sampling.supports(torch.empty(1 << 17, 64, dtype=torch.bfloat16))
    assert machine.compared, "by another weight"


@pytest.mark.parametrize("why", ["other tokens", "does not load", "no compiler"])
def test_kernels_that_cannot_be_had_are_told_once(
    why: str, machine: Machine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> bytes:
        raise nvrtc.CompileError("there is no compiler")

    def fail(*_: object) -> int:
        raise DriverError("no image")

    weight, x = torch.empty(1 << 16, 64, dtype=torch.bfloat16), torch.empty(128, 64, dtype=torch.bfloat16)
    machine.right = why != "other tokens"
    if why == "does not load":
        monkeypatch.setattr(fused_lm_head_sampling.driver, "load", fail)
    elif why == "no compiler":
        monkeypatch.setattr(nvrtc, "compile_cubin", refuse)
    with caplog.at_level(logging.WARNING):
        assert not any(fused_lm_head_sampling.serves(x, weight) for _ in range(3))
    assert fused_lm_head_sampling.supports(weight) == ()
    assert len(caplog.records) == 1


def test_nothing_is_compared_while_a_graph_is_captured(machine: Machine) -> None:
    weight = torch.empty(1 << 16, 64, dtype=torch.bfloat16)
    machine.capturing = True
    assert fused_lm_head_sampling.supports(weight) == ()
    machine.capturing = False
    assert fused_lm_head_sampling.supports(weight) == ROWS
