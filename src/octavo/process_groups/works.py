"""Works: what a process group has begun, how it is waited for, and how a group is left with some on their way."""

from __future__ import annotations

import contextlib
import datetime
import time
from collections.abc import Callable
from typing import Any

from octavo.process_groups import ending, thrown

_LOOK_SECONDS = 0.05  # between two looks at whether who waits is to go on waiting
_POLL_SECONDS = 0.0001  # between two looks at a GPU


def wait_for(work: Any, until: float, check: Callable[[], None], *, is_cuda: bool) -> None:
    """Wait for what a group does. Raises RuntimeError where it fails or the time is over, and what `check` raises."""
    while not work.is_completed() and time.monotonic() < until:  # a GPU's wait that is over would end the group
        check()
        if is_cuda:
            time.sleep(_POLL_SECONDS)
            continue
        with contextlib.suppress(RuntimeError), ending.inside():  # what failed is told below
            work.wait(datetime.timedelta(seconds=_LOOK_SECONDS))
    with ending.inside():
        work.wait(datetime.timedelta(seconds=max(until - time.monotonic(), 0.001)))


class Left:
    """A group that was left."""

    def __init__(self, group: Any, threads: frozenset[int], works: list[Any]) -> None:
        """threads: see `thrown`. works: those that were begun, and may be on their way."""
        self._group, self._threads, self._works = group, threads, works

    @property
    def is_quiet(self) -> bool:
        """Whether nothing is on its way."""
        return all(work.is_completed() for work in self._works)

    def leave(self, has_workers: bool) -> None:
        """Let go of it when it is quiet, if its own threads see to that: they want Python's lock for their buffers."""
        while has_workers and not self.is_quiet:
            time.sleep(_LOOK_SECONDS)
        self.end()

    def end(self) -> None:
        """Let go of it; of one in which a thread stands still, of its buffers alone."""
        with ending.inside():
            self._works.clear()
            if thrown.said_by(self._threads) is not None:
                ending.keep(self._group)
            abort = getattr(self._group, "abort", None)
            if abort is not None:
                abort()
            self._group = None
