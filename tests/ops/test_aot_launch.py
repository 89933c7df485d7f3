"""What is kept of a compiled call: the rules of its grids, the file, and what a launch is given. None is real."""

from __future__ import annotations

import dataclasses
import errno
import json
import logging
import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from octavo.ops.compile import aot_launch, disk_cache
from octavo.ops.compile.aot_launch import Form, NotCacheable, _grid_rule, _Kernel, _rule, read, write

COUNTS = (2, 3, 67)
KERNEL = _Kernel(
    name="attend",
    machine_code=bytes(range(256)),
    threads=32,
    shared=37120,
    grid=((1, 0, 1), (0, 1, 1), (8, 0, 1)),
    params=((8, "input", 1), (8, "buffer", 0), (4, "number", (0, 1, 1)), (8, "number", (0, 0, 1))),
)
SCALE = dataclasses.replace(
    KERNEL,
    name="scale",
    grid=((0, 128, 256), (1, 0, 1), (1, 0, 1)),
    params=((8, "buffer", 1), (8, "buffer", 0), (4, "number", (0, 128, 1)), (4, "number", (7, 0, 1))),
)
FORM = Form((KERNEL, SCALE), (("bfloat16", ((0, 1, 1), (16, 0, 1))), ("float32", ((0, 2, 1),))), 2, 1)
KEY = ["a key", [1, "two", True]]


@pytest.mark.parametrize(
    ("values", "multiples", "rule"),
    [
        ((8, 8, 8), {1}, (8, 0, 1)),
        ((2, 3, 67), {1}, (0, 1, 1)),
        ((16, 24, 536), {1}, (0, 8, 1)),
        ((1, 2, 34), {128}, (0, 128, 256)),
        ((1, 1, 9), {128}, (0, 128, 1024)),
    ],
)
def test_grids_follow_from_the_count(values, multiples, rule) -> None:
    found = _grid_rule(values, COUNTS, multiples)
    for count in range(2, 70_000, 7):
        assert aot_launch._apply(found, count) == aot_launch._apply(rule, count)


def test_what_follows_in_no_way_or_in_two_is_refused() -> None:
    with pytest.raises(NotCacheable, match="do not follow from"):
        _rule((2, 4, 67), COUNTS)
    with pytest.raises(NotCacheable, match="do not follow from"):
        _grid_rule((1, 2, 5), COUNTS, {1, 128})
    with pytest.raises(NotCacheable, match="in two ways"):
        _grid_rule((1, 1, 2), COUNTS, {60, 100})


def test_a_file_gives_back_what_was_kept(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "x.json"
    assert read(path, KEY) is None
    write(path, KEY, FORM)
    assert read(path, KEY) == FORM
    assert [one.name for one in path.parent.iterdir()] == ["x.json"]


def test_files_that_are_not_used_go_when_another_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def names() -> set[str]:
        return {file.name for file in tmp_path.iterdir()}

    monkeypatch.setattr(disk_cache, "_MAX_FILES", 3)
    ages = {"old": 91, "old but read": 91, "young": 89}
    for name in ages:
        write(tmp_path / name, KEY, FORM)
    for name, days in ages.items():
        os.utime(tmp_path / name, (time.time() - days * 86400,) * 2)
    assert read(tmp_path / "old but read", KEY) == FORM
    write(tmp_path / "new", KEY, FORM)
    assert names() == {"old but read", "young", "new"}
    write(tmp_path / "newer", KEY, FORM)
    assert names() == {"old but read", "new", "newer"}, "of more than there may be, the one used longest ago goes"


def test_what_cannot_be_written_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path / "x.json", KEY, FORM)
    assert not list(tmp_path.iterdir())


def test_files_that_others_remove_meanwhile_are_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = [tmp_path / "gone", tmp_path / "gone too"]
    listed = Path.iterdir
    monkeypatch.setattr(Path, "iterdir", lambda folder: [*listed(folder), *gone])
    write(tmp_path / "x.json", KEY, FORM)
    assert read(tmp_path / "x.json", KEY) == FORM


@pytest.mark.parametrize("damage", ["", "[]", "{}", "half", "a digit", "another key", "another format"])
def test_a_damaged_file_is_told_and_not_used(damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "x.json"
    write(path, KEY, FORM)
    whole = path.read_text()
    if damage == "another format":
        body = [KEY, {"kernels": [{"name": "attend"}]}]
        text = f"{disk_cache.sum_of(json.dumps(body))}\n{json.dumps(body)}\n"
    else:
        texts = {"half": whole[: len(whole) // 2], "a digit": whole.replace("37120", "37121"), "another key": whole}
        text = texts.get(damage, damage)
    assert damage == "another key" or text != whole
    path.write_text(text)
    with caplog.at_level(logging.WARNING):
        assert read(path, ["other"] if damage == "another key" else KEY) is None
    assert f"{path} is damaged" in caplog.text


def test_launches_that_no_wanted_result_depends_on_are_left_out() -> None:
    def touching(*buffers: int):
        return dataclasses.replace(KERNEL, params=((8, "input", 0), *((8, "buffer", i) for i in buffers)))

    attend_and_scale = touching(0, 2), touching(2, 1)
    assert [aot_launch._needed(attend_and_scale, n) for n in (1, 2)] == [[0], [0, 1]]
    assert aot_launch._needed((touching(0, 1), touching(1)), 1) == [0], "the second changes its result in place"
    assert aot_launch._needed((touching(2), touching(3), touching(3, 2), touching(2, 0)), 1) == [0, 1, 2, 3]


def test_a_launch_is_given_live_addresses_and_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = []

    def launch(function, grid, threads, shared, stream, params):
        kernel = {1: KERNEL, 2: SCALE}[function]
        size = {8: aot_launch.ctypes.c_uint64, 4: aot_launch.ctypes.c_uint32}
        values = [size[kept[0]].from_address(params[i]).value for i, kept in enumerate(kernel.params)]
        launched.append((kernel.name, grid, threads, shared, stream, values))

    def load(code, name, shared):
        assert (code, shared) == (KERNEL.machine_code, KERNEL.shared)
        return {"attend": 1, "scale": 2}[name]

    driver = SimpleNamespace(active=SimpleNamespace(get_current_stream=lambda device: 99))
    monkeypatch.setattr(aot_launch, "driver", SimpleNamespace(load=load, launch=launch))
    monkeypatch.setattr(aot_launch, "triton", SimpleNamespace(runtime=SimpleNamespace(driver=driver)))
    ready = aot_launch.Launch(FORM, torch.device("cpu", 0))
    for count, inputs in ((2, [160, 320]), (5, [480, 640])):
        (out,) = ready(inputs, count)
        assert out.shape == (count, 16) and out.dtype == torch.bfloat16
        attend, scale = launched[-2:]
        assert attend == ("attend", (1, count, 8), 32, 37120, 99, [inputs[1], out.data_ptr(), count, 0])
        assert scale[1] == (-(-128 * count // 256), 1, 1) and scale[5][1:] == [out.data_ptr(), 128 * count, 7]
        assert scale[5][0] not in (0, out.data_ptr())
