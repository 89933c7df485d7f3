"""Wanted: what a scheduler's half tells the worker's of an offer of blocks, or of one to be fetched."""

from __future__ import annotations

import msgspec


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """What an order says beside its blocks: of an offer what it is called, of a load where it is."""

    transfer_id: str
    digest: bytes  # of what was computed: tokens, salt, version of the weights
    version: str = ""  # of the weights, as it is told
    places: list[tuple[int, int]]  # of each block: its cache group and its place in a request's list
    end: int  # behind the last token
    offer: str = ""  # its own name, which no other offer ever has; empty: of a load, that is not known
    # of a load
    blocks: list[int] = []  # which they are there, as the offer said; empty: it did not
    position: int = 0  # of the token that is computed next
    fetch: str = ""  # its name, the same for all ranks
    addresses: list[tuple[str, int]] = []  # where the ranks of the other engine are
    engine_id: str = ""  # the other engine's; empty: whoever listens there
