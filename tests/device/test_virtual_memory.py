"""VirtualMemory over a double of the driver, whose addresses without memory cannot be touched."""

from __future__ import annotations

import ctypes
import gc
import random

import pytest
import torch

from octavo.device import cuda_pages, virtual_memory
from octavo.device.cuda_pages import CudaPages
from octavo.device.virtual_memory import VirtualMemory
from octavo.ops.compile.driver import DriverError
from pages_double import PAGE, PagesDouble

SHAPES = [(3, 5), (1024, 700), (0, 4), (1,), (1024, 1024), (7,)]


def filled(memory: VirtualMemory) -> list[torch.Tensor]:
    tensors = [memory.empty(shape, torch.float32) for shape in SHAPES] + [memory.empty((3, 3), torch.bfloat16)]
    for number, tensor in enumerate(tensors):
        tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape) + number)
    return tensors


def test_rl_s1_addresses_stay_while_memory_goes_and_comes() -> None:
    pages = PagesDouble()
    memory = VirtualMemory(pages)
    tensors = filled(memory)
    values, places = [each.clone() for each in tensors], [each.data_ptr() for each in tensors]
    size = pages.used
    assert sum(each.nbytes for each in tensors) <= size == memory.num_bytes <= sum(e.nbytes for e in tensors) + PAGE
    assert all(each.data_ptr() % 512 == 0 for each in tensors if each.numel())
    for _ in range(3):
        pages.is_idle = False
        memory.save()
        assert memory.give_back() == size and (pages.used, memory.is_away) == (0, True)
        memory.save()
        assert memory.give_back() == 0
        memory.take_again()
        memory.restore()
        pages.check()
        assert pages.used == size and [each.data_ptr() for each in tensors] == places
        assert all(torch.equal(own, value) for own, value in zip(tensors, values, strict=True))
    assert pages.calls["map"] == pages.calls["allow"] == pages.calls["create"] == pages.calls["release"]


def test_values_that_are_not_kept_take_nothing_of_the_host() -> None:
    pages = PagesDouble()
    memory = VirtualMemory(pages)
    filled(memory)
    memory.give_back()
    memory.take_again()
    memory.restore()
    assert not pages.calls["host"]
    memory.save()
    memory.give_back()
    memory.forget()
    memory.take_again()
    memory.restore()
    assert not memory.is_saved and not memory.is_away


def test_rl_s3_no_room_changes_nothing() -> None:
    """Neither for a tensor, nor for the values on the host, nor to wake; and then there is room."""
    pages = PagesDouble(16 * PAGE)
    memory = VirtualMemory(pages)
    tensors = filled(memory)
    values, size = [each.clone() for each in tensors], pages.used
    with pytest.raises(torch.OutOfMemoryError):
        memory.empty((16 * PAGE,), torch.uint8)
    assert pages.used == size
    pages.fails["host"] = 1
    with pytest.raises(RuntimeError, match="host failed"):
        memory.save()
    assert not memory.is_saved
    memory.save()
    memory.give_back()
    for wrong in ("create", "map", "allow"):
        pages.fails[wrong] = 2  # in the middle
        with pytest.raises(RuntimeError, match=f"{wrong} failed"):
            memory.take_again()
        pages.check()
        assert pages.used == 0 and memory.is_saved
    pages.others = pages.total_bytes - PAGE
    with pytest.raises(torch.OutOfMemoryError):
        memory.take_again()
    assert pages.used == 0
    pages.others = 0
    memory.take_again()
    memory.restore()
    assert all(torch.equal(own, value) for own, value in zip(tensors, values, strict=True))


def test_a_range_ends_with_its_last_tensor() -> None:
    pages = PagesDouble()
    memory = VirtualMemory(pages)
    tensor = memory.empty((5000,), torch.float32).fill_(3)
    part = tensor[100:]
    del memory, tensor
    gc.collect()
    assert pages.used and int(part.max()) == 3
    pages.captures = True  # waiting now would break a graph's capture
    del part
    gc.collect()
    assert pages.used and pages.ranges
    pages.captures = False
    VirtualMemory(PagesDouble()).empty((1,), torch.uint8)
    assert not pages.used and not pages.ranges and not virtual_memory._ENDED
    asleep = VirtualMemory(pages)
    tensor = asleep.empty((5,), torch.uint8)
    asleep.give_back()
    del asleep, tensor
    gc.collect()
    assert not pages.ranges


def test_rl_s3_any_moves_keep_values() -> None:
    rng, pages = random.Random(0), PagesDouble(64 * PAGE)
    memory = VirtualMemory(pages)
    tensors = filled(memory)
    values = [each.clone() for each in tensors]
    for _ in range(200):
        pages.fails = {rng.choice(["create", "map", "allow", "host", "settle"]): rng.randrange(1, 6)}
        try:
            if memory.is_away:
                memory.take_again()
                memory.restore()
            else:
                memory.save()
                memory.give_back()
        except RuntimeError:
            pages.fails = {}
        pages.check()
        assert memory.is_away == (pages.used == 0)
        if not memory.is_away and not memory.is_saved:
            assert all(torch.equal(own, value) for own, value in zip(tensors, values, strict=True))


def test_the_drivers_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes and places of its structures, as cuda.h has them; memory that is refused is asked for once more."""
    sizes = [ctypes.sizeof(kind) for kind in (cuda_pages.Location, cuda_pages.Kind, cuda_pages.Access)]
    assert (sizes, cuda_pages.Kind.location.offset, cuda_pages.Kind.flags.offset) == ([8, 32, 12], 8, 24)
    calls, statuses = list[str](), [2, 2, 2, 0, 1]

    def call(name: str, *args: object) -> None:
        calls.append(name)
        status = statuses.pop(0) if name == "cuMemCreate" else 0
        if status:
            raise DriverError(f"{name} failed with {status}", status)

    pages = CudaPages.__new__(CudaPages)
    pages._kind = cuda_pages.Kind(1, 0, cuda_pages.Location(1, 0))
    monkeypatch.setattr(cuda_pages, "call", call)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("spare"))
    with pytest.raises(torch.OutOfMemoryError, match="2097152 bytes"):
        pages.create(PAGE)
    assert pages.create(PAGE) == 0 and calls == 2 * ["cuMemCreate", "spare", "cuMemCreate"]
    with pytest.raises(DriverError):  # another failure is no lack of memory
        pages.create(PAGE)
    assert len(calls) == 7
