"""The flex backend's compiled kernel without a GPU: torch's compiler makes its text, Triton's interpreter runs it.

torch lowers FlexAttention to its Triton kernels for a GPU only; here its own lowering is told that a CPU is one. To be
run by `interpreted.run_rig`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import inspect
import itertools
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

import octavo.attention as A
from batches import make_history
from contract_rig import CPU, Row, Setting, Step, attend_plainly, make_step
from octavo.attention.base import LayerTensors, Setup
from octavo.attention.flex import backend as flex
from octavo.attention.flex import kernel as flex_kernel
from octavo.attention.flex import template as flex_template
from octavo.attention.mods import AttentionMods
from octavo.cache.specs import AttentionSpec

HEADS, KV_HEADS, SIZE = 4, 2, 16
PLAIN = AttentionSpec(num_heads=HEADS, num_kv_heads=KV_HEADS, head_size=SIZE, scale=0.3)
BLOCKS = (16, 32, 48, 144, 528)  # check_layouts has 64
_NUMBERS = itertools.count()
_HEURISTICS = SimpleNamespace(template=lambda **_: lambda kernel: kernel, pointwise=lambda **_: lambda kernel: kernel)


class _Interpreted:
    """What torch's compiler would make of a kernel's text."""

    def __init__(self, name: str, text: str, folder: str) -> None:
        text = text.replace("triton_helpers, triton_heuristics", "triton_helpers").replace(
            "size_hints={'x': 256}, \n", "\n"
        )
        path = Path(folder, f"kernel_{next(_NUMBERS)}.py")
        path.write_text(text)
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        module.triton_heuristics = _HEURISTICS  # type: ignore[attr-defined]
        spec.loader.exec_module(module)
        self._kernel, self._is_pointwise = getattr(module, name), "XBLOCK" in text

    def run(self, *arguments: Any, stream: object) -> None:
        if self._is_pointwise:
            self._kernel[(1,)](*arguments, XBLOCK=1 << (arguments[-1] - 1).bit_length())
        else:
            self._kernel[arguments[-3:]](*arguments[:-3])


@contextlib.contextmanager
def lowered() -> Iterator[None]:
    """FlexAttention on a CPU is compiled as on a GPU, and interpreted; the flex backend compiles on a CPU."""
    lowering: Any = importlib.import_module("torch._inductor.kernel.flex.flex_attention")
    from torch._inductor import async_compile, choices, config
    from torch._inductor import lowering as tables
    from torch._inductor.template_heuristics.triton import FlexConfig

    flex_template.install()
    text = inspect.getsource(lowering.flex_attention)
    text = textwrap.dedent(text[text.index("def flex_attention") :]).replace('.type == "cpu"', '.type == "none"')
    made: dict[str, Any] = {}
    exec(text, vars(lowering), made)
    operator = torch.ops.higher_order.flex_attention
    with (
        tempfile.TemporaryDirectory() as folder,
        config.patch(cpu_backend="triton", force_disable_caches=True),
        mock.patch("torch.utils._triton.triton_hash_with_backend", lambda: "none"),
        mock.patch.dict(tables.lowerings, {operator: made["flex_attention"]}),
        mock.patch.object(
            choices.InductorChoices, "get_flex_attention_fwd_configs", lambda *_: [FlexConfig(64, 32, 1, 4)]
        ),
        mock.patch.object(
            async_compile.AsyncCompile, "triton", lambda _, name, text, device_str: _Interpreted(name, text, folder)
        ),
        mock.patch.object(flex_kernel.Kernel, "__call__", _compiled),
    ):
        yield


def _compiled(
    self: Any,
    lines: torch.Tensor,
    kv: torch.Tensor,
    rows: Any,
    key_scale: torch.Tensor | None,
    start: int,
    count: int,
    *,
    sums: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a kernel's call does on a GPU where it keeps nothing."""
    scales = () if key_scale is None else (key_scale,)
    if not self._ways:
        call = flex_kernel.compile_call(self._variant, self._mods, self.shape, self._sizes)
        self._ways[()] = flex_kernel._through(call)
    return self._ways[()](lines, *kv[:1].chunk(2, dim=-1), rows, scales, start, count, sums)


def make_rows(dtype: torch.dtype, *shape: tuple[int, int]) -> list[Row]:
    return [
        (make_history(seed, length, HEADS, KV_HEADS, SIZE, dtype), length, queries)
        for seed, (length, queries) in enumerate(shape)
    ]


def clean(step: Step) -> Step:
    """Slots that nobody wrote hold zeros, as an engine's do; everything else is as it was."""
    torch.nan_to_num_(step.pool.buffer)
    return step


class TwoTiles(flex.FlexBackend):
    """As on a GPU, where prompts have larger tiles than decode."""

    def sizes(self, spec: AttentionSpec, block_size: int) -> Any:
        found = super().sizes(spec, block_size)
        return found if found.leaf == 0 else dataclasses.replace(found, prefill_lines=32, leaf=128)


def backend_of(spec: AttentionSpec, dtype: torch.dtype, block: int = 0, **setup: Any) -> flex.FlexBackend:
    return TwoTiles([spec], dtype, CPU, Setup(max_model_len=544, block_size=block, num_blocks=99, **setup))


@torch.inference_mode()
def check(spec: AttentionSpec, dtype: torch.dtype, rows: list[Row], settings: list[Setting], **setup: Any) -> None:
    """Near the plain way, and the same bits wherever and however the cache lies."""
    expected, first = attend_plainly(rows, spec), None
    backends = {}
    with lowered():
        for setting in settings:
            key = setting.kernel, setting.layout
            backends[key] = backends.get(key) or backend_of(spec, dtype, setting.kernel, **setup)
            out = clean(make_step(rows, setting, seed=len(backends))).run(backends[key], spec)
            first = out if first is None else first
            tolerance = 1e-5 if dtype == torch.float32 else 2e-2
            torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)
            assert torch.equal(out, first), setting


