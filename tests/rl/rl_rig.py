"""What tests of octavo.rl share: tiny transformers models, engines with the same weights, and comparisons in bits."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "models"))

from octavo import LLM, SamplingParams

DTYPES = [torch.float32, torch.bfloat16]
TINY = str(resources.files("octavo").joinpath("assets/octavo-tiny"))


def tiny(dtype: torch.dtype = torch.bfloat16) -> Any:
    """octavo-tiny as transformers loads it."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(TINY, dtype=dtype)


def random_ids(*lengths: int, vocab_size: int = 199, seed: int = 0) -> list[list[int]]:
    """A sequence of random ids of each length."""
    rng = random.Random(seed)
    return [[rng.randrange(vocab_size) for _ in range(length)] for length in lengths]


def sampled(llm: LLM, prompts: Sequence[Sequence[int]], **params: Any) -> tuple[list[list[int]], list[list[float]]]:
    """(prompts and what was drawn behind them, the sampler's log-probability of each token from the second on)."""
    own = {"max_tokens": 8, "temperature": 1.0, "seed": 3, **params}
    wanted = SamplingParams(**own, prompt_logprobs=0, logprobs=0, ignore_eos=True, detokenize=False)
    sequences, values = [], []
    for prompt, output in zip(
        prompts,
        llm.generate([{"prompt_token_ids": list(each)} for each in prompts], wanted, use_tqdm=False),
        strict=True,
    ):
        completion = output.outputs[0]
        assert output.prompt_logprobs is not None and completion.logprobs is not None
        scored = zip(output.prompt_logprobs[1:], prompt[1:], strict=True)
        drawn = zip(completion.logprobs, completion.token_ids, strict=True)
        values.append([entry[token].logprob for entry, token in [*scored, *drawn] if entry is not None])
        sequences.append([*prompt, *completion.token_ids])
    return sequences, values


def num_differing(ours: Sequence[Tensor], theirs: Sequence[Sequence[float]]) -> int:
    """Of log-probabilities of whole sequences: a sequence's last element stands for nothing."""
    assert [len(own) - 1 for own in ours] == [len(other) for other in theirs]
    return sum(
        a != b for own, other in zip(ours, theirs, strict=True) for a, b in zip(own.tolist(), other, strict=False)
    )


def flip_lowest_bit(weight: Tensor, index: int = 0) -> None:
    """Of one element, in place."""
    words = weight.detach().view(torch.int16 if weight.dtype == torch.bfloat16 else torch.int32).view(-1)
    words[index] ^= 1
