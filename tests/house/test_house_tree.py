"""The picture of the tree: few modules in the root, folders that fit in the head, and the field's words."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

from house import ROOT, SRC, files, modules, tree
from octavo.checkpoint.config_reader.families import FAMILIES

MAX_ROOT_MODULES = 8
MAX_FOLDER_FILES = 15
MAX_FAMILY_LINES = 130
MAX_LAYER_LINES = 8
CODE_SUFFIXES = (".py", ".cu", ".cpp", ".h")
OWN = Path(__file__).resolve()

# Words that the code and its pages used for things that the field has a word for. docs/glossary.md has what stands now.
RETIRED = {
    "eager twin": "reference implementation", "eager twins": "reference implementations", "kept_file": "disk_cache",
    "kept_check": "validation_cache", "kept_launch": "aot_launch", "UnkeptError": "NotCacheable",
    "compiler_name": "fingerprint", "UnnamedError": "NotFingerprintable", "few_rows": "skinny_gemm", "one_row": "gemv",
    "cluster_product": "cluster_gemm", "gated_product": "gated_gemm", "cluster_ring": "gemm_pipeline",
    "prompt_attention": "prefill_attention", "row_attention": "decode_attention", "rotate_attend": "fused_rope_decode",
    "turned_heads": "rope_heads", "RotatingBackend": "FusedRopeBackend", "run_rotating": "run_fused_rope",
    "head_draw": "fused_lm_head_sampling", "drawn_rows": "fused_sampling_rows", "Sight": "MaskSpec",
    "Cuts": "TruncationRows", "truncate_few": "topk_topp_small", "settle_few": "apply_topk_topp_small",
    "fold_rows": "digest_rows", "LogitsFold": "LogitsDigest", "enter_attention": "pre_attention",
    "leave_attention": "post_attention", "turn_to_last_tokens": "narrow_to_logit_tokens",
    "suit_mods": "check_mods_supported", "careless": "uninitialized_groups", "within_reach": "cap_to_backend_limit",
    "give_scales": "calibrate_kv_scales", "CacheForm": "KVCacheLayoutPlan", "early_start": "warm_start",
    "open_device": "cuda_init", "look_at": "check_at", "num_told": "num_reported", "GrammarJail": "GrammarSandbox",
    "tie_to": "exit_with_parent", "is_sound": "validate_update", "runtime_compiler": "nvrtc",
    "scripted": "mock", "scripted_server": "mock_server", "ScriptedWorker": "MockWorker",
    "turned_halves": "rotated_halves", "rotate_rig": "fused_rope_rig", "kept_kernels": "cached_kernels",
    "drawn_linear": "fused_linear_sampling", "test_flex_plain": "test_flex_dense", "gpu_benchmark": "gpu_engine",
    "equals_the_twin": "equals_the_reference", "compare_with_twin": "compare_with_reference",
    "octavo.serve.engine.mock_engine": "mock_engine",
    "is_kept": "is_cached", "_num_turned": "_num_rotated", "_turned": "_rotated",
    "attention_variants": "layer_specs", "check_variants": "check_specs", "mods_of_variant": "mods_of_spec",
    "plain_variants": "plain_specs", "kv_of_layer": "ForwardContext.layers",
    "jail": "sandbox", "jails": "sandboxes", "TextJail": "TextSandbox", "JailError": "SandboxError",
    "JailBusyError": "SandboxBusyError", "jail_child": "sandbox_child",
}  # fmt: skip


def _relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_the_root_holds_few_modules() -> None:
    assert len(list((SRC / "octavo").glob("*.py"))) <= MAX_ROOT_MODULES


def test_folders_fit_in_the_head() -> None:
    counts = Counter(path.parent for path in files(*CODE_SUFFIXES, under=("src",)))
    assert {_relative(folder): count for folder, count in counts.items() if count > MAX_FOLDER_FILES} == {}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_is_one_file_and_a_table_line(name: str) -> None:
    """No other module of the engine knows its name; what they need of it are facts of its Arch."""
    own = FAMILIES[name].model.partition(":")[0]
    assert len(modules()[own].read_text(encoding="utf-8").splitlines()) <= MAX_FAMILY_LINES
    allowed = {own, "octavo.checkpoint.config_reader.families"}
    others = {module: path for module, path in modules().items() if not module.startswith("octavo.bench")}
    knowing = {module for module, path in others.items() if re.search(rf"\b{name}\b", path.read_text(encoding="utf-8"))}
    assert knowing <= allowed


@pytest.mark.parametrize("module", sorted({family.model.partition(":")[0] for family in FAMILIES.values()}))
def test_a_layer_can_be_read_in_its_familys_file(module: str) -> None:
    """Its forward, in a few plain lines: one hidden state in, no branch, no loop."""
    classes = [node for node in tree(modules()[module]).body if isinstance(node, ast.ClassDef)]
    layers = [node for node in classes if node.name.endswith("Layer")]
    assert layers
    for layer in layers:
        (forward,) = (node for node in layer.body if isinstance(node, ast.FunctionDef) and node.name == "forward")
        lines = forward.body[1:]  # behind the docstring
        assert len(lines) <= MAX_LAYER_LINES and [each.arg for each in forward.args.args] == ["self", "x"]
        assert all(isinstance(each, ast.Assign | ast.Return) for each in lines)
        assert not any(isinstance(each, ast.IfExp | ast.comprehension) for each in ast.walk(forward))


def test_no_retired_word() -> None:
    words = re.compile(rf"(?<![A-Za-z0-9_])(?:{'|'.join(map(re.escape, RETIRED))})(?![A-Za-z0-9_])")
    found = []
    for path in files(*CODE_SUFFIXES, ".md", under=("src", "docs", "bench", "tools", "tests")):
        if path != OWN:
            texts = sorted(set(words.findall(path.read_text(encoding="utf-8"))))
            found += [f"{_relative(path)}: say {RETIRED[word]!r} for {word!r}" for word in texts]
    assert not found


def test_every_operator_stands_in_the_table() -> None:
    table = (SRC / "octavo/ops/README.md").read_text(encoding="utf-8")
    ops = SRC / "octavo/ops"
    members = {f"{path.parent.name}/" for path in ops.glob("*/__init__.py")} | {path.name for path in ops.glob("*.py")}
    missing = [name for name in members - {"__init__.py"} if f"`{name}`" not in table]
    assert not missing


def test_a_glossary_line_says_one_term() -> None:
    lines = [
        line for line in (ROOT / "docs/glossary.md").read_text(encoding="utf-8").splitlines() if line.startswith("- ")
    ]
    terms = [re.match(r"- \*\*(.+?)\*\*(?: \*\(ours\)\*)?: \S", line) for line in lines]
    assert all(terms) and len({term[1] for term in terms if term}) == len(lines) > 40
