"""Which rows of a step fail by a user's mods, where together they do.

Owns the search, and what becomes of a step whose mods fail by chance. Does not know what a row is. Invariant: a row
that fails alone is found; one that does not is, only where the others that are left fail with it again and again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from octavo.attention.mods import ModError
from octavo.plan import IntArray

_LOG = logging.getLogger(__name__)
_TRIES = 8  # of places that fail together and never alone
_Issued = TypeVar("_Issued")


def leave_out_failing(
    count: int,
    error: ModError,
    attempt: Callable[[IntArray], ModError | None],
    issue: Callable[[IntArray, list[int]], _Issued],
) -> _Issued:
    """`issue(sound, failing)` of the places below `count`, all of which failed with `error` together.

    attempt: what some of them fail with. issue may raise ModError, as of a mod that fails by chance: then what it was
    given is searched again, and fails where that finds nobody too often.
    """
    sound, failing, tries = np.arange(count), list[int](), 0
    while True:
        found = find_failing(sound, error, attempt)
        tries += not found
        if tries > _TRIES:
            _LOG.error("%s requests end, none of which fails alone: %s", len(sound), error)
            found = sound.tolist()
        failing += found
        sound = sound[~np.isin(sound, found)]
        try:
            return issue(sound, failing)
        except ModError as again:
            error = again


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
