"""What parsers of model outputs share: their pieces, their form, and text that is held back until it is understood.

Owns Delta, the Parser protocol and Tape. Knows no format. Invariant: what a parser says of a text does not depend on
how the text was cut: the pieces of every cut, put together, are the same.
"""

from __future__ import annotations

import dataclasses
import re
import secrets
from collections.abc import Iterable, Sequence
from typing import Protocol

_SPACE = re.compile(r"\s+")


@dataclasses.dataclass(frozen=True, slots=True)
class Delta:
    """A piece of an answer: of its content, of its reasoning, or of one tool call."""

    content: str = ""
    reasoning: str = ""
    tool_index: int = -1  # from 0: the call that the next three belong to
    tool_id: str = ""  # with the name, in a call's first piece only
    tool_name: str = ""
    arguments: str = ""  # a piece of JSON text, as the model wrote it


class Parser(Protocol):
    """Follows one output."""

    def feed(self, text: str) -> list[Delta]:
        """What is certain with this much more text."""

    def finish(self) -> list[Delta]:
        """The rest, at the end of the output."""


def new_call_id() -> str:
    """An id for a tool call."""
    return f"call_{secrets.token_hex(12)}"


def new_short_call_id() -> str:
    """As Mistral's templates want it: nine letters and digits."""
    return secrets.token_hex(5)[:9]


class Tape:
    """Text that came and is not used up."""

    __slots__ = ("at", "text")

    def __init__(self) -> None:
        """Empty."""
        self.text, self.at = "", 0

    def add(self, text: str) -> None:
        """More text; what is used up is dropped."""
        self.text = self.text[self.at :] + text if self.at < len(self.text) else text
        self.at = 0

    def put_back(self, text: str) -> None:
        """The text that was used up last, and too early."""
        if self.text.endswith(text, 0, self.at):
            self.at -= len(text)
        else:  # it came with earlier pieces
            self.text, self.at = text + self.text[self.at :], 0

    def peek(self) -> str:
        """The next character, of which there must be one."""
        return self.text[self.at]

    def rest(self, most: int) -> str:
        """At most `most` characters of what is left."""
        return self.text[self.at : self.at + most]

    def __len__(self) -> int:
        """Characters left."""
        return len(self.text) - self.at

    def take(self, count: int) -> str:
        """Use up `count` characters."""
        self.at += count
        return self.text[self.at - count : self.at]

    def take_before(self, marks: Sequence[str]) -> tuple[str, str]:
        """Use up what surely precedes any of `marks`, and the mark if it is there.

        Returns:
            The text, and the mark that follows it or "".

        """
        found = [(at, mark) for mark in marks if (at := self.text.find(mark, self.at)) >= 0]
        if found:
            at, mark = min(found)
            before = self.take(at - self.at)
            self.take(len(mark))
            return before, mark
        return self.take(len(self) - held(self.text, self.at, marks)), ""

    def starts_with(self, mark: str) -> bool | None:
        """Whether the text goes on with `mark`; None: more text will tell."""
        if self.text.startswith(mark, self.at):
            return True
        return None if mark.startswith(self.rest(len(mark))) else False

    def skip_space(self) -> str:
        """Use up the white space at the front."""
        found = _SPACE.match(self.text, self.at)
        return self.take(found.end() - self.at if found else 0)


def held(text: str, start: int, marks: Iterable[str]) -> int:
    """How many characters at the end of text[start:] may be the beginning of a mark."""
    most = 0
    for mark in marks:
        for count in range(min(len(mark) - 1, len(text) - start), most, -1):
            if text.endswith(mark[:count]):
                most = count
                break
    return most
