"""Two engines, a prompt computed in one and continued in the other (P, D): the same bits, faults with a deadline."""

from __future__ import annotations

import contextlib
import importlib
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import msgspec
import pytest

import random_models
from engine_checks import GOOD_PROMPT, assert_idle, num_missing_blocks
from mapped_memory import MappedMemory
from octavo import LLM, RequestOutput, SamplingParams
from octavo.config.kv_transfer import read_kv_transfer
from octavo.config.settings import ConfigError
from octavo.kv_connector.p2p import P2P
from octavo.kv_connector.table import make_kind
from octavo.kv_connector.worker.cache_bytes import CacheBytes
from octavo.kv_connector.worker.mover import Job
from octavo.kv_connector.worker.pair import Hello, Pair, TransferError, Welcome
from octavo.kv_connector.worker.ways.gloo import GlooWay
from octavo.kv_connector.worker.ways.ipc import IpcWay
from octavo.kv_connector.worker.ways.nccl import NcclWay
from octavo.rl.transport.gloo import make_gloo
from patience import patient
from ports import free_port

PROMPTS = [GOOD_PROMPT * 9, GOOD_PROMPT * 3 + "x = 1", "nothing that was said before"]
PARAMS = SamplingParams(temperature=0.8, seed=7, max_tokens=12, logprobs=2)
Make = Callable[..., LLM]


def p2p(role: str, **more: object) -> dict[str, Any]:
    """The configuration of one side."""
    return {"kv_connector": "p2p", "kv_role": role, "kv_port": 0, "kv_transfer_timeout": 30, **more}


def with_transfer(params: SamplingParams, said: dict[str, Any] | None, **changes: Any) -> SamplingParams:
    return msgspec.structs.replace(params, extra_args={"kv_transfer_params": said}, **changes)


def prefill(llm: LLM, prompts: list[str], **said: Any) -> list[dict[str, Any]]:
    """What the answers of the first engine say to the second."""
    params = with_transfer(PARAMS, {"do_remote_decode": True, **said}, max_tokens=1)
    told = [output.kv_transfer_params for output in llm.generate(prompts, params)]
    assert all(each is not None for each in told)
    return told  # type: ignore[return-value]


def bits(outputs: list[RequestOutput]) -> list[Any]:
    return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]


@contextlib.contextmanager
def stepping(llm: LLM) -> Iterator[None]:
    """Within: the engine's loop runs, as a server's does. Nobody else may step it then."""
    stop = threading.Event()
    failed: list[BaseException] = []

    def spin() -> None:
        try:
            while not stop.is_set():
                if llm.engine.has_unfinished:
                    llm.engine.step()
                else:
                    stop.wait(0.001)
        except BaseException as error:  # of the test, which is told at the end
            failed.append(error)

    thread = threading.Thread(target=spin)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    assert not failed, f"the engine's loop ended: {failed}"


def until_idle(llm: LLM) -> None:
    while llm.engine.has_unfinished:
        llm.engine.step()
    assert_idle(llm)


CHUNKS = {"kv_cache_layout": "BLHNC", "max_num_batched_tokens": 24, "max_num_seqs": 4}


WAYS: dict[str, dict[str, Any]] = {
    **{name: {"kv_connector": name} for name in ("p2p", "nixl", "mooncake")},
    "push": {"kv_connector": "nixl", "kv_connector_extra_config": {"transfer_mode": "push"}},
}
LIBRARIES = {"nixl": "nixl_cu12", "mooncake": "mooncake.engine"}


def need_library(name: str) -> None:
    """Skip where there is none: Mooncake's wheel needs libibverbs.so.1, which pip does not bring."""
    try:
        importlib.import_module(LIBRARIES.get(name, "octavo"))
    except ImportError as error:
        pytest.skip(f"{name}: {error}")


