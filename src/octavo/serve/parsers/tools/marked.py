"""Calls whose name stands in a head between marks, and whose arguments are JSON: what DeepSeek, Kimi and GPT-OSS share.

Owns Marked, which follows the marks. Invariant: as of ToolParser; a head that names no tool is text.
"""

from __future__ import annotations

from octavo.serve.parsers.calls import CallReader
from octavo.serve.parsers.tools.base import Sectioned

_MAX_HEAD = 300  # characters between a call's mark and its arguments


class Marked(Sectioned):
    """`call_open` HEAD {...} `call_close`, any number of them within `section_open` and `section_close`."""

    call_close = ""
    trailers: tuple[str, ...] = ()  # what may stand between the arguments and `call_close`
    needs_special_tokens = True

    def read_head(self, head: str) -> tuple[str, str] | None:
        """The name, and the id if the model gives one, else ""; None: it is no call's, as where no format says more."""
        return None

    def _opened(self) -> bool:
        rest = self._tape.rest(_MAX_HEAD)
        at = rest.find("{")
        if at < 0 and len(rest) < _MAX_HEAD:
            return False
        found = self.read_head(rest[:at]) if at >= 0 else None
        if found is None or (self._tools is not None and found[0] not in self._tools):
            self._say(self._lead)
            return self._go(self._text)
        self._tape.take(at)
        self._given_id = found[1]
        return self._begin(CallReader.of_arguments(found[0]))

    def _close(self) -> bool:
        """Behind the arguments."""
        tape = self._tape
        tape.skip_space()
        if not len(tape):
            return False
        marks = (*self.trailers, self.call_close)
        here = [tape.starts_with(mark) for mark in marks]
        if True not in here:
            return None not in here and self._leave()
        mark = marks[here.index(True)]
        tape.take(len(mark))
        return self._leave() if mark == self.call_close else True

    def _broken(self) -> bool:
        before, mark = self._tape.take_before([self.call_close])
        self._argue(before)
        return bool(mark) and self._leave()
