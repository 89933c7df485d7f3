"""What tests of an engine in this process look into, and change: no name of the package leads there."""

from __future__ import annotations

from typing import Any


def runner_of(engine: Any) -> Any:
    """The runner of an engine's only worker. `engine`: an Engine."""
    return engine.core._executor._worker._runner
