"""Pauses, sleep and resets of an engine in a process of its own.

Owns the order of messages that each move takes, and what is known of the engine's standing between them. Knows neither
text nor HTTP. Invariants: when a pause returns, no step runs and every token that was drawn is at its stream; a pause
that waits can be undone by another task meanwhile, and then says so; an engine that was restarted is awake.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import msgspec

from octavo.frontend.control import (
    PauseOrder,
    ResetOrder,
    SleepOrder,
    Standing,
    WakeOrder,
    WrongStateError,
    check_level,
    check_mode,
    check_tags,
    read_standing,
)
from octavo.serve.engine.refusals import EngineHaltedError

# Ask the core; tell the streams what came; end every request with what it has.
Ask = Callable[[str, bytes], Awaitable[bytes]]
NEW = ("queue", "refuse")  # what becomes of requests that come while generation is paused


class AsyncControl:
    """The moves, for who serves one engine."""

    def __init__(self, ask: Ask, deliver: Callable[[], None], abort_all: Callable[[], Awaitable[object]]) -> None:
        """`deliver`: tell the streams all that came; `abort_all`: end every request with what it has."""
        self._ask, self._deliver, self._abort_all = ask, deliver, abort_all
        self.last = Standing()  # as it was told last
        self._refuses = False  # new requests while paused

    def forget(self) -> None:
        """Another engine process has come."""
        self.last, self._refuses = Standing(), False

    def check_new(self) -> None:
        """Raise EngineHaltedError where a new request cannot even wait."""
        if self.last.lost:
            raise EngineHaltedError(self.last.lost_because, "weights_discarded")
        if self._refuses and self.last.paused:
            raise EngineHaltedError("generation is paused, and new requests are refused until it resumes", "paused")

    async def standing(self) -> Standing:
        """As it is now."""
        return await self.move("standing")

    def learn(self, standing: Standing) -> None:
        """What the core has told beside another answer."""
        self.last = standing

    async def move(self, name: str, order: object = None) -> Standing:
        """One message. Raises WrongStateError for a move that is refused, ValueError and EngineDeadError."""
        self.last = read_standing(await self._ask(name, b"" if order is None else msgspec.msgpack.encode(order)))
        return self.last

    async def pause(self, mode: object = "abort", *, clear_cache: bool | None = None, new: str = "queue") -> None:
        """See LLM.pause_generation. new: "refuse": a request that comes meanwhile is not queued."""
        mode = check_mode(mode)
        standing = await self.move("pause", PauseOrder(wait=mode == "wait", clear_cache=bool(clear_cache)))
        self._refuses = new == "refuse"
        if not standing.settled and not (await self.move("settled")).paused:
            raise WrongStateError("pause: generation was resumed before the requests had ended")
        self._deliver()
        if mode == "abort":
            await self._abort_all()

    async def resume(self) -> None:
        """Undo a pause, any number of times."""
        await self.move("resume")

    async def sleep(self, level: object = 1, mode: object = "abort", tags: Sequence[str] | None = None) -> None:
        """See LLM.sleep. tags: those whose memory goes, and that are to be woken; None: all of the level's."""
        order, mode = SleepOrder(level=check_level(level), tags=check_tags(tags)), check_mode(mode)
        before = await self.move("check_sleep", order)
        await self.pause(mode)
        await self.move("sleep", msgspec.structs.replace(order, ends_pause=not before.paused))

    async def wake_up(self, tags: Sequence[str] | None = None) -> bool:
        """Whether all is awake."""
        return not (await self.move("wake_up", WakeOrder(check_tags(tags)))).asleep

    async def reset_prefix_cache(self, *, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Whether it was reset: not while requests run, unless they are to be computed again."""
        return (await self.move("reset_prefix_cache", ResetOrder(reset_running_requests, reset_connector))).success