@pytest.mark.parametrize("name", ["p2p", "nixl", "mooncake"])
@pytest.mark.parametrize("fields", [{}, CHUNKS], ids=["whole", "chunks"])
def test_P_1_N_5_K2_D_2_D_3_a_pair_gives_one_engines_bits_and_computes_one_token_of_a_prompt(
    fields, name, make_llm: Make
):
    need_library(name)
    fields = {"max_model_len": 512, **fields}
    expected = bits(make_llm(**fields).generate(PROMPTS, PARAMS))
    first = make_llm(**fields, kv_transfer_config=p2p("kv_producer", kv_connector=name))
    second = make_llm(**fields, kv_transfer_config=p2p("kv_consumer", kv_connector=name))
    for turn in range(2):  # the second time over the same connection, with other names for the same
        told = prefill(first, PROMPTS)
        assert num_missing_blocks(first), "blocks are kept for who fetches them"
        ids = [each["transfer_id"] for each in told]
        assert len(set(ids)) == len(ids) and not set(ids) & {each["remote_request_id"] for each in told}
        assert second.reset_prefix_cache()
        before = second.engine.scheduler.stats()
        with stepping(first):
            asked = [with_transfer(PARAMS, each) for each in told]
            assert bits(second.generate(PROMPTS, asked)) == expected
        until_idle(first)
        until_idle(second)
        stats = second.engine.scheduler.stats()
        assert not stats.num_load_failures
        loaded = stats.num_loaded_tokens - before.num_loaded_tokens
        found = stats.num_prefix_hits - before.num_prefix_hits  # of what a neighbour has loaded
        assert loaded + found == sum(each["remote_num_tokens"] for each in told) and loaded > 64
        assert stats.num_scheduled_tokens - before.num_scheduled_tokens == len(PROMPTS) * 12, turn
    moved = second.engine.scheduler.loads.connector.stats()
    assert moved.loaded_bytes == first.engine.scheduler.loads.connector.stats().saved_bytes > 0


def test_P_4_O_2_nccl_goes_the_same_way_and_is_refused_without_a_gpu(make_llm: Make, monkeypatch):
    """Its tensors lie beside the cache: on a CPU in the host's memory, and gloo stands for NCCL."""
    extra = {"kv_connector_extra_config": {"backend": "nccl"}}
    with pytest.raises(ConfigError, match=r"extra_config\.backend='nccl': moves blocks from GPU to GPU"):
        make_llm(kv_transfer_config=p2p("kv_producer", **extra))
    monkeypatch.setattr(NcclWay, "make", staticmethod(make_gloo))
    monkeypatch.setattr(P2P, "make_way", lambda self, cache: NcclWay(cache))
    expected = bits(make_llm(max_model_len=512).generate(PROMPTS, PARAMS))
    first = make_llm(max_model_len=512, kv_transfer_config=p2p("kv_producer", **extra))
    second = make_llm(max_model_len=512, kv_transfer_config=p2p("kv_consumer", **extra))
    other = make_llm(max_model_len=512, block_size=32, kv_transfer_config=p2p("kv_consumer", **extra))  # by rows
    for taker in (second, second, other):
        told = prefill(first, PROMPTS)
        with stepping(first):
            assert bits(taker.generate(PROMPTS, [with_transfer(PARAMS, each) for each in told])) == expected
        until_idle(first)
        until_idle(taker)
        assert taker.engine.scheduler.stats().num_loaded_tokens and taker.reset_prefix_cache()
        assert not taker.engine.scheduler.stats().num_load_failures


def test_P_4_D_2_ipc_goes_the_same_way_and_is_refused_without_a_gpu(make_llm: Make, monkeypatch):
    """From a cache that keeps a layer's blocks together, into such, into one that keeps a block's, and by rows."""
    extra = {"kv_connector_extra_config": {"backend": "ipc"}}
    with pytest.raises(ConfigError, match=r"extra_config\.backend='ipc': moves blocks from GPU to GPU"):
        make_llm(kv_transfer_config=p2p("kv_producer", **extra))
    monkeypatch.setattr(IpcWay, "memory", MappedMemory)
    monkeypatch.setattr(P2P, "make_way", lambda self, cache: IpcWay(cache, gives=self._transfer.produces))
    fields = {"max_model_len": 512, "kv_cache_layout": "LBNHC"}
    expected = bits(make_llm(**fields).generate(PROMPTS, PARAMS))
    first = make_llm(**fields, kv_transfer_config=p2p("kv_producer", **extra))
    own = p2p("kv_consumer", **extra)
    takers = [
        make_llm(**{**fields, **other}, kv_transfer_config=own)
        for other in ({}, {"kv_cache_layout": "BLNHC"}, {"block_size": 32})
    ]
    for taker in [*takers, *takers]:
        told = prefill(first, PROMPTS)
        with stepping(first):
            assert bits(taker.generate(PROMPTS, [with_transfer(PARAMS, each) for each in told])) == expected
        until_idle(first)
        until_idle(taker)
        assert taker.engine.scheduler.stats().num_loaded_tokens and taker.reset_prefix_cache()
        assert not taker.engine.scheduler.stats().num_load_failures


