"""kv_transfer_config: what can be used is read, and whatever else is refused in one line that names it."""

from __future__ import annotations

import contextlib
import json
import socket
from pathlib import Path

import pytest

from octavo.cache.groups import CacheGroup
from octavo.config.engine_config import load_config
from octavo.config.kv_peers import Peers
from octavo.config.kv_transfer import EXTRA, NO_TRANSFER, read_kv_transfer
from octavo.config.settings import ConfigError
from octavo.kv_connector.table import ALIASES, TABLE, check_early, check_groups, make_kind

GOOD = {"kv_connector": "host", "kv_role": "kv_both", EXTRA: {"cpu_bytes_to_use": "64M"}}


def read(**changes: object) -> object:
    given = {key: value for key, value in {**GOOD, **changes}.items() if value is not ...}
    return make_kind(read_kv_transfer(given))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kv_conector": "host"}, "kv_conector='host': unknown key; did you mean kv_connector?"),
        ({"kv_connector": "hosts"}, "kv_connector='hosts': unknown: known are"),
        ({"kv_connector": ...}, "kv_connector='': must name a connector"),
        ({"kv_role": ...}, "kv_role=None: must be one of kv_producer, kv_consumer, kv_both"),
        ({"kv_role": "both"}, "kv_role='both': must be one of"),
        ({"kv_connector": "P2pNcclConnector", EXTRA: {"proxy_ip": "::1"}}, "proxy_ip='::1': belongs to vLLM's proxy"),
        ({"kv_buffer_size": 1.5}, "kv_buffer_size=1.5: must be a whole number at least 0"),
        ({"kv_buffer_size": "much"}, "kv_buffer_size='much': must be a whole number"),
        ({"kv_buffer_size": "1e999"}, "kv_buffer_size='1e999': must be a whole number"),
        ({"kv_rank": True}, "kv_rank=True: must be a whole number"),
        ({EXTRA: {"cpu_bytes_to_use": "4M", "storage_bytes": "1G"}}, "storage_bytes='1G': is the size of files, and"),
        ({EXTRA: {"cpu_bytes_to_use": "4M", "num_cpu_blocks": 9}}, "num_cpu_blocks=9: says what cpu_bytes_to_use says"),
        ({EXTRA: {"num_cpu_blocks": 0}}, "num_cpu_blocks=0: must be a whole number at least 1"),
        ({EXTRA: {"num_cpu_blocks": 9, "block_size": "x"}}, "block_size='x': must be a whole number at least 1"),
        (
            {EXTRA: {"num_cpu_blocks": 9, "block_size": 64, "blocks_per_chunk": 4}},
            "block_size=64: says what blocks_per_chunk says; leave one of them out",
        ),
        ({"kv_port": 70000}, "kv_port=70000: must be a whole number from 0 to 65535"),
        ({"kv_load_failure_policy": "ignore"}, "must be one of fail, recompute"),
        ({"kv_transfer_timeout": 0}, "kv_transfer_timeout=0: must be seconds above 0"),
        ({"kv_lookup_timeout": "1"}, "kv_lookup_timeout='1': must be seconds above 0"),
        ({"enable_permute_local_kv": True}, "blocks are never permuted"),
        ({EXTRA: []}, "expected a mapping"),
        ({EXTRA: {}}, "cpu_bytes_to_use=None: must be bytes, at least 1"),
        ({EXTRA: {"cpu_bytes_to_use": 0}}, "cpu_bytes_to_use=0: must be bytes, at least 1"),
        ({EXTRA: {"cpu_bytes_to_use": -5}}, "cpu_bytes_to_use=-5: must be bytes"),
        ({EXTRA: {"cpu_bytes_to_use": "many"}}, "cpu_bytes_to_use='many': must be bytes"),
        ({EXTRA: {"cpu_bytes_to_use": 1 << 30, "eviction_policy": "fifo"}}, "must be one of lru, arc"),
        ({EXTRA: {"cpu_bytes_to_use": 1 << 30, "store_threshold": -1}}, "store_threshold=-1"),
        ({EXTRA: {"cpu_bytes_to_us": 1}}, "cpu_bytes_to_us=1: unknown key; did you mean cpu_bytes_to_use?"),
        ({"kv_connector": "shared_storage", EXTRA: {}}, "shared_storage_path=None: must name a folder"),
        ({"kv_connector": "shared_storage", EXTRA: {"shared_storage_path": "/proc/no"}}, "cannot be used"),
        ({"kv_connector": "Missing", "kv_connector_module_path": "no.such.module"}, "does not load: No module named"),
        ({"kv_connector": "loads", "kv_connector_module_path": "json"}, "is no connector: it has no scheduler_half"),
    ],
)
def test_a_wrong_key_or_value_is_refused_in_one_line(changes, said):
    with pytest.raises(ConfigError) as caught:
        read(**changes)
    assert said in str(caught.value) and str(caught.value).startswith("kv_transfer_config.")
    assert "\n" not in str(caught.value)


