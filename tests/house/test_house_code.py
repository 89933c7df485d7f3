"""Sizes, docstrings, and what no file may contain."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

from house import ROOT, SRC, files, modules, nodes, tree, where
from octavo.config.engine_config import SETTINGS
from octavo.config.environment import ENVIRONMENT, SERVER_ENVIRONMENT
from octavo.serve.settings import SERVE_SETTINGS

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60
MAX_KERNEL_LINES = 120
MAX_SETTINGS = 60

CODE = [*files(".py", under=("src", "tests", "bench", "tools")), ROOT / "setup.py"]
SHIPPED = [path for path in CODE if "tests" not in path.relative_to(ROOT).parts]

BANNED_MODULES = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "transformers"}
MAY_IMPORT_TRANSFORMERS = {"bench", "tools"}
BANNED_CALLS = {
    "eval",
    "exec",
    "compile",
    "__import__",
    "torch.load",
    "yaml.load",
    "yaml.full_load",
    "yaml.unsafe_load",
    "yaml.load_all",
    "yaml.full_load_all",
    "yaml.unsafe_load_all",
    "os.system",
    "os.popen",
    "subprocess.getoutput",
}
# Written in two parts, so that this file does not match itself.
BANNED_TEXTS = [
    "TO" + "DO",
    "FIX" + "ME",
    "X" + "XX",
    "NotImplemented" + "Error",
    "/" + "work/",
    "../" + "shared",
    "0.0." + "0.0",
]
WORKPLACE = ["/" + "work/", "../" + "shared", "brief" + ".md", ".lib" + "rary/", "/opt/" + "wheels", "/opt/" + "pypi"]


def _relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_files_fit_in_the_head() -> None:
    counted = CODE + files(".cpp", ".h", ".cu", under=("src",))
    lengths = {_relative(path): len(path.read_text(encoding="utf-8").splitlines()) for path in counted}
    assert {name: length for name, length in lengths.items() if length > MAX_FILE_LINES} == {}


def test_functions_fit_on_a_screen() -> None:
    long = []
    for path in CODE:
        for node in nodes(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                kernel = any(re.search(r"triton|gluon", ast.unparse(mark)) for mark in node.decorator_list)
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > (MAX_KERNEL_LINES if kernel else MAX_FUNCTION_LINES):
                    long.append(f"{where(path, node.lineno)}: {node.name} has {length} lines")
    assert not long


def test_every_module_says_what_it_is() -> None:
    empty = {path for path in CODE if path.name == "__init__.py" and not path.read_text(encoding="utf-8").strip()}
    assert not [_relative(path) for path in CODE if path not in empty and not ast.get_docstring(tree(path))]


def _dotted(node: ast.expr) -> str:
    return ast.unparse(node) if isinstance(node, ast.Name | ast.Attribute) else ""


def _unpickles(path: Path, node: ast.AST) -> bool:
    """Whether it imports or calls what makes code of data, in one of the ways that no file may."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        in_tools = path.relative_to(ROOT).parts[0] in MAY_IMPORT_TRANSFORMERS
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
        found = {name.partition(".")[0] for name in names} & BANNED_MODULES
        return bool(found - ({"transformers"} if in_tools else set()))
    if not isinstance(node, ast.Call):
        return False
    named = {keyword.arg: keyword.value for keyword in node.keywords}
    shell = "shell" in named and not (isinstance(named["shell"], ast.Constant) and not named["shell"].value)
    return _dotted(node.func) in BANNED_CALLS or shell or "trust_remote_code" in named


def test_nothing_is_unpickled_or_evaluated() -> None:
    found = [
        where(path, getattr(node, "lineno", 0)) for path in SHIPPED for node in nodes(path) if _unpickles(path, node)
    ]
    assert not found


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("import pickle", True),
        ("from marshal import loads", True),
        ("import transformers", True),
        ("eval(text)", True),
        ("torch.load(path)", True),
        ("run(command, shell=True)", True),
        ("run(command, shell=False)", False),
        ("load(path, trust_remote_code=False)", True),
        ("import json", False),
        ("model.eval()", False),
    ],
)
def test_what_makes_code_of_data_is_seen(line: str, found: bool) -> None:
    own = SRC / "octavo" / "llm.py"
    assert any(_unpickles(own, node) for node in ast.walk(ast.parse(line))) is found


