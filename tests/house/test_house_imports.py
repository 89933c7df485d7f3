"""Who may import whom, and what loads when."""

from __future__ import annotations

import ast
import graphlib
import resource
import subprocess
import sys
from collections.abc import Collection

import pytest

from house import ROOT, SRC, files, imports, modules, nodes, where
from patience import patient

# Plain data and rules without a device: packages or modules that load no torch, and that all others may import.
WORDS = {
    "cache.groups", "cache.parts", "cache.plan", "cache.policies", "cache.specs", "checkpoint.arch",
    "checkpoint.config_reader", "checkpoint.generation_config", "config", "grammar.json_schema", "grammar.schema_sets",
    "observe", "plan", "registry", "request", "startup.child", "startup.forks", "startup.gc_control",
    "startup.interrupts", "startup.listen", "startup.memory_plan",
}  # fmt: skip
DEVICE_SIDE = {
    "attention",
    "cache",
    "checkpoint",
    "device",
    "layers",
    "model_state",
    "models",
    "ops",
    "sampling",
    "states",
    "worker",
}

# package or module -> (what of octavo it may import beside itself, which third-party packages). The longest name
# counts.
# "words" stands for WORDS; "attention.base" allows that module and not the backends.
TABLE: dict[str, tuple[set[str], set[str]]] = {
    **{word: ({"words"}, {"numpy", "msgspec"}) for word in WORDS},
    "config": ({"words"}, {"yaml", "msgspec"}),
    "observe": (set(), {"rich"}),
    "cache.specs": ({"words", "attention.mods"}, set()),  # a spec holds a user's mods, which load no torch
    # the scheduler's halves, and the messages to the worker's: no torch
    "kv_connector": ({"words", "kv_connector.worker"}, {"msgspec", "numpy", "xxhash"}),
    "kv_connector.worker": (
        {
            "words",
            "kv_connector",
            "ops.arrivals",
            "ops.copying",
            "ops.mapped",
            "ops.windows",
            "process_groups",
            "rl.transport.gloo",
            "rl.transport.group",
            "rl.transport.nccl",
        },
        {"torch", "numpy", "msgspec", "xxhash", "mooncake", "lmcache"},
    ),
    "sched": ({"words", "kv_connector"}, {"numpy", "msgspec"}),
    "cache": ({"words"}, {"torch", "numpy"}),
    "ops": (set(), {"torch", "triton", "numpy", "msgspec"}),
    # the seam between engine and layers that keep states, as attention.base is of those that attend
    "states": ({"words", "cache", "ops"}, {"torch"}),
    "attention": ({"words", "cache", "ops", "states"}, {"torch", "numpy", "matplotlib"}),
    # both seams: a layer finds its own in the ForwardContext, and a decoder asks for the C form of what layers keep
    "layers": ({"attention.base", "states.base", "ops", "words"}, {"torch"}),
    "models": ({"layers", "attention.base", "ops", "words"}, {"torch", "numpy"}),
    "checkpoint.hub": ({"words"}, {"huggingface_hub"}),
    "checkpoint": (
        {"models", "layers", "attention.base", "ops", "words"},
        {"torch", "numpy", "safetensors", "xxhash", "msgspec"},
    ),
    "device": ({"attention.base", "cache", "ops", "words"}, {"torch", "numpy", "msgspec"}),
    "model_state": ({"device", "attention.base", "cache", "states", "words"}, {"torch", "numpy"}),
    # drafters are models of their own, beside the target; the root and its table load no torch
    "speculate": (
        {"attention.base", "cache", "checkpoint", "device", "layers", "models", "ops", "words"},
        {"torch", "numpy", "msgspec"},
    ),
    "grammar": ({"words"}, {"llguidance", "msgspec", "numpy"}),
    "sampling": ({"device", "grammar", "ops", "words"}, {"torch", "numpy", "msgspec"}),
    # a trainer's side: the engine's operators, layers and families, and nothing that runs requests
    "rl": (
        {"attention", "cache", "layers", "models", "ops", "states", "words", "rl.sender", "rl.current_weights"}
        | {"rl.rollouts.completion"},
        {"torch", "xxhash"},
    ),
    # outputs and answers by their fields alone, whoever the sampler is; arrays of experts come as .npy
    "rl.rollouts.completion": (set(), {"numpy"}),
    # the state machine of a weight update: an engine's loop, its frontends and a sender know it, without torch
    "rl.session": ({"rl.messages", "rl.moves"}, {"msgspec"}),
    # what of it waits for a trainer beside the steps
    "rl.messages": (set(), {"msgspec"}),
    "rl.moves": (set(), set()),
    # where new weights lie in a model: the loader's weight map for one that runs
    "rl.plan": ({"words", "rl.session", "checkpoint", "models", "layers", "ops"}, {"torch"}),
    "rl.current_weights": ({"words", "rl.session", "rl.plan", "checkpoint", "layers"}, {"torch"}),
    "rl.in_place": ({"rl.session", "rl.plan"}, {"torch"}),
    "rl.receiver": (
        {"words", "models", "rl.messages", "rl.session", "rl.plan", "rl.in_place", "rl.transport"}
        | {"rl.current_weights", "ops.captures"},
        {"torch"},
    ),
    # a worker's end of a transport; files are read as the loader reads them
    # a trainer's end: the same rules, buffers and groups, and no engine; copies that no other thread is waited for in
    # it writes the files that the other end reads
    "rl.sender": ({"rl.session", "rl.plan", "rl.transport", "ops.copying"}, {"torch", "safetensors"}),
    "rl.transport": (
        {"words", "rl.session", "rl.plan", "checkpoint", "ops.captures", "process_groups"},
        {"torch"},
    ),
    "process_groups": (set(), set()),  # of torch's, by what they do
    "worker.executor": ({"words"}, {"msgspec"}),  # all that an engine's loop knows of workers, and without torch
    "worker.facts": ({"words", "cache"}, {"msgspec"}),
    "worker": (
        {"words", "speculate", "grammar", "startup.cuda_init", "startup.fresh_pages", "startup.frontend"}
        | {"startup.probe"}
        | {"rl.receiver"}  # of new weights
        | {"kv_connector.peers.description", "kv_connector.table", "kv_connector.worker"}
        | DEVICE_SIDE,
        {"torch", "numpy", "msgspec"},
    ),
    "text": ({"words"}, {"tokenizers", "jinja2", "msgspec", "numpy", "sentencepiece"}),
    "startup.probe": ({"words", "ops"}, {"torch"}),
    "startup.frontend": ({"words", "text", "grammar", "checkpoint.hub"}, {"msgspec"}),
    "startup.cuda_init": (set(), set()),
    "startup.fresh_pages": (set(), set()),
    "startup.warm_start": (
        {"words", "speculate", "startup.cuda_init", "startup.fresh_pages", "startup.build", "worker.device"},
        set(),
    ),
    "startup.cache": ({"words", "cache", "worker.facts"}, {"msgspec"}),
    "startup.identity": ({"words", "cache", "sched.identity", "startup.probe"}, set()),
    # nothing of a device: a worker builds that by itself, and is told by name what to do
    "startup.build": (
        {
            "words",
            "startup",
            "engine",
            "sched",
            "kv_connector",
            "speculate",
            "worker.device",
            "worker.executor",
            "worker.facts",
            "worker.worker",
        },
        {"msgspec"},
    ),
    "engine": ({"words", "sched", "worker.executor", "rl.session"}, {"msgspec"}),
    # What stands between users and a core, for LLM and the server alike. The messages to a core and the protocol of
    # its clients are here, so that a core in this process and one behind a socket are told the same.
    "frontend": (
        {"words", "engine", "text", "sched", "speculate", "startup.warm_start", "startup.frontend", "rl.session"},
        {"msgspec"},
    ),
    # it hands tensors over within the process
    "llm": ({"words", "frontend", "text", "startup.probe", "rl.session", "rl.transport.local"}, {"msgspec"}),
    "cli": (
        {
            "words",
            "llm",
            "bench",
            "startup.probe",
            "startup.cache",
            "kv_connector.table",
            "attention.mods",
            "worker.model",
            "worker.backends",
            "checkpoint.hub",
            "checkpoint.loader",
        },
        {"msgspec", "torch"},
    ),
    # named by its path, as drafters out of tree are
    "bench.oracle": ({"words", "speculate", "models", "cache.specs", "ops", "bench.oracle_gpu"}, {"torch"}),
    "bench.oracle_gpu": ({"words", "ops"}, {"torch", "triton"}),
    "bench": (
        {"words", "kv_connector", "cli.flags", "llm", "frontend", "startup.probe", "ops", "checkpoint.hub"},
        {"torch", "numpy", "msgspec"},
    ),
    "serve": (
        {
            "words",
            "startup.warm_start",
            "startup.frontend",
            "engine",
            "frontend",
            "cli.flags",
            "grammar",
            "checkpoint.hub",
            "kv_connector.table",
            "sched",
            "text",
            "worker.executor",
            "rl.session",
        },
        {"httptools", "msgspec", "numpy", "prometheus_client", "starlette", "uvicorn", "uvloop"},
    ),
    # it speaks HTTP with servers, and knows no engine
    "router": ({"words", "cli.flags"}, {"prometheus_client", "uvicorn"}),
    "__main__": ({"cli"}, set()),
    "__init__": ({"attention.mods", "config", "request", "startup.gc_control", "llm"}, set()),
}
ENGINE_SIDE = (
    "sched",
    "engine",
    "frontend",
    "llm",
    "serve",
    "startup.build",
    "startup.cache",
    "startup.frontend",
    "text",
)
BACKENDS = ("cpu", "flash", "flashinfer", "flex.backend", "mla", "paged", "reference")
HELPERS = ("base", "flex", "frame", "mods")
BACKENDS_MAY_IMPORT = tuple(f"octavo.attention.{name}" for name in HELPERS)


