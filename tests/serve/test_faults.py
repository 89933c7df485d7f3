"""Faults of the engine, of the front end and of single requests, each with its figure (pytest -s)."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import psutil
import pytest

from engine_rig import (
    HERE,
    PROMPT,
    QUICK,
    STRICT,
    closes_all,
    helper,
    is_gone,
    params,
    pid_of,
    read,
    running,
    said,
    script,
    until,
    wait_until_gone,
)
from octavo.config.engine_config import EngineConfig
from octavo.frontend.messages import PROTOCOL
from octavo.frontend.request_metrics import RequestFacts
from octavo.request.sampling_params import ParameterError, SamplingParams
from octavo.serve.engine.async_engine import AsyncEngine
from octavo.serve.engine.client import Supervision, child_environment
from octavo.serve.engine.refusals import EngineDeadError
from octavo.serve.engine.suspects import Suspects
from octavo.text.tokenizer import Tokenizer
from patience import patient
from standstill import stop


async def open_streams(engine: AsyncEngine, count: int, max_tokens: int = 1500) -> list[Any]:
    """Streams that have given their first output."""
    streams = [engine.generate(f"open-{i}", [*PROMPT, i], params(max_tokens)) for i in range(count)]
    await asyncio.gather(*[anext(stream) for stream in streams])
    return streams


async def fails(stream: Any) -> float:
    """Read a stream to its EngineDeadError. When that came."""
    with pytest.raises(EngineDeadError):
        await read(stream)
    return time.monotonic()


# The engine dies or hangs


async def kill_rounds(command: list[str] | None, rounds: int) -> None:
    worst = {"error": 0.0, "not ready": 0.0, "serving": 0.0}
    own = psutil.Process()
    others = set(own.children(recursive=True))  # servers that other tests share
    async with running(command) as engine:
        num_fds = own.num_fds()
        for _ in range(rounds):
            streams = await open_streams(engine, 8)
            readers = [asyncio.create_task(fails(stream)) for stream in streams]
            await asyncio.sleep(0.02)
            pid = pid_of(engine)
            assert pid is not None
            await until(lambda: engine.ready, 30)
            began = time.monotonic()
            os.kill(pid, signal.SIGKILL)
            worst["not ready"] = max(worst["not ready"], await until(lambda: not engine.ready, 30))
            worst["error"] = max(worst["error"], max(await asyncio.gather(*readers)) - began)
            with pytest.raises(EngineDeadError):
                engine.generate("refused", PROMPT, params())
            with pytest.raises(EngineDeadError):
                await engine.reset_prefix_cache()
            await engine.wait_ready(patient(30))
            await read(engine.generate("again", PROMPT, params(2)))
            worst["serving"] = max(worst["serving"], time.monotonic() - began)
            num_children = len(set(own.children(recursive=True)) - others)
            assert is_gone(pid) and num_children == 1 and engine.num_requests == 0
        await closes_all(num_fds, rounds)
    assert set(own.children(recursive=True)) <= others
    figures = ", ".join(f"{name} {seconds * 1000:.0f} ms" for name, seconds in worst.items())
    print(f"kill -9 of the engine, {rounds} rounds, worst: {figures}")
    assert worst["error"] < QUICK.heartbeat_deadline, "no deadline brought it out"
    assert worst["serving"] < patient(30.0)


def test_a_killed_engine_comes_back() -> None:
    asyncio.run(kill_rounds(None, 3))


@pytest.mark.slow
def test_a_killed_engine_comes_back_20_times() -> None:
    asyncio.run(kill_rounds(None, 20))


def test_a_killed_mock_engine_comes_back_20_times() -> None:
    asyncio.run(kill_rounds(script("--step-seconds", "0.002"), 20))


def test_a_stopped_engine_is_replaced() -> None:
    """SIGSTOP: the process is there, but its heart does not beat."""

    async def main() -> None:
        async with running(script("--step-seconds", "0.002"), supervision=STRICT) as engine:
            streams = await open_streams(engine, 4)
            pid = pid_of(engine)
            assert pid is not None
            began = time.monotonic()
            stop(pid)
            not_ready = await until(lambda: not engine.ready, 30)
            seconds = max(await asyncio.gather(*map(fails, streams))) - began
            print(f"SIGSTOP: not ready after {not_ready:.2f} s, streams told after {seconds:.2f} s")
            assert seconds < STRICT.heartbeat_deadline + patient(30) and "heartbeat" in engine.error
            await engine.wait_ready(patient(10))
            assert is_gone(pid) and (await read(engine.generate("a", PROMPT, params(5))))[0] == said(PROMPT, 5)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("fault", "reason"),
    [("hang", "a step of the engine took more than"), ("raise", "a mock failure"), ("exit", "exited with code 7")],
)
def test_a_step_that_hangs_or_fails_ends_the_engine_and_says_why(fault: str, reason: str) -> None:
    async def main() -> None:
        rules = STRICT if fault == "hang" else QUICK
        async with running(script("--faults", "--step-seconds", "0.002"), supervision=rules) as engine:
            other = (await open_streams(engine, 1))[0]
            began = time.monotonic()
            await fails(engine.generate("a", PROMPT, params(9, extra_args={"fault": fault, "fault_after": 3})))
            await fails(other)
            assert time.monotonic() - began < QUICK.step_deadline and reason in engine.error
            await engine.wait_ready(patient(10))
            await read(engine.generate("b", PROMPT, params(9)))
            assert engine.stats["num_restarts"] == 1

    asyncio.run(main())


def test_an_engine_that_fails_again_and_again_stays_down() -> None:
    async def main() -> None:
        rules = Supervision(first_delay=0.02, max_delay=0.05, max_failures=5)
        async with running(script(), supervision=rules) as engine:
            began = time.monotonic()
            while engine.state != "dead":
                if pid_of(engine) is not None:
                    os.kill(pid_of(engine), signal.SIGKILL)
                await asyncio.sleep(0.02)
            assert await engine.wait_dead() == "the engine process was killed by SIGKILL"
            assert engine.exit_code == 1 and engine.stats["num_restarts"] == 4
            assert time.monotonic() - began > 0.02 + 3 * 0.04  # delays double up to the most
            with pytest.raises(EngineDeadError):
                await engine.wait_ready(1)

    asyncio.run(main())


def _replace(folder: Path) -> None:
    """Other weights of the same size, with the old ones' time."""
    weights, other = folder / "model.safetensors", folder / "other"
    info = weights.stat()
    shutil.copy(weights, other)
    os.utime(other, ns=(info.st_atime_ns, info.st_mtime_ns))
    other.replace(weights)


