"""The FlexAttention backend: any mask and score change, by torch's compiled kernels, over the paged cache.

Owns the mask rows of a step, and one compiled kernel per spec and tile. On the CPU the kernels' reference
implementation runs. Does not know what a mod means. Invariants: a kernel is compiled once, whatever the batch and the
pool; a query's bits depend on its own row only, not on how the cache lies: tiles of queries and of keys lie within one
request and start at multiples of their size, leaves of keys at absolute places, and leaves are folded in one order;
`prepare` and `run` are device work alone, so a graph may hold both.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.attention.base import NO_SETUP, NO_TENSORS, AttentionInputs, Capability, LayerTensors, Setup, check_specs
from octavo.attention.flex.block_sizes import LEAF, SMALLEST, FlexSizes, resolve_flex_sizes
from octavo.attention.flex.kernel import Kernel
from octavo.attention.mods import KNOWN, PROMPT_LENGTH, AttentionMods, at_work
from octavo.attention.mods.of_spec import mods_of_spec
from octavo.cache.kernel_blocks import MultipleOf
from octavo.cache.specs import AttentionSpec
from octavo.ops import flex as ops
from octavo.ops.flex.mask_rows import MASK_BLOCK, Geometry, Kind, MaskRows, Reach, tokens_of
from octavo.ops.rope import Rotation

_MAX_MASK_ROWS = 65_535  # of a launch: the second axis of a CUDA grid
_SCRATCH_BYTES = 512 << 20  # of queries and partial results of one launch


@dataclasses.dataclass(frozen=True, slots=True)
class _Plan:
    """One spec's work in this step, for all rows or for some that share a tile."""

    shape: Geometry
    rows: MaskRows
    num_tiles: int
    num_leaves: int


