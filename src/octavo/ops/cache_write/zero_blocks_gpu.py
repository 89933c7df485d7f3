"""Zeroing cache blocks on a GPU: `zero_blocks` of `octavo.ops.cache_write.zero_blocks`.

Owns the kernel: one launch for all pages of all blocks. Invariant: offsets are 64-bit; the ids travel through pinned
memory that the allocator does not hand out again before the copy is done, so the host neither waits nor races.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, assignment"
from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

# Words of a program and its warps.
_BLOCK = 4096
_WARPS = 8


@triton.jit
def _zero(data, ids, num_blocks, WORDS: tl.constexpr, BLOCK: tl.constexpr):
    """Program (id, part, page): BLOCK words of one block's page."""
    block, page = tl.load(ids + tl.program_id(0)).to(tl.int64), tl.program_id(2).to(tl.int64)
    word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    start = (page * num_blocks + block) * WORDS
    tl.store(data + start + word, tl.zeros((BLOCK,), data.dtype.element_ty), mask=word < WORDS)


def zero_blocks(data: torch.Tensor, block_ids: Sequence[int]) -> None:
    """See `octavo.ops.cache_write.zero_blocks.zero_blocks`."""
    assert data.is_contiguous(), "blocks lie one behind the other"
    pages, num_blocks, size = data.shape
    words = data.view(torch.int32) if size % 4 == 0 and data.data_ptr() % 4 == 0 else data
    ids = torch.tensor(block_ids, dtype=torch.int32, pin_memory=data.is_cuda)
    ids = ids.to(data.device, non_blocking=True)
    num_words = words.shape[2]
    _zero[(len(block_ids), triton.cdiv(num_words, _BLOCK), pages)](
        words, ids, num_blocks, WORDS=num_words, BLOCK=_BLOCK, num_warps=_WARPS
    )
