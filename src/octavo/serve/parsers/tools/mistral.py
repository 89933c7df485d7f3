"""Mistral: a mark before an array of calls, or before each call."""

from __future__ import annotations

from octavo.serve.parsers.base import new_short_call_id
from octavo.serve.parsers.calls import NAME, CallReader
from octavo.serve.parsers.tools.base import CallArray


class Mistral(CallArray):
    """[TOOL_CALLS] and an array of calls, or [TOOL_CALLS]name[ARGS]{...} and more of them; text around them."""

    mark, id_mark, arguments_mark = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
    needs_special_tokens = True
    default_id = staticmethod(new_short_call_id)

    _is_array = False  # which of the two forms the last mark began

    def _text(self) -> bool:
        before, mark = self._tape.take_before([self.mark])
        if before:
            self._say(before)
        self._lead = mark
        return bool(mark) and self._go(self._open)

    def _open(self) -> bool:
        self._is_array = False
        self._lead += self._tape.skip_space()
        if not len(self._tape):
            return False
        if self._tape.peek() == "[":
            self._is_array = True
            self._lead += self._tape.take(1)
            return self._go(self._item)
        return self._go(self._name)

    def _name(self) -> bool:
        tape = self._tape
        rest = tape.rest(64 + len(self.id_mark) + 64 + len(self.arguments_mark) + 1)
        found = NAME.match(rest)
        at = found.end() if found else 0
        if found and rest.startswith(self.id_mark, at):
            given = NAME.match(rest, at + len(self.id_mark))
            at = given.end() if given else at
        if found and rest.startswith(self.arguments_mark, at):
            at += len(self.arguments_mark)
        if found and at < len(rest) and rest[at] == "{":
            name = found[0]
            if self._tools is None or name in self._tools:
                tape.take(at)
                return self._begin(CallReader.of_arguments(name))
        elif found and self._may_go_on(rest[found.end() :]):
            return False
        self._say(self._lead)
        return self._go(self._text)

    def _may_go_on(self, rest: str) -> bool:
        """Whether what stands behind a name may still become the beginning of arguments."""
        if self.id_mark.startswith(rest) or self.arguments_mark.startswith(rest):
            return True
        if rest.startswith(self.id_mark):
            given = NAME.match(rest, len(self.id_mark))
            rest = rest[given.end() :] if given else rest[len(self.id_mark) :]
            return self.arguments_mark.startswith(rest) if given else not rest
        return False

    def _close(self) -> bool:
        return self._go(self._item if self._is_array else self._text)

    def _broken(self) -> bool:
        before, mark = self._tape.take_before([self.mark])
        self._argue(before)
        self._lead = mark
        return bool(mark) and self._go(self._open)
