"""Python's garbage collector beside an engine.

Owns how seldom it runs there, and what it no longer looks at. Knows no engine. Invariant: nothing that becomes garbage
in a cycle is kept for good, but by `settle`, for a process whose loaded objects live as long as itself.

A batch makes thousands of objects and drops them again without a cycle: at Python's thresholds the collector would go
through the young ones every 700, and now and then through all that torch has loaded, for 80 to 90 ms.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

_SELDOM = (50_000, 20, 50)


def settle() -> None:
    """For a process that serves: what is loaded is never looked at again, and new objects seldom are."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_SELDOM)


@contextlib.contextmanager
def loading() -> Iterator[None]:
    """Within: no collections, unless the process has its own idea of them.

    What is loaded meanwhile, as torch's 300,000 objects, lives on: 0.2 s of looking at it would find nothing. It is
    then as old as what has survived collections.
    """
    own = gc.isenabled() and not gc.get_freeze_count()
    if own:
        gc.disable()
    try:
        yield
    finally:
        if own:
            gc.freeze()
            gc.unfreeze()  # into the oldest generation
            gc.enable()


@contextlib.contextmanager
def seldom() -> Iterator[None]:
    """Within: collections are seldom, unless the process has its own idea of them."""
    before = gc.get_threshold()
    if 0 < before[0] < _SELDOM[0]:
        gc.set_threshold(*_SELDOM)
    try:
        yield
    finally:
        gc.set_threshold(*before)
