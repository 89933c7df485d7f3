"""Eviction: which key gives way when a memory is full.

Owns LRU and ARC. Knows keys and whether they may go, and neither sizes nor places. Invariant: a key is in at most one
place, and one that somebody uses is never given up.
"""

from __future__ import annotations

import abc
import collections
from collections.abc import Callable

IsFree = Callable[[bytes], bool]


class Eviction(abc.ABC):
    """The order of the keys that are kept."""

    @abc.abstractmethod
    def add(self, key: bytes) -> None:
        """A key that is kept from now on."""

    @abc.abstractmethod
    def use(self, key: bytes) -> None:
        """A kept key is wanted."""

    @abc.abstractmethod
    def drop(self, key: bytes) -> None:
        """A kept key is gone, for another reason than lack of room."""

    @abc.abstractmethod
    def give_way(self, for_key: bytes, is_free: IsFree) -> bytes | None:
        """The key that goes to make room for `for_key`, and is kept no more; None: none may."""


class LRU(Eviction):
    """The least recently used goes first."""

    def __init__(self, num_keys: int) -> None:
        """num_keys: that are kept at most."""
        self._keys = collections.OrderedDict[bytes, None]()

    def add(self, key: bytes) -> None:
        """See Eviction."""
        self._keys[key] = None

    def use(self, key: bytes) -> None:
        """See Eviction."""
        self._keys.move_to_end(key)

    def drop(self, key: bytes) -> None:
        """See Eviction."""
        del self._keys[key]

    def give_way(self, for_key: bytes, is_free: IsFree) -> bytes | None:
        """See Eviction."""
        key = next(filter(is_free, self._keys), None)
        if key is not None:
            del self._keys[key]
        return key


class ARC(Eviction):
    """Adaptive replacement (Megiddo and Modha 2003): keys used once and keys used again share the room.

    How much of it the former have follows from which of the keys that went lately are wanted again: one scan of many
    keys does not drive out what is used all the time.
    """

    def __init__(self, num_keys: int) -> None:
        """num_keys: that are kept at most."""
        self._most = num_keys
        self._target = 0.0  # keys used once that are kept
        self._once = collections.OrderedDict[bytes, None]()
        self._again = collections.OrderedDict[bytes, None]()
        self._gone_once = collections.OrderedDict[bytes, None]()  # that went lately
        self._gone_again = collections.OrderedDict[bytes, None]()

    def add(self, key: bytes) -> None:
        """See Eviction."""
        if key in self._gone_once or key in self._gone_again:
            self._gone_once.pop(key, None)
            self._gone_again.pop(key, None)
            self._again[key] = None
            return
        self._once[key] = None
        while len(self._once) + len(self._gone_once) > self._most and self._gone_once:
            self._gone_once.popitem(last=False)
        while len(self._gone_again) > self._most:
            self._gone_again.popitem(last=False)

    def use(self, key: bytes) -> None:
        """See Eviction."""
        self._once.pop(key, None)
        self._again[key] = None
        self._again.move_to_end(key)

    def drop(self, key: bytes) -> None:
        """See Eviction."""
        self._once.pop(key, None)
        self._again.pop(key, None)

    def give_way(self, for_key: bytes, is_free: IsFree) -> bytes | None:
        """See Eviction."""
        if for_key in self._gone_once:
            step = max(len(self._gone_again) / max(len(self._gone_once), 1), 1.0)
            self._target = min(self._target + step, self._most)
        elif for_key in self._gone_again:
            step = max(len(self._gone_once) / max(len(self._gone_again), 1), 1.0)
            self._target = max(self._target - step, 0.0)
        lines = [(self._once, self._gone_once), (self._again, self._gone_again)]
        if len(self._once) <= self._target:
            lines.reverse()
        for line, gone in lines:
            key = next(filter(is_free, line), None)
            if key is not None:
                del line[key]
                gone[key] = None
                return key
        return None


EVICTION: dict[str, type[LRU | ARC]] = {"lru": LRU, "arc": ARC}
