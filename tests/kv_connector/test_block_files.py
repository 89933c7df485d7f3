"""Files of blocks (E): atomic, checked, named by content, and never wrong bytes."""

from __future__ import annotations

import json
import logging
import os
import pickle
import socket
import threading
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from octavo.kv_connector.keys import Pair, make_key
from octavo.kv_connector.orders import Report
from octavo.kv_connector.shared_storage import FoundFiles, folder_secret
from octavo.kv_connector.worker.block_files import BlockFiles

SIZE = 4096


def key(number: int) -> bytes:
    return make_key(number.to_bytes(16, "big"), 0)


def block(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, SIZE, np.uint8)


def read(files: BlockFiles, number: int) -> np.ndarray | None:
    found = np.zeros(SIZE, np.uint8)
    return found if files.read(key(number), found) else None


def test_E_3_what_was_written_is_read_and_the_file_says_what_it_is(tmp_path):
    files = BlockFiles(tmp_path, SIZE, label="abc")
    for number in range(3):
        files.write(key(number), block(number))
    assert all((read(files, number) == block(number)).all() for number in range(3)) and read(files, 3) is None
    tensors = load_file(files.path(key(1)))  # anybody's tool
    assert (tensors["block"] == block(1)).all()
    assert os.stat(files.path(key(1))).st_mode & 0o077 == 0
    assert not list(tmp_path.rglob(".*")), "nothing half-written is left"


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def foreign(path: Path) -> None:
    path.write_bytes(pickle.dumps({"block": 1}))


def other_key(path: Path) -> None:
    other = BlockFiles(path.parents[1], SIZE, label="abc")
    other.write(key(77), block(0))
    os.replace(other.path(key(77)), path)


def other_cache(path: Path) -> None:
    BlockFiles(path.parents[1], SIZE, label="xyz").write(key(0), block(0))


def long_header(path: Path) -> None:
    path.write_bytes((1 << 40).to_bytes(8, "little") + bytes(SIZE))


def deep_header(path: Path) -> None:
    text = json.dumps([[]]).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(SIZE))


@pytest.mark.parametrize(
    "spoil", [cut, flip, empty, foreign, other_key, other_cache, long_header, deep_header], ids=lambda f: f.__name__
)
def test_E_3_a_truncated_changed_or_foreign_file_is_a_miss_with_a_warning(spoil, tmp_path, caplog):
    files = BlockFiles(tmp_path, SIZE, label="abc")
    files.write(key(0), block(0))
    spoil(files.path(key(0)))
    with caplog.at_level(logging.WARNING):
        assert read(files, 0) is None
    assert "is no block of this cache" in caplog.text and not files.path(key(0)).exists()
    files.write(key(0), block(0))
    assert (read(files, 0) == block(0)).all()


def test_E_6_nothing_is_unpickled():
    folder = Path(__file__).parents[2] / "src" / "octavo" / "kv_connector"
    texts = [path.read_text() for path in folder.rglob("*.py")]
    assert len(texts) > 10 and not [text for text in texts if "pickle" in text or "torch.load" in text]


def test_the_least_recently_used_files_give_way(tmp_path):
    files = BlockFiles(tmp_path, SIZE, max_bytes=10 * (SIZE + 400))
    for number in range(10):
        files.write(key(number), block(number))
        os.utime(files.path(key(number)), (number, number))
    assert read(files, 0) is not None  # used just now
    for number in range(10, 16):
        files.write(key(number), block(number))
    there = {number for number in range(16) if files.path(key(number)).exists()}
    assert 0 in there and 1 not in there and 15 in there and len(there) <= 10
    assert files.num_evicted == 16 - len(there)


def test_a_folder_has_one_secret_whoever_comes_first(tmp_path):
    first = folder_secret(tmp_path)
    assert folder_secret(tmp_path) == first and len(first) == 32
    assert os.stat(tmp_path / "octavo.key").st_mode & 0o077 == 0
    with (tmp_path / "octavo.key").open("wb") as file:
        file.truncate(1 << 40)  # a sparse file, longer than any memory
    with pytest.raises(OSError, match=r"octavo.key in it has 1099511627776 bytes, not 32"):
        folder_secret(tmp_path)
    (tmp_path / "octavo.key").write_bytes(b"short")
    with pytest.raises(OSError, match="5 bytes"):
        folder_secret(tmp_path)


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("??/*"))


@pytest.mark.parametrize("num_fitting", [1, 2, 37])
def test_O_7_files_never_hold_more_than_the_limit_not_even_while_one_is_written(num_fitting, tmp_path, monkeypatch):
    size, most, replace = 64, 0, os.replace  # a header is far larger than such a block
    probe = BlockFiles(tmp_path / "probe", size)
    probe.write(key(0), block(0)[:size])
    limit = num_fitting * folder_bytes(tmp_path / "probe")

    def seen(source: Path, target: Path) -> None:
        nonlocal most
        replace(source, target)
        most = max(most, folder_bytes(tmp_path / "kv"))

    monkeypatch.setattr(os, "replace", seen)
    files = BlockFiles(tmp_path / "kv", size, max_bytes=limit)
    for number in range(100):
        files.write(key(number), block(number)[:size])
        assert files.path(key(number)).exists() and folder_bytes(tmp_path / "kv") <= files.stored_bytes <= limit
    assert most <= limit and files.num_evicted == 100 - len(list((tmp_path / "kv").glob("??/*")))


