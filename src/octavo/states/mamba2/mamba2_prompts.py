"""Prompts of Mamba-2, in rows whose step begins at a border: which kernel walks them, Triton's or the one in CUDA C++.

Owns the choice, and the examples by which both are compared before that one runs. Invariants: the choice moves no bit;
no launch waits for the device, so graphs may hold it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.ops.compile import side_by_side
from octavo.ops.scan import Mamba2Operands
from octavo.ops.scan.mamba2 import mamba2_prompts
from octavo.states.agreement import agrees
from octavo.states.base import LayerStates
from octavo.states.example import Example, agree
from octavo.states.launches import FEW, Told
from octavo.states.mamba2.mamba2_advance import kept_of

# Of the rows that are compared, tokens computed before and those of the step: from a state on, over chunks and into an
# open one; from none on, to a chunk's end; and an open chunk alone.
_EXAMPLES = (64, 3 * 64 + 22), (0, 2 * 64), (0, 17)
_COPIED = True


class Given(NamedTuple):
    """What a step brings to a layer, and which rows of it are walked."""

    xbc: Tensor  # [T, channels of x, B and C]
    total: Tensor  # [T, heads] float32; steps too
    steps: Tensor
    ahead: Tensor  # how many rows stand ahead of them, on the device
    num_rows: int  # that stand behind those, at most


Plain = Callable[[LayerStates, Told, Given, Tensor], None]


def walk(own: LayerStates, told: Told, scan: Mamba2Operands, given: Given, out: Tensor, plain: Plain) -> None:
    """Compute the rows that begin at a border. plain: by Triton's kernel."""
    is_copied = _chosen(own, told, scan, given, plain)
    if not is_copied or side_by_side.current() is not None:  # what it is compared with compiles as well
        plain(own, told, given, out)
    if is_copied:
        _copied(own, told, scan, given, out)


def _chosen(own: LayerStates, told: Told, scan: Mamba2Operands, given: Given, plain: Plain) -> bool:
    """Whether the kernel in CUDA C++ serves a layer, is there, and was found to give Triton's bits."""
    heads, sizes = (scan.num_heads, scan.num_groups), (scan.head_size, scan.state_size)
    if not _COPIED or own.inputs.max_query_len <= FEW:
        return False
    if not mamba2_prompts.serves(heads, sizes, own.chunk, (given.xbc, given.xbc), told.kept):
        return False
    macros, device = mamba2_prompts.macros(heads, own.block_size, told.forms), given.xbc.device

    def compare() -> bool:
        return all(agree(_results(own, told, scan, row, plain)) for row in _EXAMPLES)

    return mamba2_prompts.is_loaded(macros, device) and agrees(mamba2_prompts.__name__, macros, device, compare)


def _results(
    own: LayerStates, told: Told, scan: Mamba2Operands, row: tuple[int, int], plain: Plain
) -> list[list[Tensor]]:
    """What a row gives by either kernel, and all that is kept of it then. At random."""
    example, count = Example(own, told, row, told.kept[0].device), row[1]
    kept, inner = kept_of(example, told), scan.num_heads * scan.head_size
    xbc = example.draw(count, inner + 2 * scan.num_groups * scan.state_size).to(kept[1].dtype)
    steps = example.draw(count, scan.num_heads).sigmoid() * 0.1
    total = torch.cat([-each.cumsum(0) for each in steps.split(own.chunk)])
    given = Given(xbc, total, steps, torch.zeros(1, dtype=torch.int32, device=xbc.device), 1)

    def plainly(own: LayerStates, told: Told) -> tuple[Tensor]:
        out = xbc.new_zeros(count, inner)
        plain(own, told, given, out)
        return (out,)

    def copied(own: LayerStates, told: Told) -> tuple[Tensor]:
        out = xbc.new_zeros(count, inner)
        _copied(own, told, scan, given, out)
        return (out,)

    return example.results(kept, (plainly, copied))


def _copied(own: LayerStates, told: Told, scan: Mamba2Operands, given: Given, out: Tensor) -> None:
    """By the kernel in CUDA C++."""
    step, (state_table, state_columns, input_table, input_columns) = own.inputs, told.tables
    xbc, (state, x, b, *_) = given.xbc, told.kept
    lines, rows = (xbc, given.total, given.steps, scan.skip, out), (step.rows, step.query_start, step.seq_lens)
    places = *lines, *rows, given.ahead, state_table, input_table, state, x, b
    to_tell = mamba2_prompts.Told(
        mamba2_prompts.states_of(state),
        mamba2_prompts.given_of(xbc),
        *(each.data_ptr() for each in places),
        xbc.stride(0),
        state_columns,
        input_columns,
        *told.firsts,
        len(step.rows),
    )
    own_macros = mamba2_prompts.macros((scan.num_heads, scan.num_groups), own.block_size, told.forms)
    mamba2_prompts.launch(to_tell, given.num_rows, own_macros, xbc.device)
