"""Thinking before the form: what a row may say while it reasons, and where its answer begins.

Owns AfterThinking, which stands before a row's matcher, and Anything, the matcher of a row without a form. Invariant:
as of a matcher: what it allows is a function of the request and of the output it is given, whichever came before.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from octavo.request.thinking import ClosingMark, Thinking


class Form(Protocol):
    """What follows one output. See Matcher."""

    @property
    def met_limit(self) -> bool:
        """Whether the last `fill` found nothing because the form is too complex."""

    @property
    def is_compiled(self) -> bool:
        """Whether `prepare` has nothing to do."""

    @property
    def is_slow(self) -> bool:
        """Whether the next mask is expected to take long."""

    def prepare(self) -> None:
        """Compile what `fill` will need."""

    def note(self, seconds: float) -> None:
        """Take note of how long a mask took."""

    def fill(self, output: NDArray[np.int32], bits: NDArray[np.int32]) -> bool:
        """Set the bits of the tokens that may follow `output`; False, and no bit, if there is none."""


class ClosingMarks(Protocol):
    """Where the ends of reasoning are made and kept: a Grammars."""

    def made_mark(self, closing: str) -> ClosingMark | None:
        """The mark of a text, if it is made. Takes no time."""

    def closing_mark(self, closing: str) -> ClosingMark:
        """The mark of a text, made if need be."""


class Anything:
    """No form."""

    met_limit = is_slow = False
    is_compiled = True

    def prepare(self) -> None:
        """Do nothing."""

    def note(self, seconds: float) -> None:
        """Do nothing."""

    def fill(self, output: NDArray[np.int32], bits: NDArray[np.int32]) -> bool:
        """Allow every token."""
        bits[:] = -1
        return True


class AfterThinking:
    """Reasoning as it comes, then `form`."""

    def __init__(self, marks: ClosingMarks, thinking: Thinking, budget: int | None, form: Form) -> None:
        """`budget`: tokens of reasoning, its marks not counted, after which it is ended; None: no such limit.

        Makes no mark: `prepare` does, if nobody has before, or the first `fill`.
        """
        self._marks, self._thinking, self._form = marks, thinking, form
        self._mark = marks.made_mark(thinking.closing)
        self._budget = budget
        self._first = 0  # where the reasoning begins in an output that has one
        self._breaks: frozenset[int] | None = None  # once needed: line breaks that are none of the form's
        self._seen = np.empty(0, np.int32)
        self._state = 0  # of the mark, behind `_seen`
        self._answer = -1  # where in `_seen` the answer begins; -1: further on

    @property
    def met_limit(self) -> bool:
        """The form's."""
        return self._form.met_limit

    @property
    def is_compiled(self) -> bool:
        """The form's, where the end of the reasoning is made too."""
        return self._mark is not None and self._form.is_compiled

    @property
    def is_slow(self) -> bool:
        """The form's."""
        return self._form.is_slow

    def prepare(self) -> None:
        """Make the end of the reasoning, and compile the form."""
        self._closing_mark()
        self._form.prepare()

    def note(self, seconds: float) -> None:
        """For the form."""
        self._form.note(seconds)

    def fill(self, output: NDArray[np.int32], bits: NDArray[np.int32]) -> bool:
        """As Form's; `output` may be any output of the request, in any order."""
        if not self._thinking.is_open:
            opening_id, breaks = self._thinking.opening_id, self._line_breaks(bits)
            self._first = 2 if len(output) and int(output[0]) in breaks else 1
            if len(output) < self._first:
                return self._fill_before(output, bits, breaks)
            if int(output[self._first - 1]) != opening_id:
                return self._form.fill(output, bits)
        self._read(output)
        if self._answer >= 0:
            return self._form.fill(output[self._answer :], bits)
        num_over = -1 if self._budget is None else len(output) - self._first - self._budget
        if 0 <= num_over < len(self._thinking.closing_ids):
            bits[:] = 0
            _add(bits, self._thinking.closing_ids[num_over])
        elif isinstance(self._form, Anything):
            bits[:] = -1
        else:
            bits[:] = self._closing_mark().allowed[self._state]
        return True

    def _closing_mark(self) -> ClosingMark:
        if self._mark is None:
            self._mark = self._marks.closing_mark(self._thinking.closing)
        return self._mark

    def _line_breaks(self, bits: NDArray[np.int32]) -> frozenset[int]:
        """Line breaks that only reasoning may begin with. `bits` are overwritten."""
        if self._breaks is None:
            self._breaks = self._closing_mark().line_breaks
            if not isinstance(self._form, Anything) and self._form.fill(np.empty(0, np.int32), bits):
                self._breaks = frozenset(token_id for token_id in self._breaks if not _has(bits, token_id))
        return self._breaks

    def _fill_before(self, output: NDArray[np.int32], bits: NDArray[np.int32], breaks: frozenset[int]) -> bool:
        """Where the reasoning may be opened: at the beginning, or behind a line break."""
        if len(output) and not isinstance(self._form, Anything):
            bits[:] = 0
        elif not self._form.fill(output, bits):
            return False
        for token_id in (self._thinking.opening_id, *(() if len(output) else breaks)):
            _add(bits, token_id)
        return True

    def _read(self, output: NDArray[np.int32]) -> None:
        """Bring the state behind `output`."""
        seen = self._seen
        if len(seen) > len(output) or not np.array_equal(seen, output[: len(seen)]):
            seen, self._state, self._answer = seen[:0], 0, -1
        at, mark = max(len(seen), self._first), self._closing_mark()
        while self._answer < 0 and at < len(output):
            state = mark.advance(self._state, int(output[at]))
            at += 1
            if state < 0:
                self._answer = at
            else:
                self._state = state
        self._seen = output[:at].copy()


def _has(bits: NDArray[np.int32], token_id: int) -> bool:
    return bool(int(bits.view(np.uint32)[token_id >> 5]) >> (token_id & 31) & 1)


def _add(bits: NDArray[np.int32], token_id: int) -> None:
    bits.view(np.uint32)[token_id >> 5] |= np.uint32(1 << (token_id & 31))
