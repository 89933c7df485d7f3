"""Registry: a table from names to "module:Class", resolved on first use.

Owns nothing but the rule: a name in the table or a full "package.module:Class" path resolves; anything else is a
ValueError that lists what is known. Importing a table imports none of its members.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from typing import Any


class Registry:
    """A named table of lazily imported classes."""

    def __init__(self, noun: str, members: Mapping[str, str]) -> None:
        """`noun` names the kind of member in error messages."""
        self._noun = noun
        self._members = dict(members)

    def resolve(self, name: str) -> Any:
        """The class behind `name`. Raises ValueError for an unknown name or a path that does not import."""
        path = self._members.get(name, name)
        module_name, colon, attribute = path.partition(":")
        if not colon:
            known = ", ".join(sorted(self._members))
            raise ValueError(f"unknown {self._noun} {name!r}: known are {known}, or a path 'package.module:Class'")
        try:
            return getattr(importlib.import_module(module_name), attribute)
        except (ImportError, AttributeError) as error:
            raise ValueError(f"{self._noun} {name!r} does not load: {error}") from error

    def __iter__(self) -> Iterator[str]:
        """The names of the table."""
        return iter(self._members)

    def __contains__(self, name: object) -> bool:
        """Whether the table knows `name`."""
        return name in self._members
