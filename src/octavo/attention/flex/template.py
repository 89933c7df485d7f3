"""The kernel of FlexAttention over the paged cache, as torch's compiler fills it with a mod.

Owns the kernel's text, and its place beside torch's own: a call whose kernel options hold `UNIT` is compiled from this
text, every other one from torch's. Does not know batches or mods. Invariants: the arithmetic, and its order, are those
of torch's kernel; a tile of keys stands for logical positions, and consists of units, each of which lies anywhere in
the cache, at an offset of 64 bits; so no bit depends on the cache's block size, its layout or its number of blocks.

A list has an entry per mask block: the block's number in the request, then its units' places. A negative place is the
complement of one that may be read in its stead: none of its keys is seen.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import threading
from typing import Any

from octavo.ops.flex.mask_rows import NOWHERE

_LOCK = threading.Lock()
_KERNEL = """
{{def_kernel("Q", "K", "V", "LSE", "MAX", "KV_NUM_BLKS", "KV_IDX", "FULL_KV_NUM_BLKS", "FULL_KV_IDX")}}
    stride_qz, stride_qh, stride_qm, stride_qk = {{stride("Q")}}
    stride_kz, stride_kh, stride_kn, stride_kk = {{stride("K")}}
    stride_vz, stride_vh, stride_vn, stride_vk = {{stride("V")}}
    Q_LEN = {{size("Q", 2)}}
    tile = tl.program_id(0).to(INDEX_DTYPE)
    row = tl.program_id(1).to(INDEX_DTYPE)
    head = tl.program_id(2).to(INDEX_DTYPE)
    kv_head = head // GQA_SHARED_HEADS
    line = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    channel = tl.arange(0, QK_HEAD_DIM_ROUNDED)
    place = Q + row * stride_qz + head * stride_qh + line[:, None] * stride_qm + channel[None, :] * stride_qk
    if SAFE_HEAD_DIM:
        q = tl.load(place)
    else:
        q = tl.load(place, mask=channel[None, :] < QK_HEAD_DIM, other=0.0)
    K = K + kv_head * stride_kh
    V = V + kv_head * stride_vh
    m_i = tl.zeros([BLOCK_M], dtype=tl.float32) - float("inf")
    l_i = tl.zeros([BLOCK_M], dtype=tl.float32)
    acc = tl.zeros([BLOCK_M, V_HEAD_DIM_ROUNDED], dtype=tl.float32)
    acc, l_i, m_i = walk(
        {{gen_argdefs()}},
        q, K, V, acc, l_i, m_i, row, head, line[:, None],
        KV_IDX + row * {{stride("KV_IDX", 0)}}, tl.load(KV_NUM_BLKS + row * {{stride("KV_NUM_BLKS", 0)}}),
        stride_kn, stride_kk, stride_vn, stride_vk, IS_FULL=False,
    )
    acc, l_i, m_i = walk(
        {{gen_argdefs()}},
        q, K, V, acc, l_i, m_i, row, head, line[:, None],
        FULL_KV_IDX + row * {{stride("FULL_KV_IDX", 0)}},
        tl.load(FULL_KV_NUM_BLKS + row * {{stride("FULL_KV_NUM_BLKS", 0)}}),
        stride_kn, stride_kk, stride_vn, stride_vk, IS_FULL=True,
    )
    l_i = tl.where(l_i == 0.0, 1, l_i)
    acc = acc / l_i[:, None]
    idx_row = tl.program_id(1).to(INDEX_DTYPE)
    idx_head = tl.program_id(2).to(INDEX_DTYPE)
    idx_line = line[:, None].to(INDEX_DTYPE)
    idx_channel = tl.arange(0, V_HEAD_DIM_ROUNDED)[None, :].to(INDEX_DTYPE)
    mask = (idx_line < Q_LEN) & (idx_channel < V_HEAD_DIM)
    {{store_output(
        ("idx_row", "idx_head", "idx_line", "idx_channel"), "acc", "mask",
        val_shape=("BLOCK_M", "V_HEAD_DIM_ROUNDED"),
    )}}
    if OUTPUT_LOGSUMEXP:
        sums = LSE + (row * {{size("Q", 1)}} + head) * Q_LEN + line
        tl.store(sums, m_i + tl.math.log2(l_i))


