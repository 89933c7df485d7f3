"""The gated delta rule on a GPU: which kernels run, of Triton's and in CUDA C++, and their tiles.

Invariants: tiles move no bit, nor does the choice of a kernel; no launch waits for the device, so graphs may hold it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from octavo.ops.compile import side_by_side
from octavo.ops.compile.launch import chained
from octavo.ops.compile.row_sum import padded_length
from octavo.ops.scan import DeltaOperands
from octavo.ops.scan.delta import delta_prepare, delta_prompts, delta_step
from octavo.ops.scan.delta.decode_gpu import delta_decode, delta_ready
from octavo.ops.scan.delta.scan_gpu import delta_advance, delta_blocks, delta_scan
from octavo.ops.scan.delta.walk_gpu import delta_chunks, delta_walk
from octavo.ops.scan.gates_gpu import normalize_keys
from octavo.states import delta_check, example
from octavo.states.agreement import agrees
from octavo.states.base import LayerStates
from octavo.states.launches import FEW, PLAIN, Told, gates, is_streamable, kind_of, precision

_LINES = 16  # q and k that a program makes of norm 1
# Channels and warps of a program: they move no bit. See tests/states/test_state_kernels.py for registers.
_ADVANCING, _WALKING, _STREAMING = "advance", "walk", "stream"
_TILES = {
    "decode": (64, 4),
    "short": (64, 8),
    "long": (64, 8),
    _STREAMING: (64, 4),
    _WALKING: (32, 4),
    _ADVANCING: (32, 8),
}
# Of its prompts: chunks that are on their way or used; types whose chunks are walked.
_WALK_STAGES, _WALKED = 2, (torch.bfloat16, torch.float16)
_PARTS = 32  # programs of a row that advance states, which few rows do in a step
_GROUP = 8  # rows that a program looks through for such
_BLOCK_WARPS, _CHUNK_WARPS, _CHUNK_REGISTERS = 2, 8, 128
# Of the delta rule where rows decode: types whose states are streamed; tiles of a program at most, programs that keep a
# GPU busy, tiles on their way or used, registers of a thread (three programs a processor); warps and registers where
# one of keys is made ready.
_STREAMED = (torch.bfloat16, torch.float16)
_STREAM_TILES, _STREAM_PROGRAMS, _STREAM_STAGES, _STREAM_REGISTERS = 4, 512, 2, 168
_READY_WARPS, _READY_REGISTERS = 2, 200
# Kernels in CUDA C++ that run where they serve; rows' heads of keys with which an H200 is busy enough for the one that
# decodes: a block has one, of which Triton's programs have tiles.
_COPIED: tuple[ModuleType, ...] = (delta_step, delta_prompts, delta_prepare)
_FEWEST_STEPS = 128
_EXAMPLES = {
    delta_step: (delta_check.DECODED, example.ENDING),
    delta_prompts: (delta_check.PROMPT, delta_check.CONTINUED),
    delta_prepare: (delta_check.CONTINUED,),
}
_SCAN_REGISTERS: int | None = 128  # of a thread: four programs of 16-bit types a processor, 32 kB of states each
_FORMS = ("STATE_FORM", "KEY_FORM", "VALUE_FORM", "UPDATE_FORM", "TOTAL_FORM", "RATE_FORM")


Given = tuple[Tensor, Tensor, Tensor]  # qkv, a, b
Which = tuple[Tensor, int]  # rows that are ahead of those that are meant, on the device; how many these are at most
Choose = Callable[[ModuleType, LayerStates, Told, DeltaOperands, Tensor], bool]


def chosen(kernel: ModuleType, own: LayerStates, told: Told, rule: DeltaOperands, qkv: Tensor) -> bool:
    """Whether a kernel in CUDA C++ serves a layer, is there, and was found to give Triton's bits."""
    heads, sizes = (rule.num_heads, rule.num_key_heads), (rule.key_size, rule.value_size)
    if kernel not in _COPIED or not kernel.serves(heads, sizes, own.chunk, qkv, told.kept[:4]):
        return False
    macros = kernel.macros(heads, own.block_size, told.forms, qkv.dtype)
    return kernel.is_loaded(macros, qkv.device) and _agrees(kernel, macros, own, told, rule, qkv)


