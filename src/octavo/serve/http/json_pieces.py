"""JSON in pieces, for replies with millions of log-probabilities.

Owns the way from flat arrays to JSON's text, a few milliseconds of work at a time, and the joining of such parts with
what msgspec encodes. Knows no route. Invariant: the pieces, put together, are the JSON of the same reply made at once;
whoever takes one may let others run before the next.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

from octavo.request.outputs import FlatLogprobs
from octavo.serve.api.logprobs import Offsets, TokenTexts, chat_entries, finite, top_of

PIECE_ENTRIES = 2048  # log-probabilities of a piece: about 2 ms of work and 150 KB
_LONG = 16_384  # bytes of a piece after which others have their turn
_ENCODER = msgspec.json.Encoder()


class _Entry(msgspec.Struct, gc=False):
    """One token of vLLM's prompt_logprobs."""

    logprob: float
    rank: int
    decoded_token: str | None


def with_fields(encoded: bytes, fields: Sequence[tuple[str, Iterable[bytes]]]) -> Iterator[bytes]:
    """A JSON object with more fields at its end."""
    yield encoded[:-1]
    mark = b"" if encoded == b"{}" else b","
    for name, value in fields:
        yield mark + _ENCODER.encode(name) + b":"
        yield from value
        mark = b","
    yield b"}"


def array(entries: Iterable[Iterable[bytes]]) -> Iterator[bytes]:
    """A JSON array of entries in pieces."""
    mark = b"["
    for entry in entries:
        yield mark
        yield from entry
        mark = b","
    yield b"]" if mark == b"," else b"[]"


def prompt_logprobs(flat: FlatLogprobs) -> Iterator[bytes]:
    """vLLM's list: null for the first token, then token id -> logprob, rank and text."""
    names: dict[int, tuple[str, str | None]] = {}

    def positions(first: int, last: int) -> Iterator[Any]:
        for position in range(first, last):
            start, end = flat.bounds(position)
            if start == end:
                yield None
                continue
            found = {}
            entries = zip(flat.token_ids[start:end], flat.logprobs[start:end], flat.ranks[start:end], strict=True)
            for token_id, logprob, rank in entries:
                name = names.get(token_id)
                if name is None:
                    name = names[token_id] = (str(token_id), flat.decode(token_id))
                found[name[0]] = _Entry(finite(logprob), rank, name[1])
            yield found

    return _list(flat, positions)


def completion_logprobs(
    texts: TokenTexts, offsets: Offsets, token_ids: Sequence[int], flat: FlatLogprobs
) -> Iterator[bytes]:
    """As `octavo.serve.api.logprobs.completion_logprobs`."""
    width = len(flat.token_ids) // max(len(flat), 1)
    bounds = [flat.bounds(position) for position in range(len(flat))]
    own = (None if start == end else finite(flat.logprobs[start]) for start, end in bounds)
    return with_fields(
        b"{}",
        [
            ("tokens", in_pieces(map(texts, token_ids), 1)),
            ("token_logprobs", in_pieces(own, 1)),
            ("top_logprobs", in_pieces((top_of(texts, entry) for entry in flat), width)),
            ("text_offset", in_pieces(map(offsets.add, token_ids), 1)),
        ],
    )


def chat_logprobs(texts: TokenTexts, token_ids: Sequence[int], flat: FlatLogprobs, num_top: int) -> Iterator[bytes]:
    """As `octavo.serve.api.logprobs.chat_logprobs`."""
    width = len(flat.token_ids) // max(len(flat), 1)
    content = in_pieces(chat_entries(texts, token_ids, flat, num_top), width)
    return with_fields(b'{"refusal":null}', [("content", content)])


async def joined(pieces: Iterable[bytes]) -> bytes:
    """All pieces, with time for others between them."""
    parts = []
    for piece in pieces:
        parts.append(piece)
        if len(piece) > _LONG:
            await asyncio.sleep(0)
    return b"".join(parts)


def _list(flat: FlatLogprobs, positions: Any) -> Iterator[bytes]:
    """A list with an entry per position, several of them in a piece."""
    per_piece = max(PIECE_ENTRIES * len(flat) // max(len(flat.token_ids), 1), 1)
    mark = b"["
    for first in range(0, len(flat), per_piece):
        yield mark + _ENCODER.encode(list(positions(first, min(first + per_piece, len(flat)))))[1:-1]
        mark = b","
    yield b"]" if len(flat) else b"[]"


def in_pieces(values: Iterable[Any], width: int) -> Iterator[bytes]:
    """A JSON list of values, each of which stands for `width` log-probabilities."""
    per_piece = max(PIECE_ENTRIES // max(width, 1), 1)
    mark = b"["
    values = iter(values)
    while part := list(itertools.islice(values, per_piece)):
        yield mark + _ENCODER.encode(part)[1:-1]
        mark = b","
    yield b"]" if mark == b"," else b"[]"