@triton.jit
def tile_at(blocks, tile, TILES: tl.constexpr, UNITS: tl.constexpr):
    # The first logical position of a tile in units of its own size, and where its units lie.
    entry = blocks + tile // TILES * (1 + TILES * UNITS)
    first = tl.load(entry, eviction_policy="evict_last") * TILES + tile % TILES
    units = ()
    for unit in tl.static_range(UNITS):
        units = units + (tl.load(entry + 1 + tile % TILES * UNITS + unit, eviction_policy="evict_last"),)
    return first, units


@triton.jit
def token_of(unit, SIZE: tl.constexpr, HIDDEN: tl.constexpr):
    # The first token of a unit of SIZE tokens, or of the one that is read in its stead: 64 bits.
    if HIDDEN:
        unit = unit ^ (unit >> 31)
    return unit.to(tl.int64) * SIZE


@triton.jit
def load_keys(
    X, units, stride_n, stride_c, HEAD: tl.constexpr, ROUNDED: tl.constexpr, KEYS: tl.constexpr, SIZE: tl.constexpr,
    UNITS: tl.constexpr, HIDDEN: tl.constexpr, SAFE: tl.constexpr, FEW: tl.constexpr
):
    # [KEYS, ROUNDED] of K or V.
    at, channel = tl.arange(0, KEYS), tl.arange(0, ROUNDED)
    token = token_of(units[0], SIZE, HIDDEN)
    if UNITS == 1 and FEW:
        inner = (X + token * stride_n) + (at[:, None] * stride_n + channel[None, :] * stride_c)
    elif UNITS == 1:  # the same places by other sums, which take fewer registers where a tile has many lines
        inner = X + ((token + at)[:, None] * stride_n + channel[None, :] * stride_c)
    else:
        for unit in tl.static_range(1, UNITS):
            token = tl.where(at >= unit * SIZE, token_of(units[unit], SIZE, HIDDEN), token)
        inner = X + ((at % SIZE)[:, None] * stride_n + channel[None, :] * stride_c) + (token * stride_n)[:, None]
    if SAFE:
        return tl.load(inner)
    return tl.load(inner, mask=channel[None, :] < HEAD, other=0.0)


@triton.jit
def step(
    {{gen_argdefs()}},
    q, K, V, acc, l_i, m_i, row, head, m, first, units, stride_kn, stride_kk, stride_vn, stride_vk,
    IS_FULL: tl.constexpr,
):
    {{gen_defines() | indent_except_first(1)}}
    UNITS: tl.constexpr = BLOCK_N // UNIT
    HIDDEN: tl.constexpr = SPARSE_KV_BLOCK_SIZE > UNIT and not IS_FULL
    RCP_LN2: tl.constexpr = 1.44269504
    k = load_keys(
        K, units, stride_kn, stride_kk, QK_HEAD_DIM, QK_HEAD_DIM_ROUNDED, BLOCK_N, UNIT, UNITS, HIDDEN, SAFE_HEAD_DIM,
        BLOCK_M < 64
    )
    k = tl.trans(k)
    k = k.to(q.dtype)
    qk = tl.dot(q, k, input_precision=FLOAT32_PRECISION)
    qk *= SM_SCALE
    at = tl.arange(0, BLOCK_N)
    positions = first * BLOCK_N + at
    if HIDDEN:
        for unit in tl.static_range(UNITS):
            mine = (at >= unit * UNIT) & (at < (unit + 1) * UNIT)
            positions = tl.where(mine & (units[unit] < 0), NOWHERE, positions)
    n = positions[None, :]
    {{ modification(
        subgraph_number=0, output_name="scores", score="qk", b="row", h="head", m="m", n="n", out="qk", KINDS
    ) | indent_except_first(1) }}
    if not IS_DIVISIBLE:  # as in torch's kernel for such a call, where multiplications are contracted in other places
        scores = tl.where(n <= NOWHERE, scores, float("-inf"))
    if not IS_FULL:
        {{ modification(
            subgraph_number=1, output_name="is_seen", score="qk", b="row", h="head", m="m", n="n", KINDS
        ) | indent_except_first(2) }}
        if not IS_DIVISIBLE:
            is_seen = tl.where(n <= NOWHERE, is_seen, False)
        scores = tl.where(is_seen, scores, float("-inf"))
    scores *= RCP_LN2
    m_ij = tl.maximum(m_i, tl.max(scores, 1))
    top = tl.where(m_ij == float("-inf"), 0, m_ij)
    alpha = tl.math.exp2(m_i - top)
    p = tl.math.exp2(scores - top[:, None])
    l_i = l_i * alpha + tl.sum(p, 1)
    acc = acc * alpha[:, None]
    v = load_keys(
        V, units, stride_vn, stride_vk, V_HEAD_DIM, V_HEAD_DIM_ROUNDED, BLOCK_N, UNIT, UNITS, HIDDEN, SAFE_HEAD_DIM,
        BLOCK_M < 64
    )
    acc = tl.dot(p.to(q.dtype), v.to(q.dtype), acc, input_precision=FLOAT32_PRECISION)
    return acc, l_i, m_ij


