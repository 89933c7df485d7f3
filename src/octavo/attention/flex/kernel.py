"""One spec's attention for one tile: FlexAttention over the paged cache, compiled once, kept for later starts.

Owns the mods in a kernel's own indices, what torch is asked to compile (`flex_template` has the kernel), and which of
three ways a call takes: the reference implementation on the CPU, torch's compiled call, or the kernels that it
launches, without torch's compiler around them. Does not know batches. Invariants: all ways on a device give the same
bits; a kernel that was kept is launched only if its key names all that it was compiled from; tensors that a mod
captured are read where they lie now, numbers as they were when the kernel was first asked for.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import types
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from octavo.attention.flex import template as flex_template
from octavo.attention.flex.block_sizes import FlexSizes
from octavo.attention.flex.key import Name, NotFingerprintable, name_code, name_mods
from octavo.attention.mods import AttentionMods
from octavo.cache.specs import AttentionSpec
from octavo.ops import flex as ops
from octavo.ops.flex.mask_rows import Geometry, MaskRows

_LOG = logging.getLogger(__name__)
ALIGNED = 16  # bytes, of what compiled kernels read
_LISTS = slice(3, 10)  # of a call's inputs: what _lists gives
_FORMAT = 3  # of a kept kernel's key and file
_PROBE_LINES = 1 << 13  # of the largest made-up call: more than torch gives one program
_ENVIRONMENT = ("TORCHINDUCTOR_", "TORCHDYNAMO_", "TORCH_COMPILE", "TRITON_")
_ELSEWHERE = ("_CACHE_DIR", "_COMPILE_THREADS", "_HOME")  # variables that change no kernel
_BY_COMPILING: set[tuple[str, str, str]] = set()  # settings that torch's compiler itself changed in this process
_Call = Callable[[list[Tensor]], tuple[Tensor, Tensor]]
# (lines, key, value, mask rows, scales of K or none, first mask row, how many, whether sums are wanted)
_Way = Callable[[Tensor, Tensor, Tensor, MaskRows, tuple[Tensor, ...], int, int, bool], tuple[Tensor, Tensor]]


class Kernel:
    """One spec's attention for one tile. Compiled, or found, when it is first called on a CUDA device."""

    def __init__(self, spec: AttentionSpec, mods: AttentionMods, shape: Geometry, sizes: FlexSizes) -> None:
        """Nothing is compiled yet."""
        self.shape = shape
        self._variant, self._mods, self._sizes = spec, mods, sizes
        self._ways: dict[tuple[object, ...], _Way] = {}  # by what is compiled for

    def __call__(
        self,
        lines: Tensor,
        kv: Tensor,
        rows: MaskRows,
        key_scale: Tensor | None,
        start: int,
        count: int,
        *,
        sums: bool = True,
    ) -> tuple[Tensor, Tensor]:
        """Outputs and logarithms of sums of the mask rows start .. start + count - 1. key_scale: see LayerTensors.

        kv: a layer's view of the cache. Without `sums` the logarithms may hold anything.
        """
        if not lines.is_cuda:
            mask, score = make_mods(self._mods, self.shape, rows.row, rows.first, rows.length, key_scale)
            scale = self._variant.scale
            return ops.attend_lines_reference(
                lines, *ops.token_axis(kv), rows, self.shape, mask, score, start=start, scale=scale
            )
        scales = () if key_scale is None else (key_scale,)
        key, value = kv[:1].chunk(2, dim=-1)  # where it begins and how it lies: the lists lead from there
        aligned = tuple(tensor.data_ptr() % ALIGNED == 0 for tensor in (key, value, *scales))
        like = key.dtype, key.shape, key.stride()[1:], lines.dtype, lines.shape[1:], len(scales), aligned
        way = self._ways.get(like)
        if way is None:
            inputs = [lines, key, value, *_lists(rows, start, count), *scales]
            num_units = ((kv.shape[0] - 1) * self.shape.stride + 1) * self.shape.block // self.shape.unit
            way = self._ways[like] = self._find(inputs, num_units, aligned=all(aligned))
        return way(lines, key, value, rows, scales, start, count, sums)

    def _find(self, inputs: list[Tensor], num_units: int, *, aligned: bool) -> _Way:
        """Launches that were kept, or are from now on; torch's call where they cannot be. Compiles at most once."""
        what = f"attention kernel of {self._mods.name}, tiles of {self.shape.lines} lines"
        device = inputs[0].device
        from octavo.ops.compile import aot_launch, disk_cache, driver

        try:
            if not aligned or device.index != torch.cuda.current_device():
                raise NotFingerprintable("its cache lies elsewhere than compiled kernels expect")
            name, captured = name_mods(self._mods, device)
            options = kernel_options(self._sizes, self.shape.lines) | flex_template.unit_options(self.shape.unit)
            settings = _settings(self._variant, self.shape, options, disk_cache.versions())
            name = json.loads(json.dumps([settings, _likes(inputs), name]))
        except NotFingerprintable as error:
            _LOG.info("%s is compiled at every start: %s", what, error)
            return _through(compile_call(self._variant, self._mods, self.shape, self._sizes))
        path = disk_cache.path_of("flex", name)
        form = aot_launch.read(path, name)
        if form is not None:
            try:
                launch = aot_launch.Launch(form, device)
                _LOG.info("%s: found at %s", what, path)
                return _direct(launch, captured)
            except driver.DriverError as error:
                _LOG.warning("%s: %s does not load (%s), it is compiled anew", what, path, error)
        call = compile_call(self._variant, self._mods, self.shape, self._sizes)
        call(inputs)
        try:
            probes = _Probes(inputs, self.shape, num_units)
            form = aot_launch.observe(
                lambda count: [*probes(count), *captured], lambda made: call(made[: len(inputs)]), probes.counts
            )
            launch = aot_launch.Launch(form, device)
            probes.compare(call, launch, captured)
        except Exception as error:  # whatever another torch has in another place
            _LOG.warning("%s is not kept, and compiled at every start: %s", what, error)
            return _through(call)
        try:
            aot_launch.write(path, name, form)
            _LOG.info("%s: compiled, kept at %s", what, path)
        except OSError as error:
            _LOG.warning("%s cannot be kept at %s: %s", what, path, error)
        return _direct(launch, captured)


