"""GrammarMask: the rows that ask are held to their form, the others keep every bit, whatever happens to rows."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest
import torch

from octavo.grammar.compiler import Grammars, Matcher, Vocabulary
from octavo.request.sampling_params import StructuredOutputsParams
from octavo.request.thinking import ClosingMark, Thinking
from octavo.sampling.grammar import HELD, TOO_COMPLEX
from octavo.sampling.sampler import FAILURES
from world import World

V = 97
EOS = 96
TOKENS = [bytes([32 + at]) for at in range(95)] + [b"ab", b""]
A, B, C = (ord(char) - 32 for char in "abc")


def grammar_world(device: str) -> World:
    vocabulary = Vocabulary(TOKENS, [EOS], [EOS])
    return World(vocab_size=V, device=device, grammars=Grammars(lambda: vocabulary, V, [EOS]))


@pytest.fixture
def world() -> World:
    return grammar_world("cpu")


def _logits(num_rows: int, seed: int) -> torch.Tensor:
    return torch.randn(num_rows, V, generator=torch.Generator().manual_seed(seed)) * 3


def _regex(text: str) -> dict[str, Any]:
    return {"structured_outputs": StructuredOutputsParams(regex=text), "eos": [EOS]}


def test_a_row_follows_its_grammar_and_then_ends(world: Any) -> None:
    world.add(0, **_regex("[abc]{2,3}"), seed=3)
    text = []
    for step in range(4):
        output = world.sample([0], _logits(1, step))
        assert not output.failed.any()
        text.append(int(output.tokens[0]))
        world.commit(0, text[-1])
        if text[-1] == EOS:
            break
    assert text[-1] == EOS and b"ab" in b"".join(TOKENS[token] for token in text) + b"ab"
    assert all(TOKENS[token] in (b"a", b"b", b"c", b"ab") for token in text[:-1])


def test_other_rows_keep_every_bit(world: Any) -> None:
    for row in range(6):
        world.add(row, seed=row, logprobs=3)
    logits = _logits(12, 1)
    alone = world.sample(range(6), logits[:6])
    for row in range(6, 12):
        world.add(row, **_regex("[a-c]+"), seed=row)
    together = world.sample(range(12), logits)
    assert torch.equal(together.tokens[:6], alone.tokens)
    assert torch.equal(together.logprobs[0].values, alone.logprobs[0].values)
    allowed = {A, B, C, TOKENS.index(b"ab")}
    assert set(together.tokens[6:].tolist()) <= allowed


def test_allowed_tokens_keep_their_bits(world: Any) -> None:
    world.add(0, **_regex("[abc]"))
    logits = _logits(1, 2)
    masked = logits.clone()
    world.queue.apply()
    world.sampler.apply_staged()
    batch = _batch([0], [3])
    grammar = next(stage for stage in world.sampler._stages if type(stage).__name__ == "GrammarMask")
    grammar(masked, batch)
    kept = masked[0] != -torch.inf
    assert kept.nonzero().flatten().tolist() == [A, B, C]
    assert torch.equal(masked[0][kept], logits[0][kept])


def _batch(rows: list[int], positions: list[int]) -> Any:
    import numpy as np

    from octavo.sampling.rows import SampleBatch

    return SampleBatch(
        rows=torch.tensor(rows), positions=torch.tensor(positions), rows_np=np.array(rows), max_position=max(positions)
    )


def test_replay_drafts_and_row_changes_give_the_same_tokens(world: Any) -> None:
    """A resumed row, one with drafts after its end, and one that never stopped answer alike."""
    rng = random.Random(0)
    form = _regex("(abc|acb|bca){4}")
    world.add(0, **form, seed=9)
    for step in range(12):
        logits = _logits(1, step)
        output = [int(token) for token in world.known[0][3:]]
        world.add(5, output=output, **form, seed=9)  # as after preemption
        expected = int(world.sample([0], logits).tokens[0])
        assert int(world.sample([5], logits).tokens[0]) == expected
        drafts = [expected, *rng.choices([A, B, C], k=2)]
        for draft in drafts:
            world.commit(5, draft)
        end = len(world.known[0])
        many = world.sample([5, 5, 5], logits.expand(3, V).contiguous(), [end, end + 1, end + 2])
        assert int(many.tokens[0]) == expected
        world.commit(0, expected)
        if expected == EOS:
            break


def test_what_cannot_go_on_fails_alone(world: Any) -> None:
    world.add(0, **_regex("[abc]"), min_tokens=9)
    world.add(1, **_regex("x["))  # never compiled
    world.add(2, **_regex("[abc]+"))
    world.add(3, output=[A, 5], **_regex("[abc]+"))  # left its grammar
    first = world.sample([0, 1, 2, 3], _logits(4, 0))
    assert first.failed.tolist() == [0, 2, 0, 2]
    world.commit(0, int(first.tokens[0]))
    assert world.sample([0, 2], _logits(2, 1)).failed.tolist() == [2, 0]


def test_a_removed_row_forgets_its_grammar(world: Any) -> None:
    world.add(0, **_regex("[abc]"))
    world.remove(0)
    world.add(0, temperature=0)
    logits = _logits(1, 4)
    assert int(world.sample([0], logits).tokens[0]) == int(logits.argmax())


def test_nan_is_still_seen(world: Any) -> None:
    world.add(0, **_regex("[abc]"))
    logits = _logits(1, 0)
    logits[0, 7] = torch.nan
    assert world.sample([0], logits).failed.tolist() == [1]


class _Gate:
    """Holds up the masks of one form until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, regex: str) -> None:
        self.opened, self.threads = threading.Event(), set[int]()
        slow, fill = StructuredOutputsParams(regex=regex), Matcher.fill

        def wait(matcher: Matcher, output: Any, bits: Any) -> bool:
            self.threads.add(threading.get_ident())
            if matcher.form.structured == slow:
                assert self.opened.wait(60)
            return fill(matcher, output, bits)

        monkeypatch.setattr(Matcher, "fill", wait)


