"""Blocks that a step in flight still writes are not named ahead of it: who read them would take what was there.

Of a request that ends by a stop token, behind which a step was already issued.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from mapped_memory import MappedMemory
from octavo import LLM, SamplingParams
from octavo.kv_connector.p2p import P2P
from octavo.kv_connector.worker.ways.ipc import IpcWay
from octavo.sched.transfers.loads import Loads
from test_p2p import p2p, with_transfer

PROMPT = "hello world, this is a prompt"


@pytest.mark.parametrize("in_flight", [True, False])
def test_D_4_blocks_are_named_where_nothing_writes_them_any_more(
    in_flight: bool, make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(IpcWay, "memory", MappedMemory)
    monkeypatch.setattr(P2P, "make_way", lambda self, cache: IpcWay(cache, gives=True))
    greedy = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    tokens = make_llm(max_model_len=512).generate([PROMPT], greedy)[0].outputs[0].token_ids
    config = p2p("kv_producer", kv_connector_extra_config={"backend": "ipc"})
    llm = make_llm(max_model_len=512, async_scheduling=in_flight, kv_transfer_config=config)
    told, keep = list[tuple[int, dict[str, Any]]](), Loads.keep

    def noted(self: Loads, request: Any, after: int) -> None:
        keep(self, request, after)
        told.append((request.num_in_flight, request.kv_transfer_params))

    monkeypatch.setattr(Loads, "keep", noted)
    params = SamplingParams(temperature=0.0, max_tokens=200, stop_token_ids=[tokens[3]])
    llm.generate([PROMPT], with_transfer(params, {"do_remote_decode": True}))
    ((num_in_flight, offer),) = told
    assert bool(num_in_flight) == in_flight
    assert ("remote_block_ids" in offer) == (not in_flight)
