"""Readers that are slow or leave, and memory over many requests, each with its figure (pytest -s)."""

from __future__ import annotations

import asyncio
import gc
import random
import time
from typing import Any

import psutil
import pytest

from engine_rig import PROMPT, params, pid_of, read, running, said, script, until
from octavo.request.outputs import RequestOutput
from octavo.serve.engine.async_engine import AsyncEngine
from octavo.serve.engine.stream import SlowReaderError


def test_streams_that_nobody_reads_hold_one_merged_output() -> None:
    async def main() -> None:
        async with running(script(), max_model_len=2048) as engine:
            gc.collect()
            before = psutil.Process().memory_info().rss
            slow = [engine.generate(f"slow-{i}", PROMPT, params(2000)) for i in range(50)]
            began = time.monotonic()
            tokens, _ = await read(engine.generate("fast", PROMPT, params(2000)))
            assert tokens == said(PROMPT, 2000)
            await until(lambda: engine.num_requests == 0, 60)
            grown = psutil.Process().memory_info().rss - before
            print(
                f"50 unread streams of 2000 tokens: {grown / 50 / 1024:.0f} KiB each, {time.monotonic() - began:.1f} s"
            )
            assert grown < 20 << 20
            for stream in slow:
                outputs = [output async for output in stream]
                assert len(outputs) == 1 and outputs[0].finished
                assert outputs[0].outputs[0].token_ids == said(PROMPT, 2000)

    asyncio.run(main())


def test_a_stream_with_too_much_unread_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.serve.engine.stream.MAX_UNREAD", 500)

    async def main() -> None:
        async with running(script()) as engine:
            stream = engine.generate("a", PROMPT, params(2000))
            await until(lambda: engine.num_requests == 0, 30)
            with pytest.raises(SlowReaderError):
                await read(stream)
            assert await engine.reset_prefix_cache()

    asyncio.run(main())


async def disconnect(engine: AsyncEngine, count: int, at_once: int, rng: random.Random) -> None:
    """Requests whose readers leave at a random time, in a random way: before, in, and after the answer."""
    gate = asyncio.Semaphore(at_once)

    async def one(i: int) -> None:
        async with gate:
            prompt = [rng.randrange(16, 4000) for _ in range(rng.randrange(1, 120))]
            fields = {"n": rng.choice([1, 1, 1, 3]), "logprobs": rng.choice([None, None, 2])}
            stream = engine.generate(f"gone-{i}", prompt, params(rng.randrange(1, 60), **fields))
            way, num_outputs = rng.randrange(4), rng.choice([0, 0, 1, 2, 5, 1000])
            if way == 0:
                task = asyncio.create_task(read(stream))
                await asyncio.sleep(rng.random() * 0.03)
                task.cancel()
                return
            for _ in range(num_outputs):
                if await anext(stream, None) is None:
                    break
            if way == 1:
                await engine.abort([f"gone-{i}"])
            elif way == 2:
                await stream.aclose()

    for start in range(0, count, 50):
        await asyncio.gather(*[one(i) for i in range(start, start + 50)])
        await asyncio.sleep(0)  # streams that were dropped say so in a callback
        # Answered after one step that has seen every abort: True means that no block is held any more.
        assert await engine.reset_prefix_cache(), "a block is still held"
        assert engine.num_requests == engine._frontend.num_sequences == len(engine._frontend._outputs._requests) == 0


async def check_disconnects(command: list[str] | None, count: int) -> None:
    async with running(command) as engine:
        began = time.monotonic()
        await disconnect(engine, count, 32, random.Random(7))
        tokens, _ = await read(engine.generate("after", PROMPT, params(20)))
        assert len(tokens) == 20
        await until(lambda: all(engine.stats[name] == 0 for name in ("cache_usage", "num_running", "num_waiting")), 10)
        stats = engine.stats  # a heartbeat's
        assert stats["num_restarts"] == stats["num_bad_frames"] == stats["num_queued_tokens"] == 0
        late = stats["num_unknown_aborts"]
        print(f"{count} disconnects in {time.monotonic() - began:.1f} s, {late} aborts came after the end")


def test_1000_disconnects_leave_no_block_behind() -> None:
    asyncio.run(check_disconnects(script("--step-seconds", "0.002"), 1000))


def test_100_disconnects_from_the_real_engine() -> None:
    asyncio.run(check_disconnects(None, 100))


# Memory


async def churn(engine: AsyncEngine, first: int, count: int, rng: random.Random) -> int:
    """Mixed requests, a fifth of them left. How many tokens were read."""
    gate, total = asyncio.Semaphore(200), 0

    async def one(i: int) -> None:
        nonlocal total
        async with gate:
            prompt = [rng.randrange(16, 4000) for _ in range(rng.randrange(1, 200))]
            fields: dict[str, Any] = {"n": rng.choice([1, 1, 1, 2]), "logprobs": rng.choice([None, None, None, 3])}
            stream = engine.generate(f"m-{i}", prompt, params(rng.randrange(1, 40), **fields))
            leaves_after = rng.randrange(4) if rng.random() < 0.2 else 1000
            output: RequestOutput | None
            while leaves_after and (output := await anext(stream, None)) is not None:
                leaves_after -= 1
                total += sum(len(part.token_ids) for part in output.outputs)
            await stream.aclose()

    await asyncio.gather(*[one(i) for i in range(first, first + count)])
    return total


async def check_memory(count: int) -> None:
    rng, own = random.Random(3), psutil.Process()
    # few blocks: the names of cached prefixes, which grow up to the cache's size, are complete after the warm-up
    async with running(script("--step-seconds", "0.001"), num_gpu_blocks_override=4096) as engine:
        assert pid_of(engine) is not None
        child = psutil.Process(pid_of(engine))

        def sizes() -> tuple[float, float, int, int, int]:
            gc.collect()
            mib = [process.memory_info().rss / 2**20 for process in (own, child)]
            return mib[0], mib[1], own.num_fds(), child.num_fds(), len(asyncio.all_tasks())

        warm = 4000
        for start in range(0, warm, 2000):
            await churn(engine, start, 2000, rng)
        before = sizes()
        began = time.monotonic()
        tokens = 0
        for start in range(warm, warm + count, 2000):  # as many tasks at a time as in the warm-up
            tokens += await churn(engine, start, 2000, rng)
        seconds = time.monotonic() - began
        assert await engine.reset_prefix_cache() and engine.num_requests == 0
        after = sizes()
        print(
            f"{count} requests, {tokens} tokens in {seconds:.1f} s ({count / seconds:.0f} requests/s): front end "
            f"{before[0]:.1f} -> {after[0]:.1f} MiB, engine {before[1]:.1f} -> {after[1]:.1f} MiB"
        )
        assert all(now <= was for now, was in zip(after[2:], before[2:], strict=True))  # less: of tests before it
        assert after[0] - before[0] < 4 and after[1] - before[1] < 4
        await until(lambda: engine.stats["cache_usage"] == 0, 10)


def test_memory_is_flat_over_2000_requests() -> None:
    asyncio.run(check_memory(2000))


@pytest.mark.slow
def test_memory_is_flat_over_20000_requests() -> None:
    asyncio.run(check_memory(20_000))
