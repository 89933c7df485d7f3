"""What tests of new weights share: weights that are not octavo-tiny's, and an engine's answers in bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from octavo import LLM, SamplingParams
from rl_rig import TINY

from model_rig import make_reference  # isort: skip, its folder is known through rl_rig

Weights = dict[str, Tensor]
Answers = list[tuple[list[int], list[float]]]


def prompts(*lengths: int) -> list[dict[str, list[int]]]:
    """One of each length."""
    return [{"prompt_token_ids": [(7 * i * i + 3 * i + n) % 190 + 3 for i in range(n)]} for n in lengths]


PROMPTS = prompts(5, 40, 90)


def params(**own: Any) -> SamplingParams:
    """Of a seeded request, whose tokens are compared."""
    common = {"max_tokens": 6, "seed": 5, "logprobs": 0, "ignore_eos": True, "detokenize": False}
    return SamplingParams(**common | own)


def answers(llm: LLM, asked: list[dict[str, list[int]]] = PROMPTS, **own: Any) -> Answers:
    """Of each prompt the tokens and their log-probabilities."""
    found = []
    for output in llm.generate(asked, params(**own), use_tqdm=False):
        completion = output.outputs[0]
        assert completion.logprobs is not None
        chosen = zip(completion.logprobs, completion.token_ids, strict=True)
        found.append((list(completion.token_ids), [entry[token].logprob for entry, token in chosen]))
    return found


def old_weights() -> Weights:
    """octavo-tiny's, bfloat16."""
    return load_file(f"{TINY}/model.safetensors")


def other_weights(seed: int) -> Weights:
    """Float32, as a trainer's masters: few of them are bfloat16's."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: each.float() * (1 + 0.05 * torch.rand(each.shape, generator=generator))
        for name, each in old_weights().items()
    }


def small_weights(folder: Path, count: int) -> list[Weights]:
    """A model of two small layers in `folder`, and some sets of weights, whose first one is in the file."""
    model = make_reference("llama", num_hidden_layers=2, hidden_size=32, intermediate_size=48)
    model.save_pretrained(folder)
    first = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    others = range(1, count)
    return [first] + [
        {n: t * (1 + 0.5 * torch.rand(t.shape, generator=generator)) for n, t in first.items()} for _ in others
    ]


def give(llm: LLM, weights: Weights, version: str | None = None, **own: Any) -> None:
    """One update."""
    with llm.weights(version, **own) as load:
        for name, tensor in weights.items():
            load(name, tensor)
