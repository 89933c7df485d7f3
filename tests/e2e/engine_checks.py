"""What holds of an engine whenever nothing runs, and a request that must always give the same."""

from __future__ import annotations

from octavo import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
GOOD_PROMPT = "def add(a, b):\n"


def num_missing_blocks(llm: LLM) -> int:
    """Blocks that requests hold. The null block is nobody's."""
    return llm.engine.memory.num_blocks - 1 - llm.engine.scheduler.kv.num_free_blocks


def assert_idle(llm: LLM) -> None:
    """Nothing is queued or held, and the bookkeeping of the blocks is sound."""
    assert not llm.engine.has_unfinished
    assert llm.engine.scheduler.num_unfinished == 0
    assert num_missing_blocks(llm) == 0
    llm.engine.scheduler.kv.check()


def good_tokens(llm: LLM) -> list[int]:
    """The greedy answer to a good request; afterwards the engine is idle."""
    tokens = llm.generate(GOOD_PROMPT, GREEDY)[0].outputs[0].token_ids
    assert_idle(llm)
    return list(tokens)