def _touch(folder: Path) -> None:
    os.utime(folder / "config.json", ns=(0, 0))


def _add(folder: Path) -> None:
    (folder / "model-00002.safetensors").touch()


@pytest.mark.parametrize(
    ("change", "name"),
    [(_replace, "model.safetensors"), (_touch, "config.json"), (_add, "model-00002.safetensors"), (None, "")],
)
def test_an_engine_is_not_started_again_on_other_files(
    tmp_path: Path, change: Callable[[Path], None] | None, name: str
) -> None:
    """It would go on under the same name with other weights, beside the tokenizer of the old ones."""
    folder = tmp_path / "model"
    with resources.as_file(resources.files("octavo").joinpath("assets/octavo-tiny")) as bundled:
        shutil.copytree(bundled, folder)

    async def main() -> None:
        async with running(script(), model=str(folder)) as engine:
            (folder / "README.md").write_text("what the model does not consist of")
            if change is not None:
                change(folder)
            pid = pid_of(engine)
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            await until(lambda: engine.state == "restarting" or engine.state == "dead", 10)
            if change is None:
                await engine.wait_ready(patient(60))
                return
            reason = await engine.wait_dead()
            assert reason.startswith("it is not started again: the model's files have changed since the server's start")
            assert str(folder / name) in reason and reason.endswith(
                "(start the server again to serve what is there now)"
            )
            assert engine.exit_code == 1 and engine.stats["num_restarts"] == 0

    asyncio.run(main())


