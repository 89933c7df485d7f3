"""What a step on a GPU cannot do without, counted by hand, and the families of kernels."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from octavo.bench import gpu_profile
from octavo.bench.gpu_profile import decode_load, family_of, family_rows, kernels, least_work, prefill_load, table
from octavo.bench.shapes import SHAPES

FACTS = {
    "hidden_size": 4,
    "intermediate_size": 6,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 5,
    "vocab_size": 7,
}


OPS = Path(gpu_profile.__file__).parents[1] / "ops"
FOLDERS = {
    "scan": "states",
    "attention": "attention",
    "gemm": "products",
    "activation": "norms, rotation, activation",
    "norm": "norms, rotation, activation",
    "rope": "norms, rotation, activation",
    "moe": "experts",
    "inputs": "inputs and results",
    "sampling": "sampling",
}


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_kernel_that_is_launched_counts_to_its_folders_family(folder: str) -> None:
    found = {}
    for path in (OPS / folder).glob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and any("launched" in ast.unparse(m) for m in node.decorator_list):
                found[node.name] = family_of(node.name)
    for name in ("_grouped_product", "_product_and_draw"):  # of experts, and of a head: products
        found.pop(name, None)
    assert found and set(found.values()) == {FOLDERS[folder]}, found


def test_bytes_and_operations_of_a_decode_step() -> None:
    work = least_work(FACTS, decode_load([10, 30]))
    weights = 4 * (10 + 10) + 10 * 4 + 4 * 12 + 6 * 4  # qkv, o, gate and up, down
    moved = 2 * (4 + 20) + 2 * (10 + 4) + 2 * (4 + 12) + 2 * (6 + 4)  # of two tokens, in and out
    ends = 2 * (4 * 7 + 2 * 4) + 4 * 2 * 7
    assert work["products"] == (2 * 3 * (weights + moved) + ends, 2 * 2 * (3 * weights + 4 * 7))
    assert work["attention"] == (2 * 3 * (40 * 10 + 2 * 2 * 10), 4 * 3 * 10 * 40)
    assert work["sampling"] == (4 * 7 * 2, 0)


def test_the_last_layer_of_a_prompt_computes_what_is_sampled_from() -> None:
    """K and V of all of its tokens; of each prompt one is a query and goes on."""
    work, token = least_work(FACTS, prefill_load([30, 10])), least_work(FACTS, decode_load([1]))
    every, most = 2 * 4 * 10, 2 * (4 * 10 + 10 * 4 + 4 * 12 + 6 * 4)
    assert work["products"][1] == 3 * 40 * every + (2 * 40 + 2) * most + 2 * 2 * 4 * 7
    assert token["products"][1] == 3 * (every + most) + 2 * 4 * 7
    pairs = 2 * (30 * 31 // 2 + 10 * 11 // 2) + 30 + 10
    assert work["attention"] == (2 * (3 * 40 * 10 + (2 * 40 + 2) * 2 * 10), 4 * 10 * pairs)


def test_a_prompt_sees_half_of_its_square() -> None:
    load = prefill_load([3, 2])
    assert (load.num_tokens, load.num_logits, load.num_read, load.num_pairs) == (5, 2, 5, 6 + 3)


def test_weights_are_most_of_an_8b_step_at_one_row() -> None:
    """16.4 GB less the embedding table, of which one row is read."""
    num_bytes, _ = least_work(SHAPES["8b"], decode_load([100]))["products"]
    assert num_bytes / 1e9 == pytest.approx(15.1, abs=0.1)


def test_what_a_step_of_layers_with_states_cannot_do_without() -> None:
    """Of 24 Mamba-2 layers, 24 MLPs and 4 that attend: 50 MB of states a row, inputs of 32 tokens beside."""
    facts = SHAPES["mamba2"]
    work = least_work(facts, decode_load([100] * 8))
    inner, shared, heads = 128 * 64, 2 * 8 * 128, 128
    kept = 2 * inner + shared + 8 * heads
    assert work["states"][0] == 8 * 24 * (2 * inner * 128 + 32 * kept + 2 * (3 * (inner + shared) + inner))
    assert work["attention"] == (2 * (4 * 2 * 1024 * 800 + 2 * 4 * 4096 * 8), 4 * 4 * 4096 * 800)
    assert work["products"][0] / 1e9 == pytest.approx(15.1, abs=0.2)
    prompts = least_work(facts, prefill_load([4000, 4000]))
    assert prompts["states"][1] == 8000 * 24 * (4 * inner * 128 + 64 * (inner + shared // 2))
    assert prompts["products"][1] / 8000 == pytest.approx(2 * 7.0e9, rel=0.05)
    assert least_work(SHAPES["gdn"], decode_load([100]))["states"][0] > 12 * 4 * 32 * 128 * 128


@pytest.mark.parametrize(
    ("kernel", "family"),
    [
        ("mamba2_scan", "states"),
        ("delta_blocks", "states"),
        ("delta_decode", "states"),
        ("scan_gates", "states"),
        ("normalize_keys", "states"),
        ("_norm_groups", "norms, rotation, activation"),
        ("attend_rows", "attention"),
        ("divide", "attention"),
        ("nvjet_sm90_tst_256x128_64x4_1x2_h_bz", "products"),
        ("_product", "products"),
        ("_streamed", "products"),
        ("_norm_rows", "norms, rotation, activation"),
        ("_draw", "sampling"),
        ("_qk_norm_rope_store", "norms, rotation, activation"),
        ("_gated", "norms, rotation, activation"),
        ("Memset (Device)", "inputs and results"),
        ("_commit", "inputs and results"),
        ("vectorized_add", "other"),
    ],
)
def test_families(kernel: str, family: str) -> None:
    assert family_of(kernel) == family


def test_a_kernel_that_waits_for_the_one_ahead_is_not_timed_twice() -> None:
    launched = [("b", 4.0, 12.0), ("a", 0.0, 10.0), ("c", 5.0, 9.0), ("b", 20.0, 23.0)]
    assert kernels(launched, steps=2) == [
        {"kernel": "a", "us": 5.0, "calls": 0.5},
        {"kernel": "b", "us": 2.5, "calls": 1.0},
        {"kernel": "c", "us": 0.0, "calls": 0.5},
    ]


def test_a_family_stands_beside_its_limit() -> None:
    rows = [{"kernel": "attend_rows", "us": 8.0, "calls": 2.0}, {"kernel": "attend_tiles", "us": 2.0, "calls": 1.0}]
    families = family_rows(rows, {"attention": (4e6, 1e6), "products": (1.0, 1.0)}, copy=1e12, product=1e15)
    assert families == [{"family": "attention", "calls": 3.0, "us": 10.0, "mb": 4.0, "gflop": 0.001, "limit_us": 4.0}]
    assert "| attention | 3 | 10 | 4.0 | 0.0 | 4 | 40% |" in table(rows, families)
