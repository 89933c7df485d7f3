"""A trainer that sends more or fewer bytes than it announced: its update is refused, and nothing else is touched."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from octavo import LLM
from octavo.rl import Sender, WeightSource
from octavo.rl.plan import DTYPES, Incoming
from octavo.rl.sender import told
from octavo.rl.session import WeightTransferError, WeightUpdateError
from octavo.rl.transport import extent as extent_module
from octavo.rl.transport import group as group_module
from octavo.rl.transport.extent import Extent, Rooms
from octavo.rl.transport.gloo import GlooTransport, make_gloo
from octavo.rl.transport.group import Group
from patience import patient
from weights_rig import answers, old_weights, other_weights


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    fields: dict[str, Any] = {"dtype": "bfloat16", "max_model_len": 256}
    with LLM(**fields, weight_transfer_config={"backend": "gloo", "timeout": 60}) as made:
        yield made


class Trainer:
    """Rank 0 of a group with an engine."""

    def __init__(self, llm: LLM) -> None:
        store = TCPStore("127.0.0.1", 0, 2, True, wait_for_workers=False)
        info = {"master_address": "127.0.0.1", "master_port": store.port, "rank_offset": 1, "world_size": 2}
        meets = threading.Thread(target=llm.init_weight_transfer_engine, args=({"init_info": info},))
        meets.start()
        self.group = Group(make_gloo, "127.0.0.1", store.port, 0, 2, patient(30), store=store)
        meets.join()

    def send(self, tensors: list[Tensor]) -> threading.Thread:
        """Beside the engine's call; it ends when the engine has left."""

        def run() -> None:
            try:
                for tensor in tensors:
                    self.group.broadcast(tensor.reshape(-1).view(torch.uint8), "a tensor", 600)
            except WeightTransferError:
                pass

        thread = threading.Thread(target=run)
        thread.start()
        return thread


def packed(tensors: list[Tensor]) -> list[Tensor]:
    return [torch.cat([each.reshape(-1).view(torch.uint8) for each in tensors])]


@pytest.mark.parametrize(
    ("said", "sent", "is_packed", "words"),
    [
        (torch.bfloat16, torch.float32, False, r"2,097,152 bytes were announced \(bfloat16\), and 4,194,304 came"),
        (torch.float32, torch.bfloat16, False, r"4,194,304 bytes were announced \(float32\), and 2,097,152 came"),
        (torch.bfloat16, "packed", False, "2,097,152 bytes were announced .*, and more came: do dtype_names, shapes"),
        (torch.bfloat16, "single", True, r"79 tensors, model\..* to model\..*: 13,116,672 .*, and 2,097,152 came"),
        (torch.bfloat16, torch.float32, True, "13,116,672 bytes were announced .*, and 26,233,344 came"),
    ],
)
def test_RL_W8_more_or_fewer_bytes_than_announced_are_refused(
    llm: LLM, said: torch.dtype, sent: torch.dtype | str, is_packed: bool, words: str
) -> None:
    """By name, with both numbers; the old weights serve, the trainer is let go, and its next meeting is enough."""
    before, new = answers(llm), {name: each.bfloat16() for name, each in other_weights(2).items()}
    trainer = Trainer(llm)
    as_said = [each.to(said) for each in new.values()]
    tensors = as_said if isinstance(sent, str) else [each.to(sent) for each in new.values()]
    one_buffer = sent == "packed" or (is_packed and sent != "single")
    info = told([Incoming(name, said, tuple(each.shape)) for name, each in new.items()])
    llm.start_weight_update()
    sends = trainer.send(packed(tensors) if one_buffer else tensors)
    with pytest.raises(WeightUpdateError, match=words):
        llm.update_weights({"update_info": {**info, "packed": is_packed}})
    sends.join(patient(30))
    again = trainer.send(tensors[:1])  # a trainer that heard nothing, since all that it sent was on its way
    again.join(patient(20))
    assert not sends.is_alive() and not again.is_alive(), "the trainer's end fails when the engine has left"
    assert llm.weight_state()["state"] == "ready" and answers(llm) == before
    trainer.group.close()
    sender = Sender(llm, "gloo")
    sender.send(WeightSource(new), "right")
    assert answers(llm) != before
    sender.send(WeightSource(old_weights()), "0")
    assert answers(llm) == before
    sender.close()


