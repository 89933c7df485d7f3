"""Greedy output of the bundled model equals transformers', token for token, alone and together (float32)."""

from __future__ import annotations

from importlib import resources
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from settings_matrix import SETTINGS, num_rounds, some_first

NUM_OUTPUT = 32
# Every other request of test_same_bits.py is greedy, and has one set of bits in all settings.
TOGETHER = ["batch of 50", "chunks of 16", "asynchronous, small pool"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUT, ignore_eos=True)


@pytest.fixture(scope="module")
def alone(held_out_prompts: list[str]) -> list[list[int]]:
    """The greedy continuation of each prompt by itself."""
    with LLM(dtype="float32", enable_prefix_caching=False) as llm:
        return [list(llm.generate(prompt, GREEDY)[0].outputs[0].token_ids) for prompt in held_out_prompts]


def test_alone(held_out_prompts: list[str], alone: list[list[int]]) -> None:
    """Each token is the likeliest that transformers finds behind those before it: its own greedy continuation."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    folder = str(resources.files("octavo").joinpath("assets/octavo-tiny"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for prompt, tokens in zip(held_out_prompts, alone, strict=True):
        assert len(tokens) == NUM_OUTPUT
        ids = tokenizer(prompt).input_ids
        with torch.inference_mode():
            logits = model(torch.tensor([ids + tokens[:-1]])).logits[0, len(ids) - 1 :]
        assert logits.argmax(dim=1).tolist() == tokens


@pytest.mark.parametrize("name", some_first(TOGETHER))
def test_together(make_llm: Any, held_out_prompts: list[str], alone: list[list[int]], name: str) -> None:
    llm = make_llm(**SETTINGS[name])
    for _ in range(num_rounds(SETTINGS[name])):
        outputs = llm.generate(held_out_prompts, GREEDY)
        assert [list(output.outputs[0].token_ids) for output in outputs] == alone
    if "small pool" in name:
        assert llm.engine.scheduler.num_preemptions > 0