Spoil = Callable[[LLM, dict[str, Any]], None]


def refused(make_llm: Make, policy: str, spoil: Spoil, *, timeout: float = 0.5, **fields: Any) -> None:
    first = make_llm(max_model_len=512, kv_transfer_config=p2p("kv_producer", kv_transfer_timeout=timeout))
    second = make_llm(
        max_model_len=512,
        kv_transfer_config=p2p("kv_consumer", kv_transfer_timeout=timeout, kv_load_failure_policy=policy),
        **fields,
    )
    told = prefill(first, PROMPTS[:1])
    spoil(first, told[0])
    started = time.monotonic()
    with stepping(first):
        outputs = second.generate(PROMPTS[:1], with_transfer(PARAMS, told[0]))
    assert time.monotonic() - started < patient(60)
    if policy == "fail":
        assert outputs[0].outputs[0].stop_reason == "kv_load_failed"
    elif not fields:
        assert bits(outputs) == bits(make_llm(max_model_len=512).generate(PROMPTS[:1], PARAMS))
    assert second.engine.scheduler.stats().num_load_failures == 1
    until_idle(second)
    until_idle(first)  # at the latest when its deadline is over


def dead(first: LLM, told: dict[str, Any]) -> None:
    """Nobody listens there any more."""
    told["remote_port"] = free_port()


def silent(first: LLM, told: dict[str, Any]) -> None:
    """Somebody listens, and never says anything."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=4)
    told["remote_port"] = listener.getsockname()[1]
    first._listener = listener  # type: ignore[attr-defined]


def unknown(first: LLM, told: dict[str, Any]) -> None:
    told["transfer_id"] = "another"


@pytest.mark.parametrize("policy", ["fail", "recompute"])
@pytest.mark.parametrize("spoil", [dead, silent, unknown], ids=lambda each: each.__name__)
def test_P_3_D_8_a_peer_that_is_gone_or_silent_ends_the_wait_and_the_policy_decides(spoil, policy, make_llm, caplog):
    refused(make_llm, policy, spoil)
    assert "127.0.0.1" in caplog.text or "first 0 arrived" in caplog.text


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_P_3_blocks_of_another_engine_than_the_one_that_was_named_are_not_taken(policy, name, make_llm: Make, caplog):
    """It listens where the one that was named did, and offers the same tokens under the same id."""
    need_library(WAYS[name]["kv_connector"])
    taker = p2p("kv_consumer", kv_load_failure_policy=policy, **WAYS[name])
    first, second = (
        make_llm(max_model_len=512, kv_transfer_config=config)
        for config in (p2p("kv_producer", engine_id="the new one", kv_transfer_timeout=300, **WAYS[name]), taker)
    )
    expected = bits(make_llm(max_model_len=512).generate(PROMPTS[:1], PARAMS))
    for known in (False, True):  # the second time over a connection that is there
        (told,) = prefill(first, PROMPTS[:1])
        named = {**told, "remote_engine_id": "the old one"}
        with stepping(first):
            (output,) = second.generate(PROMPTS[:1], with_transfer(PARAMS, named))
            assert second.engine.scheduler.stats().num_load_failures == 1 + known
            if policy == "fail":
                assert output.outputs[0].stop_reason == "kv_load_failed"
            else:
                assert bits([output]) == expected
            lines = [line for line in caplog.text.splitlines() if "'the old one'" in line]
            assert len(lines) == 1 and "engine 'the new one' listens there" in lines[0]
            assert second.reset_prefix_cache()
            assert bits(second.generate(PROMPTS[:1], with_transfer(PARAMS, told))) == expected, (
                "the offer is still open"
            )
        assert second.engine.scheduler.stats().num_load_failures == 1 + known
        caplog.clear()
        assert second.reset_prefix_cache()
        until_idle(second)
        until_idle(first)


def test_P_3_an_engine_of_another_cache_is_refused_by_both_names(make_llm: Make, caplog):
    refused(make_llm, "recompute", lambda first, told: None, dtype="bfloat16", timeout=300)  # it says so
    assert "its dtype is 'float32', yours 'bfloat16'" in caplog.text


def test_P_3_a_peer_that_dies_in_the_middle_is_recomputed(make_llm: Make, monkeypatch):
    def dies(*args: Any) -> None:
        raise ConnectionResetError("killed")

    monkeypatch.setattr(GlooWay, "give", dies)
    refused(make_llm, "recompute", lambda first, told: None)


@pytest.mark.parametrize("name", ["p2p", "mooncake"])
def test_N_2_connections_to_engines_that_have_gone_are_let_go(name, make_llm: Make):
    """A side that is started anew listens elsewhere: what the connections to the old one kept ends."""
    need_library(name)
    second = make_llm(max_model_len=512, kv_transfer_config=p2p("kv_consumer", kv_connector=name))
    idle = second.engine.core._executor._worker._connector._mover._handler._idle
    for _ in range(3):
        first = make_llm(max_model_len=512, kv_transfer_config=p2p("kv_producer", kv_connector=name))
        (told,) = prefill(first, PROMPTS[:1])
        with stepping(first):
            second.generate(PROMPTS[:1], with_transfer(PARAMS, told))
        until_idle(second)
        assert second.reset_prefix_cache()
        assert list(idle) == [(told["remote_host"], told["remote_port"])]
        first.close()
        for pair in (pair for pairs in idle.values() for pair in pairs):
            pair.settle()
            assert pair.says_something(60), "the end has come here"
    assert not second.engine.scheduler.stats().num_load_failures


def test_P_3_what_a_peer_took_after_the_blocks_were_given_up_does_not_count(make_llm: Make, monkeypatch):
    """Ways that read the other side's memory: who has it stops waiting, and the reader ends after that."""
    given_up = threading.Event()

    def gives_up(*args: Any) -> None:
        given_up.set()
        raise TransferError("it was not read in time")

    def takes_too_long(way: GlooWay, pair: Pair, *args: Any) -> None:
        assert given_up.wait(patient(30))
        until = time.monotonic() + patient(30)
        while not pair.is_broken_off and time.monotonic() < until:  # who gave up tells that by closing
            time.sleep(0.001)

    monkeypatch.setattr(GlooWay, "give", gives_up)
    monkeypatch.setattr(GlooWay, "take", takes_too_long)
    refused(make_llm, "recompute", lambda first, told: None)


