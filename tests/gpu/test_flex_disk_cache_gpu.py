"""Kernels that are kept: the bits of torch's own call, without its compiler, for nothing else."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "attention"))

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

import octavo.attention as A
from cached_kernels import SLOPES, mods_of
from flex_gpu_rig import BF16, DEVICE, HEADS, KV_HEADS, PLAIN, Step, make_rows
from octavo.attention.base import LayerTensors
from octavo.attention.flex import backend as flex
from octavo.attention.flex import kernel as flex_kernel
from octavo.attention.flex.backend import FlexBackend
from octavo.attention.flex.key import NotFingerprintable
from octavo.attention.mods import AttentionMods
from octavo.cache.specs import AttentionSpec
from octavo.ops.compile import driver

pytestmark = pytest.mark.gpu
DECODE, MIXED = [(300, 1), (2500, 1)], [(300, 1), (64, 64), (4200, 130)]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "octavo" / "flex"


def by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_):
        raise NotFingerprintable("a test compares")

    monkeypatch.setattr(flex_kernel, "name_mods", refuse)


def run(step: Step, spec: AttentionSpec, layer: LayerTensors | None = None, **options) -> torch.Tensor:
    setup = dataclasses.replace(step.setup(), cache_dtype=step.kv.dtype)
    backend = FlexBackend([spec], BF16, DEVICE, setup)
    with torch.inference_mode():
        return step.run(backend, spec, *([layer] if layer else []))


SPECS = {
    "plain": PLAIN,
    "a mask and a tensor": dataclasses.replace(PLAIN, mods=mods_of(5)),
    "fields": dataclasses.replace(
        PLAIN, window=900, mods=A.and_(A.prefix(A.request_field("prefix_len")), A.soft_cap(9.0))
    ),
}


@pytest.mark.parametrize("name", SPECS)
def test_kernels_alone_give_the_bits_of_torchs_call(name: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled and kept, found again, in several launches of few mask rows, and by torch."""
    steps, spec = [Step(make_rows(rows)) for rows in (DECODE, MIXED)], SPECS[name]
    compiled = [run(step, spec) for step in steps]
    files = sorted(cache.iterdir())
    assert len(files) == 2
    found = [run(step, spec) for step in steps]
    assert sorted(cache.iterdir()) == files
    with monkeypatch.context() as few:
        few.setattr(flex, "_SCRATCH_BYTES", 3 * 2 * KV_HEADS * 128 * 128 * 2)
        in_parts = [run(step, spec) for step in steps]
    by_torch(monkeypatch)
    expected = [run(step, spec) for step in steps]
    for outs in (compiled, found, in_parts):
        assert all(map(torch.equal, outs, expected))
    assert sorted(cache.iterdir()) == files


def test_torchs_kernel_that_gives_sums_alone_runs_where_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A leaf that is alone is one launch, to the bits of torch's call; several leaves are two."""
    launched, launch = [], driver.launch
    monkeypatch.setattr(driver, "launch", lambda *arguments: launched.append(arguments) or launch(*arguments))
    for rows, count in (([(300, 1), (1200, 1)], 1), (DECODE, 2)):
        step = Step(make_rows(rows))
        compiled = run(step, PLAIN)
        launched.clear()
        found = run(step, PLAIN)
        assert len(launched) == count
        with monkeypatch.context() as other:
            by_torch(other)
            expected = run(step, PLAIN)
        assert torch.equal(compiled, expected) and torch.equal(found, expected)


