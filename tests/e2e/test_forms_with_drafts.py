"""Forms beside drafts as a GPU has them: the host learns of tokens and drafts by copies alone, a step late (S.10).

A CPU's tables are read at once, so this engine is told that it has none: what it may know comes through the copies that
a step begins, and a read of anything else fails.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from drafter_rig import SPEAKERS, make
from octavo.sampling import grammar
from octavo.sampling.grammar import GrammarMask
from octavo.sampling.told import Line, ToldTokens
from test_drafts import PROMPTS, Counts, Job, facts, form, params, run, said_without

_NUMBER = {"type": "tag", "begin": "(", "content": {"type": "regex", "pattern": "[0-9]{1,3}"}, "end": ")"}
FORMS: list[dict[str, Any]] = [
    form(structural_tag={"format": {"type": "triggered_tags", "triggers": ["("], "tags": [_NUMBER]}}),
    form(regex="[a-d ]{20,40}"),
    form(json={"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}),
    form(choice=["return a", "return b"]),
    {},
]
JOBS: list[Job] = [
    (PROMPTS[index % len(PROMPTS)], params(max_tokens=40, seed=index, temperature=0.8 * (index % 2), logprobs=1, **one))
    for index, one in enumerate(FORMS * 3)
]


class Event:
    """Of work that is done."""

    def record(self) -> None:
        """It is."""

    def synchronize(self) -> None:
        """It is."""

    def query(self) -> bool:
        return True


class Ring:
    def take(self, num_words: int) -> tuple[torch.Tensor, Event]:
        return torch.empty(num_words, dtype=torch.int32), Event()


@pytest.fixture
def blind(monkeypatch: pytest.MonkeyPatch) -> list[Line]:
    """Engines made from now on learn by copies alone; what these said."""
    made, told = GrammarMask.__init__, list[Line]()
    take = ToldTokens.take

    def without_table(self: GrammarMask, *args: Any, **fields: Any) -> None:
        made(self, *args, **fields)
        self._tokens_np, self._ring = None, Ring()  # type: ignore[assignment]
        self._told = ToldTokens(self._tokens, self._ring)  # type: ignore[arg-type]

    def heard(self: ToldTokens) -> Any:
        for line in take(self):
            told.append(line)
            yield line

    def waits(*_: Any, **__: Any) -> Any:
        raise AssertionError("this waits for a GPU")

    monkeypatch.setattr(GrammarMask, "__init__", without_table)
    monkeypatch.setattr(ToldTokens, "take", heard)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.Tensor, "cpu", waits)
    assert grammar.HELD == 3
    return told


@pytest.mark.parametrize("in_flight", [False, True], ids=["alone", "one in flight"])
@pytest.mark.parametrize("fields", [{}, {"max_num_seqs": 3, "max_num_batched_tokens": 24}], ids=["all", "few rows"])
@pytest.mark.parametrize("name", ["ngram", "eagle3"])
def test_S_10_masks_behind_drafts_are_made_of_copies(
    blind: list[Line], name: str, fields: dict[str, Any], in_flight: bool
) -> None:
    expected = facts(said_without(make, fields, JOBS))
    assert not blind, "without a speculator drawn tokens are copied, and nothing else"
    given = SPEAKERS.get(name, {"method": "ngram", "prompt_lookup_min": 1})
    engine = make(given, **fields, async_scheduling=in_flight)
    counts = Counts(engine)
    assert facts(run(engine, JOBS)) == expected
    assert counts.num_drafted > 20 and len(blind) > 10
    engine.close()


def test_a_copy_says_the_end_of_a_row_and_its_drafts() -> None:
    tokens = torch.arange(40, dtype=torch.int32).view(2, 20)
    told = ToldTokens(tokens, Ring())  # type: ignore[arg-type]
    assert list(told.take()) == []
    totals = torch.tensor([9, 3], dtype=torch.int32)
    told.begin([1, 0], totals, 2)
    tokens.zero_()
    first, second = told.take()
    assert first.total == 3 and first.last[-3:] == [20, 21, 22] and first.drafts == [23, 24]
    assert second == Line(0, 9, [3, 4, 5, 6, 7, 8], [9, 10])
    assert list(told.take()) == [], "once"
