"""No bit depends on the cache's block size, on any backend that a CPU has; sizes need be no powers of two."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.ops import native
from user_mods import EXTRA, FIVE

# block size, kernel block size, and as few blocks as make the requests preempt each other
SIZES = [(16, 16, 17), (32, 32, 0), (48, 48, 7), (64, 64, 0), (144, 48, 4), (144, 144, 0), (256, 64, 0), (528, 528, 0)]


@pytest.mark.parametrize("backend", ["cpu", "reference", "flex", "flex with a mask"])
def test_K4_G3_the_same_bits_at_every_block_size(
    make_llm: Callable[..., LLM], held_out_prompts: list[str], backend: str
) -> None:
    """In chunks, beside each other, from the prefix cache where a prompt fills blocks, and after preemptions."""
    if backend == "cpu" and not native.available():
        pytest.skip("the native library is not built")
    name, slow = backend.split()[0], backend != "cpu"
    prompts = [
        (prompt * 9)[: 40 + 61 * index % 311] for index, prompt in enumerate(held_out_prompts[: 3 if slow else 8])
    ]
    masked = backend == "flex with a mask"
    params = SamplingParams(
        temperature=0.8,
        seed=5,
        max_tokens=4 if slow else 24,
        logprobs=0,
        ignore_eos=True,
        extra_args=EXTRA if masked else None,
    )
    fields: dict[str, Any] = {"max_model_len": 240, "max_num_seqs": 8, "max_num_batched_tokens": 64}
    if masked:
        fields["attention_mods"] = FIVE["with_data"]
    results, preempted, hits = [], 0, 0
    for size, kernel, num_blocks in SIZES:
        options = {"backend": name, "kernel_block_size": kernel}
        pool = {"num_gpu_blocks_override": num_blocks} if num_blocks else {}
        llm = make_llm(**fields, **pool, block_size=size, attention_config=options)
        for _ in range(2 if size in (32, 48) else 1):
            outputs = [output.outputs[0] for output in llm.generate(prompts, params)]
            results.append([(one.token_ids, [list(x.values()) for x in one.logprobs or ()]) for one in outputs])
        preempted += llm.engine.scheduler.num_preemptions
        hits += llm.engine.scheduler.kv.stats.hits
        llm.close()
    assert all(result == results[0] for result in results)
    assert hits and (preempted or slow)
