"""A drafter of a package that Octavo does not know, named by its path: the one of docs/adding.md, as it stands."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.config.settings import ConfigError
from octavo.frontend.metrics import Vector
from octavo.speculate import NoSpeculator
from octavo.speculate.step import DraftStep

PAGE = Path(__file__).resolve().parents[2] / "docs/adding.md"
PARAMS = [
    SamplingParams(temperature=heat, seed=place, max_tokens=40, ignore_eos=True, logprobs=0)
    for place, heat in enumerate((0.0, 0.7, 1.0))
]


@pytest.fixture
def mydrafts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The module can be imported."""
    section = PAGE.read_text(encoding="utf-8").partition("## A speculator")[2].partition("\n## ")[0]
    (tmp_path / "mydrafts.py").write_text(section.partition("```python\n")[2].partition("```")[0])
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("mydrafts", None)


def answers(**fields: Any) -> tuple[list[Any], int]:
    """Tokens and log-probabilities, and how many drafts were accepted."""
    with LLM(dtype="float32", **fields) as llm:
        outputs = llm.generate(["1, 2, 1, 2, 1, 2, 1,", "def f(x):", "a a a a a a"], PARAMS, use_tqdm=False)
        counts = {metric.name: getattr(metric, "value", None) for metric in llm.get_metrics()}
    said = [(each.outputs[0].token_ids, each.outputs[0].logprobs) for each in outputs]
    return said, counts["vllm:spec_decode_num_accepted_tokens"]


@pytest.mark.usefixtures("mydrafts")
def test_S_2_a_drafter_of_a_page_changes_no_bit() -> None:
    plain, _ = answers()
    for options in ({}, {"period": 3}):
        own = {"method": "mydrafts:Period", "num_speculative_tokens": 4, "options": options, "adaptive_depth": False}
        found, accepted = answers(speculative_config=own)
        assert found == plain and accepted > 0, options


