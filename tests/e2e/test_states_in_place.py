"""States that take the blocks of those before them: whatever comes between the steps around a border, no bit changes.

Blocks are as good as always short here, so that states move wherever they may.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from importlib import resources
from typing import Any

import pytest
from safetensors.torch import load_file

from engine_checks import assert_idle
from octavo import LLM, SamplingParams
from octavo.request.structured_outputs import StructuredOutputsParams
from octavo.sampling.grammar import GrammarMask
from octavo.sampling.mask_jobs import MaskJob
from octavo.sched.advancing import Advancing
from octavo.sched.pause import PauseOrder, ResetOrder, SleepOrder, WakeOrder

MODEL, BORDER = "octavo-tiny-hybrid", 128
LIMITS: dict[str, Any] = {"max_num_seqs": 6, "max_model_len": 192, "max_num_batched_tokens": 256, "num_threads": 1}
SHARED = [(7 * i * i + 3 * i) % 290 + 3 for i in range(BORDER)]
PROMPTS = [SHARED[:110], [*SHARED[:110], 9], SHARED[:107], [5] * 109, SHARED[:110]]
FORM = StructuredOutputsParams(regex="[a-z ]{900,1000}")
Answer = tuple[list[int], list[dict[int, float]]]


def _params(index: int, **own: Any) -> SamplingParams:
    return SamplingParams(max_tokens=24, seed=index, logprobs=0, ignore_eos=True, **own)


REQUESTS = [(prompt, _params(index)) for index, prompt in enumerate(PROMPTS)]
FORMS = [(prompt, _params(index, structured_outputs=FORM)) for index, prompt in enumerate(PROMPTS[:3])]


def _run(llm: LLM, asked: list[tuple[list[int], SamplingParams]], between: Callable[[int], object]) -> list[Answer]:
    """The answers. between: called between steps, with how many there were."""
    engine, found, num_steps = llm.engine, dict[str, Answer](), 0
    for index, (prompt, params) in enumerate(asked):
        engine.add(str(index), prompt, params)
    while engine.has_unfinished:
        for output in engine.step():
            if output.finished:
                told = output.outputs[0]
                assert told.logprobs is not None
                values = [{token: entry.logprob for token, entry in each.items()} for each in told.logprobs]
                found[output.request_id] = list(told.token_ids), values
        num_steps += 1
        between(num_steps)
    assert_idle(llm)
    return [found[str(index)] for index in range(len(asked))]


@pytest.fixture(scope="module")
def alone() -> list[Answer]:
    """Of REQUESTS and FORMS, each by itself in an engine that has room."""
    with LLM(MODEL, dtype="float32", enable_prefix_caching=True, **LIMITS) as llm:
        found = []
        for each in (*REQUESTS, *FORMS):
            found += _run(llm, [each], lambda _: None)
            llm.reset_prefix_cache()
        return found


@pytest.fixture
def num_moves(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many states moved."""
    count, moves = [0], Advancing.moves

    def counted(*args: Any) -> Any:
        found = moves(*args)
        count[0] += len(found)
        return found

    monkeypatch.setattr(Advancing, "moves", counted)
    monkeypatch.setattr(Advancing, "has_room", lambda *_: False)
    yield count


def _disturb(llm: LLM, what: str, weights: dict[str, Any], version: str) -> None:
    engine = llm.engine
    if what in ("recompute", "keep_kv"):
        with llm.weights(version, on_running=what) as load:
            for name, tensor in weights.items():
                load(name, tensor)
    elif what == "reset":
        engine.ask("reset_prefix_cache", ResetOrder(reset_running_requests=True))
    else:
        engine.ask("pause", PauseOrder(clear_cache=what == "clear"))
        engine.settle(abort=False)
        if what == "sleep":
            engine.ask("sleep", SleepOrder(level=1, ends_pause=True))
            engine.ask("wake_up", WakeOrder())
        engine.ask("resume")


@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_comes_between_steps_around_a_border_changes_no_bit(
    alone: list[Answer], num_moves: list[int], asynchronous: bool
) -> None:
    """Pauses, sleep, resets and the same weights anew, at each step around it, of rows some of which share states."""
    weights = load_file(str(resources.files("octavo").joinpath(f"assets/{MODEL}/model.safetensors")))
    draw = random.Random(3)
    settings: dict[str, Any] = {"enable_prefix_caching": True, "async_scheduling": asynchronous, **LIMITS}
    with LLM(MODEL, dtype="float32", **settings) as llm:
        for what in ("pause", "clear", "reset", "sleep", "keep_kv", "recompute"):
            at = {draw.randrange(3, 22) for _ in range(2)}

            def between(step: int, what: str = what, at: set[int] = at) -> None:
                if step in at:
                    _disturb(llm, what, weights, f"{what} {step}")

            assert _run(llm, REQUESTS, between) == alone[: len(REQUESTS)], (what, at)
    assert num_moves[0] > 6


def test_a_row_whose_mask_comes_late_computes_its_token_with_the_state_that_it_had(
    alone: list[Answer], num_moves: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And rows beside it, whose states move, compute theirs once."""
    draw, hidden, num_held = random.Random(4), set[MaskJob](), 0

    def wait(mask: GrammarMask, jobs: list[MaskJob], *, has_others: bool) -> None:
        nonlocal hidden, num_held
        for job in hidden.intersection(jobs):
            job.is_done = True
        while not all(job.is_done for job in jobs):
            mask._lanes.wait(jobs, len(jobs), 1.0)
        late = [job for job in jobs if job not in hidden and draw.random() < 0.6]
        hidden = {*hidden, *late}
        num_held += len(late)
        for job in late:
            job.is_done = False

    monkeypatch.setattr(GrammarMask, "_wait", wait)
    with LLM(MODEL, dtype="float32", enable_prefix_caching=False, **LIMITS) as llm:
        assert _run(llm, [*REQUESTS[:3], *FORMS], lambda _: None) == [*alone[:3], *alone[len(REQUESTS) :]]
    assert num_held > 20 and num_moves[0] == 3
