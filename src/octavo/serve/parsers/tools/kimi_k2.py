"""Kimi K2: a section of calls, each with an id that holds its name: functions.NAME:INDEX."""

from __future__ import annotations

import re

from octavo.serve.parsers.tools.marked import Marked

_HEAD = re.compile(r"\s*((?:functions\.)?([\w.-]{1,64}):\d{1,9})\s*<\|tool_call_argument_begin\|>\s*")


class KimiK2(Marked):
    """The ids are the model's own: its template shows them again with the results."""

    section_open, section_close = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
    ends_reasoning = (section_open,)
    call_open, call_close = "<|tool_call_begin|>", "<|tool_call_end|>"

    def read_head(self, head: str) -> tuple[str, str] | None:
        """The name and the id."""
        found = _HEAD.fullmatch(head)
        return (found[2], found[1]) if found else None
