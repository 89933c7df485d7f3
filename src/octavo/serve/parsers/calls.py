"""One tool call as JSON, read as it comes.

Owns CallReader: from {"name": ..., "arguments": {...}} to a name and pieces of the arguments' text, and the rule of
what is a call at all. Knows nothing of the marks around calls. Invariant: a text that is no call is given back whole;
what is a call is decided by its text alone, never by how it was cut, and nothing of it is evaluated.
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Collection
from typing import Any

from octavo.serve.parsers.base import Tape
from octavo.serve.parsers.json_scan import JsonScanner

NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_MAX_HEAD = 4096
_KEYS = frozenset(("name", "arguments", "parameters", "type", "function", "id"))
_S = r"[ \t\r\n]*"
_FIRST_KEY = re.compile(rf'\{{{_S}"([^"\\\x00-\x1f]*)"')
# the usual order: then the arguments need not be awaited. Any other is read when the object has ended.
_HEAD = re.compile(rf'\{{{_S}"name"{_S}:{_S}"([^"\\\x00-\x1f]*)"{_S},{_S}"(?:arguments|parameters)"{_S}:{_S}(?=\{{)')


class Verdict(enum.Enum):
    """Where a call stands."""

    MORE = 0  # its text has not ended
    DONE = 1
    TEXT = 2  # it is none: `raw` is text
    BROKEN = 3  # its arguments stopped being JSON


class CallReader:
    """Reads one call from a tape that stands at its `{`."""

    def __init__(self, tools: Collection[str] | None) -> None:
        """`tools`: names that may be called; None: any plain name."""
        self._tools = tools
        self.name = ""  # once it is a call
        self.arguments: list[str] = []  # pieces of JSON, for the owner to take away
        self._raw: list[str] = []  # what was read, as long as it may be no call
        self._json: list[str] = []  # the same with its control characters escaped
        self._beginning = ""
        self._scanner = JsonScanner()
        self._read = self._undecided

    @classmethod
    def of_arguments(cls, name: str) -> CallReader:
        """For a call whose name is known already: the text is that of its arguments."""
        reader = cls(None)
        reader.name, reader._read = name, reader._bare
        return reader

    @property
    def raw(self) -> str:
        """What was read of a text that is no call."""
        return "".join(self._raw)

    def read(self, tape: Tape) -> Verdict:
        """Use up what belongs to the call."""
        verdict = Verdict.MORE
        while len(tape) and verdict is Verdict.MORE:
            verdict = self._read(tape)
        return verdict

    def _scan(self, tape: Tape) -> tuple[str, str]:
        """Use up what the scanner takes. Returns it as it came, and as JSON."""
        end, piece = self._scanner.scan(tape.text, tape.at)
        return tape.take(end - tape.at), piece

    def _undecided(self, tape: Tape) -> Verdict:
        raw, piece = self._scan(tape)
        self._raw.append(raw)
        self._json.append(piece)
        if len(self._beginning) < _MAX_HEAD:
            self._beginning = (self._beginning + raw)[:_MAX_HEAD]
            first = _FIRST_KEY.match(self._beginning)
            if first and first[1] not in _KEYS:
                self._keep(tape, first.end())
                return Verdict.TEXT
            head = _HEAD.match(self._beginning)
            if head:
                self._keep(tape, head.end())
                if not self._may_call(head[1]):
                    return Verdict.TEXT
                self.name, self._read, self._scanner = head[1], self._streamed, JsonScanner()
                return Verdict.MORE
        if self._scanner.broken:
            return Verdict.TEXT
        return self._whole() if self._scanner.done else Verdict.MORE

    def _keep(self, tape: Tape, end: int) -> None:
        """Of what was read, leave the rest to others."""
        raw = self.raw
        tape.put_back(raw[end:])
        self._raw = [raw[:end]]

    def _whole(self) -> Verdict:
        found = read_call(json.loads("".join(self._json)))
        if found is None or not self._may_call(found[0]):
            return Verdict.TEXT
        self.name = found[0]
        self.arguments.append(found[1])
        return Verdict.DONE

    def _bare(self, tape: Tape) -> Verdict:
        self.arguments.append(self._scan(tape)[1])
        if self._scanner.broken:
            return Verdict.BROKEN
        return Verdict.DONE if self._scanner.done else Verdict.MORE

    def _streamed(self, tape: Tape) -> Verdict:
        verdict = self._bare(tape)
        if verdict is not Verdict.DONE:
            return verdict
        self._scanner, self._read = JsonScanner(), self._rest
        self._scanner.scan('{"":0 ', 0)  # behind a first member
        return Verdict.MORE

    def _rest(self, tape: Tape) -> Verdict:
        """The object's other members tell nothing; where they break off, text goes on."""
        self._scan(tape)
        return Verdict.DONE if self._scanner.done or self._scanner.broken else Verdict.MORE

    def _may_call(self, name: str) -> bool:
        return NAME.fullmatch(name) is not None and (self._tools is None or name in self._tools)


def read_call(value: Any) -> tuple[str, str] | None:
    """Name and arguments of a decoded call in any of the forms that models write; None if it is none."""
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    if not isinstance(value, dict):
        return None
    name = value.get("name", value.get("function"))
    arguments = value.get("arguments", value.get("parameters"))
    if not isinstance(name, str):
        return None
    if isinstance(arguments, str):  # JSON within JSON
        scanner = JsonScanner()
        end, text = scanner.scan(arguments, 0)
        whole = scanner.done and not arguments[end:].strip() and text.lstrip().startswith("{")
        return (name, text) if whole else None
    if arguments is None:
        arguments = {}
    return (name, json.dumps(arguments, ensure_ascii=False)) if isinstance(arguments, dict) else None
