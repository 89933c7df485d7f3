"""Greedy output of the bundled model equals transformers', token for token, in every setting (float32)."""

from __future__ import annotations

from importlib import resources
from typing import Any

import pytest

from octavo import SamplingParams
from settings_matrix import SETTINGS, SMALL_POOL

NUM_OUTPUT = 32
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUT, ignore_eos=True)


@pytest.fixture(scope="module")
def expected(held_out_prompts: list[str]) -> list[list[int]]:
    """transformers' greedy continuation of each prompt, computed one prompt at a time."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    folder = str(resources.files("octavo").joinpath("assets/octavo-tiny"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    outputs = []
    for prompt in held_out_prompts:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        generated = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NUM_OUTPUT,
            min_new_tokens=NUM_OUTPUT, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        outputs.append(generated[0, ids.shape[1] :].tolist())
    return outputs


def test_alone(make_llm: Any, held_out_prompts: list[str], expected: list[list[int]]) -> None:
    llm = make_llm(enable_prefix_caching=False)
    outputs = [llm.generate(prompt, GREEDY)[0].outputs[0].token_ids for prompt in held_out_prompts]
    assert [list(ids) for ids in outputs] == expected


@pytest.mark.parametrize("name", SETTINGS)
def test_together(make_llm: Any, held_out_prompts: list[str], expected: list[list[int]], name: str) -> None:
    llm = make_llm(**SETTINGS[name])
    for _ in range(2):  # the second time the prefix cache is warm
        outputs = llm.generate(held_out_prompts, GREEDY)
        assert [list(output.outputs[0].token_ids) for output in outputs] == expected


def test_small_pool_preempts(make_llm: Any, held_out_prompts: list[str]) -> None:
    llm = make_llm(**SMALL_POOL)
    llm.generate(held_out_prompts, GREEDY)
    assert llm.engine.scheduler.num_preemptions > 0
