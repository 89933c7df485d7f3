"""Drafters on a GPU: the bits of no drafts in every setting, entries that hold, and never a wait (S.2, S.6, M5.7).

Run as a program it prints a table: tokens a step and tokens a second, with each drafter and without.
"""

from __future__ import annotations

import json
import time
from importlib import resources
from typing import Any

import pytest
import torch

if __name__ != "__main__" and not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from octavo import LLM, SamplingParams
from sync_guard import no_waits

pytestmark = pytest.mark.gpu
K = 4
ITSELF = {"method": "draft_model", "model": "octavo-tiny", "draft_noise": 1}
SPEAKERS: dict[str, dict[str, Any]] = {
    "eagle3": {"method": "eagle3", "model": "octavo-tiny-eagle3"},
    "mtp": {"method": "mtp", "model": "octavo-tiny-mtp"},
    "draft_model": ITSELF,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "no graphs": {"enforce_eager": True},
    "chunks of 64": {"max_num_batched_tokens": 64},
    "three rows": {"max_num_seqs": 3},
    "small pool": {"num_gpu_blocks_override": 40, "max_model_len": 512, "max_num_seqs": 24},
}
CACHE = {"kv_cache_memory_bytes": 1 << 28, "max_model_len": 1024}


def prompts(count: int) -> list[str]:
    text = resources.files("octavo").joinpath("assets/octavo-tiny/held_out_prompts.json").read_text()
    found: list[str] = json.loads(text)[:count]
    return found


def params(count: int, max_tokens: int = 41, **fields: Any) -> list[SamplingParams]:
    return [
        SamplingParams(
            temperature=0.9 * (index % 2), seed=index, max_tokens=max_tokens, ignore_eos=True, logprobs=0, **fields
        )
        for index in range(count)
    ]


def make(given: dict[str, Any] | None, **fields: Any) -> LLM:
    settings = fields if "num_gpu_blocks_override" in fields else CACHE | fields
    speculative = {} if given is None else {"num_speculative_tokens": K, "adaptive_depth": False, **given}
    return LLM(device="cuda", speculative_config=speculative, **settings)


def answers(llm: LLM, count: int, **fields: Any) -> list[Any]:
    found = llm.generate(prompts(count), params(count, **fields), use_tqdm=False)
    return [(one.outputs[0].token_ids, one.outputs[0].cumulative_logprob) for one in found]


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def plain(request: pytest.FixtureRequest) -> tuple[str, list[Any]]:
    with make(None, dtype=request.param) as llm:
        return request.param, answers(llm, 24)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", SPEAKERS)
def test_S_2_the_bits_of_no_drafts(plain: tuple[str, list[Any]], name: str, setting: str) -> None:
    """The second run is served from the prefix cache."""
    with make(SPEAKERS[name], dtype=plain[0], **SETTINGS[setting]) as llm:
        answers(llm, 2)  # compiles, which waits
        with no_waits():
            assert answers(llm, 24) == plain[1]
            assert answers(llm, 24) == plain[1]
        stats = llm.engine.scheduler.drafting.stats
        assert stats.num_draft_tokens > 100
        if name == "draft_model":
            assert stats.num_accepted_tokens == stats.num_draft_tokens, "it drafts what it says, from sound entries"


def show(name: str, given: dict[str, Any] | None, count: int) -> None:
    with make(given, dtype="bfloat16", enable_prefix_caching=False) as llm:
        answers(llm, count, max_tokens=128)
        began = time.perf_counter()
        found = answers(llm, count, max_tokens=128)
        seconds = time.perf_counter() - began
        stats = llm.engine.scheduler.drafting.stats
        per_step = 1 + stats.num_accepted_tokens / max(stats.num_drafts, 1)
        speed = sum(len(one[0]) for one in found) / seconds
        print(f"{name:<14}{count:>4} rows {speed:>9.0f} tokens/s {per_step:>6.2f} tokens a step", flush=True)


if __name__ == "__main__":
    for rows in (1, 16):
        for title, own in {"no drafts": None, **SPEAKERS}.items():
            show(title, own, rows)
