"""The settings under which a request must give the same tokens and the same bits."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest

# A pool of this many blocks holds a few of the prompts at once, so running together they preempt each other.
SMALL_POOL = {"num_gpu_blocks_override": 24, "max_model_len": 320, "max_num_seqs": 50}


def num_rounds(settings: dict[str, Any]) -> int:
    """2 where a second round finds the first one's prompts in the prefix cache; a small pool keeps none of them."""
    return 1 if settings.get("enable_prefix_caching") is False or "num_gpu_blocks_override" in settings else 2


SETTINGS: dict[str, dict[str, Any]] = {
    "batch of 50": {"max_num_seqs": 50},
    "chunks of 16": {"max_num_batched_tokens": 16, "max_num_seqs": 16},
    "chunks of 64": {"max_num_batched_tokens": 64, "max_num_seqs": 50},
    "chunks of 512": {"max_num_batched_tokens": 512, "max_num_seqs": 50},
    "no prefix cache": {"enable_prefix_caching": False, "max_num_seqs": 50},
    "small pool": SMALL_POOL,
    "asynchronous": {"async_scheduling": True, "max_num_seqs": 50},
    "asynchronous, small pool": {"async_scheduling": True, **SMALL_POOL},
    "blocks of 64": {"block_size": 64, "max_num_seqs": 50},
    "two threads": {"num_threads": 2, "max_num_seqs": 50},
    "five threads": {"num_threads": 5, "max_num_seqs": 50},
}


def some_first(own: Collection[str]) -> list[Any]:
    """The settings as parameters of a test; all but `own` are slow ones, which run by name."""
    return [name if name in own else pytest.param(name, marks=pytest.mark.slow) for name in SETTINGS]
