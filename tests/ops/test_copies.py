"""Copies over the bus in one call: what the driver is told, of either version, and what becomes of one without it.

And of blocks out of another GPU's memory: what their kernel is told, and what it keeps where.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from octavo.kv_connector.worker.ways.ipc_memory import DeviceMemory
from octavo.kv_connector.worker.ways.regions import Region
from octavo.ops import copying
from octavo.ops.cache_write import copy_blocks_bulk
from octavo.ops.compile import driver, nvrtc
from octavo.ops.copying import BlockCopy

ARRAYS = [np.array(values, np.uint64) for values in ([1 << 40, 2], [3, 4])]


class _Driver:
    """Keeps what it was asked, as the driver reads it. names: of the functions that it has."""

    def __init__(self, *names: str, status: int = 0) -> None:
        self.asked: list[tuple[str, list[int], list[int]]] = []
        self._status = status
        for name in names:
            setattr(self, name, lambda *args, name=name: self._take(name, args))

    def _take(self, name: str, args: tuple[object, ...]) -> int:
        addresses, count = args[:3], args[3].value
        copies = [
            int.from_bytes(ctypes.string_at(array.value + 8 * i, 8), "little")
            for array in addresses
            for i in range(count)
        ]
        attributes = bytes(args[4]._obj)
        assert len(attributes) == 24 and bytes(args[5]._obj) == bytes(8) and args[6].value == 1
        assert len(args) == (8 if name.endswith("_v2") else 9) and args[-1].value == 5
        self.asked.append((name, copies, np.frombuffer(attributes, np.int32).tolist()))
        return self._status


@pytest.mark.parametrize("names", [["cuMemcpyBatchAsync"], ["cuMemcpyBatchAsync", "cuMemcpyBatchAsync_v2"]])
def test_pieces_are_one_call_of_the_driver(names: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    asked = _Driver(*names)
    monkeypatch.setattr(driver, "_library", lambda: asked)
    copying.copy_pieces(*ARRAYS, 96, 5)
    assert asked.asked == [(names[-1], [1 << 40, 2, 3, 4, 96, 96], [1, 0, 0, 0, 0, 1])]
    driver.copies_in_batches.cache_clear()
    assert driver.copies_in_batches()
    driver.copies_in_batches.cache_clear()


def test_a_driver_that_is_older_or_refuses_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    driver.copies_in_batches.cache_clear()
    monkeypatch.setattr(driver, "_library", lambda: SimpleNamespace())
    assert not driver.copies_in_batches() and not copying.can_copy_pieces(torch.device("cuda"))
    driver.copies_in_batches.cache_clear()
    monkeypatch.setattr(driver, "_library", lambda: _Driver("cuMemcpyBatchAsync", status=801))
    with pytest.raises(driver.DriverError, match="cuMemcpyBatchAsync failed with 801"):
        copying.copy_pieces(*ARRAYS, 96, 5)


def test_a_launch_of_bulk_copies_says_which_blocks_go_where(monkeypatch):
    """As the kernel reads it; of more blocks than a launch names there are several."""
    own, theirs = torch.zeros((3, 500, 32), dtype=torch.uint8), torch.randint(256, (3, 600, 32), dtype=torch.uint8)
    launches, streams = [], []

    def launch(function, grid, threads, shared, stream, places) -> None:
        said = ctypes.cast(places[0], ctypes.POINTER(copy_blocks_bulk._Params)).contents
        sizes = [ctypes.sizeof(field[1]) for field in said._fields_]
        assert [places[0] + offset for offset in (0, 24, 48, 56, 60, 64)] == list(places) and sum(sizes) < 4096
        here, there = np.ctypeslib.as_array(said.blocks).reshape(2, -1)[:, : said.count].tolist()
        for part in range(said.parts):
            for to, of in zip(here, there, strict=True):
                target, source = (
                    side.base + part * side.part + block * side.block
                    for side, block in ((said.own, to), (said.theirs, of))
                )
                ctypes.memmove(target, source, said.part_bytes)
        launches.append((said.count, grid, shared))
        streams.append(stream)

    monkeypatch.setattr(driver, "load", lambda *args: 1)
    monkeypatch.setattr(nvrtc, "machine_code", lambda *args: b"")
    monkeypatch.setattr(copy_blocks_bulk, "_load", functools.cache(copy_blocks_bulk._Kernel))
    monkeypatch.setattr(driver, "launch", launch)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=5))
    blocks = np.stack([np.random.default_rng(1).permutation(count)[:450] for count in (500, 600)])
    strides = (500 * 32, 32), (600 * 32, 32)
    copy = BlockCopy(own, theirs.data_ptr(), blocks, strides, 3, 32)
    copy_blocks_bulk.copy_blocks(copy)
    assert streams == [5] * 3, "the current one"
    other = torch.full_like(own, 7)
    copy_blocks_bulk.copy_blocks(copy._replace(own=other, blocks=blocks[:, :3]), stream=9)
    assert streams.pop() == 9 and launches.pop()[0] == 3, "what was told of the launch before is not told again"
    assert torch.equal(other[:, blocks[0, :3]], theirs[:, blocks[1, :3]])
    assert (other[:, np.delete(np.arange(500), blocks[0, :3])] == 7).all()
    assert (
        torch.equal(own[:, blocks[0]], theirs[:, blocks[1]]) and not own[:, np.delete(np.arange(500), blocks[0])].any()
    )
    assert [count for count, _, _ in launches] == [224, 224, 2]
    assert {rest for _, *rest in map(tuple, launches) for rest in [tuple(rest)]} == {
        ((copy_blocks_bulk.PROGRAMS, 1, 1), copy_blocks_bulk.CHUNK * copy_blocks_bulk.STAGES)
    }
    assert not copy_blocks_bulk.serves(copy), "a CPU has no such kernel"
    monkeypatch.setattr(copy_blocks_bulk, "is_there", lambda device: True)
    assert copy_blocks_bulk.serves(copy) and not copy_blocks_bulk.serves(copy._replace(address=copy.address + 8))
    assert not copy_blocks_bulk.serves(copy._replace(strides=(strides[0], (600 * 32, 24))))


@pytest.mark.parametrize("fails", [False, True])
def test_a_copy_is_launched_on_its_own_stream_and_its_end_is_an_event_there(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []

    def launch(*args: object) -> None:
        asked.append(("launch", args[4]))
        if fails:
            raise driver.DriverError("it does not")

    def event() -> SimpleNamespace:
        return SimpleNamespace(
            record=lambda on: asked.append(("record", on)), query=lambda: asked.append("ended?") or 1
        )

    stream = SimpleNamespace(
        cuda_stream=7, query=lambda: asked.append("query"), synchronize=lambda: asked.append("synchronize")
    )
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "Event", event)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(copy_blocks_bulk, "is_there", lambda device: True)
    monkeypatch.setattr(copy_blocks_bulk, "_load", functools.cache(copy_blocks_bulk._Kernel))
    monkeypatch.setattr(driver, "load", lambda *args: 1)
    monkeypatch.setattr(nvrtc, "machine_code", lambda *args: b"")
    monkeypatch.setattr(driver, "launch", launch)
    memory, own = DeviceMemory(torch.device("cpu")), torch.zeros((3, 20, 16), dtype=torch.uint8)
    region = Region(
        agent=b"", base=1 << 20, kind="VRAM", device=0, num_pages=3, num_blocks=20, page_bytes=16, blocks=[1, 2]
    )
    asked.clear()
    if fails:
        with pytest.raises(driver.DriverError):
            memory.order(own, region, region)
        assert asked == ["query", ("launch", 7), "synchronize"], "nothing is under way when it raises"
        return
    memory.order(own, region, region)()
    assert asked == ["query", ("launch", 7), ("record", stream), "ended?"]


def test_the_kernel_of_bulk_copies_keeps_all_in_registers():
    try:
        nvrtc._library()
    except nvrtc.CompileError:
        pytest.skip("needs the compiler that comes with torch's CUDA packages")
    told = nvrtc.compile_told(
        *copy_blocks_bulk.text(copy_blocks_bulk.CHUNK, copy_blocks_bulk.STAGES), "--ptxas-options=-v"
    )[1]
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in told
    assert copy_blocks_bulk.CHUNK * copy_blocks_bulk.STAGES + 1024 <= 232448, "of an H200's processor"
