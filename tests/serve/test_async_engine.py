"""AsyncEngine: streams and their merging, admission, observers, drain."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_rig import PROMPT, params, pid_of, read, running, said, script, until
from octavo.frontend.messages import Updates
from octavo.frontend.request_metrics import RequestFacts
from octavo.observe import LOGGER
from octavo.request.outputs import CompletionOutput, RequestOutput
from octavo.request.sampling_params import ParameterError, RequestOutputKind
from octavo.request.updates import RequestUpdate
from octavo.serve.engine.refusals import EngineDrainingError, QueueFullError
from octavo.serve.engine.stream import MAX_UNREAD, Stream, merge_outputs
from patience import patient

# Streams


def output(index: int = 0, kind: str = "", **fields: Any) -> RequestOutput:
    part = CompletionOutput(
        index, **{"text": "", "token_ids": [], "cumulative_logprob": None, "logprobs": None} | fields
    )
    return RequestOutput("r", None, [1], None, [part], kind == "last")


def stream_of(output_kind: RequestOutputKind) -> Stream:
    facts = RequestFacts(
        request_id="r", params=params(output_kind=output_kind), num_prompt_tokens=1, max_tokens=9, arrival=0.0
    )
    return Stream(facts, ["r"])


@given(st.lists(st.tuples(st.integers(0, 1), st.booleans()), max_size=60))
@settings(max_examples=100, deadline=None)
def test_a_slow_reader_gets_the_same_deltas_in_fewer_pieces(plan: list[tuple[int, bool]]) -> None:
    stream = stream_of(RequestOutputKind.DELTA)
    texts, tokens = {0: "", 1: ""}, {0: [], 1: []}
    for number, (index, reads) in enumerate(plan):
        stream.put(output(index, text=str(number), token_ids=[number]))
        assert len(stream._pending) < 17
        taken = stream.take() if reads else None
        for part in taken.outputs if taken else ():
            texts[part.index] += part.text
            tokens[part.index] += part.token_ids
    rest = stream.take()
    for part in rest.outputs if rest else ():
        texts[part.index] += part.text
        tokens[part.index] += part.token_ids
    for index in (0, 1):
        expected = [number for number, (i, _) in enumerate(plan) if i == index]
        assert tokens[index] == expected and texts[index] == "".join(map(str, expected))


def test_merging_keeps_ends_logprobs_and_the_prompts_logprobs() -> None:
    first = output(text="a", token_ids=[1], logprobs=[{1: None}], cumulative_logprob=-1.0)
    first.prompt_logprobs = [None]
    last = output(
        0,
        "last",
        text="b",
        token_ids=[2],
        logprobs=[{2: None}],
        cumulative_logprob=-2.0,
        finish_reason="stop",
        stop_reason="x",
    )
    merged = merge_outputs([first, output(1, text="z"), last])
    assert [part.index for part in merged.outputs] == [0, 1] and merged.finished and merged.prompt_logprobs == [None]
    assert merged.outputs[0] == CompletionOutput(0, "ab", [1, 2], -2.0, [{1: None}, {2: None}], "stop", "x")
    assert first.outputs[0].text == "a"  # what was handed over is not changed


def test_a_reader_of_whole_outputs_finds_the_latest_one() -> None:
    stream = stream_of(RequestOutputKind.CUMULATIVE)
    for text in ("a", "ab", "abc"):
        stream.put(output(text=text))
    taken = stream.take()
    assert taken is not None and taken.outputs[0].text == "abc" and stream.take() is None


def test_a_stream_that_is_never_read_is_given_up() -> None:
    stream = stream_of(RequestOutputKind.DELTA)
    assert stream.put(output(token_ids=[1] * MAX_UNREAD))
    assert not stream.put(output(token_ids=[1]))


def test_streams_of_every_kind_and_every_way_to_leave_them() -> None:
    async def main() -> None:
        async with running(script("--step-seconds", "0.002")) as engine:
            tokens, last = await read(engine.generate("a", PROMPT, params(12)))
            assert tokens == said(PROMPT, 12) and last.outputs[0].finish_reason == "length"
            whole = params(12, output_kind=RequestOutputKind.CUMULATIVE)
            outputs = [o async for o in engine.generate("b", PROMPT, whole)]
            assert outputs[-1].outputs[0].token_ids == said(PROMPT, 12)
            longer = engine.generate("b", PROMPT, params(2000, output_kind=RequestOutputKind.CUMULATIVE))
            one, two = [(await anext(longer)).outputs[0].token_ids for _ in range(2)]
            assert 0 < len(one) < len(two) and two == said(PROMPT, len(two))
            await longer.aclose()
            final = params(12, output_kind=RequestOutputKind.FINAL_ONLY, n=3)
            outputs = [o async for o in engine.generate("c", PROMPT, final)]
            assert len(outputs) == 1 and [o.token_ids for o in outputs[0].outputs] == [said(PROMPT, 12)] * 3

            closed = engine.generate("d", PROMPT, params(1000))
            await anext(closed)
            await closed.aclose()
            assert [o async for o in closed] == []
            waiting = asyncio.create_task(read(engine.generate("e", PROMPT, params(1000))))
            await asyncio.sleep(0.05)
            waiting.cancel()
            dropped = engine.generate("f", PROMPT, params(1000))
            await anext(dropped)
            del dropped
            gc.collect()
            aborted = engine.generate("g", PROMPT, params(1000))
            await anext(aborted)
            await engine.abort(["g", "unknown"])
            _, last = await read(aborted)
            assert last.finished and last.outputs[0].finish_reason == "abort"
            await asyncio.sleep(0)
            assert engine.num_requests == 0
            assert await engine.reset_prefix_cache(), "every block is free"

    asyncio.run(main())


def test_waiting_with_a_limit_aborts_nothing() -> None:
    async def main() -> None:
        async with running(script("--step-seconds", "0.2")) as engine:
            stream = engine.generate("a", PROMPT, params(2))
            assert not await stream.wait(0.02)
            assert await stream.wait(patient(5))
            assert (await read(stream))[0] == said(PROMPT, 2)
            assert await stream.wait(0)  # the end is news enough

    asyncio.run(main())


def test_a_stop_string_ends_the_sequence_in_the_engine_too() -> None:
    async def main() -> None:
        async with running(script("--step-seconds", "0.01")) as engine:
            prompt = engine.tokenizer.encode("one two three")
            _, last = await read(engine.generate("a", prompt, params(2000, stop=["two"])))
            assert (last.outputs[0].finish_reason, last.outputs[0].stop_reason) == ("stop", "two")
            assert await engine.reset_prefix_cache()

    asyncio.run(main())


def test_what_is_wrong_with_a_request_is_said_at_once() -> None:
    async def main() -> None:
        async with running(script()) as engine:
            held = engine.generate("same", PROMPT, params(2000))
            for prompt, fields, field in [
                (PROMPT, {"params": params(logprobs=21)}, "logprobs"),
                ([], {}, "prompt"),
                ([1] * 2048, {}, "prompt"),
                (PROMPT, {"priority": 2**40}, "priority"),
                (PROMPT, {"cache_salt": "\x00"}, "cache_salt"),
                (PROMPT, {"params": params(bad_words=[" "])}, "bad_words[0]"),
            ]:
                with pytest.raises(ParameterError) as caught:
                    engine.generate("a", prompt, **{"params": params(), **fields})  # type: ignore[arg-type]
                assert caught.value.field == field
            with pytest.raises(ParameterError, match="in use"):
                engine.generate("same", PROMPT, params())
            assert engine.num_requests == 1
            await held.aclose()

    asyncio.run(main())


# Admission, figures, drain


def test_a_full_queue_refuses_with_a_time_to_come_back() -> None:
    async def main() -> None:
        options = {"max_num_queued_reqs": 3, "max_num_queued_tokens": 40}
        async with running(script("--step-seconds", "0.05"), options=options, max_num_seqs=2) as engine:
            seen: list[str] = []
            engine.observers.append(lambda event, facts: seen.append(event))
            streams = [engine.generate(str(i), PROMPT, params(2000)) for i in range(5)]
            with pytest.raises(QueueFullError) as full:
                engine.generate("6", PROMPT, params(5))
            assert full.value.reason == "requests" and 1 <= full.value.retry_after <= 60
            assert seen == ["added"] * 5 + ["rejected"] and engine.stats["num_queued"] == 3
            for stream in streams[1:]:
                await stream.aclose()
            with pytest.raises(QueueFullError) as full:
                engine.generate("7", [1] * 36, params(5))
            assert full.value.reason == "tokens"
            await streams[0].aclose()
            await read(engine.generate("8", [1] * 100, params(5)))  # alone it may be longer than the limit
            assert engine.stats["num_queued_tokens"] == 0

    asyncio.run(main())


def test_observers_see_each_request_from_its_begin_to_its_end() -> None:
    async def main() -> None:
        async with running(script("--step-seconds", "0.002")) as engine:
            seen: list[tuple[str, int, int]] = []
            facts_of: dict[str, RequestFacts] = {}

            def look(event: str, facts: RequestFacts) -> None:
                facts_of[facts.request_id] = facts
                if facts.request_id == "a":
                    seen.append((event, facts.num_new_tokens, facts.num_output_tokens))

            def break_down(event: str, facts: RequestFacts) -> None:
                raise RuntimeError("an observer with a bug")

            engine.observers += [break_down, look]
            await read(engine.generate("a", PROMPT, params(3, n=2)))
            assert seen == [
                ("added", 0, 0),
                ("first_token", 2, 2),
                ("tokens", 2, 4),
                ("tokens", 2, 6),
                ("finished", 2, 6),
            ]
            facts = facts_of["a"]
            assert facts.finish_reasons == {0: "length", 1: "length"} and facts.queue_seconds is not None
            assert facts.arrival <= facts.first_token_at <= facts.previous_token_at <= facts.last_token_at  # type: ignore[operator]
            assert facts.finished_at is not None
            stream = engine.generate("b", PROMPT, params(300))
            await anext(stream)
            await stream.aclose()
            assert facts_of["b"].finished_at is not None and facts_of["b"].finish_reasons == {}

    asyncio.run(main())


@pytest.mark.parametrize("kind", [RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY])
def test_what_a_step_brings_behind_a_stop_string_is_not_counted(kind: RequestOutputKind) -> None:
    async def main() -> None:
        async with running(script("--step-seconds", "1")) as engine:
            facts_of: dict[str, RequestFacts] = {}
            engine.observers.append(lambda event, facts: facts_of.update({facts.request_id: facts}))
            prompt = engine.tokenizer.encode("one two three")
            stream = engine.generate("a", prompt, params(2000, stop=["two"], output_kind=kind))
            engine.engine_updates(Updates(1, [RequestUpdate("a", tokens=prompt)]))  # as a verification may bring it
            tokens, last = await read(stream)
            assert last.outputs[0].stop_reason == "two" and len(tokens) < len(prompt)
            assert facts_of["a"].num_output_tokens == facts_of["a"].num_new_tokens == len(tokens)

    asyncio.run(main())


def test_draining_lets_open_streams_finish_and_takes_no_new_ones() -> None:
    async def main() -> None:
        async with running(script("--step-seconds", "0.01")) as engine:
            short = asyncio.create_task(read(engine.generate("short", PROMPT, params(10))))
            await asyncio.sleep(0.02)
            drained = asyncio.create_task(engine.drain(10))
            await asyncio.sleep(0)
            assert engine.state == "draining" and not engine.ready
            with pytest.raises(EngineDrainingError):
                engine.generate("new", PROMPT, params())
            assert await drained
            assert (await short)[0] == said(PROMPT, 10)

        async with running(script("--step-seconds", "0.01")) as engine:
            long = asyncio.create_task(read(engine.generate("long", PROMPT, params(2000))))
            await asyncio.sleep(0.02)
            assert not await engine.drain(0.1)
            with pytest.raises(EngineDrainingError):
                await long

    asyncio.run(main())


def test_the_prefix_cache_is_not_reset_under_a_request() -> None:
    async def main() -> None:
        async with running(script("--step-seconds", "0.01")) as engine:
            stream = engine.generate("a", PROMPT * 10, params(2000))
            await anext(stream)
            assert not await engine.reset_prefix_cache()
            await stream.aclose()
            assert await engine.reset_prefix_cache()

    asyncio.run(main())


def test_the_log_says_when_an_engine_is_back(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Its last line was that the engine is down."""
    monkeypatch.setattr(LOGGER, "propagate", True)

    async def main() -> None:
        async with running(script()) as engine:
            os.kill(pid_of(engine) or 0, signal.SIGKILL)
            await until(lambda: engine.stats["num_restarts"] == 1, patient(10))
            await engine.wait_ready(patient(10))

    asyncio.run(main())
    down, back = dict.fromkeys(line for line in caplog.messages if "the engine is" in line)
    assert down.startswith("the engine is down: ") and back == "the engine is back (start 2 of this server)"
