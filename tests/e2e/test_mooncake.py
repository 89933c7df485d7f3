"""Mooncake between two processes (K2): the same bits, and a peer that stops, dies, or sends too late."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch

from octavo import LLM
from octavo.config.kv_transfer import read_kv_transfer
from octavo.config.settings import ConfigError
from octavo.kv_connector.orders import Order
from octavo.kv_connector.peers.description import NO_DESCRIPTION
from octavo.kv_connector.table import make_kind
from octavo.kv_connector.worker.cache_bytes import CacheBytes
from octavo.kv_connector.worker.mover import Job
from octavo.kv_connector.worker.pair import Pair, TransferError
from octavo.kv_connector.worker.ways import mooncake
from octavo.kv_connector.worker.ways.mooncake import MooncakeWay
from octavo.kv_connector.worker.ways.regions import region_of
from peer_engine import peer
from test_p2p import PARAMS, PROMPTS, bits, need_library, p2p, prefill, stepping, until_idle, with_transfer

Make = Callable[..., LLM]
FIELDS = {"dtype": "float32", "max_model_len": 512}


def moon(role: str, **more: object) -> dict[str, Any]:
    return p2p(role, kv_connector="MooncakeConnector", **more)


def test_K2_two_processes_give_one_engines_bits_and_a_peer_that_dies_is_recomputed(make_llm: Make):
    need_library("mooncake")
    expected = bits(make_llm(**FIELDS).generate(PROMPTS, PARAMS))
    llm = make_llm(
        **FIELDS,
        enable_prefix_caching=False,
        kv_transfer_config=moon("kv_consumer", kv_transfer_timeout=600, kv_load_failure_policy="recompute"),
    )

    def num_failures(told: list[dict[str, Any]]) -> int:
        before = llm.engine.scheduler.stats().num_load_failures
        assert bits(llm.generate(PROMPTS, [with_transfer(PARAMS, each) for each in told])) == expected
        until_idle(llm)
        return llm.engine.scheduler.stats().num_load_failures - before

    with peer({**FIELDS, "kv_transfer_config": moon("kv_producer", kv_transfer_timeout=600)}) as other:
        for _ in range(2):  # the second time over the same connection
            assert num_failures(other.prefill(PROMPTS)) == 0
        assert llm.engine.scheduler.stats().num_loaded_tokens > 128
        told = other.prefill(PROMPTS)
        other.process.kill()
        other.process.wait()
        assert num_failures(told) == len(PROMPTS)


_HAS_BLOCKS = """
import sys, numpy as np
from mooncake.engine import TransferEngine
data, engine = np.full(8 << 20, 7, np.uint8), TransferEngine()
assert not engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "")
assert not engine.register_memory(data.ctypes.data, data.nbytes)
print(engine.get_rpc_port(), data.ctypes.data, flush=True)
sys.stdin.read()
"""


@pytest.mark.slow  # the library waits for 5 s at least
def test_K2_what_arrives_after_a_read_was_given_up_is_written_nowhere(tmp_path):
    """A stopped peer answers when it goes on: the memory that the bytes were for has no engine any more."""
    need_library("mooncake")
    script = tmp_path / "has_blocks.py"
    script.write_text(_HAS_BLOCKS)
    cache = CacheBytes(torch.zeros((1, 8, 1 << 20), dtype=torch.uint8), 1 << 30)
    way = MooncakeWay(cache, "127.0.0.1", "tcp", 1.0, gives=False)
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, str(script)], stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        port, base = map(int, process.stdout.readline().split())
        region = region_of(cache, str(port).encode(), range(8))
        told = msgspec.msgpack.encode(msgspec.structs.replace(region, base=base))
        job = Job(Order(number=1, is_load=True, blocks=list(range(8))))
        with socket.create_server(("127.0.0.1", 0)) as listener:
            pair = Pair(socket.create_connection(listener.getsockname()), 1.0)
        pair.theirs = msgspec.structs.replace(NO_DESCRIPTION, block_bytes=cache.block_bytes)
        way.take(pair, told, job, [range(8)])
        assert (cache.data == 7).all(), "a read that nothing stops"
        cache.data.zero_()
        rows = pair.state.data
        with torch.inference_mode():
            rows.zero_()
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(TransferError, match="did not send blocks: Mooncake's read"):
            way.take(pair, told, job, [range(8)])
        pair.close()
        process.send_signal(signal.SIGCONT)
        other = Pair(socket.create_connection(("127.0.0.1", port)), 1.0)
        other.theirs = pair.theirs
        way.take(other, told, job, [range(8)])  # it goes on
        other.close()
        process.stdin.close()
    assert not rows.any()


def test_K2_more_runs_than_a_batch_may_hold_go_in_several(make_llm: Make, monkeypatch):
    need_library("mooncake")
    monkeypatch.setattr(mooncake, "_MAX_RUNS", 3)
    fields = {"max_model_len": 512, "kv_cache_layout": "LBNHC"}
    expected = bits(make_llm(**fields).generate(PROMPTS, PARAMS))
    first = make_llm(**fields, kv_transfer_config=moon("kv_producer"))
    second = make_llm(**fields, kv_transfer_config=moon("kv_consumer"))
    told = prefill(first, PROMPTS)
    with stepping(first):
        assert bits(second.generate(PROMPTS, [with_transfer(PARAMS, each) for each in told])) == expected
    until_idle(second)
    until_idle(first)
    assert not second.engine.scheduler.stats().num_load_failures


def test_K2_one_transfer_id_is_offered_once(make_llm: Make, caplog):
    need_library("mooncake")
    first = make_llm(max_model_len=512, kv_transfer_config=moon("kv_producer", kv_transfer_timeout=0.5))
    params = with_transfer(PARAMS, {"do_remote_decode": True, "transfer_id": "mine"}, max_tokens=1)
    told = [output.kv_transfer_params for output in first.generate(PROMPTS[:2], [params, params])]
    assert sum(each is not None for each in told) == 1 and "on offer already" in caplog.text
    until_idle(first)


def refused(**extra: object) -> str:
    with pytest.raises(ConfigError) as caught:
        make_kind(read_kv_transfer(moon("kv_both", kv_connector_extra_config=extra)))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_K2_a_missing_library_is_refused_with_the_lines_that_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "mooncake.engine", None)
    said = refused()
    assert "kv_connector='MooncakeConnector': needs the library mooncake-transfer-engine-non-cuda" in said
    assert "pip install 'octavo[mooncake]' and apt-get install libibverbs1" in said


def test_K2_wrong_values_are_refused_in_one_line():
    need_library("mooncake")
    assert "mooncake_protocol='udp': must be one of tcp, rdma" in refused(mooncake_protocol="udp")
    assert "backend='gloo': unknown key" in refused(backend="gloo")
    assert "num_threads=0: must be a whole number from 1 to 64" in refused(num_threads=0)
