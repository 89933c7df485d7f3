"""The formatter writes the code, but where its answer would hide what is there: one thing a line for a whole screen."""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

from house import ROOT, files
from patience import patient

MAX_READABLE_LINES = 16  # of a statement as the formatter writes it
MAX_MORE_LINES = 5  # than it has without the formatter
SKIP = re.compile(r"\s*#\s*fmt: ?skip\s*$")


def _skips(text: str) -> Iterator[int]:
    """Lines, from 1, at whose end a comment keeps the formatter away."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and SKIP.match(token.string):
            yield token.start[0]


def _statement(text: str, line: int) -> tuple[int, bool]:
    """Lines of the innermost statement (or its head) that ends there; whether it is a field of a settings' table."""
    found: tuple[int, int, bool] = (0, 0, False)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.stmt):
            body = getattr(node, "body", None)
            end = max(node.lineno, body[0].lineno - 1) if body else node.end_lineno or node.lineno
            is_field = isinstance(node, ast.AnnAssign) and ast.unparse(node.value or node).startswith("setting(")
            if node.lineno <= line <= end and node.lineno >= found[0]:
                found = (node.lineno, end, is_field)
    return found[1] - found[0] + 1, found[2]


def readable(paths: dict[str, str], folder: Path) -> list[str]:
    """name:line of every comment without which the formatter's answer is short. paths: name -> text."""
    cases: list[tuple[str, int, int]] = []
    for name, text in paths.items():
        lines = text.splitlines(keepends=True)
        for line in _skips(text):
            own, is_field = _statement(text, line)
            if not is_field:  # a setting a line or three: a table
                changed = [*lines[: line - 1], SKIP.sub("", lines[line - 1].rstrip("\n")) + "\n", *lines[line:]]
                (folder / f"case{len(cases)}.py").write_text("".join(changed), encoding="utf-8")
                cases.append((f"{name}:{line}", own, len(lines)))
    command = [sys.executable, "-m", "ruff", "format", "-q", "--config", str(ROOT / "pyproject.toml"), str(folder)]
    subprocess.run(command, check=True, timeout=patient(60))
    lengths = [len((folder / f"case{n}.py").read_text(encoding="utf-8").splitlines()) for n in range(len(cases))]
    grown = [(at, own, length - before) for (at, own, before), length in zip(cases, lengths, strict=True)]
    return [at for at, own, more in grown if own + more <= MAX_READABLE_LINES or more <= MAX_MORE_LINES]


def test_a_readable_answer_of_the_formatter_is_taken(tmp_path: Path) -> None:
    texts = {
        path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
        for path in files(".py", under=("src", "tests", "bench", "tools"))
    }
    told = {name: text for name, text in texts.items() if "fmt: skip" in text}
    assert not readable(told, tmp_path), "take the comment away and run `make format`"


def test_whole_passages_are_never_kept_from_it() -> None:
    switch = re.compile(r"^\s*# fmt: ?(on|off)", re.MULTILINE)
    assert not [path for path in files(".py") if switch.search(path.read_text(encoding="utf-8"))]


def test_this_check_can_fail(tmp_path: Path) -> None:
    short = "call(\n    1, 2,\n    3,\n)  # fmt: skip\n"
    numbers = ", ".join(map(str, range(30)))
    long = f"table = [\n    {numbers},\n]  # fmt: skip\n"
    few = "rows = [\n" + "    (1, 'a'),\n" * 20 + "]  # fmt: skip\n"
    assert readable({"own.py": short + long + few}, tmp_path) == ["own.py:4", "own.py:29"]
