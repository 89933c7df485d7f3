"""A process that is forked from one with an LLM: it answers, or says at once why not, and the parent is untouched."""

from __future__ import annotations

import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.request.sampling_params import StructuredOutputsParams

PARAMS = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
FORM = SamplingParams(temperature=0.0, max_tokens=8, structured_outputs=StructuredOutputsParams(regex="[ab]{2,9}"))
LONG = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
PATIENCE = 120  # seconds until a child that hangs is a failure


@pytest.fixture(scope="module", params=[False, True], ids=["waits", "plans ahead"])
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM(dtype="float32", async_scheduling=request.param) as made:
        yield made


def in_child(action: Callable[[], Any]) -> Any:
    """What `action` returns, or the text of what it raises, in a forked process."""
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        signal.alarm(PATIENCE)
        try:
            answer: Any = action()
        except Exception as error:
            answer = f"{type(error).__name__}: {error}"
        with open(writer, "wb") as file:
            file.write(pickle.dumps(answer))
        os._exit(0)
    os.close(writer)
    with open(reader, "rb") as file:
        data = file.read()
    assert os.waitpid(pid, 0)[1] == 0, "the child hung"
    return pickle.loads(data)


def answers(llm: LLM) -> list[list[int]]:
    outputs = llm.generate(["a b", "c"], [PARAMS, FORM], use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_a_child_of_an_idle_engine_answers(llm: LLM) -> None:
    """Also with what the engine's threads did in the parent: they are not there."""
    wanted = answers(llm)

    def use() -> Any:
        found = answers(llm)
        llm.close()
        return found

    assert in_child(use) == wanted == answers(llm)


def test_a_child_of_a_busy_engine_says_so_at_once(llm: LLM) -> None:
    wanted = answers(llm)
    within, may_go_on = threading.Event(), threading.Event()
    step = llm.engine.step

    def held() -> Any:
        within.set()
        may_go_on.wait(PATIENCE)
        return step()

    llm.engine.step = held  # type: ignore[method-assign]
    other = threading.Thread(target=llm.generate, args=(["a"], LONG), kwargs={"use_tqdm": False})
    try:
        other.start()
        assert within.wait(PATIENCE)
        for use in (lambda: answers(llm), lambda: next(llm.stream("a")), lambda: llm.reset_prefix_cache()):
            assert "RuntimeError: this LLM belongs to process" in in_child(use)
        assert in_child(llm.close) is None
    finally:
        del llm.engine.step
        may_go_on.set()
        other.join(PATIENCE)
    assert answers(llm) == wanted
