"""TokenVersions: which of a completion's tokens which weights drew.

Owns the marks that updates set, and the spans that outputs show. Invariant: spans cover the tokens asked for, in order,
and no two neighbours say the same.
"""

from __future__ import annotations

from typing import NamedTuple

from octavo.request.outputs import WeightsSpan

FIRST_VERSION = "default"  # of the weights that an engine starts with


class TokenVersions(NamedTuple):
    """Marks (first token, version, mixed), in order; a mark holds until the next one."""

    marks: tuple[tuple[int, str, bool], ...] = ((0, FIRST_VERSION, False),)

    def then(self, start: int, version: str, mixed: bool) -> TokenVersions:
        """With one more mark; no version: the first one."""
        own = version or FIRST_VERSION, mixed
        kept = tuple(mark for mark in self.marks if mark[0] < start)
        return TokenVersions(kept if kept and kept[-1][1:] == own else (*kept, (start, *own)))

    def spans(self, start: int, end: int) -> list[WeightsSpan]:
        """Of tokens start to end - 1."""
        spans: list[WeightsSpan] = []
        for first, version, mixed in reversed(self.marks):  # news lie behind the last one
            if first <= start:
                if start < end:
                    spans.append(WeightsSpan(version, start, end, mixed))
                break
            if first < end:
                spans.append(WeightsSpan(version, first, end, mixed))
                end = first
        spans.reverse()
        return spans
