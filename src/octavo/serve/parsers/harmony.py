"""The messages of an output in OpenAI's harmony format, as GPT-OSS writes them.

Owns HarmonyReasoning: what is written in the channel "analysis" is reasoning, a message to a function goes on with its
head for the parser of calls, and every other message is the answer. Invariant: a text without the format's marks is all
answer, unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from octavo.request.thinking import HARMONY
from octavo.serve.parsers.base import Tape

_START, _CHANNEL, _MESSAGE, _CALL = "<|start|>", "<|channel|>", "<|message|>", "<|call|>"
_ENDS = ["<|end|>", "<|return|>", _CALL, _START, _CHANNEL]
_MAX_HEAD = 1024
_RECIPIENT = re.compile(r"\bto=([\w.-]{1,128})")
_NAME_OF_CHANNEL = re.compile(re.escape(_CHANNEL) + r"\s*(\w+)")


class HarmonyReasoning:
    """Splits one output. Pieces are (reasoning, answer); one of them is empty."""

    opening, closing = HARMONY.opening, HARMONY.closing
    needs_special_tokens = True

    def __init__(self, is_open: bool) -> None:
        """`is_open` makes no difference: the output begins with the head of a message."""
        self._tape = Tape()
        self._state: Callable[[list[tuple[str, str]]], bool] = self._begin
        self._head = ""  # of the message that begins
        self._kind = ""  # of the message: analysis, call or answer
        self._num_analyses = 0

    @classmethod
    def is_open_in(cls, prompt: str) -> bool:
        """Whether a prompt ends where a message begins."""
        return HARMONY.are_open(prompt)

    def feed(self, text: str) -> list[tuple[str, str]]:
        """What is certain with this much more text."""
        self._tape.add(text)
        pieces: list[tuple[str, str]] = []
        while len(self._tape) and self._state(pieces):
            pass
        return pieces

    def finish(self) -> list[tuple[str, str]]:
        """The rest, at the end of the output."""
        rest = self._tape.take(len(self._tape))
        pieces: list[tuple[str, str]] = []
        if self._state == self._body:
            self._tell(rest, pieces)
        elif self._state != self._between:
            self._kind = "answer"
            self._tell(self._head + rest, pieces)
        return pieces

    def _tell(self, text: str, pieces: list[tuple[str, str]]) -> None:
        if text:
            pieces.append((text, "") if self._kind == "analysis" else ("", text))

    def _begin(self, pieces: list[tuple[str, str]]) -> bool:
        """At the output's beginning: its role may stand in the prompt."""
        self._head += self._tape.skip_space()
        here = [self._tape.starts_with(mark) for mark in (_CHANNEL, _START, "to=")] if len(self._tape) else [None]
        if any(here):
            self._state = self._message
        elif None in here:
            return False
        else:
            self._state = self._plain
        return True

    def _message(self, pieces: list[tuple[str, str]]) -> bool:
        """In a message's head."""
        before, mark = self._tape.take_before([_MESSAGE])
        self._head += before
        if not mark:
            if len(self._head) > _MAX_HEAD:
                self._state = self._plain
            return len(self._head) > _MAX_HEAD
        recipient, channel = _RECIPIENT.search(self._head), _NAME_OF_CHANNEL.search(self._head)
        self._state, self._head = self._body, ""
        if recipient:
            self._kind = "call"
            self._tell(f"{_CHANNEL}commentary to={recipient[1]}{_MESSAGE}", pieces)
        elif channel and channel[1] == "analysis":
            self._kind = "analysis"
            if self._num_analyses:
                self._tell("\n", pieces)
            self._num_analyses += 1
        else:
            self._kind = "answer"
        return True

    def _body(self, pieces: list[tuple[str, str]]) -> bool:
        before, mark = self._tape.take_before(_ENDS)
        self._tell(before, pieces)
        if not mark:
            return False
        if self._kind == "call":
            self._tell(_CALL, pieces)
        self._head = _CHANNEL if mark == _CHANNEL else ""
        self._state = self._message if mark in (_CHANNEL, _START) else self._between
        return True

    def _between(self, pieces: list[tuple[str, str]]) -> bool:
        """Behind a message."""
        self._tape.skip_space()
        here = [self._tape.starts_with(mark) for mark in (_START, _CHANNEL)] if len(self._tape) else [None]
        if any(here):
            self._state = self._message
        elif None in here:
            return False
        else:
            self._state = self._plain
        return True

    def _plain(self, pieces: list[tuple[str, str]]) -> bool:
        """No message: all is answer."""
        self._kind = "answer"
        self._tell(self._head + self._tape.take(len(self._tape)), pieces)
        self._head = ""
        return False