def test_vllms_keys_and_names_are_read():
    given = {
        **GOOD,
        "kv_connector": "OffloadingConnector",
        "kv_buffer_device": "cuda",
        "kv_rank": 0,
        "kv_parallel_size": 1,
        "engine_id": "one",
        "kv_load_failure_policy": "recompute",
    }
    for size in (1e9, 5e9, 10**9, "1e1", "1e9", "5000", 0):
        transfer = read_kv_transfer({**given, "kv_buffer_size": size, "kv_port": "21001"})
        assert transfer.kv_port == 21001
    assert (transfer.engine_id, transfer.load_failure_policy, transfer.timeout) == ("one", "recompute", 30.0)
    assert make_kind(transfer) and set(ALIASES.values()) <= set(TABLE)
    assert read_kv_transfer({}) == NO_TRANSFER and read_kv_transfer(GOOD).load_failure_policy == "fail"


def test_the_backends_of_vllms_nixl_are_read(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *rest: name)  # whether it is there or not
    assert read(kv_connector="NixlConnector", **{EXTRA: {"backends": ["UCX"], "num_threads": "4"}})
    with pytest.raises(ConfigError, match="backends='UCX': expected a list of names"):
        read(kv_connector="NixlConnector", **{EXTRA: {"backends": "UCX"}})
    with pytest.raises(ConfigError, match=r"backends=\['GDS'\]: must be \['UCX'\]: that no byte comes late"):
        read(kv_connector="NixlConnector", **{EXTRA: {"backends": ["GDS"]}})


def test_the_command_line_takes_json_and_vllms_size_of_offloading():
    config, _ = load_config(argv_values={"kv_transfer_config": json.dumps(GOOD)}, environ={})
    assert config.kv_transfer_config == GOOD
    config, _ = load_config(argv_values={"kv_offloading_size": "2"}, environ={})
    transfer = read_kv_transfer(config.kv_transfer_config)
    assert transfer.kv_connector == "host" and transfer.extra == {"cpu_bytes_to_use": 2 << 30}
    with pytest.raises(ConfigError, match="expected GiB"):
        load_config(argv_values={"kv_offloading_size": "-2"}, environ={})
    both = {"kv_offloading_size": "2", "kv_transfer_config": {"kv_connector": "host", "kv_role": "kv_both"}}
    with pytest.raises(ConfigError, match=r"kv_transfer_config is given in two ways; leave one of them out"):
        load_config(argv_values=both, environ={})


def test_C_12_layers_that_see_the_whole_prompt_are_refused_by_name():
    groups = (CacheGroup(kind="full", block_size=16, layers=(0,)),)
    transfer = read_kv_transfer(GOOD)
    check_groups(make_kind(transfer), transfer, groups)
    whole = (*groups, CacheGroup(kind="encoder_only", block_size=16, layers=(1, 2)))
    check_groups(make_kind(NO_TRANSFER), NO_TRANSFER, whole)
    said = "kv_connector='host': brings prefixes back, and layer 1 sees the whole prompt"
    with pytest.raises(ConfigError, match=f"{said} .*; drop kv_transfer_config"):
        check_groups(make_kind(transfer), transfer, whole)


