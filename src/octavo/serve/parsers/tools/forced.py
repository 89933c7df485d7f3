"""The forms that a tool choice forces, whatever the model's own: JSON from the first character on."""

from __future__ import annotations

from collections.abc import Callable

from octavo.serve.parsers.calls import CallReader
from octavo.serve.parsers.tools.base import CallArray, ToolParser


class Required(CallArray):
    """The whole output is an array of calls: `serve.sandbox.grammar.from_tool_choice` without a name."""

    def _start(self) -> Callable[[], bool]:
        return self._front

    def _front(self) -> bool:
        self._lead += self._tape.skip_space()
        if not len(self._tape):
            return False
        if self._tape.peek() == "[":
            self._lead += self._tape.take(1)
            return self._go(self._item)
        self._say(self._lead)
        return self._go(self._text)


class Named(ToolParser):
    """The whole output is the arguments of one tool: `serve.sandbox.grammar.from_tool_choice` with its name."""

    def __init__(self, name: str, new_id: Callable[[], str] | None = None) -> None:
        """`name`: the tool's."""
        self._tool = name
        super().__init__({name}, new_id)

    def _start(self) -> Callable[[], bool]:
        return self._front

    def _front(self) -> bool:
        self._lead += self._tape.skip_space()
        if not len(self._tape):
            return False
        if self._tape.peek() == "{":
            return self._begin(CallReader.of_arguments(self._tool))
        self._say(self._lead)
        return self._go(self._text)
