"""Tiles of products of a few to hundreds of rows, what a kept kernel is named by, and its compilation: no GPU."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from matmul_rig import CLUSTERED, WALKED, clustered
from octavo.ops.compile import disk_cache, nvrtc
from octavo.ops.compile.driver import DriverError
from octavo.ops.compile.nvrtc import CompileError
from octavo.ops.gemm import cluster_gemm
from octavo.ops.gemm.cluster_gemm import MAX_ROWS, MIN_ROWS, MIN_ROWS_LONG, Tile, serves, tile_for

BF16 = torch.bfloat16
PROCESSORS, LARGEST_SHARED = 132, 232448  # of an H200
# (N, K, gates and ups) of the layers of a 0.6B and an 8B model.
SHAPES = (
    (4096, 1024, False),
    (1024, 2048, False),
    (6144, 1024, True),
    (1024, 3072, False),
    (6144, 4096, False),
    (4096, 4096, False),
    (24576, 4096, True),
    (4096, 12288, False),
)


@pytest.mark.parametrize(("n", "k", "gated"), SHAPES)
def test_a_models_tiles_hold_all_rows_and_fill_the_processors(n: int, k: int, gated: bool) -> None:
    for rows in range(MIN_ROWS_LONG if k > 3072 else MIN_ROWS, MAX_ROWS + 1):
        tile = tile_for(rows, n, k, gated)
        if tile is None:
            assert k > 3072, "the library is as fast for long weights only"
            assert not gated
            assert rows > 256 or (64 < rows <= 96 and rows * k > 300000)
            continue
        blocks = -(-rows // tile.rows) * -(-n // tile.channels)
        assert (64 if k > 3072 else n // 64) <= blocks <= 2 * PROCESSORS, (rows, tile)
        assert tile.shared_bytes <= LARGEST_SHARED
        assert tile.stages >= 3
        assert not (gated and tile.rows_first), "8 gates and their ups are first lines"
        shared = tile.second_shared if tile.rows_first else tile.first_shared
        assert shared == (-(-rows // tile.rows) if k > 3072 else 1), "long weights are read once"


@pytest.mark.parametrize(
    ("rows", "n", "k", "gated", "lines", "rows_first"),
    [
        (256, 4096, 4096, False, (64, 128), False),
        (192, 4096, 12288, False, (64, 96), False),
        (256, 6144, 4096, False, (128, 96), True),
        (192, 6144, 4096, False, (64, 192), False),
        (72, 6144, 4096, False, (64, 80), False),
        (320, 4096, 12288, False, (64, 160), False),
        (64, 4096, 4096, False, (64, 32), True),
        (48, 6144, 4096, False, (64, 48), True),
        (5, 4096, 12288, False, (64, 32), True),
        (64, 4096, 12288, False, (64, 32), True),
        (64, 1024, 3072, False, (64, 16), False),
        (24, 24576, 4096, True, (192, 32), False),
        (256, 24576, 4096, True, (192, 256), False),
        (136, 24576, 4096, True, (192, 144), False),
        (512, 4096, 1024, False, (128, 128), False),
        (512, 1024, 2048, False, (64, 64), False),
        (512, 6144, 1024, True, (192, 128), False),
    ],
)
def test_the_choice_for_known_models(
    rows: int, n: int, k: int, gated: bool, lines: tuple[int, int], rows_first: bool
) -> None:
    tile = tile_for(rows, n, k, gated)
    assert tile is not None
    assert (tile.lines, tile.rows_first) == (lines, rows_first)


def test_what_has_no_tile() -> None:
    assert tile_for(128, 4096, 1024, gated=False)
    assert tile_for(MIN_ROWS - 1, 4096, 1024, gated=False) is None
    assert tile_for(MIN_ROWS_LONG - 1, 4096, 4096, gated=False) is None
    assert tile_for(MAX_ROWS + 1, 4096, 1024, gated=False) is None
    assert tile_for(321, 4096, 4096, gated=False) is None, "the library is as fast"
    assert tile_for(257, 6144, 4096, gated=False) is None, "not all processors have work"
    assert tile_for(65, 4096, 12288, gated=False) is None, "few blocks read long weights and many rows"
    assert tile_for(80, 2048, 4096, gated=False) is None, "too few blocks read a long weight"
    assert tile_for(128, 4096, 1000, gated=False) is None, "K is whole stages"
    assert tile_for(128, 4000, 1024, gated=False) is None, "channels are whole groups"
    assert tile_for(512, 151936, 1024, gated=False) is None, "the library has as many blocks as it likes"


def test_many_rows_of_gates_walk_where_the_processors_are_busy() -> None:
    for n, k in ((6144, 1024), (24576, 4096)):
        taken = {rows: tile_for(rows, n, k, gated=True) for rows in range(MAX_ROWS + 1, 9000)}
        assert all(tile is None or tile in cluster_gemm.WALKED for tile in taken.values())
        assert set(cluster_gemm.WALKED) <= set(cluster_gemm._tiles(cluster_gemm._Kind(BF16, "silu"), n, k))
        assert all(taken[rows] for rows in range(4300, 9000)), "walks are long"
    for n, k, rows, width in (
        (24576, 4096, 520, None),
        (24576, 4096, 1024, 256),
        (24576, 4096, 1152, 192),
        (24576, 4096, 8192, 256),
        (6144, 1024, 1024, 128),
        (6144, 1024, 1536, 192),
        (6144, 1024, 8192, 256),
    ):
        tile = tile_for(rows, n, k, gated=True)
        assert (None if tile is None else tile.rows) == width, (n, rows)
    assert tile_for(8192, 24576, 4096, gated=False) is None, "the library is as fast"
    squared = cluster_gemm._Kind(BF16, "relu2")
    assert squared.tile_for(320, 21504, 4096) and squared.tile_for(8192, 21504, 4096) in cluster_gemm.WALKED
    assert squared.tile_for(400, 21504, 4096) is None, "the library is faster"
    assert tile_for(8192, 24576, 448, gated=True) is None, "a walk's steps are too few"


def test_blocks_copy_the_rows_that_there_are() -> None:
    """Every row is in a tile, and tiles are even; where blocks copy rows for each other they are whole."""
    for tile, num_rows, each in (
        (Tile(1, 64), 5, 5),
        (Tile(1, 64), 64, 64),
        (Tile(1, 64), 65, 33),
        (Tile(1, 80, first_shared=2), 130, 65),
        (Tile(2, 96, rows_first=True), 256, 128),
        (Tile(1, 32, rows_first=True), 40, 40),
        (Tile(1, 64, second_shared=2), 5, 64),
        (WALKED[0], 1025, 256),
    ):
        assert cluster_gemm._rows_of(tile, num_rows) == each, (tile, num_rows)
        assert each <= tile.rows
        assert each * -(-num_rows // tile.rows) >= num_rows


def test_walked_tiles_have_room_for_their_results() -> None:
    for tile in WALKED:
        results = tile.groups * tile.rows * 64
        assert tile.stages >= 3
        assert LARGEST_SHARED - 50000 < tile.shared_bytes <= LARGEST_SHARED
        assert tile.shared_bytes == tile.stages * (sum(tile.lines) * 128 + 16) + results


def test_a_cpu_has_no_such_kernel() -> None:
    assert not serves(torch.empty(128, 1024, dtype=BF16), torch.empty(4096, 1024, dtype=BF16), None)


# compilation


@pytest.mark.parametrize("why", ["other bits", "does not load", "no compiler"])
def test_kernels_that_cannot_be_had_are_told_once_and_never_used(
    why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(error: Exception) -> Callable[..., int]:
        def call(*_: object) -> int:
            raise error

        return call

    loaded = refuse(DriverError("no image")) if why == "does not load" else lambda *_: 7
    checked = refuse(DriverError("it sums in another order")) if why == "other bits" else lambda *_: None
    compiled = refuse(CompileError("there is no compiler")) if why == "no compiler" else lambda *_: b"code"
    monkeypatch.setattr(cluster_gemm.driver, "load", loaded)
    monkeypatch.setattr(cluster_gemm, "_check", checked)
    monkeypatch.setattr(cluster_gemm, "compile_tile", compiled)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    weights = cluster_gemm._Kind(BF16, None), torch.device("cuda", 0), 4096, 1024
    monkeypatch.setattr(cluster_gemm, "_met", {weights: None})
    monkeypatch.setattr(cluster_gemm, "_functions", {})
    cluster_gemm._machine_codes.cache_clear()
    with caplog.at_level(logging.WARNING):
        for num_rows in (4, 72, 72, 256, 512):
            cluster_gemm.load_for(num_rows)
    cluster_gemm._machine_codes.cache_clear()
    assert len(cluster_gemm._functions) > 3
    assert set(cluster_gemm._functions.values()) == {None}
    assert len(caplog.records) == 1


def test_what_is_loaded_for_a_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """One kernel a weight that was met and has one, once, and not while a graph is captured."""
    kinds = [cluster_gemm._Kind(BF16, activation) for activation in (None, "silu")]
    shapes = [(kinds[0], 4096, 1024), (kinds[1], 6144, 1024), (kinds[0], 151936, 1024)]
    loaded: list[bytes] = []
    capturing = True
    monkeypatch.setattr(cluster_gemm.driver, "load", lambda code, *_: loaded.append(code) or len(loaded))
    monkeypatch.setattr(cluster_gemm, "_check", lambda *_: None)
    monkeypatch.setattr(cluster_gemm, "compile_tile", lambda tile, kind: repr((tile, kind)).encode())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    met = {(kind, torch.device("cuda", 0), n, k): None for kind, n, k in shapes}
    monkeypatch.setattr(cluster_gemm, "_met", met)
    monkeypatch.setattr(cluster_gemm, "_functions", {})
    cluster_gemm._machine_codes.cache_clear()
    cluster_gemm.load_for(72)
    assert not loaded
    capturing = False
    for _ in range(2):
        cluster_gemm.load_for(72)
    expected = [repr((tile_for(72, n, k, kind == kinds[1]), kind)).encode() for kind, n, k in shapes[:2]]
    assert loaded == expected
    assert list(cluster_gemm._functions.values()) == [1, 2]
    cluster_gemm._machine_codes.cache_clear()


def test_of_cached_kernels_one_is_read_and_missing_ones_are_compiled_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    weights = cluster_gemm._Kind(BF16, None), torch.device("cuda", 0), 4096, 1024
    tiles = cluster_gemm._tiles(weights[0], *weights[2:])
    texts = {cluster_gemm._text(tile, weights[0])[0]: tile for tile in tiles}
    assert len(tiles) > 4
    compiled: list[str] = []
    read: list[Path] = []
    plain = disk_cache.read
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(nvrtc, "compile_cubin", lambda source, *_: compiled.append(source) or source[:900].encode())
    monkeypatch.setattr(disk_cache, "read", lambda path, key: read.append(path) or plain(path, key))
    monkeypatch.setattr(cluster_gemm.driver, "load", lambda code, *_: 7)
    monkeypatch.setattr(cluster_gemm, "_check", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)

    def load(num_rows: int) -> None:
        """As a process anew."""
        compiled.clear(), read.clear()
        monkeypatch.setattr(cluster_gemm, "_met", {weights: None})
        monkeypatch.setattr(cluster_gemm, "_functions", {})
        cluster_gemm._machine_codes.cache_clear()
        cluster_gemm.load_for(num_rows)
        cluster_gemm._machine_codes.cache_clear()

    load(72)
    assert len(compiled) == len(tiles), "all at once, so that no later step waits for the compiler"
    load(72)
    assert not compiled
    assert len(read) == 1, "of what is kept only what is asked for"
    read[0].unlink()
    load(256)
    assert [texts[source] for source in compiled] == [tile_for(72, 4096, 1024, gated=False)]


def test_a_kernels_bits_are_compared_once_a_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And again where the machine code is another; one that was found wrong stays so."""
    kind, device = cluster_gemm._Kind(BF16, None), torch.device("cuda", 0)
    tile = tile_for(72, 4096, 1024, gated=False)
    assert tile is not None
    wrong, launched = [False], []

    def launch(
        function: int,
        tile: Tile,
        kind: object,
        x: object,
        weight: object,
        out: torch.Tensor,
        residual: torch.Tensor | None,
        **_: int,
    ) -> None:
        launched.append(function)
        out.copy_((2.0 if wrong[0] else 1.0) * torch.ones(3) + (0.0 if residual is None else residual))

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cluster_gemm.validation_cache, "_facts", lambda device: ["a GPU"])
    monkeypatch.setattr(cluster_gemm, "_example", lambda *_: (None, None, torch.ones(3)))
    monkeypatch.setattr(cluster_gemm, "_expected", cluster_gemm._expected.__wrapped__)
    monkeypatch.setattr(cluster_gemm, "_launch", launch)
    for _ in range(2):
        cluster_gemm._check(1, tile, kind, device, b"code")
    assert launched == [1, 1], "alone and with what is added"
    wrong[0] = True
    for _ in range(2):
        with pytest.raises(DriverError, match="another order"):
            cluster_gemm._check(2, tile, kind, device, b"other code")
    assert launched == [1, 1, 2, 2]


