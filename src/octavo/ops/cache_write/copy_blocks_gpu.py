"""Blocks from memory that a GPU can reach, as another one's, into its own cache: one launch for all parts of them.

Owns the kernel. Does not know whose memory it is. Invariants: offsets are 64-bit; words are of 8 bytes, or of one
where the parts do not consist of such; as many programs run as have so much under way that it fills the link.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, assignment"
from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

from octavo.ops.copying import BlockCopy, to_device

# Words of a turn of a program, its warps, and programs: four on each of an H200's processors, of which two leave a
# tenth of its link idle.
_BLOCK = 2048
_WARPS = 8
_PROGRAMS = 528


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


def copy_blocks(copy: BlockCopy) -> None:
    """See `octavo.ops.mapped.copy_blocks`; on torch's current stream."""
    own, address, blocks, strides, num_parts, part_bytes = copy
    numbers = [address, own.data_ptr(), part_bytes, *strides[0], *strides[1]]
    word = 8 if all(number % 8 == 0 for number in numbers) else 1
    (own_part, own_block), (their_part, their_block) = ((part // word, block // word) for part, block in strides)
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
