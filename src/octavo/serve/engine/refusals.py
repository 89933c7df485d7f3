"""Why AsyncEngine takes no request, or gives one up: errors that say when it may be worth asking again.

Owns their classes. Knows no HTTP and no engine.
"""

from __future__ import annotations


class EngineDeadError(RuntimeError):
    """The engine is not there, or went away under an open stream."""

    def __init__(self, reason: str, retry_after: float = 5.0) -> None:
        """`retry_after`: seconds after which it may be worth asking again."""
        super().__init__(reason)
        self.retry_after = retry_after


class WeightsLostError(EngineDeadError):
    """The engine went away with weights that it was given: the next one has others, and serves none."""


class EngineLoadingError(EngineDeadError):
    """The engine has not been ready yet."""


class EngineDrainingError(EngineDeadError):
    """The server is about to stop."""


def lost_weights(version: str) -> str:
    """What is said where weights went away with their engine, and what helps."""
    return (
        f"weights {version[:64]!r} were lost when the engine that had them went away: send whole weights, "
        "or call reload_weights (POST /collective_rpc) to serve the checkpoint's"
    )


class CallWithdrawnError(RuntimeError):
    """The core was asked, and who asked has left before it was done: nothing was changed."""


class EngineHaltedError(RuntimeError):
    """The engine lives, and takes no request until somebody lets it. `code`: a word for why."""

    def __init__(self, reason: str, code: str) -> None:
        """`reason` names what ends it."""
        super().__init__(reason)
        self.code = code


class QueueFullError(RuntimeError):
    """Too many requests wait. `retry_after`: seconds; `reason`: "requests" or "tokens"."""

    def __init__(self, reason: str, limit: int, retry_after: float) -> None:
        """`limit` is the one that was reached."""
        super().__init__(f"the queue is full: at most {limit} waiting {reason}")
        self.reason, self.retry_after = reason, retry_after
