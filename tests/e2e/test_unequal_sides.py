"""Engines whose blocks lie in other ways, of other families and cache types, and in processes of their own (T, N.1)."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest

import random_models
from octavo import LLM
from peer_engine import peer
from test_p2p import LONG, PARAMS, WAYS, bits, need_library, p2p, prefill, stepping, until_idle, with_transfer

Make = Callable[..., LLM]
SMALL = {"block_size": 16, "kv_cache_layout": "BLHNC"}
LARGE = {"block_size": 64, "kv_cache_layout": "BLNHC", "attention_config": {"kernel_block_size": 16}}
FAMILIES: dict[str, dict[str, Any]] = {
    "latent": {"shape": random_models.DEEPSEEK},
    "windows": {"shape": random_models.OLMO3},
    "fp8": {"kv_cache_dtype": "fp8"},
    "int8": {"kv_cache_dtype": "int8"},
    "zeroed": {"attention_backend": "flex"},
}
R2, R8 = {"attention_config": {"kernel_block_size": 16}}, {"attention_config": {"kernel_block_size": 8}}
SIDES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "16 to 64": ({"block_size": 16, "kv_cache_layout": "LBHNC"}, {"block_size": 64, "kv_cache_layout": "BLNHC"}),
    "64 to 16": ({"block_size": 64, "kv_cache_layout": "LBNHC"}, {"block_size": 16, "kv_cache_layout": "BLHNC"}),
    "32/16 to 64/8": ({"block_size": 32, "kv_cache_layout": "LBHNC", **R2}, {"block_size": 64, **R8}),
    "layer by layer": ({"kv_cache_layout": "LBHNC"}, {"kv_cache_layout": "BLHNC"}),
}


@pytest.mark.parametrize(
    ("sides", "name"),
    [
        *itertools.product(SIDES, ("p2p", "nixl")),
        *itertools.product(("16 to 64", "layer by layer"), ("push",)),
        ("16 to 64", "mooncake"),
    ],
)
def test_T_2_T_3_N_5_N_6_sides_of_other_blocks_and_layouts_give_one_engines_bits(sides, name, make_llm: Make):
    """The second time the second engine has the beginning of the prompts, so fewer blocks come than were offered."""
    need_library(WAYS[name]["kv_connector"])
    ours, theirs = ({"max_model_len": 512, **fields} for fields in SIDES[sides])
    expected = bits(make_llm(**theirs).generate(LONG, PARAMS))
    first = make_llm(**ours, kv_transfer_config=p2p("kv_producer", **WAYS[name]))
    second = make_llm(**theirs, kv_transfer_config=p2p("kv_consumer", **WAYS[name]))
    for known in (0, 64):
        assert second.reset_prefix_cache()
        if known:
            tokens = second.generate(LONG[0], PARAMS)[0].prompt_token_ids
            assert second.reset_prefix_cache()
            second.generate({"prompt_token_ids": tokens[: known + 1]}, PARAMS)
        told = prefill(first, LONG)
        before = second.engine.scheduler.stats()
        with stepping(first):
            asked = [with_transfer(PARAMS, each) for each in told]
            assert bits(second.generate(LONG, asked)) == expected
        until_idle(first)
        until_idle(second)
        stats = second.engine.scheduler.stats()
        assert not stats.num_load_failures
        assert stats.num_scheduled_tokens - before.num_scheduled_tokens == len(LONG) * 12, known


def test_N_6_what_was_loaded_is_found_again(make_llm: Make):
    """Blocks that came in other sizes are published as those that were computed here."""
    fields = {"max_model_len": 512, "block_size": 64}
    expected = bits(make_llm(**fields).generate(LONG, PARAMS))
    first = make_llm(max_model_len=512, kv_transfer_config=p2p("kv_producer"))
    second = make_llm(**fields, kv_transfer_config=p2p("kv_consumer"))
    (told,) = prefill(first, LONG[:1])
    with stepping(first):
        second.generate(LONG[:1], with_transfer(PARAMS, told))
    hits = second.engine.scheduler.kv.stats.hits
    assert bits(second.generate(LONG, PARAMS)) == expected
    assert second.engine.scheduler.kv.stats.hits - hits >= 64
    until_idle(second)
    until_idle(first)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("sides", [(SMALL, LARGE), (LARGE, SMALL)], ids=["16 to 64", "64 to 16"])
def test_T_2_T_3_T_5_C_13_every_kind_of_cache_passes_into_blocks_of_another_size(name, sides, make_llm: Make, tmp_path):
    """Latent layers, windows, quantized caches, and a backend that reads what no token has written."""
    fields = {"max_model_len": 512, "skip_tokenizer_init": True, **FAMILIES[name]}
    if shape := fields.pop("shape", None):
        fields |= random_models.settings_of(shape, tmp_path)
    rng = random.Random(5)
    prompts = [{"prompt_token_ids": [rng.randrange(3, 300) for _ in range(count)]} for count in (270, 128, 33, 1)]
    first = make_llm(**{**fields, **sides[0]}, kv_transfer_config=p2p("kv_producer"))
    second = make_llm(**{**fields, **sides[1]}, kv_transfer_config=p2p("kv_consumer"))
    expected = bits(make_llm(**{**fields, **sides[1]}).generate(prompts, PARAMS))
    told = first.generate(prompts, with_transfer(PARAMS, {"do_remote_decode": True}, max_tokens=1))
    with stepping(first):
        asked = [with_transfer(PARAMS, output.kv_transfer_params) for output in told]
        assert bits(second.generate(prompts, asked)) == expected
    until_idle(first)
    until_idle(second)
    stats = second.engine.scheduler.stats()
    assert not stats.num_load_failures and stats.num_loaded_tokens == 270 + 128 + 33 + 1


def test_N_1_two_processes_pass_blocks_of_128_in_kernel_blocks_of_64(make_llm: Make):
    need_library("nixl")
    fields = {"dtype": "float32", "max_model_len": 512}
    theirs = {**fields, "block_size": 128, "attention_config": {"kernel_block_size": 64}}
    ours = {**fields, "block_size": 32, "kv_cache_layout": "BLNHC"}
    expected = bits(make_llm(**ours).generate(LONG, PARAMS))
    config = {"kv_connector": "nixl", "kv_transfer_timeout": 60}
    llm = make_llm(**ours, kv_transfer_config=p2p("kv_consumer", **config))
    with peer({**theirs, "kv_transfer_config": p2p("kv_producer", **config)}) as other:
        for _ in range(2):  # the second time over the same connection
            told = other.prefill(LONG)
            assert llm.reset_prefix_cache()
            assert bits(llm.generate(LONG, [with_transfer(PARAMS, each) for each in told])) == expected
        until_idle(llm)
        stats = llm.engine.scheduler.stats()
        assert not stats.num_load_failures and stats.num_loaded_tokens > 512


def test_where_runs_of_bytes_are_told_a_library_a_block_is_one_unless_the_user_says_otherwise(make_llm: Make):
    need_library("nixl")
    nixl = p2p("kv_both", **WAYS["nixl"])
    host = {"kv_connector": "host", "kv_role": "kv_both", "kv_connector_extra_config": {"cpu_bytes_to_use": "16M"}}
    second = {"kv_connector": "nixl", "kv_role": "kv_both"}
    both = p2p("kv_both", kv_connector="multi", kv_connector_extra_config={"connectors": [host, second]})
    asked = [{"kv_transfer_config": each} for each in (p2p("kv_both"), nixl, both)]
    asked.append({"kv_transfer_config": nixl, "kv_cache_layout": "LBNHC"})
    plans = [make_llm(max_model_len=512, **fields).engine.memory for fields in asked]
    assert [plan.layout for plan in plans] == ["LBHNC", "BLHNC", "BLHNC", "LBNHC"]
    assert [plan.why["layout"] for plan in plans] == [
        "the first that cpu takes",
        *["the first that cpu takes with a block in one run"] * 2,
        "as kv_cache_layout says",
    ]
