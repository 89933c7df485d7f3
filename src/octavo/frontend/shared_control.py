"""Control: pauses, sleep and resets of an engine in this process, for any thread.

Owns the order of steps and moves. Knows neither prompts nor text. Invariant: each move is made between two steps, and a
pause that waits lets other threads' requests end.
"""

from __future__ import annotations

from collections.abc import Sequence

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
)
from octavo.frontend.sharing import SharedEngine


class Control:
    """The moves for an engine in this process, which any thread may ask for."""

    def __init__(self, shared: SharedEngine) -> None:
        """`shared`: whom all threads use."""
        self._shared = shared

    @property
    def standing(self) -> Standing:
        """How the engine stands."""
        return self._shared.ask("standing")

    def pause(self, mode: object, *, clear_cache: bool | None) -> None:
        """See LLM.pause_generation."""
        mode = check_mode(mode)
        self._shared.halt(PauseOrder(wait=mode == "wait", clear_cache=bool(clear_cache)), abort=mode == "abort")
        if mode == "wait":
            self._wait_for_pause()

    def _wait_for_pause(self) -> None:
        standing = Standing()

        def is_over() -> bool:
            nonlocal standing
            standing = self._shared.engine.ask("standing")
            return standing.settled or not standing.paused

        self._shared.run_until(is_over)
        if not standing.paused:
            raise WrongStateError("pause: generation was resumed before the requests had ended")

    def resume(self) -> None:
        """Undo a pause."""
        self._shared.ask("resume")

    def sleep(self, level: object, mode: object, tags: Sequence[str] | None = None) -> None:
        """See LLM.sleep."""
        order, mode = SleepOrder(level=check_level(level), tags=check_tags(tags)), check_mode(mode)
        before = self._shared.ask("check_sleep", order)
        self.pause(mode, clear_cache=None)
        self._shared.ask("sleep", msgspec.structs.replace(order, ends_pause=not before.paused))

    def wake_up(self, tags: Sequence[str] | None) -> bool:
        """Whether all is awake."""
        return not self._shared.ask("wake_up", WakeOrder(check_tags(tags))).asleep

    def reset_prefix_cache(self, *, reset_running_requests: bool, reset_connector: bool = False) -> bool:
        """Whether it was reset."""
        return self._shared.ask("reset_prefix_cache", ResetOrder(reset_running_requests, reset_connector)).success

    def check_awake(self, asked: str) -> None:
        """Raise WrongStateError where a request would wait for nothing that its own thread could do. asked: by what."""
        gate = self._shared.engine.core.gate
        if gate.lost:
            raise WrongStateError(f"{asked}: {gate.lost_because}")
        if gate.asleep:
            raise WrongStateError(f"{asked}: the engine sleeps at level {gate.level}: call wake_up first")
