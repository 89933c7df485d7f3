"""Hybrid models whose prompts are cut at kept states, in pools that hold little more than one request: same tokens.

A step then computes a part of one prompt though it has budget left, beside rows that decode, verify drafts, are
preempted or aborted.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.cache import policies
from octavo.frontend.engine import Engine
from octavo.request.request import Request

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "models"))

from model_rig import make_reference

MAX_LEN = 400
CUTS = {"snapshot_interval": 1, "max_num_batched_tokens": MAX_LEN, "max_num_seqs": 6}
NGRAM = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"async_scheduling": False},
    "steps in flight, drafts": {"async_scheduling": True, **NGRAM},
    "every third state, pieces": {"snapshot_interval": 3, "max_num_batched_tokens": 150, "async_scheduling": True},
}


def requests_of(rng: random.Random) -> list[tuple[list[int], SamplingParams]]:
    """Long prompts and short ones in turn, some of which begin alike."""
    found = []
    for index in range(6):
        length = rng.randrange(150, 350) if index % 2 == 0 else rng.randrange(1, 40)
        alike = random.Random(index % 3)
        prompt = [alike.randrange(3, 290) for _ in range(length)] + [rng.randrange(3, 290)]
        temperature = rng.choice([0.0, 0.9])
        params = SamplingParams(
            temperature=temperature, seed=index, max_tokens=rng.choice([5, 30]), ignore_eos=True, detokenize=False
        )
        found.append((prompt, params))
    return found


def refuse_blocks(engine: Engine, rng: random.Random) -> None:
    """Now and then no block is left for somebody who runs: the newest is preempted."""
    kv = engine.scheduler.kv
    reserve, reserve_each = kv.reserve, kv.reserve_each

    def seldom(request: Request, num_new: int, ahead: int = 0) -> list[list[int]] | None:
        crowded = len(engine.scheduler.running) > 1 and rng.random() < 0.3
        return None if crowded else reserve(request, num_new, ahead)

    kv.reserve = seldom  # type: ignore[method-assign]
    kv.reserve_each = lambda *given: None if rng.random() < 0.5 else reserve_each(*given)  # type: ignore[method-assign]


def serve(engine: Engine, requests: list[tuple[list[int], SamplingParams]], rng: random.Random) -> dict[int, list[int]]:
    """Tokens of those that were not aborted; they come one after the other."""
    waiting, found, aborted = list(range(len(requests))), dict[int, list[int]](), set[int]()
    while waiting or engine.has_unfinished:
        while waiting and (rng.random() < 0.6 or not engine.has_unfinished):
            number = waiting.pop(0)
            engine.add(str(number), *requests[number])
        for output in engine.step():
            found[int(output.request_id)] = list(output.outputs[0].token_ids)
        if rng.random() < 0.02 and len(aborted) < 2:
            aborted.add(rng.randrange(len(requests)))
            engine.abort(map(str, aborted))
    return {number: tokens for number, tokens in found.items() if number not in aborted}


def test_tokens_are_those_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_reference("lfm2", vocab_size=300).save_pretrained(tmp_path)
    own = {"model": str(tmp_path), "dtype": "float32", "max_model_len": MAX_LEN, "skip_tokenizer_init": True}
    rng = random.Random(5)
    rounds = [requests_of(rng) for _ in range(2)]
    with LLM(**own, enable_prefix_caching=False) as llm:
        alone = [
            [llm.generate({"prompt_token_ids": prompt}, params)[0].outputs[0].token_ids for prompt, params in requests]
            for requests in rounds
        ]
    monkeypatch.setattr(policies, "MOST_SNAPSHOTS", 2)  # a prompt of three chunks is cut, not one of nine
    monkeypatch.setattr(policies, "CUT_TOKENS", 0)
    num_preemptions = 0
    for settings in SETTINGS.values():
        with LLM(**own | CUTS | settings) as llm:
            smallest = llm.engine.memory.blocks_per_request + 1
        with LLM(**own | CUTS | settings | {"num_gpu_blocks_override": smallest * 5 // 4}) as llm:
            refuse_blocks(llm.engine, rng)
            for requests, tokens in zip(rounds, alone, strict=True):
                found = serve(llm.engine, requests, rng)
                assert len(found) >= 4 and found == {number: list(tokens[number]) for number in found}
                assert llm.engine.scheduler.kv.usage == 0.0
                llm.engine.scheduler.kv.check()
            num_preemptions += llm.engine.scheduler.num_preemptions
    assert num_preemptions > 3