def _package(module: str) -> str:
    """The longest name of TABLE that a module lies in."""
    name = module.partition(".")[2] or "__init__"
    while name not in TABLE and "." in name:
        name = name.rpartition(".")[0]
    return name


def _within(module: str, names: Collection[str]) -> bool:
    return any(module == name or module.startswith(name + ".") for name in names)


def _allowed(importer: str, imported: str) -> bool:
    own = _package(importer)
    if not imported.startswith("octavo"):
        top = imported.partition(".")[0]
        return top in sys.stdlib_module_names or top in TABLE[own][1]
    target = imported.partition(".")[2]
    if not target or (target.split(".")[0] == own.split(".")[0] and _package(imported) == own):
        return True  # the package itself: its version; and its own modules
    allowed = TABLE[own][0]
    return _within(target, allowed) or ("words" in allowed and _within(target, WORDS))


def test_every_package_is_in_the_table() -> None:
    assert {_package(name) for name in modules() if modules()[name].stat().st_size} <= set(TABLE)


def test_import_directions() -> None:
    wrong = [
        f"{where(path, line)}: {name}"
        for module, path in modules().items()
        for name, line in imports(path)
        if not _allowed(module, name)
    ]
    assert not wrong


def test_no_circles_between_modules() -> None:
    """A module never reaches itself through imports, wherever those stand: in functions and for types alone as well."""
    graph = {name: {found for found, _ in imports(path)} & modules().keys() for name, path in modules().items()}
    assert "octavo.ops.sampling.gpu" in graph["octavo.ops.sampling"], "an import within a function is seen"
    graphlib.TopologicalSorter(graph).prepare()  # its error lists a circle


