"""Blocks in Mooncake's store (K2): the same bits, with what other processes put there, under pressure and faults."""

from __future__ import annotations

import contextlib
import random
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine_checks import GOOD_PROMPT
from octavo import LLM, SamplingParams
from octavo.config.kv_transfer import read_kv_transfer
from octavo.config.settings import ConfigError
from octavo.kv_connector.table import make_kind
from octavo.kv_connector.worker.mooncake_store import MooncakeStore
from peer_engine import peer
from ports import free_port
from test_connectors import EXTRA, PROMPTS, bits, host, multi, settle

Make = Callable[..., LLM]
FIELDS: dict[str, Any] = {"max_model_len": 512}


def listens(process: subprocess.Popen[bytes], port: int) -> bool:
    """Wait until the port answers, or the process has ended: others may have taken its ports."""
    while process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return True
    return False


@pytest.fixture
def master() -> Iterator[str]:
    """The address of a master."""
    try:
        import mooncake.store
    except ImportError as error:  # it needs libibverbs.so.1, which pip does not bring
        pytest.skip(str(error))
    binary = Path(mooncake.store.__file__).with_name("mooncake_master")
    for _ in range(5):
        port = free_port()
        process = subprocess.Popen(
            [
                str(binary),
                f"--rpc_port={port}",
                "--rpc_address=127.0.0.1",
                "--metrics_host=127.0.0.1",
                f"--metrics_port={free_port()}",
                "--rpc_thread_num=1",
                "--default_kv_lease_ttl=200",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            if listens(process, port):
                yield f"127.0.0.1:{port}"
                return
        finally:
            process.kill()
            process.wait()
    pytest.skip("mooncake_master does not start on this machine")


def store(master: str, **extra: object) -> dict[str, Any]:
    given = {"master_server_address": master, "global_segment_size": "64M", "local_buffer_size": "4M", **extra}
    return {"kv_connector": "MooncakeStoreConnector", "kv_role": "kv_both", "kv_transfer_timeout": 600, EXTRA: given}


def client_of(llm: LLM) -> Any:
    return llm.engine.core._executor._worker._connector._store._client


def test_K2_a_miss_a_hit_and_a_changed_block_give_the_bits_of_computed_ones(master, make_llm: Make, caplog):
    expected = bits(make_llm(**FIELDS))
    llm = make_llm(**FIELDS, kv_transfer_config=store(master))
    assert bits(llm) == expected
    _, moved = settle(llm)
    assert moved.num_saved_blocks and llm.reset_prefix_cache()
    assert bits(llm) == expected
    stats, _ = settle(llm)
    assert stats.num_loaded_tokens >= 64 and not stats.num_load_misses
    client = client_of(llm)
    for key in llm.engine.scheduler.loads.connector.index._there:
        name = f"octavo-{key.hex()}"
        size = client.get_size(name)
        while client.remove(name):
            pass  # until its lease is over
        assert client.put(name, bytes(size)) == 0
    assert llm.reset_prefix_cache() and bits(llm) == expected
    stats, _ = settle(llm)
    assert stats.num_load_misses and not stats.num_load_failures and "something else for" in caplog.text


def test_K2_another_process_has_put_it_there_and_a_longer_prompt_is_a_partial_hit(master, make_llm: Make):
    expected = bits(make_llm(**FIELDS, kv_cache_layout="BLHNC"))
    fields = {**FIELDS, "kv_cache_layout": "BLHNC"}
    with peer({"dtype": "float32", **fields, "kv_transfer_config": store(master)}) as other:
        other.prefill([prompt[: len(prompt) // 2] for prompt in PROMPTS], settle=True)
        llm = make_llm(**fields, kv_transfer_config=store(master, global_segment_size=0))
        assert bits(llm) == expected
        stats, moved = settle(llm)
        assert 16 <= stats.num_loaded_tokens < stats.num_matched_tokens and moved.num_saved_blocks


def test_K2_C_13_states_of_a_hybrid_come_back(master, make_llm: Make):
    fields = {"model": "octavo-tiny-hybrid", "max_model_len": 512, "kv_cache_dtype": "fp8"}
    prompts = [GOOD_PROMPT * 20, GOOD_PROMPT * 15 + "x = 1"]
    params = SamplingParams(temperature=0.8, seed=7, max_tokens=8, logprobs=1)

    def answers(llm: LLM) -> list[Any]:
        return [(each.outputs[0].token_ids, each.outputs[0].logprobs) for each in llm.generate(prompts, params)]

    expected = answers(make_llm(**fields))
    llm = make_llm(**fields, kv_transfer_config=store(master))
    assert answers(llm) == expected
    settle(llm)
    assert llm.reset_prefix_cache() and answers(llm) == expected
    stats, _ = settle(llm)
    assert stats.num_loaded_tokens >= 64 and not stats.num_load_misses and not stats.num_load_failures


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_K2_a_store_that_fails_is_the_policys_and_one_that_does_not_answer_has_nothing(
    policy, master, make_llm: Make, monkeypatch
):
    fields = {**FIELDS, "block_size": 32}
    expected = bits(make_llm(**fields))
    llm = make_llm(**fields, kv_transfer_config={**store(master), "kv_load_failure_policy": policy})
    bits(llm)
    settle(llm)

    def fails(*_: object) -> bool:
        raise RuntimeError("Mooncake's store did not give a block: it answered -900")

    monkeypatch.setattr(MooncakeStore, "read", fails)
    assert llm.reset_prefix_cache()
    outputs = llm.generate(PROMPTS, [SamplingParams(max_tokens=4)] * 3)
    assert settle(llm)[0].num_load_failures >= 1
    assert (outputs[0].outputs[0].stop_reason == "kv_load_failed") is (policy == "fail")
    monkeypatch.setattr(MooncakeStore, "find", fails)
    num_failures = settle(llm)[0].num_load_failures
    assert llm.reset_prefix_cache() and bits(llm) == expected
    assert settle(llm)[0].num_load_failures == num_failures


def test_K2_C_8_pressure_preemptions_and_a_full_store_change_no_token(master, make_llm: Make):
    rng = random.Random(2)
    prompts = [f"# {number}\n" + GOOD_PROMPT * (number % 5 + 5) for number in rng.choices(range(16), k=24)]
    params = SamplingParams(temperature=0.9, seed=1, max_tokens=6, ignore_eos=True)
    fields: dict[str, Any] = {"max_model_len": 256, "num_gpu_blocks_override": 24, "max_num_seqs": 6}
    alone = make_llm(**fields).generate(prompts, params)
    config = multi(store(master, global_segment_size="16M"), host("2M"))
    del config[EXTRA]["connectors"][0]["kv_transfer_timeout"]
    llm = make_llm(**fields, kv_transfer_config={**config, "kv_load_failure_policy": "recompute"})
    scheduler = llm.engine.scheduler
    for _ in range(2):
        told = {}
        for name, output in enumerate(alone):
            llm.engine.add(str(name), output.prompt_token_ids, params)
        while llm.engine.has_unfinished:
            told |= {output.request_id: output.outputs[0].token_ids for output in llm.engine.step() if output.finished}
            if rng.random() < 0.1 and scheduler.running:  # how full the pool gets depends on how long loads take
                scheduler._preempt(scheduler.running[-1])
        assert [told[str(name)] for name in range(len(alone))] == [output.outputs[0].token_ids for output in alone]
    stats, _ = settle(llm)
    assert stats.num_loaded_tokens and stats.num_preemptions


def test_K2_settings_of_mooncakes_own_file_are_read(master, make_llm: Make, monkeypatch, tmp_path):
    file = tmp_path / "mooncake.json"
    file.write_text(f'{{"master_server_address": "{master}", "global_segment_size": 16777216, "device_name": ""}}')
    monkeypatch.setenv("MOONCAKE_CONFIG_PATH", str(file))
    config = {"kv_connector": "MooncakeStoreConnector", "kv_role": "kv_both", EXTRA: {"local_buffer_size": "4M"}}
    llm = make_llm(**FIELDS, kv_transfer_config=config)
    assert bits(llm) and settle(llm)[1].num_saved_blocks
    file.write_text("[1]")
    with pytest.raises(ConfigError, match=r"MOONCAKE_CONFIG_PATH='.*mooncake.json': cannot be read"):
        make_kind(read_kv_transfer(config))


def test_K2_wrong_values_of_the_store_are_refused_in_one_line(master, make_llm: Make, monkeypatch):
    for extra, said in [
        ({"master_server_address": "somewhere"}, "='somewhere': must name the master of the store: host:port"),
        ({"master_server_address": None}, "master_server_address=None: must name the master"),
        ({"global_segment_size": "much"}, "global_segment_size='much': must be bytes"),
        ({"global_segment_size": "1024T"}, "of local_buffer_size: the host has"),
        ({"protocol": "udp"}, "protocol='udp': must be one of tcp, rdma"),
        ({"lookup_timeout": 0}, "lookup_timeout=0: must be seconds above 0"),
        ({"sgement": 1}, "sgement=1: unknown key"),
        ({"master_server_address": f"127.0.0.1:{free_port()}"}, "nobody listens there: Connection refused"),
    ]:
        with pytest.raises(ConfigError) as caught:
            make_llm(kv_transfer_config=store(master, **extra))
        assert said in str(caught.value) and "\n" not in str(caught.value)
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    with pytest.raises(ConfigError, match="apt-get install libibverbs1"):
        make_kind(read_kv_transfer(store(master)))
