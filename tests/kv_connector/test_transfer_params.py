"""What requests say to connectors: kinds by name, and a transfer id for each prompt of a list."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.kv_connector.p2p import _named
from octavo.request import transfer_params
from octavo.request.sampling_params import ParameterError, SamplingParams
from octavo.request.transfer_params import NAME, check, join, of_sibling, split

WRONG: dict[str, tuple[Any, ...]] = {
    "transfer_id": (-1, 1, True, ["x"], {"a": 1}, "", "a" * 100_000),
    "remote_engine_id": (-1, True, ["x"], "a" * 100_000),
    "remote_request_id": (-1, True, ["x"]),
    "remote_host": (1, True, ["127.0.0.1"], {"a": 1}, ""),
    "remote_port": (0, -1, 65536, 1 << 62, True, "9", 1.5),
    "remote_num_tokens": (-1, True, 65536, 1 << 62, "9", 1.5),
    "max_load_tokens": (-1, 1.5, 10**30),
    "do_remote_prefill": ("yes", 1),
    "remote_addresses": ("x", [["h"]], [["h", 0]], [["h", 65536]], [[1, 1]], {"h": 1}),
    "remote_offer": (1, True, ["x"], "a" * 100_000),
    "remote_block_ids": ("x", [1], [["h"]], [[-1]], [[1 << 40]], [[1.5]], {"h": 1}, [[1] * 2000, [1] * 49]),
    "prompts": ("x", {"a": 1}, [1], [None]),
}


@pytest.mark.parametrize("name", WRONG)
def test_P_1_a_field_of_a_wrong_kind_is_refused_by_its_name(name: str) -> None:
    for value in WRONG[name]:
        with pytest.raises(ParameterError) as caught:
            check({name: value}, max_tokens=512)
        assert caught.value.field == f"{NAME}.{name}", (name, value)
        if name != "prompts":
            with pytest.raises(ParameterError) as caught:
                check({"prompts": [{}, {name: value}]}, max_tokens=512)
            assert caught.value.field == f"{NAME}.prompts[1].{name}"
    assert check({name: None}) == {name: None}


def test_P_1_what_is_too_long_is_told_by_the_field_that_was_sent() -> None:
    with pytest.raises(ParameterError) as caught:
        check({"of_a_plugin": "a" * 100_000})
    assert caught.value.field == NAME
    with pytest.raises(ParameterError, match="must be an object"):
        check([1])


def test_P_1_each_prompt_of_a_list_has_a_transfer_id_of_its_own() -> None:
    first = split({"do_remote_decode": True, "transfer_id": "x"}, 3)
    assert [own["transfer_id"] for own in first] == ["x", "x-1", "x-2"]
    assert split({"do_remote_decode": True}, 2) == [{"do_remote_decode": True}] * 2
    told: list[dict[str, Any] | None] = [
        {"do_remote_prefill": True, "transfer_id": own["transfer_id"], "remote_num_tokens": 9 + index, "remote_port": 5}
        for index, own in enumerate(first)
    ]
    answer = join(told)
    assert answer is not None and answer["remote_port"] == 5 and split(answer, 3) == told
    told[1] = None
    answer = join(told)
    assert answer is not None and not split(answer, 3)[1]["do_remote_prefill"]
    assert join([told[0]]) == told[0] and join([None, None]) is None
    for wrong in (answer, {"do_remote_prefill": True, "remote_num_tokens": 9}, {"prompts": 5}):
        with pytest.raises(ParameterError) as caught:
            split(wrong, 2)
        assert caught.value.field == f"{NAME}.prompts"


def test_P_1_a_second_completion_of_a_prompt_neither_offers_nor_fetches() -> None:
    params = SamplingParams(n=2, extra_args={NAME: {"do_remote_prefill": True, "max_load_tokens": 5}, "other": 1})
    own = of_sibling(params).extra_args
    assert own is not None and own["other"] == 1 and own[NAME]["max_load_tokens"] == 5
    assert not own[NAME]["do_remote_prefill"]
    plain = SamplingParams(n=2, extra_args={NAME: {"max_load_tokens": 5}})
    assert of_sibling(plain) is plain
    assert transfer_params.with_own(params, {"a": 1}).extra_args == {NAME: {"a": 1}, "other": 1}


def test_P_1_blocks_whose_numbers_no_cache_has_are_named_by_nobody() -> None:
    """From Python nothing is checked before; what an engine's own thread lays in arrays is."""
    places = [(0, 0), (0, 1)]
    assert _named({"remote_offer": "x", "remote_block_ids": [[3, 4]]}, places) == [3, 4]
    for wrong in (1 << 63, (1 << 64) - 1, 1 << 31, -1):
        assert _named({"remote_offer": "x", "remote_block_ids": [[3, wrong]]}, places) == []
