"""The source of every kernel, as Triton is told it, beside what Python's own way to find it gives."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")

from octavo.ops.compile import kernel_sources  # noqa: E402

SRC = Path(kernel_sources.__file__).resolve().parents[3]


def test_every_kernel_is_told_as_inspect_tells_it() -> None:
    """Names of kept kernels follow from their source: another one would compile all of them again."""
    compared = 0
    for path in sorted((SRC / "octavo").rglob("*.py")):
        if ".jit" not in path.read_text(encoding="utf-8"):
            continue
        module = importlib.import_module(".".join(path.relative_to(SRC).with_suffix("").parts))
        for found in vars(module).values():
            function = getattr(found, "fn", None)
            if inspect.isfunction(function) and function.__module__ == module.__name__:
                assert kernel_sources.source_lines(function) == inspect.getsourcelines(function), function
                compared += 1
    assert compared > 100


@triton.jit
def _of_a_test(x):  # type: ignore[no-untyped-def]
    return x


def test_functions_of_others_are_left_to_inspect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_sources, "_end", lambda *_: pytest.fail("it was taken for a kernel of this package"))
    assert kernel_sources.source_lines(_of_a_test.fn) == inspect.getsourcelines(_of_a_test.fn)


def test_triton_asks_here_and_finds_all_else_of_inspect() -> None:
    """In a process of its own: it lasts."""
    code = (
        "import inspect, sys\nfrom octavo.ops.compile import kernel_sources\nfrom triton.runtime import JITFunction\n"
        "kernel_sources.read_quickly(); kernel_sources.read_quickly()\n"
        "asked = []\nfind = kernel_sources.source_lines\n"
        "kernel_sources.source_lines = lambda function: asked.append(function) or find(function)\n"
        "from octavo.ops.compile import row_sum\n"
        "kernels = [found for found in vars(row_sum).values() if isinstance(found, JITFunction)]\n"
        "assert kernels and all(kernel.fn in asked for kernel in kernels)\n"
        "assert sys.modules['triton.runtime.jit'].inspect.Parameter is inspect.Parameter\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": str(SRC)}, check=False
    )
    assert result.returncode == 0, result.stderr
