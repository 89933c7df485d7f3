"""What the house tests share: the repository's files, its modules, and the names that they define."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SRC = ROOT / "src"
_SKIPPED = {
    ".git",
    ".venv",
    ".venv-clients",
    "build",
    "dist",
    "__pycache__",
    ".pytest_cache",
    ".mypy_cache",
    ".ruff_cache",
    ".hypothesis",
}


def files(*suffixes: str, under: tuple[str, ...] = ("",)) -> list[Path]:
    """Files of the repository with one of the suffixes, sorted."""
    found = []
    for folder in under:
        for path in sorted((ROOT / folder).rglob("*")):
            skipped = _SKIPPED.intersection(path.relative_to(ROOT).parts) or ".egg-info" in path.as_posix()
            if path.is_file() and path.suffix in suffixes and not skipped:
                found.append(path)
    return found


def name_of(path: Path) -> str:
    """The dotted name of a module under src."""
    parts = path.relative_to(SRC).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def modules() -> dict[str, Path]:
    """Dotted name -> file, for every module of the package."""
    return {name_of(path): path for path in files(".py", under=("src",))}


@functools.cache
def tree(path: Path) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


@functools.cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """All nodes of a file's syntax tree."""
    return tuple(ast.walk(tree(path)))


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """(dotted name, line) of every import, wherever it stands; `from a import b` gives a.b where that is a module."""
    for node in nodes(path):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            for alias in node.names:
                full = f"{base}.{alias.name}"
                yield (full if full in modules() else base), node.lineno


def where(path: Path, line: int) -> str:
    """path:line, for messages."""
    return f"{path.relative_to(ROOT)}:{line}"


def defined_names(body: list[ast.stmt]) -> dict[str, ast.stmt]:
    """Names that a module or class body defines, and the statement that does (attributes set on self included)."""
    found: dict[str, ast.stmt] = {}
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found[node.name] = node
            if not isinstance(node, ast.ClassDef):
                for inner in ast.walk(node):
                    if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store):
                        found.setdefault(inner.attr, node)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                for inner in ast.walk(target):
                    if isinstance(inner, ast.Name):
                        found[inner.id] = node
        elif isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                found[(alias.asname or alias.name).partition(".")[0]] = node
        elif isinstance(node, ast.If | ast.Try):
            found.update(defined_names(node.body))
    return found