def _buffer_bytes(setup: Setup) -> int:
    """Of one spec's mask rows, for the smallest tiles."""
    if not setup.block_size:
        return 0
    tiles = ops.max_tiles(setup.max_num_rows, setup.max_num_tokens, setup.max_num_tokens, SMALLEST // 4)
    leaves, columns = -(-setup.max_model_len // LEAF), -(-min(LEAF, setup.max_model_len) // MASK_BLOCK)
    entry = 1 + MASK_BLOCK // _unit(setup.block_size, MASK_BLOCK // 2)
    return 8 * tiles * leaves * ((columns + 1) * entry + 5)


def _unit(block_size: int, block_n: int) -> int:
    """Keys that lie together wherever a tile of `block_n` meets blocks of `block_size` tokens."""
    return math.gcd(block_size, block_n)


class FlexBackend:
    """An AttentionBackend for every mod, on CUDA and, by the reference implementation, on CPU."""

    capability = Capability(
        devices=("cpu", "cuda"),
        dtypes=(torch.bfloat16, torch.float16, torch.float32),
        kernel_block_sizes=(MultipleOf(16),),
        chunk=True,
        alibi=True,
        sinks=True,
        non_causal=True,
        mods=True,
        hint_slack=128,
        cache_dtypes=(torch.float8_e4m3fn, torch.int8),
        buffer_bytes=_buffer_bytes,
        reads_uninitialized=True,
        graphs=frozenset({"decode", "mixed"}),
        graph_lengths=(LEAF, 4 * LEAF, 16 * LEAF),
        bounded_mixed=True,
    )

    def __init__(
        self, specs: Sequence[AttentionSpec], dtype: torch.dtype, device: torch.device, setup: Setup = NO_SETUP
    ) -> None:
        """Raises ValueError for another dtype and for block sizes that contradict each other."""
        check_specs("flex", self.capability, specs, dtype, setup)
        self._specs, self._dtype, self._device, self._setup = tuple(specs), dtype, device, setup
        self._mods: dict[AttentionSpec, AttentionMods] = {}
        self._kernels: dict[tuple[AttentionSpec, int], Kernel] = {}
        self._buffers: dict[tuple[AttentionSpec, int], MaskRows] = {}
        if setup.block_size:
            for spec in specs:
                self.sizes(spec, setup.block_size)

    def sizes(self, spec: AttentionSpec, block_size: int) -> FlexSizes:
        """What a spec's kernels are compiled with over blocks of `block_size`. Raises ConfigError."""
        return resolve_flex_sizes(
            self._setup.options,
            kernel_block=block_size,
            group=spec.num_heads // spec.num_kv_heads,
            head_size=spec.head_size,
            float32=self._dtype == torch.float32,
            one_tile=self._device.type != "cuda",
            narrow=self._device.type == "cuda" and self._setup.cache_dtype in self.capability.cache_dtypes,
            reproducible=self._setup.reproducible,
        )

    def prepare(self, inputs: AttentionInputs, *, for_capture: bool = False) -> None:
        """Make the mask rows of each spec. Device work only. Raises ValueError for inputs that contradict it."""
        inputs.check()
        self._inputs = inputs
        self._plans: dict[AttentionSpec, list[_Plan]] = {}

    def run(self, q: Tensor, kv: Tensor, spec: AttentionSpec, out: Tensor, layer: LayerTensors = NO_TENSORS) -> None:
        """Attend; see AttentionBackend."""
        self._inputs.check_call(q, kv, out)
        for plan in self._plans_of(spec, kv):
            for start, count in _parts(plan, spec, q.element_size()):
                lines = ops.gather_lines(q, plan.rows, plan.shape, start, count)
                self._attend(lines, kv, spec, plan, start, out, layer)

    def rotates(self, rotation: Rotation, kv: Tensor, spec: AttentionSpec) -> bool:
        """See FusedRopeBackend. Where each token is a tile that walks one leaf, its queries can be written as lines."""
        inputs = self._inputs
        if not kv.is_cuda or kv.dtype != self._dtype or spec.sinks:
            return False
        if inputs.max_query_len > 1 or inputs.num_rows != inputs.num_tokens:
            return False
        (plan,) = self._plans_of(spec, kv)
        return plan.num_leaves == 1 and len(_parts(plan, spec, kv.element_size())) == 1

    def run_fused_rope(
        self, projected: Tensor, rotation: Rotation, kv: Tensor, spec: AttentionSpec, out: Tensor
    ) -> None:
        """See FusedRopeBackend."""
        from octavo.ops.rope import gpu as rope  # needs Triton

        self._inputs.check_call(projected, kv, out)
        (plan,) = self._plans_of(spec, kv)
        shape, kv_heads = plan.shape, spec.num_kv_heads
        lines = rope.qk_norm_rope_store(
            projected, rotation.positions, rotation.cos_sin, rotation.q_norm, rotation.k_norm, rotation.eps,
            spec.num_heads, kv_heads, spec.head_size, kv, rotation.slot_mapping, 1.0, None, None,
            rope.Tile(shape.group, shape.lines, shape.tokens, plan.num_tiles),
        )  # fmt: skip
        self._attend(lines.unflatten(1, (kv_heads, shape.lines)), kv, spec, plan, 0, out, NO_TENSORS)

    def _attend(
        self, lines: Tensor, kv: Tensor, spec: AttentionSpec, plan: _Plan, start: int, out: Tensor, layer: LayerTensors
    ) -> None:
        """The mask rows of a plan from `start` on, whose queries are `lines`."""
        mods = self._mods_of(spec)
        with at_work(spec.mods, self._setup.fields):
            kernel = self._kernel(spec, mods, plan)
            sums = plan.num_leaves > 1 or layer.sinks is not None  # else `merge_lines` does not read them
            parts, lse = kernel(lines, kv, plan.rows, layer.key_scale, start, len(lines), sums=sums)
        ops.merge_lines(
            parts,
            lse,
            plan.rows,
            plan.shape,
            out,
            start=start,
            num_leaves=plan.num_leaves,
            sinks=layer.sinks,
            value_scale=layer.value_scale,
        )

    def _plans_of(self, spec: AttentionSpec, kv: Tensor) -> list[_Plan]:
        """The step's, made by the first layer that asks."""
        plans = self._plans.get(spec)
        if plans is None:
            mods = self._mods_of(spec)
            with at_work(spec.mods, self._setup.fields):
                plans = self._plans[spec] = self._plan(spec, mods, ops.block_stride(kv))
        return plans

    def _mods_of(self, spec: AttentionSpec) -> AttentionMods:
        if spec not in self._mods:
            self._mods[spec] = mods_of_spec(spec, self._device)
        return self._mods[spec]

    def _plan(self, spec: AttentionSpec, mods: AttentionMods, stride: int) -> list[_Plan]:
        """Two where rows of one query may stand before rows of many: each kind has its tile, and both the same bits.

        The host knows bounds alone, so a graph of one step serves every other one within them.
        """
        rows, most, longest = self._inputs.num_rows, self._inputs.max_long, self._inputs.max_query_len
        if longest <= 1:
            return [self._plan_rows(spec, mods, stride, Kind.SINGLE, rows, 1)]
        if most is None or most >= rows or self._lines(spec, 1) == self._lines(spec, longest):
            return [self._plan_rows(spec, mods, stride, Kind.ALL, rows, longest)]
        return [
            self._plan_rows(spec, mods, stride, Kind.SINGLE, rows, 1),
            self._plan_rows(spec, mods, stride, Kind.LONG, most, longest),
        ]

    def _plan_rows(
        self, spec: AttentionSpec, mods: AttentionMods, stride: int, kind: Kind, max_rows: int, max_query_len: int
    ) -> _Plan:
        inputs = self._inputs
        shape = self._geometry(spec, stride, max_query_len)
        num_leaves = -(-inputs.max_seq_len // shape.leaf)
        num_tiles = ops.max_tiles(max_rows, inputs.num_tokens, max_query_len, shape.tokens)
        if num_leaves == 1:
            num_tiles = max(num_tiles, 2)  # torch compiles anew for a size of 1
        buffers = self._mask_rows(spec, shape, max(num_tiles * num_leaves, inputs.num_rows))
        query_start, seq_lens, block_table = inputs.live
        table_rows = inputs.rows if inputs.rows is not None else torch.arange(inputs.num_rows, device=self._device)
        ops.plan_mask_rows(
            buffers,
            shape,
            num_tiles=num_tiles,
            num_leaves=num_leaves,
            query_start=query_start,
            seq_lens=seq_lens,
            block_table=block_table,
            table_rows=table_rows[: inputs.num_rows],
            kind=kind,
            some=mods.some_visible,
            every=mods.all_visible,
            reach=_reach(spec, self._setup),
        )
        return _Plan(shape, buffers, num_tiles, num_leaves)

    def _lines(self, spec: AttentionSpec, max_query_len: int) -> int:
        """Of the tile for rows of at most so many queries."""
        sizes, group = self.sizes(spec, self._inputs.block_size), spec.num_heads // spec.num_kv_heads
        few = max_query_len <= tokens_of(sizes.decode_lines, group)
        return sizes.decode_lines if few else sizes.prefill_lines

    def _geometry(self, spec: AttentionSpec, stride: int, max_query_len: int) -> Geometry:
        inputs = self._inputs
        sizes, group = self.sizes(spec, inputs.block_size), spec.num_heads // spec.num_kv_heads
        longest = self._setup.max_model_len or inputs.block_table.shape[1] * inputs.block_size
        return Geometry(
            group=group,
            lines=self._lines(spec, max_query_len),
            block=inputs.block_size,
            stride=stride,
            columns=-(-min(sizes.leaf or longest, longest) // sizes.kv_block),
            q_block=sizes.q_block,
            kv_block=sizes.kv_block,
            unit=_unit(inputs.block_size, sizes.block_n),
        )

    def _mask_rows(self, spec: AttentionSpec, shape: Geometry, needed: int) -> MaskRows:
        """The spec's buffers for a tile, made once, for the largest step."""
        key = spec, shape.lines
        if key not in self._buffers or not self._setup.max_num_rows:
            setup, sizes = self._setup, self.sizes(spec, shape.block)
            leaves = -(-(setup.max_model_len or 1) // shape.leaf)
            few = shape.lines == sizes.decode_lines
            longest = shape.tokens if few and sizes.decode_lines != sizes.prefill_lines else setup.max_num_tokens
            tiles = max(2, ops.max_tiles(setup.max_num_rows, setup.max_num_tokens, longest, shape.tokens))
            capacity = tiles * leaves if setup.max_num_rows else needed
            self._buffers[key] = MaskRows(capacity, shape, self._device)
        return self._buffers[key]

    def _kernel(self, spec: AttentionSpec, mods: AttentionMods, plan: _Plan) -> Kernel:
        key = spec, plan.shape.lines
        kernel = self._kernels.get(key)
        if kernel is None or kernel.shape != plan.shape:
            kernel = self._kernels[key] = Kernel(spec, mods, plan.shape, self.sizes(spec, plan.shape.block))
        return kernel


def _reach(spec: AttentionSpec, setup: Setup) -> Reach | None:
    """A spec's blocks as one kernel finds them; None if the user's hints have a say."""
    mods = spec.mods
    if mods.mask_mod is KNOWN.mask_mod and mods.some is KNOWN.some and not (spec.window or spec.chunk):
        return Reach(causal=False, prompts=setup.fields[PROMPT_LENGTH.spec.name])
    causal = spec.causal and mods.causal
    if mods.some is not None or mods.every is not None or (not causal and (spec.window or spec.chunk)):
        return None
    return Reach(causal=causal, window=spec.window, chunk=spec.chunk, exact=mods.mask_mod is None)


def _parts(plan: _Plan, spec: AttentionSpec, itemsize: int) -> list[tuple[int, int]]:
    """(first mask row, how many) of each launch: whole tiles, within what a launch may hold."""
    row_bytes = 2 * spec.num_kv_heads * plan.shape.lines * spec.head_size * itemsize
    most = min(_SCRATCH_BYTES // row_bytes, _MAX_MASK_ROWS)
    num_parts = -(-plan.num_tiles // max(most // plan.num_leaves, 2))
    bounds = [plan.num_tiles * part // num_parts for part in range(num_parts + 1)]  # two tiles each, or more
    return [(first * plan.num_leaves, (last - first) * plan.num_leaves) for first, last in itertools.pairwise(bounds)]