def _agrees(
    kernel: ModuleType,
    macros: dict[str, int | str],
    own: LayerStates,
    told: Told,
    rule: DeltaOperands,
    qkv: Tensor,
) -> bool:
    """Whether the kernel has Triton's bits: found once, unless a graph is captured or a pass compiles."""

    def compare() -> bool:
        those = {kernel} | ({delta_prompts} if kernel is delta_prepare else set())  # which are loaded
        copied = functools.partial(gated_delta, choose=lambda each, *_: each in those)
        forms = delta_prompts.GROUPS if delta_prompts in those else (0,)
        plain: delta_check.Run = functools.partial(gated_delta, choose=lambda *_: False)
        runs = [plain, *(_formed(copied, each) for each in forms)]
        return all(example.agree(delta_check.results(own, told, rule, qkv, row, runs)) for row in _EXAMPLES[kernel])

    return agrees(kernel.__name__, macros, qkv.device, compare)


def _formed(run: delta_check.Run, groups: int) -> delta_check.Run:
    def formed(*given: Any) -> Tensor:
        with delta_prompts.with_groups(groups):
            return run(*given)

    return formed


def gated_delta(
    own: LayerStates,
    told: Told,
    rule: DeltaOperands,
    qkv: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    choose: Choose = chosen,
) -> Tensor:
    """See StateBackend."""
    step, out = own.inputs, qkv.new_empty(len(qkv), rule.num_heads * rule.value_size)
    single = _single_rows(own, told, rule, qkv)
    ahead, others = step.query_start, len(step.rows)  # its first number is 0
    if single:
        _decode_rows(own, told, rule, (qkv, a, b), out, single, choose)
        if step.max_query_len == 1:
            return out
        assert step.bounds is not None, "rows of one token come first"
        ahead, others = own.step.num_single, step.bounds[1]
    if others:
        _scan_rows(own, told, rule, (qkv, a, b), out, (ahead, others), choose)
    return out


def _single_rows(own: LayerStates, told: Told, rule: DeltaOperands, qkv: Tensor) -> int:
    """How many rows of one token, at most, kernels of their own serve: the first of the step, or all."""
    step = own.inputs
    if qkv.dtype not in _STREAMED or not is_streamable(told, rule.key_size):
        return 0
    if step.max_query_len == 1:
        return len(step.rows)
    pays = step.max_query_len > FEW or len(qkv) < 2 * len(step.rows)  # beside a prompt, not where most verify
    return step.bounds[0] if step.bounds is not None and pays else 0


def _decode_rows(
    own: LayerStates, told: Told, rule: DeltaOperands, given: Given, out: Tensor, num_rows: int, choose: Choose
) -> None:
    """Of the first `num_rows` rows, those of one token. given: qkv, a, b."""
    qkv, a, b = given
    is_copied = a.dtype == b.dtype == qkv.dtype and choose(delta_step, own, told, rule, qkv)
    is_copied = is_copied and (num_rows * rule.num_key_heads >= _FEWEST_STEPS or choose is not chosen)
    if not is_copied or side_by_side.current() is not None:  # those that it is compared with compile as well
        _decode(own, told, rule, given, out, num_rows)
        _advance(own, told, rule, qkv, num_rows)
    if is_copied:
        _step(own, told, rule, given, out, num_rows)


def _scan_rows(
    own: LayerStates, told: Told, rule: DeltaOperands, given: Given, out: Tensor, which: Which, choose: Choose
) -> None:
    """Of rows of several tokens, or of any."""
    (qkv, a, b), step = given, own.inputs
    fits = own.chunk == 64 and qkv.dtype in _WALKED and is_streamable(told, rule.key_size)
    walks = fits and step.max_query_len > FEW  # by Triton, which takes fewer tokens a block at a time
    is_copied = fits and step.max_query_len > 1 and choose(delta_prompts, own, told, rule, qkv)
    is_prepared = is_copied and a.dtype == b.dtype == qkv.dtype and choose(delta_prepare, own, told, rule, qkv)
    if not is_prepared or side_by_side.current() is not None:  # those that it is compared with compile as well
        made = _ready(own, told, rule, given, walks)
    if is_prepared:
        made = _prepare(own, told, rule, given, which)
    if is_copied:
        _walk(own, told, rule, qkv, made, out, which)
    if not is_copied or side_by_side.current() is not None:
        _scan(own, told, rule, qkv, made, out, which, walks)
    if step.max_query_len == 1:
        _advance(own, told, rule, qkv, len(step.rows))


