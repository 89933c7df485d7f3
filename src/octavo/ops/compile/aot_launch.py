"""A compiled call of torch's as the kernels that it launches: observed once, kept in a file, launched without torch.

Owns the observation (a CUDA graph of the call says which kernels, grids and parameters), the rules by which they follow
from the number of mask rows, the file and the launch. Does not know what the kernels compute, or what names them.
Invariants: a launch is the machine code that torch compiled, with the parameters that torch would give it; whatever
does not follow from the inputs by a rule that holds for every count is refused, and the call stays torch's.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import dataclasses
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

from octavo.ops import captures
from octavo.ops.compile import disk_cache, driver

_LOG = logging.getLogger(__name__)
_POINTER = 8  # bytes
_LARGEST_NUMBER = 1 << 40  # of 64 bits; above it are addresses
_MAX_COUNT = 1 << 16  # of mask rows: an axis of a CUDA grid
Rule = tuple[int, int, int]
"""(fixed, times, over): `fixed` if times is 0, else cdiv(times * count, over)."""


class NotCacheable(RuntimeError):
    """A call is more than launches that follow from its inputs."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Kernel:
    name: str
    machine_code: bytes
    threads: int
    shared: int
    grid: tuple[Rule, Rule, Rule]
    params: tuple[tuple[int, str, Any], ...]  # (bytes, "input" or "buffer" or "number", index or Rule)


@dataclasses.dataclass(frozen=True, slots=True)
class Form:
    """What is kept: launches in order, and the buffers that they write; the first ones are the call's results."""

    kernels: tuple[_Kernel, ...]
    buffers: tuple[tuple[str, tuple[Rule, ...]], ...]  # (dtype, shape), contiguous
    num_inputs: int
    num_results: int


class Launch:
    """A form that is ready: its code is loaded in the current CUDA context. One thread at a time."""

    def __init__(self, form: Form, device: torch.device) -> None:
        """Raises DriverError where the code does not load."""
        self._device, self._num_inputs, self._num_results = device, form.num_inputs, form.num_results
        self._buffers = [(getattr(torch, dtype), shape) for dtype, shape in form.buffers]
        self._stream = triton.runtime.driver.active.get_current_stream
        self._kernels = [_Ready(kernel) for kernel in form.kernels]
        self._needed = [_needed(form.kernels, results) for results in range(form.num_results + 1)]

    def __call__(self, inputs: Sequence[int], count: int, num_results: int | None = None) -> list[Tensor]:
        """The results for `count` mask rows. inputs: addresses, of multiples of 16 bytes, in the order observed.

        num_results: so many are wanted; the others hold anything.
        """
        assert len(inputs) == self._num_inputs, "a form has its inputs"
        made = [
            torch.empty([_apply(rule, count) for rule in shape], dtype=dtype, device=self._device)
            for dtype, shape in self._buffers
        ]
        buffers, stream = [buffer.data_ptr() for buffer in made], self._stream(self._device.index)
        for index in self._needed[self._num_results if num_results is None else num_results]:
            self._kernels[index].launch(inputs, buffers, count, stream)
        return made[: self._num_results]


def _needed(kernels: Sequence[_Kernel], num_results: int) -> list[int]:
    """The launches that touch one of the first results, or a buffer that such a launch touches later, in order."""
    buffers, found = set(range(num_results)), []
    for index in reversed(range(len(kernels))):
        touched = {what for _, kind, what in kernels[index].params if kind == "buffer"}
        if touched & buffers:
            buffers |= touched
            found.append(index)
    return found[::-1]


class _Ready:
    """A loaded kernel and room for its parameters, of which those that never change are filled in."""

    def __init__(self, kernel: _Kernel) -> None:
        """Raises DriverError where the code does not load."""
        self._kernel = kernel
        self._function = driver.load(kernel.machine_code, kernel.name, kernel.shared)
        self._values = (ctypes.c_uint64 * len(kernel.params))()
        start = ctypes.addressof(self._values)
        self._addresses = (ctypes.c_void_p * len(kernel.params))(*(start + 8 * i for i in range(len(kernel.params))))
        places: dict[str, list[tuple[int, Any]]] = {"input": [], "buffer": [], "number": []}
        for place, (_, kind, what) in enumerate(kernel.params):
            places[kind].append((place, what))
        for place, rule in places["number"]:
            self._values[place] = rule[0]
        self._inputs, self._buffers = places["input"], places["buffer"]
        self._counts = [(place, rule) for place, rule in places["number"] if rule[1]]

    def launch(self, inputs: Sequence[int], buffers: Sequence[int], count: int, stream: int) -> None:
        values, (x, y, z) = self._values, self._kernel.grid
        for place, index in self._inputs:
            values[place] = inputs[index]
        for place, index in self._buffers:
            values[place] = buffers[index]
        for place, rule in self._counts:
            values[place] = _apply(rule, count)
        grid = _apply(x, count), _apply(y, count), _apply(z, count)
        driver.launch(self._function, grid, self._kernel.threads, self._kernel.shared, stream, self._addresses)


