"""DeepSeek-V3, R1 and V3.1: a section of calls, each with its name in a head between marks.

V3 and R1 write a type before the name and fence the arguments as a block of JSON; V3.1 writes neither.
"""

from __future__ import annotations

import re

from octavo.serve.parsers.tools.marked import Marked

_HEAD = re.compile(r"\s*(?:\w+<｜tool▁sep｜>\s*([\w.-]{1,64})\s*```(?:json)?|([\w.-]{1,64})\s*<｜tool▁sep｜>)\s*")


class DeepSeek(Marked):
    """Both forms, told apart by the head."""

    section_open, section_close = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
    ends_reasoning = (section_open,)
    call_open, call_close = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
    trailers = ("```",)

    def read_head(self, head: str) -> tuple[str, str] | None:
        """The name."""
        found = _HEAD.fullmatch(head)
        return (found[1] or found[2], "") if found else None
