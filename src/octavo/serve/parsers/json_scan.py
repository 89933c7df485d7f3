"""JSON as it comes: where a value ends, or where it stops being JSON, one character at a time.

Owns JsonScanner. It builds no values and evaluates nothing. Invariant: time is linear in the text and memory in its
depth, which is bounded; the answer does not depend on how the text is cut.
"""

from __future__ import annotations

import re

MAX_DEPTH = 64
_SPACE = " \t\r\n"
_SCALAR = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?|true|false|null")
_SCALAR_CHARS = frozenset("+-.0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
_MAX_SCALAR = 512
_ESCAPES = frozenset('"\\/bfnrt')
_HEX = frozenset("0123456789abcdefABCDEF")


class JsonScanner:
    """Reads one object or array. Control characters in strings are taken, and escaped: models write them."""

    __slots__ = ("_expect", "_hex", "_is_key", "_scalar", "_stack", "broken", "done")

    def __init__(self) -> None:
        """At the value's first character."""
        self.done = self.broken = False
        self._stack: list[str] = []  # the closing brackets that are due
        self._expect = "value"
        self._is_key = False
        self._scalar = ""
        self._hex = 0

    @property
    def depth(self) -> int:
        """Open brackets."""
        return len(self._stack)

    def scan(self, text: str, at: int) -> tuple[int, str]:
        """Read on from text[at]. Returns where it stopped, and what it read, as JSON.

        It stops behind the last character of the value (`done`), at the first one that cannot be (`broken`), or at the
        end of the text.
        """
        start, pieces = at, []
        while at < len(text) and not self.done:
            char = text[at]
            if self._expect in ("string", "escape", "hex"):
                if self._expect == "string" and char < " ":
                    pieces += [text[start:at], f"\\u{ord(char):04x}"]
                    start = at + 1
                ok = self._in_string(char)
            elif self._expect == "scalar" and char in _SCALAR_CHARS:
                self._scalar += char
                ok = len(self._scalar) <= _MAX_SCALAR
            else:
                ok = self._structure(char)
            if not ok:
                self.broken = True
                break
            at += 1
        pieces.append(text[start:at])
        return at, "".join(pieces)

    def _in_string(self, char: str) -> bool:
        match self._expect:
            case "string":
                if char == '"':
                    self._expect = "colon" if self._is_key else "after"
                elif char == "\\":
                    self._expect = "escape"
            case "escape":
                self._expect, self._hex = ("hex", 4) if char == "u" else ("string", 0)
                return char == "u" or char in _ESCAPES
            case _:
                self._hex -= 1
                if not self._hex:
                    self._expect = "string"
                return char in _HEX
        return True

    def _structure(self, char: str) -> bool:
        if self._expect == "scalar":
            if not _SCALAR.fullmatch(self._scalar):
                return False
            self._expect = "after"
        if char in _SPACE:
            return True
        match self._expect:
            case "after":
                return self._after(char)
            case "colon":
                self._expect = "value"
                return char == ":"
            case "key" | "first key":
                if char == '"':
                    self._expect, self._is_key = "string", True
                    return True
                return self._expect == "first key" and self._close(char)
        if self._expect == "first value" and char == "]":
            return self._close(char)
        return self._value(char)

    def _after(self, char: str) -> bool:
        if char == ",":
            self._expect = "key" if self._stack[-1] == "}" else "value"
            return True
        return self._close(char)

    def _close(self, char: str) -> bool:
        if self._stack[-1] != char:
            return False
        self._stack.pop()
        self._expect = "after"
        self.done = not self._stack
        return True

    def _value(self, char: str) -> bool:
        if char in "{[":
            self._stack.append("}" if char == "{" else "]")
            self._expect = "first key" if char == "{" else "first value"
            return len(self._stack) <= MAX_DEPTH
        if not self._stack:
            return False
        if char == '"':
            self._expect, self._is_key = "string", False
            return True
        self._expect, self._scalar = "scalar", char
        return char in _SCALAR_CHARS
