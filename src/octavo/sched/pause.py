"""Gate: whether steps are planned: pauses, sleep, and what of an engine's memory is there.

Owns the states of an engine that a trainer stops and wakes, the moves between them and which are refused, and the
messages of these moves. Knows neither requests nor devices: the engine's loop asks it. Invariants: a refused move
changes nothing and says which state forbids it; steps are planned only while nothing is paused, asleep or lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

import msgspec

MEMORY_TAGS = ("weights", "kv_cache")
TAGS = (*MEMORY_TAGS, "scheduling")
MODES = ("keep", "wait", "abort")
BLOCKS_HELD = (
    "a transfer holds blocks of the cache: ask again when it has ended (POST /kv_transfer/release ends an offer)"
)
LOST = "weights were discarded at sleep level 2: send or reload them"


class PauseOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Stop planning steps. wait: once what runs and waits has ended; else at once, with every request as it stands."""

    wait: bool = False
    clear_cache: bool = False


class SleepOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Stop, and give memory back. Level 0: none; 1: the cache's; 2: the weights' too, whose values are lost.

    At level 1 a GPU's weights go as well, and come back from the host's memory.
    """

    level: int = 1
    tags: list[str] | None = None  # of memory, which alone goes and is to be woken; None: all
    ends_pause: bool = False  # the pause that is there was made for this alone

    @property
    def keeps(self) -> dict[str, bool]:
        """Tags of memory that is to go -> whether its values are to come back. The cache's first."""
        tags = [tag for tag in reversed(MEMORY_TAGS) if self.level and (self.tags is None or tag in self.tags)]
        return {tag: tag == "weights" and self.level == 1 for tag in tags}


class WakeOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Take memory again. None: all tags that sleep."""

    tags: list[str] | None = None


class ResetOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Forget every cached prefix. reset_running_requests: those that run are computed again.

    reset_connector: the connector forgets what is its own, too, or the reset is no success.
    """

    reset_running_requests: bool = False
    reset_connector: bool = False


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """How an engine stands after a move."""

    paused: bool = False  # by `pause`, or about to be
    settled: bool = True  # no step runs, and no result is on its way
    sleep_level: int = -1  # -1: awake
    asleep: list[str] = []  # tags
    lost: bool = False  # the weights' values are gone
    lost_because: str = ""
    num_unfinished: int = 0
    refused: str = ""  # why the move was not made
    success: bool = True  # of a reset of the cache


class Askers:
    """Who wait for the end of a pause that waits. What they are answered with comes at the next `tell`."""

    def __init__(self) -> None:
        """Nobody."""
        self._answers: list[Future[bytes]] = []

    def __bool__(self) -> bool:
        """Whether somebody waits."""
        return bool(self._answers)

    def add(self) -> Future[bytes]:
        """One more."""
        self._answers.append(Future())
        return self._answers[-1]

    def tell(self, text: bytes) -> None:
        """Answer all of them."""
        answers, self._answers = self._answers, []
        for answer in answers:
            if not answer.done():  # who asked may have left
                answer.set_result(text)


class Gate:
    """The state alone."""

    def __init__(self) -> None:
        """Open."""
        self.paused = False
        self.draining = False  # a pause that waits for the requests that are there
        self.clears = False  # the cache, once that pause has come
        self.level = -1
        self.asleep: set[str] = set()
        self.lost = False  # the weights' values are gone
        self.lost_because = ""
        self.overwriting = False  # an update has begun to overwrite the weights: a step would see half of them

    @property
    def is_open(self) -> bool:
        """Whether steps are planned."""
        return not (self.paused or self.asleep or self.lost or self.overwriting)

    @property
    def broken(self) -> bool:
        """Whether the weights were lost by an update: no request waits for others, as those that sleep do."""
        return self.lost and self.lost_because is not LOST

    def resume(self) -> str:
        """Undo a pause; why it cannot be, or ""."""
        if self.asleep:
            return f"resume: the engine sleeps (level {self.level}; {self._sleeping()}): wake it up first"
        self.paused = self.draining = self.clears = False
        return ""

    def check_sleep(self, level: int) -> str:
        """Why it cannot sleep so, or "". A deeper sleep may follow a lighter one."""
        if level < self.level:
            return f"sleep: the engine sleeps at level {self.level} already: wake it up before level {level}"
        return ""

    def sleep(self, level: int, tags: Sequence[str] | None = None) -> None:
        """What `check_sleep` allows. tags: whose memory goes, and that are to be woken; None: all."""
        self.level = level
        known = [tag for tag in MEMORY_TAGS if level and (tags is None or tag in tags)]
        self.asleep |= {"scheduling", *known}
        if level == 2 and "weights" in known:
            self.lose(LOST)

    def lose(self, because: str) -> None:
        """The weights' values are gone."""
        self.lost, self.lost_because, self.overwriting = True, because, False

    def repaired(self) -> None:
        """Whole weights have come."""
        self.lost, self.lost_because, self.overwriting = False, "", False

    def wake(self, tags: list[str] | None) -> None:
        """Tags that do not sleep stay as they are. Scheduling goes on with the last memory, or by its own name."""
        had_memory = not self.asleep.isdisjoint(MEMORY_TAGS)
        self.asleep -= set(self.asleep if tags is None else tags)
        if had_memory and self.asleep.isdisjoint(MEMORY_TAGS):
            self.asleep.clear()
        if not self.asleep:
            self.level = -1

    def _sleeping(self) -> str:
        return "asleep: " + ", ".join(tag for tag in TAGS if tag in self.asleep)
