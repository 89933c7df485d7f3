"""Loading: from a checkpoint's tensors, or from nothing, to a model that runs.

Owns the match of checkpoint names to a model's parameters, the order of work, and dummy weights. Does not
know a family (the model brings its weight map) or a file format (Checkpoint). Invariant: a load ends with
every parameter filled and every tensor of the checkpoint used, named as ignored, or of a module of multi-token
prediction, which a drafter reads; anything else is refused before data is read.
"""

from __future__ import annotations

import fnmatch
import logging
import time
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import cast

import msgspec
import torch
from torch import nn

from octavo.checkpoint.arch import Arch
from octavo.checkpoint.cache_scales import give_stored_scales, scale_names
from octavo.checkpoint.digest import unseen
from octavo.checkpoint.safetensors import DTYPES, INTEGER_DTYPES, Checkpoint
from octavo.config.engine_config import Resolved
from octavo.config.quoted import plain, said
from octavo.layers.base import Layer, WeightForm
from octavo.models import ARCHITECTURES
from octavo.models.base import Loadable, Model
from octavo.ops import placement
from octavo.ops.finite import is_finite
from octavo.startup.memory_plan import matrix_dtype

_LOG = logging.getLogger(__name__)

LOAD_FORMATS = ("auto", "safetensors", "dummy")
DUMMY_STD = 0.02
_DUMMY_BLOCK = (1 << 22) - 3  # elements; odd, so that rows of a tiled weight differ


class Target(msgspec.Struct, frozen=True):
    """Where one tensor of a checkpoint goes: rows start .. start + shape[0] of a parameter."""

    parameter: str
    start: int
    shape: tuple[int, ...]
    is_integer: bool = False


def build_model(arch: Arch, dtype: torch.dtype) -> Model:
    """`arch`'s model on the meta device: every parameter is declared, none has memory.

    `dtype`: of activations and of weights before packing. `arch.max_position` sizes the rotary tables: lower it with
    `dataclasses.replace` to the longest sequence that will be run.
    Raises ValueError, one line, for a class outside of Octavo that cannot be made.
    """
    try:
        return cast(Model, ARCHITECTURES.resolve(arch.name)(arch, dtype))
    except Exception as error:
        if ":" not in arch.name or isinstance(error, ValueError):
            raise
        raise ValueError(f"the model {arch.name} cannot be made: {said(error)}") from error


def weight_bytes(model: Loadable, resolved: Resolved) -> int:
    """Bytes that the parameters of a model of `build_model` will take in memory."""
    form = WeightForm(
        matrix_dtype=getattr(torch, matrix_dtype(model.arch, resolved)),
        quantization=resolved.quantization,
        device=resolved.device,
        native=resolved.native != "none",
    )
    modules = cast(nn.Module, model).modules()
    return sum(module.weight_bytes(form) for module in modules if isinstance(module, Layer))


def fill_model(
    built: Loadable,
    folder: Path | None,
    quantization: str | None = None,
    load_format: str = "auto",
    device: torch.device | None = None,
    seed: int = 0,
    *,
    check_finite: bool = True,
    keeps_bfloat16: bool = True,
    seen: Callable[[str, torch.Tensor], None] = unseen,
) -> None:
    """Fill a model of `build_model`, tensor by tensor.

    `folder` holds the safetensors files; `load_format="dummy"` needs none (normal weights of standard deviation 0.02
    from `seed`, norms of one). `check_finite=False` skips the search for NaN and Inf. keeps_bfloat16: matrices stored
    as bfloat16 stay so under `dtype=torch.float32`: products widen them exactly, and half the bytes are read. `seen` is
    shown each tensor of the checkpoint that is read.

    Peak memory: the packed weights, plus the parameters of layers that are half read and one buffer for each shape of
    parameter (together about two decoder layers, or the output head where that is larger), plus one tensor as stored
    where its dtype is not the one wanted. Raises ValueError, one line, for a checkpoint that does not fit.
    """
    if load_format not in LOAD_FORMATS:
        raise ValueError(f"unknown load_format {load_format!r}: known are {', '.join(LOAD_FORMATS)}")
    began, model = time.perf_counter(), cast(nn.Module, built)
    filler = _Filler(model, quantization, device or torch.device("cpu"))
    if load_format == "dummy":
        _fill_dummy(model, filler, seed)
    elif folder is None:
        raise ValueError(f"load_format={load_format!r} needs a model folder; 'dummy' does without")
    else:
        _fill_from_folder(model, filler, folder, check_finite, seen, keeps_bfloat16=keeps_bfloat16)
    filler.finish()
    _LOG.info("%s: weights ready in %.2f s", built.arch.name, time.perf_counter() - began)


