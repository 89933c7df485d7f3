"""GpuStates: the operators of layers with states on a GPU, in Triton.

Owns what a kernel is told of a layer (once) and its tiles. Invariants: tiles move no bit; no launch waits for the
device, so graphs may hold it.
"""

from __future__ import annotations

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
    delta_prompts,
    delta_step,
    delta_stream,
)
from octavo.ops.scan.conv_decode_gpu import decode_convolution
from octavo.ops.scan.conv_gpu import convolve_prompts, short_convolution
from octavo.ops.scan.delta_decode_gpu import delta_decode, delta_ready
from octavo.ops.scan.delta_gpu import delta_advance, delta_blocks, delta_scan
from octavo.ops.scan.delta_walk_gpu import delta_chunks, delta_walk
from octavo.ops.scan.gates_gpu import normalize_keys, scan_gates
from octavo.ops.scan.kept import Form, form_of
from octavo.ops.scan.mamba1_gpu import mamba1_scan
from octavo.ops.scan.mamba2_decode_gpu import mamba2_decode, programs_of
from octavo.ops.scan.mamba2_gpu import mamba2_advance, mamba2_scan
from octavo.ops.scan.mamba2_walk_gpu import mamba2_walk
from octavo.states import composed
from octavo.states.base import LayerStates
from octavo.states.reference import DELTA_INPUTS, MAMBA1_INPUTS, MAMBA2_INPUTS

# Of a program that convolves prompts: tokens, channels, registers of a thread; and channels where few rows decode.
_CONV_TOKENS, _CONV_TILE, _CONV_REGISTERS, _DECODE_CHANNELS = 16, 128, None, 512
_HEADS, _AHEAD = 32, 16  # of a program that sums gates; tokens that are on their way to it
_LINES = 16  # q and k that a program makes of norm 1
_FEW = 16  # tokens of a row that are a short step
# Channels and warps of a program: they move no bit. See tests/states/test_state_kernels.py for registers.
_ADVANCING, _WALKING, _STREAMING = "advance", "walk", "stream"
_MAMBA2_TILES = {"decode": (64, 4), "short": (64, 8), "long": (64, 8), _WALKING: (64, 4), _ADVANCING: (32, 8)}
# Of Mamba-2's prompts: chunks that are on their way or used; types whose chunks are walked, for float32 would spill.
_WALK_STAGES, _WALKED = 2, (torch.bfloat16, torch.float16)
_WALK_REGISTERS: int | None = None
# Of Mamba-2 where rows decode: heads whose states are on their way or used, registers of a thread (three programs of
# four warps a processor), heads that are asked for before the kernel ahead ends.
_DECODE_STAGES, _DECODE_REGISTERS, _DECODE_EARLY = 2, 168, 2
_DELTA_TILES = {
    "decode": (64, 4),
    "short": (64, 8),
    "long": (64, 8),
    _STREAMING: (64, 4),
    _WALKING: (32, 4),
    _ADVANCING: (32, 8),
}
# Of its prompts: chunks that are on their way or used; types whose chunks are walked.
_DELTA_STAGES, _DELTA_WALKED = 2, (torch.bfloat16, torch.float16)
_MOST_STATES, _FEW_CHANNELS = 128, 32  # of float32: with more states, more channels do not fit a Hopper's shared memory
_ADVANCE_PROGRAMS = 264  # that advance states of Mamba-2: two a processor
_MOST_ROWS = 512  # for which one kernel is compiled
_PARTS = 32  # programs of a row that advance states, which few rows do in a step
_GROUP = 8  # rows that a program of the delta rule looks through for such
_BLOCK_WARPS, _CHUNK_WARPS, _CHUNK_REGISTERS = 2, 8, 128
# Of the delta rule where rows decode: types whose states are streamed; tiles of a program at most, programs that keep a
# GPU busy, tiles on their way or used, registers of a thread (three programs a processor); warps and registers where
# one of keys is made ready.
_STREAMED = (torch.bfloat16, torch.float16)
_STREAM_TILES, _STREAM_PROGRAMS, _STREAM_STAGES, _STREAM_REGISTERS = 4, 512, 2, 168
_READY_WARPS, _READY_REGISTERS = 2, 200
_WALKS_COPIED = True  # whether `delta_prompts` walks prompts, where it serves
_COPIED = 2  # 1: states come by `delta_stream`, 2: all by `delta_step`, where they serve
_DELTA_REGISTERS: int | None = 128  # of a thread: four programs of 16-bit types a processor, 32 kB of states each
_DELTA_FORMS = ("STATE_FORM", "KEY_FORM", "VALUE_FORM", "UPDATE_FORM", "TOTAL_FORM", "RATE_FORM")
_PLAIN: dict[str, Any] = {"enable_fp_fusion": False}  # so that no kernel rounds less than another


