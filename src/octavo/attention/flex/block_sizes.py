"""The block sizes of the flex backend: what a user may set, what is set otherwise, and why a value is refused.

Owns four names: `flex_attn_block_m`, `flex_attn_block_n` (a kernel's tile: lines, keys), `flex_attn_q_block_size` and
`flex_attn_kv_block_size` (the mask's blocks). Knows no tensor. Invariants: the sizes it gives are powers of two of at
least 16, tiles divide mask blocks, a default is legal wherever no size is set, and none follows from the cache's block
size, on which bits must not depend.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeAlias

from octavo.config.settings import ConfigError
from octavo.ops.flex.mask_rows import MASK_BLOCK

SMALLEST = 16  # lines or keys of a matrix instruction
_PREFILL_LINES = 128
_WARP_GROUP_LINES = 64  # of the smallest tile on the instructions of four warps
LEAF = 2048  # tokens of a partial result
Launch: TypeAlias = tuple[tuple[str, int], ...]
"""Options of a compiled kernel by name."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FlexSizes:
    """What the kernels are compiled with. A line is a query of one of the heads that share a KV head."""

    decode_lines: int  # of a tile where each request has few queries
    prefill_lines: int  # of a tile elsewhere
    block_n: int  # keys of a tile
    q_block: int  # queries by which blocks are told wholly visible from partly visible
    kv_block: int  # keys of a mask block
    leaf: int  # keys of a partial result; 0: one pass over all keys, as torch does it without a cache
    decode_launch: Launch = ()  # of each tile; empty: torch's choice
    prefill_launch: Launch = ()


def resolve_flex_sizes(
    options: Mapping[str, Any],
    *,
    kernel_block: int,
    group: int,
    head_size: int = 128,
    float32: bool = False,
    one_tile: bool = False,
    narrow: bool = False,
    reproducible: bool = True,
) -> FlexSizes:
    """The sizes for kernel blocks of `kernel_block` tokens and `group` heads per KV head. Raises ConfigError.

    The kernel block decides what a user may set, and nothing else.

    one_tile: prefill takes decode's tile, as float32 and wide heads do, whose sums have another order in others. With
    a tile that the user sets, keys are walked in one pass, so that FlexAttention over plain K and V, without a cache
    and with the same sizes, gives the same bits.

    narrow: the cache has 8 bits a number. The instruction of a warp would then take channels in fours, as they were
    loaded, and that of four warps in twos, so decode has a tile of the latter too.
    """
    m, n = _size(options, "flex_attn_block_m"), _size(options, "flex_attn_block_n")
    q_block, kv_block = _size(options, "flex_attn_q_block_size"), _size(options, "flex_attn_kv_block_size")
    _check_against_cache(m, n, kv_block, kernel_block, reproducible=reproducible)
    block_n = n or min(kv_block or MASK_BLOCK, 32 if float32 or head_size > 128 else 64)
    kv_block = kv_block or n or MASK_BLOCK
    assert kv_block % block_n == 0, "a tile divides the kernel block, which a mask block that is set is"
    if m is not None and m < group:
        raise ConfigError("flex_attn_block_m", m, f"must hold the {group} heads of a KV head", "raise it")
    pinned = bool(m or n or q_block)
    one_tile |= pinned or float32 or head_size > 256
    smallest = max(_WARP_GROUP_LINES if narrow and not one_tile else SMALLEST, 1 << (group - 1).bit_length())
    decode = m or smallest
    prefill = decode if one_tile else max(smallest, _PREFILL_LINES if head_size <= 128 else _WARP_GROUP_LINES)
    if q_block is not None and m is not None and q_block % m:
        raise ConfigError(
            "flex_attn_q_block_size", q_block, f"must be divisible by flex_attn_block_m={m}", "change one of the two"
        )
    return FlexSizes(
        decode_lines=decode,
        prefill_lines=prefill,
        block_n=block_n,
        q_block=q_block or max(SMALLEST, _power_of_two_up(prefill // group), m or 0),
        kv_block=kv_block,
        leaf=0 if pinned else max(LEAF, kv_block),
        decode_launch=() if pinned else _launch(decode, head_size, one_tile=one_tile),
        prefill_launch=() if pinned else _launch(prefill, head_size, one_tile=one_tile),
    )


def _check_against_cache(
    m: int | None, n: int | None, kv_block: int | None, kernel_block: int, *, reproducible: bool
) -> None:
    """Raises ConfigError for sizes that a user set and blocks of so many tokens do not allow."""
    if kernel_block % SMALLEST:
        raise ConfigError(
            "block_size", kernel_block, f"flex takes kernel blocks that {SMALLEST} divides", "set --block-size 16"
        )
    if kv_block not in (None, kernel_block):
        raise ConfigError(
            "flex_attn_kv_block_size",
            kv_block,
            f"must be the cache's kernel block size, which is {kernel_block}",
            "set kernel_block_size in attention_config, or --block-size, to it",
        )
    if reproducible:
        for name, value in (("flex_attn_block_m", m), ("flex_attn_block_n", n)):
            if value is not None and value > kernel_block:
                raise ConfigError(
                    name,
                    value,
                    f"must be <= the cache's kernel block size, {kernel_block}, for batch invariance",
                    "lower it, or raise --block-size",
                )
    if n is not None and kernel_block % n:
        cause = f"must divide the cache's kernel block size, which is {kernel_block}"
        raise ConfigError("flex_attn_block_n", n, cause, "change one of the two")


def _launch(lines: int, head_size: int, *, one_tile: bool) -> Launch:
    """Warps that divide the lines of a tile, never its keys: so a row is summed in one order in all tiles.

    The compiler divides the keys of a tile with fewer lines than keys, so such a tile has one warp, and three tiles of
    keys in flight: two are faster where many short rows fill the processors, slower at long, few or unequal ones.
    """
    if one_tile:
        return ("num_warps", 4 if head_size > 256 else 2), ("num_stages", 2)
    return (("num_warps", 1), ("num_stages", 3)) if lines < _WARP_GROUP_LINES else (("num_warps", 4), ("num_stages", 2))


def _size(options: Mapping[str, Any], name: str) -> int | None:
    """A size that the user set. Not a number, 0, negative, under 16 and not a power of two are all refused."""
    value = options.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(name, value, "must be a whole number", f"e.g. {SMALLEST}")
    if value < SMALLEST or value & (value - 1):
        raise ConfigError(name, value, f"must be a power of 2 and at least {SMALLEST}", "leave it out for the default")
    return value


def _power_of_two_up(size: int) -> int:
    return 1 << (size - 1).bit_length()