def test_a_late_mask_holds_its_own_row_only(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = _Gate(monkeypatch, "[abc]+")
    vocabulary = Vocabulary(TOKENS, [EOS], [EOS])
    world = World(vocab_size=V, grammars=Grammars(lambda: vocabulary, V, [EOS]), mask_patience=0.05)
    world.add(0, seed=3)
    world.add(1, **_regex("[abc]+"), seed=4)
    logits = _logits(2, 5)
    alone = world.sample([0], logits[:1]).tokens
    for _ in range(3):  # as often as it takes
        output = world.sample([0, 1], logits)
        assert output.failed.tolist() == [0, HELD] and output.held.tolist() == [1]
        assert torch.equal(output.tokens[:1], alone)
    gate.opened.set()
    while (output := world.sample([0, 1], logits)).held.size:
        pass
    assert output.failed.tolist() == [0, 0]
    patient = grammar_world("cpu")
    patient.add(1, **_regex("[abc]+"), seed=4)
    assert int(patient.sample([1], logits[1:]).tokens[0]) == int(output.tokens[1])
    assert threading.get_ident() not in gate.threads


def test_a_row_that_goes_while_its_mask_is_made_disturbs_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = _Gate(monkeypatch, "[abc]+")
    world = grammar_world("cpu")
    world.add(0, **_regex("[abc]+"))
    world.remove(0)
    world.add(0, **_regex("[ab]"), seed=1)
    assert not world.sample([0], _logits(1, 6)).failed.any()
    gate.opened.set()


def test_no_form_is_compiled_in_the_steps_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads, build = [], Grammars._build

    def note(grammars: Grammars, structured: StructuredOutputsParams) -> Any:
        threads.append(threading.get_ident())
        return build(grammars, structured)

    monkeypatch.setattr(Grammars, "_build", note)
    world = grammar_world("cpu")
    for row in range(20):
        world.add(row, **_regex("[abc]+" if row else "("))
    failed = world.sample(range(20), _logits(20, 7)).failed
    assert failed.tolist() == [2] + [0] * 19
    assert len(threads) == 2 and threading.get_ident() not in threads


def test_no_end_of_reasoning_is_made_in_the_steps_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes the vocabulary apart, 0.3 s of a large one: nobody but the row's own masks waits for it."""
    threads, make = [], ClosingMark.__init__

    def note(mark: ClosingMark, *args: Any) -> None:
        threads.append(threading.get_ident())
        make(mark, *args)

    monkeypatch.setattr(ClosingMark, "__init__", note)
    world = grammar_world("cpu")
    thinking = Thinking(closing="c", closing_ids=[C], is_open=True)
    for row in range(3):
        world.add(row, thinking=thinking, seed=row, **_regex("[ab]"))
    world.add(3, thinking=thinking, thinking_token_budget=0)
    output = world.sample(range(4), _logits(4, 11))
    assert output.failed.tolist() == [0] * 4 and int(output.tokens[3]) == C
    assert len(threads) == 1 and threading.get_ident() not in threads


def test_a_form_that_meets_a_limit_is_compiled_once_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row compiled it again: 256 rows held up one step for half a minute."""
    calls, build = [], Grammars._build
    monkeypatch.setattr(Grammars, "_build", lambda *args: (calls.append(1), build(*args))[1])
    world = grammar_world("cpu")
    rules = "\n".join(f'r{n}: r{n + 1} | "b{n}"' for n in range(2100))
    form = {"structured_outputs": StructuredOutputsParams(grammar=f'start: "aa" r0\n{rules}\nr2100: "c"'), "eos": [EOS]}
    for row in range(12):
        world.add(row, output=[A] if row else (), **form)
    world.add(12, **_regex("[abc]"))
    output = world.sample(range(13), _logits(13, 8))
    assert output.failed.tolist() == [0] + [TOO_COMPLEX] * 11 + [0] and FAILURES[TOO_COMPLEX] == "schema_too_complex"
    assert len(calls) == 2


def test_a_grammar_that_breaks_the_library_ends_its_row_only(monkeypatch: pytest.MonkeyPatch) -> None:
    fill = Matcher.fill

    def panic(matcher: Matcher, output: Any, bits: Any) -> bool:
        if matcher.form.structured.regex == "[ab]+":
            raise BaseException("a panic")  # as pyo3 raises it
        return fill(matcher, output, bits)

    monkeypatch.setattr(Matcher, "fill", panic)
    world = grammar_world("cpu")
    world.add(0, **_regex("[ab]+"))
    world.add(1, **_regex("[abc]+"))
    world.add(2, seed=1)
    assert world.sample([0, 1, 2], _logits(3, 9)).failed.tolist() == [TOO_COMPLEX, 0, 0]
