"""Names of the package's kernels in Triton, Gluon and CUDA C++: those that are there, and those that are launched."""

from __future__ import annotations

import ast
import contextlib
import ctypes
import re
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

OPS = Path(__file__).resolve().parents[2] / "src/octavo/ops"
_GLOBAL = re.compile(r"__global__ void (?:__launch_bounds__\([^)]*\) )?(\w+)\(")


def launched_kernels() -> set[str]:
    """Names below `octavo.ops` of kernels that the host launches: in CUDA C++, or Triton's that no other one uses."""
    kernels: dict[str, set[str]] = {}
    used: set[str] = set()
    for path in sorted(OPS.rglob("*.py")):
        module = ".".join(path.relative_to(OPS).with_suffix("").parts)
        tree = ast.parse(path.read_text(encoding="utf-8"))
        places = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("octavo.ops."):
                source = (node.module or "").removeprefix("octavo.ops.")
                places |= {alias.asname or alias.name: f"{source}.{alias.name}" for alias in node.names}
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and {"triton.jit", "gluon.jit"} & {*map(_name, node.decorator_list)}:
                inner = {one.id for one in ast.walk(node) if isinstance(one, ast.Name)} - {node.name}
                kernels[f"{module}.{node.name}"] = {places.get(name, f"{module}.{name}") for name in inner}
    for names in kernels.values():
        used |= names
    return set(kernels) - used | cuda_kernels()


def cuda_kernels() -> set[str]:
    """Those in CUDA C++."""
    found: set[str] = set()
    for path in OPS.rglob("*.cu"):
        module = ".".join(path.relative_to(OPS).with_suffix("").parts)
        found |= {f"{module}.{name}" for name in _GLOBAL.findall(path.read_text())}
    return found


def _name(decorator: ast.expr) -> str:
    if isinstance(decorator, ast.Call):
        return _name(decorator.args[0] if ast.unparse(decorator.func) == "launched" else decorator.func)
    return ast.unparse(decorator)


@contextlib.contextmanager
def recorded_launches() -> Iterator[set[str]]:
    """The names below `octavo.ops` of the kernels that are launched within."""
    from triton.runtime.jit import JITFunction

    from octavo.ops.compile import driver
    from octavo.ops.compile.launch import Direct

    seen, run = set(), JITFunction.run

    def recorded(self, *args, **options):
        seen.add(f"{self.fn.__module__}.{self.fn.__name__}".removeprefix("octavo.ops."))
        return run(self, *args, **options)

    def noted(launch):
        def noting(function, *args):
            name = ctypes.c_char_p()
            driver.call("cuFuncGetName", ctypes.byref(name), ctypes.c_void_p(function))
            seen.update(full for full in cuda_kernels() if full.endswith(f".{name.value.decode()}"))
            launch(function, *args)

        return noting

    with (
        mock.patch.object(JITFunction, "run", recorded),
        mock.patch.object(Direct, "__getitem__", _by_triton),
        mock.patch.object(driver, "launch", noted(driver.launch)),
        mock.patch.object(driver, "launch_chained", noted(driver.launch_chained)),
    ):
        yield seen


def _by_triton(kernel, grid):
    return kernel.kernel[grid]