def test_files_that_change_while_the_engine_loads_are_not_served(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    with resources.as_file(resources.files("octavo").joinpath("assets/octavo-tiny")) as bundled:
        shutil.copytree(bundled, folder)

    async def main() -> None:
        engine = await AsyncEngine.start(
            EngineConfig(model=str(folder)), command=script("--load-seconds", "0.3"), supervision=QUICK
        )
        try:
            assert engine.state == "loading"
            _touch(folder)
            assert (await engine.wait_dead()).startswith("the model's files have changed since the server's start")
        finally:
            await engine.close()

    asyncio.run(main())


def _fatal(fault: str, **fields: Any) -> SamplingParams:
    return params(9, extra_args={"fault": fault, "fault_after": 1}, **fields)


def test_what_brought_the_engine_down_twice_is_not_served_again() -> None:
    async def main() -> None:
        rules = Supervision(first_delay=0.02, max_delay=0.05, max_failures=2)
        async with running(script("--faults"), supervision=rules) as engine:
            for number in range(2):
                await fails(engine.generate(f"a{number}", PROMPT, _fatal("exit", seed=number, n=1 + number)))
                await engine.wait_ready(patient(10))
            with pytest.raises(ParameterError, match="refused for 10 minutes") as caught:
                engine.generate("b", PROMPT, _fatal("exit", seed=7))
            assert caught.value.code == "refused_after_failures"
            assert (await read(engine.generate("c", PROMPT, params(5))))[0] == said(PROMPT, 5)
            assert engine.stats["num_restarts"] == 2

    asyncio.run(main())


def test_requests_that_bring_the_engine_down_do_not_end_the_server() -> None:
    """Whoever was answered meanwhile shows that the machine works."""

    async def main() -> None:
        rules = Supervision(first_delay=0.02, max_delay=0.05, max_failures=2)
        async with running(script("--faults"), supervision=rules) as engine:
            for number in range(4):
                assert (await read(engine.generate(f"good{number}", PROMPT, params(3))))[0] == said(PROMPT, 3)
                await fails(engine.generate(f"bad{number}", [*PROMPT, number], _fatal("exit")))
                await engine.wait_ready(patient(10))
            assert engine.stats["num_restarts"] == 4

    asyncio.run(main())


def test_a_request_whose_sender_left_is_suspected_too() -> None:
    async def main() -> None:
        rules = Supervision(first_delay=0.02, max_delay=0.05, step_deadline=patient(2.0), check_interval=0.05)
        async with running(script("--faults"), supervision=rules) as engine:
            for number in range(2):
                stream = engine.generate(f"a{number}", PROMPT, _fatal("hang"))
                await anext(stream)
                await until(lambda: engine.step_age > rules.step_deadline / 2, 30)  # a late beat may come before
                await stream.aclose()
                await until(lambda count=number: engine.stats["num_restarts"] > count, patient(10))
                await engine.wait_ready(patient(10))
            with pytest.raises(ParameterError, match="refused"):
                engine.generate("b", PROMPT, _fatal("hang"))

    asyncio.run(main())


def test_what_was_answered_is_suspected_no_more() -> None:
    suspects, now = Suspects(), time.monotonic()
    facts = RequestFacts(request_id="a", params=params(3), num_prompt_tokens=5, max_tokens=3, arrival=now)
    for _ in range(3):
        suspects.begin("a", PROMPT, params(3))
        suspects.explain(0.0)
        suspects.watch("failed", facts)
        suspects.check(PROMPT, params(3))
        suspects.begin("a", PROMPT, params(3))
        suspects.watch("finished", facts)


def test_a_process_that_cannot_be_started_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with running(script()) as engine:
            popen, failures = subprocess.Popen, [OSError(12, "no memory")] * 3

            def start(*args: Any, **options: Any) -> Any:
                if failures:
                    raise failures.pop()
                return popen(*args, **options)

            monkeypatch.setattr(subprocess, "Popen", start)
            num_fds = psutil.Process().num_fds()
            assert pid_of(engine) is not None
            os.kill(pid_of(engine), signal.SIGKILL)
            await until(lambda: "cannot be started: no memory" in engine.error, 5)
            await engine.wait_ready(patient(10))
            assert engine.stats["num_restarts"] == 4
            await closes_all(num_fds, 3)

    asyncio.run(main())


def test_an_engine_that_hangs_says_where(capfd: pytest.CaptureFixture[str]) -> None:
    async def main() -> None:
        async with running(script("--faults"), supervision=STRICT) as engine:
            await fails(engine.generate("a", PROMPT, params(9, extra_args={"fault": "hang"})))

    asyncio.run(main())
    assert "in _break" in capfd.readouterr().err


def test_an_engine_that_does_not_load_in_time_is_given_up() -> None:
    async def main() -> None:
        rules = Supervision(first_delay=0.02, max_failures=2, load_deadline=0.8)
        with pytest.raises(EngineDeadError, match=r"did not load within 0\.8 s"):
            async with running(script("--load-seconds", "60"), supervision=rules):
                pass

    asyncio.run(main())


@pytest.mark.parametrize("kind", ["garbage", "unknown_tag", "too_long"])
def test_an_engine_that_talks_rubbish_is_replaced(kind: str) -> None:
    """What cannot be read may have held a token: the streams fail rather than miss it."""

    async def main() -> None:
        async with running(helper("rogue_engine.py", kind)) as engine:
            await fails(engine.generate("a", PROMPT, params()))
            assert "bad frame" in engine.error
            await engine.wait_ready(patient(10))

    asyncio.run(main())


def test_an_engine_of_another_version_is_refused() -> None:
    async def main() -> None:
        rules = Supervision(first_delay=0.01, max_failures=1)
        with pytest.raises(EngineDeadError, match=f"speaks protocol 0, not {PROTOCOL}"):
            async with running(helper("rogue_engine.py", "old_protocol"), supervision=rules):
                pass

    asyncio.run(main())


def test_a_front_end_that_stood_still_does_not_blame_the_engine() -> None:
    async def main() -> None:
        async with running(script("--step-seconds", "0.002"), supervision=STRICT) as engine:
            stream = engine.generate("open", PROMPT, params(1000))
            first = (await anext(stream)).outputs[0].token_ids
            for _ in range(2):
                time.sleep(2 * STRICT.heartbeat_deadline)
                await asyncio.sleep(0.05)
            assert len(first) + len((await read(stream))[0]) == 1000 and engine.stats["num_restarts"] == 0

    asyncio.run(main())


# The front end dies

FRONT_END = """
import asyncio, sys
sys.path[:0] = {here!r}
from engine_rig import PROMPT, params, pid_of, read, running, script
async def main():
    async with running({command}) as engine:
        streams = [engine.generate(str(i), PROMPT, params(2000)) for i in range(4)]
        await asyncio.gather(*[anext(stream) for stream in streams])
        print(pid_of(engine), flush=True)
        await asyncio.gather(*map(read, streams))
        await asyncio.sleep(60)
asyncio.run(main())
"""


@pytest.mark.parametrize("stopped", [False, True])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_the_engine_never_outlives_its_front_end(how: signal.Signals, stopped: bool) -> None:
    """Not even an engine that hangs."""
    code = FRONT_END.format(here=[str(HERE), str(HERE.parent)], command='script("--step-seconds", "0.01")')
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=child_environment()
    ) as front_end:
        assert front_end.stdout is not None
        pid = int(front_end.stdout.readline())
        if stopped:
            stop(pid)
        front_end.send_signal(how)
        front_end.wait(patient(20))
        seconds = wait_until_gone(pid, 20)
        print(f"{how.name} of the front end: the engine is gone after {seconds * 1000:.0f} ms")


