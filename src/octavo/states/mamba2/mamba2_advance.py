"""States of Mamba-2 behind chunks that decoding ended: which kernel writes them, Triton's or the one in CUDA C++.

Owns the choice, and the example by which both are compared before that one runs. Invariants: the choice moves no bit;
no launch waits for the device, so graphs may hold it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from octavo.ops.compile.launch import chained
from octavo.ops.compile.row_sum import padded_length
from octavo.ops.scan import Mamba2Operands
from octavo.ops.scan.mamba2 import mamba2_advance
from octavo.ops.scan.mamba2 import mamba2_advance_gpu as triton_gpu
from octavo.states.agreement import agrees
from octavo.states.base import LayerStates
from octavo.states.example import ENDING, Example, agree
from octavo.states.launches import PLAIN, Told

# Of Triton's kernel: heads of a task; programs, two a processor; heads on their way or used; registers of a thread.
_HEADS, _PROGRAMS, _STAGES, _REGISTERS = 16, 264, 2, 255
_MOST_STATES = 128  # with which several heads fit a Hopper's shared memory
_FEWEST_ROWS = 512  # for which it is compiled
_ENDING_FIRST = 63, 1  # of a row: no state is ahead of its chunk
_COPIED = True

Firsts = Sequence[tuple[int, int]]  # parts of each layer's states and inputs


def advance(
    own: LayerStates,
    told: Told,
    scan: Mamba2Operands,
    num_rows: int,
    firsts: Firsts,
    shape: dict[str, Any],
    warps: int,
) -> None:
    """Of the first `num_rows` rows, where the one token ends a chunk: write states. firsts: at equal distances.

    shape: constants of Triton's kernel; warps: of its programs.
    """
    if _chosen(own, told, scan, num_rows, shape, warps):
        _copied(own, told, scan, num_rows, firsts)
    else:
        _plain(own, told, scan, num_rows, firsts, shape, warps)


def _chosen(
    own: LayerStates, told: Told, scan: Mamba2Operands, num_rows: int, shape: dict[str, Any], warps: int
) -> bool:
    """Whether the kernel in CUDA C++ serves a layer, is there, and was found to give Triton's bits."""
    heads, sizes = (scan.num_heads, scan.num_groups), (scan.head_size, scan.state_size)
    if not (_COPIED and shape["PARTED"] and mamba2_advance.serves(heads, sizes, own.chunk, num_rows, told.kept)):
        return False
    macros, device = _macros(own, told, scan), told.kept[0].device

    def plain(own: LayerStates, told: Told) -> tuple[Tensor, ...]:
        _plain(own, told, scan, 1, [told.firsts], shape, warps)
        return ()

    def copied(own: LayerStates, told: Told) -> tuple[Tensor, ...]:
        _copied(own, told, scan, 1, [told.firsts])
        return ()

    def compare() -> bool:
        examples = [Example(own, told, row, device) for row in (ENDING, _ENDING_FIRST)]
        return all(agree(each.results(kept_of(each, told), (plain, copied))) for each in examples)

    return mamba2_advance.is_loaded(macros, device) and agrees(mamba2_advance.__name__, macros, device, compare)


def kept_of(example: Example, told: Told) -> list[Tensor]:
    """What an example would have kept, at random: states that are halves of one, and gates as Mamba-2 has them."""
    kept = [example.draw(*shape).to(store.dtype) for shape, store in zip(example.shapes, told.kept, strict=True)]
    halves = kept[0].view(torch.bfloat16)
    halves.copy_(example.draw(*halves.shape))  # any two such numbers are halves of one
    kept[3].abs_().neg_()
    kept[4].sigmoid_()
    return kept


def _macros(own: LayerStates, told: Told, scan: Mamba2Operands) -> dict[str, int | str]:
    return mamba2_advance.macros((scan.num_heads, scan.num_groups), own.block_size, told.forms)


def _next(firsts: Firsts) -> tuple[int, int]:
    """Parts from a layer's to the next one's."""
    return (firsts[1][0] - firsts[0][0], firsts[1][1] - firsts[0][1]) if len(firsts) > 1 else (0, 0)


def _copied(own: LayerStates, told: Told, scan: Mamba2Operands, num_rows: int, firsts: Firsts) -> None:
    """By the kernel in CUDA C++."""
    step, (state_table, state_columns, input_table, input_columns) = own.inputs, told.tables
    places = step.rows, step.query_start, step.seq_lens, state_table, input_table, *told.kept
    numbers = num_rows, len(firsts), *_next(firsts), state_columns, input_columns, *firsts[0]
    to_tell = mamba2_advance.Told(*(each.data_ptr() for each in places), *numbers)
    mamba2_advance.launch(to_tell, _macros(own, told, scan), told.kept[0].device)


def _plain(
    own: LayerStates,
    told: Told,
    scan: Mamba2Operands,
    num_rows: int,
    firsts: Firsts,
    shape: dict[str, Any],
    warps: int,
) -> None:
    """By Triton's."""
    step, x = own.inputs, told.kept[1]
    each = math.gcd(scan.num_heads // scan.num_groups, _HEADS)
    tasks = len(firsts) * num_rows * scan.num_heads // each * -(-scan.head_size // shape["WIDE"])
    is_small = x.dtype is not torch.float32 and scan.state_size <= _MOST_STATES
    triton_gpu.mamba2_advance[(min(tasks, _PROGRAMS),)](
        step.rows,
        step.query_start,
        step.seq_lens,
        num_rows,
        len(firsts),
        *_next(firsts),
        *told.tables,
        *told.kept,
        *firsts[0],
        **shape,
        EACH=each,
        ROWS_PADDED=padded_length(max(num_rows, _FEWEST_ROWS)),
        STAGES=_STAGES if is_small else 1,
        maxnreg=_REGISTERS if is_small else None,
        num_warps=warps,
        num_stages=1,
        **chained(x.device),
        **PLAIN,
    )
