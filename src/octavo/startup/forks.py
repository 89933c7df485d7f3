"""Processes that are forked from one with an engine: what must be made anew there.

Owns who is told. Knows no engines. Invariant: in a forked process every object that asked for it, and lives, is told
before anything else runs there. A fork copies no thread but its own: locks that others held stay held, and what they
would have done is never done.
"""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable

_methods: list[weakref.WeakMethod[Callable[[], None]]] = []


def tell_in_child(method: Callable[[], None]) -> None:
    """Have a bound method called in every process that is forked from now on, as long as its object lives."""
    _watch()
    _methods[:] = [each for each in _methods if each() is not None]
    _methods.append(weakref.WeakMethod(method))


@functools.cache
def _watch() -> None:
    os.register_at_fork(after_in_child=_tell)


def _tell() -> None:
    for each in list(_methods):
        method = each()
        if method is not None:
            method()
