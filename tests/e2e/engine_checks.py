"""What holds of an engine whenever nothing runs, a request that must always give the same, and graphs without a GPU."""

from __future__ import annotations

from collections.abc import Callable

import torch

from octavo import LLM, SamplingParams
from octavo.device.graphs import EAGER, GraphKey, GraphPool, Issue
from octavo.ops.arrivals import NO_ARRIVALS, Arrivals

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


class Uncaptured(GraphPool):
    """Issues in place of each replay what the graph would hold, padded alike."""

    def capture_first(self, issue: Issue, rehearse: Callable[[GraphKey], object], *_: object, **__: object) -> None:
        for keys in (self._mixed, self._decode):
            rehearse(keys[0])  # once: it has no effect
        self._issue, self.replayed = issue, set[tuple[bool, bool]]()

    def missing_keys(self) -> list[GraphKey]:
        return []

    def has(self, key: GraphKey, issue: Issue) -> bool:
        return key is not EAGER

    def replay(self, key: GraphKey, arrivals: Arrivals = NO_ARRIVALS) -> torch.Tensor:
        arrivals.before_all()
        self.replayed.add((key.is_decode, key.gives_logits))
        return self._issue(key)
