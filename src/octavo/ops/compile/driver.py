"""The CUDA driver's own calls, for what torch has none: machine code, its launch, nodes of graphs, copies' descriptors.

Owns the library's signatures. Does not know what a kernel computes. Invariant: a launch is on the stream that it is
given and copies its parameters before it returns, so their memory may be used again, and a graph may capture it.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

_KERNEL_NODE = 0
_MAX_DYNAMIC_SHARED, _SHARED_PERCENT = 8, 9  # attributes of a function
_DEFAULT_SHARED = 48 << 10  # bytes of a block that need no leave
_CLUSTER, _OVERLAPS = 4, 6  # attributes of a launch
_MOST_WINDOW = 96 << 20  # bytes; GPUs take some 128 MiB at most
_WINDOW, _STREAMING = 1, 1  # an attribute of a launch, and what it may say of what is read
_MAP_BYTES, _MAP_ALIGNED = 128, 64
_IN_ORDER, _BESIDE_KERNELS = 1, 1  # of copies: sources are read in the stream's order; rather by a copy engine
_SWIZZLES, _PROMOTE_128 = {64: 2, 128: 3}, 2  # of a descriptor


class DriverError(RuntimeError):
    """A call of the driver failed, or the driver has no such call."""

    def __init__(self, text: str, status: int = 0) -> None:
        """`status`: what the driver said, 0 where it was not asked."""
        super().__init__(text)
        self.status = status


class _NodeParams(ctypes.Structure):
    _fields_ = [
        ("function", ctypes.c_void_p),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("params", ctypes.POINTER(ctypes.c_void_p)),
        ("extra", ctypes.c_void_p),
        ("kernel", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
    ]


class _Attribute(ctypes.Structure):
    _fields_ = [("name", ctypes.c_uint64), ("value", ctypes.c_uint * 16)]


class _Config(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint),
    ]


class _Window(ctypes.Structure):
    """What becomes of lines that a launch reads out of a range: a share of them, and the others."""

    _fields_ = [
        ("base", ctypes.c_void_p),
        ("num_bytes", ctypes.c_size_t),
        ("share", ctypes.c_float),
        ("hit", ctypes.c_int),
        ("miss", ctypes.c_int),
        ("rest", ctypes.c_byte * 36),  # of the largest attribute
    ]


class _CopyAttributes(ctypes.Structure):
    _fields_ = [
        ("order", ctypes.c_int),
        ("source_hint", ctypes.c_int * 2),
        ("target_hint", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    ]


@dataclasses.dataclass(frozen=True, slots=True)
class Node:
    """A kernel's launch as a graph holds it."""

    name: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared: int  # bytes
    params: tuple[tuple[int, int], ...]  # (bytes, value as an unsigned number) of each


@functools.cache
def _library() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise DriverError(str(error)) from None


def call(name: str, *args: Any) -> None:
    """One of the driver's functions. Raises DriverError."""
    try:
        status = getattr(_library(), name)(*args)
    except AttributeError:
        raise DriverError(f"the driver has no {name}") from None
    if status:
        raise DriverError(f"{name} failed with {status}", status)


def load(machine_code: bytes, name: str, shared: int) -> int:
    """The function `name` of a cubin in the current context, free to use so many bytes of shared memory."""
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    call("cuModuleLoadData", ctypes.byref(module), machine_code)
    call("cuModuleGetFunction", ctypes.byref(function), module, name.encode())
    if shared > _DEFAULT_SHARED:
        call("cuFuncSetAttribute", function, _MAX_DYNAMIC_SHARED, shared)
        call("cuFuncSetAttribute", function, _SHARED_PERCENT, 100)  # of a processor's, so that as many blocks fit
    assert function.value is not None, "the driver gave a function"
    return function.value


def launch(
    function: int, grid: tuple[int, int, int], threads: int, shared: int, stream: int, params: ctypes.Array[Any]
) -> None:
    """Launch blocks of `threads`; params: addresses of the values."""
    status = _library().cuLaunchKernel(
        ctypes.c_void_p(function), *grid, threads, 1, 1, shared, ctypes.c_void_p(stream), params, None
    )
    if status:
        raise DriverError(f"cuLaunchKernel failed with {status}")


@functools.cache
def copies_in_batches() -> bool:
    """Whether there is a driver, and it takes many copies in one call: from CUDA 12.8 on."""
    try:
        return hasattr(_library(), "cuMemcpyBatchAsync")
    except DriverError:
        return False


def copy_batch(
    targets: NDArray[np.uint64], sources: NDArray[np.uint64], sizes: NDArray[np.uint64], stream: int
) -> None:
    """Order copies from addresses to addresses [copies], of so many bytes each, in no order among themselves.

    Of a GPU's memory, and of the host's that is pinned. Raises DriverError.
    """
    assert len(targets) == len(sources) == len(sizes), "each copy has a target, a source and a size"
    attributes, first = _CopyAttributes(order=_IN_ORDER, flags=_BESIDE_KERNELS), ctypes.c_size_t(0)
    arrays = [np.ascontiguousarray(array, np.uint64) for array in (targets, sources, sizes)]
    addresses = [ctypes.c_void_p(array.ctypes.data) for array in arrays]
    rest = [ctypes.byref(attributes), ctypes.byref(first), ctypes.c_size_t(1)]
    count, stream_ = ctypes.c_size_t(len(sizes)), ctypes.c_void_p(stream)
    if hasattr(_library(), "cuMemcpyBatchAsync_v2"):  # from CUDA 13 on it does not say which copy failed
        call("cuMemcpyBatchAsync_v2", *addresses, count, *rest, stream_)
    else:
        call("cuMemcpyBatchAsync", *addresses, count, *rest, ctypes.byref(ctypes.c_size_t()), stream_)


