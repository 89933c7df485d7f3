"""Keys: what a block is called outside of its cache.

Owns the form of a key, a block's name and its cache group, and the file that a key names.
"""

from __future__ import annotations

from typing import NamedTuple

SUFFIX = ".safetensors"


class Pair(NamedTuple):
    """A block of the cache, and what its content is called elsewhere."""

    block: int
    key: bytes


def make_key(name: bytes, group: int) -> bytes:
    """The key of a block of cache group `group`."""
    return name + bytes([group])


def file_path(folder: str, key: bytes) -> str:
    """Where the file of a key is: its name in hexadecimal digits, and its group."""
    digits = key[:-1].hex()
    return f"{folder}/{digits[:2]}/{digits}-{key[-1]}{SUFFIX}"
