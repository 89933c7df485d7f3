"""Who may import whom, and what loads when."""

from __future__ import annotations

import graphlib
import resource
import subprocess
import sys

import pytest

from house import ROOT, SRC, files, imports, modules, where
from patience import patient

WORDS = {
    "arch", "checks", "child", "collector", "config", "foreign", "generation_config", "groups", "hf_config",
    "interrupts", "json_schema", "memory", "observe", "outputs", "plan", "registry", "request", "request_fields",
    "sampling_params", "seeds", "settings", "structured_outputs", "thinking", "updates",
}  # fmt: skip
DEVICE_SIDE = {"attention", "device", "kv_cache", "layers", "model_state", "models", "ops", "sampling", "worker"}

# package or module -> (what of octavo it may import beside itself, which third-party packages).
# "words" stands for WORDS; "attention.base" allows that module and not the backends.
TABLE: dict[str, tuple[set[str], set[str]]] = {
    **{word: ({"words"}, {"numpy", "msgspec"}) for word in WORDS},
    "settings": ({"words"}, {"yaml"}),
    "observe": (set(), {"rich"}),
    "sched": ({"words"}, {"numpy", "msgspec"}),
    "kv_cache": ({"words"}, {"torch", "numpy"}),
    "ops": (set(), {"torch", "triton", "numpy"}),
    "attention": ({"words", "kv_cache", "ops"}, {"torch", "numpy", "matplotlib"}),
    "layers": ({"attention.base", "ops", "words"}, {"torch"}),
    "models": ({"layers", "attention.base", "ops", "words"}, {"torch", "numpy", "safetensors", "huggingface_hub"}),
    "device": ({"attention.base", "kv_cache", "ops", "words"}, {"torch", "numpy"}),
    "model_state": ({"device", "attention.base", "kv_cache", "words"}, {"torch", "numpy"}),
    "grammar": ({"words", "grammar_text"}, {"llguidance", "msgspec", "numpy"}),
    "grammar_text": ({"words"}, {"llguidance", "msgspec"}),
    "sampling": ({"device", "grammar", "ops", "words"}, {"torch", "numpy"}),
    "worker": ({"words"} | DEVICE_SIDE, {"torch", "numpy"}),
    "text": ({"words"}, {"tokenizers", "jinja2", "msgspec", "numpy", "sentencepiece"}),
    "probe": ({"words", "ops"}, {"torch"}),
    "front": ({"words", "text", "models.hub"}, set()),
    "open_device": (set(), set()),
    "early_start": ({"words", "open_device", "start"}, set()),
    "start": (
        {"words", "front", "open_device", "start_cache", "sched", "text", "probe", "grammar"} | DEVICE_SIDE,
        {"torch"},
    ),
    "start_cache": ({"words"} | DEVICE_SIDE, {"torch"}),
    "engine": ({"words", "early_start", "grammar", "start", "text", "sched", "worker"}, {"msgspec"}),
    "sharing": ({"words", "engine"}, set()),
    "llm": ({"words", "engine", "sharing", "text", "probe"}, {"msgspec"}),
    "flags": ({"words"}, set()),
    "terminal": ({"words", "flags", "llm", "benchmark"}, {"msgspec"}),
    "doctor": ({"words", "flags", "probe", "models.hub", "start_cache"}, set()),
    "benchmark": ({"words", "flags", "gpu_benchmark", "llm", "engine", "probe", "ops"}, {"torch", "numpy"}),
    "gpu_benchmark": ({"words", "gpu_profile", "llm", "ops"}, {"torch"}),
    "gpu_profile": ({"llm"}, {"torch"}),
    "reproducibility": ({"words", "flags", "llm", "engine", "benchmark", "worker"}, {"torch", "numpy", "msgspec"}),
    "serve": (
        {
            "words",
            "early_start",
            "engine",
            "flags",
            "front",
            "grammar",
            "models.hub",
            "sched",
            "text",
            "worker.executor",
        },
        {"httptools", "msgspec", "numpy", "prometheus_client", "starlette", "uvicorn", "uvloop"},
    ),
    "cli": (set(), set()),
    "__main__": ({"cli"}, set()),
    "__init__": ({"attention.mods", "collector", "llm", "config", "outputs", "sampling_params"}, set()),
}
BACKENDS = ("cpu", "flash", "flashinfer", "flex", "mla", "paged", "reference")
HELPERS = ("base", "flex_kernel", "flex_sizes", "frame", "mods", "variant_mods")
BACKENDS_MAY_IMPORT = {f"octavo.attention.{name}" for name in HELPERS}