def test_D_6_an_abort_on_either_side_gives_all_blocks_back(make_llm: Make):
    first = make_llm(max_model_len=512, kv_transfer_config=p2p("kv_producer", kv_transfer_timeout=300))
    second = make_llm(max_model_len=512, kv_transfer_config=p2p("kv_consumer", kv_transfer_timeout=300))
    tokens = first.generate(PROMPTS[0], PARAMS)[0].prompt_token_ids
    until_idle(first)
    for step in range(4):
        told = prefill(first, PROMPTS[:1])[0]
        second.engine.add(f"x{step}", tokens, with_transfer(PARAMS, told))
        for _ in range(step):
            second.engine.step()
        second.engine.abort([f"x{step}"])
        until_idle(second)
        until_idle(first)
    assert not first.engine.scheduler.stats().num_expired_holds, "no deadline brought them back"


def test_P_1_one_transfer_id_is_offered_once_and_what_lacks_is_computed_here(make_llm: Make, caplog):
    first = make_llm(max_model_len=512, kv_transfer_config=p2p("kv_both", kv_transfer_timeout=0.5))
    params = with_transfer(PARAMS, {"do_remote_decode": True, "transfer_id": "mine"}, max_tokens=1)
    told = [output.kv_transfer_params for output in first.generate(PROMPTS[:2], params)]
    assert [each and each["transfer_id"] for each in told] == ["mine", "mine-1"] and not caplog.text
    until_idle(first)
    told = [output.kv_transfer_params for output in first.generate(PROMPTS[:2], [params, params])]
    assert sum(each is not None for each in told) == 1 and "on offer already" in caplog.text
    until_idle(first)
    outputs = first.generate(PROMPTS[2], with_transfer(PARAMS, {"do_remote_prefill": True, "transfer_id": "mine"}))
    assert outputs[0].outputs[0].finish_reason in ("stop", "length") and "remote_host" in caplog.text