@pytest.mark.parametrize("side", ENGINE_SIDE)
def test_the_engines_side_imports_nothing_of_a_device(side: str) -> None:
    """It knows workers by their executor. What is allowed here is allowed to no module of that side."""
    of_a_device = {"attention", "device", "layers", "model_state", "models", "ops", "sampling", "worker.runner"}
    owners = [name for name in TABLE if name == side or name.startswith(side + ".")]
    assert owners
    for owner in owners:
        allowed = TABLE[owner][0] - {"words"}
        assert not {name for name in allowed if name in of_a_device or _within(name, of_a_device)}, owner
        assert "torch" not in TABLE[owner][1], owner


def test_a_worker_is_reached_through_its_executor_alone() -> None:
    """Nothing outside its folder touches what a worker or its runner has; bench/null_device.py stands in for one."""
    doors = {"runner", "_runner", "worker", "_worker"}
    for path in files(".py", under=("src", "bench")):
        if path.parent.name == "worker" or path.name == "null_device.py":
            continue
        for node in nodes(path):
            if isinstance(node, ast.Attribute):
                assert node.attr not in doors, where(path, node.lineno)
        importing = [name for name, _ in imports(path) if name == "octavo.worker.worker"]
        assert not importing or path.name == "build.py", path


def test_attention_backends_do_not_import_each_other() -> None:
    for module, path in modules().items():
        if module.removeprefix("octavo.attention.") in BACKENDS:
            siblings = {name for name, _ in imports(path) if name.startswith("octavo.attention")}
            assert all(_within(name, BACKENDS_MAY_IMPORT) for name in siblings), module


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
    names = [
        name
        for name in modules()
        if _within(name.partition(".")[2], WORDS | {"sched", "cli.main", "cli.flags", "cli.terminal", "startup.probe"})
    ]
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


def test_a_benchmark_of_a_start_imports_no_torch_ahead_of_it() -> None:
    """An engine's start imports it beside other things, and is measured in processes that begin so."""
    assert _run("import sys\nfrom octavo.bench.engine import dummy_model\nassert 'torch' not in sys.modules") == ""


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
