"""CacheIdentity: what the content of a block follows from, beside its request's tokens and salt.

Owns the list of these things and their bytes. Does not know where they come from. Invariant: two identities have the
same bytes exactly if all their parts are equal, in every process.
"""

from __future__ import annotations

import dataclasses
import struct


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CacheIdentity:
    """Part of every block's name. Empty parts say nothing: they will do where names do not leave the process."""

    numerics_id: str = ""  # of the contract on which bits depend
    model: str = ""  # digest of the weights and of config.json
    cache_dtype: str = ""
    cache: str = ""  # layout, block sizes, what groups keep
    mods: str = ""  # digest of the attention mods
    weights_version: str = ""  # what weight updates change

    def encode(self) -> bytes:
        """The parts with their lengths, so that none runs into the next."""
        parts = [value.encode() for value in dataclasses.astuple(self)]
        return b"".join(struct.pack("<Q", len(part)) + part for part in parts)


LOCAL = CacheIdentity()  # of names that do not leave their process
