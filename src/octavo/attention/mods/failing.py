"""Which rows of a step fail by a user's mods, where together they do.

Owns the search. Does not know what a row is. Invariant: a row is found if and only if it fails alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np

from octavo.attention.mods import ModError
from octavo.plan import IntArray

_LOG = logging.getLogger(__name__)


def find_failing(places: IntArray, error: ModError, attempt: Callable[[IntArray], ModError | None]) -> list[int]:
    """Which of `places`, that fail with `error` together, fail alone. attempt: what some of them fail with."""
    if len(places) == 1:
        _LOG.error("a request ends: %s", error)
        return [int(places[0])]
    found: list[int] = []
    for half in np.array_split(places, 2):
        if (own := attempt(half)) is not None:
            found += find_failing(half, own, attempt)
    return found
