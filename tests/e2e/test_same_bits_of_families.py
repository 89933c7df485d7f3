"""Families with layers, rotations or weights of their own: a seeded request keeps its bits in every setting."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from random_models import (
    COHERE2,
    EXAONE4,
    GLM4,
    GRANITE,
    MIXTRAL,
    OLMO3,
    PHI4,
    SEED_OSS,
    SMOLLM3,
    settings_of,
    token_prompts,
)
from settings_matrix import SETTINGS, num_rounds

# OLMo 3's five layers are five cache groups, the others' four are four: one request of 320 tokens takes as many times
# the blocks that it takes elsewhere.
SMALL_POOLS = {
    "Olmo3ForCausalLM": 120,
    **dict.fromkeys(("SmolLM3ForCausalLM", "Exaone4ForCausalLM", "Cohere2ForCausalLM"), 96),
}
# One for each way in which a step differs for a layer: rows, pieces of prompts, preemption with a step in flight, where
# blocks end, and who computes. test_same_bits.py has all.
OWN_SETTINGS = ["batch of 50", "chunks of 16", "asynchronous, small pool", "blocks of 64", "five threads"]
PROMPTS = token_prompts(1, 17, 40, 64, 90, 130, 201, 33, 5, 66)
Result = list[tuple[list[int], list[float]]]


def _params(index: int) -> SamplingParams:
    return SamplingParams(
        temperature=0.9, top_p=0.95, seed=1000 + index, max_tokens=12, ignore_eos=True, logprobs=0, detokenize=False
    )


def _results(llm: LLM, prompts: list[dict[str, list[int]]], first: int = 0) -> Result:
    params, found = [_params(first + index) for index in range(len(prompts))], []
    for output in llm.generate(prompts, params, use_tqdm=False):
        completion = output.outputs[0]
        assert completion.logprobs is not None
        chosen = zip(completion.logprobs, completion.token_ids, strict=True)
        found.append((list(completion.token_ids), [entry[token].logprob for entry, token in chosen]))
    return found


@pytest.mark.parametrize(
    "names", [OWN_SETTINGS, pytest.param([*SETTINGS], marks=pytest.mark.slow)], ids=["some", "all"]
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "shape",
    [OLMO3, PHI4, GLM4, GRANITE, SMOLLM3, SEED_OSS, EXAONE4, COHERE2, MIXTRAL],
    ids=lambda shape: shape["architectures"][0],
)
def test_every_setting(tmp_path: Path, shape: dict[str, Any], dtype: str, names: list[str]) -> None:
    own = {"max_model_len": 320, **settings_of(shape, tmp_path), "dtype": dtype}
    with LLM(**own, enable_prefix_caching=False) as llm:
        alone = [result for index, prompt in enumerate(PROMPTS) for result in _results(llm, [prompt], index)]
    assert len({tuple(tokens) for tokens, _ in alone}) == len(PROMPTS)
    for name in names:
        settings = SETTINGS[name]
        if "num_gpu_blocks_override" in settings:
            count = SMALL_POOLS.get(shape["architectures"][0], settings["num_gpu_blocks_override"])
            settings = {**settings, "num_gpu_blocks_override": count}
        with LLM(**own | settings) as llm:
            for _ in range(num_rounds(settings)):
                assert _results(llm, PROMPTS) == alone, name
