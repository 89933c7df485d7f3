"""Caches narrower than what is computed with: near the plain cache's tokens, and the same bits in every setting."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from insides import runner_of
from octavo import LLM, SamplingParams
from octavo.config.engine_config import ConfigError
from octavo.layers.attention import Attention
from settings_matrix import num_rounds

NUM_OUTPUT = 24
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUT, ignore_eos=True, logprobs=0)
DTYPES = ("bfloat16", "fp8", "int8")
SETTINGS: dict[str, dict[str, Any]] = {
    "chunks of 16, no prefix cache": {"max_num_batched_tokens": 16, "max_num_seqs": 16, "enable_prefix_caching": False},
    "small pool": {"num_gpu_blocks_override": 19, "max_model_len": 272, "max_num_seqs": 50},
    "blocks of 64 over 16, tokens first": {
        "block_size": 64,
        "kv_cache_layout": "BLNHC",
        "attention_config": {"kernel_block_size": 16},
    },
}

Make = Callable[..., LLM]
Result = list[tuple[list[int], list[float]]]


def results_of(llm: LLM, prompts: list[str]) -> Result:
    found = []
    for output in llm.generate(prompts, GREEDY):
        completion = output.outputs[0]
        chosen = zip(completion.logprobs or [], completion.token_ids, strict=True)
        found.append((list(completion.token_ids), [entry[token].logprob for entry, token in chosen]))
    return found


@pytest.fixture(scope="module")
def prompts(held_out_prompts: list[str]) -> list[str]:
    return sorted(held_out_prompts, key=len)[::2]


@pytest.fixture(scope="module")
def plain(prompts: list[str]) -> Result:
    with LLM(dtype="float32") as llm:
        return results_of(llm, prompts)


@pytest.mark.parametrize("dtype", DTYPES)
def test_greedy_tokens_stay_near_the_plain_cache(make_llm: Make, prompts: list[str], plain: Result, dtype: str) -> None:
    """The first token's log-probability, and how far the greedy texts agree."""
    llm = make_llm(kv_cache_dtype=dtype)
    found = results_of(llm, prompts)
    first = [abs(own[1][0] - other[1][0]) for own, other in zip(found, plain, strict=True) if own[0][0] == other[0][0]]
    assert len(first) >= 0.8 * len(plain)
    assert max(first) < {"bfloat16": 0.05, "fp8": 0.4, "int8": 0.2}[dtype]
    agreeing = 0
    for own, other in zip(found, plain, strict=True):
        pairs = zip(own[0], other[0], strict=True)
        agreeing += next((place for place, (a, b) in enumerate(pairs) if a != b), NUM_OUTPUT)
    assert agreeing > {"bfloat16": 0.85, "fp8": 0.5, "int8": 0.6}[dtype] * NUM_OUTPUT * len(plain)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_narrow_cache_has_the_same_bits_in_every_setting(make_llm: Make, prompts: list[str], dtype: str) -> None:
    prompts = prompts[1::2]
    alone = make_llm(kv_cache_dtype=dtype, enable_prefix_caching=False)
    expected = [results_of(alone, [prompt])[0] for prompt in prompts]
    for name, settings in SETTINGS.items():
        llm = make_llm(kv_cache_dtype=dtype, **settings)
        for _ in range(num_rounds(settings)):
            assert results_of(llm, prompts) == expected, name
        if name == "small pool":
            assert llm.engine.scheduler.num_preemptions > 0
        llm.close()


def test_the_plan_counts_the_narrow_cache(make_llm: Make) -> None:
    sizes = {dtype: make_llm(kv_cache_dtype=dtype).engine.memory.bytes_per_block for dtype in ("auto", *DTYPES)}
    assert sizes["auto"] == 2 * sizes["bfloat16"] == 4 * sizes["fp8"] == 4 * sizes["int8"]


def test_reference_and_cpu_agree_on_a_quantized_cache(make_llm: Make, prompts: list[str]) -> None:
    few = prompts[:4]
    for dtype in ("fp8", "int8"):
        ours = results_of(make_llm(kv_cache_dtype=dtype), few)
        other = results_of(make_llm(kv_cache_dtype=dtype, attention_backend="reference"), few)
        assert [tokens for tokens, _ in ours] == [tokens for tokens, _ in other]


def test_a_cache_that_cannot_be_is_refused(make_llm: Make) -> None:
    with pytest.raises(ConfigError, match="kv_cache_dtype='float32': K and V are computed in bfloat16"):
        make_llm(dtype="bfloat16", kv_cache_dtype="float32")
    with pytest.raises(ValueError, match="attention backend 'cpu' takes a cache of float32, bfloat16"):
        make_llm(kv_cache_dtype="float16")
    assert make_llm(kv_cache_dtype="float16", attention_backend="reference").generate("a", GREEDY)


def test_the_checkpoints_own_scales_are_used_by_a_float8_cache(
    make_llm: Make, prompts: list[str], model_folder: Path
) -> None:
    """The scales that the start measured, put into the checkpoint: the same bits. Others: other bits."""
    measured = make_llm(kv_cache_dtype="fp8")
    few, layers = prompts[:3], attention_layers(measured)
    expected = results_of(measured, few)
    weights = {name: tensor for file in model_folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    for factor in (1.0, 3.0):
        for layer in layers:
            key, value = layer.tensors.key_scale, layer.tensors.value_scale
            assert key is not None and value is not None
            weights[f"model.layers.{layer.index}.self_attn.k_scale"] = key * factor
            weights[f"model.layers.{layer.index}.self_attn.v_scale"] = value * factor
        save_file(weights, next(iter(model_folder.glob("*.safetensors"))))
        stored = make_llm(model=str(model_folder), kv_cache_dtype="fp8")
        assert torch.equal(attention_layers(stored)[0].tensors.key_scale, layers[0].tensors.key_scale * factor)
        assert (results_of(stored, few) == expected) == (factor == 1.0)
    plain = make_llm(model=str(model_folder))  # a cache that is not quantized has no use for them
    assert attention_layers(plain)[0].tensors.key_scale is None


def attention_layers(llm: LLM) -> list[Attention]:
    return [layer for layer in runner_of(llm.engine).model.modules() if isinstance(layer, Attention)]
