"""An answer's events are a function of the request: not of the engine's pace, nor of the reader's."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from octavo.frontend.messages import Add
from paced_app import PacedApp

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
PROMPT = list(range(40, 52))
MESSAGES = [{"role": "user", "content": "hi"}]
NUM_PACES = 30


@pytest.fixture(scope="module")
def paced() -> Iterator[PacedApp]:
    with PacedApp() as app:
        yield app


def talk(add: Add, index: int) -> tuple[Sequence[int], str]:
    """Texts that differ by completion, with characters of several tokens."""
    return [random.Random(index).randrange(20, 400) for _ in range(7 + index)], "length"


def fail(add: Add, index: int) -> tuple[Sequence[int], str]:
    """The first completion meets a form that leaves no token; others go on."""
    return talk(add, index)[0], "no_token_allowed" if index == 0 else "length"


def by_choice(events: list[Any]) -> dict[Any, list[Any]]:
    """The events of each choice, in order; None: those of no choice."""
    found: dict[Any, list[Any]] = {}
    for event in events:
        choices = event.get("choices") or [{}]
        assert len(choices) == 1
        found.setdefault(choices[0].get("index"), []).append(event)
    return found


USAGE = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
ASKED = {
    "completions": (COMPLETIONS, {"prompt": PROMPT}),
    "n": (COMPLETIONS, {"prompt": PROMPT, "n": 3, "prompt_logprobs": 1, "logprobs": 2, "usr": 1} | USAGE),
    "prompts": (COMPLETIONS, {"prompt": [PROMPT, PROMPT[:4]], "n": 2, "prompt_logprobs": 0, "return_token_ids": True}),
    "chat": (CHAT, {"messages": MESSAGES, "n": 3, "prompt_logprobs": 1, "logprobs": True, "top_logprobs": 1} | USAGE),
    "responses": (RESPONSES, {"input": "hi"}),
}


@pytest.mark.parametrize("script", [talk, fail])
@pytest.mark.parametrize("asked", ASKED)
def test_the_events_of_a_choice_do_not_depend_on_the_pace(paced: PacedApp, asked: str, script: Any) -> None:
    path, fields = ASKED[asked]
    body = {"model": "octavo-tiny", "ignore_eos": True, **fields}
    first, *others = (by_choice(paced.events(path, body, script, seed)) for seed in range(NUM_PACES))
    if path == RESPONSES:  # these name their items after the answer
        first, *others = (_nameless(each) for each in (first, *others))
    assert sum(map(len, first.values())) >= 7
    for other in others:
        assert other == first


def _nameless(found: dict[Any, list[Any]]) -> dict[Any, list[Any]]:
    return {None: [(event["type"], event.get("delta"), event.get("text")) for event in found[None] if "type" in event]}


def test_the_first_choice_carries_what_is_said_once(paced: PacedApp) -> None:
    for name, fields in (("n", "prompt_logprobs"), ("n", "warnings"), ("chat", "prompt_logprobs")):
        path, body = ASKED[name]
        for seed in range(20):
            events = paced.events(path, {"model": "octavo-tiny", **body}, talk, seed)
            carrying = [e["choices"][0]["index"] for e in events if f'"{fields}"' in json.dumps(e)]
            assert carrying == [0]


def test_what_was_said_before_a_failure_is_shown(paced: PacedApp) -> None:
    """And the other choices end before the failure is told."""
    body = {"model": "octavo-tiny", "prompt": PROMPT, "n": 2}
    (whole,) = json.loads(paced.ask(COMPLETIONS, body | {"n": 1}, talk)[1])["choices"]
    for seed in range(20):
        *events, last = paced.events(COMPLETIONS, body, fail, seed)
        assert last["error"]["code"] == "no_token_allowed"
        texts = {0: "", 1: ""}
        for event in events:
            texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
        assert texts[0] == whole["text"] != ""
        reasons = [e["choices"][0]["finish_reason"] for e in events if e["choices"][0]["finish_reason"]]
        assert reasons == ["length"]
    status, reply = paced.ask(COMPLETIONS, body, fail)
    assert status == 400 and json.loads(reply)["error"]["code"] == "no_token_allowed"
