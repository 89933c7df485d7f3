"""What comparisons of a GPU's kernels found, kept: what an answer follows from, and when it is not trusted. No GPU."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from octavo.ops.compile import disk_cache, nvrtc, validation_cache
from octavo.ops.compile.driver import DriverError

DEVICE = torch.device("cuda", 0)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """What the machine's facts are: to be changed."""
    told = ["a library"]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(validation_cache, "_facts", lambda device: list(told))
    return told


class Asked:
    """A comparison that finds `answer`, and how often it was made."""

    def __init__(self, answer: bool = True) -> None:
        self.answer, self.times = answer, 0

    def __call__(self) -> bool:
        self.times += 1
        return self.answer


@pytest.mark.parametrize("answer", [True, False])
def test_an_answer_is_kept_for_what_was_compared(answer: bool, machine: list[str]) -> None:
    asked = Asked(answer)
    for _ in range(2):
        assert validation_cache.holds(["a kernel", 1], DEVICE, asked) is answer
    assert asked.times == 1
    for what in (["a kernel", 2], ["another", 1], ["a kernel", 1, 1]):
        assert validation_cache.holds(what, DEVICE, asked) is answer
    assert asked.times == 4


def test_another_machine_compares_anew_and_one_that_cannot_be_told_always(machine: list[str]) -> None:
    asked = Asked()
    for facts, times in ((["a library"], 1), (["another"], 2), (["another"], 2), ([], 3), ([], 4)):
        machine[:] = facts
        assert validation_cache.holds(["a kernel"], DEVICE, asked)
        assert asked.times == times, facts


def test_a_damaged_answer_is_told_and_given_anew(
    machine: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    asked = Asked(answer=False)
    assert not validation_cache.holds(["a kernel"], DEVICE, asked)
    (path,) = (tmp_path / "octavo" / "products").iterdir()
    path.write_text(path.read_text().replace("false", "true"))
    with caplog.at_level(logging.WARNING):
        assert not validation_cache.holds(["a kernel"], DEVICE, asked)
    assert asked.times == 2
    assert f"{path} is damaged" in caplog.text
    assert not validation_cache.holds(["a kernel"], DEVICE, asked)
    assert asked.times == 2


@pytest.mark.parametrize("whose", ["anybody's", "another user's"])
def test_a_file_that_another_user_could_have_written_is_not_used(
    whose: str, machine: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked = Asked()
    assert validation_cache.holds(["a kernel"], DEVICE, asked)
    (path,) = (tmp_path / "octavo" / "products").iterdir()
    own = path.stat().st_uid
    if whose == "anybody's":
        path.chmod(0o622)
    else:
        monkeypatch.setattr(disk_cache, "_SYSTEM", own + 1)
        monkeypatch.setattr("os.geteuid", lambda: own + 2)
    assert validation_cache.holds(["a kernel"], DEVICE, asked)
    assert asked.times == 2
    assert f"{path} is damaged or not one's own (another user may have written it)" in caplog.text


def test_a_comparison_that_fails_is_made_again(machine: list[str]) -> None:
    asked = Asked()

    def fails() -> bool:
        asked()
        raise DriverError("no memory")

    for _ in range(2):
        with pytest.raises(DriverError):
            validation_cache.holds(["a kernel"], DEVICE, fails)
    assert asked.times == 2


def test_what_a_kept_answer_follows_from(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each fact, once there is a library and a driver that can be named."""

    def facts() -> list[Any]:
        return validation_cache._facts(DEVICE)

    properties = {"name": "a GPU", "major": 9, "minor": 0, "multi_processor_count": 132}
    driver = tmp_path / "version"
    library = SimpleNamespace(cublasLtGetVersion=lambda: 1)
    monkeypatch.setattr(validation_cache.ctypes, "CDLL", lambda name: library)
    monkeypatch.setattr(validation_cache, "_DRIVER", driver)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(**properties))
    assert not facts(), "the driver tells no version"
    driver.write_text("570")
    seen = [facts()]
    assert facts() == seen[0] != []
    library.cublasLtGetVersion = lambda: 2
    seen.append(facts())
    driver.write_text("571")
    seen.append(facts())
    properties["multi_processor_count"] = 66
    seen.append(facts())
    monkeypatch.setenv("CUBLASLT_WORKSPACE_SIZE", "1")
    seen.append(facts())
    monkeypatch.setattr(validation_cache.disk_cache, "versions", lambda: ["another torch"])
    seen.append(facts())
    monkeypatch.setattr(validation_cache, "_sources", lambda: "others")
    seen.append(facts())
    assert all(one != other for place, one in enumerate(seen) for other in seen[:place])
    del library.cublasLtGetVersion
    assert not facts(), "the library tells no version"


def test_sources_are_all_that_compute_or_launch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiles = tmp_path / "ops" / "compile"
    compiles.mkdir(parents=True)
    (tmp_path / "states").mkdir()
    monkeypatch.setattr(validation_cache, "__file__", str(compiles / "validation_cache.py"))
    seen = []
    for name, text in (
        ("ops/a.py", "1"),
        ("ops/compile/a.py", "2"),
        ("ops/b.cu", "1"),
        ("states/b.py", "2"),
        ("ops/c.so", "1"),
        ("others.py", "1"),
    ):
        (tmp_path / name).write_text(text)
        validation_cache._sources.cache_clear()
        seen.append(validation_cache._sources())
    validation_cache._sources.cache_clear()
    assert len(set(seen)) == 4
    assert seen[3] == seen[4] == seen[5]


def test_machine_code_that_is_kept_counts_as_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(nvrtc, "compile_cubin", lambda *_: b"code")
    assert not nvrtc.is_cached("a", {"N": 1}, "x")
    nvrtc.machine_code("a", {"N": 1}, "x")
    (path,) = (tmp_path / "octavo" / "cuda").iterdir()
    before = path.stat().st_mtime_ns
    assert nvrtc.is_cached("a", {"N": 1}, "x")
    assert path.stat().st_mtime_ns > before
    assert not nvrtc.is_cached("a", {"N": 2}, "x")