def test_waits_for_a_whole_device_stand_in_one_place() -> None:
    """Where they take turns with captures, which they would break."""
    places = [path for path in SRC.rglob("*.py") if "cuda.synchronize(" in path.read_text()]
    own = [path.relative_to(SRC).as_posix() for path in places if path.relative_to(SRC).parts[1] != "bench"]
    assert own == ["octavo/ops/captures.py"]


def test_no_banned_words() -> None:
    texts = {_relative(path): path.read_text(encoding="utf-8") for path in SHIPPED}
    assert not [(name, word) for name, text in texts.items() for word in BANNED_TEXTS if word in text]


def test_comments_are_ascii() -> None:
    found = []
    for path in SHIPPED:
        text = path.read_text(encoding="utf-8")
        if not text.isascii():
            tokens = tokenize.generate_tokens(io.StringIO(text).readline)
            comments = [token for token in tokens if token.type == tokenize.COMMENT]
            found += [where(path, token.start[0]) for token in comments if not token.string.isascii()]
    assert not found


def test_nothing_names_this_workplace() -> None:
    paths = files(".py", ".md", ".toml", ".txt", ".cpp", ".h", ".json", ".jinja", ".yaml", "", under=("",))
    for path in paths:
        if path.stat().st_size < 1 << 20 and path.name != "LICENSE":
            text = path.read_text(encoding="utf-8", errors="replace")
            assert not [word for word in WORKPLACE if word in text], path


def test_every_environment_variable_stands_for_a_setting() -> None:
    named = set()
    for path in modules().values():
        named |= set(re.findall(r"\bOCTAVO_[A-Z_]+\b", path.read_text(encoding="utf-8")))
    assert named <= set(ENVIRONMENT) | set(SERVER_ENVIRONMENT)
    assert set(ENVIRONMENT.values()) <= set(SETTINGS)
    assert set(SERVER_ENVIRONMENT.values()) <= set(SERVE_SETTINGS)


def test_settings_stay_few_and_explained() -> None:
    assert len(SETTINGS) <= MAX_SETTINGS and len(SERVE_SETTINGS) <= MAX_SETTINGS
    assert all(fact.help for fact in [*SETTINGS.values(), *SERVE_SETTINGS.values()])
    assert not set(SETTINGS) & set(SERVE_SETTINGS), "one name, one flag"


def test_the_licence_is_there() -> None:
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in text and "Version 2.0, January 2004" in text and "END OF TERMS AND CONDITIONS" in text


def test_test_files_have_names_of_their_own() -> None:
    """pytest imports them by basename, so two files of one name stop the whole run."""
    names = [path.name for path in (ROOT / "tests").rglob("*.py") if path.name not in ("conftest.py", "__init__.py")]
    assert sorted(names) == sorted(set(names))


def test_no_case_is_named_by_a_set() -> None:
    """Its order is another in each process, and workers that collect other names run nothing."""
    found = [
        where(path, node.lineno)
        for path in files(".py", under=("tests",))
        for decorator in nodes(path)
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func).endswith(".parametrize")
        if any(keyword.arg == "ids" for keyword in decorator.keywords)
        for node in ast.walk(decorator)
        if isinstance(node, ast.Set | ast.SetComp)
    ]
    assert not found


def test_command_lines_of_other_programs_stand_in_backticks() -> None:
    """Where a message has one with a flag: from Python it is told of arguments, and that flag would be made one."""
    programs = "pip3?|apt-get|python3?|git|uv|cmake|nvcc|nvidia-smi|numactl|torchrun"
    line = re.compile(rf"\b({programs})( [^ `,;]+)* --[a-z]")
    texts = [
        (where(path, node.lineno), node.value)
        for path in modules().values()
        for node in nodes(path)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "\n" not in node.value
    ]
    assert any(line.search(text) for _, text in texts)
    assert [each for each in texts if line.search(re.sub("`[^`]*`", "", each[1]))] == []
