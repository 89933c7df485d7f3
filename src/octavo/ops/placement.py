"""Where the memory of weights comes from.

Owns the choice, for whoever fills a model: within `placed_by` what is asked for here lies in memory of an owner's own,
as one does that gives it back while addresses stay. Knows neither models nor owners. Invariant: outside of it memory
is torch's.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator

import torch

Allocate = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]
"""(shape, dtype) -> a tensor on the owner's device, whose values nobody has written."""
_CHOSEN: contextvars.ContextVar[Allocate | None] = contextvars.ContextVar("octavo_placement", default=None)


@contextlib.contextmanager
def placed_by(allocate: Allocate | None) -> Iterator[None]:
    """Within, in this thread: `empty` asks `allocate`; None: torch."""
    before = _CHOSEN.set(allocate)
    try:
        yield
    finally:
        _CHOSEN.reset(before)


def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory of a weight on `device`, the owner's where there is one."""
    allocate = _CHOSEN.get()
    return torch.empty(shape, dtype=dtype, device=device) if allocate is None else allocate(shape, dtype)
