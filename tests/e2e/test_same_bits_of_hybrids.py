"""Families whose layers keep states of every kind: a seeded request keeps its bits in every setting of an engine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from random_models import token_prompts

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "models"))

from hybrid_configs import HYBRIDS
from model_rig import make_reference

PROMPTS = token_prompts(1, 17, 40, 64, 90, 130, 201, 33, 65)
FAMILIES = ("qwen3-next", "lfm2", "lfm2-moe", "lfm3", "mamba2", "granite4", "nemotron-h", "falcon-h1", "jamba")
SETTINGS: dict[str, dict[str, Any]] = {
    "pieces of 7": {"max_num_batched_tokens": 7, "max_num_seqs": 7},
    "hits": {"enable_prefix_caching": True},
    "last states, drafts": {
        "enable_prefix_caching": True,
        "snapshot_interval": 0,
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 4},
    },
    "preemption": {},  # with a pool of a request and a half
    "blocks of 64, steps in flight": {"block_size": 64, "async_scheduling": True},
}
Result = list[tuple[list[int], list[float]]]


def _params(index: int) -> SamplingParams:
    return SamplingParams(
        temperature=0.9, top_p=0.95, seed=1000 + index, max_tokens=10, ignore_eos=True, logprobs=0, detokenize=False
    )


def _results(llm: LLM, prompts: list[dict[str, list[int]]], first: int = 0) -> Result:
    params, found = [_params(first + index) for index in range(len(prompts))], []
    for output in llm.generate(prompts, params, use_tqdm=False):
        completion = output.outputs[0]
        assert completion.logprobs is not None
        chosen = zip(completion.logprobs, completion.token_ids, strict=True)
        found.append((list(completion.token_ids), [entry[token].logprob for entry, token in chosen]))
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_H_8_every_setting(tmp_path: Path, family: str, dtype: str) -> None:
    assert family in HYBRIDS
    make_reference(family, vocab_size=300).save_pretrained(tmp_path)
    own = {"model": str(tmp_path), "dtype": dtype, "max_model_len": 256, "skip_tokenizer_init": True}
    with LLM(**own, enable_prefix_caching=False) as llm:
        alone = [result for index, prompt in enumerate(PROMPTS) for result in _results(llm, [prompt], index)]
        pool = llm.engine.memory.blocks_per_request * 3 // 2
    assert len({tuple(tokens) for tokens, _ in alone}) == len(PROMPTS)
    for name, settings in SETTINGS.items():
        if name == "preemption":
            settings = {"num_gpu_blocks_override": pool, "enable_prefix_caching": False}
        with LLM(**own | settings) as llm:
            for _ in range(1 if name == "preemption" else 2):  # nothing of the first round is left to a second
                assert _results(llm, PROMPTS) == alone, name
