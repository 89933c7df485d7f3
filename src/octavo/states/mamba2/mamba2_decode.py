"""Mamba-2 where rows decode a token each: which kernel serves them, Triton's or the one in CUDA C++.

Owns the choice, and the examples by which both are compared before that one runs. Invariants: the choice moves no bit;
no launch waits for the device, so graphs may hold it.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from octavo.ops.scan import Mamba2Operands
from octavo.ops.scan.mamba2 import mamba2_decode
from octavo.states.agreement import agrees
from octavo.states.base import LayerStates
from octavo.states.example import ENDING, Example, agree
from octavo.states.launches import Told
from octavo.states.mamba2.mamba2_advance import kept_of

# Of the rows that are compared, tokens computed before and those of the step: one whose state is kept, within a chunk,
# at its end and at its begin; and two of a first chunk.
_EXAMPLES = (64 + 41, 1), ENDING, (64, 1), (17, 1), (0, 1)
_COPIED = True
_FEWEST_ROWS = 16  # of 128 heads each; with fewer, a program of Triton's a head is faster

Plain = Callable[[LayerStates, Told, Tensor, Tensor, int, Tensor], None]  # xbc, dt, rows, out


def decode(
    own: LayerStates,
    told: Told,
    scan: Mamba2Operands,
    given: tuple[Tensor, Tensor],
    num_rows: int,
    out: Tensor,
    plain: Plain,
) -> None:
    """Of the first `num_rows` rows, those of one token. given: x, B and C; and dt. plain: by Triton's kernel."""
    if _chosen(own, told, scan, given, num_rows, plain):
        _copied(own, told, scan, given, num_rows, out)
    else:
        plain(own, told, *given, num_rows, out)


def _chosen(
    own: LayerStates, told: Told, scan: Mamba2Operands, given: tuple[Tensor, Tensor], num_rows: int, plain: Plain
) -> bool:
    """Whether the kernel in CUDA C++ serves a layer, is there, and was found to give Triton's bits."""
    heads, sizes = (scan.num_heads, scan.num_groups), (scan.head_size, scan.state_size)
    if not _COPIED or num_rows * scan.num_heads < _FEWEST_ROWS * 128:
        return False
    if not mamba2_decode.serves(heads, sizes, own.chunk, given, told.kept):
        return False
    macros, device = mamba2_decode.macros(heads, own.block_size, told.forms), given[0].device

    def compare() -> bool:
        return all(agree(_results(own, told, scan, row, plain)) for row in _EXAMPLES)

    return mamba2_decode.is_loaded(macros, device) and agrees(mamba2_decode.__name__, macros, device, compare)


def _results(
    own: LayerStates, told: Told, scan: Mamba2Operands, row: tuple[int, int], plain: Plain
) -> list[list[Tensor]]:
    """What a row gives by either kernel, and all that is kept of it then. At random."""
    example = Example(own, told, row, told.kept[0].device)
    kept, inner = kept_of(example, told), scan.num_heads * scan.head_size
    channels = inner + 2 * scan.num_groups * scan.state_size
    xbc, dt = (example.draw(1, width).to(kept[1].dtype) for width in (channels, scan.num_heads))

    def plainly(own: LayerStates, told: Told) -> tuple[Tensor]:
        out = xbc.new_zeros(1, inner)
        plain(own, told, xbc, dt, 1, out)
        return (out,)

    def copied(own: LayerStates, told: Told) -> tuple[Tensor]:
        out = xbc.new_zeros(1, inner)
        _copied(own, told, scan, (xbc, dt), 1, out)
        return (out,)

    return example.results(kept, (plainly, copied))


def _copied(
    own: LayerStates, told: Told, scan: Mamba2Operands, given: tuple[Tensor, Tensor], num_rows: int, out: Tensor
) -> None:
    """By the kernel in CUDA C++."""
    step, (state_table, state_columns, input_table, input_columns) = own.inputs, told.tables
    (xbc, dt), (state, *kept), heads = given, told.kept, (scan.num_heads, scan.num_groups)
    places = step.rows, step.query_start, step.seq_lens, state_table, input_table, *kept, *given
    places += scan.decay, scan.dt_bias, scan.skip, out, state
    numbers = xbc.stride(0), dt.stride(0), scan.dt_min, scan.dt_max, num_rows, state_columns, input_columns
    to_tell = mamba2_decode.Told(
        mamba2_decode.states_of(state), *(each.data_ptr() for each in places), *numbers, *told.firsts
    )
    mamba2_decode.launch(to_tell, mamba2_decode.macros(heads, own.block_size, told.forms), xbc.device)
