"""Which products get a tile of the kernel for gates and ups, and which tile: host rules, no GPU."""

from __future__ import annotations

import pytest
import torch

from octavo.ops.gpu.gated_product import CHANNELS, DEPTH, MAX_ROWS, MIN_ROWS, TILES, serves, tile_for

PROCESSORS = 132
LARGEST_SHARED = 232448  # bytes that a program on an H200 may have


def test_tiles_fit_shared_memory() -> None:
    for tile in TILES:
        assert tile.shared_bytes + 512 < LARGEST_SHARED, tile


@pytest.mark.parametrize(
    ("rows", "n", "k", "expected"),
    [
        (33, 6144, 1024, (64, 1)),
        (128, 6144, 1024, (64, 2)),
        (256, 6144, 1024, (64, 3)),
        (384, 6144, 1024, None),
        (512, 6144, 1024, (128, 3)),
        (64, 24576, 4096, (64, 3)),
        (128, 24576, 4096, (128, 3)),
        (192, 24576, 4096, None),
        (256, 24576, 4096, None),
        (512, 24576, 4096, (256, 3)),
        (513, 6144, 1024, (128, 3)),
        (8192, 6144, 1024, (128, 3)),
        (513, 24576, 4096, None),
    ],
)
def test_the_choice_for_known_models(rows: int, n: int, k: int, expected: tuple[int, int] | None) -> None:
    tile = tile_for(rows, n, k, PROCESSORS)
    assert (None if tile is None else (tile.rows, tile.groups)) == expected


def test_whatever_is_chosen_divides_the_weight() -> None:
    chosen = 0
    for n in range(2 * CHANNELS, 60000, 2 * CHANNELS):
        for rows in (1, MIN_ROWS, 100, 256, MAX_ROWS, 9 * MAX_ROWS):
            tile = tile_for(rows, n, 1024, PROCESSORS)
            assert tile is None or (n % (tile.groups * CHANNELS) == 0 and rows >= MIN_ROWS)
            chosen += tile is not None
    assert chosen > 100


def test_k_is_whole_stages() -> None:
    assert tile_for(64, 6144, 2 * DEPTH, PROCESSORS)
    assert not tile_for(64, 6144, 2 * DEPTH + 8, PROCESSORS)


def test_a_cpu_has_no_such_kernel() -> None:
    x, weight = torch.empty(64, 1024, dtype=torch.bfloat16), torch.empty(6144, 1024, dtype=torch.bfloat16)
    assert not serves(x, weight)
