"""Tool calls in the formats that model families write.

Owns one parser per format: Hermes and Qwen3, Llama 3, Mistral, and the form that a tool choice forces. Invariant: what
is no call stays text, character by character, and so does everything around calls but white space at their edges.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from octavo.serve.parsers.base import Delta, Tape, new_call_id, new_short_call_id
from octavo.serve.parsers.calls import NAME, CallReader, Verdict


class ToolParser:
    """No format: all is text. The base of those that have one: each step looks at the tape and uses some of it up."""

    needs_special_tokens = False  # whether the marks are special tokens, which detokenizing leaves out
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
            self._out.append(Delta(tool_index=self.num_calls, tool_id=self._new_id(), tool_name=reader.name))
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


class _Array(ToolParser):
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


class Mistral(_Array):
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


class Required(_Array):
    """The whole output is an array of calls: `serve.grammar.from_tool_choice` without a name."""

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
    """The whole output is the arguments of one tool: `serve.grammar.from_tool_choice` with its name."""

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