def test_O_7_writes_side_by_side_share_the_limit_and_one_that_fails_gives_its_room_back(tmp_path, monkeypatch):
    files = BlockFiles(tmp_path, SIZE, max_bytes=3 * (SIZE + 400))
    most, replace, both = 0, os.replace, threading.Barrier(2)

    def together(source: Path, target: Path) -> None:
        nonlocal most
        both.wait(30)  # both temporary files are there
        most = max(most, folder_bytes(tmp_path))
        both.wait(30)
        replace(source, target)

    monkeypatch.setattr(os, "replace", together)
    for number in range(0, 20, 2):
        threads = [threading.Thread(target=files.write, args=(key(number + i), block(number + i))) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert 2 * SIZE < most <= 3 * (SIZE + 400) and folder_bytes(tmp_path) <= files.stored_bytes

    def fails(source: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fails)
    for number in range(20, 40):
        with pytest.raises(OSError, match="No space left"):
            files.write(key(number), block(number))
    assert files.stored_bytes == folder_bytes(tmp_path) and not list(tmp_path.rglob(".*"))


def test_O_7_a_file_for_which_others_leave_no_room_meanwhile_is_not_written(tmp_path, monkeypatch):
    files, replace = BlockFiles(tmp_path, SIZE, max_bytes=SIZE + 400), os.replace

    def beside(source: Path, target: Path) -> None:
        monkeypatch.setattr(os, "replace", replace)
        files.write(key(2), block(2))  # as another thread
        assert folder_bytes(tmp_path) <= files.stored_bytes <= SIZE + 400
        replace(source, target)

    monkeypatch.setattr(os, "replace", beside)
    files.write(key(1), block(1))
    assert read(files, 1) is not None and read(files, 2) is None and files.num_evicted == 1


def test_O_7_what_an_engine_that_was_killed_had_half_written_goes(tmp_path):
    BlockFiles(tmp_path, SIZE).write(key(0), block(0))
    path = BlockFiles(tmp_path, SIZE).path(key(0))
    old, new = (path.with_name(f".{path.name}.{number}.00000000") for number in (1, 2))
    for half in (old, new):
        half.write_bytes(b"half")
    os.utime(old, (1, 1))
    files = BlockFiles(tmp_path, SIZE)
    assert not old.exists() and new.exists(), "another engine may be writing it now"
    assert read(files, 0) is not None


def full_folder(path: Path) -> None:
    path.mkdir()
    (path / "something").touch()


def listener(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made, pytest.MonkeyPatch.context() as patched:
        patched.chdir(path.parent)  # a socket's path may not be long
        made.bind(path.name)


def loop(path: Path) -> None:
    path.symlink_to(path)


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo, listener, loop])
def test_E_3_what_is_no_file_is_removed_and_not_opened(make, tmp_path):
    files, index = BlockFiles(tmp_path, SIZE), FoundFiles(str(tmp_path))
    files.path(key(0)).parent.mkdir(parents=True)
    make(files.path(key(0)))
    assert key(0) not in index and read(files, 0) is None and not os.path.lexists(files.path(key(0)))
    make(files.path(key(0)))
    files.write(key(0), block(0))
    assert key(0) in index and (read(files, 0) == block(0)).all()


def test_E_3_what_cannot_be_removed_is_in_nobodys_way(tmp_path, caplog):
    files = BlockFiles(tmp_path, SIZE)
    for number in range(5):
        files.path(key(number)).parent.mkdir(parents=True, exist_ok=True)
        full_folder(files.path(key(number)))
    for number in [*range(5), 0]:
        assert read(files, number) is None
        files.write(key(number), block(number))
    assert not list(tmp_path.rglob(".*")) and files.stored_bytes == 0
    assert len(caplog.records) == 1 and "cannot be removed" in caplog.text
    (files.path(key(0)) / "something").unlink()
    files.write(key(0), block(0))
    assert (read(files, 0) == block(0)).all()


def test_E_3_a_file_that_brought_nothing_and_stays_is_asked_for_no_more_until_it_is_written_again(tmp_path):
    files, index = BlockFiles(tmp_path, SIZE), FoundFiles(str(tmp_path))
    for number in range(2):
        files.write(key(number), block(number))
    index.ordered(1, [Pair(5, key(0)), Pair(6, key(1))], is_load=True)
    index.ended(1, Report(number=1, missed=[5]))
    assert key(0) not in index and key(1) in index
    index.ordered(2, [Pair(5, key(0))], is_load=False)
    index.ended(2, Report(number=2))
    assert key(0) in index