def test_a_quantized_cache_with_scales(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scales = torch.tensor([0.02, 0.05], device=DEVICE), torch.tensor([0.5, 0.03], device=DEVICE)
    layer = LayerTensors(key_scale=scales[0], value_scale=scales[1])
    rows = [
        (dataclasses.replace(made, kv=(made.kv.float() * 30).round().clamp(-127, 127).to(torch.int8)), length, queries)
        for made, length, queries in make_rows(DECODE)
    ]
    step = Step(rows)
    outs = [run(step, PLAIN, layer) for _ in range(2)]
    assert len(list(cache.iterdir())) == 1
    by_torch(monkeypatch)
    expected = run(step, PLAIN, layer)
    assert all(torch.equal(out, expected) for out in outs)


def test_a_captured_tensor_is_the_live_one(cache: Path) -> None:
    """Two mods of one code over two tensors share a kernel; each reads its own, as it is now."""

    def biased(slopes: torch.Tensor) -> AttentionMods:
        def score(value, b, h, q_idx, kv_idx):
            return value - slopes[h] * (q_idx - kv_idx)

        return AttentionMods(score_mod=score)

    step, other = Step(make_rows(DECODE)), SLOPES * 3
    first, second = (run(step, dataclasses.replace(PLAIN, mods=biased(slopes))) for slopes in (SLOPES, other))
    assert len(list(cache.iterdir())) == 1 and not torch.equal(first, second)
    spec = dataclasses.replace(PLAIN, mods=biased(changing := SLOPES.clone()))
    backend = FlexBackend([spec], BF16, DEVICE, step.setup())
    with torch.inference_mode():
        assert torch.equal(step.run(backend, spec), first)
        changing.copy_(other)
        assert torch.equal(step.run(backend, spec), second)
    wide = torch.cat([SLOPES, SLOPES])  # another shape is another kernel
    assert torch.equal(run(step, dataclasses.replace(PLAIN, mods=biased(wide))), first)
    assert len(list(cache.iterdir())) == 2 and len(wide) == 2 * HEADS


def test_a_damaged_file_is_told_and_compiled_anew(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    step = Step(make_rows(DECODE))
    expected = run(step, PLAIN)
    (file,) = cache.iterdir()
    whole = file.read_text()
    for damage in (whole[: len(whole) // 2], whole.replace('"threads": ', '"threads": 1'), "[]", ""):
        file.write_text(damage)
        caplog.clear()
        with caplog.at_level(logging.INFO):
            assert torch.equal(run(step, PLAIN), expected)
        assert "is damaged" in caplog.text and "compiled, kept at" in caplog.text
        assert file.read_text() == whole


def test_a_mod_without_a_name_is_torchs(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    near = [64]

    def mask(b, h, q_idx, kv_idx):
        return q_idx - kv_idx < near[0]

    step = Step(make_rows(DECODE))
    with caplog.at_level(logging.INFO):
        out = run(step, dataclasses.replace(PLAIN, mods=AttentionMods(mask_mod=mask)))
    assert "compiled at every start: mask_mod's 'near'" in caplog.text and not cache.exists()
    torch.testing.assert_close(out, run(step, dataclasses.replace(PLAIN, window=64)), atol=1e-2, rtol=1e-2)


def test_later_starts_find_a_mods_kernels_without_torchs_compiler(tmp_path: Path) -> None:
    """Two processes with mods that differ by a number compile; a third, with one of the two, finds its kernels."""
    script = str(Path(__file__).with_name("cached_kernels.py"))

    def start(number: int, file: str) -> subprocess.Popen[str]:
        command = [sys.executable, script, str(number), str(tmp_path / file)]
        return subprocess.Popen(command, env=dict(os.environ), stdout=subprocess.PIPE, text=True)

    for runs, kept, found in ((((5, "a"), (7, "b")), 2, 0), (((5, "c"),), 0, 2)):
        for process in [start(*one) for one in runs]:
            said, _ = process.communicate(timeout=120)
            answer = json.loads(said.splitlines()[-1])
            assert (answer["kept"], answer["found"], answer["compiler"]) == (kept, found, kept > 0), answer["lines"]
    outs = [torch.load(tmp_path / name) for name in "abc"]
    assert all(map(torch.equal, outs[0], outs[2])) and not torch.equal(outs[0][0], outs[1][0])
