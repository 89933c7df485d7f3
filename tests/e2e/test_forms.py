"""Structured outputs on the bundled model: every output has its form, in every setting the same one."""

from __future__ import annotations

import random
from typing import Any

import pytest
from msgspec.structs import replace

from form_corpus import forms, satisfies
from octavo import LLM, SamplingParams
from octavo.request.sampling_params import ParameterError, StructuredOutputsParams
from octavo.sampling.grammar import GrammarMask
from octavo.sampling.mask_jobs import MaskJob
from settings_matrix import SETTINGS, some_first

FORMS = forms()
PROMPT = "def parse(text):\n    "
MAX_TOKENS = 100


# What a matcher sees of a setting: which rows are in a step, how it is cut, what is computed again, what is in flight.
# Block sizes, threads and the prefix cache move no bit (test_same_bits.py) and no row.
OWN_SETTINGS = [
    "batch of 50",
    "chunks of 16",
    "chunks of 64",
    "small pool",
    "asynchronous",
    "asynchronous, small pool",
    "two threads",
]


def _params(form: dict[str, Any] | None, **options: Any) -> SamplingParams:
    structured = StructuredOutputsParams(**form) if form else None
    return SamplingParams(**{"max_tokens": MAX_TOKENS, "structured_outputs": structured, **options})


@pytest.fixture(scope="module")
def llm() -> Any:
    with LLM(dtype="float32", reasoning_parser="qwen3") as made:
        yield made


def test_there_are_enough_forms() -> None:
    assert len(FORMS) >= 50


@pytest.mark.parametrize("options", [{"temperature": 0}, {"seed": 3, "n": 3}], ids=["greedy", "sampled"])
def test_every_output_has_its_form(llm: LLM, options: dict[str, Any]) -> None:
    params = [_params(form, **options) for form in FORMS.values()]
    for (name, form), output in zip(FORMS.items(), llm.generate([PROMPT] * len(params), params), strict=True):
        for completion in output.outputs:
            assert completion.finish_reason == "stop", (name, completion)
            assert satisfies(form, completion.text), (name, completion.text)


def test_a_wrong_text_would_be_noticed() -> None:
    for name, form in FORMS.items():
        assert not satisfies(form, "\x00 no such text"), name


def _requests() -> tuple[list[str], list[SamplingParams]]:
    """Every form, some whose outputs are long enough to outgrow a small pool, and some that think before the form."""
    long = [{"regex": f"([a-z]{{1,9}} ){{{50 + index}}}"} for index in range(8)]
    params = [
        _params(form, seed=index, max_tokens=150, repetition_penalty=1.1, presence_penalty=0.3)
        for index, form in enumerate([*long, *FORMS.values()])
    ]
    prompts = [PROMPT * 3 + str(index) for index in range(len(params))]
    for index in range(0, len(params), 5):
        prompts[index] += "<think>\n"
        params[index] = replace(params[index], thinking_token_budget=10 + index)
    return prompts, params


@pytest.fixture(scope="module")
def alone(llm: LLM) -> list[list[int]]:
    return [list(llm.generate(prompt, own)[0].outputs[0].token_ids) for prompt, own in zip(*_requests(), strict=True)]


@pytest.mark.parametrize("name", some_first(OWN_SETTINGS))
def test_every_setting_gives_the_same_tokens(make_llm: Any, alone: list[list[int]], name: str) -> None:
    """Batches, chunks, preemption, a step in flight: the matcher follows."""
    llm = make_llm(reasoning_parser="qwen3", **SETTINGS[name])
    assert [list(output.outputs[0].token_ids) for output in llm.generate(*_requests())] == alone
    if "small pool" in name:
        assert llm.engine.scheduler.num_preemptions > 0


def test_reasoning_ends_before_the_form(alone: list[list[int]], llm: LLM) -> None:
    """What the prompt began goes on as it would without a form, is ended by its budget, and the form follows."""
    prompts, params = _requests()
    for index in range(0, len(params), 5):
        reasoning, mark, _ = llm.get_tokenizer().decode(alone[index]).partition("</think>")
        free = replace(params[index], structured_outputs=None, thinking_token_budget=None, max_tokens=10 + index)
        assert mark and reasoning.startswith(llm.generate(prompts[index], free)[0].outputs[0].text)


def test_a_prompt_in_ids_thinks_too(llm: LLM) -> None:
    form = StructuredOutputsParams(choice=["yes", "no"])
    params = SamplingParams(temperature=0, max_tokens=60, structured_outputs=form, thinking_token_budget=4)
    by_text = llm.generate(PROMPT + "<think>\n", params)[0]
    by_ids = llm.generate(by_text.prompt_token_ids or [], params)[0].outputs[0]
    assert by_ids.text == by_text.outputs[0].text and by_ids.text.endswith(("</think>yes", "</think>no"))
    plain = replace(params, thinking_token_budget=None)
    assert llm.generate(PROMPT, plain)[0].outputs[0].text in ("yes", "no")


class _Late:
    """Masks that come late at random, though always the same ones: each row is held now and then."""

    def __init__(self) -> None:
        self._draw, self._hidden, self.num_held = random.Random(4), set[MaskJob](), 0

    def wait(self, mask: GrammarMask, jobs: list[MaskJob], *, has_others: bool) -> None:
        for job in self._hidden.intersection(jobs):
            job.is_done = True
        while not all(job.is_done for job in jobs):
            mask._lanes.wait(jobs, len(jobs), 1.0)
        late = [job for job in jobs if job not in self._hidden and self._draw.random() < 0.3]
        self._hidden = {*self._hidden, *late}
        for job in late:
            job.is_done = False
        self.num_held += len(late)


