"""Rewrites the assertions of all tests ahead of pytest, and keeps the result where pytest looks for it.

Each of pytest's processes would do it again: it was half of what collecting took them, and where Python is told to keep
no bytecode they do it in every run. A file of which pytest has an up-to-date result is left alone.
"""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import SimpleNamespace

from _pytest.assertion.rewrite import PYC_TAIL, _read_pyc, _rewrite_test, _write_pyc, get_cache_dir, try_makedirs

TESTS = Path(__file__).resolve().parents[1] / "tests"


def rewrite(path: Path) -> None:
    """As pytest's import hook does, but for the import."""
    folder = get_cache_dir(path)
    result = folder / f"{path.stem}{PYC_TAIL}"
    if _read_pyc(path, result) is None and try_makedirs(folder):
        version, code = _rewrite_test(path, None)  # type: ignore[arg-type]
        _write_pyc(SimpleNamespace(trace=print), code, version, result)  # type: ignore[arg-type]


def main() -> None:
    """By all processors, the longest files first."""
    paths = [path for pattern in ("test_*.py", "conftest.py") for path in TESTS.rglob(pattern)]
    paths.sort(key=lambda path: -path.stat().st_size)
    with ProcessPoolExecutor() as processes:
        list(processes.map(rewrite, paths, chunksize=8))


if __name__ == "__main__":
    main()