class _Filler:
    """Hands out memory for a model's parameters, and finalizes each layer as soon as all of its own are filled.

    Memory that a layer has packed serves the next parameter of the same shape: fresh pages cost more than the copy.
    """

    def __init__(self, model: nn.Module, quantization: str | None, device: torch.device) -> None:
        self._quantization = quantization
        self.device = device
        self._layers = {path: module for path, module in model.named_modules() if isinstance(module, Layer)}
        self._buffers: dict[str, torch.Tensor] = {}
        self._spare: dict[tuple[torch.Size, torch.dtype], torch.Tensor] = {}
        self._missing: dict[str, int] = {}  # parameter -> rows still to come
        self._waiting: dict[str, set[str]] = {}  # layer -> names of its parameters that are not complete
        for path, layer in self._layers.items():
            for name, parameter in layer.named_parameters(recurse=False):
                self._missing[f"{path}.{name}"] = parameter.shape[0]
                self._waiting.setdefault(path, set()).add(name)

    def keep_bfloat16(self, parameter: str) -> None:
        """Declare `parameter`, all of it stored as bfloat16, bfloat16, if its layer is free to."""
        path, _, name = parameter.rpartition(".")
        layer = self._layers[path]
        if name in layer.widens_exactly:
            layer.declare(name, tuple(layer.get_parameter(name).shape), torch.bfloat16)

    def fault_of(self, parameter: str, values: torch.Tensor) -> str:
        """See Layer."""
        path, _, name = parameter.rpartition(".")
        return self._layers[path].fault_of(name, values)

    def rows(self, parameter: str, start: int, count: int) -> torch.Tensor:
        """The memory of rows start .. start + count of `parameter`, to be filled; then call `filled`."""
        if parameter not in self._buffers:
            path, _, name = parameter.rpartition(".")
            declared = self._layers[path].get_parameter(name)
            spare = self._spare.pop((declared.shape, declared.dtype), None)
            self._buffers[parameter] = self._empty(path, name, declared) if spare is None else spare
        return self._buffers[parameter][start : start + count]

    def _empty(self, path: str, name: str, declared: torch.Tensor) -> torch.Tensor:
        """Memory of a parameter, and not the lasting one's where `finalize` lets go of it."""
        allocate = torch.empty if name in self._layers[path].remade_by_finalize else placement.empty
        # not empty_like: on a meta tensor that imports sympy, a third of a second
        return allocate(tuple(declared.shape), dtype=declared.dtype, device=self.device)

    def filled(self, parameter: str, count: int) -> None:
        """`count` more rows of `parameter` have their values."""
        self._missing[parameter] -= count
        if self._missing[parameter]:
            return
        path, _, name = parameter.rpartition(".")
        layer = self._layers[path]
        layer.register_parameter(name, nn.Parameter(self._buffers[parameter], requires_grad=False))
        self._waiting[path].discard(name)
        if not self._waiting[path]:
            names = [name for name, _ in layer.named_parameters(recurse=False)]
            layer.finalize(self._quantization)
            for name in names:
                buffer = self._buffers.pop(f"{path}.{name}")
                if name in layer.copied_by_finalize and buffer.device.type == "cpu":  # elsewhere it is kept as it is
                    self._spare[buffer.shape, buffer.dtype] = buffer

    def finish(self) -> None:
        """Finalize the layers without parameters, then join all. All others must be done."""
        unfilled = [parameter for parameter, rows in self._missing.items() if rows]
        assert not unfilled, f"parameters were never filled: {unfilled[:5]}"
        with self.device:
            for path, layer in self._layers.items():
                if path not in self._waiting:
                    layer.finalize(self._quantization)
        for layer in self._layers.values():
            layer.join()


class _PinnedPair:
    """Two pinned buffers between a file and a device: one is read into while the other is sent."""

    def __init__(self) -> None:
        self._memory = [torch.empty(0, dtype=torch.uint8)] * 2
        self._sent: list[torch.cuda.Event | None] = [None, None]
        self._turn = 0

    def rows(self, target: torch.Tensor) -> torch.Tensor:
        """Host memory of the shape and dtype of `target`, free to be written."""
        self._turn ^= 1
        event = self._sent[self._turn]
        if event is not None:
            event.synchronize()
        size = target.numel() * target.element_size()
        if self._memory[self._turn].numel() < size:
            self._memory[self._turn] = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        return self._memory[self._turn][:size].view(target.dtype).view(target.shape)

    def send(self, host: torch.Tensor, target: torch.Tensor) -> None:
        """Copy what `rows` gave last."""
        target.copy_(host, non_blocking=True)
        event = self._sent[self._turn] = torch.cuda.Event()
        event.record()


def _fill_from_folder(
    model: nn.Module,
    filler: _Filler,
    folder: Path,
    check_finite: bool,
    seen: Callable[[str, torch.Tensor], None],
    *,
    keeps_bfloat16: bool,
) -> None:
    """Stream a folder's tensors, in the order in which they lie in their files."""
    checkpoint = Checkpoint(folder)
    try:
        checkpoint.rename(cast(Loadable, model).other_prefixes)
        checkpoint.unstack(cast(Loadable, model).stacked_weights)
        targets = dict(weight_targets(model))
        _check_fit(checkpoint, targets, cast(Loadable, model).ignored_weights, folder)
        stored: dict[str, set[str]] = {}
        for name, target in targets.items():
            stored.setdefault(target.parameter, set()).add(checkpoint.entries[name].dtype)
        for parameter, dtypes in stored.items():
            if dtypes == {"BF16"} and keeps_bfloat16:
                filler.keep_bfloat16(parameter)
        host = _PinnedPair()
        for name in checkpoint.entries:
            if name in targets:
                target = targets[name]
                rows = filler.rows(target.parameter, target.start, target.shape[0])
                read = rows if rows.device.type == "cpu" else host.rows(rows)
                checkpoint.read(name, read)
                if check_finite and not is_finite(read):
                    raise ValueError(f"{folder}: tensor {name!r} holds NaN or Inf")
                if target.is_integer and (fault := filler.fault_of(target.parameter, read)):
                    raise ValueError(f"{checkpoint.path(name)}: unsupported {name}{fault}")
                seen(name, read)
                if read is not rows:
                    host.send(read, rows)
                filler.filled(target.parameter, target.shape[0])
        give_stored_scales(model, checkpoint, filler.device)
        checkpoint.check_unchanged()
    finally:
        checkpoint.close()


