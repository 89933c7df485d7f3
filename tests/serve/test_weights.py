"""New weights for an engine process: AsyncEngine's methods, while streams are open."""

from __future__ import annotations

import asyncio
import dataclasses
from concurrent.futures import Future
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from engine_rig import PROMPT, STRICT, helper, params, read, running, until
from octavo.frontend.control import WrongStateError
from octavo.frontend.messages import EngineStats
from octavo.request.outputs import WeightsSpan, join_spans
from octavo.rl.messages import Received, Way
from octavo.rl.session import State, WeightConflictError, WeightUpdateError, WeightUpdates
from octavo.sched.pause import Gate, Standing
from octavo.serve.api.generation import _failure
from octavo.serve.engine.leaving import Leaving
from octavo.serve.engine.refusals import EngineHaltedError
from octavo.serve.engine.stream import OutputStream, pieces
from patience import patient

TINY = resources.files("octavo").joinpath("assets/octavo-tiny/model.safetensors")
FIELDS: dict[str, Any] = {"dtype": "bfloat16", "max_model_len": 256}


def test_an_engine_process_takes_weights_while_it_answers(tmp_path: Path) -> None:
    """RL.W1, RL.V1: streams stay open, tokens say their version, a refused update and a second one change nothing."""
    weights = {name: tensor.float() * 1.03 for name, tensor in load_file(str(TINY)).items()}
    save_file(weights, tmp_path / "model.safetensors")
    update = {"update_info": {"path": str(tmp_path)}}
    asyncio.run(_update_while_it_answers(tmp_path, update, len(weights)))


async def _spans(stream: OutputStream) -> list[WeightsSpan]:
    """Of a stream's tokens, whatever was merged meanwhile and taken apart again."""
    parts = [part.weight_versions async for output in stream for part in pieces(output)]
    return join_spans(parts)


async def _update_while_it_answers(tmp_path: Path, update: dict[str, Any], count: int) -> None:
    async with running(**FIELDS, weight_transfer_config={"backend": "disk"}) as engine:
        asked, call = list[str](), engine._client.call
        engine._client.call = lambda name, payload=b"": (asked.append(name), call(name, payload))[1]  # type: ignore
        stream = engine.generate("a", PROMPT, params(max_tokens=200, ignore_eos=True))
        reader = asyncio.create_task(_spans(stream))
        await engine.start_weight_update()
        assert asked == ["start_weight_update"], "its answer tells how the engine stands, too"
        with pytest.raises(WeightConflictError, match="while an update is open"):
            await engine.start_weight_update()
        with pytest.raises(WeightUpdateError, match="cannot read"):
            await engine.update_weights({"update_info": {"path": str(tmp_path / "nothing")}})
        await engine.start_weight_update()
        told = await engine.update_weights(update)
        assert told["num_tensors"] == count
        num_bytes = told["num_bytes"]
        assert await engine.finish_weight_update("one") == {"weight_version": "one", "num_tensors": count}
        spans = await asyncio.wait_for(reader, patient(60))
        assert [span.version for span in spans] in (["default", "one"], ["default"])
        assert (spans[0].start, spans[-1].end) == (0, 200)
        assert await engine.get_weight_version() == "one"
        while not engine.stats["num_weight_updates"]:
            await asyncio.sleep(0.01)
        assert engine.stats["weight_update_bytes"] == num_bytes and engine.stats["num_failed_weight_updates"] == 1


def test_a_server_without_whole_weights_says_so(tmp_path: Path) -> None:
    """RL.W1: new requests are refused with the reason, and a whole update repairs the engine."""
    asyncio.run(_break_and_repair(tmp_path))


async def _break_and_repair(tmp_path: Path) -> None:
    weights = load_file(str(TINY))
    save_file(
        weights | {"model.norm.weight": weights["model.norm.weight"] * float("nan")}, tmp_path / "model.safetensors"
    )
    config = {"backend": "disk", "staging": "none"}
    async with running(**FIELDS, weight_transfer_config=config) as engine:
        await engine.start_weight_update()
        with pytest.raises(WeightUpdateError, match=r"model.norm.weight: holds NaN or Inf"):
            await engine.update_weights({"update_info": {"path": str(tmp_path)}})
        with pytest.raises(EngineHaltedError, match="an update had overwritten some weights when it failed"):
            engine.generate("a", PROMPT, params(max_tokens=2))
        await until(lambda: not engine.ready, 5)
        save_file(weights, tmp_path / "model.safetensors")
        await engine.start_weight_update()
        await engine.update_weights({"update_info": {"path": str(tmp_path)}})
        await engine.finish_weight_update()
        await until(lambda: engine.ready, 30)
        tokens, _ = await asyncio.wait_for(read(engine.generate("b", PROMPT, params(max_tokens=2))), patient(30))
        assert len(tokens) == 2


