"""Llama 3: an output that is a call in JSON."""

from __future__ import annotations

from collections.abc import Callable

from octavo.serve.parsers.calls import CallReader
from octavo.serve.parsers.tools.base import ToolParser


class Llama3(ToolParser):
    """{"name": ..., "parameters": {...}}, with <|python_tag|> before it or not, and more of them after semicolons.

    The output begins with the first; what does not is text.
    """

    mark = "<|python_tag|>"
    needs_special_tokens = True

    def _start(self) -> Callable[[], bool]:
        return self._front

    def _front(self) -> bool:
        """Before the first call, or between two."""
        tape = self._tape
        self._lead += tape.skip_space()
        if not len(tape):
            return False
        if self.num_calls and tape.peek() == ";" and ";" not in self._lead:
            self._lead += tape.take(1)
            return True
        here = tape.starts_with(self.mark) if self.mark not in self._lead else False
        if here:
            self._lead += tape.take(len(self.mark))
        elif here is False:
            if tape.peek() == "{":
                return self._begin(CallReader(self._tools))
            self._say(self._lead)
            return self._go(self._text)
        return here is not None

    def _close(self) -> bool:
        return self._go(self._front)
