"""The engine process: frames, messages, what it refuses, how it starts, waits and stops."""

from __future__ import annotations

import asyncio
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_rig import PROMPT, QUICK, RawEngine, helper, params, pid_of, raw_engine, read, running, said, script, until
from late_engine import NUM_LEFT
from octavo import LLM
from octavo.checkpoint.hub import find_model
from octavo.config.engine_config import EngineConfig
from octavo.frontend import messages
from octavo.frontend.messages import (
    WITHDRAWN,
    Abort,
    Add,
    BadFrameError,
    Call,
    CallDone,
    Failed,
    FrameReader,
    Heartbeat,
    Start,
    Stop,
    Updates,
    Withdraw,
    decode_from_engine,
    decode_to_engine,
    encode,
)
from octavo.request.outputs import RequestOutput
from octavo.request.sampling_params import SamplingParams
from octavo.request.updates import RequestUpdate
from octavo.sched.pause import Standing
from octavo.serve.engine import process as engine_process
from octavo.serve.engine.async_engine import AsyncEngine
from octavo.serve.engine.refusals import EngineDeadError
from patience import patient


def frames_of(*texts: bytes) -> bytes:
    return b"".join(len(text).to_bytes(4, "little") + text for text in texts)


# Frames and messages


@given(st.lists(st.binary(max_size=20), max_size=6), st.lists(st.integers(1, 9), min_size=1, max_size=20))
@settings(max_examples=100, deadline=None)
def test_frames_do_not_depend_on_how_the_stream_is_cut(texts: list[bytes], truncation: list[int]) -> None:
    """Frames above 12 bytes are too long here: they are reported, and what follows them is read."""
    reader, data, found = FrameReader(12), frames_of(*texts), []
    at, turn = 0, 0
    while at < len(data):
        step = truncation[turn % len(truncation)]
        found += reader.feed(data[at : at + step])
        at, turn = at + step, turn + 1
    assert found == [text if len(text) <= 12 else None for text in texts]


def test_a_frame_that_is_too_long_is_never_held() -> None:
    reader = FrameReader(1 << 10)
    assert reader.feed((1 << 30).to_bytes(4, "little")) == [None]
    for _ in range(100):
        assert reader.feed(bytes(1 << 16)) == []
    assert len(reader._buffer) == 0


NESTED = b"\x91" * 100_000 + b"\xc0"
BAD = {
    "empty": b"",
    "not msgpack": b"\xc1\xc1",
    "unknown tag": msgspec.msgpack.encode({"type": "evil"}),
    "no tag": msgspec.msgpack.encode({"sequence_ids": []}),
    "unknown field": msgspec.msgpack.encode({"type": "abort", "sequence_ids": [], "more": 1}),
    "wrong type": msgspec.msgpack.encode({"type": "abort", "sequence_ids": "a"}),
    "trailing bytes": msgspec.msgpack.encode({"type": "stop"}) + b"\x00",
    "cut short": msgspec.msgpack.encode({"type": "abort", "sequence_ids": ["a"]})[:-1],
    "array of 2**32": b"\xdd\xff\xff\xff\xff",
    "nested": NESTED,
    "nested in a field": b"\x82\xa4type\xa5start\xa6config\x81\xa1x" + NESTED,
    "not utf-8": b"\x82\xa4type\xa5abort\xacsequence_ids\x91\xa2\xff\xff",
    "a bad parameter": msgspec.msgpack.encode(
        {"type": "add", "sequence_ids": ["a"], "prompt_token_ids": [1], "params": {"temperature": -1}, "max_tokens": 1}
    ),
}


@pytest.mark.parametrize("frame", BAD.values(), ids=BAD)
def test_a_bad_frame_is_one_kind_of_error_on_either_side(frame: bytes) -> None:
    for decode in (decode_to_engine, decode_from_engine):
        with pytest.raises(BadFrameError):
            decode(frame)


def test_messages_survive_the_way() -> None:
    full = SamplingParams(
        n=2, temperature=0.5, stop=["x"], logit_bias={5: -1.0}, bad_words_token_ids=[[1, 2]], max_tokens=None, seed=-3
    )
    for message in (Start({"model": "m"}), Add(["a"], [1, 2], full, 5, -1, "salt"), Abort(["a"]), Stop()):
        assert decode_to_engine(bytes(encode(message)[4:])) == message
    for message in (Updates(3, [RequestUpdate("a", [1], finish_reason="stop", stop_reason=7)]), Failed("why", True)):
        assert decode_from_engine(bytes(encode(message)[4:])) == message


