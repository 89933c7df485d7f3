"""The Triton operators of layers with states: under Triton's interpreter, and compiled for Hopper.

Interpreted shapes are tiny; compiled ones are those of models.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime import driver  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

import gpu_states_rig  # noqa: E402
import state_rig as rig  # noqa: E402
from interpreted import run_rig  # noqa: E402
from octavo.ops.compile import launch, nvrtc  # noqa: E402
from octavo.ops.scan import conv_decode  # noqa: E402
from octavo.ops.scan.delta import delta_prepare, delta_prompts, delta_step, loading  # noqa: E402
from octavo.ops.scan.mamba2 import mamba2_advance, mamba2_decode, mamba2_prompts  # noqa: E402
from octavo.states import gpu  # noqa: E402
from octavo.states.gpu import GpuStates  # noqa: E402
from sass import unwritten_reads  # noqa: E402

SHAPES = {"conv": (10240, 4), "delta": (16, 32, 128, 128), "mamba2": (128, 64, 8, 128), "mamba1": (8192, 16)}
SHARED_BYTES = 232448  # of a processor, for one program


@pytest.mark.parametrize("check", gpu_states_rig.INTERPRETED)
def test_interpreted(check: str) -> None:
    error = run_rig(gpu_states_rig)[check]
    assert not error, error


@pytest.mark.parametrize("name", SHAPES)
def test_its_kernels_compile_for_hopper_and_spill_no_register(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of prompts, of verified runs and of decoding rows."""
    found = _compiled(monkeypatch, name, torch.bfloat16, SHAPES[name], (64, 5, 1))
    for kernel in found:
        assert kernel.asm["cubin"] and kernel.metadata.shared <= SHARED_BYTES
        assert _spilled_bytes(kernel.asm["ptx"], tmp_path) == 0, kernel.metadata.name
        assert unwritten_reads(kernel.asm["cubin"], tmp_path) == [], kernel.metadata.name


