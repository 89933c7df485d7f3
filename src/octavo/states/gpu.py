"""GpuStates: the operators of layers with states on a GPU, in Triton, or in CUDA C++ where that serves.

Owns what a kernel is told of a layer (once) and its tiles. Invariants: tiles move no bit; no launch waits for the
device, so graphs may hold it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.ops.compile.launch import chained
from octavo.ops.compile.row_sum import padded_length
from octavo.ops.scan import (
    ConvOperands,
    DeltaNetOperands,
    DeltaOperands,
    Mamba1Operands,
    Mamba2Operands,
)
from octavo.ops.scan.conv_decode_gpu import decode_convolution
from octavo.ops.scan.conv_gpu import convolve_prompts, short_convolution
from octavo.ops.scan.kept import form_of
from octavo.ops.scan.mamba1_gpu import mamba1_scan
from octavo.ops.scan.mamba2 import mamba2_decode_gpu
from octavo.ops.scan.mamba2.mamba2_decode_gpu import programs_of
from octavo.ops.scan.mamba2.mamba2_gpu import mamba2_scan
from octavo.ops.scan.mamba2.mamba2_walk_gpu import mamba2_walk
from octavo.states import composed, conv_decode, delta_gpu
from octavo.states.base import LayerStates
from octavo.states.launches import FEW, PLAIN, Told, gates, has_prompts, is_streamable, kind_of, precision
from octavo.states.mamba2 import mamba2_advance, mamba2_decode, mamba2_prompts
from octavo.states.reference import DELTA_INPUTS, MAMBA1_INPUTS, MAMBA2_INPUTS


class Stream(NamedTuple):
    """How programs decode several heads each."""

    warps: int
    stages: int  # heads whose states are on their way or used
    registers: int | None  # of a thread, at most
    room: int  # programs that run at once


# Of a program that convolves prompts: tokens, channels, registers of a thread; and channels where few rows decode.
_CONV_TOKENS, _CONV_TILE, _CONV_REGISTERS, _DECODE_CHANNELS = 16, 128, None, 512
# Channels and warps of a program: they move no bit. See tests/states/test_state_kernels.py for registers.
_ADVANCING, _WALKING, _WALKING_FEW = "advance", "walk", "walk of few"
_MAMBA2_TILES = {"decode": (64, 4), "short": (64, 8), "long": (64, 8), _ADVANCING: (64, 4)}
_MAMBA2_TILES |= {_WALKING: (64, 4), _WALKING_FEW: (64, 2)}
# Of Mamba-2's prompts: chunks that are on their way or used; types whose chunks are walked, for float32 would spill.
_WALK_STAGES, _WALKED = 2, (torch.bfloat16, torch.float16)
_WALK_REGISTERS: int | None = None
# Of Mamba-2 where rows decode by programs of several heads, by whether a head's state is small and 16 bits are read of
# its numbers: four programs fit a processor then, else three.
_STREAMS = {True: Stream(2, 3, 255, 528), False: Stream(4, 2, 168, 396)}
_MOST_STATES, _FEW_CHANNELS = 128, 32  # of float32: with more states, more channels do not fit a Hopper's shared memory


class GpuStates:
    """See StateBackend."""

    name = "triton"

    def __init__(self) -> None:
        """Layers are told of as they come."""
        self._told: dict[tuple[LayerStates, str], Told] = {}

    def short_conv(self, own: LayerStates, conv: ConvOperands, x: Tensor) -> Tensor:
        """See StateBackend."""
        (width, channels), step = conv.weight.shape, own.inputs
        out, num_rows = x.new_empty(x.shape), len(step.rows)
        if step.max_query_len == 1 and (told := self._tell_lines(own, channels)) is not None:
            conv_decode.convolve(own, told, conv, x, out, functools.partial(_convolve_plainly, conv))
            return out
        bias = conv.weight if conv.bias is None else conv.bias
        told = self._tell(own, "conv", ("conv",), ("conv",), (1, 1))
        is_long = has_prompts(step)
        tokens = min(_CONV_TOKENS, own.chunk) if is_long else 1 if step.max_query_len == 1 else 8
        programs = len(x) // tokens + 2 * num_rows if is_long else max(-(-len(x) // tokens), 1)
        kernel = convolve_prompts if is_long else short_convolution
        tile = _CONV_TILE if is_long else 256
        kernel[-(-channels // tile), programs](
            x, x.stride(0), conv.weight, bias, out, step.rows,
            step.query_start, step.seq_lens, num_rows, *told.tables, *told.kept, *told.firsts,
            CHANNELS=channels, TILE=tile, TOKENS=tokens, WIDTH=width, CHUNK=own.chunk, BLOCK=own.block_size,
            STATE_FORM=told.forms[0], INPUT_FORM=told.forms[1], HAS_BIAS=conv.bias is not None, SILU=conv.silu,
            num_warps=1 if is_long else 4, maxnreg=_CONV_REGISTERS if is_long else None, **PLAIN,
        )  # fmt: skip
        return out

    def gated_delta(self, own: LayerStates, rule: DeltaOperands, qkv: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """See StateBackend."""
        widths = rule.value_size, rule.key_size, rule.value_size, rule.value_size, 1, 1
        told = self._tell(own, "delta", ("state",), DELTA_INPUTS, widths)
        return delta_gpu.gated_delta(own, told, rule, qkv, a, b)

    def delta_net(self, own: LayerStates, net: DeltaNetOperands, x: Tensor) -> Tensor:
        """See StateBackend."""
        return composed.delta_net(self, own, net, x)

    def _tell_mamba2(self, own: LayerStates, scan: Mamba2Operands) -> Told:
        widths = scan.head_size, scan.head_size, scan.state_size, 1, 1
        return self._tell(own, "mamba2", ("state",), MAMBA2_INPUTS, widths)

    def _single_rows(self, own: LayerStates, scan: Mamba2Operands, num_tokens: int) -> int:
        """How many rows of one token, at most, kernels of their own serve: the first of the step, or all.

        A head's state lies in one line then, and what a token brings.
        """
        step, told = own.inputs, self._tell_mamba2(own, scan)
        if not is_streamable(told, scan.state_size):
            return 0
        if step.max_query_len == 1:
            return len(step.rows)
        pays = has_prompts(step) or num_tokens < 2 * len(step.rows)  # beside a prompt, not where most verify
        return step.bounds[0] if step.bounds is not None and pays else 0

    def _decode_mamba2(
        self, own: LayerStates, scan: Mamba2Operands, xbc: Tensor, dt: Tensor, num_rows: int, out: Tensor
    ) -> None:
        """Of the first `num_rows` rows, those of one token."""
        told = self._tell_mamba2(own, scan)
        mamba2_decode.decode(own, told, scan, (xbc, dt), num_rows, out, functools.partial(_decode_plainly, scan))
        places = [each.data_ptr() for each in (told.tables[0], told.tables[2], *told.kept)]
        alike = told.forms, scan.num_heads, scan.num_groups, *places
        own.step.leave(alike, functools.partial(self._advance_mamba2, own, scan, num_rows), told.firsts)

    def _advance_mamba2(
        self, own: LayerStates, scan: Mamba2Operands, num_rows: int, firsts: Sequence[tuple[int, int]]
    ) -> None:
        """Of the first `num_rows` rows, where the one token ends a chunk: write states. firsts: parts of each layer."""
        told = self._tell_mamba2(own, scan)
        next = tuple(b - a for a, b in zip(*firsts[:2], strict=True)) if len(firsts) > 1 else (0, 0)
        if firsts != [tuple(a + n * b for a, b in zip(firsts[0], next, strict=True)) for n in range(len(firsts))]:
            for each in firsts:  # no two of them are alike
                self._advance_mamba2(own, scan, num_rows, [each])
            return
        x = told.kept[1]
        wide, warps = _mamba2_tile(scan.head_size, _ADVANCING, scan.state_size, x)
        mamba2_advance.advance(own, told, scan, num_rows, firsts, _mamba2_shape(own, scan, told, x, wide), warps)

    def mamba2(self, own: LayerStates, scan: Mamba2Operands, xbc: Tensor, dt: Tensor) -> Tensor:
        """See StateBackend."""
        size, step = scan.head_size, own.inputs
        out, single = xbc.new_empty(len(xbc), scan.num_heads * size), self._single_rows(own, scan, len(xbc))
        ahead, others = step.query_start, len(step.rows)  # its first number is 0
        if single and step.max_query_len > 1:
            assert step.bounds is not None, "rows of one token come first"
            ahead, others = own.step.num_single, step.bounds[1]
        if single:
            self._decode_mamba2(own, scan, xbc, dt, single, out)
        if step.max_query_len > 1 or not single:
            self._scan_mamba2(own, scan, xbc, dt, ahead, others, out)
        return out

    def _scan_mamba2(
        self,
        own: LayerStates,
        scan: Mamba2Operands,
        xbc: Tensor,
        dt: Tensor,
        ahead: Tensor,
        num_rows: int,
        out: Tensor,
    ) -> None:
        """Of `num_rows` rows at most, which stand behind `ahead`, a number on the device."""
        told, step, states = self._tell_mamba2(own, scan), own.inputs, scan.state_size
        limits, heads, size = (scan.dt_min, scan.dt_max), scan.num_heads, scan.head_size
        wide, warps = _mamba2_tile(size, kind_of(step.max_query_len), states, xbc)
        total, steps = gates(own, told, dt, dt, scan.decay, scan.dt_bias, limits, slots=(3, 4))
        given = mamba2_prompts.Given(xbc, total, steps, ahead, num_rows)
        walks = has_prompts(step) and is_streamable(told, states) and xbc.dtype in _WALKED
        is_few = step.max_query_len <= FEW < own.chunk
        if walks:  # rows that begin at a border
            mamba2_prompts.walk(own, told, scan, given, out, functools.partial(_walk_plainly, scan))
        mamba2_scan[heads * -(-size // wide), num_rows](
            *_given(own, told, scan, given, out),
            **_mamba2_shape(own, scan, told, xbc, wide),
            WALKED=walks,
            TILE=FEW if is_few else own.chunk,
            num_warps=warps,
            num_stages=1,
            **PLAIN,
            **(chained(xbc.device) if walks else {"PDL": False}),
        )

    def mamba1(self, own: LayerStates, scan: Mamba1Operands, x: Tensor, dt: Tensor, b: Tensor, c: Tensor) -> Tensor:
        """See StateBackend."""
        told = self._tell(own, "mamba1", ("state",), MAMBA1_INPUTS, (1, 1, 1, 1))
        (states, channels), step = scan.decay.shape, own.inputs
        out, padded = x.new_empty(x.shape), padded_length(states)
        tile = max(16, 2048 // padded)
        forms = dict(zip(("STATE", "X", "DT", "B"), told.forms, strict=True))
        mamba1_scan[-(-channels // tile), len(step.rows)](
            x, dt, b, c, x.stride(0), dt.stride(0), b.stride(0), c.stride(0), scan.decay, scan.dt_bias, scan.skip,
            out, step.rows, step.query_start, step.seq_lens, *told.tables, *told.kept, *told.firsts,
            CHANNELS=channels, STATES=states, PADDED=padded, LEVELS=padded.bit_length() - 1, TILE=tile,
            CHUNK=own.chunk, BLOCK=own.block_size,
            **{f"{name}_FORM": form for name, form in forms.items()}, num_warps=4, num_stages=1, **PLAIN,
        )  # fmt: skip
        return out

    def _tell_lines(self, own: LayerStates, channels: int) -> Told | None:
        """Of a convolution whose tokens' inputs lie in one line each; None where the cache had to cut them."""
        part = own.only(("conv",), ("conv",))
        if any(form_of(store, channels) is None for store in (*part.states, *part.kept_inputs)):
            return None
        return self._tell(own, "lines of conv", ("conv",), ("conv",), (channels, channels))

    def _tell(
        self, own: LayerStates, name: str, states: tuple[str, ...], inputs: tuple[str, ...], widths: tuple[int, ...]
    ) -> Told:
        """widths: of the runs in which a kernel reads each tensor. Raises ValueError where the cache had to cut one."""
        if (own, name) not in self._told:
            part = own.only(states, inputs)
            stores = (*part.states, *part.kept_inputs)
            forms = [form_of(store, width) for store, width in zip(stores, widths, strict=True)]
            found = tuple(form for form in forms if form is not None)
            tables = own.state_table, own.state_table.stride(0), own.input_table, own.input_table.stride(0)
            firsts = part.states[0].first_part, part.kept_inputs[0].first_part
            if len(found) < len(forms) or own.chunk % 16:
                raise ValueError(
                    f"layers with states of chunk={own.chunk} in blocks of {own.block_size} tokens: kernels for a GPU "
                    "take chunks of a multiple of 16, and blocks that hold a row of a state: raise block_size"
                )
            self._told[own, name] = Told(tuple(store.data for store in stores), found, firsts, tables)
        return self._told[own, name]


