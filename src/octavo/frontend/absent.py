"""What vLLM's LLM has and this one has not: each says by its name what there is instead.

Owns the names and the words. Invariant: to `hasattr` they are not there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

_NO_POOLING = "embeddings, classes and rewards are not computed here"
_ENQUEUE = "generate takes all prompts at once, and stream gives outputs as they come"
_PROFILE = "`octavo bench engine --profile` says where the time of a step goes"
_ABSENT = {
    "embed": _NO_POOLING,
    "encode": _NO_POOLING,
    "classify": _NO_POOLING,
    "reward": _NO_POOLING,
    "beam_search": "there is none: `n` completions of a prompt are drawn each by itself",
    "collective_rpc": "start_weight_update and the methods beside it change weights; a server has POST /collective_rpc",
    "apply_model": "the model is its worker's: start_weight_update and the methods beside it change weights",
    "llm_engine": "it is `engine` here, which has other methods; package octavo-vllm has vLLM's",
    "enqueue": _ENQUEUE,
    "enqueue_chat": _ENQUEUE,
    "wait_for_completion": _ENQUEUE,
    "start_profile": _PROFILE,
    "stop_profile": _PROFILE,
    "preprocess_chat": "`chat` takes messages",
    "shutdown": "it is `close` here, or the end of a `with` block",
    "reset_mm_cache": "there are no media",
}


class Absent:
    """For a class that is asked for these."""

    if not TYPE_CHECKING:  # types know which names there are

        def __getattr__(self, name: str) -> Any:
            """Raise AttributeError, in words."""
            said = f": {_ABSENT[name]}" if name in _ABSENT else ""
            raise AttributeError(f"{type(self).__name__} has no {name}{said}", name=name, obj=self)
