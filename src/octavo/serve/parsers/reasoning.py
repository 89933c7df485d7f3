"""Reasoning apart from the answer.

Owns Reasoning, which finds one stretch of reasoning at the beginning of an output, between two marks. Does not know
what the answer holds. Invariant: without the opening mark at the very beginning (or in the prompt) all is answer,
unchanged; white space at the edges of reasoning is no part of it, nor of the answer that follows.
"""

from __future__ import annotations

import enum

from octavo.serve.parsers.base import Tape


class _State(enum.Enum):
    BEFORE = 0
    BEGUN = 1  # no letter of the reasoning yet
    INSIDE = 2
    BEHIND = 3  # no letter of the answer yet
    ANSWER = 4


class Reasoning:
    """Splits one output. Pieces are (reasoning, answer); one of them is empty."""

    opening, closing = "<think>", "</think>"
    needs_special_tokens = False
    interrupts: tuple[str, ...] = ()  # marks of calls, which end the reasoning too, and begin the answer

    def __init__(self, is_open: bool) -> None:
        """`is_open`: the prompt ends within reasoning already, see `is_open_in`."""
        self._tape = Tape()
        self._state = _State.BEGUN if is_open else _State.BEFORE
        self._space: list[str] = []  # perhaps the end of the reasoning, or the beginning of an answer that has no mark

    @classmethod
    def is_open_in(cls, prompt: str) -> bool:
        """Whether the text of a prompt ends with the opening mark."""
        return prompt[-256:].rstrip().endswith(cls.opening)

    def feed(self, text: str) -> list[tuple[str, str]]:
        """What is certain with this much more text."""
        if self._state is _State.ANSWER:
            return [("", text)]
        self._tape.add(text)
        pieces: list[tuple[str, str]] = []
        while len(self._tape) and self._step(pieces):
            pass
        return pieces

    def finish(self) -> list[tuple[str, str]]:
        """The rest, at the end of the output."""
        rest = self._tape.take(len(self._tape))
        if self._state is _State.BEFORE:
            return [("", "".join(self._space) + rest)]
        if self._state in (_State.BEGUN, _State.INSIDE):
            rest = ("".join(self._space) + rest).rstrip()
            return [(rest, "")] if rest else []
        return [("", rest)] if rest else []

    def _step(self, pieces: list[tuple[str, str]]) -> bool:
        """One step. Returns whether another may follow."""
        tape = self._tape
        match self._state:
            case _State.BEFORE:
                self._space.append(tape.skip_space())
                here = tape.starts_with(self.opening) if len(tape) else None
                if here:
                    tape.take(len(self.opening))
                    self._space.clear()
                    self._state = _State.BEGUN
                elif here is False:
                    pieces.append(("", "".join(self._space)))
                    self._space.clear()
                    self._state = _State.ANSWER
                return here is not None
            case _State.BEGUN:
                tape.skip_space()
                self._state = _State.INSIDE if len(tape) else _State.BEGUN
            case _State.INSIDE:
                before, mark = tape.take_before([self.closing, *self.interrupts])
                shown = before.rstrip()
                if shown:
                    pieces.append(("".join(self._space) + shown, ""))
                    self._space.clear()
                self._space.append(before[len(shown) :])
                if not mark:
                    return False
                self._space.clear()
                self._state = _State.BEHIND
                if mark != self.closing:
                    tape.put_back(mark)
                    self._state = _State.ANSWER
            case _State.BEHIND:
                tape.skip_space()
                self._state = _State.ANSWER if len(tape) else _State.BEHIND
            case _State.ANSWER:
                pieces.append(("", tape.take(len(tape))))
        return True


class MistralReasoning(Reasoning):
    """Magistral's marks, which are special tokens."""

    opening, closing = "[THINK]", "[/THINK]"
    needs_special_tokens = True