def _through(call: _Call) -> _Way:
    """Torch's compiled call."""

    def way(
        lines: Tensor,
        key: Tensor,
        value: Tensor,
        rows: MaskRows,
        scales: tuple[Tensor, ...],
        start: int,
        count: int,
        sums: bool,
    ) -> tuple[Tensor, Tensor]:
        return call([lines, key, value, *_lists(rows, start, count), *scales])

    return way


def _direct(launch: Any, captured: list[Tensor]) -> _Way:
    """The kernels alone."""

    def way(
        lines: Tensor,
        key: Tensor,
        value: Tensor,
        rows: MaskRows,
        scales: tuple[Tensor, ...],
        start: int,
        count: int,
        sums: bool,
    ) -> tuple[Tensor, Tensor]:
        lists = _lists(rows, start, count) if start else _buffers(rows)
        if start:  # torch copies what lies between multiples of 16 bytes, too
            lists = [part if part.data_ptr() % ALIGNED == 0 else part.clone() for part in lists]
        tensors = (lines, key, value, *lists, *scales, *captured)
        parts, lse = launch([tensor.data_ptr() for tensor in tensors], count, 2 if sums else 1)
        return parts, lse

    return way


def _lists(rows: MaskRows, start: int, count: int) -> list[Tensor]:
    """What a kernel reads of the mask rows start .. start + count - 1."""
    return [buffer[start : start + count] for buffer in _buffers(rows)]


def _buffers(rows: MaskRows) -> list[Tensor]:
    return [rows.partial_num, rows.partial, rows.full_num, rows.full, rows.row, rows.first, rows.length]


def _likes(inputs: list[Tensor]) -> Name:
    """What a kernel is compiled for. The number of mask rows, a first size, is left open."""
    counted = {0, *range(len(inputs))[_LISTS]}
    return [
        [str(tensor.dtype), list(tensor.shape[index in counted :]), list(tensor.stride()), tensor.requires_grad]
        for index, tensor in enumerate(inputs)
    ]