def _convolve_plainly(conv: ConvOperands, own: LayerStates, told: Told, x: Tensor, out: Tensor) -> None:
    """Rows of one token, by Triton's kernel."""
    (width, channels), step, num_rows = conv.weight.shape, own.inputs, len(own.inputs.rows)
    tile = min(_DECODE_CHANNELS * (1 + (num_rows >= FEW)), padded_length(channels))
    decode_convolution[-(-channels // tile), num_rows](
        x, x.stride(0), conv.weight, conv.weight if conv.bias is None else conv.bias, out,
        step.rows, step.query_start, step.seq_lens, *told.tables, *told.kept, *told.firsts,
        CHANNELS=channels, TILE=tile, WIDTH=width, CHUNK=own.chunk, BLOCK=own.block_size,
        STATE_FORM=told.forms[0], INPUT_FORM=told.forms[1], HAS_BIAS=conv.bias is not None, SILU=conv.silu,
        num_warps=4, **chained(x.device), **PLAIN,
    )  # fmt: skip


def _decode_plainly(
    scan: Mamba2Operands, own: LayerStates, told: Told, xbc: Tensor, dt: Tensor, num_rows: int, out: Tensor
) -> None:
    """Of the first `num_rows` rows, those of one token, by Triton's kernel."""
    step, size = own.inputs, scan.head_size
    wide, warps = _mamba2_tile(size, "decode", scan.state_size, xbc)
    is_half = told.kept[0].dtype.itemsize == 2 or _is_parted(told.kept[0], xbc)
    tiles, stream = -(-size // wide), _STREAMS[is_half and scan.state_size <= _MOST_STATES]
    if xbc.dtype is torch.float32:
        stream = stream._replace(warps=warps, stages=1, registers=None)
    programs = programs_of(scan.num_heads, num_rows, stream.room, tiles) * tiles
    one = programs == scan.num_heads * tiles
    mamba2_decode_gpu.mamba2_decode[programs, num_rows](
        xbc, xbc.stride(0), dt, dt.stride(0), scan.decay, scan.dt_bias, scan.dt_min, scan.dt_max, scan.skip, out,
        step.rows, step.query_start, step.seq_lens, *told.tables, *told.kept, *told.firsts,
        **_mamba2_shape(own, scan, told, xbc, wide), STAGES=1 if one else stream.stages, ONE=one,
        maxnreg=None if one else stream.registers, num_warps=warps if one else stream.warps, num_stages=1,
        **chained(xbc.device), **PLAIN,
    )  # fmt: skip


def _walk_plainly(scan: Mamba2Operands, own: LayerStates, told: Told, given: mamba2_prompts.Given, out: Tensor) -> None:
    """Rows that begin at a border, by Triton's kernel."""
    xbc, size, max_query_len = given.xbc, scan.head_size, own.inputs.max_query_len
    is_few = max_query_len <= FEW < own.chunk
    wide, warps = _mamba2_tile(size, _WALKING_FEW if is_few else _WALKING, scan.state_size, xbc)
    mamba2_walk[scan.num_heads * -(-size // wide), given.num_rows](
        *_given(own, told, scan, given, out),
        **_mamba2_shape(own, scan, told, xbc, wide),
        STAGES=1 if is_few else _WALK_STAGES,
        SPAN=FEW if is_few else own.chunk,
        PDL=bool(chained(xbc.device)["PDL"]),
        maxnreg=_WALK_REGISTERS,
        num_warps=warps,
        num_stages=1,
        **PLAIN,
    )


def _given(
    own: LayerStates, told: Told, scan: Mamba2Operands, given: mamba2_prompts.Given, out: Tensor
) -> tuple[Any, ...]:
    """What kernels of prompts are told of a step."""
    xbc, step = given.xbc, own.inputs
    lines = xbc, xbc.stride(0), given.total, given.steps, scan.skip, out
    rows = step.rows, step.query_start, step.seq_lens, given.ahead, len(step.rows)
    return *lines, *rows, *told.tables, *told.kept, *told.firsts


def _mamba2_shape(own: LayerStates, scan: Mamba2Operands, told: Told, x: Tensor, wide: int) -> dict[str, Any]:
    """Constants that Mamba-2's kernels take. wide: channels of a program."""
    names = ("STATE_FORM", "X_FORM", "B_FORM", "TOTAL_FORM", "DT_FORM")
    return {
        "HEADS": scan.num_heads,
        "GROUPS": scan.num_groups,
        "SIZE": scan.head_size,
        "WIDE": wide,
        "STATES": scan.state_size,
        "STATES_PADDED": padded_length(scan.state_size),
        "CHUNK": own.chunk,
        "BLOCK": own.block_size,
        "PRECISION": precision(x),
        "PARTED": _is_parted(told.kept[0], x),
        **dict(zip(names, told.forms, strict=True)),
    }


def _is_parted(states: Tensor, x: Tensor) -> bool:
    """Whether what products take of states lies apart: see `octavo.ops.scan.mamba2.mamba2_states`."""
    return x.dtype is torch.bfloat16 and states.dtype is torch.float32


def _mamba2_tile(size: int, kind: str, states: int, x: Tensor) -> tuple[int, int]:
    """Channels of a head that a program takes, and its warps."""
    wide, warps = _MAMBA2_TILES[kind]
    if x.dtype is torch.float32 and (states > _MOST_STATES or kind in ("decode", _ADVANCING)):
        wide, warps = _FEW_CHANNELS, 8
    return min(wide, padded_length(size)), warps
