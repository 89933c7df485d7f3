"""LayerSpec: what a layer says of itself, and all that caches and attention backends know of it.

Owns AttentionSpec (a layer that keeps K and V of tokens), StateSpec (one that keeps a recurrent state) and NoCache (one
that keeps nothing). Knows no blocks, no model and no torch. Invariant: specs are final, a user's mods among them,
before anything is sized by them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import TypeAlias

from octavo.attention.mods import NO_MODS, AttentionMods

_ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AttentionSpec:
    """Attention of one layer. Layers with equal specs share a backend's plan."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float
    window: int = 0  # tokens that a query sees, itself included; 0: all
    soft_cap: float = 0.0  # scores become cap * tanh(score / cap); 0: none
    value_size: int = 0  # latent attention: V is the first `value_size` channels of K; 0: V stands beside K
    chunk: int = 0  # a query at p sees keys of p's chunk of so many, counted from position 0; 0: all
    alibi_slopes: tuple[float, ...] = ()  # per head: slope * (key - query) joins the capped score; empty: none
    sinks: bool = False  # the layer brings a logit per head that joins the softmax and has no value
    causal: bool = True  # False: queries see all of the row (with a window: keys less than `window` away)
    sees_block: bool = (
        False  # not causal, and yet K and V are kept: a drafter's, whose queries are blocks at a row's end
    )
    mods: AttentionMods = NO_MODS  # a user's mask and score changes, after the model's own
    tokens_per_state: int = 1  # tokens that one cached K and V stands for: more than 1 in compressed caches

    @property
    def channels(self) -> int:
        """Of the cache per token and KV head."""
        return self.head_size if self.value_size else 2 * self.head_size

    @property
    def facts(self) -> tuple[str, ...]:
        """The names of the Capability's facts that this spec needs."""
        needs = {
            "window": self.window,
            "chunk": self.chunk,
            "soft_cap": self.soft_cap,
            "alibi": self.alibi_slopes,
            "sinks": self.sinks,
            "non_causal": not self.causal,
            "latent": self.value_size,
            "mods": self.mods is not NO_MODS,
        }
        return tuple(name for name, needed in needs.items() if needed)


@dataclasses.dataclass(frozen=True, slots=True)
class StateTensor:
    """One tensor of what a layer keeps."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # by torch's name
    is_sum: bool = False  # of a state: grows token by token, and may be kept in another dtype

    @property
    def num_bytes(self) -> int:
        """Of one such tensor."""
        return math.prod(self.shape) * _ITEMSIZE[self.dtype]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StateSpec:
    """A layer that keeps a recurrent state, which advances at borders only: multiples of `chunk` tokens.

    Of the chunk that is open at a request's end the inputs are kept, what each token brings to the next state. So a
    position's result follows from the state at the border before it and the inputs since, however a prompt was cut.
    """

    states: tuple[StateTensor, ...]  # of one request, at one border
    inputs: tuple[StateTensor, ...]  # of one token of the open chunk
    chunk: int  # tokens
    reads_uninitialized: bool = False  # what runs it loads bytes that nobody has written: fresh blocks are zeroed
    in_graphs: bool = False  # what runs it never waits for a GPU, so a graph may hold its layer

    def __post_init__(self) -> None:
        """Raises ValueError for a spec without states or inputs, and for chunks of fewer than two tokens."""
        if not self.states or not self.inputs or self.chunk < 2:
            raise ValueError(f"a StateSpec has states, inputs and a chunk of at least 2 tokens, got {self}")


def with_state_dtype(spec: StateSpec, dtype: str) -> StateSpec:
    """`spec` with the tensors of its state that are sums, float32 by their layer, in `dtype`."""
    states = [dataclasses.replace(tensor, dtype=dtype) if tensor.is_sum else tensor for tensor in spec.states]
    return dataclasses.replace(spec, states=tuple(states))


@dataclasses.dataclass(frozen=True, slots=True)
class NoCache:
    """A layer that keeps nothing of a sequence and needs nothing kept: its result follows from its own token."""


LayerSpec: TypeAlias = AttentionSpec | StateSpec | NoCache


def attention_specs(specs: Iterable[LayerSpec]) -> list[AttentionSpec]:
    """Those of the layers that attend, in order."""
    return [spec for spec in specs if isinstance(spec, AttentionSpec)]


def distinct(specs: Sequence[LayerSpec], layers: Iterable[int]) -> list[AttentionSpec]:
    """What the attention layers among `layers` have of their own, each spec once."""
    return list(dict.fromkeys(attention_specs(specs[layer] for layer in layers)))
