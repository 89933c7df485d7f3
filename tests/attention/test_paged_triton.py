"""The Triton attention under Triton's interpreter, in a process of its own: shapes are tiny, sums are numpy's."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from octavo.attention.base import BACKENDS, Variant

HERE = Path(__file__).parent
CHECKS = (
    "check_twin",
    "check_decode_prefill_and_chunks_agree",
    "check_splits_and_neighbours_do_not_move_bits",
    "check_few_rows_have_the_bits_of_divided_ones",
    "check_block_size_placement_and_layout_do_not_move_bits",
    "check_slid_out_blocks_are_not_read",
    "check_a_padding_token_becomes_zero_and_tokens_beyond_the_rows_stay",
    "check_rows_that_do_not_fit_the_scratch_are_not_split",
    "check_long_rows_are_merged_to_the_same_bits",
    "check_the_division_is_whole_and_even",
    "check_tiles_of_long_rows_are_numbered_without_gaps",
    "check_features_equal_the_reference",
    "check_quantized_caches_equal_the_reference",
    "check_backend_equals_reference",
)
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


@pytest.fixture(scope="module")
def results() -> dict[str, str]:
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": f"{HERE.parents[1] / 'src'}:{HERE}"}
    command = [sys.executable, "-W", "ignore", str(HERE / "paged_rig.py")]
    run = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=560)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@needs_triton
@pytest.mark.parametrize("check", CHECKS)
def test_interpreted(check: str, results: dict[str, str]) -> None:
    assert not results[check], results[check]


@needs_triton
def test_every_check_is_run(results: dict[str, str]) -> None:
    assert set(results) == set(CHECKS)


@needs_triton
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter runs on any device")
def test_paged_refuses_the_cpu_and_names_the_way_out() -> None:
    variant = Variant(num_heads=4, num_kv_heads=2, head_size=32, scale=0.2)
    with pytest.raises(ValueError, match=r"cuda, got cpu.*attention_backend='cpu'"):
        BACKENDS.resolve("paged")((variant,), torch.float32, torch.device("cpu"))


@pytest.mark.skipif(importlib.util.find_spec("triton") is not None, reason="triton is installed")
def test_without_triton_the_backend_says_what_is_missing() -> None:
    with pytest.raises(ValueError, match="triton"):
        BACKENDS.resolve("paged")
