"""What parsers of tool calls share.

Owns ToolParser, the states around a call in JSON, CallArray, several calls in one array, and Sectioned, several calls
between two marks. Invariant: what is no call stays text, character by character, and so does everything around calls
but white space at their edges.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from octavo.serve.parsers.base import Delta, Tape, new_call_id
from octavo.serve.parsers.calls import CallReader, Verdict


class ToolParser:
    """No format: all is text. The base of those that have one: each step looks at the tape and uses some of it up."""

    needs_special_tokens = False  # whether the marks are special tokens, which detokenizing leaves out
    ends_reasoning: tuple[str, ...] = ()  # marks of calls that no reasoning holds: models forget to end theirs
    default_id: Callable[[], str] = staticmethod(new_call_id)

    def __init__(self, tools: Collection[str] | None = None, new_id: Callable[[], str] | None = None) -> None:
        """`tools`: names that may be called; None: any. `new_id` makes the ids of calls."""
        self._tools = tools
        self._new_id = new_id or self.default_id
        self.num_calls = 0
        self._tape = Tape()
        self._out: list[Delta] = []
        self._space: list[str] = []  # white space that may turn out to be the edge of a call
        self._behind_call = False
        self._lead = ""  # marks before a call, which become text if it is none
        self._given_id = ""  # of the call, where the model writes one
        self._reader = CallReader(tools)
        self._is_told = False  # that the reader has found a call
        self._state: Callable[[], bool] = self._start()

    def feed(self, text: str) -> list[Delta]:
        """What is certain with this much more text."""
        self._tape.add(text)
        while len(self._tape) and self._state():
            pass
        return self._taken()

    def finish(self) -> list[Delta]:
        """The rest, at the end of the output: an unfinished call stays a call if it has its name."""
        rest = self._tape.take(len(self._tape))
        if self._state == self._broken:
            self._argue(rest)
        elif self._state == self._call:
            if not self._reader.name:
                self._say(self._lead + self._reader.raw + rest)
        elif self._state != self._close:
            self._say(self._lead + rest)
        space = "".join(self._space)
        if space and not self._behind_call:
            self._out.append(Delta(content=space))
        return self._taken()

    def _taken(self) -> list[Delta]:
        out, self._out = self._out, []
        return out

    def _start(self) -> Callable[[], bool]:
        return self._text

    def _go(self, state: Callable[[], bool]) -> bool:
        self._state = state
        return True

    def _say(self, text: str) -> None:
        shown = text.rstrip()
        if shown:
            whole = shown.lstrip() if self._behind_call else "".join(self._space) + shown
            self._out.append(Delta(content=whole))
            self._space.clear()
            self._behind_call = False
        self._space.append(text[len(shown) :])
        self._lead = ""

    def _argue(self, text: str) -> None:
        if text:
            self._out.append(Delta(tool_index=self.num_calls - 1, arguments=text))

    def _text(self) -> bool:
        self._say(self._tape.take(len(self._tape)))
        return False

    def _begin(self, reader: CallReader) -> bool:
        self._reader = reader
        self._is_told = False
        return self._go(self._call)

    def _call(self) -> bool:
        """Within a call."""
        reader = self._reader
        verdict = reader.read(self._tape)
        if reader.name and not self._is_told:
            self._is_told = True
            self._space.clear()
            self._lead, self._behind_call = "", True
            self._out.append(
                Delta(tool_index=self.num_calls, tool_id=self._given_id or self._new_id(), tool_name=reader.name)
            )
            self.num_calls += 1
        if reader.arguments:
            self._argue("".join(reader.arguments))
            reader.arguments.clear()
        if verdict is Verdict.TEXT:
            self._say(self._lead + reader.raw)
            return self._go(self._text)
        if verdict is Verdict.BROKEN:
            return self._go(self._broken)
        return verdict is Verdict.DONE and self._go(self._close)

    def _close(self) -> bool:
        """Behind a call."""
        return self._go(self._text)

    def _broken(self) -> bool:
        """Within arguments that are no JSON: they go on as they are."""
        self._argue(self._tape.take(len(self._tape)))
        return False


class CallArray(ToolParser):
    """[{"name": ..., "arguments": {...}}, ...]"""

    def _item(self) -> bool:
        """Within the brackets, not within a call."""
        tape = self._tape
        self._lead += tape.skip_space()
        if not len(tape):
            return False
        if tape.peek() == "{":
            return self._begin(CallReader(self._tools))
        if self._behind_call and tape.peek() == "," and "," not in self._lead:
            self._lead += tape.take(1)
            return True
        if self._behind_call and tape.peek() == "]" and "," not in self._lead:
            tape.take(1)
            self._lead = ""
        else:
            self._say(self._lead)
        return self._go(self._text)

    def _close(self) -> bool:
        return self._go(self._item)


class Sectioned(ToolParser):
    """Calls that each begin with `call_open`, within `section_open` and `section_close`."""

    section_open = section_close = ""  # "": there is no section
    call_open = ""
    is_bare = False  # a call may come without the section's mark

    def __init__(self, tools: Collection[str] | None = None, new_id: Callable[[], str] | None = None) -> None:
        """As ToolParser."""
        super().__init__(tools, new_id)
        self._starts = [self.section_open] if self.section_open else []
        if self.is_bare or not self.section_open:
            self._starts.append(self.call_open)

    def finish(self) -> list[Delta]:
        """The rest, at the end of the output: the beginning of a section's end is no text."""
        if self._state == self._section and self._behind_call:
            rest = self._tape.rest(len(self.section_close))
            if self.section_close.startswith(rest):
                self._lead = ""
                self._tape.take(len(rest))
        return super().finish()

    def _text(self) -> bool:
        before, mark = self._tape.take_before(self._starts)
        if before:
            self._say(before)
        self._lead = mark
        if not mark:
            return False
        return self._go(self._opened if mark == self.call_open else self._section)

    def _section(self) -> bool:
        """Within a section, before a call or behind one."""
        tape = self._tape
        self._lead += tape.skip_space()
        if not len(tape):
            return False
        opens = tape.starts_with(self.call_open)
        closes = tape.starts_with(self.section_close) if self._behind_call else False
        if opens:
            self._lead += tape.take(len(self.call_open))
            return self._go(self._opened)
        if closes:
            tape.take(len(self.section_close))
            self._lead = ""
        elif opens is None or closes is None:
            return False
        else:
            self._say(self._lead)
        return self._go(self._text)

    def _opened(self) -> bool:
        """Behind `call_open`: a format says what makes a call; here nothing does."""
        self._say(self._lead)
        return self._go(self._text)

    def _leave(self) -> bool:
        """Behind a call."""
        return self._go(self._section if self.section_open else self._text)