class _Told(NamedTuple):
    """What kernels are told of the tensors of one operator of one layer."""

    kept: tuple[Tensor, ...]
    forms: tuple[Form, ...]
    firsts: tuple[int, int]  # parts: of the layer's states, of its inputs
    tables: tuple[Tensor, int, Tensor, int]  # of states and of inputs, and their columns


class GpuStates:
    """See StateBackend."""

    name = "triton"

    def __init__(self) -> None:
        """Layers are told of as they come."""
        self._told: dict[tuple[LayerStates, str], _Told] = {}

    def short_conv(self, own: LayerStates, conv: ConvOperands, x: Tensor) -> Tensor:
        """See StateBackend."""
        (width, channels), step = conv.weight.shape, own.inputs
        out, num_rows = x.new_empty(x.shape), len(step.rows)
        bias = conv.weight if conv.bias is None else conv.bias
        if step.max_query_len == 1 and (told := self._tell_lines(own, channels)) is not None:
            tile = min(_DECODE_CHANNELS * (1 + (num_rows >= _FEW)), padded_length(channels))
            decode_convolution[-(-channels // tile), num_rows](
                x, x.stride(0), conv.weight, bias, out, step.rows, step.query_start, step.seq_lens,
                *told.tables, *told.kept, *told.firsts,
                CHANNELS=channels, TILE=tile, WIDTH=width, CHUNK=own.chunk, BLOCK=own.block_size,
                STATE_FORM=told.forms[0], INPUT_FORM=told.forms[1], HAS_BIAS=conv.bias is not None, SILU=conv.silu,
                num_warps=4, **chained(x.device), **_PLAIN,
            )  # fmt: skip
            return out
        told = self._tell(own, "conv", ("conv",), ("conv",), (1, 1))
        is_long = step.max_query_len > _FEW
        tokens = min(_CONV_TOKENS, own.chunk) if is_long else 1 if step.max_query_len == 1 else 8
        programs = len(x) // tokens + 2 * num_rows if is_long else max(-(-len(x) // tokens), 1)
        kernel = convolve_prompts if is_long else short_convolution
        tile = _CONV_TILE if is_long else 256
        kernel[-(-channels // tile), programs](
            x, x.stride(0), conv.weight, bias, out, step.rows,
            step.query_start, step.seq_lens, num_rows, *told.tables, *told.kept, *told.firsts,
            CHANNELS=channels, TILE=tile, TOKENS=tokens, WIDTH=width, CHUNK=own.chunk, BLOCK=own.block_size,
            STATE_FORM=told.forms[0], INPUT_FORM=told.forms[1], HAS_BIAS=conv.bias is not None, SILU=conv.silu,
            num_warps=1 if is_long else 4, maxnreg=_CONV_REGISTERS if is_long else None, **_PLAIN,
        )  # fmt: skip
        return out

    def gated_delta(self, own: LayerStates, rule: DeltaOperands, qkv: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """See StateBackend."""
        keys, values = rule.key_size, rule.value_size
        told = self._tell(own, "delta", ("state",), DELTA_INPUTS, (values, keys, values, values, 1, 1))
        step, heads = own.inputs, rule.num_heads
        if step.max_query_len == 1 and qkv.dtype in _STREAMED and _is_streamable(told, keys):
            return self._decode_delta(own, told, rule, qkv, a, b)
        count, num_rows, padded = len(qkv), len(step.rows), padded_length(keys)
        query, key = (qkv.new_empty(count, rule.num_key_heads, keys) for _ in range(2))  # each aligned, at any length
        out = qkv.new_empty(count, heads * values)
        if count:
            norms = {"HEADS": rule.num_key_heads, "SIZE": keys, "PADDED": padded, "LEVELS": padded.bit_length() - 1}
            lines = count * rule.num_key_heads
            normalize_keys[(-(-lines // _LINES),)](
                qkv, qkv.stride(0), query, key, keys**-0.5, lines, **norms, LINES=_LINES, num_warps=4, **_PLAIN
            )
        total, rate = self._gates(own, told, a, b, rule.decay, rule.dt_bias, (0.0, 0.0), slots=(4, 5))
        walks = (
            step.max_query_len > _FEW and own.chunk == 64 and qkv.dtype in _DELTA_WALKED and _is_streamable(told, keys)
        )
        made = self._blocks(own, told, rule, query, key, total, rate, walks)
        forms = dict(zip(_DELTA_FORMS, told.forms, strict=True))
        kind = _kind_of(step.max_query_len)
        if walks and _WALKS_COPIED and self._walk_delta(own, told, rule, (query, key, qkv, total, rate, *made), out):
            pass
        elif walks:  # rows that begin at a border
            state, key_kept, value_kept, update, _, _ = told.kept
            named = {name: forms[name] for name in ("STATE_FORM", "KEY_FORM", "VALUE_FORM", "UPDATE_FORM")}
            wide, warps = _delta_tile(values, _WALKING)
            delta_walk[heads * -(-values // wide), num_rows](
                query, key, qkv[:, 2 * rule.num_key_heads * keys :], qkv.stride(0), total, rate, *made, out,
                step.rows, step.query_start, step.seq_lens, *told.tables, state, key_kept, value_kept, update,
                *told.firsts, **_delta_shape(own, rule, qkv), **named, VALUE_SIZE=values, TILE=wide,
                STAGES=_DELTA_STAGES, num_warps=warps, num_stages=1, **_PLAIN,
            )  # fmt: skip
        tile, _ = _delta_tile(values, kind)
        delta_scan[heads * -(-values // tile), num_rows](
            query, key, qkv[:, 2 * rule.num_key_heads * keys :], qkv.stride(0), total, rate, *made, out,
            step.rows, step.query_start, step.seq_lens, *told.tables, *told.kept, *told.firsts,
            **_delta_shape(own, rule, qkv), **forms, VALUE_SIZE=values, TILE=tile,
            ADVANCE=step.max_query_len > 1, WALKED=walks, num_stages=1, **_delta_program(qkv, kind), **_PLAIN,
        )  # fmt: skip
        if step.max_query_len == 1:
            self._advance_delta(own, told, rule, qkv)
        return out

    def _walk_delta(
        self, own: LayerStates, told: _Told, rule: DeltaOperands, made: tuple[Tensor, ...], out: Tensor
    ) -> bool:
        """What `delta_walk` does, where `delta_prompts` serves."""
        step, kept, qkv = own.inputs, told.kept[:4], made[2]
        heads, sizes = (rule.num_heads, rule.num_key_heads), (rule.key_size, rule.value_size)
        if not delta_prompts.serves(heads, sizes, own.chunk, qkv, kept):
            return False
        macros = delta_prompts.macros(heads, own.block_size, told.forms, qkv.dtype)
        if not delta_prompts.is_loaded(macros, qkv.device):
            return False
        state_table, state_columns, input_table, input_columns = told.tables
        query, key, _, *others = made
        given = query, key, qkv[:, 2 * rule.num_key_heads * rule.key_size :], *others, out
        places = *given, step.rows, step.query_start, step.seq_lens, state_table, input_table, *kept
        numbers = qkv.stride(0), state_columns, input_columns, *told.firsts
        to_tell = delta_prompts.Told(*(each.data_ptr() for each in places), *numbers)
        delta_prompts.launch(to_tell, len(step.rows), macros, qkv.device)
        return True

    def _decode_delta(
        self, own: LayerStates, told: _Told, rule: DeltaOperands, qkv: Tensor, a: Tensor, b: Tensor
    ) -> Tensor:
        """Where every row has one token: what needs no state, then states as they come."""
        step, heads, key_heads = own.inputs, rule.num_heads, rule.num_key_heads
        keys, values = rule.key_size, rule.value_size
        if _COPIED == 2 and (found := self._step_delta(own, told, rule, qkv, a, b)) is not None:
            self._advance_delta(own, told, rule, qkv)
            return found
        num_rows, per = len(step.rows), rule.num_heads // rule.num_key_heads
        padded, pdl = padded_length(keys), chained(qkv.device)
        out = qkv.new_empty(len(qkv), heads * values)
        query, key = qkv.new_empty(2, num_rows, key_heads, keys)
        before, factor = qkv.new_empty(num_rows, heads, 16, own.chunk), qkv.new_empty(num_rows, heads, own.chunk)
        factors, below = (torch.empty(num_rows, heads, width, device=qkv.device) for width in (48, 256))
        state, key_kept, value_kept, update, total, rate = told.kept
        forms, shape = dict(zip(_DELTA_FORMS, told.forms, strict=True)), _delta_shape(own, rule, qkv)
        given = step.rows, step.query_start, step.seq_lens
        named = {name: forms[name] for name in ("KEY_FORM", "TOTAL_FORM", "RATE_FORM")}
        delta_ready[key_heads, num_rows](
            qkv, qkv.stride(0), a, a.stride(0), b, b.stride(0), rule.decay, rule.dt_bias, keys**-0.5,
            query, key, before, factor, factors, below, *given, *told.tables[2:], key_kept, total, rate,
            told.firsts[1], **shape, **named, LEVELS=padded.bit_length() - 1, LANES=16 * (1 << (per - 1).bit_length()),
            num_warps=_READY_WARPS, maxnreg=_READY_REGISTERS, num_stages=1, **_PLAIN, **pdl,
        )  # fmt: skip
        made = query, key, before, factor, factors, qkv[:, 2 * key_heads * keys :]
        if _COPIED and self._stream_delta(own, told, rule, made, out):
            self._advance_delta(own, told, rule, qkv)
            return out
        wide, warps = _delta_tile(values, _STREAMING)
        tiles = -(-values // wide)
        named = {name: forms[name] for name in ("STATE_FORM", "KEY_FORM", "VALUE_FORM", "UPDATE_FORM")}
        delta_decode[heads * tiles // _tiles_of(per * tiles, num_rows * heads * tiles), num_rows](
            *made, qkv.stride(0), out, *given, *told.tables, state, key_kept, value_kept, update, *told.firsts,
            **shape, **named, VALUE_SIZE=values, TILE=wide, STAGES=_STREAM_STAGES,
            num_warps=warps, maxnreg=_STREAM_REGISTERS, num_stages=1, **_PLAIN, **pdl,
        )  # fmt: skip
        self._advance_delta(own, told, rule, qkv)
        return out

    def _step_delta(
        self, own: LayerStates, told: _Told, rule: DeltaOperands, qkv: Tensor, a: Tensor, b: Tensor
    ) -> Tensor | None:
        """What `delta_ready` and `delta_decode` do, in one kernel, where it serves."""
        step, kept, value = own.inputs, told.kept, qkv[:, 2 * rule.num_key_heads * rule.key_size :]
        heads, sizes = (rule.num_heads, rule.num_key_heads), (rule.key_size, rule.value_size)
        if not delta_step.serves(heads, sizes, own.chunk, qkv, kept[:4]) or a.dtype != qkv.dtype:
            return None
        macros = delta_step.macros(heads, own.block_size, told.forms, value.dtype)
        if not delta_step.is_loaded(macros, value.device):
            return None
        out = qkv.new_empty(len(qkv), rule.num_heads * rule.value_size)
        state_table, state_columns, input_table, input_columns = told.tables
        given = qkv, a, b, rule.decay, rule.dt_bias, out, step.rows, step.query_start, step.seq_lens
        places = [each.data_ptr() for each in (*given, state_table, input_table, *kept)]
        numbers = qkv.stride(0), a.stride(0), b.stride(0), state_columns, input_columns, *told.firsts, len(step.rows)
        delta_step.launch(delta_step.Told(*places, *numbers, rule.key_size**-0.5), macros, qkv.device)
        return out

    def _stream_delta(
        self, own: LayerStates, told: _Told, rule: DeltaOperands, made: tuple[Tensor, ...], out: Tensor
    ) -> bool:
        """What `delta_decode` does, where `delta_stream` serves. made: of `delta_ready`, and v."""
        step, value, kept = own.inputs, made[-1], told.kept[:4]
        heads, sizes = (rule.num_heads, rule.num_key_heads), (rule.key_size, rule.value_size)
        if not delta_stream.serves(heads, sizes, own.chunk, value, kept):
            return False
        macros = delta_stream.macros(heads, own.block_size, told.forms[:4], value.dtype)
        if not delta_stream.is_loaded(macros, value.device):
            return False
        state_table, state_columns, input_table, input_columns = told.tables
        given = *made, out, step.rows, step.query_start, step.seq_lens, state_table, input_table, *kept
        numbers = value.stride(0), state_columns, input_columns, *told.firsts, len(step.rows), 0
        delta_stream.launch(delta_stream.Told(*(each.data_ptr() for each in given), *numbers), macros, value.device)
        return True

    def _advance_delta(self, own: LayerStates, told: _Told, rule: DeltaOperands, qkv: Tensor) -> None:
        """Write the states of rows whose one token ends a chunk."""
        step, values = own.inputs, rule.value_size
        state, key, _, update, total, _ = told.kept
        forms = dict(zip(_DELTA_FORMS, told.forms, strict=True))
        named = {name: forms[name] for name in ("STATE_FORM", "KEY_FORM", "UPDATE_FORM", "TOTAL_FORM")}
        num_rows = len(step.rows)
        delta_advance[_PARTS, -(-num_rows // _GROUP)](
            step.rows, step.query_start, step.seq_lens, num_rows, *told.tables, state, key, update, total,
            *told.firsts, **_delta_shape(own, rule, qkv), VALUE_SIZE=values, TILE=_delta_tile(values, _ADVANCING)[0],
            PARTS=_PARTS, GROUP=_GROUP, **named, num_warps=_DELTA_TILES[_ADVANCING][1], num_stages=1, **_PLAIN,
            **chained(qkv.device),
        )  # fmt: skip

    def _blocks(
        self,
        own: LayerStates,
        told: _Told,
        rule: DeltaOperands,
        query: Tensor,
        key: Tensor,
        total: Tensor,
        rate: Tensor,
        by_chunk: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What `delta_blocks` makes of the step's blocks of 16 tokens; by_chunk: `delta_chunks` makes it."""
        step, heads = own.inputs, rule.num_heads
        is_one, num_rows = step.max_query_len == 1, len(step.rows)
        blocks = num_rows if is_one else len(query) // 16 + 2 * num_rows  # at most; see delta_blocks
        before, factor = query.new_empty(2, blocks, heads, 16, own.chunk)
        inverse = torch.empty(blocks, heads, 16, 16, device=query.device)
        _, key_kept, _, _, total_kept, rate_kept = told.kept
        forms = dict(zip(_DELTA_FORMS, told.forms, strict=True))
        named = {name: forms[name] for name in ("KEY_FORM", "TOTAL_FORM", "RATE_FORM")}
        if by_chunk:
            per = heads // rule.num_key_heads
            delta_chunks[len(query) // own.chunk + 2 * num_rows, rule.num_key_heads, 2](
                query, key, total, rate, before, factor, inverse, torch.empty_like(inverse), step.rows,
                step.query_start, step.seq_lens, num_rows, *told.tables[2:], key_kept, total_kept, rate_kept,
                told.firsts[1], **_delta_shape(own, rule, query), **named,
                LANES=own.chunk * (1 << (per - 1).bit_length()), num_warps=_CHUNK_WARPS, maxnreg=_CHUNK_REGISTERS,
                num_stages=1, **_PLAIN,
            )  # fmt: skip
            return before, factor, inverse
        delta_blocks[blocks, heads, 3](
            query, key, total, rate, before, factor, inverse, step.rows, step.query_start, step.seq_lens, num_rows,
            *told.tables[2:], key_kept, total_kept, rate_kept, told.firsts[1], **_delta_shape(own, rule, query),
            **named, ONE=is_one, num_warps=_BLOCK_WARPS * query.element_size() // 2, num_stages=1, **_PLAIN,
        )  # fmt: skip
        return before, factor, inverse

    def delta_net(self, own: LayerStates, net: DeltaNetOperands, x: Tensor) -> Tensor:
        """See StateBackend."""
        return composed.delta_net(self, own, net, x)

    def _tell_mamba2(self, own: LayerStates, scan: Mamba2Operands) -> _Told:
        widths = scan.head_size, scan.head_size, scan.state_size, 1, 1
        return self._tell(own, "mamba2", ("state",), MAMBA2_INPUTS, widths)

    def _decodes_whole(self, own: LayerStates, scan: Mamba2Operands) -> bool:
        """Whether every row has one token, a head's state lies in one line, and what a token brings."""
        return own.inputs.max_query_len == 1 and _is_streamable(self._tell_mamba2(own, scan), scan.state_size)

    def _decode_mamba2(self, own: LayerStates, scan: Mamba2Operands, xbc: Tensor, dt: Tensor) -> Tensor:
        """Where every row has one token."""
        told, step, size = self._tell_mamba2(own, scan), own.inputs, scan.head_size
        out, num_rows = xbc.new_empty(len(xbc), scan.num_heads * size), len(step.rows)
        wide, warps = _mamba2_tile(size, "decode", scan.state_size, xbc)
        tiles = -(-size // wide)
        programs = programs_of(scan.num_heads, num_rows) * tiles
        one = programs == scan.num_heads * tiles
        stages, most = (_DECODE_STAGES, _DECODE_REGISTERS) if xbc.dtype is not torch.float32 else (1, None)
        mamba2_decode[programs, num_rows](
            xbc, xbc.stride(0), dt, dt.stride(0), scan.decay, scan.dt_bias, scan.dt_min, scan.dt_max, scan.skip, out,
            step.rows, step.query_start, step.seq_lens, *told.tables, *told.kept, *told.firsts,
            **_mamba2_shape(own, scan, told, xbc, wide), STAGES=1 if one else stages, EARLY=_DECODE_EARLY, ONE=one,
            maxnreg=None if one else most, num_warps=warps, num_stages=1, **chained(xbc.device), **_PLAIN,
        )  # fmt: skip
        self._advance_mamba2(own, told, scan, xbc)
        return out

    def mamba2(self, own: LayerStates, scan: Mamba2Operands, xbc: Tensor, dt: Tensor) -> Tensor:
        """See StateBackend."""
        if self._decodes_whole(own, scan):
            return self._decode_mamba2(own, scan, xbc, dt)
        size, states = scan.head_size, scan.state_size
        told = self._tell_mamba2(own, scan)
        step, out = own.inputs, xbc.new_empty(len(xbc), scan.num_heads * size)
        limits = scan.dt_min, scan.dt_max
        wide, warps = _mamba2_tile(size, _kind_of(step.max_query_len), states, xbc)
        places = scan.skip, out, step.rows, step.query_start, step.seq_lens, *told.tables, *told.kept, *told.firsts
        shape = _mamba2_shape(own, scan, told, xbc, wide)
        tiles, num_rows = -(-size // wide), len(step.rows)
        is_whole = _is_streamable(told, states)  # a head's state in one line, and what a token brings
        total, steps = self._gates(own, told, dt, dt, scan.decay, scan.dt_bias, limits, slots=(3, 4))
        given = xbc, xbc.stride(0), total, steps, *places
        walks = step.max_query_len > _FEW and is_whole and xbc.dtype in _WALKED
        behind: dict[str, Any] = {"PDL": False}
        if walks:  # rows that begin at a border
            wide, own_warps = _mamba2_tile(size, _WALKING, states, xbc)
            options = shape | {"WIDE": wide, "STAGES": _WALK_STAGES, "num_warps": own_warps}
            behind = chained(xbc.device)
            mamba2_walk[scan.num_heads * -(-size // wide), num_rows](
                *given, **options, PDL=bool(behind["PDL"]), maxnreg=_WALK_REGISTERS, num_stages=1, **_PLAIN
            )
        mamba2_scan[scan.num_heads * tiles, num_rows](
            *given,
            **shape,
            WALKED=walks,
            TILE=16 if step.max_query_len <= _FEW else own.chunk,
            num_warps=warps,
            num_stages=1,
            **_PLAIN,
            **behind,
        )
        return out

    def _advance_mamba2(self, own: LayerStates, told: _Told, scan: Mamba2Operands, xbc: Tensor) -> None:
        """Write the states of rows whose one token ends a chunk."""
        step = own.inputs
        wide, warps = _mamba2_tile(scan.head_size, _ADVANCING, scan.state_size, xbc)
        num_rows = len(step.rows)
        tasks = num_rows * scan.num_heads * -(-scan.head_size // wide)
        mamba2_advance[(min(tasks, _ADVANCE_PROGRAMS),)](
            step.rows,
            step.query_start,
            step.seq_lens,
            num_rows,
            *told.tables,
            *told.kept,
            *told.firsts,
            **_mamba2_shape(own, scan, told, xbc, wide),
            ROWS_PADDED=padded_length(max(num_rows, _MOST_ROWS)),
            num_warps=warps,
            num_stages=1,
            **chained(xbc.device),
            **_PLAIN,
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
            **{f"{name}_FORM": form for name, form in forms.items()}, num_warps=4, num_stages=1, **_PLAIN,
        )  # fmt: skip
        return out

    def _gates(
        self,
        own: LayerStates,
        told: _Told,
        a: Tensor,
        b: Tensor,
        decay: Tensor,
        dt_bias: Tensor,
        limits: tuple[float, float],
        *,
        slots: tuple[int, int],
    ) -> tuple[Tensor, Tensor]:
        """(total, rate or dt), [T, heads] float32. slots: of the two among what is kept. Limits make it Mamba-2's."""
        step, heads = own.inputs, len(decay)
        total, second = (torch.empty(len(a), heads, device=a.device) for _ in range(2))  # each aligned, at any length
        is_one, num_rows = step.max_query_len == 1, len(step.rows)
        grid = num_rows if is_one else len(a) // own.chunk + 2 * num_rows, -(-heads // _HEADS)
        first, last = slots
        scan_gates[grid](
            a, b, a.stride(0), b.stride(0), decay, dt_bias, total, second, step.rows, step.query_start, step.seq_lens,
            num_rows, *told.tables[2:], told.kept[first], told.kept[last], told.firsts[1], *limits,
            HEADS=heads, TILE=_HEADS, CHUNK=own.chunk, BLOCK=own.block_size, TOTAL_FORM=told.forms[first],
            SECOND_FORM=told.forms[last], DELTA=not any(limits), ONE=is_one,
            AHEAD=1 if is_one else _AHEAD, num_warps=1, **_PLAIN,
        )  # fmt: skip
        return total, second

    def _tell_lines(self, own: LayerStates, channels: int) -> _Told | None:
        """Of a convolution whose tokens' inputs lie in one line each; None where the cache had to cut them."""
        part = own.only(("conv",), ("conv",))
        if any(form_of(store, channels) is None for store in (*part.states, *part.kept_inputs)):
            return None
        return self._tell(own, "lines of conv", ("conv",), ("conv",), (channels, channels))

    def _tell(
        self, own: LayerStates, name: str, states: tuple[str, ...], inputs: tuple[str, ...], widths: tuple[int, ...]
    ) -> _Told:
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
            self._told[own, name] = _Told(tuple(store.data for store in stores), found, firsts, tables)
        return self._told[own, name]


def _mamba2_shape(own: LayerStates, scan: Mamba2Operands, told: _Told, x: Tensor, wide: int) -> dict[str, Any]:
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
        "PRECISION": _precision(x),
        **dict(zip(names, told.forms, strict=True)),
    }


def _kind_of(max_query_len: int) -> str:
    """Which tiles serve rows of so many tokens at most."""
    return "decode" if max_query_len == 1 else "short" if max_query_len <= _FEW else "long"


def _mamba2_tile(size: int, kind: str, states: int, x: Tensor) -> tuple[int, int]:
    """Channels of a head that a program takes, and its warps."""
    wide, warps = _MAMBA2_TILES[kind]
    if x.dtype is torch.float32 and (states > _MOST_STATES or kind == "decode"):
        wide, warps = _FEW_CHANNELS, 8
    return min(wide, padded_length(size)), warps


def _delta_tile(size: int, kind: str) -> tuple[int, int]:
    """The same of the delta rule."""
    return min(_DELTA_TILES[kind][0], padded_length(size)), _DELTA_TILES[kind][1]


def _is_streamable(told: _Told, keys: int) -> bool:
    """Whether a head's state lies in one line, and what a token brings too."""
    return not told.forms[0][5] % keys and all(form[4] == 1 for form in told.forms[1:])


def _tiles_of(alike: int, tiles: int) -> int:
    """How many of `tiles` a program takes: as many as leave enough programs, and divide those of a key evenly."""
    most = max(1, min(_STREAM_TILES, tiles // _STREAM_PROGRAMS))
    return next(n for n in range(most, 0, -1) if alike % n == 0)


def _delta_program(x: Tensor, kind: str) -> dict[str, Any]:
    """A scan's warps, and the registers of a thread where rows decode."""
    warps = _DELTA_TILES[kind][1]
    if kind != "decode":
        return {"num_warps": warps}
    if x.dtype is torch.float32:
        return {"num_warps": 2 * warps, "maxnreg": 255}  # unless it is told so, ptxas 12.8 takes 32 and spills
    return {"num_warps": warps} | ({"maxnreg": _DELTA_REGISTERS} if _DELTA_REGISTERS else {})


def _delta_shape(own: LayerStates, rule: DeltaOperands, x: Tensor) -> dict[str, Any]:
    """Constants that both kernels of the delta rule take."""
    return {
        "HEADS": rule.num_heads,
        "KEY_HEADS": rule.num_key_heads,
        "KEY_SIZE": rule.key_size,
        "KEY_PADDED": padded_length(rule.key_size),
        "CHUNK": own.chunk,
        "BLOCK": own.block_size,
        "PRECISION": _precision(x),
    }


def _precision(x: Tensor) -> str:
    """Of products of float32, which those of 16-bit types are not."""
    return "tf32x3" if x.dtype is torch.float32 else "tf32"