def weight_targets(model: nn.Module) -> Iterator[tuple[str, Target]]:
    """(checkpoint name, where it goes) for every tensor the model needs: its weight map read backwards."""
    names = {target: name for name, target in cast(Loadable, model).weight_map.items()}
    for path, parameter in model.named_parameters():
        pattern = ".".join("*" if part.isdigit() else part for part in path.split("."))
        numbers = [part for part in path.split(".") if part.isdigit()]
        module_path, _, name = path.rpartition(".")
        layer = model.get_submodule(module_path)
        assert isinstance(layer, Layer), f"{path} belongs to no Layer"
        stored_whole = (pattern, "") in names  # several projections, stored as one tensor in the layer's order
        shards = {"": (0, parameter.shape[0])} if stored_whole else layer.shards(name)
        for shard, (start, rows) in shards.items():
            assert (pattern, shard) in names, f"the weight map has nothing for {pattern} shard {shard!r}"
            pieces = names[pattern, shard].split("*")
            theirs = pieces[0] + "".join(number + piece for number, piece in zip(numbers, pieces[1:], strict=True))
            is_integer = not parameter.dtype.is_floating_point
            yield theirs, Target(path, start, (rows, *parameter.shape[1:]), is_integer)


def _check_fit(checkpoint: Checkpoint, targets: dict[str, Target], ignored: Sequence[str], folder: Path) -> None:
    """Raise ValueError, with the first five reasons, unless the checkpoint has exactly what the model needs."""
    problems = []
    for name, target in targets.items():
        entry = checkpoint.entries.get(name)
        if entry is None:
            problems.append(f"{name}: expected {list(target.shape)}, found nothing")
        elif entry.shape != target.shape:
            problems.append(f"{name}: expected {list(target.shape)}, found {list(entry.shape)}")
        elif entry.dtype not in (dtypes := INTEGER_DTYPES if target.is_integer else DTYPES):
            problems.append(f"{name}: expected one of {', '.join(dtypes)}, found {entry.dtype}")
    scales, modules = scale_names(checkpoint.entries), _modules_behind(checkpoint.entries, targets)
    for name, entry in checkpoint.entries.items():
        if (
            name not in targets
            and name not in scales
            and not name.startswith(modules)
            and not any(fnmatch.fnmatchcase(name, pattern) for pattern in ignored)
        ):
            problems.append(f"{plain(name)}: expected nothing, found {entry.dtype} {list(entry.shape)}")
    if problems:
        more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise ValueError(f"{folder}: weights do not fit config.json: {'; '.join(problems[:5])}{more}")


def _modules_behind(names: Collection[str], targets: Collection[str]) -> tuple[str, ...]:
    """How the names of each module of multi-token prediction begin, by what such a module alone has.

    A layer that the model has is none.
    """
    marks = (("mtp.fc.weight", "fc.weight"), (".eh_proj.weight", "eh_proj.weight"))
    found = {name.removesuffix(own) for name in names for end, own in marks if name.endswith(end)}
    return tuple(prefix for prefix in found if not any(target.startswith(prefix) for target in targets))


def _fill_dummy(model: nn.Module, filler: _Filler, seed: int) -> None:
    """Normal weights, the same for the same seed and name in every dtype. One random block is tiled."""
    block = torch.empty(_DUMMY_BLOCK, dtype=torch.float32)
    block.normal_(std=DUMMY_STD, generator=torch.Generator().manual_seed(seed))
    dtypes = {parameter.dtype for parameter in model.parameters()}
    sources = {dtype: block.to(dtype).to(filler.device) for dtype in dtypes}
    for path, parameter in list(model.named_parameters()):
        module_path, _, name = path.rpartition(".")
        constant = cast(Layer, model.get_submodule(module_path)).dummy_values.get(name)
        flat = filler.rows(path, 0, parameter.shape[0]).view(-1)
        if constant is not None:
            flat.fill_(constant)
        else:
            source = sources[parameter.dtype]
            done, offset = 0, zlib.crc32(path.encode()) % _DUMMY_BLOCK
            while done < flat.numel():
                count = min(flat.numel() - done, _DUMMY_BLOCK - offset)
                flat[done : done + count] = source[offset : offset + count]
                done, offset = done + count, 0
        filler.filled(path, parameter.shape[0])