def _scan(
    own: LayerStates,
    told: Told,
    rule: DeltaOperands,
    qkv: Tensor,
    made: tuple[Tensor, ...],
    out: Tensor,
    which: Which,
    walks: bool,
) -> None:
    """By Triton: chunks of rows that begin at a border, if it walks, and blocks of the others. made: see `_ready`."""
    step, heads, values, (query, key, *others), (ahead, num_rows) = (
        own.inputs,
        rule.num_heads,
        rule.value_size,
        made,
        which,
    )
    forms, shape = dict(zip(_FORMS, told.forms, strict=True)), _shape(own, rule, qkv)
    given = query, key, qkv[:, 2 * rule.num_key_heads * rule.key_size :], qkv.stride(0), *others, out
    given += step.rows, step.query_start, step.seq_lens, ahead, len(step.rows), *told.tables
    if walks:
        named = {name: forms[name] for name in ("STATE_FORM", "KEY_FORM", "VALUE_FORM", "UPDATE_FORM")}
        wide, warps = _tile(values, _WALKING)
        options = {"VALUE_SIZE": values, "TILE": wide, "STAGES": _WALK_STAGES, "num_warps": warps, "num_stages": 1}
        delta_walk[heads * -(-values // wide), num_rows](
            *given, *told.kept[:4], *told.firsts, **shape, **named, **options, **PLAIN
        )
    kind = kind_of(step.max_query_len)
    tile, _ = _tile(values, kind)
    options = {"VALUE_SIZE": values, "TILE": tile, "ADVANCE": step.max_query_len > 1, "WALKED": walks, "num_stages": 1}
    delta_scan[heads * -(-values // tile), num_rows](
        *given, *told.kept, *told.firsts, **shape, **forms, **options, **_program(qkv, kind), **PLAIN
    )


def _ready(own: LayerStates, told: Told, rule: DeltaOperands, given: Given, by_chunk: bool) -> tuple[Tensor, ...]:
    """(q and k of norm 1, summed gates and rates, M, the factors of o, T). by_chunk: see `_blocks`."""
    qkv, a, b = given
    count, keys, padded = len(qkv), rule.key_size, padded_length(rule.key_size)
    query, key = (qkv.new_empty(count, rule.num_key_heads, keys) for _ in range(2))  # each aligned, at any length
    if count:
        norms = {"HEADS": rule.num_key_heads, "SIZE": keys, "PADDED": padded, "LEVELS": padded.bit_length() - 1}
        lines = count * rule.num_key_heads
        normalize_keys[(-(-lines // _LINES),)](
            qkv, qkv.stride(0), query, key, keys**-0.5, lines, **norms, LINES=_LINES, num_warps=4, **PLAIN
        )
    total, rate = gates(own, told, a, b, rule.decay, rule.dt_bias, (0.0, 0.0), slots=(4, 5))
    return query, key, total, rate, *_blocks(own, told, rule, query, key, total, rate, by_chunk)


def _prepare(own: LayerStates, told: Told, rule: DeltaOperands, given: Given, which: Which) -> tuple[Tensor, ...]:
    """What `_ready` makes by chunks, by `delta_prepare`, of those rows alone."""
    (qkv, a, b), step, count, heads = given, own.inputs, len(given[0]), rule.num_heads
    num_rows = len(step.rows)
    query, key = (qkv.new_empty(count, rule.num_key_heads, rule.key_size) for _ in range(2))
    total, rate = (torch.empty(count, heads, dtype=torch.float32, device=qkv.device) for _ in range(2))
    blocks = count // 16 + 2 * num_rows
    before, factor = query.new_empty(2, blocks, heads, 16, own.chunk)
    inverse = torch.empty(blocks, heads, 16, 16, dtype=torch.float32, device=qkv.device)
    made = query, key, total, rate, before, factor, inverse
    macros = delta_prepare.macros((heads, rule.num_key_heads), own.block_size, told.forms, qkv.dtype)
    _, key_kept, _, _, *sums_kept = told.kept
    taken = qkv, a, b, rule.decay, rule.dt_bias, *made, step.rows, step.query_start, step.seq_lens, which[0]
    places = [each.data_ptr() for each in (*taken, told.tables[2], key_kept, *sums_kept)]
    numbers = qkv.stride(0), a.stride(0), b.stride(0), told.tables[3], told.firsts[1], num_rows
    to_tell = delta_prepare.Told(*places, *numbers, rule.key_size**-0.5)
    delta_prepare.launch(to_tell, count // own.chunk + 2 * which[1], macros, qkv.device)
    return made


def _walk(
    own: LayerStates,
    told: Told,
    rule: DeltaOperands,
    qkv: Tensor,
    made: tuple[Tensor, ...],
    out: Tensor,
    which: Which,
) -> None:
    """What `delta_walk` and `delta_scan` do, by `delta_prompts`. made: see `_ready`."""
    step, kept, (query, key, *others) = own.inputs, told.kept, made
    macros = delta_prompts.macros((rule.num_heads, rule.num_key_heads), own.block_size, told.forms, qkv.dtype)
    state_table, state_columns, input_table, input_columns = told.tables
    given = query, key, qkv[:, 2 * rule.num_key_heads * rule.key_size :], *others, out
    places = *given, step.rows, step.query_start, step.seq_lens, which[0], state_table, input_table, *kept
    numbers = qkv.stride(0), state_columns, input_columns, *told.firsts, len(step.rows)
    states = delta_prompts.states_of(kept[0])
    to_tell = delta_prompts.Told(states, *(each.data_ptr() for each in places), *numbers)
    delta_prompts.launch(to_tell, which[1], macros, qkv.device)


def _decode(own: LayerStates, told: Told, rule: DeltaOperands, given: Given, out: Tensor, num_rows: int) -> None:
    """Of the first rows, those of one token: what needs no state, then states as they come."""
    (qkv, a, b), step, heads, key_heads = given, own.inputs, rule.num_heads, rule.num_key_heads
    keys, values = rule.key_size, rule.value_size
    per, padded, pdl = rule.num_heads // rule.num_key_heads, padded_length(keys), chained(qkv.device)
    query, key = qkv.new_empty(2, num_rows, key_heads, keys)
    before, factor = qkv.new_empty(num_rows, heads, 16, own.chunk), qkv.new_empty(num_rows, heads, own.chunk)
    factors, below = (
        torch.empty(num_rows, heads, width, dtype=torch.float32, device=qkv.device) for width in (48, 256)
    )
    state, key_kept, value_kept, update, total, rate = told.kept
    forms, shape = dict(zip(_FORMS, told.forms, strict=True)), _shape(own, rule, qkv)
    rows = step.rows, step.query_start, step.seq_lens
    named = {name: forms[name] for name in ("KEY_FORM", "TOTAL_FORM", "RATE_FORM")}
    delta_ready[key_heads, num_rows](
        qkv, qkv.stride(0), a, a.stride(0), b, b.stride(0), rule.decay, rule.dt_bias, keys**-0.5,
        query, key, before, factor, factors, below, *rows, *told.tables[2:], key_kept, total, rate,
        told.firsts[1], **shape, **named, LEVELS=padded.bit_length() - 1, LANES=16 * (1 << (per - 1).bit_length()),
        num_warps=_READY_WARPS, maxnreg=_READY_REGISTERS, num_stages=1, **PLAIN, **pdl,
    )  # fmt: skip
    made = query, key, before, factor, factors, qkv[:, 2 * key_heads * keys :]
    wide, warps = _tile(values, _STREAMING)
    tiles = -(-values // wide)
    named = {name: forms[name] for name in ("STATE_FORM", "KEY_FORM", "VALUE_FORM", "UPDATE_FORM")}
    delta_decode[heads * tiles // _tiles_of(per * tiles, num_rows * heads * tiles), num_rows](
        *made, qkv.stride(0), out, *rows, *told.tables, state, key_kept, value_kept, update, *told.firsts,
        **shape, **named, VALUE_SIZE=values, TILE=wide, STAGES=_STREAM_STAGES,
        num_warps=warps, maxnreg=_STREAM_REGISTERS, num_stages=1, **PLAIN, **pdl,
    )  # fmt: skip


def _step(own: LayerStates, told: Told, rule: DeltaOperands, given: Given, out: Tensor, num_rows: int) -> None:
    """What `_decode` and `_advance` do, by `delta_step`."""
    (qkv, a, b), step = given, own.inputs
    macros = delta_step.macros((rule.num_heads, rule.num_key_heads), own.block_size, told.forms, qkv.dtype)
    state_table, state_columns, input_table, input_columns = told.tables
    taken = qkv, a, b, rule.decay, rule.dt_bias, out, step.rows, step.query_start, step.seq_lens
    places = [each.data_ptr() for each in (*taken, state_table, input_table, *told.kept)]
    numbers = qkv.stride(0), a.stride(0), b.stride(0), state_columns, input_columns, *told.firsts, num_rows
    delta_step.launch(delta_step.Told(*places, *numbers, rule.key_size**-0.5), macros, qkv.device)


def _advance(own: LayerStates, told: Told, rule: DeltaOperands, qkv: Tensor, num_rows: int) -> None:
    """Of the first rows, write the states of those whose one token ends a chunk."""
    step, values = own.inputs, rule.value_size
    state, key, _, update, total, _ = told.kept
    forms = dict(zip(_FORMS, told.forms, strict=True))
    named = {name: forms[name] for name in ("STATE_FORM", "KEY_FORM", "UPDATE_FORM", "TOTAL_FORM")}
    delta_advance[_PARTS, -(-num_rows // _GROUP)](
        step.rows, step.query_start, step.seq_lens, num_rows, *told.tables, state, key, update, total,
        *told.firsts, **_shape(own, rule, qkv), VALUE_SIZE=values, TILE=_tile(values, _ADVANCING)[0],
        PARTS=_PARTS, GROUP=_GROUP, **named, num_warps=_TILES[_ADVANCING][1], num_stages=1, **PLAIN,
        **chained(qkv.device),
    )  # fmt: skip


def _blocks(
    own: LayerStates,
    told: Told,
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
    inverse = torch.empty(blocks, heads, 16, 16, dtype=torch.float32, device=query.device)
    _, key_kept, _, _, total_kept, rate_kept = told.kept
    forms = dict(zip(_FORMS, told.forms, strict=True))
    named = {name: forms[name] for name in ("KEY_FORM", "TOTAL_FORM", "RATE_FORM")}
    if by_chunk:
        per = heads // rule.num_key_heads
        delta_chunks[len(query) // own.chunk + 2 * num_rows, rule.num_key_heads, 2](
            query, key, total, rate, before, factor, inverse, torch.empty_like(inverse), step.rows,
            step.query_start, step.seq_lens, num_rows, *told.tables[2:], key_kept, total_kept, rate_kept,
            told.firsts[1], **_shape(own, rule, query), **named,
            LANES=own.chunk * (1 << (per - 1).bit_length()), num_warps=_CHUNK_WARPS, maxnreg=_CHUNK_REGISTERS,
            num_stages=1, **PLAIN,
        )  # fmt: skip
        return before, factor, inverse
    delta_blocks[blocks, heads, 3](
        query, key, total, rate, before, factor, inverse, step.rows, step.query_start, step.seq_lens, num_rows,
        *told.tables[2:], key_kept, total_kept, rate_kept, told.firsts[1], **_shape(own, rule, query),
        **named, ONE=is_one, num_warps=_BLOCK_WARPS * query.element_size() // 2, num_stages=1, **PLAIN,
    )  # fmt: skip
    return before, factor, inverse


def _tile(size: int, kind: str) -> tuple[int, int]:
    """Channels of a head that a program takes, and its warps."""
    return min(_TILES[kind][0], padded_length(size)), _TILES[kind][1]


def _tiles_of(alike: int, tiles: int) -> int:
    """How many of `tiles` a program takes: as many as leave enough programs, and divide those of a key evenly."""
    most = max(1, min(_STREAM_TILES, tiles // _STREAM_PROGRAMS))
    return next(n for n in range(most, 0, -1) if alike % n == 0)


def _program(x: Tensor, kind: str) -> dict[str, Any]:
    """A scan's warps, and the registers of a thread where rows decode."""
    warps = _TILES[kind][1]
    if kind != "decode":
        return {"num_warps": warps}
    if x.dtype is torch.float32:
        return {"num_warps": 2 * warps, "maxnreg": 255}  # unless it is told so, ptxas 12.8 takes 32 and spills
    return {"num_warps": warps} | ({"maxnreg": _SCAN_REGISTERS} if _SCAN_REGISTERS else {})


def _shape(own: LayerStates, rule: DeltaOperands, x: Tensor) -> dict[str, Any]:
    """Constants that both kernels of the delta rule take."""
    return {
        "HEADS": rule.num_heads,
        "KEY_HEADS": rule.num_key_heads,
        "KEY_SIZE": rule.key_size,
        "KEY_PADDED": padded_length(rule.key_size),
        "CHUNK": own.chunk,
        "BLOCK": own.block_size,
        "PRECISION": precision(x),
    }