def _apply(rule: Rule, count: int) -> int:
    fixed, times, over = rule
    return -(-times * count // over) if times else fixed


# what a call launches


@dataclasses.dataclass(frozen=True, slots=True)
class _Sight:
    """One observed call: addresses of its inputs, its results, its launches and the compiled kernels behind them."""

    inputs: list[int]
    results: list[Tensor]
    scratch: list[Tensor]
    nodes: list[driver.Node]
    compiled: list[Any]


def observe(
    make_inputs: Callable[[int], list[Tensor]],
    call: Callable[[list[Tensor]], Sequence[Tensor]],
    counts: Sequence[int],
) -> Form:
    """The form of a compiled call that has run before, from calls with these counts of mask rows.

    Raises NotCacheable or DriverError where the call is not wholly launches of kernels that torch compiled.
    """
    mask_specs = [_look(make_inputs(count), call) for count in counts]
    first = mask_specs[0]
    if len({(len(s.nodes), len(s.compiled), len(s.results), len(s.scratch)) for s in mask_specs}) > 1:
        raise NotCacheable("it launches other kernels for other counts")
    made = [tensor.data_ptr() for mask_spec in mask_specs for tensor in (*mask_spec.results, *mask_spec.scratch)]
    if len(set(made)) < len(made):  # all are held: what is not made anew is a constant
        raise NotCacheable("it reads tensors of its own")
    if len(first.nodes) != len(first.compiled) or not first.nodes:
        raise NotCacheable(f"{len(first.nodes)} launches are {len(first.compiled)} kernels that torch compiled")
    kernels = tuple(_kernel(mask_specs, counts, index) for index in range(len(first.nodes)))
    buffers = zip(*(mask_spec.results + mask_spec.scratch for mask_spec in mask_specs), strict=True)
    return Form(kernels, tuple(_buffer(same, counts) for same in buffers), len(first.inputs), len(first.results))


def _look(inputs: list[Tensor], call: Callable[[list[Tensor]], Sequence[Tensor]]) -> _Sight:
    """Capture a call, on a stream of its own; nothing runs."""
    addresses = [tensor.data_ptr() for tensor in inputs]
    if len(set(addresses)) < len(addresses):
        raise NotCacheable("two of its inputs lie at one address")
    graph, stream = torch.cuda.CUDAGraph(keep_graph=True), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with captures.capturing(), torch.cuda.stream(stream), _watched() as calls:
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            results = list(call(inputs))
        finally:
            graph.capture_end()
    nodes = driver.kernels_of(graph.raw_cuda_graph())
    known = {*addresses, *(result.data_ptr() for result in results)}
    scratch = {t.data_ptr(): t for _, args in calls for t in args if t.data_ptr() not in known and t.numel()}
    storages = {tensor.untyped_storage().data_ptr() for tensor in inputs}
    if any(tensor.untyped_storage().data_ptr() in storages for tensor in (*scratch.values(), *results)):
        raise NotCacheable("it takes or gives a part of an input")
    return _Sight(addresses, results, list(scratch.values()), nodes, [kernel for kernel, _ in calls])


@contextlib.contextmanager
def _watched() -> Iterator[list[tuple[Any, list[Tensor]]]]:
    """Lists (compiled kernel, its tensors) of torch's launches meanwhile."""
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    calls: list[tuple[Any, list[Tensor]]] = []
    plain: Any = CachingAutotuner.run

    def run(self: Any, *args: Any, **options: Any) -> Any:
        calls.append((self, [arg for arg in args if isinstance(arg, Tensor)]))
        return plain(self, *args, **options)

    CachingAutotuner.run = run  # type: ignore[method-assign]
    try:
        yield calls
    finally:
        CachingAutotuner.run = plain  # type: ignore[method-assign]


def _kernel(mask_specs: list[_Sight], counts: Sequence[int], index: int) -> _Kernel:
    nodes = [mask_spec.nodes[index] for mask_spec in mask_specs]
    node, compiled = nodes[0], mask_specs[0].compiled[index]
    fixed = {(one.name, one.block, one.shared, tuple(size for size, _ in one.params)) for one in nodes}
    if len(fixed) > 1 or node.block[1:] != (1, 1):
        raise NotCacheable(f"the launch of {node.name} changes with the count")
    machine_code, scratch_params = _machine_code(compiled, node)
    params = []
    for place, (size, _) in enumerate(node.params):
        values = [one.params[place][1] for one in nodes]
        params.append((size, *_param(mask_specs, values, counts, size)))
    if any(kind != "number" or what != (0, 0, 1) for _, kind, what in params[len(params) - scratch_params :]):
        raise NotCacheable(f"{node.name} was given memory of Triton's own")
    multiples = {what[1] for _, kind, what in params if kind == "number" and what[1]} | {1}
    x, y, z = (_grid_rule([one.grid[axis] for one in nodes], counts, multiples) for axis in range(3))
    if not any(times for _, times, _ in (x, y, z)):
        raise NotCacheable(f"the grid of {node.name} does not grow with the count")
    return _Kernel(node.name, machine_code, node.block[0], node.shared, (x, y, z), tuple(params))


def _machine_code(compiled: Any, node: driver.Node) -> tuple[bytes, int]:
    """Of a compiled kernel, from Triton's cache on disk, and how many parameters are for memory of Triton's own."""
    from torch._inductor.runtime.cache_dir_utils import triton_cache_dir

    (launcher,) = compiled.launchers
    folder = Path(triton_cache_dir(torch.cuda.current_device())) / launcher.cache_hash
    facts = json.loads((folder / f"{node.name}.json").read_text())
    plain = {"num_ctas": 1, "launch_cooperative_grid": False, "launch_pdl": False, "launch_cluster": False}
    if any(facts.get(name, value) != value for name, value in plain.items()):
        raise NotCacheable(f"{node.name} is launched in a way of its own")
    if (facts["name"], facts["shared"], facts["num_warps"] * 32) != (node.name, node.shared, node.block[0]):
        raise NotCacheable(f"{node.name} is not the kernel that Triton's cache has")
    scratch = [size for size in ("global_scratch_size", "profile_scratch_size") if size in facts]
    return (folder / f"{node.name}.cubin").read_bytes(), len(scratch)


def _param(mask_specs: list[_Sight], values: list[int], counts: Sequence[int], size: int) -> tuple[str, Any]:
    """Where a parameter's value comes from."""
    if size == _POINTER:
        for kind, tables in (
            ("input", [mask_spec.inputs for mask_spec in mask_specs]),
            ("buffer", [[t.data_ptr() for t in (*mask_spec.results, *mask_spec.scratch)] for mask_spec in mask_specs]),
        ):
            for index in range(len(tables[0])):
                if all(table[index] == value for table, value in zip(tables, values, strict=True)):
                    return kind, index
    if max(values) > _LARGEST_NUMBER:
        raise NotCacheable("it is given an address that is none of its inputs")
    return "number", _rule(values, counts)


def _buffer(same: Sequence[Tensor], counts: Sequence[int]) -> tuple[str, tuple[Rule, ...]]:
    like = same[0]
    if not all(one.is_contiguous() and one.dtype == like.dtype and one.dim() == like.dim() for one in same):
        raise NotCacheable("it makes a tensor that is not contiguous")
    sizes = zip(*(one.shape for one in same), strict=True)
    return str(like.dtype).removeprefix("torch."), tuple(_rule(size, counts) for size in sizes)


def _rule(values: Sequence[int], counts: Sequence[int]) -> Rule:
    if len(set(values)) == 1:
        return values[0], 0, 1
    times = values[0] // counts[0]
    if any(value != times * count for value, count in zip(values, counts, strict=True)):
        raise NotCacheable(f"{list(values)} do not follow from {list(counts)} mask rows")
    return 0, times, 1


def _grid_rule(values: Sequence[int], counts: Sequence[int], multiples: set[int]) -> Rule:
    """A fixed number, or the one way to cut what grows with the count into tiles of a power of two."""
    if len(set(values)) == 1:
        return values[0], 0, 1
    tiled = [
        (0, times, 1 << power) for times in sorted(multiples | {max(values[0] // counts[0], 1)}) for power in range(14)
    ]
    fitting = [
        rule for rule in tiled if all(_apply(rule, count) == value for count, value in zip(counts, values, strict=True))
    ]
    if not fitting:
        raise NotCacheable(f"grids of {list(values)} do not follow from {list(counts)} mask rows")
    far = range(2, _MAX_COUNT, 61)
    if any(_apply(rule, count) != _apply(fitting[0], count) for rule in fitting[1:] for count in far):
        raise NotCacheable(f"grids of {list(values)} follow from {list(counts)} mask rows in two ways")
    return fitting[0]


# the file


def write(path: Path, key: Any, form: Form) -> None:
    """Keep a form under its key: whole or not at all. Files beside it that nothing has read for long go."""
    kernels = [
        dataclasses.asdict(kernel) | {"machine_code": base64.b64encode(kernel.machine_code).decode()}
        for kernel in form.kernels
    ]
    disk_cache.write(path, key, dataclasses.asdict(form) | {"kernels": kernels})


def read(path: Path, key: Any) -> Form | None:
    """The form kept under a key; None where there is none, or, with a warning, where the file is not to be used."""
    try:
        form = disk_cache.read(path, key)
        kernels = tuple(
            _Kernel(**_tuples(kernel) | {"machine_code": base64.b64decode(kernel["machine_code"])})
            for kernel in form["kernels"]
        )
        return Form(**_tuples({**form, "kernels": ()}) | {"kernels": kernels})
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        _LOG.warning("the kept kernel %s is damaged or not one's own (%s): it is compiled anew", path, error)
        return None


def _tuples(value: dict[str, Any]) -> dict[str, Any]:
    def as_tuples(part: Any) -> Any:
        return tuple(as_tuples(one) for one in part) if isinstance(part, list) else part

    return {key: as_tuples(part) for key, part in value.items()}
