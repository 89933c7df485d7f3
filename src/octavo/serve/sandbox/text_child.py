"""The server's text child: a text sandbox's inside that reads long JSON as well.

Owns that one job. Invariant: what it lets through, `strict_json.parse` lets through, and what it refuses it refuses
with the same words.

Run as `python -m octavo.serve.sandbox.text_child SOCKET PARENT`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import msgspec

from octavo.serve.errors import ApiError
from octavo.serve.http.strict_json import parse
from octavo.text.sandbox_child import JOBS, Texts, main


class Refusal(msgspec.Struct, frozen=True):
    """A 400 on its way; without a code there is none."""

    code: str = ""
    message: str = ""
    param: str | None = None


def check_json(texts: Texts, data: bytes, options: Mapping[str, Any]) -> bytes:
    """What is wrong with a request's body: a Refusal."""
    try:
        parse(data, options["max_items"])
    except ApiError as error:
        return msgspec.msgpack.encode(Refusal(error.code, error.message, error.param))
    return msgspec.msgpack.encode(Refusal())


if __name__ == "__main__":
    main(sys.argv[1:], {**JOBS, "check_json": check_json})