class NoText(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


class Wrong(NoSpeculator):
    """Drafts once as it should, then does what `then` says."""

    then: Any = None

    def __init__(self, config: Any) -> None:
        self.num_drafts, self._num_steps = config.num_speculative_tokens, 0

    def propose(self, step: DraftStep) -> None:
        self._num_steps += 1
        rows = len(step.batch.rows)
        if self._num_steps == 1:
            step.write(0, torch.full((rows,), 300))
        elif isinstance(self.then, type):
            raise self.then
        else:
            step.write_all(torch.full((rows, self.num_drafts), self.then))


WRONG = [KeyError, NoText, SystemExit, KeyboardInterrupt, -1, 2**31 + 5, 1 << 62, float("nan"), float("inf")]


class Direct(NoSpeculator):
    """Writes the table by itself, as far as it goes, and raises where that is -5."""

    draft: Any = None

    def __init__(self, config: Any) -> None:
        self.num_drafts = config.num_speculative_tokens

    def propose(self, step: DraftStep) -> None:
        for row in step.batch.rows.tolist():
            step.table.token_ids[row, int(step.table.total_len[row]) :] = self.draft
        if self.draft == -5:
            raise ValueError("behind what it wrote")


@pytest.mark.parametrize("draft", [-1, -5, -(2**31), 4096, 2**31 - 1])
def test_whatever_a_speculator_writes_by_itself_outputs_are_as_ever(
    draft: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only what went through DraftStep.write was looked at: the rest was read behind the embedding's end."""
    plain, _ = answers()
    monkeypatch.setattr(Direct, "draft", draft)
    own = {"method": f"{__name__}:Direct", "num_speculative_tokens": 4, "adaptive_depth": False}
    assert answers(speculative_config=own)[0] == plain


class Behind(NoSpeculator):
    """Counts its places from another end."""

    place: int = -1

    def __init__(self, config: Any) -> None:
        self.num_drafts = config.num_speculative_tokens

    def propose(self, step: DraftStep) -> None:
        step.write_all(torch.full((len(step.batch.rows), 2), 7), self.place)


@pytest.mark.parametrize("place", [-1, -3])
def test_places_in_front_of_the_first_draft_are_known_tokens_and_stay(
    place: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """They were overwritten: the rows went on behind tokens that nobody drew."""
    plain, _ = answers()
    monkeypatch.setattr(Behind, "place", place)
    own = {"method": f"{__name__}:Behind", "num_speculative_tokens": 4, "adaptive_depth": False}
    assert answers(speculative_config=own)[0] == plain
    assert f"a row's drafts have numbers from 0 on, got {place}" in caplog.text


class Own(NoSpeculator):
    """Its number of drafts is an option, and another one once it was loaded; they are the last token again."""

    def __init__(self, config: Any) -> None:
        self._later = config.options.get("later")
        if "k" in config.options:
            self.num_drafts = config.options["k"]

    def load(self, target: Any, resolved: Any) -> int:
        self.num_drafts = self.num_drafts if self._later is None else self._later
        return 0

    def propose(self, step: DraftStep) -> None:
        last = step.table.token_ids[step.batch.rows, (step.totals() - 1).clamp(min=0)]
        for place in range(step.num_drafts):
            step.write(place, last)


def _own(**options: Any) -> dict[str, Any]:
    return {"method": f"{__name__}:Own", "num_speculative_tokens": 3, "options": options, "adaptive_depth": False}


@pytest.mark.parametrize(
    ("options", "shown", "change"),
    [
        ({}, "0", "set it"),
        ({"k": 4}, "4", "raise num_speculative_tokens, or set it"),
        ({"k": 300}, "300", "set it"),
        ({"k": -1}, "-1", "set it"),
        ({"k": True}, "True", "set it"),
        ({"k": 2.0}, "2.0", "set it"),
        ({"k": "2"}, "'2'", "set it"),
        ({"k": 2, "later": 4}, "4", "raise num_speculative_tokens, or set it"),
    ],
    ids=str,
)
def test_a_number_of_drafts_that_is_none_is_refused_at_the_start(options: Any, shown: str, change: str) -> None:
    """More than the setting says, or than anything has room for, ended in the device's errors, or in no drafts."""
    said = f"speculative_config='{__name__}:Own': its num_drafts is {shown}, and must be a whole number from 1 to "
    said += f"num_speculative_tokens=3; {change} in the class"
    with pytest.raises(ConfigError) as caught:
        LLM(dtype="float32", speculative_config=_own(**options)).close()
    assert str(caught.value) == said


def test_a_speculator_may_have_fewer_drafts_than_are_asked_for() -> None:
    plain, _ = answers()
    with LLM(dtype="float32", speculative_config=_own(k=2)) as llm:
        assert llm.engine.scheduler.drafting.most == 2
        (places,) = [metric for metric in llm.get_metrics() if isinstance(metric, Vector)]
        assert len(places.values) == 2
    found, accepted = answers(speculative_config=_own(k=2))
    assert found == plain and accepted > 0


@pytest.mark.parametrize("then", WRONG, ids=str)
def test_whatever_a_speculator_of_ones_own_does_outputs_are_as_ever(
    then: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What it raised ended the engine for all; ids that are none were read behind the embedding's end."""
    plain, _ = answers()
    monkeypatch.setattr(Wrong, "then", then)
    own = {"method": f"{__name__}:Wrong", "num_speculative_tokens": 4, "adaptive_depth": False}
    assert answers(speculative_config=own)[0] == plain
    told = [message for message in caplog.messages if f"the speculator {__name__}:Wrong fails: " in message]
    assert len(told) == isinstance(then, type)


class Wrongly(NoSpeculator):
    """Something of it is wrong once it is loaded."""

    field: str = ""
    value: Any = None

    def __init__(self, config: Any) -> None:
        self.num_drafts = config.num_speculative_tokens

    def load(self, target: Any, resolved: Any) -> Any:
        if self.field.startswith("num_"):
            setattr(self, self.field, self.value)
        elif self.field == "load":
            raise self.value
        return None if self.field == "bytes" else 0

    def allocate(self, batches: Any) -> None:
        if self.field == "allocate":
            raise self.value


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("num_lookahead", -3, "its num_lookahead is -3, and must be a whole number of tokens, at least 0"),
        ("num_lookahead", True, "its num_lookahead is True, and must be"),
        ("num_next_tokens", 1.0, "its num_next_tokens is 1.0, and must be"),
        ("num_next_tokens", None, "its num_next_tokens is None, and must be"),
        (
            "num_lookahead",
            1 << 70,
            f"its num_lookahead is {1 << 70}, and must be at most max_model_len=512, the longest",
        ),
        ("num_lookahead", 513, "its num_lookahead is 513, and must be at most max_model_len=512, the longest row; set"),
        ("num_next_tokens", 513, "its num_next_tokens is 513, and must be at most max_model_len=512, the longest row"),
        ("load", KeyError("x"), "cannot be loaded: KeyError"),
        ("bytes", None, "cannot be loaded: TypeError"),
        ("allocate", IndexError("x"), "cannot allocate what it keeps: IndexError"),
    ],
    ids=str,
)
def test_what_is_wrong_of_it_once_it_is_loaded_is_refused_by_name(
    field: str, value: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fewer tokens ahead than none gave rows too few blocks, and other tokens; the rest was a traceback."""
    monkeypatch.setattr(Wrongly, "field", field)
    monkeypatch.setattr(Wrongly, "value", value)
    own = {"method": f"{__name__}:Wrongly", "num_speculative_tokens": 3}
    with pytest.raises(ConfigError) as caught:
        LLM(dtype="float32", max_model_len=512, speculative_config=own).close()
    assert str(caught.value).startswith(f"speculative_config='{__name__}:Wrongly': {said}")


def test_a_row_may_be_shorter_than_its_drafter_looks_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was refused by a number that lies in Octavo's own class: `set it in the class`."""
    own = {"method": "mtp", "model": "octavo-tiny-mtp", "num_speculative_tokens": 5}
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    tokens = []
    for drafts in (own, None):
        with LLM(dtype="float32", max_model_len=4, speculative_config=drafts) as llm:
            (answer,) = llm.generate([{"prompt_token_ids": [5]}], params, use_tqdm=False)
            tokens.append(answer.outputs[0].token_ids)
    assert tokens[0] == tokens[1] and len(tokens[0]) == 3
    monkeypatch.setattr(Wrongly, "field", "num_lookahead")
    outside = {"method": f"{__name__}:Wrongly", "num_speculative_tokens": 3}
    for count in (17, 18):
        monkeypatch.setattr(Wrongly, "value", count)
        with pytest.raises(ConfigError) if count > 17 else contextlib.nullcontext() as refused:
            LLM(dtype="float32", max_model_len=4, speculative_config=outside).close()
    assert refused and "its num_lookahead is 18, and must be at most 17, for the most drafts" in str(refused.value)


def test_as_many_tokens_ahead_as_have_blocks_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of states a chunk's: with 2048 the engine ended where a request was alone in the smallest pool."""
    monkeypatch.setattr(Wrongly, "field", "num_lookahead")
    own = {"method": f"{__name__}:Wrongly", "num_speculative_tokens": 3, "adaptive_depth": False}
    fields: dict[str, Any] = {"dtype": "float32", "max_model_len": 512, "speculative_config": own}
    params = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True)
    for model, most, why in (
        ("octavo-tiny", 512, "max_model_len=512, the longest row; set it in the class"),
        ("octavo-tiny-hybrid", 64, "64: the model has states that advance every 64 tokens, and so many have blocks"),
    ):
        monkeypatch.setattr(Wrongly, "value", most + 1)
        with pytest.raises(ConfigError) as caught:
            LLM(model, **fields).close()
        assert f"its num_lookahead is {most + 1}, and must be at most {why}" in str(caught.value)
        monkeypatch.setattr(Wrongly, "value", most)
        with LLM(model, **fields) as llm:
            least = llm.engine.memory.blocks_per_request + 1
        with LLM(model, num_gpu_blocks_override=least, **fields) as llm:
            prompts = [{"prompt_token_ids": [5] * length} for length in (500, 430, 60, 1)]
            answers = llm.generate(prompts, params, use_tqdm=False)
            assert [len(answer.outputs[0].token_ids) for answer in answers] == [12, 80, 80, 80]
