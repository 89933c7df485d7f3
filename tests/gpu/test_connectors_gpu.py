"""Blocks from GPU to GPU: by NCCL (P.4, O.2), and between sides that differ (T): the same bits, and deadlines."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "e2e"))

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from octavo import LLM
from peer_engine import peer
from test_p2p import LONG, PARAMS, PROMPTS, WAYS, bits, need_library, p2p, until_idle, with_transfer

pytestmark = pytest.mark.gpu
FIELDS: dict[str, Any] = {"dtype": "bfloat16", "max_model_len": 512, "kv_cache_memory_bytes": 1 << 28}
LAYOUTS = ["LBNHC", "BLHNC"]


def config(role: str, **more: object) -> dict[str, Any]:
    extra = {"backend": "nccl"}
    return {**p2p(role), "kv_connector_extra_config": extra, "kv_transfer_timeout": 60, **more}


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_P_4_D_2_blocks_of_another_gpu_give_one_engines_bits(layout: str) -> None:
    fields = {**FIELDS, "kv_cache_layout": layout}
    with LLM(**fields) as alone:
        expected = bits(alone.generate(PROMPTS, PARAMS))
    with (
        peer({**fields, "kv_transfer_config": config("kv_producer")}, CUDA_VISIBLE_DEVICES="1") as other,
        LLM(**fields, kv_transfer_config=config("kv_consumer")) as llm,
    ):
        for _ in range(3):  # from the second time on over the same group
            told = other.prefill(PROMPTS)
            assert bits(llm.generate(PROMPTS, [with_transfer(PARAMS, each) for each in told])) == expected
            until_idle(llm)
            assert llm.reset_prefix_cache()
        stats = llm.engine.scheduler.stats()
        assert stats.num_loaded_tokens and not stats.num_load_failures


def test_P_3_one_gpu_for_both_sides_is_a_failed_load_and_is_recomputed() -> None:
    """NCCL refuses two ranks on one GPU."""
    with LLM(**FIELDS) as alone:
        expected = bits(alone.generate(PROMPTS, PARAMS))
    own = config("kv_consumer", kv_load_failure_policy="recompute")
    with (
        peer({**FIELDS, "kv_transfer_config": config("kv_producer")}, CUDA_VISIBLE_DEVICES="0") as other,
        LLM(**FIELDS, kv_transfer_config=own) as llm,
    ):
        told = other.prefill(PROMPTS)
        assert bits(llm.generate(PROMPTS, [with_transfer(PARAMS, each) for each in told])) == expected
        until_idle(llm)
        assert llm.engine.scheduler.stats().num_load_failures == len(PROMPTS)
        other.process.kill()


@pytest.mark.parametrize(
    ("name", "sizes"), [("p2p", (16, 64)), ("nixl", (64, 16)), ("nixl", (16, 16)), ("push", (16, 64))]
)
def test_T_2_T_3_N_5_one_gpus_blocks_pass_into_blocks_of_another_size(name: str, sizes: tuple[int, int]) -> None:
    """Of other sizes through host memory; of one size, in layouts that keep a block together or apart, as they are."""
    need_library(WAYS[name]["kv_connector"])
    theirs = {**FIELDS, "block_size": sizes[0], "kv_cache_layout": "LBNHC"}
    ours = {**FIELDS, "block_size": sizes[1], "kv_cache_layout": "BLNHC"}
    with LLM(**ours) as alone:
        expected = bits(alone.generate(LONG, PARAMS))
    config = {**WAYS[name], "kv_transfer_timeout": 60}
    with (
        peer({**theirs, "kv_transfer_config": p2p("kv_producer", **config)}) as other,
        LLM(**ours, kv_transfer_config=p2p("kv_consumer", **config)) as llm,
    ):
        for _ in range(2):
            told = other.prefill(LONG)
            assert bits(llm.generate(LONG, [with_transfer(PARAMS, each) for each in told])) == expected
            until_idle(llm)
            assert llm.reset_prefix_cache()
        assert not llm.engine.scheduler.stats().num_load_failures
