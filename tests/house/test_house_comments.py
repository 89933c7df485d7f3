"""Comments and docstrings name only modules, and names in them, that exist: moves take the words about them along."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from house import SRC, defined_names, modules, name_of, tree, where

FOLDERS = sorted({path.parent for path in modules().values()})
_TOP = {name.split(".")[1] for name in modules() if "." in name}
_DOTTED = re.compile(r"(?<![\w./`'\"])`?((?:octavo\.)?[a-z_]\w*(?:\.[A-Za-z_]\w*)+)(?![\w/-])")
_FILES = re.compile(r"\.(py|md|json|cpp|cu|h|sh|jinja|yaml|safetensors|model|html)$")


def _texts(path: Path) -> Iterator[tuple[int, str]]:
    """(line, text) of every comment and docstring."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield getattr(node, "lineno", 1), ast.get_docstring(node, clean=False) or ""
    for token in tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def _exists(dotted: str) -> bool:
    """A module, or a name in one, one that a package hands on by its name included."""
    parts = dotted.split(".")
    for length in range(len(parts), 0, -1):
        path = modules().get(".".join(parts[:length]))
        if path is not None:
            rest = parts[length:]
            text = path.read_text(encoding="utf-8")
            return not rest or rest[0] in defined_names(tree(path).body) or f'"{rest[0]}"' in text
    return False


def _is_variable(path: Path, name: str) -> bool:
    """Whether code of the file has a variable, a parameter or an attribute of that name."""
    found = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Name | ast.arg | ast.Attribute):
            found.add(getattr(node, "id", getattr(node, "arg", getattr(node, "attr", ""))))
        elif isinstance(node, ast.AnnAssign):
            found.add(ast.unparse(node.target))
    return name in found


def unknown(path: Path, own: str, texts: Iterator[tuple[int, str]]) -> list[tuple[int, str]]:
    """Names that begin as a folder or module of the package does, and lead nowhere. own: the file's own dotted name."""
    found = []
    folders = [own.rsplit(".", count)[0] for count in range(own.count(".") + 1)]
    for line, text in texts:
        for name in _DOTTED.findall(text):
            plain = name.removeprefix("octavo.")
            first = plain.split(".")[0]
            if _FILES.search(name) or (name == plain and (first not in _TOP or _is_variable(path, first))):
                continue
            if not any(_exists(f"{folder}.{plain}") for folder in {*folders, "octavo"}):
                found.append((line, name))
    return found


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.relative_to(SRC).as_posix())
def test_comments_name_only_modules_that_exist(folder: Path) -> None:
    left = []
    for path in sorted(folder.glob("*.py")):
        left += [f"{where(path, line)}: {name}" for line, name in unknown(path, name_of(path), _texts(path))]
    assert not left


def test_this_check_can_fail() -> None:
    path = modules()["octavo.layers.linear"]
    texts = (
        "see `ops.matmul`",
        "ops.gone.draw",
        "`octavo.nowhere`",
        "as ops.gemm.linear, `layers.norm.RMSNorm`, norm.py",
    )
    found = unknown(path, "octavo.layers.linear", iter(enumerate(texts)))
    assert found == [(0, "ops.matmul"), (1, "ops.gone.draw"), (2, "octavo.nowhere")]
