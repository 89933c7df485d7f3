"""Triton is named as it names itself, and not summed up again while its files are the same."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("triton")
from triton.runtime import cache

from octavo.ops.compile import fingerprint


@pytest.fixture
def summed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """The names that a Triton of two files gave itself."""
    names: list[str] = []
    package = tmp_path / "triton"
    (package / "_C" / "__pycache__").mkdir(parents=True)
    for part in ("__init__.py", "_C/libtriton.so"):
        (package / part).write_text(part)
    monkeypatch.setattr(fingerprint, "triton", SimpleNamespace(__file__=str(package / "__init__.py"), __version__="1"))
    monkeypatch.setattr(fingerprint, "cache", SimpleNamespace())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "kept"))
    return names


def _name_of_a_process(names: list[str]) -> str:
    def triton_key() -> str:
        names.append(f"name {len(names)}")
        return names[-1]

    fingerprint.cache.triton_key = triton_key
    for _ in range(2):
        fingerprint.name_compiler()
    return fingerprint.cache.triton_key()


def test_a_name_is_kept_until_a_file_changes(summed: list[str], tmp_path: Path) -> None:
    library = tmp_path / "triton" / "_C" / "libtriton.so"
    assert [_name_of_a_process(summed) for _ in range(2)] == ["name 0"] * 2
    (library.parent / "__pycache__" / "a.pyc").write_text("compiled")
    assert _name_of_a_process(summed) == "name 0"
    library.write_text("longer than before")
    assert _name_of_a_process(summed) == "name 1"
    os.utime(library, ns=(0, library.stat().st_mtime_ns + 1))
    assert _name_of_a_process(summed) == "name 2"
    (library.parent / "another.so").write_text("")
    assert _name_of_a_process(summed) == "name 3"
    fingerprint.triton.__version__ = "2"
    assert _name_of_a_process(summed) == "name 4"
    assert len(summed) == 5


def test_another_triton_names_itself(summed: list[str]) -> None:
    fingerprint.name_compiler()
    assert not vars(fingerprint.cache) and not summed


def test_the_name_is_tritons_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    own = getattr(cache.triton_key, "__wrapped__", None)
    if own is None:  # this process knows its kept name: what it follows from is seen above
        pytest.skip("Triton was named before")
    expected = own()
    monkeypatch.setattr(cache, "triton_key", own)
    for _ in range(2):
        fingerprint.name_compiler()
        assert cache.triton_key() == expected
        monkeypatch.setattr(cache, "triton_key", own)
