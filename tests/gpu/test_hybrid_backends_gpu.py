"""Layers that keep states beside those that attend, by every attention backend of a GPU: bits, and a CPU's tokens.

The other half of tests/e2e/test_hybrid_backends.py.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from families import write_model
from octavo import LLM, SamplingParams

pytestmark = pytest.mark.gpu
LENGTHS = (1, 17, 63, 64, 65, 130, 201, 300)
PROMPTS = [{"prompt_token_ids": [(7 * i * i + 3 * i + n) % 4000 + 3 for i in range(n)]} for n in LENGTHS]
SETTINGS: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": 16, "kv_cache_memory_bytes": 1 << 29}
LIBRARIES: dict[str, dict[str, Any]] = {  # the size of blocks that they take, and no graph holds their plans
    "flash": {"block_size": 256, "enforce_eager": True},
    "flashinfer": {"enforce_eager": True},
}
MODELS = ("octavo-tiny-hybrid", "LFM3")  # the second has windows beside full attention, and another kind of state
Answers = list[tuple[list[int], list[float]]]


@contextlib.contextmanager
def made(model: str, backend: str, **fields: Any) -> Iterator[LLM]:
    """An engine; of a CPU, by its own choice of backends, where `backend` is "cpu"."""
    where: dict[str, Any] = {"device": "cpu"} if backend == "cpu" else {"device": "cuda", "attention_backend": backend}
    own = where | SETTINGS | fields
    with tempfile.TemporaryDirectory() as folder:
        if model == "LFM3":
            if not hasattr(transformers, "Lfm3Config"):
                pytest.skip("this version of transformers, which writes the model, has no LFM3")
            write_model(model, Path(folder))
            own |= {"model": folder, "tokenizer": "octavo-tiny"}
        with LLM(**{"model": model, **own}) as llm:
            yield llm


def answers(llm: LLM, prompts: list[Any], temperature: float = 0.9) -> Answers:
    """Tokens and their log-probabilities."""
    found = []
    shared: dict[str, Any] = {"max_tokens": 16, "ignore_eos": True, "logprobs": 0, "detokenize": False}
    seeds = [len(prompt["prompt_token_ids"]) for prompt in prompts]
    params = [SamplingParams(temperature=temperature, seed=seed, **shared) for seed in seeds]
    for output in llm.generate(prompts, params, use_tqdm=False):
        one = output.outputs[0]
        assert one.logprobs is not None
        chosen = zip(one.logprobs, one.token_ids, strict=True)
        found.append((list(one.token_ids), [entry[token].logprob for entry, token in chosen]))
    return found


@pytest.mark.parametrize(("backend", "cached"), [("paged", "auto"), ("paged", "fp8"), ("flex", "auto")])
@pytest.mark.parametrize("model", MODELS)
def test_H_8_H_5_a_request_has_one_set_of_bits_by_each_backend(model: str, backend: str, cached: str) -> None:
    """Alone, in a batch whose prompts are cut, found in the cache; K and V in 8 bits, too, beside float32 states."""
    own = {"dtype": "bfloat16", "kv_cache_dtype": cached}
    with made(model, backend, **own, enable_prefix_caching=False) as llm:
        assert llm.engine.resolved.state_dtype == "float32"
        expected = [answers(llm, [prompt])[0] for prompt in PROMPTS]
    with made(model, backend, **own, max_num_batched_tokens=100) as llm:
        for _ in range(2):
            assert answers(llm, PROMPTS) == expected
        assert llm.engine.scheduler.kv.stats.hits > 0


@pytest.mark.parametrize("backend", ["paged", "flex"])
@pytest.mark.parametrize("model", MODELS)
def test_greedy_tokens_are_those_of_a_cpu(model: str, backend: str) -> None:
    with made(model, "cpu", dtype="float32") as llm:
        expected = answers(llm, PROMPTS, 0.0)
    with made(model, backend, dtype="float32") as llm:
        found = answers(llm, PROMPTS, 0.0)
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    for (_, one), (_, other) in zip(found, expected, strict=True):
        assert max(abs(p - q) for p, q in zip(one, other, strict=True)) < 1e-3


@pytest.mark.parametrize("backend", LIBRARIES)
@pytest.mark.parametrize("model", MODELS)
def test_a_library_runs_beside_states_or_is_refused_by_name(model: str, backend: str) -> None:
    """It promises no bits; how likely it finds what a model said is as near to float32's numbers as by `paged`."""
    with made(model, "paged", dtype="bfloat16") as llm:
        said = [p["prompt_token_ids"] + tokens for p, (tokens, _) in zip(PROMPTS, answers(llm, PROMPTS), strict=True)]
        ours = likelihoods(llm, said)
    try:
        with made(model, backend, dtype="bfloat16", **LIBRARIES[backend]) as llm:
            theirs = likelihoods(llm, said)
    except ValueError as error:
        assert backend in str(error) and ("found" in str(error) or "needs the package" in str(error)), error
        return
    with made(model, "paged", dtype="float32") as llm:
        exact = likelihoods(llm, said)
    least, found = ((each - exact).abs() for each in (ours, theirs))
    print(f"{model} by paged {least.mean():.4f} {least.max():.3f}, by {backend} {found.mean():.4f} {found.max():.3f}")
    assert found.mean() < 1.3 * least.mean() and found.max() < 2 * least.max(), (found.mean(), least.mean())


def likelihoods(llm: LLM, sequences: list[list[int]]) -> torch.Tensor:
    """Log-probabilities of the last 16 tokens of each."""
    params, found = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False), list[float]()
    for output in llm.generate([{"prompt_token_ids": ids} for ids in sequences], params, use_tqdm=False):
        assert output.prompt_logprobs is not None
        entries = list(zip(output.prompt_logprobs, output.prompt_token_ids, strict=True))[-16:]
        found += [entry[token].logprob for entry, token in entries if entry is not None]
    return torch.tensor(found)