def test_lmcache_that_is_not_there_is_refused_with_the_line_that_installs_it(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *rest: None)
    with pytest.raises(ConfigError, match=r"needs the library lmcache: .*; pip install 'octavo\[lmcache\]'"):
        read(kv_connector="LMCacheConnectorV1", **{EXTRA: {"lmcache.remote_url": "lm://127.0.0.1:65432"}})
    with pytest.raises(ConfigError, match="needs the library lmcache"):  # LMCache's own page of vLLM says so
        read(
            kv_connector="LMCacheConnectorV1Dynamic",
            kv_connector_module_path="lmcache.integration.vllm.lmcache_connector_v1",
            **{EXTRA: {}},
        )


def test_what_is_wrong_is_said_before_anything_is_loaded_and_nothing_out_of_tree_is():
    foreign = {"kv_connector": "no.such:Connector", "kv_role": "kv_both"}
    for given in ({}, GOOD, foreign, {**GOOD, "kv_connector_module_path": "no.such"}, inside(foreign)):
        check_early(given)
    for wrong in ({**GOOD, EXTRA: {}}, inside({**GOOD, EXTRA: {}}), inside(), {**GOOD, EXTRA: {"connectors": 3}}):
        with pytest.raises(ConfigError):
            check_early(wrong)


def inside(*children: dict[str, object]) -> dict[str, object]:
    return {"kv_connector": "multi", "kv_role": "kv_both", EXTRA: {"connectors": list(children)}}


def test_the_page_of_connectors_has_every_name_that_is_taken():
    page = (Path(__file__).parents[2] / "docs" / "connectors.md").read_text()
    rows = {line.split("`")[1]: line.split("|")[1] for line in page.splitlines() if line.startswith("| `")}
    assert TABLE.keys() <= rows.keys() and all(name in rows[kind] for name, kind in ALIASES.items())


def test_a_look_up_takes_no_longer_than_a_transfer():
    given = {"kv_connector": "host", "kv_role": "kv_both", "kv_transfer_timeout": 0.5}
    assert read_kv_transfer(given).lookup == 0.5
    assert read_kv_transfer({**given, "kv_lookup_timeout": 0.1}).lookup == 0.1


def peers(*given: str) -> Peers:
    return read_kv_transfer({**GOOD, **({"kv_peers": list(given)} if given else {})}).peers


def test_P_9_blocks_come_from_this_host_alone_unless_others_are_named() -> None:
    own = peers()
    assert all(map(own.trust, ("127.0.0.1", "127.3.2.1", "::1", "::ffff:127.0.0.1", "localhost", "LocalHost")))
    for host in ("192.0.2.1", "8.8.8.8", "0.0.0.0", "::", "224.0.0.1", "a.name", "127.1", "2130706433", "", "x" * 300):
        assert not own.trust(host), host
    for zone in ("a\0b", "\u00e9" * 100, "\ud800", "a" * 300):  # the first three no call of the system takes
        assert not own.trust(f"fe80::1%{zone}"), zone
    assert "this host alone: list its address or network in kv_peers" in own.refusal("192.0.2.1")
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing; raises where there is no way out
        assert own.trust(probe.getsockname()[0])
    named = peers("192.0.2.7", "10.1.0.0/16", "LOCALHOST", "fd00::/8", "::ffff:192.0.2.9", "::ffff:198.51.100.0/120")
    assert all(map(named.trust, ("192.0.2.7", "10.1.2.3", "::ffff:10.1.2.3", "localhost", "127.0.0.1", "fd00::9")))
    assert all(map(named.trust, ("192.0.2.9", "198.51.100.7"))) and not named.trust("198.51.101.7")
    assert not any(map(named.trust, ("192.0.2.8", "10.2.0.1", "127.0.0.2", "a.name", "10.1.0.0/16")))


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ([], "expected hosts, addresses or networks"),
        ([""], "expected hosts, addresses or networks"),
        (5, "expected hosts, addresses or networks"),
        (["10.0.0.1/8"], "is no address or network: 10.0.0.1/8 has host bits set"),
        (["300.1.1.1"], "is no address or network"),
        (["no.such.name.invalid"], "is a name that cannot be looked up"),
    ],
)
def test_P_9_peers_that_are_none_are_refused(value: object, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as error:
        read_kv_transfer({**GOOD, "kv_peers": value})
    assert "kv_peers" in str(error.value)