def launch_chained(
    function: int, blocks: int, cluster: int, threads: int, shared: int, stream: int, params: ctypes.Array[Any]
) -> None:
    """Launch blocks of `threads` in clusters of `cluster`, which may begin before the kernel ahead of them has ended.

    params: addresses of the values.
    """
    attributes = (_Attribute * 2)(
        _Attribute(_OVERLAPS, (ctypes.c_uint * 16)(1)), _Attribute(_CLUSTER, (ctypes.c_uint * 16)(cluster, 1, 1))
    )
    config = _Config(
        (ctypes.c_uint * 3)(blocks, 1, 1),
        (ctypes.c_uint * 3)(threads, 1, 1),
        shared,
        stream,
        attributes,
        2 if cluster > 1 else 1,
    )
    call("cuLaunchKernelEx", ctypes.byref(config), ctypes.c_void_p(function), params, None)


def describe(
    address: int, element: int, shape: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...], swizzle: int
) -> bytes:
    """The descriptor of a tensor of 16-bit elements that is copied in boxes with rows of `swizzle` bytes, 64 or 128.

    element: the driver's number of the type. Shape and box: the innermost axis first; strides, in bytes: of the others.
    """
    rank = len(shape)
    room = ctypes.create_string_buffer(_MAP_BYTES + _MAP_ALIGNED)
    place = -(-ctypes.addressof(room) // _MAP_ALIGNED) * _MAP_ALIGNED
    call(
        "cuTensorMapEncodeTiled",
        ctypes.c_void_p(place),
        element,
        rank,
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * rank)(*shape),
        (ctypes.c_uint64 * (rank - 1))(*strides),
        (ctypes.c_uint32 * rank)(*box),
        (ctypes.c_uint32 * rank)(*[1] * rank),
        0,
        _SWIZZLES[swizzle],
        _PROMOTE_128,
        0,
    )
    return ctypes.string_at(place, _MAP_BYTES)


def kernels_of(graph: int) -> list[Node]:
    """The launches of a captured graph, in order. Raises DriverError for other nodes, as copies are."""
    return [_read(node) for node in _nodes(graph)]


def let_leave(graph: int, sizes: Mapping[int, int]) -> int:
    """Let the launches of a captured graph that are given one of these addresses read as what leaves the L2 first.

    sizes: how many bytes lie at each address. How many launches there are. Raises DriverError.
    """
    marked = 0
    for node in _nodes(graph):
        try:
            given = [value for _, value in _read(node).params if value in sizes]
        except DriverError:  # no launch, or one that does not show what it is given
            continue
        for address in given[:1]:
            window = _Window(address, min(sizes[address], _MOST_WINDOW), 1.0, _STREAMING, _STREAMING)
            call("cuGraphKernelNodeSetAttribute", node, _WINDOW, ctypes.byref(window))
            marked += 1
    return marked


def _nodes(graph: int) -> list[ctypes.c_void_p]:
    graph_, count = ctypes.c_void_p(graph), ctypes.c_size_t()
    call("cuGraphGetNodes", graph_, None, ctypes.byref(count))
    nodes = (ctypes.c_void_p * max(count.value, 1))()
    call("cuGraphGetNodes", graph_, nodes, ctypes.byref(count))
    return [ctypes.c_void_p(nodes[index]) for index in range(count.value)]


def _read(node: ctypes.c_void_p) -> Node:
    kind, held = ctypes.c_int(), _NodeParams()
    call("cuGraphNodeGetType", node, ctypes.byref(kind))
    if kind.value != _KERNEL_NODE:
        raise DriverError(f"a graph's node is of the kind {kind.value}")
    call("cuGraphKernelNodeGetParams_v2", node, ctypes.byref(held))
    if not held.function or not held.params:
        raise DriverError("a graph's launch shows neither function nor parameters")
    function, name = ctypes.c_void_p(held.function), ctypes.c_char_p()
    call("cuFuncGetName", ctypes.byref(name), function)
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    params: list[tuple[int, int]] = []
    if not hasattr(_library(), "cuFuncGetParamInfo"):
        raise DriverError("the driver does not show what a launch is given")
    while not _library().cuFuncGetParamInfo(function, len(params), ctypes.byref(offset), ctypes.byref(size)):
        raw = ctypes.string_at(held.params[len(params)], size.value)
        params.append((size.value, int.from_bytes(raw, "little")))
    return Node(
        name=(name.value or b"").decode(),
        grid=(held.grid[0], held.grid[1], held.grid[2]),
        block=(held.block[0], held.block[1], held.block[2]),
        shared=held.shared,
        params=tuple(params),
    )
