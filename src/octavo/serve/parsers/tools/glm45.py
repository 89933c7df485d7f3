"""GLM-4.5 to 4.7: <tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>."""

from __future__ import annotations

from octavo.serve.parsers.calls import NAME
from octavo.serve.parsers.tools.tagged import Tagged


class Glm45(Tagged):
    """No section; line breaks between the tags or none."""

    call_open, call_close = "<tool_call>", "</tool_call>"
    key_open, key_end, value_open, value_close = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
    trims = False

    def _opened(self) -> bool:
        """The name ends where white space or a tag begins."""
        self._lead += self._tape.skip_space()
        rest = self._tape.rest(65)
        found = NAME.match(rest)
        if not rest or (found and found.end() == len(rest) < 65):
            return False
        if found and rest[found.end() : found.end() + 1] in ("\n", "\r", " ", "<"):
            return self._begin_tagged(found[0], found.end())
        self._say(self._lead)
        return self._go(self._text)
