"""README.md and docs name only what exists: paths, dotted names, classes, functions, flags, make targets."""

from __future__ import annotations

import ast
import builtins
import functools
import re
from pathlib import Path

import pytest

from house import ROOT, SRC, defined_names, files, modules, tree
from octavo.cli.flags import sampling_kinds
from octavo.config.engine_config import SETTINGS
from octavo.config.settings import flag_name
from octavo.router.settings import ROUTER_SETTINGS
from octavo.serve.settings import SERVE_SETTINGS

DOCS = [ROOT / "README.md", *files(".md", under=("docs",))]
_TOP = ("src", "docs", "tests", "tools", "bench", ".ci")
# Names of others that docs may use as they are.
FOREIGN = {
    "SupportsHMA",
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "FlexAttention",
    "Qwen3ForCausalLM",
    "HF_HUB_OFFLINE",
    "HF_HOME",
    "HF_TOKEN",
}


def _relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _code_spans(text: str) -> list[str]:
    without_blocks = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    return [span.strip() for span in re.findall(r"`([^`\n]+)`", without_blocks)]


def _command_lines(text: str) -> list[str]:
    blocks = re.findall(r"```[a-z]*\n(.*?)```", text, flags=re.DOTALL)
    lines = [line.strip().removeprefix("$ ") for block in blocks for line in block.splitlines()]
    return [line for line in lines + _code_spans(text) if re.match(r"(\S*/)?octavo |make ", line)]


@functools.cache
def _index() -> dict[str, list[ast.stmt]]:
    """Top-level name -> the statements that define it, anywhere in the package."""
    found: dict[str, list[ast.stmt]] = {}
    for path in modules().values():
        for name, node in defined_names(tree(path).body).items():
            found.setdefault(name, []).append(node)
            if isinstance(node, ast.ClassDef):
                for method, inner in defined_names(node.body).items():
                    found.setdefault(method, []).append(inner)
    return found


@functools.cache
def _members(node: ast.ClassDef) -> set[str]:
    """What a class defines, slots and inherited names of the package's own classes included."""
    names = set(defined_names(node.body))
    names |= {item.value for item in ast.walk(node) if isinstance(item, ast.Constant) and isinstance(item.value, str)}
    for base in node.bases:
        for parent in _index().get(ast.unparse(base).rpartition(".")[2], []):
            if isinstance(parent, ast.ClassDef) and parent is not node:
                names |= _members(parent)
    return names


def _exists_in_package(dotted: str) -> bool:
    """octavo.a.b.Name.member: a module, or a name in one, or a member of a class in one."""
    parts = dotted.split(".")
    for length in range(len(parts), 0, -1):
        module = ".".join(parts[:length])
        if module not in modules():
            continue
        rest = parts[length:]
        if not rest:
            return True
        names = defined_names(tree(modules()[module]).body)
        if rest[0] not in names:
            return False
        node = names[rest[0]]
        return len(rest) == 1 or not isinstance(node, ast.ClassDef) or rest[1] in _members(node)
    return False


def _path_exists(name: str) -> bool:
    return any((base / name).exists() or list(base.glob(name)) for base in (ROOT, SRC / "octavo"))


def _is_known(span: str) -> bool:
    """Whether a code span that looks like a name of ours is one. Anything else passes."""
    if span in FOREIGN:
        return True
    span = re.sub(r"\(.*\)$", "()", span)
    name = span.removesuffix("()")
    if re.fullmatch(r"[\w./*-]+/[\w./*-]*|[\w-]+\.(py|md|toml|txt|cpp|h|json|safetensors)", span):
        outside = "/" in span and span.split("/")[0] not in _TOP and not (SRC / "octavo" / span.split("/")[0]).exists()
        return outside or _path_exists(span) or bool(list(SRC.glob(f"octavo/assets/*/{span}")))
    if re.fullmatch(r"octavo(\.\w+)+", name):
        return _exists_in_package(name)
    if re.fullmatch(r"[A-Z][A-Za-z0-9]*[a-z][A-Za-z0-9]*(\.\w+)?", name):
        first, _, member = name.partition(".")
        if first in FOREIGN or hasattr(builtins, first):
            return True
        nodes = _index().get(first, [])
        classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
        return bool(nodes) and (not member or any(member in _members(node) for node in classes))
    if span.endswith("()") and re.fullmatch(r"\w+", name):
        return name in _index() or hasattr(builtins, name)
    if re.fullmatch(r"--[\w.-]+", span):
        return _flag_exists(span)
    return True


@functools.cache
def _flags() -> set[str]:
    known = {flag_name(name) for name in (*SETTINGS, *SERVE_SETTINGS, *ROUTER_SETTINGS, *sampling_kinds())}
    for module in (
        "cli/main",
        "cli/terminal",
        "cli/doctor",
        "cli/flags",
        "bench/engine",
        "bench/reproducibility",
        "bench/connectors",
        "router/main",
    ):
        for node in ast.walk(tree(SRC / "octavo" / f"{module}.py")):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"--[\w-]+", node.value):
                known.add(node.value)
    for path in files(".py", under=("tools", "bench")):
        known |= set(re.findall(r'"(--[\w-]+)"', path.read_text(encoding="utf-8")))
    return known


def _flag_exists(flag: str) -> bool:
    flag = flag.partition("=")[0].partition(".")[0]
    return flag in _flags() or "--" + flag.removeprefix("--no-") in _flags()


@pytest.mark.parametrize("path", DOCS, ids=_relative)
def test_docs_name_only_what_exists(path: Path) -> None:
    unknown = [span for span in _code_spans(path.read_text(encoding="utf-8")) if not _is_known(span)]
    assert not unknown


@pytest.mark.parametrize("path", DOCS, ids=_relative)
def test_commands_in_docs_use_flags_and_targets_that_exist(path: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    for line in _command_lines(path.read_text(encoding="utf-8")):
        words = re.sub(r"'[^']*'|\"[^\"]*\"", "TEXT", line.partition("#")[0]).split()
        if words[0] == "make":
            assert words[1].isupper() or words[1].partition("=")[0].isupper() or words[1] in targets, line
            continue
        wrong = [word for word in words if word.startswith("--") and len(word) > 2 and not _flag_exists(word)]
        assert not wrong, line


@pytest.mark.parametrize("path", DOCS, ids=_relative)
def test_links_in_docs_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", path.read_text(encoding="utf-8")):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        page = path.parent / name if name else path
        assert page.exists(), target
        assert not anchor or anchor in _anchors(page), target


def _anchors(page: Path) -> set[str]:
    """What a page's headings are called in links."""
    heads = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("path", DOCS, ids=_relative)
def test_docs_say_what_is_true_now(path: Path) -> None:
    """A figure's commit is told in notes/, beside its neighbours: a page that names one is about another day."""
    text = path.read_text(encoding="utf-8")
    assert not [word for word in re.findall(r"\b[0-9a-f]{7,40}\b", text) if re.search(r"\d", word)]


@pytest.mark.parametrize(
    ("span", "known"),
    [
        ("octavo.config.engine_config.resolve", True),
        ("octavo.config.engine_config.no_such_name", False),
        ("EngineConfig.model", True),
        ("EngineConfig.no_such_field", False),
        ("NoSuchClass", False),
        ("no_such_function()", False),
        ("src/octavo/config/engine_config.py", True),
        ("src/octavo/no_such_file.py", False),
        ("--max-model-len", True),
        ("--no-such-flag", False),
    ],
)
def test_this_check_can_fail(span: str, known: bool) -> None:
    assert _is_known(span) is known