@triton.jit
def walk(
    {{gen_argdefs()}},
    q, K, V, acc, l_i, m_i, row, head, m, blocks, num_blocks, stride_kn, stride_kk, stride_vn, stride_vk,
    IS_FULL: tl.constexpr,
):
    {{gen_defines() | indent_except_first(1)}}
    TILES: tl.constexpr = SPARSE_KV_BLOCK_SIZE // BLOCK_N
    UNITS: tl.constexpr = BLOCK_N // UNIT
    # The list is read a tile ahead, so that a tile's loads wait for nothing; it ends in an entry that may be read.
    first, units = tile_at(blocks, 0, TILES, UNITS)
    for tile in range(0, num_blocks * TILES):
        acc, l_i, m_i = step(
            {{gen_argdefs()}},
            q, K, V, acc, l_i, m_i, row, head, m, first, units, stride_kn, stride_kk, stride_vn, stride_vk, IS_FULL,
        )
        first, units = tile_at(blocks, tile + 1, TILES, UNITS)
    return acc, l_i, m_i
"""
_KINDS = """input_shapes={"score": ("BLOCK_M", "BLOCK_N"), "m": ("BLOCK_M", "1"), "n": ("1", "BLOCK_N")},
        input_dtypes={"b": "index", "h": "index", "m": "index", "n": "index"}"""


def unit_options(unit: int) -> dict[str, int]:
    """The kernel options of a call that this kernel is to serve, over units of `unit` tokens."""
    text = int(hashlib.sha256(_KERNEL.encode()).hexdigest()[:7], 16)  # so that torch's own cache tells texts apart
    return {"UNIT": unit, "NOWHERE": NOWHERE, "TEXT": text}


def install() -> None:
    """Put the kernel beside torch's. Raises RuntimeError where torch's compiler is not as it is known to be."""
    with _LOCK:
        try:
            lowering: Any = importlib.import_module("torch._inductor.kernel.flex.flex_attention")
            algorithms = importlib.import_module("torch._inductor.select_algorithm")
            theirs = lowering.flex_attention_template
            if isinstance(theirs, _EitherTemplate):
                return
            known = inspect.signature(algorithms.TritonTemplateKernel.modification).parameters
            text = _KERNEL.replace("KINDS", _KINDS if "input_dtypes" in known else "")
            frozen = "always_freeze_layout" in inspect.signature(algorithms.TritonTemplate).parameters
            ours = algorithms.TritonTemplate(
                name="octavo_flex_attention",
                grid=theirs.grid,
                source=text,
                **({"always_freeze_layout": True} if frozen else {}),
            )
        except (ImportError, AttributeError, AssertionError) as error:
            raise RuntimeError(
                f"attention backend 'flex' does not know the compiler of this torch ({error!r}): install torch 2.11 "
                "to 2.13, or set attention_backend='paged'"
            ) from error
        lowering.flex_attention_template = _EitherTemplate(theirs, ours)


class _EitherTemplate:
    """In the place of torch's template: gives a call the kernel that its options ask for."""

    def __init__(self, theirs: Any, ours: Any) -> None:
        self._theirs, self._ours = theirs, ours

    def maybe_append_choice(self, choices: list[Any], **options: Any) -> Any:
        """See torch's."""
        template = self._ours if "UNIT" in options else self._theirs
        return template.maybe_append_choice(choices, **options)

    def __getattr__(self, name: str) -> Any:
        """Whatever else torch asks of its own."""
        return getattr(self._theirs, name)
