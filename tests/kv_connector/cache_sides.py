"""Caches that stand for engines and their ranks: filled and read through the views that attention has of them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from octavo.cache.groups import CacheGroup, TableSpec
from octavo.cache.layout import LAYOUTS
from octavo.cache.pool import KVCachePool
from octavo.kv_connector.peers.description import CacheDescription, describe, heads_of_rank
from octavo.kv_connector.peers.mapping import Place, Tokens
from octavo.kv_connector.worker.cache_bytes import CacheBytes

HEAD, LAYERS, POISON = 4, 2, -7.0
FACTS = {"dtype": "float32"}


class Side(NamedTuple):
    """A rank's cache and its description; block i of a request's list is `table[i]`."""

    cache: KVCachePool
    described: CacheDescription
    table: list[int]

    def places(self, tokens: Tokens) -> list[Place]:
        size = self.described.groups[0].block_size
        return [(0, place) for place in range(tokens.start // size, -(-tokens.end // size))]

    def blocks(self, places: Sequence[Place]) -> list[int]:
        return [self.table[place] for _, place in places]

    @property
    def bytes(self) -> CacheBytes:
        return CacheBytes(self.cache.data, 1 << 30, description=self.described)

    def rows(self, places: Sequence[Place]) -> np.ndarray:
        memory = torch.zeros((len(places), self.cache.block_bytes), dtype=torch.uint8)
        self.bytes.read(self.blocks(places), list(memory))
        return memory.numpy()

    def take(self, places: Sequence[Place], rows: np.ndarray) -> None:
        self.bytes.write(self.blocks(places), list(torch.from_numpy(rows)))

    def slots(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Kernel block and place of each token, as attention finds them."""
        table, numbers = self.cache.block_maps[0], torch.arange(tokens)
        kernels = torch.tensor(list(table.expand(self.table)))
        return kernels[numbers // table.kernel_block_size], numbers % table.kernel_block_size

    def values(self, tokens: int) -> np.ndarray:
        """[layers, heads, tokens, channels] as attention reads them."""
        kernels, places = self.slots(tokens)
        return torch.stack([view[kernels, :, places].transpose(0, 1) for view in self.cache.views]).numpy()

    def fill(self, values: np.ndarray) -> None:
        kernels, places = self.slots(values.shape[2])
        for view, own in zip(self.cache.views, torch.from_numpy(values), strict=True):
            view[kernels, :, places] = own.transpose(0, 1)


def make_side(
    layout: str, block_size: int, ratio: int, *, heads: int = 2, rank: int = 0, ranks: int = 1, tokens: int = 200
) -> Side:
    layers = tuple(range(LAYERS))
    model = CacheGroup(kind="full", block_size=block_size, layers=layers, num_heads=heads, num_channels=2 * HEAD)
    own = CacheGroup(
        kind="full",
        block_size=block_size,
        layers=layers,
        num_heads=heads_of_rank(heads, rank, ranks)[1],
        num_channels=2 * HEAD,
    )
    table = TableSpec(group=0, layers=layers, backend="reference", kernel_block_size=block_size // ratio)
    num_blocks = -(-tokens // block_size)
    pool = KVCachePool(
        [own],
        num_blocks=num_blocks + 3,
        dtype=torch.float32,
        device=torch.device("cpu"),
        layout=LAYOUTS[layout],
        tables=[table],
    )
    pool.buffer.fill_(POISON)
    described = describe(
        [model], [table], layout, block_bytes=pool.block_bytes, itemsize=4, facts=FACTS, rank=rank, num_ranks=ranks
    )
    ids = random.Random(block_size).sample(range(1, num_blocks + 3), num_blocks)
    return Side(pool, described, ids)


def numbers(heads: int, tokens: int) -> np.ndarray:
    """A value of each layer, global head, token and channel."""
    shape = (LAYERS, heads, tokens, 2 * HEAD)
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


def slice_of(values: np.ndarray, rank: int, num_ranks: int) -> np.ndarray:
    """The global heads that a rank has, of [layers, heads, tokens, channels]."""
    heads = values.shape[1]
    first = rank * heads // num_ranks
    return values[:, first : first + max(heads // num_ranks, 1)]