def test_P_9_a_host_that_is_not_named_is_not_connected_to(make_llm: Make, caplog):
    second = make_llm(max_model_len=512, kv_transfer_config=p2p("kv_consumer", kv_peers=["192.0.2.7"]))
    with socket.create_server(("127.0.0.1", 0)) as sock:
        said = {"do_remote_prefill": True, "transfer_id": "x", "remote_num_tokens": 8}
        said |= {"remote_host": "127.0.0.1", "remote_port": sock.getsockname()[1]}
        (output,) = second.generate(PROMPTS[2], with_transfer(PARAMS, said))
        until_idle(second)
        sock.settimeout(0.2)
        with pytest.raises(TimeoutError):  # neither for the blocks nor to give them up
            sock.accept()
    assert output.outputs[0].finish_reason in ("stop", "length") and "kv_peers" in caplog.text


def test_P_3_a_peer_that_is_gone_when_blocks_are_to_go_is_told_at_once_and_in_one_line(capfd):
    """It asked, and died: nobody listens where the group was to meet."""
    port = free_port()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        other = socket.create_connection(listener.getsockname())
        pair = Pair(listener.accept()[0], 60.0)
    other.close()
    started, job = time.monotonic(), cast(Job, None)
    with contextlib.closing(pair), pytest.raises(TransferError, match=rf"port {port} cannot be reached"):
        GlooWay(cast(CacheBytes, None)).give(pair, str(port).encode(), job, [[1]])
    assert time.monotonic() - started < patient(30) and "frame #" not in capfd.readouterr().err


def test_a_port_that_is_taken_is_refused(make_llm: Make):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{port}.*cannot be listened on"):
            make_llm(kv_transfer_config=p2p("kv_producer", kv_port=port))


@pytest.mark.parametrize("host", ["not.an.ip.here.invalid", "203.0.113.7", "::1"])
def test_an_address_of_another_machine_is_refused_by_kv_ip(make_llm: Make, host: str):
    with pytest.raises(ConfigError, match=rf"kv_ip=.{host}.: is no IPv4 address of this machine"):
        make_llm(kv_transfer_config=p2p("kv_producer", kv_ip=host))


def test_an_address_that_nobody_reaches_is_refused():
    with pytest.raises(ConfigError, match=r"kv_ip='0\.0\.0\.0': is told to peers, who cannot reach that; give the"):
        make_kind(read_kv_transfer(p2p("kv_producer", kv_ip="0.0.0.0")))
    make_kind(read_kv_transfer(p2p("kv_consumer", kv_ip="0.0.0.0")))  # which listens nowhere


def test_N_a_missing_library_is_refused_with_the_line_that_installs_it(make_llm: Make, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *rest: None)
    with pytest.raises(ConfigError, match=r"needs the library nixl-cu12 or nixl-cu13; pip install 'octavo\[nixl\]'"):
        make_kind(read_kv_transfer(p2p("kv_both", kv_connector="NixlConnector")))


def test_N_3_sides_that_move_bytes_in_other_ways_are_refused_by_both_names(make_llm: Make, monkeypatch):
    monkeypatch.setattr(GlooWay, "name", "another")
    first = make_llm(max_model_len=512, kv_transfer_config=p2p("kv_producer", kv_transfer_timeout=300))
    told = prefill(first, PROMPTS[:1])[0]
    for hello, said in [
        (Hello(way="gloo", cache=msgspec.Raw(b"\x80")), "its blocks go by another, yours come by gloo"),
        (Hello(protocol=1, way="another", cache=msgspec.Raw(b"\x80")), "speaks protocol 5 of octavo's, you speak 1"),
    ]:
        address = told["remote_host"], told["remote_port"]
        with stepping(first), contextlib.closing(socket.create_connection(address)) as sock:
            pair = Pair(sock, 60.0)
            pair.send(hello)
            assert said in pair.receive(Welcome).refused
    assert first.engine.scheduler.loads.connector.release([told["transfer_id"]]) == 1
    until_idle(first)


LONG = [GOOD_PROMPT * 30, *PROMPTS[1:]]
EXTRA_WRITE = {"kv_connector_extra_config": {"transfer_mode": "write"}}