def test_a_program_of_several_heads_spills_no_register_of_its_loop(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Where many rows decode. A few numbers that it needs once for each group of heads may be in memory."""
    monkeypatch.setattr(gpu, "programs_of", lambda *_: 6)
    for kernel in _compiled(monkeypatch, "mamba2", torch.bfloat16, SHAPES["mamba2"], (1,)):
        assert _spilled_bytes(kernel.asm["ptx"], tmp_path) <= 128, kernel.metadata.name
        assert unwritten_reads(kernel.asm["cubin"], tmp_path) == [], kernel.metadata.name


@pytest.mark.parametrize("heads", [1, 2, 3, 4])
def test_one_kernel_decodes_the_delta_rule_without_spilling(heads: int, tmp_path: Path) -> None:
    """As many blocks as are launched fit a processor. Of four heads a few numbers are spilled once a task."""
    try:
        nvrtc._library()
    except nvrtc.CompileError:
        pytest.skip("needs NVRTC")
    form = (663552, 331776, 16384, 32, 32, 128, 2, 1)
    macros = delta_step.macros((16 * heads, 16), 64, [form] * 6, torch.bfloat16)
    code, told = nvrtc.compile_told(loading.KERNELS["delta_step"].source, macros, "sm_90a", "--ptxas-options=-v")
    assert sum(map(int, re.findall(r"(\d+) bytes spill", told))) <= (64 if heads == 4 else 0), told
    assert unwritten_reads(code, tmp_path) == []
    found = re.search(r"Used (\d+) registers", told)
    assert found is not None, told
    blocks, warps = int(macros["RESIDENT"]), 4 * heads + 1
    assert -(-blocks * warps // 4) * 32 * int(found[1]) <= 65536 // 4  # of a quarter of a processor
    assert blocks * (delta_step.shared_bytes(macros) + 1024) <= SHARED_BYTES + 1024


@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("name", ["delta_prepare", "one group", "one group whose stores are its own", "two groups"])
def test_prompts_of_the_delta_rule_spill_no_register(name: str, heads: int, tmp_path: Path) -> None:
    """In CUDA C++."""
    try:
        nvrtc._library()
    except nvrtc.CompileError:
        pytest.skip("needs NVRTC")
    block = 663552 if "own" not in name else 663556  # numbers: the copy engine takes whole lines of 128
    shape = (16 * heads, 16), 64, [(block, 331776, 16384, 32, 32, 128, 2, 1)] * 6, torch.bfloat16
    if name == "delta_prepare":
        macros = delta_prepare.macros(*shape)
        assert int(macros["RESIDENT"]) * (delta_prepare.shared_bytes(macros) + 1024) <= SHARED_BYTES + 1024
    else:
        groups = 2 if name == "two groups" else 1
        name, macros = "delta_prompts", {**delta_prompts.macros(*shape), "GROUPS": groups}
        assert delta_prompts.shared_bytes(groups) <= SHARED_BYTES
    code, told = nvrtc.compile_told(loading.KERNELS[name].source, macros, "sm_90a", "--ptxas-options=-v")
    assert "0 bytes spill stores" in told, told
    assert "serialized" not in told and "setmaxnreg" not in told, told  # products of warp groups; registers they take
    assert unwritten_reads(code, tmp_path) == []


@pytest.mark.parametrize("groups", [1, 8, 32])
def test_one_kernel_advances_states_of_mamba2_without_spilling(groups: int, tmp_path: Path) -> None:
    """Two blocks fit a processor."""
    try:
        nvrtc._library()
    except nvrtc.CompileError:
        pytest.skip("needs NVRTC")
    macros = mamba2_advance.macros((128, groups), 64, [(663552, 331776, 16384, 32, 1, 128, 2, 1)] * 5)
    code, told = nvrtc.compile_told(mamba2_advance.KERNEL.source, macros, "sm_90a", "--ptxas-options=-v")
    assert "0 bytes spill stores" in told, told
    assert unwritten_reads(code, tmp_path) == []
    assert 2 * (mamba2_advance.shared_bytes(macros) + 1024) <= SHARED_BYTES + 1024


@pytest.mark.parametrize(("heads", "groups"), [(128, 8), (24, 1), (32, 1), (12, 1)])
def test_one_kernel_decodes_mamba2_without_spilling(heads: int, groups: int, tmp_path: Path) -> None:
    try:
        nvrtc._library()
    except nvrtc.CompileError:
        pytest.skip("needs NVRTC")
    macros = mamba2_decode.macros((heads, groups), 64, [(663552, 331776, 16384, 32, 1, 128, 2, 1)] * 5)
    code, told = nvrtc.compile_told(mamba2_decode.KERNEL.source, macros, "sm_90a", "--ptxas-options=-v")
    assert "0 bytes spill stores" in told, told
    assert unwritten_reads(code, tmp_path) == []
    assert mamba2_decode.shared_bytes(macros) <= SHARED_BYTES


@pytest.mark.parametrize(("heads", "groups"), [(128, 8), (24, 1), (12, 1)])
def test_one_kernel_walks_prompts_of_mamba2_without_spilling(heads: int, groups: int, tmp_path: Path) -> None:
    try:
        nvrtc._library()
    except nvrtc.CompileError:
        pytest.skip("needs NVRTC")
    macros = mamba2_prompts.macros((heads, groups), 64, [(663552, 331776, 16384, 32, 1, 128, 2, 1)] * 5)
    code, told = nvrtc.compile_told(mamba2_prompts.KERNEL.source, macros, "sm_90a", "--ptxas-options=-v")
    assert "0 bytes spill stores" in told, told
    assert "serialized" not in told and "setmaxnreg" not in told, told  # products of warp groups; registers they take
    assert unwritten_reads(code, tmp_path) == []
    assert mamba2_prompts.shared_bytes(macros) <= SHARED_BYTES


@pytest.mark.parametrize(("width", "dtype"), [(4, torch.bfloat16), (3, torch.float16)])
def test_one_kernel_convolves_rows_that_decode_without_spilling(width: int, dtype: torch.dtype, tmp_path: Path) -> None:
    """Two blocks fit a processor."""
    try:
        nvrtc._library()
    except nvrtc.CompileError:
        pytest.skip("needs NVRTC")
    forms = [(663552, 331776, 16384, 32, 1, 128, 2, 1)] * 2
    macros = conv_decode.macros((width, 10240, 64), 64, forms, dtype, (width == 4, True))
    code, told = nvrtc.compile_told(conv_decode.KERNEL.source, macros, "sm_90a", "--ptxas-options=-v")
    registers = re.search(r"Used (\d+) registers", told)
    assert "0 bytes spill stores" in told and registers is not None, told
    assert 2 * conv_decode.THREADS * int(registers[1]) <= 65536
    assert unwritten_reads(code, tmp_path) == []


@pytest.mark.parametrize(("width", "channels"), [(4, 10240), (3, 2048), (8, 18432), (4, 300000)])
@pytest.mark.parametrize("processors", [132, 16])
@pytest.mark.parametrize("rows", [64, 512, 4096, 16384])
def test_rows_of_a_convolution_fit_shared_memory_however_many(
    rows: int, processors: int, width: int, channels: int
) -> None:
    """A block has 48 KiB, unless it was asked for more; 16 processors: a part of a GPU."""
    own = conv_decode.macros((width, channels, 16), 64, [(0,) * 8] * 2, torch.bfloat16, (True, True))
    told = conv_decode.Told(num_rows=rows)
    parts = conv_decode.parts_of(told, own, processors)
    assert 1 <= parts <= rows and conv_decode.shared_bytes(told, own, parts) <= 48 << 10
    blocks = parts * conv_decode.num_tiles(own)
    assert blocks <= 2 * processors or parts == 1 or conv_decode.shared_bytes(told, own, parts - 1) > 48 << 10


_MAMBA2 = {"heads": (128, 8), "sizes": (64, 128), "chunk": 64, "dtype": torch.bfloat16, "state": torch.float32}
_BESIDE = {"pitch": 128 * 64, "width": 10240, "begin": 0, "apart": 1}


@pytest.mark.parametrize(
    ("other", "fits"),
    [
        ({}, True),  # Nemotron-H's and, with one group, Bamba's
        ({"heads": (128, 1)}, True),
        ({"heads": (48, 1)}, True),  # Granite's
        ({"heads": (24, 1), "sizes": (64, 256)}, False),  # Falcon-H1's
        ({"heads": (112, 8)}, False),  # 14 heads share B
        ({"heads": (48, 1), "sizes": (32, 128)}, False),
        ({"heads": (128, 3)}, False),
        ({"chunk": 16}, False),
        ({"dtype": torch.float16}, False),
        ({"dtype": torch.float32}, False),
        ({"state": torch.bfloat16}, False),
        ({"pitch": 128 * 64 + 16}, False),  # of states, whose lines the copy engine takes whole
        ({"width": 10244}, False),
        ({"begin": 4}, False),
        ({"apart": 2}, False),  # channels of a token
    ],
)
def test_one_kernel_decodes_what_it_knows_of_mamba2(other: dict[str, Any], fits: bool) -> None:
    own = _MAMBA2 | _BESIDE | other
    (heads, groups), dtype = own["heads"], own["dtype"]
    rows = torch.empty(2 * own["width"] + own["begin"], dtype=dtype)[own["begin"] :].view(2, -1)[:, :: own["apart"]]
    given = rows, torch.empty(2, heads, dtype=dtype)
    states = torch.empty(4 * own["pitch"], dtype=own["state"]).as_strided(
        (2, 2, 1, 8192), (2 * own["pitch"], own["pitch"], 8192, 1)
    )
    shapes = ((heads * 64, dtype), (groups * 128, dtype), (heads, torch.float32), (heads, torch.float32))
    kept = states, *(torch.empty(2, 1, 64, width, dtype=kind) for width, kind in shapes)
    assert mamba2_decode.fits(own["heads"], own["sizes"], own["chunk"], given, kept) == fits


@pytest.mark.parametrize(
    ("width", "chunk", "channels", "dtype", "kind", "fits"),
    [
        (4, 64, 10240, torch.bfloat16, torch.bfloat16, True),
        (3, 16, 2048, torch.float16, torch.float16, True),  # LFM2's
        (4, 64, 10240, torch.float32, torch.float32, False),
        (4, 64, 10240, torch.bfloat16, torch.float32, False),
        (4, 64, 1022, torch.bfloat16, torch.bfloat16, False),
        (1, 64, 1024, torch.bfloat16, torch.bfloat16, False),
        (9, 64, 1024, torch.bfloat16, torch.bfloat16, False),
        (7, 4, 1024, torch.bfloat16, torch.bfloat16, False),  # a chunk's end keeps tokens of its own alone
    ],
)
def test_one_kernel_convolves_what_it_knows(
    width: int, chunk: int, channels: int, dtype: torch.dtype, kind: torch.dtype, fits: bool
) -> None:
    x, kept = torch.empty(3, channels, dtype=dtype), torch.empty(2, 1, width, channels, dtype=kind)
    assert conv_decode.fits(width, chunk, x, (kept, kept)) == fits
    shifted, apart = torch.empty(3, channels + 2, dtype=dtype)[:, 2:], torch.empty(3, 2 * channels, dtype=dtype)[:, ::2]
    assert not any(conv_decode.fits(width, chunk, each, (kept, kept)) for each in (shifted, apart))


@pytest.mark.parametrize("apart", [1, 2])
def test_kernels_of_the_delta_rule_know_channels_that_follow_one_another(apart: int) -> None:
    qkv = torch.empty(3, 512 * apart, dtype=torch.bfloat16)[:, ::apart]
    kept = torch.empty(2, 1, 128, 128), *(torch.empty(2, 1, 64, 128, dtype=torch.bfloat16) for _ in range(3))
    assert loading.fits((2, 1), (128, 128), 64, qkv, kept) == (apart == 1)


@pytest.mark.parametrize(("rows", "groups"), [(1, 1), (2, 1), (3, 2), (16, 2)])
def test_a_walk_has_a_group_a_block_while_all_run_at_once(rows: int, groups: int) -> None:
    assert delta_prompts.groups_of(rows * 32, 132) == groups


def test_many_states_of_float32_fit_shared_memory_where_rows_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    """Falcon-H1 has 256."""
    for kernel in _compiled(monkeypatch, "mamba2", torch.float32, (24, 64, 1, 256), (1,)):
        assert kernel.metadata.shared <= SHARED_BYTES, kernel.metadata.name


def _compiled(
    monkeypatch: pytest.MonkeyPatch, name: str, dtype: torch.dtype, sizes: tuple[int, ...], counts: tuple[int, ...]
) -> list[Any]:
    """What a row launches in steps of so many tokens, compiled for a Hopper that is not there."""
    found: list[Any] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        found.append(run(self, *args, grid=grid, warmup=True, **kwargs))
        return found[-1]

    no_device = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: "a Hopper that is not there",
        get_current_stream=lambda device: 0,
    )
    monkeypatch.setattr(driver, "_active", no_device)
    monkeypatch.setattr(JITFunction, "run", compile_only)
    monkeypatch.setattr(launch, "_has_pdl", lambda device: True)
    case = rig.CASES[name](dtype, *sizes)
    rows = rig.Rows(case, GpuStates(), rig.draw_all(case, [sum(counts)]), block_size=64)
    for count in counts:
        rows.compute({0: count})
        if 1 < count < 64:  # and as a row that verifies
            rows.computed[0] -= count
            rows.compute({0: count - 1}, 1)
            rows.computed[0] += 1
    return list({id(kernel): kernel for kernel in found}.values())


def _spilled_bytes(ptx: str, folder: Path) -> int:
    """What the assembler that Triton brings keeps in memory for want of registers."""
    source, arch = folder / "kernel.ptx", re.search(r"\.target (\w+)", ptx)
    assert arch is not None, "a kernel says what it is for"
    source.write_text(ptx)
    options = ["-v", f"--gpu-name={arch[1]}", "--fmad=false", str(source), "-o", str(folder / "kernel.cubin")]
    told = subprocess.run([triton.knobs.nvidia.ptxas.path, *options], capture_output=True, text=True, check=True)
    return sum(map(int, re.findall(r"(\d+) bytes spill", told.stderr)))


@pytest.mark.parametrize("num_tiles", [1, 2])
@pytest.mark.parametrize("num_rows", [1, 15, 16, 17, 64, 65, 100, 256, 300, 512])
def test_programs_that_decode_mamba2_fill_the_processors(num_rows: int, num_tiles: int) -> None:
    """Each tile of a head's channels has such programs: as many heads of half as many tiles are shared alike."""
    num_heads, room = 128 // num_tiles, gpu._STREAMS[True].room
    programs = gpu.programs_of(num_heads, num_rows, room, num_tiles)
    if num_rows < 16:
        assert programs == num_heads, "each head has one"
        return
    waves = -(-num_rows * num_tiles * programs // room)
    assert waves * -(-num_heads // programs) <= 1.25 * num_rows * 128 / room