MIXED = (140, 1), (70, 70), (33, 5)
SQUARE = [Setting("LBHNC", block, block) for block in BLOCKS]


def check_sizes() -> None:
    """Every block size, whole prompts and decode; a score and a mask of a user's."""
    check(PLAIN, torch.float32, make_rows(torch.float32, *MIXED), SQUARE)
    mods = A.and_(A.sliding_window(40), AttentionMods(mask_mod=lambda b, h, q, kv: (kv % 3 != 1) | (kv == q)))
    mods = A.and_(mods, AttentionMods(score_mod=lambda s, b, h, q, kv: s - 0.1 * (q - kv)))
    spec, rows = dataclasses.replace(PLAIN, mods=mods), make_rows(torch.float16, *MIXED)
    outs = []
    with lowered(), torch.inference_mode():
        for block in (16, 48):
            step = clean(make_step(rows, Setting("LBHNC", block, block)))
            outs.append(step.run(backend_of(spec, torch.float16, block), spec))
    step = clean(make_step(rows, Setting()))
    reference = step.run(backend_of(spec, torch.float16, 16), spec)
    assert all(torch.equal(out, outs[0]) for out in outs)
    torch.testing.assert_close(outs[0], reference, atol=4e-3, rtol=4e-3)


def check_layouts() -> None:
    """Every layout, whole blocks and split ones."""
    settings = [
        Setting(layout, block, kernel)
        for layout, split in (("LBHNC", (96, 48)), ("LBNHC", (128, 64)), ("BLHNC", (128, 64)), ("BLNHC", (96, 48)))
        for block, kernel in ((16, 16), split)
    ]
    check(PLAIN, torch.float32, make_rows(torch.float32, (90, 3), (40, 40)), settings)


def check_freed_blocks() -> None:
    """A window's blocks that the cache took back are the null block in the table: nothing of them is read."""
    spec, rows = dataclasses.replace(PLAIN, window=20), make_rows(torch.float32, (90, 1), (77, 9))
    whole, freed = (clean(make_step(rows, Setting())) for _ in range(2))
    for row, (_, length, queries) in enumerate(rows):
        freed.inputs.block_table[row, : (length - queries - 20) // 16] = 0
    freed.kv[0] = float("nan")
    with lowered(), torch.inference_mode():
        backend = backend_of(spec, torch.float32, 16)
        outs = [step.run(backend, spec) for step in (whole, freed)]
    assert torch.equal(*outs)
    torch.testing.assert_close(outs[0].double(), attend_plainly(rows, spec), atol=1e-5, rtol=1e-5)


def check_scales() -> None:
    """An int8 cache with a scale per head: the bits of every block size."""
    scales = LayerTensors(key_scale=torch.tensor([0.02, 0.05]), value_scale=torch.tensor([0.03, 0.01]))
    rows, outs = make_rows(torch.float32, (70, 2), (20, 20)), []
    with lowered(), torch.inference_mode():
        for block in (16, 48, 128):
            step = make_step(rows, Setting("BLNHC", block, block), cache=torch.int8, scales=scales)
            backend = backend_of(PLAIN, torch.float32, block, cache_dtype=torch.int8)
            outs.append(step.run(backend, PLAIN, scales))
    reference = step.run(backend_of(PLAIN, torch.float32, 128, cache_dtype=torch.int8), PLAIN, scales)
    assert all(torch.equal(out, outs[0]) for out in outs)
    torch.testing.assert_close(outs[0], reference, atol=1e-5, rtol=1e-5)


def check_far() -> None:
    """L3.G1: a pool of more than 2^31 elements, its live blocks at the end; no memory is taken for the others."""
    scales = LayerTensors(key_scale=torch.tensor([0.02, 0.05]), value_scale=torch.tensor([0.03, 0.01]))
    rows, layers = make_rows(torch.float32, (70, 2), (20, 20)), 5
    near = make_step(rows, Setting("LBHNC", 16, 16), cache=torch.int8, scales=scales)
    expected = near.run(backend_of(PLAIN, torch.float32, 16, cache_dtype=torch.int8), PLAIN, scales)
    for layout in ("LBHNC", "LBNHC", "BLHNC", "BLNHC"):
        kernel = 48 if layout == "BLHNC" else 64
        num_layers = layers if layout[0] == "B" else 1
        num_blocks = (1 << 31) // (num_layers * kernel * KV_HEADS * 2 * SIZE) + 2000
        step = make_step(
            rows,
            Setting(layout, kernel, kernel),
            num_blocks=num_blocks,
            cache=torch.int8,
            scales=scales,
            num_layers=num_layers,
        )
        assert int(step.inputs.block_table[0, 0]) * step.kv.stride(0) > 1 << 31
        outs = [step.run(backend_of(PLAIN, torch.float32, kernel, cache_dtype=torch.int8), PLAIN, scales)]
        with lowered(), torch.inference_mode():
            outs.append(step.run(backend_of(PLAIN, torch.float32, kernel, cache_dtype=torch.int8), PLAIN, scales))
        for out in outs:
            torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
        assert torch.equal(outs[0], expected), "the reference implementation has the same bits anywhere"


INTERPRETED = {
    "sizes": check_sizes,
    "layouts": check_layouts,
    "freed_blocks": check_freed_blocks,
    "scales": check_scales,
    "L3_G1_far": check_far,
}
