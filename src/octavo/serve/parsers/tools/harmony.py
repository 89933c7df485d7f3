"""GPT-OSS: a message to a function, in a channel: commentary to=functions.NAME, and arguments in JSON.

What stands around calls, other messages and their channels, is for `octavo.serve.parsers.harmony`.
"""

from __future__ import annotations

import re

from octavo.serve.parsers.tools.marked import Marked

_HEAD = re.compile(
    r"\s*(?:\w+\s*)?to=(?:functions\.)?([\w.-]{1,64})\s*(?:<\|constrain\|>\s*)?(?:(?:json|code)\s*)?<\|message\|>\s*"
)


class Harmony(Marked):
    """A call a message."""

    call_open, call_close = "<|channel|>", "<|call|>"

    def read_head(self, head: str) -> tuple[str, str] | None:
        """The name."""
        found = _HEAD.fullmatch(head)
        return (found[1], "") if found else None
