"""WeightPlan: where a checkpoint's tensors lie in the weights of a model that runs.

Owns the loader's weight map read for tensors that come one by one: names, aliases, shapes and types, and the values of
a session until they are applied. Does not know how tensors travel. Invariants: what does not fit is refused by name
before anything is changed; values are rounded as a file's are; a layer is given all of its values at once, by its own
`finalize`, in the memory that it has.
"""

from __future__ import annotations

import collections
import fnmatch
import functools
import hashlib
import math
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import NamedTuple, cast

import torch
from torch import nn

from octavo.checkpoint.digest import WeightsDigest
from octavo.checkpoint.loader import Target, build_model, weight_targets
from octavo.config.quoted import plain, quoted
from octavo.layers.base import Layer
from octavo.models.base import Model, with_numbers
from octavo.ops.copying import copy_alone
from octavo.ops.finite import is_finite
from octavo.ops.gemm import LinearWeight
from octavo.rl.session import WeightUpdateError

DTYPES = {
    name: getattr(torch, name) for name in ("float32", "float16", "bfloat16", "float64")
}  # names, with or without "torch."
_SHOWN = 5
_WIDE = (  # short: an answer of a server has 300 characters
    """start a float32 engine that takes them with weight_transfer_config={"backend": "gloo"}, octavo serve with """
    """--weight-transfer-config '{"backend": "gloo"}'"""
)
_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(?:(gate|up|down)_proj|\w+)\.weight")


@functools.lru_cache(1 << 16)
def pattern_of(name: str) -> str:
    """A weight's name without the numbers of layers and experts."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


class Incoming(NamedTuple):
    """A tensor that a sender tells of."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Of its values."""
        return self.dtype.itemsize * math.prod(self.shape)


class Piece(NamedTuple):
    """What one weight of a checkpoint is of a tensor [experts, rows, columns] that holds a layer's experts together."""

    name: str
    expert: int
    rows: slice


def _joined(targets: Mapping[str, Target], stacked: Mapping[str, Sequence[str]]) -> dict[str, list[Piece]]:
    """Names under which a trainer may hold the experts of a layer together -> the checkpoint's weights in them.

    stacked: those under which a checkpoint may, as the model's `stacked_weights` says.
    """
    found: dict[str, list[Piece]] = {}
    places = {piece: (name, index) for name, pieces in stacked.items() for index, piece in enumerate(pieces)}
    for name, target in targets.items():
        match = _EXPERT.fullmatch(name)
        if match is None:
            continue
        experts, number, projection = match.groups()
        gated = f"{experts}.{number}.gate_proj.weight" in targets
        own = "gate_up_proj" if gated and projection != "down" else f"{projection}_proj"
        size, place = target.shape[0], int(gated and projection == "up")
        piece = Piece(name, int(number), slice(place * size, (place + 1) * size))
        if projection:
            found.setdefault(f"{experts}.{own}", []).append(piece)
        pattern = pattern_of(name)
        if pattern in places:
            layer = next(part for part in name.split(".") if part.isdigit())
            together, place = places[pattern]
            piece = piece._replace(rows=slice(place * size, (place + 1) * size))
            if together.replace("*", layer) != f"{experts}.{own}":
                found.setdefault(together.replace("*", layer), []).append(piece)
    return found


