"""Two hundred requests of random kinds, some aborted, some refused, coming and going: at the end every block is free,
and whoever was not aborted got what it gets alone."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest

from engine_checks import assert_idle
from octavo import LLM, SamplingParams
from octavo.request.outputs import RequestOutput
from patience import patient

NUM_REQUESTS = 200
NUM_COMPARED = 25
MAX_SECONDS = 60
SETTINGS: dict[str, dict[str, Any]] = {
    "sync": {"max_num_seqs": 16, "max_num_batched_tokens": 96},
    "async, small pool, priority": {
        "async_scheduling": True,
        "block_size": 8,
        "scheduling_policy": "priority",
        "max_num_batched_tokens": 64,
        "max_num_seqs": 32,
        "num_gpu_blocks_override": 46,
        "max_model_len": 320,
    },
}


def random_request(draw: random.Random) -> tuple[list[int], SamplingParams]:
    """A prompt that often begins as another one does, and parameters of any kind."""
    start = [draw.choice([300, 400])] * draw.choice([0, 5, 40, 100])
    prompt = start + [draw.randrange(4096) for _ in range(draw.choice([1, 3, 20, 90]))]
    wishes: list[dict[str, Any]] = [
        {},
        {"temperature": 0.0},
        {"logprobs": 3},
        {"prompt_logprobs": 1},
        {"n": 2},
        {"top_p": 0.7, "top_k": 20},
        {"repetition_penalty": 1.3},
        {"stop": ["e", "self"]},
        {"ignore_eos": False, "logit_bias": {0: 5.0}},
        {"bad_words": ["the"], "min_tokens": 3},
        {"detokenize": False},
        {"stop_token_ids": [16, 201]},
    ]
    fields: dict[str, Any] = {
        "max_tokens": draw.choice([1, 2, 17, 60]),
        "ignore_eos": True,
        "seed": draw.randrange(1 << 32),
    }
    for wish in draw.sample(wishes, 2):
        fields |= wish
    fields["min_tokens"] = min(fields.get("min_tokens", 0), fields["max_tokens"])
    if not fields.get("detokenize", True):
        fields.pop("stop", None)  # needs text
    return prompt, SamplingParams(**fields)


def run(llm: LLM, draw: random.Random) -> tuple[dict[str, RequestOutput], dict[str, Any], set[str]]:
    """Requests come and go at random; gives their last outputs, what they asked, and who was aborted."""
    engine = llm.engine
    asked: dict[str, tuple[list[int], SamplingParams]] = {}
    doomed: dict[str, int] = {}  # who is to be aborted, and in how many steps
    ended: dict[str, RequestOutput] = {}
    aborted: set[str] = set()
    began = time.monotonic()
    while len(asked) < NUM_REQUESTS or engine.has_unfinished or doomed:
        assert time.monotonic() - began < patient(MAX_SECONDS), "requests do not end"
        for _ in range(draw.choice([0, 0, 1, 4, 12]) if len(asked) < NUM_REQUESTS else 0):
            name = f"r{len(asked)}"
            asked[name] = random_request(draw)
            engine.add(name, *asked[name], priority=draw.randrange(3))
            if draw.random() < 0.2:
                doomed[name] = draw.choice([0, 1, 2, 5, 20])
            with pytest.raises(ValueError):
                engine.add("refused", [5], SamplingParams(stop_token_ids=[5000]))
        aborted |= {name for name, steps in doomed.items() if steps == 0}
        doomed = {name: steps - 1 for name, steps in doomed.items() if steps > 0}
        engine.abort(aborted)  # those that have ended are ignored
        for output in engine.step():
            if output.finished:
                assert output.request_id not in ended, "a request ends once"
                ended[output.request_id] = output
        if draw.random() < 0.05:
            engine.scheduler.kv.check()
    return ended, asked, aborted


@pytest.mark.parametrize("name", SETTINGS)
def test_soak(llm: LLM, make_llm: Any, name: str) -> None:
    draw = random.Random(name)
    soaked = make_llm(**SETTINGS[name])
    ended, asked, aborted = run(soaked, draw)
    assert_idle(soaked)
    assert set(ended) == set(asked)
    assert 0.1 < len(aborted) / len(asked) < 0.3
    for request_id in aborted:
        assert {completion.finish_reason for completion in ended[request_id].outputs} & {"abort", "stop", "length"}
    survivors = sorted(set(asked) - aborted)
    for request_id in draw.sample(survivors, NUM_COMPARED):
        prompt, params = asked[request_id]
        (alone,) = llm.generate([prompt], params)
        assert ended[request_id].outputs == alone.outputs, request_id
        assert ended[request_id].prompt_logprobs == alone.prompt_logprobs
    if "small pool" in name:
        assert soaked.engine.scheduler.num_preemptions > 0