def test_signals_to_the_whole_group_leave_the_engine_to_its_front_end() -> None:
    async def main() -> None:
        async with running(script("--step-seconds", "0.005")) as engine:
            stream = engine.generate("a", PROMPT, params(50))
            first = (await anext(stream)).outputs[0].token_ids  # one, or what has come by now
            assert pid_of(engine) is not None
            for number in (signal.SIGINT, signal.SIGTERM):
                os.kill(pid_of(engine), number)
            assert len(first) + len((await read(stream))[0]) == 50

    asyncio.run(main())


# Single requests


@pytest.mark.parametrize("fault", ["nan_logits", "bad_token", "nan_logprob"])
def test_only_the_broken_request_fails(fault: str) -> None:
    async def main() -> None:
        async with running(script("--faults", "--step-seconds", "0.002")) as engine:
            others = [asyncio.create_task(read(engine.generate(f"o{i}", PROMPT, params(60)))) for i in range(8)]
            await asyncio.sleep(0.02)
            broken = params(60, logprobs=1, extra_args={"fault": fault, "fault_after": 3})
            tokens, last = await read(engine.generate("broken", PROMPT, broken))
            expected = "nan_logits" if fault == "nan_logits" else "internal_model_error"
            assert (last.outputs[0].finish_reason, last.outputs[0].stop_reason) == ("error", expected)
            assert tokens == said(PROMPT, 0 if fault == "nan_logprob" else 3)
            assert [tokens for tokens, _ in await asyncio.gather(*others)] == [said(PROMPT, 60)] * 8
            assert engine.stats["num_restarts"] == 0 and await engine.reset_prefix_cache()

    asyncio.run(main())


