"""Blocks from memory that a GPU can reach, as another one's, into its own cache: one launch for all parts of them.

Owns the kernel. Does not know whose memory it is. Invariants: offsets are 64-bit; words are of 8 bytes, or of one
where the parts do not consist of such; few programs run at once, and what they have under way fills the link.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, assignment"
from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from octavo.ops.copying import to_device

# Words of a turn of a program, its warps, and programs: two on each of a large GPU's processors.
_BLOCK = 2048
_WARPS = 8
_PROGRAMS = 256


class Strides(NamedTuple):
    """Where a part of a block lies: bytes from one part to the next, and from one block to the next."""

    part: int
    block: int


@triton.jit(do_not_specialize=["count"])
def _copy_blocks(
    own,
    theirs,
    blocks,
    count,
    parts,
    own_part,
    own_block,
    their_part,
    their_block,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program p takes chunks p, p + programs, ...: BLOCK words of one part of one block. theirs: words behind `own`."""
    chunks: tl.constexpr = (WORDS + BLOCK - 1) // BLOCK
    for chunk in range(tl.program_id(0), count * parts * chunks, tl.num_programs(0)):
        piece = chunk // chunks
        part, block = (piece // count).to(tl.int64), piece % count
        word = chunk % chunks * BLOCK + tl.arange(0, BLOCK)
        here = part * own_part + tl.load(blocks + block) * own_block
        there = part * their_part + tl.load(blocks + count + block) * their_block
        inside = word < WORDS
        tl.store(own + here + word, tl.load(own + theirs + there + word, mask=inside), mask=inside)


def copy_blocks(
    own: torch.Tensor,
    address: int,
    blocks: NDArray[np.int64],
    strides: tuple[Strides, Strides],
    num_parts: int,
    part_bytes: int,
) -> None:
    """Copy parts of blocks from `address` to `own`, on the current stream, not waited for.

    own: uint8, contiguous. blocks: int64 [2, count]: here, and there. strides: here, and there.
    """
    numbers = [address, own.data_ptr(), part_bytes, *strides[0], *strides[1]]
    word = 8 if all(number % 8 == 0 for number in numbers) else 1
    (own_part, own_block), (their_part, their_block) = ((each.part // word, each.block // word) for each in strides)
    _copy_blocks[(_PROGRAMS,)](
        own.view(-1).view(torch.int64 if word == 8 else torch.uint8),
        (address - own.data_ptr()) // word,
        to_device(np.ascontiguousarray(blocks, np.int64).reshape(-1), own.device),
        blocks.shape[1],
        num_parts,
        own_part,
        own_block,
        their_part,
        their_block,
        WORDS=part_bytes // word,
        BLOCK=_BLOCK,
        num_warps=_WARPS,
    )
