"""How a GPU keeps a state of Mamba-2: what products take of it lies apart from the rest, so that decoding reads half.

Owns a head's place, its two halves and how a state is rounded for products. Those of bfloat16 take the upper 16 bits of
a rounded state. Where a state of float32 is kept PARTED, they lie in the first half of the head's bytes, and what is
left, with a sign, in the second: upper * 2**16 + left are the state's bits again. So no two states may share both, and
halves are rounded away from zero, where a conversion would look for an even number.
Invariants: all of Mamba-2's kernels round like that, parted or not; how the cache cuts a state changes no byte of it.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, assignment"
from __future__ import annotations

import triton
import triton.language as tl

from octavo.ops.scan.kept import begin_in, block_of, place

_LARGEST = tl.constexpr(0x7FFF7FFF)  # of what is no number: bits above it would be a negative zero once rounded


@triton.jit
def rounded(state, kind: tl.constexpr):
    """A state, as `read` and `write` give it, as products of type `kind` take it."""
    if (kind == tl.bfloat16) and (state.dtype == tl.float32):
        return ((state.to(tl.int32, bitcast=True) + 0x8000) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        return state.to(kind)


@triton.jit
def _places(
    told,
    border,
    width,
    channel,
    FORM: tl.constexpr,
    SIZE: tl.constexpr,
    STATES: tl.constexpr,
    CHUNK: tl.constexpr,
    HALF: tl.constexpr = None,
):
    """([states, channels] of a head's state behind `border` tokens, or of a HALF of it, of 16 bits; which are kept).

    told: (what is kept, the row's table of states, the layer's first part, head). width, channel: states, channels.
    """
    kept, table, first_part, head = told
    entry, is_open, run = tl.maximum(border // CHUNK - 1, 0), border > 0, head * STATES
    if FORM[5] % STATES == 0:  # one line holds the head, so that all of it is kept or nothing
        where, is_there = place(table, first_part, entry, 0, run, is_open, FORM, SIZE)
        at = kept + where
        if HALF is not None:
            at = at.to(tl.pointer_type(tl.int16)) + HALF * STATES * SIZE
        return at + (width * SIZE)[:, None] + channel[None, :], is_there
    else:
        if HALF is None:
            run += width
        else:  # two states of a half take the bytes of a whole one; of an odd number both halves share one
            width_of_both = HALF * STATES + width
            run += width_of_both // 2
        where, is_there = place(table, first_part, entry + 0 * width, 0, run, is_open & (width < STATES), FORM, SIZE)
        at = kept + where
        if HALF is not None:
            at = at.to(tl.pointer_type(tl.int16)) + width_of_both % 2 * SIZE
        return at[:, None] + channel[None, :], is_there[:, None]


@triton.jit
def read_upper(
    told,
    border,
    width,
    channel,
    inside,
    FORM: tl.constexpr,
    SIZE: tl.constexpr,
    STATES: tl.constexpr,
    CHUNK: tl.constexpr,
    PARTED: tl.constexpr,
):
    """[states, channels]: of a head's state what products of bfloat16 take, where it is PARTED, else all in float32.

    Zeros at border 0. inside: what exists. For the other arguments see `_places`.
    """
    if PARTED:
        source, is_there = _places(told, border, width, channel, FORM, SIZE, STATES, CHUNK, 0)
        return tl.load(source, mask=inside & is_there, other=0).to(tl.bfloat16, bitcast=True)
    else:
        source, is_there = _places(told, border, width, channel, FORM, SIZE, STATES, CHUNK)
        return tl.load(source, mask=inside & is_there, other=0.0).to(tl.float32)


@triton.jit
def head_block(told, border, FORM: tl.constexpr, STATES: tl.constexpr, CHUNK: tl.constexpr):
    """The block that has a head's state behind `border` tokens, 0 at 0. For `told` see `_places`; one line holds it."""
    _, table, first_part, head = told
    tl.static_assert(FORM[5] % STATES == 0, "a head's state lies in one line")
    return block_of(table, first_part, tl.maximum(border // CHUNK - 1, 0), 0, head * STATES, border > 0, FORM)


@triton.jit
def upper_in(
    told,
    block,
    width,
    channel,
    inside,
    FORM: tl.constexpr,
    SIZE: tl.constexpr,
    STATES: tl.constexpr,
    PARTED: tl.constexpr,
):
    """`read_upper`, of the `head_block` that is known."""
    kept, _, first_part, head = told
    source = kept + begin_in(block, first_part, 0, head * STATES, FORM, SIZE)
    at, is_there = (width * SIZE)[:, None] + channel[None, :], inside & (block > 0)
    if PARTED:
        return tl.load(source.to(tl.pointer_type(tl.bfloat16)) + at, mask=is_there, other=0.0)
    else:
        return tl.load(source + at, mask=is_there, other=0.0).to(tl.float32)


@triton.jit
def read(
    told,
    border,
    width,
    channel,
    inside,
    FORM: tl.constexpr,
    SIZE: tl.constexpr,
    STATES: tl.constexpr,
    CHUNK: tl.constexpr,
    PARTED: tl.constexpr,
    kind: tl.constexpr,
    advances=True,
):
    """([states, channels] of a head's state in float32, the same as products of type `kind` take it): see above.

    advances: whether the first is asked for.
    """
    upper = read_upper(told, border, width, channel, inside, FORM, SIZE, STATES, CHUNK, PARTED)
    if PARTED:
        source, is_there = _places(told, border, width, channel, FORM, SIZE, STATES, CHUNK, 1)
        left = tl.load(source, mask=inside & is_there & advances, other=0).to(tl.int32)
        state = (upper.to(tl.int16, bitcast=True).to(tl.int32) << 16) + left
        return state.to(tl.float32, bitcast=True), upper
    else:
        return upper, rounded(upper, kind)


@triton.jit
def write(
    told,
    border,
    state,
    width,
    channel,
    inside,
    FORM: tl.constexpr,
    SIZE: tl.constexpr,
    STATES: tl.constexpr,
    CHUNK: tl.constexpr,
    PARTED: tl.constexpr,
    kind: tl.constexpr,
):
    """Keep a state of float32 behind `border` tokens, if the table does. What `read` will give."""
    if PARTED:
        bits = tl.minimum(state.to(tl.int32, bitcast=True), _LARGEST)
        upper, left = ((bits + 0x8000) >> 16).to(tl.int16), bits.to(tl.int16)
        goal, is_there = _places(told, border, width, channel, FORM, SIZE, STATES, CHUNK, 0)
        if FORM[5] % STATES == 0:
            if is_there:
                tl.store(goal, upper, mask=inside)
                tl.store(goal + STATES * SIZE, left, mask=inside)
        else:
            tl.store(goal, upper, mask=inside & is_there)
            goal, is_there = _places(told, border, width, channel, FORM, SIZE, STATES, CHUNK, 1)
            tl.store(goal, left, mask=inside & is_there)
        return bits.to(tl.float32, bitcast=True), upper.to(tl.bfloat16, bitcast=True)
    else:
        goal, is_there = _places(told, border, width, channel, FORM, SIZE, STATES, CHUNK)
        kept = state.to(told[0].dtype.element_ty)
        tl.store(goal, kept, mask=inside & is_there)
        return kept.to(tl.float32), rounded(kept.to(tl.float32), kind)


@triton.jit
def read_in(
    told,
    block,
    width,
    channel,
    inside,
    FORM: tl.constexpr,
    SIZE: tl.constexpr,
    STATES: tl.constexpr,
    PARTED: tl.constexpr,
):
    """[states, channels] of a head's state in float32, of the block that is known. told: see `_begin_in`."""
    source, at, is_there = _begin_in(told, block, FORM, SIZE, STATES), _at(width, channel, SIZE), inside & (block > 0)
    if PARTED:
        source = source.to(tl.pointer_type(tl.int16))
        upper = tl.load(source + at, mask=is_there, other=0).to(tl.int32)
        left = tl.load(source + STATES * SIZE + at, mask=is_there, other=0).to(tl.int32)
        return ((upper << 16) + left).to(tl.float32, bitcast=True)
    else:
        return tl.load(source + at, mask=is_there, other=0.0).to(tl.float32)


@triton.jit
def write_in(
    told,
    block,
    state,
    width,
    channel,
    inside,
    FORM: tl.constexpr,
    SIZE: tl.constexpr,
    STATES: tl.constexpr,
    PARTED: tl.constexpr,
):
    """Keep a state of float32 in the block that is known, if it is one. told: see `_begin_in`."""
    goal, at, is_there = _begin_in(told, block, FORM, SIZE, STATES), _at(width, channel, SIZE), inside & (block > 0)
    if PARTED:  # a branch around stores is more than the pipeliner of Triton 3.6 takes
        bits, halves = tl.minimum(state.to(tl.int32, bitcast=True), _LARGEST), goal.to(tl.pointer_type(tl.int16))
        tl.store(halves + at, ((bits + 0x8000) >> 16).to(tl.int16), mask=is_there)
        tl.store(halves + STATES * SIZE + at, bits.to(tl.int16), mask=is_there)
    else:
        tl.store(goal + at, state.to(told[0].dtype.element_ty), mask=is_there)


@triton.jit
def _begin_in(told, block, FORM: tl.constexpr, SIZE: tl.constexpr, STATES: tl.constexpr):
    """Where a head's state begins in a block. told: (what is kept, the layer's first part, head)."""
    kept, first_part, head = told
    tl.static_assert(FORM[5] % STATES == 0, "a head's state lies in one line")
    return kept + begin_in(block, first_part, 0, head * STATES, FORM, SIZE)


@triton.jit
def _at(width, channel, SIZE: tl.constexpr):
    return (width * SIZE)[:, None] + channel[None, :]