class WeightPlan:
    """Of one model that is loaded."""

    def __init__(self, model: Model, dtype: torch.dtype) -> None:
        """`dtype`: as `build_model`'s."""
        blank = build_model(model.arch, dtype)
        self._prefixes, self._ignored = dict(blank.other_prefixes), tuple(blank.ignored_weights)
        of_modules = {"mtp.*", f"model.layers.{model.arch.num_layers}.*"}
        self._of_modules = tuple(pattern for pattern in self._ignored if pattern in of_modules)
        self._own_names: dict[str, str] = {}  # of names that were asked for, and are known
        parameters = dict(cast(nn.Module, blank).named_parameters())
        self.targets: dict[str, Target] = dict(weight_targets(cast(nn.Module, blank)))
        self._joined = _joined(self.targets, blank.stacked_weights)
        self.dtypes = {path: parameter.dtype for path, parameter in parameters.items()}
        self.shapes = {path: tuple(parameter.shape) for path, parameter in parameters.items()}
        if model.arch.tied and "lm_head.weight" not in self.targets:  # trainers name both ends
            head = next(name for name, target in self.targets.items() if target.parameter == "head.weight")
            self._aliases = {"lm_head.weight": head}
        else:
            self._aliases = {}
        held = {stored: own for own, stored in blank.trainer_names.items()}
        for name in self.targets:
            if (pattern := pattern_of(name)) in held:
                numbers = [part for part in name.split(".") if part.isdigit()]
                self._aliases[with_numbers(held[pattern], numbers)] = name
        self._layers = {
            path: layer for path, layer in cast(nn.Module, model).named_modules() if isinstance(layer, Layer)
        }
        self.num_tensors = collections.Counter(target.parameter for target in self.targets.values())
        self.num_parts = collections.Counter(target.parameter.rpartition(".")[0] for target in self.targets.values())
        self.by_layer: dict[str, list[str]] = {}
        for path in self.shapes:
            self.by_layer.setdefault(path.rpartition(".")[0], []).append(path)

    def dtypes_by_pattern(self) -> dict[str, str]:
        """What weights are rounded to, as a sender may before it sends; by `pattern_of`, without those of two types."""
        found: dict[str, set[torch.dtype]] = {}
        joined = ((name, pieces[0].name) for name, pieces in self._joined.items())
        for name, known in (*((name, name) for name in self.targets), *self._aliases.items(), *joined):
            found.setdefault(pattern_of(name), set()).add(self.dtypes[self.targets[known].parameter])
        return {
            pattern: str(dtypes.pop()).removeprefix("torch.") for pattern, dtypes in found.items() if len(dtypes) == 1
        }

    def known(self, name: str) -> str | None:
        """The checkpoint's name of `name`; None for one that the model has no place for."""
        found = self._own_names.get(name)
        if found is None:
            own = self._renamed(name)
            own = self._aliases.get(own, own)
            if own not in self.targets:
                return None
            found = self._own_names[name] = own
        return found

    def pieces(self, name: str) -> Sequence[Piece]:
        """The checkpoint's weights that a tensor of all experts of a layer holds; none for another one."""
        return self._joined.get(self._renamed(name), ()) if self._joined else ()

    def expected(self, name: str) -> tuple[int, ...] | None:
        """The shape of what comes under `name`; None for a name that the model has no place for."""
        known, pieces = self.known(name), self.pieces(name)
        if not pieces:
            return None if known is None else self.targets[known].shape
        columns = self.targets[pieces[0].name].shape[1]
        return max(piece.expert for piece in pieces) + 1, max(piece.rows.stop for piece in pieces), columns

    def is_ignored(self, name: str) -> bool:
        """Whether a checkpoint may hold `name`, and nothing reads it."""
        own = self._renamed(name)
        return self.expected(name) is None and any(fnmatch.fnmatchcase(own, pattern) for pattern in self._ignored)

    def is_of_module(self, name: str) -> bool:
        """Whether `name` is ignored as one of a module of multi-token prediction, which a drafter may have."""
        own = self._renamed(name)
        return self.is_ignored(name) and any(fnmatch.fnmatchcase(own, pattern) for pattern in self._of_modules)

    def _renamed(self, name: str) -> str:
        prefix = next((prefix for prefix in self._prefixes if name.startswith(prefix)), "")
        return self._prefixes.get(prefix, "") + name[len(prefix) :]

    def read(self, names: Sequence[str], dtype_names: Sequence[str], shapes: Sequence[Sequence[int]]) -> list[Incoming]:
        """What a sender tells of. Raises WeightUpdateError, with the first five reasons, for what does not fit."""
        if not len(names) == len(dtype_names) == len(shapes):
            raise WeightUpdateError(
                f"names, dtype_names and shapes must be as many: got {len(names)}, {len(dtype_names)} and {len(shapes)}"
            )
        found, problems, seen = [], [], set()
        for name, dtype_name, shape in zip(names, dtype_names, shapes, strict=True):
            dtype_name = dtype_name.removeprefix("torch.")
            dtype = DTYPES.get(dtype_name)
            expected = self.expected(name)
            if name in seen:
                problems.append(f"{plain(name)}: comes twice")
            elif expected is None and not self.is_ignored(name):
                problems.append(f"{plain(name)}: expected nothing, found {plain(dtype_name)} {quoted(list(shape))}")
            elif dtype is None:
                problems.append(f"{plain(name)}: expected one of {', '.join(DTYPES)}, found {plain(dtype_name)}")
            elif expected is not None and expected != tuple(shape):
                problems.append(f"{plain(name)}: expected {list(expected)}, found {quoted(list(shape))}")
            else:
                found.append(Incoming(name, dtype, tuple(shape)))
            seen.add(name)
        refuse("weights do not fit the model", problems)
        return found

    def keeps_most_of(self, incoming: Sequence[Incoming]) -> bool:
        """Whether nine tenths of the bytes are weights in their own types: what is kept of buffers keeps them whole."""
        kept = total = 0
        for each in incoming:
            pieces = self.pieces(each.name)
            known = pieces[0].name if pieces else self.known(each.name)
            total += each.num_bytes
            if known is not None and self.dtypes[self.targets[known].parameter] is each.dtype:
                kept += each.num_bytes
        return 10 * kept >= 9 * total

    def layer(self, path: str) -> Layer:
        """The model's own."""
        return self._layers[path]

    def kept_narrower(self, parameter: str) -> bool:
        """Whether a matrix lies in memory as bfloat16, as its checkpoint had it, where float32 is computed with."""
        path, _, name = parameter.rpartition(".")
        layer = self._layers[path]
        if self.dtypes[parameter] is not torch.float32 or name not in layer.widens_exactly:
            return False
        packed = getattr(layer, "packed", None)
        if isinstance(packed, LinearWeight):
            return packed.kind.startswith("bfloat16")
        own = layer.__dict__.get(name)
        return isinstance(own, torch.Tensor) and own.dtype is torch.bfloat16


