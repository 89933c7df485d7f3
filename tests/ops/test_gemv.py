"""Tiles of products of one row: which the rule chooses, on whatever device."""

from __future__ import annotations

import pytest

from octavo.ops.gemm.gemv import tile_for


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("streams", [False, True])
def test_a_step_is_on_its_way_while_another_one_is_multiplied(normed: bool, gated: bool, streams: bool) -> None:
    """In a ring of one stage it would be multiplied before it has come. Gates of Llama-3.2's sizes among them."""
    stages = set()
    for n in (*range(2048, 40_000, 64), 151_936):
        for k in range(1024, 16_384 + 1, 1024):
            tile = tile_for(n, k, normed, gated, 132, streams)
            if tile is not None and tile.stages:
                stages.add(tile.stages)
                assert k % tile.part == 0
    assert stages and min(stages) >= 2