def test_an_update_in_place_that_goes_silent_ends_for_those_who_wait(tmp_path: Path) -> None:
    """RL.W8: nobody asks the engine anything meanwhile; it lives longer than a step may take, and can be repaired."""
    asyncio.run(_go_silent(tmp_path))


async def _go_silent(tmp_path: Path) -> None:
    weights = load_file(str(TINY))
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "part").mkdir()
    save_file({"model.norm.weight": weights["model.norm.weight"]}, tmp_path / "part" / "model.safetensors")
    rules = dataclasses.replace(STRICT, heartbeat_deadline=120, step_deadline=STRICT.step_deadline / 2)
    config = {"backend": "disk", "staging": "none", "session_timeout": 1.5 * rules.step_deadline}
    async with running(supervision=rules, **FIELDS, weight_transfer_config=config) as engine:
        ran = engine.generate("ran", PROMPT, params(max_tokens=200))
        await anext(ran)
        await engine.control.pause("keep")
        await engine.start_weight_update()
        await engine.update_weights({"update_info": {"path": str(tmp_path / "part")}})
        await engine.control.resume()
        came = engine.generate("came", PROMPT, params(max_tokens=2))
        for stream in (ran, came):
            _, output = await asyncio.wait_for(read(stream), patient(30))
            assert output.outputs[0].stop_reason == "weights_broken"
        assert engine.stats["num_restarts"] == 0
        await until(lambda: not engine.ready, 5)
        state = await engine.weight_state()
        assert state["state"] == "ready" and "nothing was heard of it for" in state["lost_because"]
        await engine.start_weight_update()
        await engine.update_weights({"update_info": {"path": str(tmp_path)}})
        await engine.finish_weight_update("whole")
        tokens, _ = await asyncio.wait_for(read(engine.generate("b", PROMPT, params(max_tokens=2))), patient(30))
        assert len(tokens) == 2


