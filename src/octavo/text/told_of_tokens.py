"""What is told of a completion's tokens beside their log-probabilities: supports of draws, and experts.

Owns the two accounts and the form in which outputs show them. Does not know updates' order beyond their positions.
Invariant: experts at a position are those that came last for it; a position that never came has -1.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from octavo.plan import RoutedExperts
from octavo.request.sampling_params import RequestOutputKind, SamplingParams


def wants_every_token(params: SamplingParams) -> bool:
    """Whether each token has to be seen when it comes: it is handed out, its text may be a stop, or it has numbers."""
    return (
        params.output_kind is not RequestOutputKind.FINAL_ONLY
        or bool(params.stop_strings)
        or params.logprobs is not None
        or params.logprob_token_ids is not None
        or params.return_sampling_mask
        or params.return_routed_experts
    )


class TokenSupports:
    """Of each token not yet handed out, the ids that could be drawn in its place."""

    __slots__ = ("_known",)

    def __init__(self) -> None:
        """Of no token."""
        self._known: list[list[int] | None] = []

    def add(self, support: bytes) -> int:
        """Of the next token; how many ids."""
        self._known.append(np.frombuffer(support, "<i4").tolist() if support else None)
        return len(support) // 4

    def take(self, count: int, *, keeps: bool) -> list[list[int] | None]:
        """Of the first `count` tokens; None: all tokens could be drawn. keeps: they are shown again later."""
        taken = self._known[:count]
        if not keeps:
            del self._known[:count]
        return taken


class TokenExperts:
    """Which experts a completion's tokens were sent to, the prompt's among them."""

    __slots__ = ("_known", "_shape")

    def __init__(self, shape: tuple[int, int]) -> None:
        """`shape`: layers, and experts of a token in each."""
        self._shape, self._known = shape, np.zeros((0, *shape), np.int16)

    def add(self, part: RoutedExperts) -> None:
        """Of some positions."""
        positions = np.frombuffer(part.positions, "<i4")
        if not len(positions):
            return
        end = int(positions.max()) + 1
        if end > len(self._known):
            grown = np.full((max(end, 2 * len(self._known)), *self._shape), -1, np.int16)
            grown[: len(self._known)] = self._known
            self._known = grown
        self._known[positions] = np.frombuffer(part.experts, "<i2").reshape(len(positions), *self._shape)

    def whole(self, num_tokens: int) -> NDArray[np.int16]:
        """Of the first `num_tokens`, [num_tokens, layers, ranks]."""
        found = np.full((max(num_tokens, 0), *self._shape), -1, np.int16)
        known = self._known[: len(found)]
        found[: len(known)] = known
        return found
