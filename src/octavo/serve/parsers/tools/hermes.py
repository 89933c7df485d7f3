"""Hermes and Qwen 3: JSON between tags."""

from __future__ import annotations

from octavo.serve.parsers.calls import CallReader
from octavo.serve.parsers.tools.base import ToolParser


class Hermes(ToolParser):
    """<tool_call>{"name": ..., "arguments": {...}}</tool_call>, any number of them, text around them."""

    opening, closing = "<tool_call>", "</tool_call>"

    def _text(self) -> bool:
        before, mark = self._tape.take_before([self.opening])
        if before:
            self._say(before)
        self._lead = mark
        return bool(mark) and self._go(self._open)

    def _open(self) -> bool:
        self._lead += self._tape.skip_space()
        if not len(self._tape):
            return False
        if self._tape.peek() == "{":
            return self._begin(CallReader(self._tools))
        self._say(self._lead)
        return self._go(self._text)

    def _close(self) -> bool:
        self._tape.skip_space()
        here = self._tape.starts_with(self.closing) if len(self._tape) else None
        if here:
            self._tape.take(len(self.closing))
        return here is not None and self._go(self._text)

    def _broken(self) -> bool:
        before, mark = self._tape.take_before([self.closing])
        self._argue(before)
        return bool(mark) and self._go(self._text)