def test_a_step_too_large_for_one_frame_goes_out_in_several(monkeypatch: pytest.MonkeyPatch) -> None:
    """And an update that is too large by itself fails its request."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = engine_process.EngineProcess(theirs)
        process._client = type("Core", (), {"abort": lambda self, ids: None})()  # type: ignore[assignment]
        monkeypatch.setattr(messages, "MAX_FRAME_BYTES", 200)
        updates = [RequestUpdate(f"r{i}", [i] * (300 if i == 3 else 1)) for i in range(8)]
        process._send_updates(1, updates)
        theirs.close()
        data = b"".join(iter(lambda: ours.recv(1 << 16), b""))
    found = [u for frame in FrameReader().feed(data) for u in decode_from_engine(frame).updates]  # type: ignore[union-attr]
    assert [u.request_id for u in found] == [f"r{i}" for i in range(8)]
    assert [u.error for u in found if u.error] == ["output_too_large"] and found[3].finish_reason == "error"


# The process


def test_bad_frames_are_dropped_and_the_engine_goes_on() -> None:
    with raw_engine(script()) as raw:
        raw.send(*BAD.values())
        raw.send(bytes(1000))
        raw.socket.sendall((200 << 20).to_bytes(4, "little"))  # more than a frame may have
        for _ in range(200):
            raw.socket.sendall(bytes(1 << 20))
        raw.send(Add(["a"], PROMPT, params(3), 3))
        assert raw.until(Updates).updates == [RequestUpdate("a", [20], queue_time=pytest.approx(0, abs=5))]
        beat = raw.until(Heartbeat, busy=False)
        assert beat.stats.num_bad_frames == len(BAD) + 2
        assert beat.stats.rss_bytes < 150 << 20


def test_a_front_end_that_sends_only_rubbish_ends_the_engine() -> None:
    with raw_engine(script()) as raw:
        raw.send(*[b"\xc1"] * engine_process.MAX_BAD_FRAMES)
        assert "could not be read" in raw.until(Failed).text
        assert raw.process.wait(patient(5)) == engine_process.EXIT_BAD_FRAMES


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (Add(["bad"], [], params(), 8), "refused_by_engine"),
        (Add(["bad"], [-1], params(), 8), "refused_by_engine"),
        (Add(["bad"], [4096], params(), 8), "refused_by_engine"),
        (Add(["bad"], [1] * 2048, params(), 8), "refused_by_engine"),
        (Add(["bad"], [1], params(), 0), "refused_by_engine"),
        (Add(["bad"], [1], params(), 2048), "refused_by_engine"),
        (Add(["bad"], [1], params(logprobs=21), 8), "refused_by_engine"),
        (Add(["bad"], [1], params(allowed_token_ids=[4096]), 8), "refused_by_engine"),
        (Add(["bad"], [1], params(), 8, 2**40), "refused_by_engine"),
        (Add(["bad"], [1], params(), 8, 0, "\n"), "refused_by_engine"),
        (Add(["good"], [1], params(), 8), ""),  # an id that is in use
        (Add(["x", "x"], [1], params(n=2), 8), ""),
        (Add([], [1], params(), 8), ""),
    ],
)
def test_the_engine_checks_what_it_indexes_by(message: Add, reason: str, one_raw_engine: RawEngine) -> None:
    """A request that a broken front end let through fails alone, or is dropped."""
    raw = one_raw_engine
    raw.send(Add(["good"], PROMPT, params(40), 40), message)
    updates: list[RequestUpdate] = []
    while not any(u.request_id == "good" and u.finish_reason for u in updates):
        updates += raw.until(Updates).updates
    assert [t for u in updates if u.request_id == "good" for t in u.tokens] == said(PROMPT, 40)
    assert [u.error for u in updates if u.request_id != "good"] == ([reason] if reason else [])


@pytest.fixture(scope="module")
def one_raw_engine() -> Any:
    with raw_engine(script("--step-seconds", "0.002")) as raw:
        yield raw


def test_aborts_of_unknown_and_finished_sequences_are_ignored_and_counted() -> None:
    with raw_engine(script()) as raw:
        raw.send(Add(["a"], PROMPT, params(1), 1))
        raw.until(Updates)
        raw.send(Abort(["a", "never", ""]), Call(7, "reset_prefix_cache"))
        done = raw.until(CallDone)
        assert done.call_id == 7 and msgspec.msgpack.decode(done.result, type=Standing).success
        assert raw.until(Heartbeat, busy=False).stats.num_unknown_aborts == 3


def test_a_call_that_was_withdrawn_before_it_began_changes_nothing(one_raw_engine: RawEngine) -> None:
    """RL.W8: its client has left; it is told so, and what comes behind it finds nothing changed."""
    raw = one_raw_engine
    raw.until(Heartbeat, busy=False)
    raw.socket.sendall(bytes(encode(Call(11, "pause")) + encode(Withdraw(11)) + encode(Call(12, "standing"))))
    assert raw.until(CallDone, call_id=11).error == WITHDRAWN
    assert not msgspec.msgpack.decode(raw.until(CallDone, call_id=12).result, type=Standing).paused
    raw.send(Withdraw(12), Withdraw(99), Call(13, "standing"))  # one that was answered, and one that never was
    assert not raw.until(CallDone, call_id=13).error


def test_stop_ends_the_process_in_order() -> None:
    with raw_engine(script()) as raw:
        raw.send(Stop())
        assert raw.process.wait(patient(5)) == 0


def test_an_idle_engine_does_not_spin() -> None:
    async def main() -> None:
        async with running() as engine:
            await read(engine.generate("a", PROMPT, params(20)))
            process, shares = psutil.Process(pid_of(engine)), list[tuple[float, float]]()
            while not shares or (len(shares) < 8 and max(shares[-1]) >= 0.03):  # what else is done here passes
                before, own = sum(process.cpu_times()[:2]), time.process_time()
                await asyncio.sleep(1.0)
                shares.append((sum(process.cpu_times()[:2]) - before, time.process_time() - own))
            print(f"idle: engine {shares[-1][0]:.1%} of a core, front end {shares[-1][1]:.1%}")
            assert max(shares[-1]) < 0.03, shares

    asyncio.run(main())


def test_an_idle_engine_captures_what_its_start_has_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is ready before, stops for requests, and then goes on."""
    log = tmp_path / "captures"
    monkeypatch.setenv("LATE", str(log))

    async def main() -> None:
        async with running(helper("late_engine.py")) as engine:
            tokens, _ = await read(engine.generate("a", PROMPT, params(20)))
            assert len(tokens) == 20
            await until(lambda: log.exists() and len(log.read_text().split()) == NUM_LEFT, 20)
            tokens, _ = await read(engine.generate("b", PROMPT, params(5)))
            assert len(tokens) == 5

    asyncio.run(main())
    assert log.read_text().split() == ["False"] * NUM_LEFT


