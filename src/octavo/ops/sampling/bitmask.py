"""Bit masks over a vocabulary on a GPU: `allow_bits_` of `octavo.ops.sampling`.

Owns the kernel. Invariant: an allowed token keeps its bits.
"""

# Kernels are compiled from their source by Triton, whose values mypy does not know.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, assignment"
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit
def _allow_bits(logits, logits_row, at, words, words_row, vocab_size, BLOCK: tl.constexpr):
    """Program (line, block): hide the tokens of a block whose bit is not set."""
    line = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = ids < vocab_size
    word = tl.load(words + line * words_row + ids // 32, mask=inside, other=0)
    hidden = ((word >> (ids % 32)) & 1) == 0
    row = tl.load(at + line)
    tl.store(logits + row * logits_row + ids, float("-inf"), mask=inside & hidden)


def allow_bits_(logits: Tensor, at: Tensor, words: Tensor) -> None:
    """See `octavo.ops.sampling.allow_bits_`."""
    grid = (len(at), triton.cdiv(logits.shape[1], _BLOCK))
    _allow_bits[grid](logits, logits.stride(0), at, words, words.stride(0), logits.shape[1], BLOCK=_BLOCK)
