"""MiniMax-M2: one section, in it <invoke name="NAME"><parameter name="KEY">VALUE</parameter></invoke> for each call."""

from __future__ import annotations

from octavo.serve.parsers.tools.tagged import Tagged


class MiniMaxM2(Tagged):
    """Any number of calls in a section."""

    section_open, section_close = "<minimax:tool_call>", "</minimax:tool_call>"
    call_open, name_end, call_close = '<invoke name="', '">', "</invoke>"
    key_open, key_end, value_close = '<parameter name="', '">', "</parameter>"