def test_nan_logits_in_the_real_engine_fail_that_request_only() -> None:
    async def tokens_of(engine: AsyncEngine, poisoned: bool) -> list[list[int]]:
        tasks = [
            asyncio.create_task(
                read(engine.generate(f"{poisoned}-{i}", [*PROMPT, i], params(24, temperature=1.0, seed=i)))
            )
            for i in range(6)
        ]
        if poisoned:
            tokens, last = await read(engine.generate("poisoned", PROMPT, params(24, seed=666)))
            assert len(tokens) == 2
            assert (last.outputs[0].finish_reason, last.outputs[0].stop_reason) == ("error", "nan_logits")
        return [tokens for tokens, _ in await asyncio.gather(*tasks)]

    async def main() -> None:
        async with running(helper("nan_engine.py")) as engine:
            assert await tokens_of(engine, poisoned=True) == await tokens_of(engine, poisoned=False)
            assert engine.stats["num_restarts"] == 0 and await engine.reset_prefix_cache()

    asyncio.run(main())


def test_text_that_cannot_be_made_fails_its_own_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """A panic of the tokenizers' library is not even an Exception."""

    class Panic(BaseException):
        pass

    class Panicking:
        def add(self, token_id: int) -> str:
            raise Panic

        flush = add

    async def main() -> None:
        async with running(script("--step-seconds", "0.002")) as engine:
            assert isinstance(engine.tokenizer, Tokenizer)
            make = engine.tokenizer.detokenizer
            monkeypatch.setattr(
                engine.tokenizer,
                "detokenizer",
                lambda prompt, *more: Panicking() if prompt[0] == 99 else make(prompt, *more),
            )
            other = asyncio.create_task(read(engine.generate("other", PROMPT, params(40))))
            with pytest.raises(RuntimeError, match="could not be processed"):
                await read(engine.generate("bad", [99], params(40)))
            assert (await other)[0] == said(PROMPT, 40) and await engine.reset_prefix_cache()

    asyncio.run(main())