def test_T_2_T_5_C_13_a_window_that_slides_comes_from_smaller_blocks_and_nobody_else_finds_what_is_not_whole(
    make_llm: Make, tmp_path
):
    """The first engine has dropped, of a block there, what the request reads no more: others compute that block."""
    fields: dict[str, Any] = {
        **random_models.settings_of(random_models.GEMMA, tmp_path),
        "skip_tokenizer_init": True,
        "max_model_len": 512,
        "max_num_batched_tokens": 48,
    }
    rng = random.Random(5)
    # of 150 tokens the last 6 are a chunk, so of the window of 40 before them the first engine has those from 96 on:
    # a block of tokens 64 to 127 comes in part, and who has only 129 of these tokens reads more of it
    prompts = [[rng.randrange(3, 300) for _ in range(length)] for length in (290, 150, 97)]
    shorter = [prompt[: length // 64 * 64 + 1] for prompt, length in zip(prompts, (280, 140, 96), strict=True)]

    def answers(llm: LLM, prompts: list[list[int]], told: list[dict[str, Any] | None]) -> list[Any]:
        asked = [with_transfer(PARAMS, each, ignore_eos=True) for each in told]
        return bits(llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], asked))

    for sizes in ((16, 64), (64, 16), (16, 128)):
        alone = make_llm(**fields, block_size=sizes[1], enable_prefix_caching=False)
        first = make_llm(**fields, block_size=sizes[0], kv_transfer_config=p2p("kv_producer"))
        second = make_llm(**fields, block_size=sizes[1], kv_transfer_config=p2p("kv_consumer"))
        params = with_transfer(PARAMS, {"do_remote_decode": True}, max_tokens=1, ignore_eos=True)
        told = [first.generate({"prompt_token_ids": prompt}, params)[0].kv_transfer_params for prompt in prompts]
        with stepping(first):
            assert answers(second, prompts, told) == answers(alone, prompts, [None] * 3)
        until_idle(first)
        until_idle(second)
        stats = second.engine.scheduler.stats()
        assert not stats.num_load_failures and stats.num_scheduled_tokens == len(prompts) * 12
        assert answers(second, shorter, [None] * 3) == answers(alone, shorter, [None] * 3)


def test_N_3_N_5_one_side_that_pushes_and_one_that_pulls_are_refused_by_both_names(make_llm: Make, caplog):
    need_library("nixl")
    expected = bits(make_llm(max_model_len=512).generate(PROMPTS[:1], PARAMS))
    first = make_llm(max_model_len=512, kv_transfer_config=p2p("kv_producer", kv_transfer_timeout=300, **WAYS["push"]))
    config = p2p("kv_consumer", kv_load_failure_policy="recompute", **WAYS["nixl"])
    second = make_llm(max_model_len=512, kv_transfer_config=config)
    told = prefill(first, PROMPTS[:1])
    with stepping(first):
        assert bits(second.generate(PROMPTS[:1], with_transfer(PARAMS, told[0]))) == expected
    assert "its blocks go by nixl, pushed, yours come by nixl" in caplog.text
    until_idle(second)
    until_idle(first)
    with pytest.raises(ConfigError, match="transfer_mode='write': must be one of pull, push"):
        make_kind(read_kv_transfer(p2p("kv_both", kv_connector="nixl", **EXTRA_WRITE)))


@pytest.mark.parametrize("way", ["nixl", "push"])
def test_N_5_a_thread_in_which_nixl_works_was_entered(way: str, make_llm: Make, monkeypatch: pytest.MonkeyPatch):
    """A GPU's driver knows no new one: UCX then passes NVLink by, or fails."""
    need_library("nixl")
    from octavo.kv_connector.worker.ways.nixl_agent import NixlAgent

    entered, worked, begin = set[int](), set[int](), NixlAgent.begin

    def beginning(agent: NixlAgent, *args: Any) -> Any:
        worked.add(threading.get_ident())
        return begin(agent, *args)

    monkeypatch.setattr(NixlAgent, "begin", beginning)
    monkeypatch.setattr(CacheBytes, "enter_thread", lambda _: entered.add(threading.get_ident()))
    first = make_llm(max_model_len=512, kv_transfer_config=p2p("kv_producer", **WAYS[way]))
    second = make_llm(max_model_len=512, kv_transfer_config=p2p("kv_consumer", **WAYS[way]))
    told = prefill(first, PROMPTS[:1])
    with stepping(first):
        second.generate(PROMPTS[:1], with_transfer(PARAMS, told[0]))
    until_idle(second)
    until_idle(first)
    assert worked and worked <= entered