def test_a_pause_that_waits_asks_once_while_an_update_holds_the_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine says when the requests have ended, or the pause was undone; nobody asks it over and over."""
    monkeypatch.setenv("GATE", str(tmp_path / "gate"))
    asyncio.run(_wait_beside_an_update(tmp_path, tmp_path / "gate"))


async def _wait_beside_an_update(tmp_path: Path, gate: Path) -> None:
    weights = load_file(str(TINY))
    names = list(weights)
    for part, held in (("a", names[:1]), ("b", names[1:])):
        (tmp_path / part).mkdir()
        save_file({name: weights[name] for name in held}, tmp_path / part / "model.safetensors")
    config = {"backend": "disk", "staging": "none"}
    async with running(helper("slow_engine.py"), **FIELDS, weight_transfer_config=config) as engine:
        asked, call = list[str](), engine._client.call
        engine._client.call = lambda name, payload=b"": (asked.append(name), call(name, payload))[1]  # type: ignore
        for undone in (False, True):
            gate.unlink(missing_ok=True)
            stream = engine.generate("ran", PROMPT, params(max_tokens=200, ignore_eos=True))
            await anext(stream)
            pausing = asyncio.create_task(engine.control.pause("wait"))
            await until(lambda: "pause" in asked, 5)
            await engine.start_weight_update()
            await engine.update_weights({"update_info": {"path": str(tmp_path / "a")}})  # holds the steps from now on
            gate.touch()
            asked.clear()
            for _ in range(100):
                await engine.call("weight_state")
            assert not pausing.done() and set(asked) <= {"weight_state", "settled"} and asked.count("settled") <= 1
            await engine.update_weights({"update_info": {"path": str(tmp_path / "b")}})
            if undone:
                await engine.control.resume()
                with pytest.raises(WrongStateError, match="resumed before the requests had ended"):
                    await asyncio.wait_for(pausing, patient(30))
            await engine.finish_weight_update()
            _, output = await asyncio.wait_for(read(stream), patient(30))
            assert output.outputs[0].finish_reason == "length"
            await asyncio.gather(pausing, return_exceptions=True)
            assert asked.count("standing") == 0 and (await engine.control.standing()).paused is not undone
            await engine.control.resume()
            asked.clear()


def test_a_request_that_was_on_its_way_when_the_weights_went_says_so() -> None:
    """RL.S2: it met the sleep in the engine, where its front end had not heard of it: as one that comes later."""
    asyncio.run(_arrive_late())


async def _arrive_late() -> None:
    async with running(**FIELDS) as engine:
        await engine.control.sleep(2)
        await engine.control.wake_up()
        engine.control.last = Standing()  # the front end's, a message earlier
        engine.weights.heard(EngineStats())
        _, output = await asyncio.wait_for(read(engine.generate("a", PROMPT, params(max_tokens=2))), patient(30))
        (told,) = output.outputs
        assert (told.finish_reason, told.stop_reason) == ("error", "weights_discarded")
        refused = _failure(told)
        assert refused is not None and (refused.status, refused.code) == (503, "weights_discarded")


def test_a_move_whose_client_left_is_dropped_or_carried_to_its_end() -> None:
    """RL.W8: before its first call began it is withdrawn; later only what waits for a trainer is."""
    asyncio.run(_leave())


async def _leave() -> None:
    withdrawn: list[Future[bytes]] = []
    leaving, asked = Leaving(withdrawn.append), dict[str, Future[bytes]]()

    async def move(*names: str) -> None:
        for name in names:
            asked[name] = Future()
            await leaving.answered(name, asked[name])

    early = asyncio.create_task(move("pause"))
    begun = asyncio.create_task(move("check_sleep", "sleep"))
    update = asyncio.create_task(move("start_weight_update", "update_weights"))
    await asyncio.sleep(0)
    for name in ("check_sleep", "start_weight_update"):
        asked[name].set_result(b"")
    while "sleep" not in asked or "update_weights" not in asked:
        await asyncio.sleep(0)
    for task in (early, begun, update):
        leaving.leave(task)
    assert withdrawn == [asked["pause"], asked["update_weights"]]
    for name in ("pause", "sleep", "update_weights"):
        asked[name].set_result(b"")
    await asyncio.gather(early, begun, update)


class Core:
    """Of an engine whose worker says whether the old weights are whole."""

    def __init__(self, *, whole: bool) -> None:
        self.whole, self.broken = whole, ""

    def ask_workers(self, name: str, reply: type[Any], request: Any = None) -> list[Any]:
        received, way = Received(1, 8, 0.1, not self.whole), Way(False, not self.whole)
        told = {"weights_expect": way, "weights_update": received, "weights_abort": self.whole, "weights_init": {}}
        return [told.get(name)]

    ask_beside = ask_workers

    def release_weights(self) -> None:
        pass

    def hold_weights(self) -> None:
        pass

    def break_weights(self, reason: str) -> None:
        self.broken = reason

    def relabel(self, version: str) -> None:
        pass

    def standing(self) -> Standing:
        return Standing(lost=bool(self.broken), lost_because=self.broken)


def _told(updates: WeightUpdates, answer: Future[bytes]) -> bytes:
    """Also of a move that waits."""
    while not answer.done():
        updates.moves.wait()
        updates.moves.poll()
    return answer.result()


def test_an_update_that_holds_the_steps_is_given_up_in_time() -> None:
    """RL.W8: a trainer that has gone between two messages; the engine says that its weights are not whole."""

    now, core = [0.0], Core(whole=False)
    updates = WeightUpdates(core, Gate(), lambda: now[0], hold_timeout=10)  # type: ignore[arg-type]
    calls = updates.calls()
    calls["start_weight_update"](b"\x80")
    now[0] = 100.0
    updates.expire()
    assert updates.state is State.OPEN, "the old weights serve: nobody waits"
    calls["update_weights"](b"\x80")
    assert updates.state is State.HELD
    now[0] = 109.0
    updates.expire()
    assert updates.is_open and not core.broken
    now[0] = 111.0
    updates.expire()
    assert not updates.is_open and "nothing was heard of it for 10 s" in core.broken


def test_an_update_whose_trainer_has_gone_stands_in_nobodys_way() -> None:
    """RL.W8: another one need not abort it, once nothing was heard of it for long; before that it is told its age."""
    now, core = [0.0], Core(whole=True)
    updates = WeightUpdates(core, Gate(), lambda: now[0], hold_timeout=10)  # type: ignore[arg-type]
    calls = updates.calls()
    for name in ("init_weight_transfer_engine", "update_weight_version", "start_weight_update"):
        payload = b"\xa1x" if name == "update_weight_version" else b"\x80"
        calls["start_weight_update"](b"\x80")
        now[0] += 3.0
        calls["update_weights"](b"\x80")
        now[0] += 9.0
        assert b"while an update is open, for 12.0 s" in calls[name](payload).result()
        now[0] += 2.0
        assert b"error" not in _told(updates, calls[name](payload))
        assert updates.state is (State.OPEN if name == "start_weight_update" else State.READY)
    assert updates.stats.num_failed_updates == 3 and not core.broken and updates.version == "x"
