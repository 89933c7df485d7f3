"""An engine that goes away with weights that it was given: the next one has the checkpoint's, and does not serve them.

Nobody asked for those under the name that the server has. A whole update ends it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.torch import load_file, save_file

from engine_rig import PROMPT, params, pid_of, read, running, until
from octavo.checkpoint.hub import find_model
from octavo.rl.session import WeightConflictError
from octavo.serve.engine.async_engine import AsyncEngine
from octavo.serve.engine.refusals import EngineHaltedError, WeightsLostError
from patience import patient
from server_rig import Reply, RunningServer

TINY = find_model("octavo-tiny", None, None)
FIELDS: dict[str, Any] = {"dtype": "bfloat16", "max_model_len": 2048}
BODY = {"prompt": list(range(40)), "max_tokens": 12, "temperature": 0, "return_token_ids": True, "ignore_eos": True}

RELOAD = {"method": "reload_weights"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Other weights for octavo-tiny."""
    path = tmp_path_factory.mktemp("weights")
    old = load_file(TINY / "model.safetensors")
    save_file({name: weight * 1.25 for name, weight in old.items()}, path / "model.safetensors")
    return path


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with RunningServer("--dtype", "bfloat16", "--max-model-len", "2048") as made:
        yield made.wait_ready()


def _engine(server: RunningServer) -> int | None:
    """The engine's process, while there is one."""
    for child in psutil.Process(server.process.pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if "octavo.serve.engine.process" in child.cmdline():
                return child.pid
    return None


def _kill(server: RunningServer) -> None:
    """The engine, and wait for the next one to be there."""
    pid = _engine(server)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    while _engine(server) in (pid, None) or server.get("/weight_info").status != 200:
        threading.Event().wait(0.01)


def _error(reply: Reply) -> tuple[int, str]:
    return reply.status, reply.json()["error"]["code"]


def _figure(server: RunningServer, name: str) -> float:
    lines = server.get("/metrics").body.decode().splitlines()
    return next(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name + "{"))


def _ids(server: RunningServer) -> list[int]:
    reply = server.post("/v1/completions", BODY)
    assert reply.status == 200, reply.body
    found: list[int] = reply.json()["choices"][0]["token_ids"]
    return found


def test_weights_that_went_with_their_engine_are_not_replaced_in_silence(server: RunningServer, folder: Path) -> None:
    """Requests, health and figures say what is missing and what helps; who wants the checkpoint's says so."""
    before = _ids(server)
    new = {"model_path": str(folder), "weight_version": "step-7"}
    assert server.post("/update_weights_from_disk", new).status == 200
    assert _ids(server) != before
    _kill(server)
    refused = server.post("/v1/completions", BODY)
    assert _error(refused) == (503, "weights_lost")
    message = refused.json()["error"]["message"]
    assert "'step-7'" in message and "reload_weights" in message
    for path in ("/health", "/ready", "/health_generate"):
        assert _error(server.get(path)) == (503, "weights_lost"), path
    assert server.get("/liveness").status == 200, "the engine lives: another server would know the weights no better"
    assert "'step-7'" in server.get("/weight_info").json()["lost_because"]
    assert _figure(server, "octavo:weights_missing") == _figure(server, "octavo:weights_lost_total") == 1
    part = server.post("/start_weight_update", {"partial": True})
    assert _error(part) == (409, "weight_update_conflict")
    assert server.post("/collective_rpc", RELOAD).status == 200
    for path in ("/ready", "/health"):
        server.wait_ready(path=path)
    assert _ids(server) == before and _figure(server, "octavo:weights_missing") == 0
    assert server.get("/weight_info").json()["lost_because"] == ""


def test_the_checkpoints_own_weights_are_never_lost(server: RunningServer, folder: Path) -> None:
    """Every engine begins with them: they are back when it is, and serve."""
    assert server.post("/update_weights_from_disk", {"model_path": str(folder)}).status == 200
    wanted = _ids(server)
    assert server.post("/collective_rpc", RELOAD).status == 200
    before = _ids(server)
    assert before != wanted
    _kill(server)
    assert _ids(server.wait_ready()) == before


def test_a_stream_that_was_cut_says_that_its_weights_are_lost(server: RunningServer, folder: Path) -> None:
    """Its client is to know that trying again gives no more of the same."""
    assert server.post("/update_weights_from_disk", {"model_path": str(folder), "weight_version": "x"}).status == 200
    body = {**BODY, "max_tokens": 1900, "stream": True}
    replies: list[Reply] = []
    reader = threading.Thread(target=lambda: replies.append(server.post("/v1/completions", body)))
    reader.start()
    while server.get("/load").json()["server_load"] == 0:
        threading.Event().wait(0.001)
    pid = _engine(server)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    reader.join(patient(30))
    (reply,) = replies
    error = reply.events()[-1]["error"] if reply.status == 200 else reply.json()["error"]
    assert error["code"] == "weights_lost" and "'x'" in error["message"]


async def _give(engine: AsyncEngine, folder: Path, version: str | None = None) -> str:
    await engine.start_weight_update()
    await engine.update_weights({"update_info": {"path": str(folder)}})
    return str((await engine.finish_weight_update(version))["weight_version"])


async def _next_life(engine: AsyncEngine) -> None:
    pid = pid_of(engine)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    await until(lambda: engine.state != "ready", 10)
    await engine.wait_ready(patient(60))


async def _deltas(engine: AsyncEngine, name: str) -> AsyncIterator[int]:
    async for output in engine.generate(name, PROMPT, params(max_tokens=1900)):
        yield len(output.outputs[0].token_ids)


def test_what_was_lost_stays_lost_until_it_is_sent(folder: Path) -> None:
    """Over a second death, a refused update, and one that fails; a label that was counted is never given twice."""

    async def main() -> None:
        async with running(**FIELDS, weight_transfer_config={"backend": "disk"}) as engine:
            assert await _give(engine, folder, "a") == engine.weights_version == "a", "told ahead of the answer"
            assert await _give(engine, folder) == engine.weights_version == "2"
            await engine.update_weight_version("b")
            assert engine.weights_version == "b"
            stream = _deltas(engine, "cut")
            await anext(stream)
            with pytest.raises(WeightsLostError, match="'b'"):
                await asyncio.gather(_drain(stream), _next_life(engine))
            await engine.wait_ready(patient(60))
            await _next_life(engine)
            with pytest.raises(WeightConflictError, match="partial=True needs whole weights: weights 'b' were lost"):
                await engine.start_weight_update(partial=True)
            await engine.start_weight_update()
            await engine.abort_weight_update()
            with pytest.raises(EngineHaltedError, match="'b'") as refused:
                engine.generate("a", PROMPT, params(max_tokens=2))
            assert refused.value.code == "weights_lost" and not engine.ready
            assert await _give(engine, folder) == "3"
            await until(lambda: engine.ready, 30)
            assert engine.stats["num_weights_lost"] == 1
            tokens, _ = await asyncio.wait_for(read(engine.generate("b", PROMPT, params(max_tokens=2))), patient(30))
            assert len(tokens) == 2

    asyncio.run(main())


async def _drain(stream: AsyncIterator[int]) -> None:
    async for _ in stream:
        pass
