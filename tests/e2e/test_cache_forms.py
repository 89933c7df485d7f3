"""Greedy tokens are the same for every backend, layout and (cache block, kernel block); a wish is met or refused."""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from insides import runner_of
from octavo import LLM, SamplingParams
from octavo.attention.cpu import CpuBackend
from octavo.cache.groups import CacheGroup, make_groups
from octavo.config.engine_config import KV_CACHE_LAYOUTS, ConfigError
from octavo.ops.cache_write.zero_blocks import zero_blocks
from random_models import DEEPSEEK, GEMMA, settings_of, token_prompts

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, detokenize=False)
SMALL = {"num_gpu_blocks_override": 60, "max_model_len": 512, "max_num_batched_tokens": 96, "num_threads": 1}
BLOCKS = [(16, 16), (64, 16), (128, 16), (128, 32), (128, 64)]
Make = Callable[..., LLM]


@pytest.fixture
def two_groups(tmp_path: Path) -> dict[str, Any]:
    """Settings of a model with random weights and two cache groups."""
    return settings_of(GEMMA, tmp_path)


@pytest.fixture
def latent(tmp_path: Path) -> dict[str, Any]:
    """Settings of a model with random weights and latent attention."""
    return settings_of(DEEPSEEK, tmp_path)


@pytest.fixture
def example_on_path(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "attention"))
    yield "example_backend:LoopBackend"
    sys.modules.pop("example_backend", None)


def ids_of(llm: LLM, prompts: list[Any]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, GREEDY)]


def test_octavo_tiny_everywhere(make_llm: Make, held_out_prompts: list[str]) -> None:
    prompts = sorted(held_out_prompts, key=len)[-6::2]
    expected = ids_of(make_llm(), prompts)
    for layout in KV_CACHE_LAYOUTS:
        for block, kernel in BLOCKS:
            config = {"kernel_block_size": kernel}
            llm = make_llm(kv_cache_layout=layout, block_size=block, attention_config=config, **SMALL)
            assert ids_of(llm, prompts) == expected, (layout, block, kernel)
            llm.close()


@pytest.mark.parametrize("layout", KV_CACHE_LAYOUTS)
def test_octavo_tiny_on_the_reference_backend(make_llm: Make, held_out_prompts: list[str], layout: str) -> None:
    prompts = sorted(held_out_prompts, key=len)[:2]
    expected = ids_of(make_llm(), prompts)
    for block, kernel in ((16, 16), (128, 32)):
        config = {"backend": "reference", "kernel_block_size": kernel}
        llm = make_llm(kv_cache_layout=layout, block_size=block, attention_config=config, **SMALL)
        assert ids_of(llm, prompts) == expected, (layout, block, kernel)
        llm.close()


def test_two_groups_everywhere(make_llm: Make, two_groups: dict[str, Any]) -> None:
    """A second round finds its prefixes in the cache, in both groups, and blocks pass from one group to the other."""
    expected = ids_of(make_llm(attention_backend="reference", **two_groups, **SMALL), token_prompts(5, 130, 67))
    assert len({tuple(ids) for ids in expected}) == len(expected)
    for layout in KV_CACHE_LAYOUTS:
        for block, kernel in BLOCKS:
            config = {"kernel_block_size": kernel}
            llm = make_llm(kv_cache_layout=layout, block_size=block, attention_config=config, **two_groups, **SMALL)
            for _ in range(2):
                assert ids_of(llm, token_prompts(5, 130, 67)) == expected, (layout, block, kernel)
            assert llm.engine.scheduler.kv.num_groups == 3  # one full, two sliding
            llm.close()


def test_latent_attention_everywhere(make_llm: Make, latent: dict[str, Any]) -> None:
    expected = ids_of(make_llm(attention_backend="reference", **latent, **SMALL), token_prompts(5, 130, 67))
    assert len({tuple(ids) for ids in expected}) == len(expected)
    for layout in KV_CACHE_LAYOUTS:
        for block, kernel in ((16, 16), (128, 16), (128, 64)):
            config = {"kernel_block_size": kernel}
            llm = make_llm(kv_cache_layout=layout, block_size=block, attention_config=config, **latent, **SMALL)
            for _ in range(2):  # the second round finds its prefixes in the cache
                assert ids_of(llm, token_prompts(5, 130, 67)) == expected, (layout, block, kernel)
            llm.close()


def test_the_mla_backend_refuses_the_cpu(make_llm: Make, latent: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="attention backend 'mla' runs on device cuda, got cpu"):
        make_llm(attention_backend="mla", **latent, **SMALL)


