"""Qwen 3 Coder and Qwen 3.5: <tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>."""

from __future__ import annotations

from octavo.serve.parsers.tools.tagged import Tagged


class Qwen3Coder(Tagged):
    """A section a call; the models leave its tag out at times."""

    section_open, section_close = "<tool_call>", "</tool_call>"
    call_open, name_end, call_close = "<function=", ">", "</function>"
    key_open, key_end, value_close = "<parameter=", ">", "</parameter>"
    is_bare = True
