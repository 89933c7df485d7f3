"""vLLM's settings by their names. They are kept and change nothing: Octavo's own settings say how it computes."""

from __future__ import annotations

from typing import Any


class Settings:
    """Fields as they were given."""

    def __init__(self, **fields: Any) -> None:
        """Any."""
        vars(self).update(fields)


class AttentionConfig(Settings):
    """Of attention."""


class CompilationConfig(Settings):
    """Of compilation and graphs."""


class ParallelConfig(Settings):
    """Of devices."""


class VllmConfig(Settings):
    """Of an engine, for annotations of connectors: Octavo shows them a namespace of these names."""