@pytest.mark.parametrize("name", ["batch of 50", "chunks of 16", "asynchronous, small pool"])
def test_rows_that_are_held_give_the_same_tokens(
    make_llm: Any, alone: list[list[int]], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A row without a mask computes its last token again: with steps in flight, preemption, chunks, blocks."""
    late = _Late()
    monkeypatch.setattr(GrammarMask, "_wait", lambda *args, **options: late.wait(*args, **options))
    llm = make_llm(reasoning_parser="qwen3", **SETTINGS[name])
    prompts, params = _requests()
    plain = [SamplingParams(seed=index, max_tokens=40, logprobs=1) for index in range(4)]
    expected = [output.outputs[0] for output in llm.generate(prompts[:4], plain)]
    outputs = llm.generate([*prompts, *prompts[:4]], [*params, *plain])
    assert [list(output.outputs[0].token_ids) for output in outputs[:-4]] == alone
    found = [output.outputs[0] for output in outputs[-4:]]
    assert [(c.token_ids, c.logprobs) for c in found] == [(c.token_ids, c.logprobs) for c in expected]
    assert late.num_held > 100
    llm.engine.scheduler.kv.check()


def _chain(num_rules: int, before: str = "x") -> str:
    rules = "\n".join(f'r{n}: r{n + 1} | "a{n}"' for n in range(num_rules))
    return f'start: /{before}/ r0\n{rules}\nr{num_rules}: "z"'


def test_a_form_that_would_meet_a_limit_is_refused_at_admission(llm: LLM) -> None:
    with pytest.raises(ParameterError, match="too complex") as caught:
        llm.generate(PROMPT, _params({"grammar": _chain(2500)}))
    assert caught.value.code == "schema_too_complex"


def test_a_form_that_meets_a_limit_later_ends_alone_and_says_so(llm: LLM) -> None:
    """Beyond what is tried out before: three hundred characters of any text."""
    late = _params({"grammar": _chain(2500, "[a-z ]{300}")}, temperature=0, n=8, max_tokens=400)
    outputs = llm.generate([PROMPT, PROMPT], [late, _params({"choice": ["def"]})])
    ends = {(c.finish_reason, c.stop_reason) for c in outputs[0].outputs}
    assert ends == {("error", "schema_too_complex")}
    assert outputs[1].outputs[0].text == "def"


def test_neighbours_keep_their_bits(llm: LLM) -> None:
    plain = [_params(None, seed=index, logprobs=2, max_tokens=12) for index in range(4)]
    prompts = [PROMPT + str(index) for index in range(8)]
    expected = [output.outputs[0] for output in llm.generate(prompts[:4], plain)]
    structured = [_params(form, seed=1, max_tokens=12) for form in list(FORMS.values())[:4]]
    mixed = [params for pair in zip(plain, structured, strict=True) for params in pair]
    order = [prompt for pair in zip(prompts[:4], prompts[4:], strict=True) for prompt in pair]
    found = [output.outputs[0] for output in llm.generate(order, mixed)][::2]
    assert [(c.token_ids, c.logprobs) for c in found] == [(c.token_ids, c.logprobs) for c in expected]


def test_any_json_object_ends_or_meets_its_limit(llm: LLM) -> None:
    params = _params({"json_object": True}, seed=5, n=8, max_tokens=64)
    for completion in llm.generate(PROMPT, params)[0].outputs:
        assert completion.text.startswith("{")
        assert completion.finish_reason in ("stop", "length")


def test_a_form_of_nothing_stops_at_once(llm: LLM) -> None:
    completion = llm.generate(PROMPT, _params({"grammar": 'start: ""'}))[0].outputs[0]
    assert (completion.text, completion.finish_reason, len(completion.token_ids)) == ("", "stop", 1)


def test_ignore_eos_does_not_outlive_a_complete_form(llm: LLM) -> None:
    completion = llm.generate(PROMPT, _params({"choice": ["def"]}, ignore_eos=True))[0].outputs[0]
    assert (completion.text, completion.finish_reason) == ("def", "stop")


@pytest.mark.parametrize("options", [{"min_tokens": 50}, {"allowed_token_ids": [5]}], ids=["min_tokens", "allowed"])
def test_contradictory_wishes_fail_alone_and_at_once(llm: LLM, options: dict[str, Any]) -> None:
    outputs = llm.generate([PROMPT] * 2, [_params({"choice": ["def"]}, **options), _params({"choice": ["def"]})])
    failed = outputs[0].outputs[0]
    assert (failed.finish_reason, failed.stop_reason) == ("error", "no_token_allowed")
    assert outputs[1].outputs[0].text == "def"


@pytest.mark.parametrize("form", [{"regex": "("}, {"grammar": "start: nothing"}, {"json": {"not": {}}}])
def test_a_form_that_cannot_be_compiled_is_refused_before_anything_runs(llm: LLM, form: dict[str, Any]) -> None:
    with pytest.raises(ParameterError, match="structured_outputs"):
        llm.generate([PROMPT] * 2, [_params(None), _params(form)])
    assert not llm.engine.has_unfinished


def test_log_probabilities_are_of_the_model_not_of_the_mask(llm: LLM) -> None:
    entry = llm.generate(PROMPT, _params({"choice": ["zzz"]}, temperature=0, logprobs=3))[0].outputs[0].logprobs[0]
    assert len(entry) == 4 and max(p.rank for p in entry.values()) > 4