def _package(module: str) -> str:
    return module.partition(".")[2].partition(".")[0] or "__init__"


def _allowed(importer: str, imported: str) -> bool:
    if not imported.startswith("octavo"):
        top = imported.partition(".")[0]
        return top in sys.stdlib_module_names or top in TABLE[_package(importer)][1]
    own, target = _package(importer), imported.partition(".")[2]
    top = target.partition(".")[0]
    if not target:  # the package itself: its version
        return True
    inside, allowed = target.split(".")[0], TABLE[own][0]
    if inside == own:
        return True
    if "words" in allowed and top in WORDS:
        return True
    return any(target == name or target.startswith(name + ".") for name in allowed)


def test_every_package_is_in_the_table() -> None:
    assert {_package(name) for name in modules()} <= set(TABLE)


@pytest.mark.parametrize("module", sorted(modules()))
def test_import_directions(module: str) -> None:
    path = modules()[module]
    wrong = [f"{where(path, line)}: {name}" for name, line in imports(path) if not _allowed(module, name)]
    assert not wrong, wrong


def test_no_circles_between_modules() -> None:
    """A module never reaches itself through imports, wherever those stand: in functions and for types alone as well."""
    graph = {name: {found for found, _ in imports(path)} & modules().keys() for name, path in modules().items()}
    assert "octavo.ops.gpu.sample" in graph["octavo.ops.sample"], "an import within a function is seen"
    graphlib.TopologicalSorter(graph).prepare()  # its error lists a circle


def test_attention_backends_do_not_import_each_other() -> None:
    for module, path in modules().items():
        if module.removeprefix("octavo.attention.") in BACKENDS:
            siblings = {name for name, _ in imports(path) if name.startswith("octavo.attention")}
            assert siblings <= BACKENDS_MAY_IMPORT, module


def test_no_octavo_file_outside_the_package_reaches_past_it() -> None:
    """bench and tools use public modules; nothing imports tests."""
    for path in files(".py", under=("src", "bench", "tools")):
        assert not [name for name, _ in imports(path) if name.partition(".")[0] in ("tests", "pytest")], path


def _run(code: str) -> str:
    command = [sys.executable, "-c", code]
    environment = {"PYTHONPATH": str(SRC), "PATH": ""}
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=patient(60))
    assert result.returncode == 0, result.stderr
    assert not result.stderr, result.stderr
    return result.stdout


def test_words_and_sched_load_no_torch_print_nothing_and_leave_logging_alone() -> None:
    names = [name for name in modules() if _package(name) in WORDS | {"sched", "flags", "terminal", "cli", "probe"}]
    code = (
        f"import importlib, logging, sys\nfor name in {names!r}: importlib.import_module(name)\n"
        "assert not logging.root.handlers and not logging.getLogger('octavo').handlers\n"
        "heavy = {'torch', 'transformers', 'tokenizers', 'rich', 'huggingface_hub', 'jinja2', 'yaml'}\n"
        "heavy &= set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    assert _run(code) == ""


def test_mods_are_told_without_torch() -> None:
    """It is imported where an engine starts, which opens a GPU meanwhile."""
    code = (
        "import sys, octavo\nfrom octavo.attention import and_, causal, or_, prefix, request_field, sinks, soft_cap\n"
        "own = octavo.AttentionMods(mask_mod=lambda b, h, q, kv: kv % 3 != 1)\n"
        "and_(or_(own, sinks(4), prefix(request_field('length'))), causal(), soft_cap(2.0))\n"
        "assert 'torch' not in sys.modules"
    )
    assert _run(code) == ""


def test_import_octavo_loads_the_standard_library_only() -> None:
    foreign = _run(
        "import sys; before = set(sys.modules); import octavo\n"
        "tops = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        "print(sorted(tops - set(sys.stdlib_module_names) - {'octavo'}))"
    )
    assert foreign.strip() == "[]"


@pytest.mark.parametrize("flag", ["--version", "--help"])
def test_version_and_help_answer_in_300_ms(flag: str) -> None:
    """Of processor time, the best of five, since other work may share the machine."""
    best = 1e9
    for _ in range(5):
        began = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
        subprocess.run(
            [sys.executable, "-m", "octavo", flag],
            check=True,
            capture_output=True,
            env={"PYTHONPATH": str(SRC)},
            timeout=patient(60),
        )
        best = min(best, resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - began)
    assert best < patient(0.3)