def test_the_front_end_loads_no_torch() -> None:
    code = (
        "import sys, octavo.serve.engine.async_engine, mock_engine\n"
        "assert not {'torch', 'transformers', 'multiprocessing'} & set(sys.modules)"
    )
    subprocess.run(
        [sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)}, timeout=patient(60)
    )


def test_a_setting_that_only_the_engine_can_refuse_is_told() -> None:
    async def main() -> None:
        engine = await AsyncEngine.start(EngineConfig(device="cpu", dtype="float16"), supervision=QUICK)
        with pytest.raises(EngineDeadError, match="dtype='float16'"):
            await engine.wait_ready(patient(60))
        assert (engine.state, engine.exit_code) == ("dead", 2) and "dtype" in await engine.wait_dead()
        with pytest.raises(EngineDeadError):
            engine.generate("a", PROMPT, params())
        await engine.close()

    asyncio.run(main())


@pytest.mark.parametrize("has_config", [False, True])
def test_a_folder_that_the_front_end_refuses_leaves_nothing_behind(tmp_path: Path, has_config: bool) -> None:
    """With a config.json the engine has been spawned when the tokenizer turns out to be missing."""
    if has_config:
        shutil.copy(find_model("octavo-tiny") / "config.json", tmp_path)
    before = psutil.Process().children()
    with pytest.raises(ValueError, match=r"tokenizer\.json" if has_config else r"config\.json"):
        asyncio.run(AsyncEngine.start(EngineConfig(model=str(tmp_path))))
    assert psutil.Process().children() == before


def test_text_is_what_the_engine_in_this_process_says() -> None:
    prompts = ["Once upon a time", "The sun", "12 + 30 ="]
    many = [
        SamplingParams(max_tokens=12, temperature=0.0, logprobs=2),
        SamplingParams(max_tokens=12, temperature=0.9, seed=5, n=2),
        SamplingParams(max_tokens=30, temperature=0.0, stop=["e"], prompt_logprobs=1),
    ]

    async def main() -> list[RequestOutput]:
        async with running() as engine:

            async def one(i: int) -> RequestOutput:
                token_ids = engine.tokenizer.encode(prompts[i])
                async for output in engine.generate(str(i), token_ids, many[i], prompt=prompts[i]):
                    last = output
                return last

            return await asyncio.gather(*map(one, range(len(prompts))))

    served = asyncio.run(main())
    with LLM() as llm:
        offline = llm.generate(prompts, many)
    for ours, theirs in zip(served, offline, strict=True):
        ours.metrics = theirs.metrics = None
        assert msgspec.structs.replace(ours, request_id="") == msgspec.structs.replace(theirs, request_id="")


def test_keys_do_not_reach_the_engine_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_API_KEY", "a-key-of-sixteen-letters")
    with raw_engine(script()) as raw:
        assert not [name for name in psutil.Process(raw.process.pid).environ() if name.startswith("OCTAVO_")]


def test_what_a_call_has_begun_is_no_step_that_hangs() -> None:
    """RL.W8: weights are applied behind what was waited for, and a request that comes meanwhile waits longer."""
    busy: list[bool] = []
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = engine_process.EngineProcess(theirs)
        moves = SimpleNamespace(poll=lambda: process._send_heartbeat(client))
        core = SimpleNamespace(has_unfinished=True, weights=SimpleNamespace(moves=moves))
        client: Any = SimpleNamespace(core=core, stats=messages.EngineStats())
        process._look_after(core)  # type: ignore[arg-type]
        process._send_heartbeat(client)
        for frame in FrameReader().feed(ours.recv(1 << 16)):
            told = decode_from_engine(frame)
            assert isinstance(told, Heartbeat)
            busy.append(told.busy)
    assert busy == [False, True]
