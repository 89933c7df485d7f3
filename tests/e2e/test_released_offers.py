"""Blocks that are on offer and that nobody will fetch: who knows it says so, and nobody waits for a deadline (P, N)."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from engine_checks import num_missing_blocks
from octavo import LLM
from octavo.kv_connector.worker.pair import Ask, Hello, Pair, Told, Welcome
from octavo.kv_connector.worker.ways.gloo import GlooWay
from ports import free_port
from test_p2p import PARAMS, PROMPTS, WAYS, Make, bits, need_library, p2p, prefill, stepping, until_idle, with_transfer

LONG = 300.0  # seconds: a machine under load is not that slow


def sides(make_llm: Make, name: str, policy: str = "recompute", **fields: Any) -> tuple[LLM, LLM]:
    need_library(WAYS[name]["kv_connector"])
    more = {"kv_transfer_timeout": LONG, **WAYS[name]}
    first = make_llm(max_model_len=512, kv_transfer_config=p2p("kv_producer", **more))
    taker = p2p("kv_consumer", kv_load_failure_policy=policy, **more)
    return first, make_llm(max_model_len=512, kv_transfer_config=taker, **fields)


def released(first: LLM, *others: LLM) -> None:
    """All blocks are back, and no deadline brought them."""
    until_idle(first)
    for other in others:
        until_idle(other)
    assert not first.engine.scheduler.stats().num_expired_holds


def computes(second: LLM, said: dict[str, Any]) -> None:
    """Log-probabilities of the whole prompt are wanted."""
    (output,) = second.generate(PROMPTS[:1], with_transfer(PARAMS, said, prompt_logprobs=1))
    assert output.prompt_logprobs and not second.engine.scheduler.stats().num_load_failures


def has_it_all(second: LLM, said: dict[str, Any]) -> None:
    """The cache has what is on offer."""
    expected = bits(second.generate(PROMPTS[:1], PARAMS))
    count = said["remote_num_tokens"] // 16 * 16
    tokens = second.generate(PROMPTS[:1], PARAMS)[0].prompt_token_ids[:count]
    (told,) = (with_transfer(PARAMS, {**said, "remote_num_tokens": count}),)
    assert len(bits(second.generate({"prompt_token_ids": tokens}, told))) == len(expected)
    assert not second.engine.scheduler.stats().num_loaded_tokens


def is_aborted(second: LLM, said: dict[str, Any]) -> None:
    """Its client has gone before a step began."""
    tokens = second.generate(PROMPTS[:1], PARAMS)[0].prompt_token_ids
    assert second.reset_prefix_cache()
    second.engine.add("x", tokens, with_transfer(PARAMS, said))
    second.engine.abort(["x"])
    while second.engine.has_unfinished:
        second.engine.step()


def says_another_length(second: LLM, said: dict[str, Any]) -> None:
    """The offer is of more tokens than the prompt has, so it is none of this prompt."""
    second.generate(PROMPTS[2], with_transfer(PARAMS, said))
    assert not second.engine.scheduler.stats().num_load_failures


def says_other_tokens(second: LLM, said: dict[str, Any]) -> None:
    """The offer is of another prompt."""
    second.generate("y" + PROMPTS[0], with_transfer(PARAMS, said))
    assert second.engine.scheduler.stats().num_load_failures == 1


UNUSED = [computes, has_it_all, is_aborted, says_another_length, says_other_tokens]


@pytest.mark.parametrize(
    ("unused", "name"),
    [*((each, "p2p") for each in UNUSED), *((computes, name) for name in WAYS if name != "p2p")],
    ids=lambda each: getattr(each, "__name__", each),
)
def test_P_C_5_who_will_not_fetch_says_so(unused: Callable[[LLM, dict[str, Any]], None], name: str, make_llm: Make):
    first, second = sides(make_llm, name)
    (said,) = prefill(first, PROMPTS[:1])
    with stepping(first):
        unused(second, said)
    released(first, second)


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("name", WAYS)
def test_P_C_5_who_refuses_the_blocks_says_so(name: str, policy: str, make_llm: Make, caplog):
    first, second = sides(make_llm, name, policy, dtype="bfloat16")
    (said,) = prefill(first, PROMPTS[:1])
    with stepping(first):
        second.generate(PROMPTS[:1], with_transfer(PARAMS, said))
    assert "its dtype is 'float32', yours 'bfloat16'" in caplog.text
    released(first, second)


def test_P_1_what_another_engine_offers_under_the_id_stays(make_llm: Make):
    first, second = sides(make_llm, "p2p")
    (said,) = prefill(first, PROMPTS[:1])
    expected = bits(make_llm(max_model_len=512).generate(PROMPTS[:1], PARAMS))
    with stepping(first):
        computes(second, {**said, "remote_engine_id": "another"})
        connector = second.engine.core._executor._worker._connector
        connector._releases.close()  # it has been said
        assert second.reset_prefix_cache()
        assert bits(second.generate(PROMPTS[:1], with_transfer(PARAMS, said))) == expected
    assert second.engine.scheduler.stats().num_loaded_tokens == said["remote_num_tokens"]
    released(first, second)


def test_P_3_what_is_released_while_it_is_read_is_read_to_the_end(make_llm: Make, monkeypatch):
    """Its bits are those of one engine, and only then the blocks go."""
    expected = bits(make_llm(max_model_len=512).generate(PROMPTS[:1], PARAMS))
    first, second = sides(make_llm, "p2p")
    (said,) = prefill(first, PROMPTS[:1])
    give, held = GlooWay.give, list[int]()

    def gives(way: GlooWay, pair: Pair, asked: bytes, job: Any, pieces: Any) -> None:
        first.engine.core._executor._worker._connector.release([said["transfer_id"]])
        held.append(num_missing_blocks(first))
        give(way, pair, asked, job, pieces)

    monkeypatch.setattr(GlooWay, "give", gives)
    with stepping(first):
        assert bits(second.generate(PROMPTS[:1], with_transfer(PARAMS, said))) == expected
    assert held == [num for num in held if num] and second.engine.scheduler.stats().num_loaded_tokens
    assert not second.engine.scheduler.stats().num_load_failures
    released(first, second)


def test_P_3_a_peer_that_goes_away_over_its_fetch_leaves_no_blocks_on_offer(make_llm: Make, monkeypatch):
    """It asks for blocks and dies: as by kill -9, its connection ends and no word comes."""
    monkeypatch.setattr("octavo.kv_connector.worker.p2p._APPEARS", 0.1)
    first, second = sides(make_llm, "p2p")
    (said,) = prefill(first, PROMPTS[:1])
    worker = first.engine.core._executor._worker._connector
    offer = worker._offers[said["transfer_id"]]
    with stepping(first):
        sock = socket.create_connection((said["remote_host"], said["remote_port"]))
        pair = Pair(sock, 60.0)
        own = second.engine.core._executor._worker._connector._cache.description
        pair.send(Hello(way="gloo", cache=msgspec.Raw(msgspec.msgpack.encode(own))))
        pair.receive(Welcome)
        pair.send(Ask(fetch="x", transfer_id=said["transfer_id"], digest=offer.wanted.digest, places=[], pieces=[]))
        assert not pair.receive(Told).refused and offer.num_readers == 1
        pair.close()
    released(first)


def test_P_3_what_is_released_before_it_is_on_offer_never_is(make_llm: Make):
    first, _ = sides(make_llm, "p2p")
    params = with_transfer(PARAMS, {"do_remote_decode": True, "transfer_id": "early"}, max_tokens=1)
    assert first.engine.scheduler.loads.connector.release(["early", "unknown"]) == 0
    assert first.generate(PROMPTS[:1], params)[0].kv_transfer_params is None
    released(first)
    (told,) = (output.kv_transfer_params for output in first.generate(PROMPTS[:1], params))
    assert told and num_missing_blocks(first)
    assert first.engine.scheduler.loads.connector.release(["early"]) == 1
    released(first)


def test_P_a_sleep_waits_for_no_offer_that_is_released(make_llm: Make):
    """And for none that is not: who asks for it hears why, and releases the offer or asks again."""
    more = {"max_model_len": 512, "enable_sleep_mode": True}
    first = make_llm(**more, kv_transfer_config=p2p("kv_producer", kv_transfer_timeout=LONG))
    (said,) = prefill(first, PROMPTS[:1])
    first.pause_generation("keep")
    with pytest.raises(RuntimeError, match="a transfer holds blocks of the cache"):
        first.sleep(level=2, mode="keep")
    assert first.engine.scheduler.loads.connector.release([said["transfer_id"]]) == 1
    first.sleep(level=2, mode="keep")


def test_P_weights_of_another_version_are_refused_by_both_values(make_llm: Make, caplog):
    first, second = sides(make_llm, "p2p")
    expected = bits(make_llm(max_model_len=512).generate(PROMPTS[:1], PARAMS))
    own = second.engine.scheduler.kv.identity.weights_version
    second.engine.scheduler.set_weights_version("7")
    (said,) = prefill(first, PROMPTS[:1])
    with stepping(first):
        assert bits(second.generate(PROMPTS[:1], with_transfer(PARAMS, said))) == expected
    text = f"its weights are of version {own!r}, yours '7'"
    assert text in caplog.text and second.engine.scheduler.stats().refusal.endswith(text)
    released(first, second)


def test_P_3_loads_that_fail_are_counted_among_the_errors(make_llm: Make):
    second = make_llm(max_model_len=512, kv_transfer_config=p2p("kv_consumer", kv_load_failure_policy="recompute"))
    told = {"do_remote_prefill": True, "remote_host": "127.0.0.1", "transfer_id": "x", "remote_num_tokens": 32}
    told["remote_port"] = free_port()
    second.generate(PROMPTS[:1], with_transfer(PARAMS, told))
    assert second.engine.scheduler.loads.connector.stats().num_errors == 1
