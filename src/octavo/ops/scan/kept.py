"""What layers with states keep in blocks, as kernels of a GPU find it: `Store.places`, in Triton.

Owns the Form of a tensor (the constants of its cut, the same for all layers of a group) and the functions that turn
positions of a row into addresses. Invariant: the null block is neither read nor written.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, assignment"
from __future__ import annotations

import triton
import triton.language as tl

from octavo.ops.states import Store

Form = tuple[int, int, int, int, int, int, int, int]
# Parameters by which layers differ that are alike: one kernel serves all of them, wherever a layer's parts begin.
PLACES = ["state_columns", "input_columns", "state_first", "input_first"]


def form_of(store: Store, width: int) -> Form | None:
    """Of a tensor that is read in runs of `width` elements; None where a run is cut into several lines."""
    data = store.data
    size = data[0, 0, 0].numel()
    if size % width:
        return None
    strides = data.stride(0), data.stride(1), data.stride(2)
    return (*strides, data.shape[2], store.lines, size // width, data.shape[1], store.blocks)


@triton.jit
def place(table, first_part, entry, offset, run, inside, FORM: tl.constexpr, WIDTH: tl.constexpr):
    """(where run `run` of the item at `offset` of `entry` begins, in elements; whether it is kept).

    table: of the item's row. inside: whether it is asked for. FORM: strides of blocks, parts and lines; lines of a
    part, lines of an item, runs of a line; parts of a block, blocks of an entry.
    """
    block = block_of(table, first_part, entry, offset, run, inside, FORM)
    return begin_in(block, first_part, offset, run, FORM, WIDTH), inside & (block > 0)


@triton.jit
def block_of(table, first_part, entry, offset, run, inside, FORM: tl.constexpr):
    """The block of `place`: 0 where it is not kept, or not asked for."""
    part = first_part + (offset * FORM[4] + run // FORM[5]) // FORM[3]
    return tl.load(table + entry * FORM[7] + part // FORM[6], mask=inside, other=0)


@triton.jit
def begin_in(block, first_part, offset, run, FORM: tl.constexpr, WIDTH: tl.constexpr):
    """Where `place` begins, in elements, in the block that it is in."""
    line = offset * FORM[4] + run // FORM[5]
    part = first_part + line // FORM[3]
    inner = part % FORM[6] * FORM[1] + line % FORM[3] * FORM[2] + run % FORM[5] * WIDTH
    return block.to(tl.int64) * FORM[0] + inner


@triton.jit
def row_of(query_start, num_rows, slot, PER: tl.constexpr, EXTRA: tl.constexpr):
    """The last row whose slots begin at `slot` or before it: row i's begin at query_start[i] // PER + EXTRA * i."""
    reach = num_rows * 0 + 1
    while reach < num_rows:
        reach *= 2
    row = slot * 0
    while reach > 0:
        next = row + reach
        begin = tl.load(query_start + next, mask=next < num_rows, other=0) // PER + EXTRA * next
        row = tl.where((next < num_rows) & (begin <= slot), next, row)
        reach //= 2
    return row


@triton.jit
def _token_at(source, of_row, position, run, FORM: tl.constexpr, WIDTH: tl.constexpr):
    """(where run `run` of what the tokens at `position` brought begins, of the step or kept; which there are)."""
    fresh, stride, first, kept = source
    table, first_part, token, computed, end, block = of_row
    is_old = position < computed
    where, _ = place(table, first_part, position // block, position % block, run, is_old, FORM, WIDTH)
    at = (token + position - computed).to(tl.int64) * stride + first
    return tl.where(is_old, kept + where, fresh + at), position < end


@triton.jit
def tokens(source, of_row, begin, here, run, channel, inside, FORM: tl.constexpr, WIDTH: tl.constexpr):
    """[places, channels]: what the tokens at begin + here brought, of the step or kept; 0 beyond the row's end.

    source: (what the step's tokens bring, from token to token, where the run begins, what is kept); of_row: (its table
    of inputs, the layer's first part, its first token of the step, positions of that and behind its last one, tokens of
    an entry). channel: [channels], `inside`: which there are.
    """
    at, is_there = _token_at(source, of_row, begin + here, run, FORM, WIDTH)
    return tl.load(at[:, None] + channel[None, :], mask=is_there[:, None] & inside[None, :], other=0.0)


@triton.jit
def turned(source, of_row, begin, here, run, channel, inside, FORM: tl.constexpr, WIDTH: tl.constexpr):
    """[channels, places]: `tokens`, transposed."""
    at, is_there = _token_at(source, of_row, begin + here, run, FORM, WIDTH)
    return tl.load(at[None, :] + channel[:, None], mask=is_there[None, :] & inside[:, None], other=0.0)


@triton.jit
def numbers(source, of_row, begin, here, run, FORM: tl.constexpr):
    """[places]: `tokens`, of one number each."""
    at, is_there = _token_at(source, of_row, begin + here, run, FORM, 1)
    return tl.load(at, mask=is_there, other=0.0)


@triton.jit
def keep(source, of_row, position, run, channel, values, inside, FORM: tl.constexpr, WIDTH: tl.constexpr):
    """Write values [positions, channels], where `inside` of the same shape, as far as the table keeps them."""
    _, _, _, kept = source
    table, first_part, _, _, _, block = of_row
    asked = tl.max(inside.to(tl.int32), 1) > 0
    where, is_there = place(table, first_part, position // block, position % block, run, asked, FORM, WIDTH)
    at = kept + where[:, None] + channel[None, :]
    tl.store(at, values.to(kept.dtype.element_ty), mask=inside & is_there[:, None])


@triton.jit
def state_at(kept_states, border, FORM: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr):
    """(addresses [runs, channels] of runs of the state behind `border` tokens, which of them are there)."""
    kept, table, first_part, run, channel, within, inside = kept_states
    entry = border // CHUNK - 1 + 0 * run
    where, is_there = place(table, first_part, entry, 0, run, within & (border > 0), FORM, WIDTH)
    return kept + where[:, None] + channel[None, :], is_there[:, None] & inside[None, :]


@triton.jit
def read_state(kept_states, border, FORM: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr):
    """[runs, channels] float32 of the state behind `border` tokens; zeros at 0.

    kept_states: (what is kept, the row's table of states, the layer's first part, runs, channels, which of both exist).
    """
    source, is_there = state_at(kept_states, border, FORM, WIDTH, CHUNK)
    return tl.load(source, mask=is_there, other=0.0).to(tl.float32)


@triton.jit
def write_state(kept_states, border, state, FORM: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr):
    """Keep a state, if the table does; and it as it is kept, rounded."""
    goal, is_there = state_at(kept_states, border, FORM, WIDTH, CHUNK)
    rounded = state.to(kept_states[0].dtype.element_ty)
    tl.store(goal, rounded, mask=is_there)
    return rounded.to(tl.float32)