@pytest.mark.parametrize("layout", KV_CACHE_LAYOUTS)
def test_B2_9_a_backend_that_only_takes_64_gets_64(
    make_llm: Make, held_out_prompts: list[str], example_on_path: str, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of 128 for the scheduler, 64 for the kernel: nobody else has to know."""
    prompts = sorted(held_out_prompts, key=len)[-3:]
    expected = ids_of(make_llm(), prompts)
    llm = make_llm(block_size=128, kv_cache_layout=layout, attention_config={"backend": example_on_path}, **SMALL)
    assert llm.engine.scheduler.kv.block_size == 128
    from example_backend import LoopBackend

    seen = []
    prepare = LoopBackend.prepare
    monkeypatch.setattr(
        LoopBackend, "prepare", lambda self, inputs, **options: (seen.append(inputs.block_size), prepare(self, inputs))
    )
    assert ids_of(llm, prompts) == expected
    assert set(seen) == {64}


def test_layers_with_another_backend(make_llm: Make, held_out_prompts: list[str], example_on_path: str) -> None:
    """One group, two backends, one kernel block size that both take: 64."""
    prompts = sorted(held_out_prompts, key=len)[-3:]
    expected = ids_of(make_llm(), prompts)
    for layout in KV_CACHE_LAYOUTS:
        config = {"backend": "cpu", "layer_backends": {example_on_path: [1, 2], "reference": [0]}}
        llm = make_llm(block_size=128, kv_cache_layout=layout, attention_config=config, **SMALL)
        assert ids_of(llm, prompts) == expected, layout
        assert [block_map.kernel_block_size for block_map in pool_of(llm).block_maps] == [64, 64, 64]
        llm.close()


def test_B2_9_backends_of_one_group_with_kernel_block_sizes_of_their_own(
    make_llm: Make, held_out_prompts: list[str], example_on_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No size suits both: where a token's heads lie together each reads the same bytes in its own blocks."""
    from example_backend import LoopBackend

    class SmallBlocks(LoopBackend):
        capability = dataclasses.replace(LoopBackend.capability, kernel_block_sizes=(32,))

    monkeypatch.setattr("example_backend.SmallBlocks", SmallBlocks, raising=False)
    prompts = sorted(held_out_prompts, key=len)[-3:]
    expected = ids_of(make_llm(), prompts)
    config = {"backend": example_on_path, "layer_backends": {"example_backend:SmallBlocks": [1, 3]}}
    for layout in ("LBNHC", "BLNHC"):
        llm = make_llm(block_size=128, kv_cache_layout=layout, attention_config=config, **SMALL)
        assert [block_map.kernel_block_size for block_map in pool_of(llm).block_maps] == [64, 32]
        for _ in range(2):
            assert ids_of(llm, prompts) == expected, layout
        llm.close()
    with pytest.raises(ValueError, match="needs 64-token kernel blocks, which 128-token blocks of layout BLHNC cannot"):
        make_llm(block_size=128, kv_cache_layout="BLHNC", attention_config=config, **SMALL)


def test_L3_G3_backends_without_a_common_layout_are_refused_with_what_each_takes(
    make_llm: Make, example_on_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from example_backend import LoopBackend

    monkeypatch.setattr(LoopBackend, "capability", dataclasses.replace(LoopBackend.capability, layouts=("LBNHC",)))
    config = {"backend": "cpu", "layer_backends": {example_on_path: [0]}}
    assert pool_of(make_llm(block_size=64, attention_config=config, **SMALL)).layout.name == "LBNHC"
    monkeypatch.setattr(CpuBackend, "capability", dataclasses.replace(CpuBackend.capability, layouts=("BLHNC",)))
    with pytest.raises(ValueError, match=r"No KV cache layout satisfies.*cpu: BLHNC; example_backend:LoopBackend: LBN"):
        make_llm(block_size=64, attention_config=config, **SMALL)


@pytest.mark.parametrize(
    ("layers", "named"),
    [
        ({"reference": [99]}, "names layer 99: the model has layers 0 to"),
        ({"reference": [0], "cpu": [0]}, "names a layer twice"),
        ({"reference": "0"}, "must name layers per backend"),
        (["reference"], "must name layers per backend"),
        ({"refrence": [0]}, "unknown attention backend 'refrence'.*change attention_backend"),
    ],
)
def test_layers_that_cannot_have_another_backend(make_llm: Make, layers: Any, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        make_llm(attention_config={"layer_backends": layers})


def test_a_backend_that_is_not_known_is_refused_with_the_setting(make_llm: Make) -> None:
    with pytest.raises(
        ValueError, match=r"attention_backend='warp': unknown .* known are cpu, .*change attention_backend"
    ):
        make_llm(attention_backend="warp")


def test_the_choice_of_a_backend_is_logged_once_with_its_reason(
    make_llm: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    logger, messages = logging.getLogger("octavo.worker.assembly"), []
    monkeypatch.setattr(logger, "info", lambda text, *arguments: messages.append(text % arguments))
    llm = make_llm()
    reasons = [message for message in messages if message.startswith("attention backend")]
    assert reasons == ["attention backend cpu: compiled CPU operators are there"]
    assert llm.engine.memory.table_bytes == table_bytes_of(llm)


def table_bytes_of(llm: LLM) -> int:
    """What the plan calls tables, as allocated."""
    runner = runner_of(llm.engine)
    tensors = [runner._requests.token_ids.data, runner._buffers.slot_mapping, *runner._buffers.block_tables]
    return sum(tensor.nbytes for tensor in [*tensors, *(table.data for table in runner._tables.tables)])


@pytest.mark.parametrize(("wish", "layout"), [(None, "LBHNC"), ("NHD", "LBNHC"), ("HND", "LBHNC"), ("BLNHC", "BLNHC")])
def test_a_wish_for_a_layout_is_met(make_llm: Make, wish: str | None, layout: str) -> None:
    settings = {} if wish is None else {"kv_cache_layout": wish}
    assert pool_of(make_llm(**settings, **SMALL)).layout.name == layout


def test_L3_G2_a_layout_that_the_backend_does_not_take_is_refused(
    make_llm: Make, example_on_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from example_backend import LoopBackend

    monkeypatch.setattr(LoopBackend, "capability", dataclasses.replace(LoopBackend.capability, layouts=("LBNHC",)))
    fields = {"block_size": 128, "attention_config": {"backend": example_on_path}, **SMALL}
    assert pool_of(make_llm(**fields)).layout.name == "LBNHC"
    with pytest.raises(ValueError, match=r"kv_cache_layout=BLHNC does not satisfy.*LoopBackend: LBNHC"):
        make_llm(kv_cache_layout="BLHNC", **fields)


def test_a_backend_of_another_block_size_is_refused(make_llm: Make, example_on_path: str) -> None:
    with pytest.raises(ValueError, match=r"No common block size for 16 \(example_backend:LoopBackend: \[64\]\)"):
        make_llm(block_size=16, attention_config={"backend": example_on_path})


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"attention_config": {"kernel_block_size": 48}, "block_size": 128}, "must divide block_size=128"),
        ({"attention_config": {"kernel_block_size": "64"}}, "whole number"),
        ({"attention_config": {"kernel_block_size": 0}}, "whole number"),
        ({"kv_cache_layout": "NHDX"}, "must be one of LBHNC"),
    ],
)
def test_a_wish_that_cannot_be_met_is_refused(make_llm: Make, fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        make_llm(**fields)


def pool_of(llm: LLM) -> Any:
    return runner_of(llm.engine)._pool


@pytest.mark.parametrize("layout", KV_CACHE_LAYOUTS)
def test_INV_6_freed_blocks_full_of_nan_change_nothing(make_llm: Make, two_groups: dict[str, Any], layout: str) -> None:
    config = {"kernel_block_size": 16}
    fields = {**two_groups, **SMALL, "block_size": 32, "kv_cache_layout": layout, "attention_config": config}
    llm = make_llm(enable_prefix_caching=False, **fields)
    expected = ids_of(llm, token_prompts(5, 130, 67))
    pool_of(llm).buffer.fill_(float("nan"))
    assert ids_of(llm, token_prompts(5, 130, 67)) == expected
    assert not pool_of(llm).buffer.isnan().all()


@pytest.mark.parametrize("layout", KV_CACHE_LAYOUTS)
def test_2_16_fresh_blocks_are_zeroed_before_they_are_used(
    make_llm: Make, two_groups: dict[str, Any], layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every byte of a block that was handed out is a token's or zero; what nobody held keeps its poison."""

    def zeroed(*args: Any, **options: Any) -> tuple[CacheGroup, ...]:
        return tuple(dataclasses.replace(group, zero_fresh_blocks=True) for group in make_groups(*args, **options))

    monkeypatch.setattr("octavo.startup.cache.make_groups", zeroed)
    llm = make_llm(block_size=32, kv_cache_layout=layout, enable_prefix_caching=False, **two_groups, **SMALL)
    pool = pool_of(llm)
    pool.buffer.fill_(float("nan"))
    handed_out: set[int] = set()
    monkeypatch.setattr(
        "octavo.worker.runner.zero_blocks", lambda data, ids: (handed_out.update(ids), zero_blocks(data, ids))
    )
    ids_of(llm, token_prompts(5, 130, 67))
    assert handed_out
    rows = [row.view(torch.float32) for row in pool.data]
    for block in range(pool.num_blocks):
        assert any(row[block].isnan().any() for row in rows) is (block not in handed_out)
