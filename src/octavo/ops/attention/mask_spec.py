"""What a query sees, and how its scores are made: plain data of every attention operator, on a CPU or a GPU."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class MaskSpec:
    """Fixed per layer.

    A score is scaled; soft_cap makes it cap * tanh(score / cap), 0 for none. A query sees the keys up to itself (all,
    if not causal), of these the last `window`, itself included (0: all; not causal: as many behind as before), of these
    those of its own chunk of `chunk` tokens from position 0 (0: all).
    """

    scale: float
    window: int = 0
    chunk: int = 0
    causal: bool = True
    soft_cap: float = 0.0

    @property
    def reach(self) -> int:
        """The window or chunk, of which one at most is not 0; 0: all."""
        assert not (self.window and self.chunk), "a window or chunks, not both"
        return self.window or self.chunk
