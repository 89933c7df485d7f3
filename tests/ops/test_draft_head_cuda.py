"""A drafter's head and draw in CUDA C++ on a CPU: compiled by the system's compiler, with lanes.h for instructions."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from octavo.ops import norm
from octavo.ops.compile import nvrtc
from octavo.ops.inputs.tensors import DraftRows, RowTensors
from octavo.ops.sampling import drafts_head
from octavo.ops.sampling.drafts import draw_drafts_composed

COMPILER = shutil.which(os.environ.get("CXX", "g++"))
K, BF16 = 1024, torch.bfloat16
_RUN = """
static Told given;
extern "C" void run(const Told* told, u32 count, u32 threads) {
    given = *told;
    body = [] { product_and_draft(given); };
    num_blocks = count;
    for (block_id = 0; block_id < count; ++block_id) run_block(threads);
}
"""


def library(folder: Path, macros: dict[str, int | str]) -> ctypes.CDLL:
    tests, text = Path(__file__).resolve().parents[1], Path(drafts_head.__file__).with_suffix(".cu").read_text()
    source = folder / f"{hashlib.sha256(repr(macros).encode()).hexdigest()[:16]}.cpp"
    source.write_text((tests / "states" / "lanes.h").read_text() + text + _RUN)
    assert COMPILER is not None
    flags = ["-O1", "-std=c++17", "-shared", "-fPIC", "-w", "-ffp-contract=off"]
    flags += [f"-D{name}={value}" for name, value in macros.items()]
    subprocess.run([COMPILER, *flags, str(source), "-o", str(source.with_suffix(".so"))], check=True)
    return ctypes.CDLL(str(source.with_suffix(".so")))


@pytest.mark.skipif(COMPILER is None, reason="needs a compiler")
@pytest.mark.parametrize("form", [(8, 4, 128, 3), (4, 5, 64, 0)])
def test_it_draws_what_its_logits_say(form: tuple[int, int, int, int], tmp_path: Path) -> None:
    """With and without the target's ids, rows at a temperature and without."""
    built, channels = (
        library(
            tmp_path,
            dict(zip(("WARPS", "STAGES", "PART", "AHEAD"), form, strict=True)) | {"K": K, "FIRST": 1, "HALF": 0},
        ),
        16 * 50,
    )
    generator = torch.Generator().manual_seed(3)
    weight = (torch.randn(channels, K, generator=generator) / 16).to(BF16)
    scale, scratch = torch.rand(K, generator=generator) + 0.5, torch.zeros(2, dtype=torch.int64)
    drawn = set()
    for trial in range(8):
        x = torch.randn(1, K, generator=generator).to(BF16)
        ids = torch.randperm(4 * channels, generator=generator)[:channels] if trial % 2 else None
        total, width = torch.tensor([3, 9], dtype=torch.int32), 12 if trial else 10
        tables = [RowTensors(torch.zeros(2, width, dtype=torch.int32), total, total) for _ in range(2)]
        ours, theirs = (
            DraftRows(
                rows=torch.tensor([1]),
                live=(torch.tensor([0], dtype=torch.int32), torch.tensor([4], dtype=torch.int32)),
                table=table,
                place=1,
                temperatures=torch.tensor([9.0, 0.0 if trial % 4 > 1 else 0.7]),
                seeds=torch.tensor([1, 12345678901 - 99 * trial]),
                noise=0.9,
                vocab_size=4 * channels,
            )
            for table in tables
        )
        drafts = torch.zeros(1, dtype=torch.int64)
        told = drafts_head.told_of(x, scale, 1e-6, weight, ids, ours, drafts, scratch)
        built.run(ctypes.byref(told), 3, 32 * form[0])
        logits = norm.rms_norm(x, scale, 1e-6).float() @ weight.float().t()
        assert torch.equal(drafts, draw_drafts_composed(logits, ids, theirs)), trial
        assert torch.equal(tables[0].token_ids, tables[1].token_ids) and not scratch.any()
        drawn.add(int(drafts))
    assert len(drawn) > 4


@pytest.mark.parametrize("k", [1024, 4096])
def test_its_noise_is_made_before_it_waits(k: int, tmp_path: Path) -> None:
    """An assembler may put behind a wait what need not be there. Nothing spills; the next entry has room beside."""
    triton = pytest.importorskip("triton")
    own = drafts_head.macros(k, 132)
    code, told = nvrtc.compile_told(drafts_head.source(), own, "sm_90a", "--ptxas-options=-v")
    assert "0 bytes spill stores" in told
    if k == 1024:  # two blocks and an entry
        assert 2 * (drafts_head.shared_bytes(own) + 1024) + 86024 + 1024 <= 228 << 10
    path = tmp_path / "kernel.cubin"
    path.write_bytes(code)
    command = [triton.knobs.nvidia.cuobjdump.path, "-sass", str(path)]
    before, wait, _ = subprocess.run(command, capture_output=True, text=True, check=True).stdout.partition("ACQBULK")
    assert wait and before.count("FFMA") >= 2 * 11
