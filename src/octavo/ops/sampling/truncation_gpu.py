"""What rows keep of their logits on a GPU: the last entry, and logits without what comes after it.

Owns the way of each row: `topk_topp_small` for a small top-k, `truncate` for any other cut. A cut is a prefix of the
order (value descending, id ascending), so its last entry says all, and a draw can hide the rest as it reads. A process
imports `truncate` where a row first needs it.
"""

# Kernels are compiled from their source by Triton, whose values mypy does not know.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, assignment"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.sampling.topk_topp_small import apply_topk_topp_small
from octavo.ops.sampling.truncation import TruncationRows


@triton.jit
def is_hidden(x, ids, last_value, last_id):
    """Whether entries come after a row's last one. NaN does not."""
    return (x < last_value) | ((x == last_value) & (ids > last_id))


@triton.jit
def _write(logits, logits_row, rows, divisors, last_values, last_ids, vocab_size, BLOCK: tl.constexpr):
    """Program (line, block): divide and hide."""
    line, ids = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    divisor = tl.load(divisors + tl.load(rows + line))
    if divisor > 0:
        cells = logits + line * logits_row + ids
        x = tl.div_rn(tl.load(cells, mask=ids < vocab_size, other=0.0), divisor)
        hidden = is_hidden(x, ids, tl.load(last_values + line), tl.load(last_ids + line))
        tl.store(cells, tl.where(hidden, float("-inf"), x), mask=ids < vocab_size)


def last_kept(logits: Tensor, rows: Tensor, truncation: TruncationRows) -> tuple[Tensor, Tensor]:
    """(value float32, id int32) of the last entry that each logits row keeps, [S]; of rows without a cut, anything."""
    last_values = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    last_ids = torch.empty(len(logits), dtype=torch.int32, device=logits.device)
    if len(logits):
        min_p_logs = truncation.min_p.log()
        if truncation.many:
            from octavo.ops.sampling.topk_topp import apply_topk_topp

            apply_topk_topp(logits, rows, truncation, min_p_logs, (last_values, last_ids))
        if truncation.few:
            apply_topk_topp_small(logits, rows, truncation, min_p_logs, (last_values, last_ids))
    return last_values, last_ids


def cut_(logits: Tensor, rows: Tensor, truncation: TruncationRows) -> None:
    """See `octavo.ops.sampling.cut_`."""
    num_rows, vocab_size = logits.shape
    if num_rows:
        last = last_kept(logits, rows, truncation)
        _write[(num_rows, triton.cdiv(vocab_size, 1024))](
            logits, logits.stride(0), rows, truncation.divisors, *last, vocab_size, BLOCK=1024, num_warps=4
        )