class _Probes:
    """Made-up calls, like the real ones `inputs` but for the number of mask rows."""

    def __init__(self, inputs: list[Tensor], shape: Geometry, num_units: int) -> None:
        """Takes the cache, of so many units, and what a mod reads as they are."""
        lines = inputs[0]
        self._inputs, device = inputs, lines.device
        largest = max(67, _PROBE_LINES // (lines.shape[1] * lines.shape[2]) + 2)
        self.counts = 2, 3, largest
        random = torch.Generator(device).manual_seed(0)
        self._lines = torch.randn((largest, *lines.shape[1:]), generator=random, device=device).to(lines.dtype)
        self._rows = rows = MaskRows(largest, shape, device)
        longest = min(shape.leaf, 4 * shape.kv_block)
        for buffer, low, high in (
            (rows.partial, 1, num_units),
            (rows.full, 1, num_units),
            (rows.partial_num, 0, min(shape.columns, 4)),
            (rows.full_num, 0, min(shape.columns, 4)),
            (rows.length, 1, longest),
            (rows.first, 0, 2 if shape.leaf >= 2 * shape.tokens else 1),
        ):
            buffer.random_(min(low, high - 1), high, generator=random)
        for buffer in (rows.partial, rows.full):  # each entry begins with a mask block's number
            blocks = buffer[..., :: shape.entry]
            blocks.remainder_(longest // shape.kv_block)
        rows.first *= shape.tokens

    def __call__(self, count: int) -> list[Tensor]:
        """The inputs of a call of so many mask rows."""
        return [self._lines[:count], *self._inputs[1:3], *_lists(self._rows, 0, count), *self._inputs[_LISTS.stop :]]

    def compare(self, call: _Call, launch: Any, captured: list[Tensor]) -> None:
        """Raises RuntimeError unless torch's call and the launches alone give the same bits."""
        for count in self.counts:
            inputs = self(count)
            alone = launch([tensor.data_ptr() for tensor in (*inputs, *captured)], count)
            for one, other in zip(call(inputs), alone, strict=True):
                if one.shape != other.shape or not torch.equal(one.view(torch.uint8), other.view(torch.uint8)):
                    raise RuntimeError(f"its kernels alone give other bits for {count} mask rows")


def _settings(spec: AttentionSpec, shape: Geometry, options: dict[str, Any], versions: list[str]) -> Name:
    """Whatever decides what torch makes of a mod, beside the mod and the inputs."""
    gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
    return [
        ["format", _FORMAT],
        ["versions", sys.version, *versions],
        ["gpu", gpu.name, gpu.major, gpu.minor, gpu.multi_processor_count],
        ["changed", *sorted(map(list, _changed_settings() - _BY_COMPILING))],
        ["modes", *_modes()],
        ["code", name_code(compile_call, compile_alone, make_mods)],
        ["kernel", float(spec.scale).hex(), repr(shape), sorted(options.items())],
    ]


def _modes() -> list[str]:
    """Torch's own, of this thread and of the process."""
    precision, products = torch.get_float32_matmul_precision(), torch.backends.cuda.matmul
    if getattr(products, "fp32_precision", "none") != "none":  # else the older setting holds
        precision = "highest" if products.fp32_precision == "ieee" else products.fp32_precision
    autograd = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
    others = torch.are_deterministic_algorithms_enabled(), torch.get_default_dtype()
    return [str(mode) for mode in (precision, *autograd, *others)]


def _changed_settings() -> set[tuple[str, str, str]]:
    """Variables that torch's compiler and Triton read, and options of the former that are not as they come.

    Before it is imported, it has no options.
    """
    modules = {name: sys.modules.get(f"torch.{name}.config") for name in ("_inductor", "_dynamo", "_functorch")}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of options that nobody set
        options = {
            (name, option, repr(getattr(module, option)))
            for name, module in modules.items()
            for option, entry in getattr(module, "_config", {}).items()
            if getattr(entry, "alias", None) is None
            and option != "compile_threads"
            and getattr(module, option) != entry.default
        }
    return options | {
        ("environment", name, value)
        for name, value in os.environ.items()
        if name.startswith(_ENVIRONMENT) and not name.endswith(_ELSEWHERE)
    }


def make_mods(
    mods: AttentionMods,
    shape: Geometry,
    row: Tensor,
    first: Tensor,
    length: Tensor,
    key_scale: Tensor | None = None,
) -> tuple[ops.MaskMod, ops.ScoreMod]:
    """The mods in a kernel's own indices (mask row, KV head, line, logical key), from a request's own.

    row, first, length: MaskRows'; key_scale: see LayerTensors. A mod may look positions up in a table, so it is asked
    for positions of the request alone: the last one stands for those behind it.
    """
    group, asks = shape.group, mods.mask_mod is not None or mods.score_mod is not None

    def places(z: Tensor, h: Tensor, line: Tensor, n: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        q_idx, kv_idx = first[z] + line // group, n
        if asks:
            last = length[z] - 1
            q_idx, kv_idx = q_idx.clamp(min=0).minimum(last), torch.minimum(kv_idx, last)
        return row[z], h * group + line % group, q_idx, kv_idx

    def mask(z: Tensor, h: Tensor, line: Tensor, n: Tensor) -> Tensor:
        return mods.visible(*places(z, h, line, n)) & (n < length[z])

    def score(value: Tensor, z: Tensor, h: Tensor, line: Tensor, n: Tensor) -> Tensor:
        if key_scale is not None:
            value = value * key_scale[h]
        if mods.score_mod is None:
            return value
        return mods.score_mod(value, *places(z, h, line, n))

    return mask, score


def kernel_options(sizes: FlexSizes, lines: int) -> dict[str, Any]:
    """What torch compiles a tile of so many lines with."""
    chosen = sizes.decode_launch if lines == sizes.decode_lines else sizes.prefill_launch
    return {
        "FORCE_USE_FLEX_ATTENTION": True,
        "BLOCK_M": lines,
        "BLOCK_N": sizes.block_n,
        "IS_DIVISIBLE": bool(chosen),
        **dict(chosen),
    }


def compile_call(spec: AttentionSpec, mods: AttentionMods, shape: Geometry, sizes: FlexSizes) -> _Call:
    """torch's FlexAttention for one spec and tile. Everything but the number of mask rows is fixed.

    The call takes lines, the first block's key and value, what `_lists` gives and, if the cache has them, scales of K.
    """
    from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

    flex_template.install()
    options: Any = kernel_options(sizes, shape.lines) | flex_template.unit_options(shape.unit)
    block_size, scale = (shape.lines, shape.kv_block), spec.scale
    has_score = mods.score_mod is not None

    def attend(
        lines: Tensor,
        key: Tensor,
        value: Tensor,
        partial_num: Tensor,
        partial: Tensor,
        full_num: Tensor,
        full: Tensor,
        row: Tensor,
        first: Tensor,
        length: Tensor,
        key_scale: Tensor | None = None,
    ) -> Any:
        mask, score = make_mods(mods, shape, row, first, length, key_scale)
        block_mask = BlockMask.from_kv_blocks(
            partial_num,
            partial,
            full_num,
            full,
            BLOCK_SIZE=block_size,
            mask_mod=mask,
            seq_lengths=(lines.shape[2], key.shape[2]),
            compute_q_blocks=False,
        )
        out, aux = flex_attention(
            lines,
            key,
            value,
            score_mod=score if has_score or key_scale is not None else None,
            block_mask=block_mask,
            scale=scale,
            return_aux=AuxRequest(lse=True),
            kernel_options=options,
        )
        return out, aux.lse

    return _marked_at_first(compile_alone(attend))


def _marked_at_first(compiled: Callable[..., Any]) -> _Call:
    """The call whose first inputs say which lengths may change."""
    marked: list[bool] = []

    def call(inputs: list[Tensor]) -> tuple[Tensor, Tensor]:
        before = None if marked else _changed_settings()
        if not marked:
            marked.append(True)
            for tensor in inputs[:1] + inputs[_LISTS]:
                torch._dynamo.mark_dynamic(tensor, 0)
        parts, lse = compiled(*inputs)
        if before is not None:
            _BY_COMPILING.update(_changed_settings() - before)
        return parts, lse

    return call


def compile_alone(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` compiled for the shapes of its first call, but where they are marked dynamic.

    It gets a code object of its own: torch counts recompilations, and keeps guards, per code object.
    """
    from torch._inductor import config

    if "TORCHINDUCTOR_COMPILE_THREADS" not in os.environ:
        config.compile_threads = 1  # kernels come one by one, and workers take seconds to start
    own = types.FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    compiled: Callable[..., Any] = torch.compile(own, dynamic=False, fullgraph=True)
    return compiled
