"""Kernel blocks: the block size that an attention kernel's table counts in, where it differs from the cache's.

Owns the choice of a kernel block size per cache group, the map from block ids to kernel block ids, and the view that
puts kernel blocks back together. A block of n tokens is r = n / k kernel blocks of k. The scheduler, connectors and
zeroing know blocks only. Invariant (blocks not outermost): a token's slot is the same number in both units,
b * n + o == (b * r + o // k) * k + o % k.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch

from octavo.cache.groups import KINDS, CacheGroup, TableSpec
from octavo.cache.layout import Layout


@dataclasses.dataclass(frozen=True, slots=True)
class MultipleOf:
    """A kernel takes every block size that `base` divides."""

    base: int

    def __str__(self) -> str:
        """For error messages."""
        return f"multiples of {self.base}"


KernelBlockSizes = Sequence[int | MultipleOf]


def takes_size(sizes: KernelBlockSizes, block_size: int) -> bool:
    """Whether a backend that states `sizes` takes blocks of `block_size` tokens."""
    return any(block_size % size.base == 0 if isinstance(size, MultipleOf) else block_size == size for size in sizes)


def select_common_block_size(kv_manager_block_size: int, backends: Mapping[str, KernelBlockSizes]) -> int:
    """The kernel block size for cache blocks of `kv_manager_block_size` tokens that all `backends` (by name) take.

    The cache's own if every backend takes it; else the largest number that any of them lists, divides it, and suits
    all. Raises ValueError with what each takes.
    """
    if all(takes_size(sizes, kv_manager_block_size) for sizes in backends.values()):
        return kv_manager_block_size
    listed = {size for sizes in backends.values() for size in sizes if not isinstance(size, MultipleOf)}
    for size in sorted(listed, reverse=True):
        if kv_manager_block_size % size == 0 and all(takes_size(sizes, size) for sizes in backends.values()):
            return size
    stated = "; ".join(f"{name}: [{', '.join(map(str, sizes))}]" for name, sizes in backends.items())
    raise ValueError(f"No common block size for {kv_manager_block_size} ({stated}): change block_size or the backend")


def states_per_block(kernel_block_size: int, tokens_per_state: int) -> int:
    """Stored states of one kernel block, for caches that compress `tokens_per_state` tokens into one state.

    Raises ValueError unless it is a whole number of at least one.
    """
    if kernel_block_size < 1 or kernel_block_size % tokens_per_state:
        raise ValueError(
            f"Kernel block size {kernel_block_size} must be a multiple of tokens_per_state={tokens_per_state}: "
            "change block_size or kernel_block_size"
        )
    return kernel_block_size // tokens_per_state


def prepare_kernel_block_sizes(
    groups: Sequence[CacheGroup], backends: Sequence[Mapping[str, KernelBlockSizes]], wanted: int | None = None
) -> list[int | None]:
    """The kernel block size of each group, in the order of `groups` and as many; None for a group without a cache.

    backends: per group what its backends take, by name. wanted: the user's, taken or refused. What states keep is no
    attention kernel's. Raises ValueError for a size that does not divide, that a backend does not take, that
    cuts a compressed state in two, and for an unknown kind of group.
    """
    sizes: list[int | None] = []
    for group, named in zip(groups, backends, strict=True):
        if group.kind in ("encoder_only", "inputs", "state"):
            sizes.append(None)
        elif group.kind in KINDS:
            size = select_common_block_size(group.block_size, named) if wanted is None else wanted
            _check_split(group.block_size, size, named)
            states_per_block(size, group.tokens_per_state)
            sizes.append(size)
        else:
            raise ValueError(f"unknown kind of cache group {group.kind!r}: known are {', '.join(KINDS)}")
    return sizes


def _check_split(block_size: int, size: int, backends: Mapping[str, KernelBlockSizes]) -> None:
    if size < 1 or block_size % size:
        raise ValueError(f"Kernel block size {size} must divide KV cache block size {block_size}")
    for name, sizes in backends.items():
        if not takes_size(sizes, size):
            stated = ", ".join(map(str, sizes))
            raise ValueError(f"attention backend {name} does not take kernel_block_size={size}: it takes [{stated}]")


def backend_block_size(group_size: int, name: str, sizes: KernelBlockSizes, layout: Layout, *, num_heads: int) -> int:
    """The kernel block size of one backend in a group whose other backends agreed on `group_size`.

    A smaller size is a view of the same bytes only where a token's heads lie together, or there is one head. Raises
    ValueError naming the backend, the layout and the way out.
    """
    size = select_common_block_size(group_size, {name: sizes})
    if size != group_size and not layout.token_major and num_heads > 1:
        raise ValueError(
            f"{name} needs {size}-token kernel blocks, which {group_size}-token blocks of layout {layout.name} cannot "
            "be split into: reduce block_size or set kv_cache_layout to LBNHC or BLNHC"
        )
    return size


def choose_tables(
    groups: Sequence[CacheGroup],
    backend_of_layer: Sequence[str],
    supported: Mapping[str, KernelBlockSizes],
    layout: Layout,
    wanted: int | None = None,
) -> list[TableSpec]:
    """A block table per group and backend; one, without a backend, of a group of states or of their inputs.

    The backends of a group share one kernel block size if there is one that all take; else each takes its own, which
    `layout` must allow (`backend_block_size`). wanted: as `prepare_kernel_block_sizes`'s. Raises ValueError.
    """
    tables: list[TableSpec] = []
    for index, group in enumerate(groups):
        if not group.is_attention:
            tables.append(TableSpec(index, group.layers, None))
            continue
        layers_of: dict[str, tuple[int, ...]] = {}
        for layer in group.layers:
            layers_of[backend_of_layer[layer]] = (*layers_of.get(backend_of_layer[layer], ()), layer)
        named = {name: supported[name] for name in layers_of}
        sizes: dict[str, int | None]
        try:
            sizes = dict.fromkeys(named, prepare_kernel_block_sizes([group], [named], wanted)[0])
        except ValueError:
            if len(named) == 1 or wanted is not None:
                raise
            heads = group.num_heads
            sizes = {
                name: backend_block_size(group.block_size, name, own, layout, num_heads=heads)
                for name, own in named.items()
            }
        tables += [TableSpec(index, layers, sizes[name], name) for name, layers in layers_of.items()]
    return tables


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BlockMap:
    """From block ids to kernel block ids: block b is kernel blocks b * stride .. b * stride + ratio - 1."""

    kernel_block_size: int
    ratio: int = 1
    stride: int = 1  # more than `ratio` where other layers' bytes lie between two blocks

    def expand(self, block_ids: Sequence[int]) -> Sequence[int]:
        """Kernel block ids, in order; the same object where blocks are not split."""
        if self.ratio == 1:
            return block_ids
        parts = range(self.ratio)
        return [block * self.stride + part for block in block_ids for part in parts]


def group_kernel_blocks(cache: torch.Tensor, num_blocks: int, *, stride: int | None = None) -> torch.Tensor:
    """A layer's view [kernel blocks, H, k, C] as [num_blocks, r, H, k, C], the same bytes; itself where r is 1.

    stride: BlockMap's, where other layers' bytes lie between two blocks (default: r). Raises ValueError if kernel
    blocks are left over.
    """
    if stride is None and cache.shape[0] % num_blocks:
        raise ValueError(f"{cache.shape[0]} kernel blocks are not a whole number for each of {num_blocks} blocks")
    if stride is None:
        stride = cache.shape[0] // num_blocks
    ratio = cache.shape[0] - (num_blocks - 1) * stride
    if ratio == 1:
        return cache
    step = cache.stride(0)
    return cache.as_strided((num_blocks, ratio, *cache.shape[1:]), (stride * step, step, *cache.stride()[1:]))
