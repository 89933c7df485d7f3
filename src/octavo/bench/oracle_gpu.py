"""The oracle's drafts on a GPU, by one kernel, so that what is timed is not the oracle.

Owns the kernel. Invariant: its drafts are those of `octavo.bench.oracle`.
"""

# Kernels are compiled from their source by Triton, whose values mypy does not know.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, assignment"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from octavo.ops.compile.launch import begin_after, chained, launched
from octavo.ops.inputs.tensors import RowTensors

_ANSWERS = 32  # that a program looks at at once
_MOST = 16  # drafts of a row


@triton.jit
def _mixed(x):
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
    return x ^ (x >> 16)


@triton.jit
def _answer_of(own, width, answers, num_answers, length, KNOWN_BY: tl.constexpr, ANSWERS: tl.constexpr):
    """Which answer begins as a row does: the first such one."""
    known = tl.arange(0, KNOWN_BY)
    begin = tl.load(own + known, mask=known < width, other=0)
    answer = num_answers
    for base in range(0, num_answers, ANSWERS):
        number = base + tl.arange(0, ANSWERS)
        at = number[:, None] * length + known[None, :]
        theirs = tl.load(answers + at, mask=(number < num_answers)[:, None] & (known < width)[None, :], other=0)
        differing = tl.sum((theirs != begin[None, :]).to(tl.int32), 1)
        same = (differing == 0) & (number < num_answers)
        answer = tl.minimum(answer, tl.min(tl.where(same, number, num_answers), 0))
    return answer


@launched(triton.jit(do_not_specialize=["num_drafts", "bar", "num_answers", "length"]))
def _foretell(
    rows, sample_of, lengths, token_ids, total_len, answers, width, num_answers, length, num_drafts, bar, parts,
    vocab_size, KNOWN_BY: tl.constexpr, ANSWERS: tl.constexpr, MOST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (entry): finds the row's answer by its first tokens, and writes what comes next in it.

    Where a row ends is known behind the kernel before, and so is what that one wrote of a row that has just begun. Of
    all others the first tokens are there, see `octavo.ops.compile.launch`: their answers are found meanwhile.
    """
    entry = tl.program_id(0)
    row = tl.load(rows + entry)
    live = (tl.load(sample_of + entry) >= 0) & (tl.load(lengths + entry) > 0)
    place = tl.arange(0, MOST)
    own = token_ids + row * width
    answer = _answer_of(own, width, answers, num_answers, length, KNOWN_BY, ANSWERS)
    begin_after(PDL)
    total = tl.load(total_len + row)
    if total <= KNOWN_BY + num_drafts:  # a step writes at most so many, and one more
        answer = _answer_of(own, width, answers, num_answers, length, KNOWN_BY, ANSWERS)
    answer = tl.where(answer < num_answers, answer, 0).to(tl.int64)
    at = tl.minimum(total + place, length - 1).to(tl.int64)
    right = tl.load(answers + answer * length + at)
    lot = _mixed(at * 40503 + answer * 48271 + 12345) & (parts - 1)
    token = (right + (lot >= bar).to(tl.int32)) % vocab_size
    inside = live & (place < num_drafts) & (total + place < width)
    tl.store(own + total + place, token, mask=inside)


def foretell(
    table: RowTensors,
    rows: torch.Tensor,
    live: tuple[torch.Tensor, torch.Tensor],
    answers: torch.Tensor,
    *,
    num_drafts: int,
    known_by: int,
    bar: int,
    parts: int,
    vocab_size: int,
) -> None:
    """Write the oracle's drafts. live: sample_of and lengths of the step; answers: [N, length] int32."""
    assert num_drafts <= _MOST and known_by <= answers.shape[1], "drafts fit the kernel, answers are long enough"
    _foretell[(len(rows),)](
        rows, *live, table.token_ids, table.total_len, answers, table.token_ids.shape[1], *answers.shape, num_drafts,
        bar, parts, vocab_size, KNOWN_BY=known_by, ANSWERS=_ANSWERS, MOST=_MOST, num_warps=1, **chained(rows.device),
    )  # fmt: skip
