"""The guard under which engines capture graphs: one that reads the host's memory raises.

Such a copy is repeated with each replay, and by then the memory may be another's.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator

import torch

_COPY_NODE = 1
_MEMORY_TYPE, _HOST = 2, 1  # an attribute of an address, and its value
_UNIFIED = 4


class _Copy(ctypes.Structure):
    """CUDA_MEMCPY3D."""

    _fields_ = [
        ("source_at", ctypes.c_size_t * 4), ("source_type", ctypes.c_int), ("source_host", ctypes.c_void_p),
        ("source_device", ctypes.c_uint64), ("source_array", ctypes.c_void_p), ("nothing", ctypes.c_void_p),
        ("source_pitch", ctypes.c_size_t), ("source_height", ctypes.c_size_t),
        ("target_at", ctypes.c_size_t * 4), ("target_type", ctypes.c_int), ("target_host", ctypes.c_void_p),
        ("target_device", ctypes.c_uint64), ("target_array", ctypes.c_void_p), ("nothing_too", ctypes.c_void_p),
        ("target_pitch", ctypes.c_size_t), ("target_height", ctypes.c_size_t), ("extent", ctypes.c_size_t * 3),
    ]  # fmt: skip


def _check(status: int) -> None:
    assert not status, f"the driver answers {status}"


def num_host_reads(graph: int) -> int:
    """Copies out of the host's memory in a captured graph."""
    driver = ctypes.CDLL("libcuda.so.1")
    count = ctypes.c_size_t()
    _check(driver.cuGraphGetNodes(ctypes.c_void_p(graph), None, ctypes.byref(count)))
    nodes = (ctypes.c_void_p * max(count.value, 1))()
    _check(driver.cuGraphGetNodes(ctypes.c_void_p(graph), nodes, ctypes.byref(count)))
    found = 0
    for index in range(count.value):
        node, kind, copy = ctypes.c_void_p(nodes[index]), ctypes.c_int(), _Copy()
        _check(driver.cuGraphNodeGetType(node, ctypes.byref(kind)))
        if kind.value != _COPY_NODE:
            continue
        _check(driver.cuGraphMemcpyNodeGetParams(node, ctypes.byref(copy)))
        source, place = copy.source_type, ctypes.c_uint()
        if source == _UNIFIED:
            known = driver.cuPointerGetAttribute(ctypes.byref(place), _MEMORY_TYPE, ctypes.c_uint64(copy.source_device))
            source = _HOST if known else place.value
        found += source == _HOST
    return found


@contextlib.contextmanager
def no_host_reads() -> Iterator[list[int]]:
    """Within: a graph whose capture reads the host's memory raises. Gives a list that grows with each good one."""
    real, captured = torch.cuda.CUDAGraph, list[int]()

    class Guarded(real):  # type: ignore[misc, valid-type]
        def capture_end(self) -> None:
            super().capture_end()
            reads = num_host_reads(self.raw_cuda_graph())
            assert not reads, f"a graph was captured with {reads} copies out of the host's memory"
            captured.append(1)
            self.instantiate()

    torch.cuda.CUDAGraph = functools.partial(Guarded, keep_graph=True)
    try:
        yield captured
    finally:
        torch.cuda.CUDAGraph = real
