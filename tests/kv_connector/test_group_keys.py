"""Which entries of a cache's groups move by name: blocks of tokens, windows, and states at their borders (O.5)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest

from octavo.cache.groups import CacheGroup
from octavo.cache.parts import WHOLE_BLOCKS
from octavo.config.kv_transfer import read_kv_transfer
from octavo.config.settings import ConfigError
from octavo.kv_connector import Transfer
from octavo.kv_connector.keys import Pair, file_path, group_keys, make_key
from octavo.kv_connector.orders import EngineSide, Order
from octavo.kv_connector.stored import Index, StoredConnector
from octavo.kv_connector.table import make_kind
from octavo.request.request import Request
from octavo.request.sampling_params import SamplingParams

HOST = {"kv_connector": "host", "kv_role": "kv_both"}
PARTS = dataclasses.replace(WHOLE_BLOCKS, blocks=3)
GROUPS = (
    CacheGroup(kind="full", block_size=16, layers=(0,)),
    CacheGroup(kind="sliding", window=20, block_size=16, layers=(1,)),
    CacheGroup(kind="inputs", chunk=64, block_size=16, layers=(2,), parts=PARTS),
    CacheGroup(kind="state", block_size=64, layers=(2,), parts=PARTS, unit=16, interval=2),
)
FULL, SLIDING, STATE = 0, 1, 5  # first columns; the inputs have 2 to 4
NAMES = tuple(number.to_bytes(16, "big") for number in range(20))


class Kept(Index):
    """Has the keys that it is given."""

    def __init__(self, keys: set[bytes]) -> None:
        self.keys = keys

    def __contains__(self, key: object) -> bool:
        return key in self.keys

    def order_load(self, number: int, pairs: Sequence[Pair]) -> tuple[Order | None, list[int]]:
        raise AssertionError("nothing is loaded")

    def order_save(self, number: int, pairs: Sequence[Pair]) -> Order | None:
        raise AssertionError("nothing is saved")


def make_request(num_tokens: int) -> Request:
    request = Request("r", list(range(num_tokens)), SamplingParams(), max_tokens=1, seed=0, eos_token_ids=frozenset())
    request.block_hashes.extend(NAMES[: num_tokens // 16])
    return request


def connect(*states: int) -> StoredConnector:
    """What has K and V of 300 tokens, and states at borders."""
    keys = {make_key(name, column) for name in NAMES[:18] for column in (FULL, SLIDING)}
    keys |= {make_key(NAMES[border // 16 - 1], STATE + part) for border in states for part in range(3)}
    transfer = read_kv_transfer({**HOST, "kv_connector_extra_config": {"cpu_bytes_to_use": "1M"}})
    side = EngineSide(
        transfer=transfer, groups=GROUPS, block_bytes=1024, num_blocks=99, identity="", ask=lambda *_: [[]]
    )
    return StoredConnector(side, Kept(keys))


def test_H_4_a_hit_is_the_longest_border_at_which_all_blocks_of_a_state_are() -> None:
    connector, request = connect(64, 128, 256), make_request(300)
    assert connector.match(request, 0) == 256
    assert connector.match(request, 96) == 160, "behind what is here already"
    assert [connector.shorter(request, 0, end) for end in (255, 130, 128, 127, 64, 63)] == [128, 128, 128, 64, 64, 0]
    assert connector.shorter(request, 96, 255) == 128 and connector.shorter(request, 96, 120) == 96
    assert connector.match(make_request(256), 0) == 128, "the last token reads what its chunk brought before it"
    connector.index.keys.discard(make_key(NAMES[15], STATE + 1))  # type: ignore[attr-defined]
    assert connector.match(request, 0) == 128, "a state without one of its blocks is none"


def moved(pairs: Sequence[Pair]) -> list[tuple[int, int]]:
    """(number of the name, column) of each; a block has the number of its place in the tables below."""
    return [(int.from_bytes(pair.key[:16], "big"), pair.key[16]) for pair in pairs]


def transfer(start: int, end: int, num_tokens: int = 300) -> Transfer:
    tables = [tuple(range(1, end // group.block_size * group.parts.blocks + 1)) for group in GROUPS]
    tables[1] = (*[0] * (end // 16 - 2), *tables[1][-2:])  # it has slid on
    return Transfer(
        number=0, request=make_request(num_tokens), start=start, end=end, blocks=tuple(tables), names=NAMES[: end // 16]
    )


def test_O_5_of_states_the_one_that_is_read_comes_and_those_that_are_kept_go() -> None:
    groups = group_keys(GROUPS)
    load = transfer(96, 256)
    found = [moved(list(group.loaded(load))) for group in groups]
    assert found == [
        [(place, FULL) for place in range(6, 16)],
        [(14, SLIDING), (15, SLIDING)],
        [],
        [(15, STATE + part) for part in range(3)],
    ]
    states = groups[3]
    assert moved(list(states.saved(load, 256, has_ended=False))) == [
        (place, STATE + part) for place in (7, 15) for part in range(3)
    ], "every second border, of a prompt whose last border is 256"
    assert not list(states.saved(transfer(128, 192), 192, has_ended=False))
    ended = moved(list(states.saved(transfer(192, 208), 208, has_ended=True)))
    assert ended == [(11, STATE + part) for part in range(3)], "the last one of a request, however long ago"


def test_keys_of_many_columns_are_different_and_files_of_few_keep_their_names() -> None:
    keys = [make_key(NAMES[3], column) for column in (0, 1, 255, 256, 70000)]
    paths = [file_path("f", key) for key in keys]
    assert len(set(keys)) == len(set(paths)) == 5
    assert paths[1] == f"f/00/{NAMES[3].hex()}-1.safetensors"


def test_O_4_a_host_memory_that_holds_no_whole_state_is_refused_by_name() -> None:
    given = {**HOST, "kv_connector_extra_config": {"cpu_bytes_to_use": 3 * 1024}}
    config = read_kv_transfer(given)
    side = EngineSide(transfer=config, groups=GROUPS, block_bytes=1024, num_blocks=9, identity="", ask=lambda *_: [])
    with pytest.raises(ConfigError, match=r"cpu_bytes_to_use=3072: a state .* takes 3 blocks of 1024 bytes.*; raise"):
        make_kind(config).scheduler_half(side)
