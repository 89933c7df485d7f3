"""A form that waits for the end of reasoning: what a row may say, whichever way it came to its tokens."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from octavo.grammar.compiler import Grammars, Vocabulary
from octavo.request.sampling_params import StructuredOutputsParams
from octavo.request.thinking import ClosingMark, Thinking
from octavo.sampling.thinking import AfterThinking, Anything
from world import World

WORDS = [
    b"<t>",
    b"</t>",
    b"</t>a",
    b"</t> ",
    b"</",
    b"t>",
    b"t>{",
    b"t>\n",
    b">",
    b">a",
    b"a",
    b"b",
    b"ab",
    b"<",
    b"/",
    b"t",
    b"\n",
    b"",
]
ID = {word: at for at, word in enumerate(WORDS)}
EOS, V = ID[b""], len(WORDS)
FORM = StructuredOutputsParams(regex="[ab]{3}")
GRAMMARS = Grammars(lambda: Vocabulary(WORDS, [EOS], [EOS]), V, [EOS])


def _ids(*words: str) -> list[int]:
    return [ID[word.encode()] for word in words]


def _thinking(**fields: Any) -> Thinking:
    return Thinking(**{"closing": "</t>", "closing_ids": _ids("</t>"), "is_open": True, **fields})


def _allowed(output: list[int], thinking: Thinking, budget: int | None = None, form: Any = None) -> set[str] | None:
    follower = AfterThinking(GRAMMARS, thinking, budget, form or GRAMMARS.matcher(FORM))
    bits = np.zeros(1, np.int32)
    if not follower.fill(np.array(output, np.int32), bits):
        return None
    return {WORDS[at].decode() for at in range(V) if int(bits.view(np.uint32)[0]) >> at & 1}


@pytest.mark.parametrize(
    ("output", "missing"),
    [
        ([], {"", "</t>a"}),  # neither an end before the answer, nor a piece of it before the form
        (["a", "</"], {"", "</t>a", "t>{"}),
        (["<", "/", "t"], {"", "</t>a", ">a"}),
        (["</", "a"], {"", "</t>a"}),
        (["<", "</"], {"", "</t>a", "t>{"}),
    ],
)
def test_reasoning_goes_on_as_it_likes(output: list[str], missing: set[str]) -> None:
    everything = {word.decode() for word in WORDS}
    assert _allowed(_ids(*output), _thinking()) == everything - missing


@pytest.mark.parametrize("end", [["</t>"], ["</t> "], ["</", "t>"], ["</", "t>\n"], ["<", "/", "t", ">"]])
def test_the_form_begins_behind_the_mark_however_it_is_spelt(end: list[str]) -> None:
    output = _ids("a", "</", "b", *end)
    assert _allowed(output, _thinking()) == {"a", "b", "ab"}
    assert _allowed(output + _ids("a", "a"), _thinking()) == {"a", "b"}
    assert _allowed(output + _ids("a", "ab"), _thinking()) == {""}


def test_a_model_may_open_its_reasoning_itself_or_leave_it() -> None:
    thinking = _thinking(is_open=False, opening_id=ID[b"<t>"])
    assert _allowed([], thinking) == {"<t>", "\n", "a", "b", "ab"}
    assert _allowed(_ids("a"), thinking) == {"a", "b", "ab"}
    assert _allowed(_ids("<t>", "/"), thinking) == {word.decode() for word in WORDS} - {"", "</t>a"}
    assert _allowed(_ids("<t>", "/", "</t>"), thinking) == {"a", "b", "ab"}


def test_a_model_may_break_the_line_before_it_thinks() -> None:
    thinking = _thinking(is_open=False, opening_id=ID[b"<t>"])
    assert _allowed(_ids("\n"), thinking) == {"<t>"}  # else the line break would stand before the form
    assert _allowed(_ids("\n", "<t>", "a", "</t>"), thinking) == {"a", "b", "ab"}
    assert _allowed(_ids("\n", "<t>", "a"), thinking, 1) == {"</t>"}
    own = GRAMMARS.matcher(StructuredOutputsParams(regex="\\n?[ab]"))
    assert _allowed(_ids("\n"), thinking, None, own) == {"a", "b"}  # it is the form's
    free = {word.decode() for word in WORDS}
    assert _allowed(_ids("\n"), thinking, 0, Anything()) == _allowed(_ids("\n", "a"), thinking, 0, Anything()) == free
    assert _allowed(_ids("\n", "<t>"), thinking, 0, Anything()) == {"</t>"}


def test_a_budget_ends_the_reasoning() -> None:
    two = _thinking(closing_ids=_ids("</", "t>"))
    assert _allowed([], two, 0) == {"</"} and _allowed(_ids("</"), two, 0) == {"t>"}
    assert _allowed(_ids("</", "t>"), two, 0) == {"a", "b", "ab"}
    assert "a" in (_allowed(_ids("a"), two, 2) or ())
    assert _allowed(_ids("a", "</"), two, 2) == {"</"}
    assert _allowed(_ids("a", "</", "</", "t>"), two, 2) == {"a", "b", "ab"}
    own = _thinking(is_open=False, opening_id=ID[b"<t>"])
    assert _allowed(_ids("<t>"), own, 0) == {"</t>"} and "b" in (_allowed(_ids("<t>"), own, 1) or ())
    free = {word.decode() for word in WORDS}
    assert (
        _allowed(_ids("b"), own, 0, Anything()) == free
        and _allowed(_ids("<t>", "a", "</t>"), own, 1, Anything()) == free
    )
    assert _allowed(_ids("a"), _thinking(), 5, Anything()) == free


def test_what_is_allowed_does_not_depend_on_the_way() -> None:
    """Any output of a request in any order, as drafts and resumed rows bring them, against a fresh follower each."""
    rng = random.Random(1)
    thinking = _thinking()
    follower = AfterThinking(GRAMMARS, thinking, 6, GRAMMARS.matcher(FORM))
    outputs = [[rng.randrange(V - 1) for _ in range(rng.randrange(9))] for _ in range(60)]
    outputs += [_ids("a", "</", "t>", *"ab"[: at % 3]) for at in range(9)] * 2
    rng.shuffle(outputs)
    for output in outputs:
        bits = np.zeros(1, np.int32)
        done = follower.fill(np.array(output, np.int32), bits)
        fresh = np.zeros(1, np.int32)
        assert (
            AfterThinking(GRAMMARS, thinking, 6, GRAMMARS.matcher(FORM)).fill(np.array(output, np.int32), fresh) == done
        )
        assert bits[0] == fresh[0], output


def test_marks_that_repeat_themselves_are_found() -> None:
    tokens = [b"a", b"b", b"ab!", b"aab!", b"b!"]
    mark = ClosingMark("aab", tokens, [], 1)
    state = 0
    for token in (0, 0, 0):
        state = mark.advance(state, token)
    assert state == 2 and mark.advance(state, 1) == -1 and mark.advance(state, 2) == -1
    forbidden = [{at for at in range(5) if not int(allowed[0]) >> at & 1} for allowed in mark.allowed]
    assert forbidden == [{3}, {2, 3}, {2, 3, 4}]


def test_a_row_thinks_and_then_keeps_its_form() -> None:
    world = World(vocab_size=V, grammars=GRAMMARS)
    options = {"structured_outputs": FORM, "thinking": _thinking(), "thinking_token_budget": 4, "eos": [EOS], "seed": 5}
    world.add(0, **options)
    world.add(1)
    for step in range(12):
        logits = torch.randn(1, V, generator=torch.Generator().manual_seed(step)) * 3
        world.add(7, output=[int(token) for token in world.known[0][3:]], **options)  # as after a preemption
        output = world.sample([0, 7, 1], logits.expand(3, V).contiguous())
        assert not output.failed.any() and int(output.tokens[0]) == int(output.tokens[1])
        world.commit(0, int(output.tokens[0]))
        world.commit(1, int(output.tokens[2]))
        if world.known[0][-1] == EOS:
            break
    text = b"".join(WORDS[int(token)] for token in world.known[0][3:])
    head, _, answer = text.partition(b"</t>")
    assert len(answer.strip()) == 3 and world.known[0][-1] == EOS and head is not None
