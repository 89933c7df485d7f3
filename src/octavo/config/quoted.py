"""How an error repeats a value that came from outside, and a message an error of code that did.

Owns the most characters and what is left out. Knows no setting and no file. Invariant: whatever the value, what is
shown is one line of about the length that was asked for, of a value printable characters, and the work is bounded as
well.
"""

from __future__ import annotations

import os
import traceback

MAX_SHOWN = 60  # characters of a wrong value that an error repeats
MAX_SAID = 300  # characters of what an error says
MAX_NAME = 200  # of a tensor's name or a file's
_MAX_BITS = 4096  # of an integer that is written out: digits of a long one take quadratic time


def quoted(value: object, most: int = MAX_SHOWN) -> str:
    """As Python writes it; of a long one its beginning and its end: a path's end says most."""
    if isinstance(value, int) and value.bit_length() > _MAX_BITS:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, str | bytes | list | tuple) and len(value) > 2 * most:
        return _ends(_line(value[:most]) + _line(value[-most:]), most)
    text = _line(value)
    return text if len(text) <= most else _ends(text, most)


def plain(name: str, most: int = MAX_NAME) -> str:
    """A name without quotes."""
    return quoted(name, most + 2)[1:-1]


def said(error: BaseException, most: int = MAX_SAID) -> str:
    """What kind of error it is and what it says. One of somebody's may raise when it is asked, or say very much."""
    name = type(error).__name__
    try:
        words = str(error)[:most]
    except BaseException as worse:  # whatever that is, it is about a message
        words = f"(its text cannot be had: {type(worse).__name__})"
    return " ".join((f"{name}: {words}" if words else name).split())


def describe(error: BaseException, most: int = MAX_SAID) -> str:
    """What it says, and where it was raised."""
    frames = list(traceback.walk_tb(error.__traceback__))
    place = f" at {os.path.basename(frames[-1][0].f_code.co_filename)}:{frames[-1][1]}" if frames else ""
    return said(error, most) + place


def _line(value: object) -> str:
    try:
        return " ".join(repr(value).split())
    except ValueError:  # a long integer somewhere in it
        return f"a {type(value).__name__} with a long integer"


def _ends(text: str, most: int) -> str:
    return f"{text[: most // 2]}...{text[-most // 2 :]}"