@functools.cache
def _told(kind: cluster_gemm._Kind, tile: Tile) -> str:
    """What the compiler says of a kernel, which several models may need."""
    return nvrtc.compile_told(kind.source(tile), kind.macros(tile), "sm_90a", "--ptxas-options=-v")[1]


def _compiler() -> object:
    try:
        return nvrtc._library()
    except CompileError:
        pytest.skip("needs the compiler that comes with torch's CUDA packages")


@pytest.mark.parametrize("tile", (*CLUSTERED, *WALKED), ids=str)
def test_every_kind_of_tile_compiles(tile: Tile) -> None:
    _compiler()
    kinds = ((BF16, None), (torch.float16, "gelu_tanh"), (BF16, "relu2"))
    for kind in (cluster_gemm._Kind(*each) for each in kinds):
        if tile in clustered(kind.activation):
            assert nvrtc.compile_cubin(kind.source(tile), kind.macros(tile), "sm_90a")[:4] == b"\x7fELF"


@pytest.mark.parametrize(
    ("n", "k", "activation"),
    [
        (4096, 1024, None),
        (1024, 2048, None),
        (6144, 1024, "silu"),
        (1024, 3072, None),
        (6144, 4096, None),
        (4096, 4096, None),
        (24576, 4096, "silu"),
        (4096, 12288, None),
        (21504, 4096, "relu2"),
    ],
)
def test_what_known_models_need_keeps_its_sums_in_registers(n: int, k: int, activation: str | None) -> None:
    """And the matrix unit's steps on their way: the compiler tells where it makes each wait for the one before."""
    _compiler()
    kind = cluster_gemm._Kind(BF16, activation)
    tiles = cluster_gemm._tiles(kind, n, k)
    assert tiles
    with ThreadPoolExecutor(2) as pool:
        for tile, text in zip(tiles, pool.map(functools.partial(_told, kind), tiles), strict=True):
            assert "0 bytes spill stores, 0 bytes spill loads" in text, tile
            assert "wgmma" not in text and "warning" not in text.lower(), text


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[str, ...]]:
    """What is compiled, by a compiler that gives a few bytes, with an empty cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    asked: list[tuple[str, ...]] = []

    def compile_cubin(source: str, macros: dict[str, int], arch: str) -> bytes:
        asked.append((source, str(macros), arch))
        return b"\0code %d" % len(asked)

    monkeypatch.setattr(nvrtc, "compile_cubin", compile_cubin)
    return asked


def test_a_kernel_is_compiled_once_and_kept(compiled: list[tuple[str, ...]], tmp_path: Path) -> None:
    ask = nvrtc.machine_code
    assert ask("a", {"N": 1}, "sm_90a") == ask("a", {"N": 1}, "sm_90a") == b"\0code 1"
    assert len(compiled) == 1
    assert len(list((tmp_path / "octavo" / "cuda").iterdir())) == 1


def test_another_source_macro_device_or_version_is_another_kernel(
    compiled: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = nvrtc.machine_code
    for source, macros, arch in (
        ("a", {"N": 1}, "x"),
        ("b", {"N": 1}, "x"),
        ("a", {"N": 2}, "x"),
        ("a", {"N": 1}, "y"),
    ):
        ask(source, macros, arch)
    assert len(compiled) == 4
    monkeypatch.setattr(disk_cache, "versions", lambda: ["another"])
    ask("a", {"N": 1}, "x")
    assert len(compiled) == 5


def test_a_damaged_file_is_told_and_compiled_anew(
    compiled: list[tuple[str, ...]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    nvrtc.machine_code("a", {}, "x")
    (path,) = (tmp_path / "octavo" / "cuda").iterdir()
    path.write_text(path.read_text().replace("a", "b"))
    with caplog.at_level(logging.WARNING):
        assert nvrtc.machine_code("a", {}, "x") == b"\0code 2"
    assert f"{path} is damaged" in caplog.text
    assert nvrtc.machine_code("a", {}, "x") == b"\0code 2"


def test_a_folder_that_takes_no_files_costs_a_compilation_each_time(
    compiled: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with caplog.at_level(logging.WARNING):
        assert nvrtc.machine_code("a", {}, "x") == b"\0code 1"
        assert nvrtc.machine_code("a", {}, "x") == b"\0code 2"
    assert "cannot be kept" in caplog.text
