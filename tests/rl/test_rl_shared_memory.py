"""A sender's file in shared memory: kept from one update to the next, and gone with its sender, however that ends."""

from __future__ import annotations

import errno
import gc
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.rl import Sender, WeightSource
from octavo.rl.session import WeightUpdateError
from octavo.rl.transport import shm
from octavo.rl.transport.shm import PREFIX, SharedBuffer

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="shared memory is /dev/shm here")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """In which no other test's files are."""
    monkeypatch.setattr(shm, "FOLDER", str(tmp_path))
    yield tmp_path
    gc.collect()


class Engine:
    """What a sender asks of an engine; it reads what it is told of."""

    def __init__(self, folder: Path) -> None:
        self._folder, self.seen, self.refuses = folder, list[tuple[str, int, bytes]](), False

    def init_weight_transfer_engine(self, request: Any) -> dict[str, Any]:
        return {}

    def start_weight_update(self, **_: Any) -> str:
        return "a"

    def update_weights(self, request: Any) -> None:
        if self.refuses:
            raise WeightUpdateError("no")
        path = self._folder / request["update_info"]["shm_name"]
        self.seen.append((path.name, path.stat().st_ino, path.read_bytes()))

    def finish_weight_update(self, *_: Any, **__: Any) -> None: ...

    abort_weight_update = finish_weight_update


def _sent(tensor: torch.Tensor) -> bytes:
    return tensor.view(torch.uint8).numpy().tobytes()


def test_a_sender_keeps_its_memory_while_its_weights_have_their_size(folder: Path) -> None:
    engine = Engine(folder)
    sender, tensors = Sender(engine, "shm"), [torch.full((size,), float(size)) for size in (5, 5, 9)]
    tensors[1] += 1
    for each in tensors:
        sender.send(WeightSource({"a": each}))
        assert len(list(folder.iterdir())) == 1
    names, files, data = zip(*engine.seen, strict=True)
    assert (names[0], files[0]) == (names[1], files[1]) and names[2] != names[1]
    assert data == tuple(map(_sent, tensors))
    sender.close()
    assert not list(folder.iterdir())
    sender.send(WeightSource({"a": tensors[0]}))  # another one
    engine.refuses = True
    with pytest.raises(WeightUpdateError, match="no"):
        sender.send(WeightSource({"a": tensors[0]}))
    assert not list(folder.iterdir())
    engine.refuses = False
    sender.send(WeightSource({"a": tensors[0]}))
    assert len(list(folder.iterdir())) == 1
    del sender
    gc.collect()
    assert not list(folder.iterdir())


def test_what_is_large_is_given_back_at_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shm, "_KEPT_BYTES", 19)
    engine = Engine(folder)
    sender = Sender(engine, "shm")
    sender.send(WeightSource({"a": torch.ones(5)}))
    assert len(engine.seen) == 1 and not list(folder.iterdir())


def test_the_next_sender_takes_away_what_a_killed_one_has_left(folder: Path) -> None:
    """And no other's, be it in use, or so new that it may not be locked yet."""
    program = f"""
import sys, time
from octavo.rl.transport import shm
shm.FOLDER = {str(folder)!r}
buffer = shm.SharedBuffer()
buffer.take(8).fill_(3)
print(buffer.name, flush=True)
sys.stdin.read()
"""
    held = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert held.stdout is not None
    name = held.stdout.readline().strip()
    other, own = folder / f"{PREFIX}new", SharedBuffer()
    other.write_bytes(b"x")
    os.utime(folder / name, (0, 0))
    own.take(4)
    assert {path.name for path in folder.iterdir()} == {name, other.name, own.name}
    held.send_signal(signal.SIGKILL)
    held.communicate()
    own.take(5)
    assert {path.name for path in folder.iterdir()} == {other.name, own.name}
    own.close()


def test_a_forked_process_takes_nothing_away(folder: Path) -> None:
    buffer = SharedBuffer()
    buffer.take(4)
    shm._remove(str(folder / buffer.name), -1, os.getpid() + 1)  # as its exit does
    assert (folder / buffer.name).exists()
    buffer.close()
    assert not list(folder.iterdir())


def test_no_room_is_an_error_and_leaves_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no crash, as of memory that is mapped and not there."""

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    buffer = SharedBuffer()
    with pytest.raises(OSError, match="No space left on device"):
        buffer.take(4)
    assert not list(folder.iterdir()) and not buffer.name
