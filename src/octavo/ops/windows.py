"""Windows: how copies over the bus follow each other, a window at a time.

Owns which windows are under way, the bus's rate as they show it, and when the next one is due. Does not know what is
copied. Invariants: no more windows are under way than are allowed; beside computing, copies that follow each other take
a given share of the bus's rate in the long run, however late a thread is in ordering one of them.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Callable
from typing import Any, Protocol


class Event(Protocol):
    """What torch.cuda.Event does, made with `enable_timing`."""

    def query(self) -> bool:
        """Whether it has happened."""

    def synchronize(self) -> None:
        """Wait until it has happened."""

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds from this one to `end_event`."""


class Windows:
    """Of copies on one stream, which one thread at a time orders."""

    def __init__(
        self,
        most: int,
        share: float,
        computes: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """most: windows under way. share: of the bus's rate while `computes()` says that steps run; 1: all of it."""
        self.most, self.share, self._computes = most, share, computes
        self._clock, self._sleep = clock, sleep
        self._under_way = collections.deque[tuple[Event, int, bool]]()  # their bytes; behind one that was under way
        self._last: Event | None = None  # that was waited for
        self._largest = 0  # bytes of a window so far
        self._due = 0.0  # when the next window is, by the clock
        self.rate = 0.0  # the best of one window behind another, bytes/s; 0: none was seen

    def make_room(self, num_bytes: int) -> None:
        """Wait until the next window may be ordered."""
        while len(self._under_way) >= self.most:
            self._take()
        now = self._clock()
        if not self.rate or self.share >= 1 or not self._computes():
            self._due = now
            return
        seconds = num_bytes / (self.share * self.rate)
        self._due = max(self._due, now - (self.most - 1) * seconds)  # who is late catches up by so many windows
        if self._due > now:
            self._sleep(self._due - now)
        self._due += seconds

    def ordered(self, event: Event, num_bytes: int) -> None:
        """A window has been ordered, and `event` behind it."""
        follows = bool(self._under_way) and not self._under_way[-1][0].query()
        self._under_way.append((event, num_bytes, follows))

    def _take(self) -> None:
        """Wait for the oldest window."""
        event, num_bytes, follows = self._under_way.popleft()
        event.synchronize()
        # Behind an idle bus the time is not the copy's; the end of a transfer is too short a one.
        if self._last is not None and follows and num_bytes >= self._largest:
            self._largest = num_bytes
            self.rate = max(self.rate, num_bytes / max(self._last.elapsed_time(event), 1e-3) * 1e3)
        self._last = event