def _nobody(**values: Any) -> dict[str, Any]:
    port = TCPStore("127.0.0.1", 0, 1, True).port  # which nobody has any more
    return {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2, **values}


def test_RL_W8_a_meeting_that_fails_leaves_the_group_that_works(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether its values are refused, or nobody is there."""
    before, sender = answers(llm), Sender(llm, "gloo")
    sender.send(WeightSource(old_weights()), "0")
    group = sender._group
    wrong: list[dict[str, Any]] = [
        {},
        _nobody(master_address=""),
        _nobody(master_port="x"),
        _nobody(master_port=70000),
        _nobody(rank_offset=5),
        _nobody(world_size=1),
        _nobody(packed_buffer_size_bytes=0),
    ]
    for info in wrong:
        with pytest.raises(WeightUpdateError, match=r"^init_info\.\w+"):
            llm.init_weight_transfer_engine({"init_info": info})
    with pytest.raises(WeightUpdateError, match="unknown weight transfer backend"):
        llm.init_weight_transfer_engine({"backend": "pigeon", "init_info": {}})
    monkeypatch.setattr(group_module.Group, "__init__", _unmet)
    with pytest.raises(WeightTransferError, match="not met"):
        llm.init_weight_transfer_engine({"init_info": _nobody()})
    sender.send(WeightSource(old_weights()), "again")
    assert sender._group is group and llm.get_weight_version() == "again" and answers(llm) == before
    sender.close()


def _unmet(*_: object, **__: object) -> None:
    raise WeightTransferError("not met")


@pytest.mark.parametrize(
    ("said", "line"),
    [
        (
            "[/a/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:9. This is typically caused",
            "Connection closed by peer [127.0.0.1]:9",
        ),
        ("[enforce fail at /a/b.cc:45] a <= b. 4 vs 2. Received data", "a <= b. 4 vs 2. Received data"),
        ("Operation timed out!", "Operation timed out!"),
    ],
)
def test_what_a_library_says_is_told_in_a_line_without_its_sources_place(said: str, line: str) -> None:
    assert group_module._line(RuntimeError(said)) == line


@pytest.mark.parametrize("dtype", DTYPES.values())
@pytest.mark.parametrize("num_elements", [1, 3, 4, 5, 100])
def test_each_number_of_bytes_is_told_from_each_other(dtype: torch.dtype, num_elements: int) -> None:
    part = [Incoming("a", dtype, (num_elements,)), Incoming("b", dtype, (2, 1))]
    size = (num_elements + 2) * dtype.itemsize
    values = torch.randn(8 * size).to(dtype).view(torch.uint8)
    for num_bytes in range(0, 3 * size, 2):  # whole numbers of 16 bits
        extent = Extent(part, Rooms(), likely=4 * size)
        extent.room[:num_bytes] = values[:num_bytes]
        if num_bytes == size:
            assert torch.equal(extent.come(), values[:size])
            continue
        if size - dtype.itemsize < num_bytes < size:  # the last number is NaN then, which is refused as such
            continue
        with pytest.raises(WeightUpdateError, match=rf"a to b: {size:,} bytes were announced .* came"):
            extent.come()
    assert torch.equal(_alone(part, values[:size]), values[:size])


@pytest.mark.parametrize("dtype", DTYPES.values())
def test_a_byte_fewer_is_refused_or_nan_and_no_finite_number_else_is(dtype: torch.dtype) -> None:
    info, part = torch.finfo(dtype), [Incoming("a", dtype, (3,))]
    lasts = torch.tensor([1.0, -1.0, 0.0, -0.0, info.max, info.min, info.tiny, -info.tiny], dtype=dtype)
    for last in [*lasts, (info.smallest_normal * lasts[0] / 2)]:
        values = torch.stack([lasts[0], lasts[1], last]).view(torch.uint8)
        extent = Extent(part, Rooms(), likely=100)
        extent.room[: len(values)] = values
        assert torch.equal(extent.come(), values)
    for upper in range(256):  # the last byte but one
        values[-2] = upper
        extent = Extent(part, Rooms(), likely=100)
        extent.room[: len(values) - 1] = values[:-1]
        least = torch.tensor([info.min], dtype=dtype).view(torch.uint8)
        if torch.equal(extent.room[len(values) - dtype.itemsize : len(values)], least):
            continue
        try:
            came = extent.come().view(dtype)
        except WeightUpdateError:
            continue
        assert not came[-1].isfinite()


def test_rooms_are_used_again_once_nothing_lies_in_them() -> None:
    """By those of the same sizes, whoever held a view of them last, and no sooner."""
    rooms, size = Rooms(), 1 << 20
    first, second = (rooms.take(size, 3 * size) for _ in range(2))
    assert first.shape == second.shape == (4 * size,) and first.dtype is torch.uint8
    first.fill_(7)
    places = {first.data_ptr(), second.data_ptr()}
    part = first[:8].view(torch.int16)
    del first, second
    again = rooms.take(size, 3 * size)
    assert again.data_ptr() in places - {part.data_ptr()}, "the other one is in use"
    assert part.tolist() == [0x0707] * 4
    del part
    assert {again.data_ptr(), rooms.take(size, 3 * size).data_ptr()} == places


def test_rooms_keep_little() -> None:
    """What is larger, or would be too much, is memory as others; free ones of other sizes make room."""
    rooms, most = Rooms(), extent_module._MOST_KEPT
    kept = [rooms.take(most // 2, 0) for _ in range(2)]
    others = [rooms.take(8, 0), rooms.take(2 * most, 0), rooms.take(0, 0)]
    assert [len(each) for each in others] == [8, 2 * most, 0] and rooms._num_kept == most
    del kept[0]
    small = rooms.take(8, 0)
    assert rooms._num_kept == most // 2 + 8 and not rooms._free
    del kept, small
    assert len(rooms._free) == 2


def test_what_a_group_kept_goes_with_it() -> None:
    transport = GlooTransport(torch.device("cpu"), {})
    rooms = weakref.ref(transport._rooms)
    tensor = transport._rooms.take(64, 64)
    transport.close()
    tensor.fill_(1)
    del tensor
    assert rooms() is None and not transport._rooms._free


def _alone(part: list[Incoming], values: Tensor) -> Tensor:
    """What comes into a buffer without room for more."""
    extent = Extent(part, Rooms())
    assert len(extent.room) == len(values)
    extent.room[:] = values
    return extent.come()


MEET = """
import threading, torch
from torch.distributed import TCPStore
from octavo.rl.plan import Incoming
from octavo.rl.transport.gloo import TRANSPORT, make_gloo
from octavo.rl.transport.group import Group
from octavo.rl.session import WeightUpdateError

def meet(engine):
    store = TCPStore("127.0.0.1", 0, 2, True, wait_for_workers=False)
    info = {"master_address": "127.0.0.1", "master_port": store.port, "rank_offset": 1, "world_size": 2}
    meets = threading.Thread(target=engine.open, args=(info, 0))
    meets.start()
    group = Group(make_gloo, "127.0.0.1", store.port, 0, 2, 30, store=store)
    meets.join()
    return group

engine, part = TRANSPORT(torch.device("cpu"), {}), [Incoming("a", torch.float32, (100,))]
info = {"names": ["a"], "dtype_names": ["float32"], "shapes": [[100]], "packed": False}
"""

FAR_MORE = """
for num_elements in (100, 10_000, 100):
    group, found = meet(engine), []
    group.begin_broadcast(torch.ones(num_elements), "a", 30)
    try:
        engine.receive(info, lambda *_: part, lambda _, tensor: found.append(tensor))
        print(found[0].sum().item(), flush=True)
    except WeightUpdateError as error:
        print(error, flush=True)
"""


def test_RL_W8_far_more_bytes_than_there_is_room_for_end_the_group_and_not_the_process() -> None:
    """Gloo throws in a thread of its own then."""
    done = subprocess.run(
        [sys.executable, "-c", MEET + FAR_MORE], capture_output=True, text=True, timeout=patient(120), env=os.environ
    )
    assert done.returncode == 0, done.stderr
    first, refused, last = done.stdout.splitlines()
    assert first == last == "100.0"
    assert "there was room for 1,600 bytes, and 40,000 came: do dtype_names" in refused


def test_a_refused_update_leaves_no_buffer_behind(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error's frames are in a cycle with it, which a process that serves looks for seldom."""
    rooms: list[weakref.ref[Tensor]] = []
    begin = Extent.__init__

    def noted(self: Extent, *args: Any, **own: Any) -> None:
        begin(self, *args, **own)
        rooms.append(weakref.ref(self.room))

    monkeypatch.setattr(Extent, "__init__", noted)
    new = {name: each.bfloat16() for name, each in other_weights(2).items()}
    info = told([Incoming(name, torch.bfloat16, tuple(each.shape)) for name, each in new.items()])
    gc.disable()
    try:
        trainer = Trainer(llm)
        llm.start_weight_update()
        sends = trainer.send(packed([each.float() for each in new.values()]))
        with pytest.raises(WeightUpdateError, match="came"):
            llm.update_weights({"update_info": {**info, "packed": True}})
        sends.join(patient(30))
        trainer.group.close()
        until = time.monotonic() + patient(30)
        while any(room() is not None for room in rooms) and time.monotonic() < until:  # a thread may be on its way out
            time.sleep(0.01)
        assert rooms and all(room() is None for room in rooms)
    finally:
        gc.enable()


BESIDE = """
other, found, said = TRANSPORT(torch.device("cpu"), {}), [], []
group, beside = meet(engine), meet(other)
receives = threading.Thread(
    target=other.receive, args=(info, lambda *_: part, lambda _, tensor: found.append(tensor)), daemon=True
)
receives.start()
while not other._group._works:
    pass
group.begin_broadcast(torch.ones(10_000), "a", 30)
try:
    engine.receive(info, lambda *_: part, lambda *_: None)
except WeightUpdateError as error:
    print("10,000" in str(error) or "40,000" in str(error), flush=True)
receives.join(0.3)  # long enough for a look at what was thrown
beside.broadcast(torch.ones(100), "a", 30)
receives.join(30)
print(found[0].sum().item(), flush=True)
"""


def test_RL_W8_what_a_group_throws_is_no_matter_of_another_one_of_the_process() -> None:
    done = subprocess.run(
        [sys.executable, "-c", MEET + BESIDE], capture_output=True, text=True, timeout=patient(120), env=os.environ
    )
    assert done.stdout.splitlines() == ["True", "100.0"], done.stderr


AT_ITS_END = """
import sys
engines = [TRANSPORT(torch.device("cpu"), {}) for _ in range(6)]
groups = [meet(each) for each in engines]
sys.setswitchinterval(100)  # who has Python's lock keeps it until the end
for group, each in zip(groups, engines):
    each._group.begin_broadcast(torch.zeros(100), "a", 30)
    group.broadcast(torch.ones(100), "a", 30)
"""


def test_a_process_may_end_while_a_group_still_lets_go_of_its_buffers() -> None:
    """A thread of gloo wants Python's lock for that, and there is none when the interpreter is gone."""
    done = subprocess.run(
        [sys.executable, "-c", MEET + AT_ITS_END], capture_output=True, text=True, timeout=patient(120), env=os.environ
    )
    assert (done.returncode, done.stderr) == (0, "")


AT_EXIT = """
import atexit, ctypes

library = ctypes.CDLL("libstdc++.so.6")
atexit.register(lambda: library._ZSt9terminatev())  # runs behind what is registered below

from octavo.process_groups import thrown

assert thrown.catch()
thrown._kind = None  # whoever enters Python now fails there
"""


def test_what_ends_a_process_at_its_exit_ends_it_as_before() -> None:
    """No Python runs any more where the C++ library says what was thrown."""
    done = subprocess.run(
        [sys.executable, "-c", AT_EXIT], capture_output=True, text=True, timeout=patient(60), env=os.environ
    )
    assert done.returncode == -signal.SIGABRT
    assert done.stderr.strip() == "terminate called without an active exception"
