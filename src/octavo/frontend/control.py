"""What a trainer asks of an engine beside requests: pauses, sleep, resets; from Python and over HTTP alike.

Owns the reading of what was asked and of a core's answers, and WrongStateError. The states are `octavo.sched.pause`'s.
Knows neither threads nor HTTP. Invariant: a move that the core refuses is a WrongStateError that names state and move.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from octavo.config.quoted import quoted
from octavo.request.sampling_params import ParameterError
from octavo.sched.pause import LOST, MODES, TAGS, PauseOrder, ResetOrder, SleepOrder, Standing, WakeOrder

__all__ = [
    "LOST",
    "PauseOrder",
    "ResetOrder",
    "SleepOrder",
    "Standing",
    "WakeOrder",
    "WrongStateError",
    "check_level",
    "check_mode",
    "check_tags",
    "read_standing",
]


# What may stand where.
A_LEVEL = "0, 1 or 2"
A_MODE = f"one of {', '.join(MODES)}"
SOME_TAGS = f"a list of names among {', '.join(TAGS)}"


class WrongStateError(RuntimeError):
    """A move that the engine's state forbids. Nothing was done."""


def read_standing(answer: bytes) -> Standing:
    """A core's answer. Raises WrongStateError for a move that it refused."""
    standing = msgspec.msgpack.decode(answer, type=Standing)
    if standing.refused:
        raise WrongStateError(standing.refused)
    return standing


class _Told(msgspec.Struct):
    standing: Standing


def standing_after(answer: bytes) -> Standing:
    """How the engine stood behind a call for new weights, of the core's answer to that."""
    return msgspec.msgpack.decode(answer, type=_Told).standing


def check_mode(mode: object) -> str:
    """Of a pause. Raises ParameterError."""
    if not isinstance(mode, str) or mode not in MODES:
        raise ParameterError("mode", f"must be {A_MODE}, got {_short(mode)}", "invalid_value")
    return mode


def check_level(level: object) -> int:
    """Of sleep. Raises ParameterError."""
    if isinstance(level, bool) or not isinstance(level, int) or not 0 <= level <= 2:
        raise ParameterError("level", f"must be {A_LEVEL}, got {_short(level)}", "invalid_value")
    return level


def check_tags(tags: Sequence[str] | None) -> list[str] | None:
    """Of memory. None, or none named: all, which is None. Raises ParameterError."""
    if tags is None:
        return None
    named = list(tags) if isinstance(tags, Iterable) and not isinstance(tags, str) else None
    if named is None or not all(isinstance(tag, str) for tag in named):
        raise ParameterError("tags", f"must be {SOME_TAGS}, got {_short(tags)}", "invalid_type")
    for tag in named:
        if tag not in TAGS:
            raise ParameterError("tags", f"unknown tag {quoted(tag, 64)}: known are {', '.join(TAGS)}", "invalid_value")
    return named or None


def _short(value: object) -> str:
    return quoted(value, 64)
