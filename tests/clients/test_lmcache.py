"""LMCache between two engines over its server: the same bits, whatever was found, late or lost."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine_checks import GOOD_PROMPT, assert_idle
from octavo import LLM, SamplingParams
from octavo.config.settings import ConfigError
from peer_engine import peer
from ports import free_port

pytestmark = pytest.mark.clients

ENVIRONMENT = Path(__file__).resolve().parents[2] / ".venv-clients/lmcache"
PROMPTS = [GOOD_PROMPT * 20, GOOD_PROMPT * 3 + "x = 1", "nothing that was said before"]
PARAMS = SamplingParams(temperature=0.8, seed=7, max_tokens=12, logprobs=2)
MODELS = [{"kv_cache_layout": "BLHNC"}, {"model": "octavo-tiny-hybrid", "kv_cache_dtype": "fp8"}]
Make = Callable[..., LLM]


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> str:
    """The folder of LMCache and what it needs, behind all others."""
    folders = list(ENVIRONMENT.glob("lib/python*/site-packages"))
    if not folders:
        pytest.skip("python tools/client_envs.py lmcache makes its environment")
    monkeypatch.setattr(sys, "path", [*sys.path, str(folders[0])])
    return str(folders[0])


@pytest.fixture
def server(packages: str) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """LMCache's server, and its address."""
    path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), packages)))
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "lmcache.v1.server", "127.0.0.1", str(port), "cpu"],
        env={**os.environ, "PYTHONPATH": path},
        stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    try:
        while process.poll() is None:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
        yield f"lm://127.0.0.1:{port}", process
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def make_llm() -> Iterator[Make]:
    with contextlib.ExitStack() as stack:
        yield lambda **fields: stack.enter_context(LLM(**{"dtype": "float32", "max_model_len": 512, **fields}))


def lmcache(**extra: object) -> dict[str, Any]:
    given = {"lmcache.max_local_cpu_size": 0.2, "lookup_timeout": 60, **extra}
    return {
        "kv_connector": "LMCacheConnectorV1",
        "kv_role": "kv_both",
        "kv_transfer_timeout": 600,
        "kv_connector_extra_config": given,
    }


def bits(llm: LLM) -> list[Any]:
    outputs = llm.generate(PROMPTS, PARAMS)
    return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]


def settle(llm: LLM) -> Any:
    while llm.engine.has_unfinished:
        llm.engine.step()
    assert_idle(llm)
    return llm.engine.scheduler.stats()


@pytest.mark.parametrize("fields", MODELS, ids=["tiny", "hybrid"])
def test_C_13_two_engines_share_a_server_and_a_lost_one_is_computed(fields, packages, server, make_llm: Make):
    url, process = server
    expected = bits(make_llm(**fields))
    shared = lmcache(**{"lmcache.remote_url": url, "lmcache.local_cpu": False})
    with peer({"dtype": "float32", "max_model_len": 512, **fields, "kv_transfer_config": shared}, packages) as other:
        other.prefill([PROMPTS[0][: len(PROMPTS[0]) * 2 // 3], PROMPTS[1]], settle=True)
    llm = make_llm(**fields, kv_transfer_config=shared)
    assert bits(llm) == expected  # what the other process computed, and the rest
    stats = settle(llm)
    assert 64 <= stats.num_loaded_tokens < stats.num_matched_tokens and not stats.num_load_misses
    process.kill()
    process.wait()
    assert llm.reset_prefix_cache() and bits(llm) == expected
    assert settle(llm).num_load_failures == 0


def test_C_13_a_miss_and_a_hit_in_this_hosts_memory(packages, make_llm: Make):
    expected = bits(make_llm(block_size=32))
    llm = make_llm(block_size=32, kv_transfer_config=lmcache())
    assert bits(llm) == expected
    settle(llm)
    assert llm.reset_prefix_cache() and bits(llm) == expected
    assert settle(llm).num_loaded_tokens >= 64


def test_what_does_not_suit_is_refused_in_one_line(packages, make_llm: Make, monkeypatch, tmp_path):
    for extra, said in [
        (
            {"lmcache.use_layerwise": True},
            "lmcache.use_layerwise=True: blocks go to LMCache and come back",
        ),
        ({"lmcache.remote_serde": "cachegen"}, "lmcache.remote_serde='cachegen': changes bits: only naive"),
        ({"lmcache.chunks": 1}, "lmcache.chunks=1: is no setting of LMCache's"),
        ({"lmcache.max_local_cpu_size": "much"}, "='much': has a value that LMCache does not take"),
        ({"lmcache.max_local_cpu_size": 1e6}, "lmcache.max_local_cpu_size=1000000.0: GiB: the host has"),
        ({"chunk_size": 256}, "chunk_size=256: unknown key"),
    ]:
        with pytest.raises(ConfigError) as caught:
            make_llm(kv_transfer_config=lmcache(**extra))
        assert said in str(caught.value) and "\n" not in str(caught.value)
    file = tmp_path / "lmcache.yaml"
    file.write_text("remote_serde: cachegen\n")
    monkeypatch.setenv("LMCACHE_CONFIG_FILE", str(file))
    with pytest.raises(ConfigError, match="remote_serde='cachegen': changes bits"):
        make_llm(kv_transfer_config=lmcache())
    monkeypatch.setenv("LMCACHE_CONFIG_FILE", str(tmp_path / "none.yaml"))
    with pytest.raises(ConfigError, match=r"LMCACHE_CONFIG_FILE='.*none.yaml'"):
        make_llm(kv_transfer_config=lmcache())
