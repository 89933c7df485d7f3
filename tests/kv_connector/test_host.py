"""`host`'s scheduler half: which block is in which slot, and which in a file behind (O.3, O.7)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from octavo.cache.groups import CacheGroup
from octavo.config.kv_transfer import read_kv_transfer
from octavo.config.settings import ConfigError
from octavo.kv_connector.host import IN_FILE, Host
from octavo.kv_connector.keys import Pair, make_key
from octavo.kv_connector.orders import EngineSide, Report
from octavo.kv_connector.stored import StoredConnector

SIZE = 1024  # bytes of a block
PAIRS = [Pair(number, make_key(number.to_bytes(16, "big"), 0)) for number in range(1, 5)]


def connect(folder: Path, num_slots: int, **extra: object) -> StoredConnector:
    return made({"cpu_bytes_to_use": num_slots * SIZE, "storage_path": str(folder), **extra})


def made(given: Mapping[str, object]) -> StoredConnector:
    transfer = read_kv_transfer({"kv_connector": "host", "kv_role": "kv_both", "kv_connector_extra_config": given})
    groups = (CacheGroup(kind="full", block_size=16, layers=(0,)),)
    side = EngineSide(
        transfer=transfer, groups=groups, block_bytes=SIZE, num_blocks=9, identity="", ask=lambda *_: [[]]
    )
    connector = Host(transfer).scheduler_half(side)
    assert isinstance(connector, StoredConnector)
    return connector


def test_O_7_a_file_that_comes_while_a_load_is_ordered_is_loaded_or_missing_and_never_neither(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread writes what gave way, or removes old files, between any two looks at the folder."""
    index: Any = connect(tmp_path, 2).index
    for first_look in (False, True):
        looks = iter([first_look] * len(PAIRS) + [not first_look] * 99)
        monkeypatch.setattr(index, "_has_file", lambda key, looks=looks: next(looks))
        order, missing = index.order_load(7, PAIRS)
        ordered = [] if order is None else order.blocks
        assert sorted([*ordered, *missing]) == [pair.block for pair in PAIRS]
        index.ended(7, None)


def test_O_3_what_a_load_reads_gives_way_to_nothing_and_what_gave_way_is_kept_elsewhere(tmp_path: Path) -> None:
    index: Any = connect(tmp_path, 2).index
    order = index.order_save(1, PAIRS[:2])
    assert order.slots == [0, 1] and not order.spills
    assert index.order_save(2, PAIRS[2:3]) is None, "both are being filled"
    index.ended(1, Report(number=1))
    load, missing = index.order_load(3, PAIRS[:3])
    assert load.slots == [0, 1] and missing == [PAIRS[2].block]
    assert index.order_save(4, PAIRS[2:]) is None, "both are being read"
    index.ended(3, Report(number=3))
    order = index.order_save(5, PAIRS[2:])
    assert order.spills == [(0, PAIRS[0].key), (1, PAIRS[1].key)] and index.stored_bytes == 0
    index.ended(5, Report(number=5))
    assert index.stored_bytes == 2 * SIZE
    path = tmp_path / "00" / f"{PAIRS[0].key[:16].hex()}-0.safetensors"
    path.parent.mkdir()
    path.touch()
    while not index.is_known("asks", [pair.key for pair in PAIRS], [False] * len(PAIRS)):
        index.wait(60)
    load, missing = index.order_load(6, PAIRS)
    assert load.slots == [IN_FILE, 0, 1] and missing == [PAIRS[1].block]


def test_O_4_files_that_cannot_hold_a_block_are_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"storage_bytes=5119: a block's file has up to 5120 bytes"):
        connect(tmp_path, 2, storage_bytes=5119)
    connect(tmp_path, 2, storage_bytes=5120)


@pytest.mark.parametrize(
    ("extra", "num_slots"),
    [
        ({"num_cpu_blocks": 5}, 5),
        ({"num_cpu_blocks": 5, "block_size": 16}, 5),
        ({"num_cpu_blocks": 5, "block_size": 64}, 20),
        ({"num_cpu_blocks": 5, "blocks_per_chunk": 2}, 10),
        ({"cpu_bytes_to_use": 7 * SIZE, "block_size": 64}, 7),
    ],
)
def test_vllms_number_of_blocks_counts_blocks_of_its_block_size(extra: dict[str, int], num_slots: int) -> None:
    index: Any = made(extra).index
    assert len(index._free) == num_slots


def test_a_block_size_that_the_caches_blocks_do_not_divide_is_refused() -> None:
    with pytest.raises(ConfigError, match="block_size=24: must be a multiple of the cache's blocks, of 16 tokens"):
        made({"num_cpu_blocks": 5, "block_size": 24})