class Staged:
    """The values of one session, on the host, until they are applied."""

    def __init__(self, plan: WeightPlan, *, partial: bool, device: torch.device | None = None) -> None:
        """Nothing has come. `device`: where values are kept; None: on the host."""
        self._kept_on = device or torch.device("cpu")
        self._plan, self.partial = plan, partial
        self._values: dict[str, torch.Tensor] = {}  # parameter -> all of its rows, as it was declared
        self._parts: dict[str, dict[int, torch.Tensor]] = {}  # of others: first row -> rows that have come
        self._room: dict[str, torch.Tensor] = {}  # for all rows of others, where rows are copied
        self._digest = WeightsDigest()
        self.arrived: dict[str, None] = {}

    def put(self, incoming: Incoming, tensor: torch.Tensor, *, given: bool = False) -> None:
        """Take in a tensor, rounded to the type that the engine's weight has. Raises WeightUpdateError for NaN or Inf.

        A tied weight may come under both of its names, if the two are alike; experts may come together. given: nobody
        else uses its memory from now on.
        """
        for piece in self._plan.pieces(incoming.name):
            part = tensor[piece.expert, piece.rows]
            self.put(Incoming(piece.name, incoming.dtype, tuple(part.shape)), part, given=given)
        known = self._plan.known(incoming.name)
        if known is None:
            return
        target = self._plan.targets[known]
        if known in self.arrived:
            rows = self._kept(target)
            if not torch.equal(tensor.to(device=rows.device, dtype=rows.dtype), rows):
                before = "came" if known == incoming.name else f"is {known}, which came"
                raise WeightUpdateError(f"{incoming.name}: {before} before with other values")
            return
        parts = self._parts.setdefault(target.parameter, {})
        rows = self._take(target, tensor, given=given)
        check_finite(incoming.name, rows, tensor)
        if self._plan.kept_narrower(target.parameter) and not torch.equal(rows.to(torch.bfloat16).float(), rows):
            raise WeightUpdateError(
                f"{incoming.name}: expected values of bfloat16, as its checkpoint has them, found others: {_WIDE}"
            )
        self.arrived[known] = None
        parts[target.start] = rows
        if len(parts) == self._plan.num_tensors[target.parameter]:
            self._values[target.parameter] = joined([parts[start] for start in sorted(parts)])
            del self._parts[target.parameter]
            self._room.pop(target.parameter, None)
            self._complete(target.parameter)

    def _kept(self, target: Target) -> torch.Tensor:
        """The rows of a weight that has come."""
        whole = self._values.get(target.parameter)
        if whole is None:
            return self._parts[target.parameter][target.start]
        return whole[target.start : target.start + target.shape[0]]

    def _take(self, target: Target, tensor: torch.Tensor, *, given: bool) -> torch.Tensor:
        """The rows of a weight as they are kept: those that have come, if they may be, else a copy."""
        dtype, shape = self._plan.dtypes[target.parameter], self._plan.shapes[target.parameter]
        if given and tensor.dtype is dtype and tensor.device == self._kept_on and tensor.is_contiguous():
            return tensor
        if target.parameter not in self._room:
            self._room[target.parameter] = torch.empty(shape, dtype=dtype, device=self._kept_on)
        return copy_alone(self._room[target.parameter][target.start : target.start + target.shape[0]], tensor)

    def _complete(self, parameter: str) -> None:
        """All rows of a parameter are there. A digest is made while others are on their way."""
        self._digest.add(parameter, self._values[parameter])

    def check(self) -> None:
        """Raise WeightUpdateError, with the first five names, unless the set is whole."""
        touched = {self._plan.targets[name].parameter.rpartition(".")[0] for name in self.arrived}
        missing = [
            f"{name}: expected {list(target.shape)}, found nothing"
            for name, target in self._plan.targets.items()
            if name not in self.arrived and (not self.partial or target.parameter.rpartition(".")[0] in touched)
        ]
        if self.partial and missing:
            refuse("a partial update brings all that is kept together with what it changes", missing)
        refuse("the update is not whole (partial=True allows a part)", missing)
        if not self.arrived:
            raise WeightUpdateError("the update brought no tensor")

    def identity(self, before: str) -> str:
        """A name for the weights that come of it: equal for equal ones of whole updates. before: the old ones'."""
        if not self.partial:
            return self._digest.hexdigest()
        parts = f"{before or secrets.token_hex(16)}+{self._digest.hexdigest()}"
        return hashlib.blake2b(parts.encode(), digest_size=16).hexdigest()

    def apply(self, quantization: str | None, device: torch.device) -> None:
        """Give each layer its values, and let go of them."""
        for path in list(dict.fromkeys(path.rpartition(".")[0] for path in self._values)):
            self._apply_layer(path, quantization, device)

    def _apply_layer(self, path: str, quantization: str | None, device: torch.device) -> None:
        names = self._plan.by_layer[path]
        values = {name.rpartition(".")[2]: self._values.pop(name).to(device) for name in names}
        self._plan.layer(path).refill(values, quantization)


def joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Contiguous tensors, one behind the other; without a copy where they lie so already."""
    first = parts[0]
    if len(parts) == 1:
        return first
    storage, end = first.untyped_storage().data_ptr(), first.data_ptr()
    for part in parts:
        if part.data_ptr() != end or part.untyped_storage().data_ptr() != storage:
            return torch.cat(list(parts))
        end += part.nbytes
    return first.as_strided((sum(map(len, parts)), *first.shape[1:]), first.stride())


def check_finite(name: str, tensor: torch.Tensor, sent: torch.Tensor | None = None) -> None:
    """Raise WeightUpdateError for NaN or Inf. sent: what `tensor` was rounded from."""
    if bool(tensor.isfinite().all()) if tensor.is_cuda else is_finite(tensor.contiguous()):
        return
    wrong = (~tensor.isfinite()).nonzero()
    place = wrong[0].tolist()
    given = tensor[tuple(place)].item() if sent is None else sent[tuple(place)].item()
    what = "NaN or Inf"
    if math.isfinite(given):
        what = f"values that {str(tensor.dtype).removeprefix('torch.')} does not hold"
    raise WeightUpdateError(f"{name}: holds {what}: {len(wrong)} in all, the first is {given} at {place}")


def refuse(what: str, problems: Sequence[str]) -> None:
    """Raise WeightUpdateError with the first five problems, if there are any."""
    if problems:
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise WeightUpdateError(f"{what}: {'; '.join(problems[:_SHOWN])}{more}")
