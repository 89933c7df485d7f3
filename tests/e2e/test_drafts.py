"""Drafts given by hand: whatever they are, tokens and log-probabilities have the bits of no drafts at all.

`Oracle` knows what each request says without drafts, by its known tokens, and writes that into the rows after each
step: right, wrong, or right for a while. So a test says how good drafts are, and sees that they were accepted.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from insides import runner_of
from octavo import AttentionMods
from octavo.attention import request_field, sliding_window
from octavo.config.engine_config import EngineConfig
from octavo.frontend.engine import Engine
from octavo.plan import StepLimits, StepPlan
from octavo.request.outputs import RequestOutput
from octavo.request.sampling_params import RepetitionDetectionParams, SamplingParams, StructuredOutputsParams
from octavo.request.thinking import Thinking
from octavo.sched.drafts import Drafting
from octavo.speculate import NoSpeculator
from octavo.speculate.step import DraftStep
from random_models import DEEPSEEK, GEMMA, settings_of, token_prompts

K = 3
PROMPTS = ["def add(a, b):\n", "import os\nimport sys\n", "class Tree:\n    def", "for i in range(10):\n    print(i)\n"]
LONG = "\n".join(f"value_{i} = {i * i}  # the square of {i}" for i in range(12))


class Oracle(NoSpeculator):
    """Proposes what `answers` say comes next, each draft wrong with a probability."""

    num_drafts = K

    def __init__(self) -> None:
        self.answers: list[list[int]] = []  # prompts with their outputs
        self.wrong = 0.0
        self._random = random.Random(5)

    def propose(self, step: DraftStep) -> None:
        tokens, totals = step.table.token_ids, step.table.total_len
        for row in step.batch.rows[step.live].tolist():
            total = int(totals[row])
            known = tokens[row, :total].tolist()
            found = next((answer[total:] for answer in self.answers if answer[:total] == known), [])
            room = tokens[row, total : total + K]
            for place in range(len(room)):
                right = found[place] if place < len(found) else 0
                room[place] = (right + 1) % 300 if self._random.random() < self.wrong else right


class Counts:
    """What the plans of an engine drafted, and its results accepted."""

    def __init__(self, engine: Engine) -> None:
        self.num_drafted = self.num_accepted = self.num_held = self.num_errors = 0
        self.plans: list[StepPlan] = []
        scheduler = engine.scheduler
        update = scheduler.update

        def counted(plan: StepPlan, result: Any) -> Any:
            self.plans.append(plan)
            self.num_errors += len(result.failed)
            self.num_held += int((result.num_sampled == 0).sum())
            if len(plan.num_drafts):
                drafts = dict(zip(plan.rows.tolist(), plan.num_drafts.tolist(), strict=True))
                for row, count in zip(result.rows.tolist(), result.num_sampled.tolist(), strict=True):
                    if count:  # a row that waited for its form judged no draft
                        self.num_drafted += drafts[row]
                        self.num_accepted += count - 1 if drafts[row] else 0
            return update(plan, result)

        scheduler.update = counted  # type: ignore[method-assign]


def make_engine(oracle: Oracle | None, **fields: Any) -> Engine:
    config = EngineConfig(**{"dtype": "float32", "device": "cpu", "kv_cache_memory_bytes": 8 << 20, **fields})
    return Engine(config) if oracle is None else Engine(config, speculator=oracle)


Job = tuple[str | list[int], SamplingParams]


def run(engine: Engine, jobs: Sequence[Job], abort: str = "") -> dict[str, RequestOutput]:
    """All jobs together; the last output of each. abort: a request that is ended after some steps."""
    done: dict[str, RequestOutput] = {}
    for index, (prompt, params) in enumerate(jobs):
        engine.add(f"r{index}", engine.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt, params)
    steps = 0
    while engine.has_unfinished:
        done |= {output.request_id: output for output in engine.step()}
        steps += 1
        if abort and steps == 6:
            engine.abort([abort])
    engine.scheduler.kv.check()
    assert engine.scheduler.kv.usage == 0.0
    return done


def facts(outputs: dict[str, RequestOutput]) -> dict[str, Any]:
    """All that a request is given, to the bit."""
    return {
        name: [
            (one.token_ids, one.text, one.finish_reason, one.stop_reason, one.cumulative_logprob,
             [[(token, entry.logprob, entry.rank) for token, entry in line.items()] for line in one.logprobs or ()])
            for one in output.outputs
        ] + [output.prompt_logprobs and [line and sorted((t, e.logprob) for t, e in line.items())
                                         for line in output.prompt_logprobs]]
        for name, output in outputs.items()
    }  # fmt: skip


def answers(outputs: dict[str, RequestOutput]) -> list[list[int]]:
    return [output.prompt_token_ids + one.token_ids for output in outputs.values() for one in output.outputs]


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.9, "seed": 11, "max_tokens": 20, "ignore_eos": True, **fields})


def form(**fields: Any) -> dict[str, Any]:
    return {"structured_outputs": StructuredOutputsParams(**fields), "ignore_eos": False}


EVERYTHING: list[SamplingParams] = [
    params(temperature=0.0),
    params(logprobs=4),
    params(temperature=0.0, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.4, logprobs=2),
    params(frequency_penalty=1.1, top_k=20, top_p=0.9, min_p=0.02, logprobs=0),
    params(logit_bias={5: 3.0, 9: -4.0, 0: 30.0}, min_tokens=7, ignore_eos=False, logprobs=1),
    params(bad_words=["return", "self.x", "print", "a"], logprob_token_ids=[3, 4]),
    params(allowed_token_ids=list(range(20, 60)), top_k=300),
    params(n=3, logprobs=1),
    params(**form(regex="[a-f]{3,9}(-[0-9]{2}){1,3}"), logprobs=1),
    params(**form(choice=["return", "raise", "yield"]), temperature=0.0),
    params(**form(json={"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})),
    params(prompt_logprobs=2, logprobs=1),
    params(
        thinking=Thinking(closing="\n", closing_ids=[5, 6], is_open=True),
        thinking_token_budget=6,
        logprobs=1,
        **form(regex="[a-f]{3,9}"),
    ),
    params(max_tokens=2),
    params(max_tokens=1),
    params(
        repetition_detection=RepetitionDetectionParams(max_pattern_size=4, min_count=2), temperature=0.0, max_tokens=60
    ),
]


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def plain(request: pytest.FixtureRequest) -> Iterator[tuple[str, Engine]]:
    """Without drafts."""
    engine = make_engine(None, dtype=request.param)
    yield request.param, engine
    engine.close()


@pytest.fixture(scope="module")
def drafting(plain: tuple[str, Engine]) -> Iterator[Callable[..., tuple[Engine, Oracle, Counts]]]:
    """Engines with drafts, by whether a step is in flight."""
    made: dict[bool, tuple[Engine, Oracle, Counts]] = {}

    def make(in_flight: bool) -> tuple[Engine, Oracle, Counts]:
        if in_flight not in made:
            oracle = Oracle()
            engine = make_engine(oracle, dtype=plain[0], async_scheduling=in_flight)
            made[in_flight] = engine, oracle, Counts(engine)
        return made[in_flight]

    yield make
    for engine, _, _ in made.values():
        engine.close()


@pytest.mark.parametrize("in_flight", [False, True], ids=["alone", "one in flight"])
@pytest.mark.parametrize("wrong", [0.0, 0.3, 1.0], ids=["right", "partly right", "wrong"])
def test_every_feature_gives_the_bits_of_no_drafts(
    plain: tuple[str, Engine], drafting: Callable[..., Any], wrong: float, in_flight: bool
) -> None:
    jobs = [(PROMPTS[index % len(PROMPTS)], each) for index, each in enumerate(EVERYTHING)]
    expected = run(plain[1], jobs)
    engine, oracle, counts = drafting(in_flight)
    oracle.answers, oracle.wrong = answers(expected), wrong
    drafted, accepted = counts.num_drafted, counts.num_accepted
    assert facts(run(engine, jobs)) == facts(expected)
    drafted, accepted = counts.num_drafted - drafted, counts.num_accepted - accepted
    assert drafted > 100
    if wrong == 0.0:
        assert accepted > 0.6 * drafted, "the rest lay behind the end of their request"
    elif wrong == 1.0:
        assert accepted < 0.05 * drafted, "by chance, a wrong one may be drawn"
    else:
        assert 0.2 * drafted < accepted < 0.9 * drafted


_SAID: dict[str, dict[str, RequestOutput]] = {}


def said_without(make: Callable[..., Engine], fields: dict[str, Any], jobs: Sequence[Job]) -> dict[str, RequestOutput]:
    """What an engine without drafts says, once for all tests of a process: a test's parameters ask it again."""
    key = repr((make.__module__, fields, jobs))
    if key not in _SAID or "attention_mods" in fields:  # whose text names an address
        engine = make(None, **fields)
        _SAID[key] = run(engine, jobs)
        engine.close()
    return _SAID[key]


def check_against(
    plain_fields: dict[str, Any],
    jobs: Sequence[Job],
    *,
    wrong: float = 0.0,
    abort: str = "",
    known: Sequence[list[int]] = (),
    **fields: Any,
) -> tuple[Counts, Engine]:
    """Engines of the same settings, one with drafts, give the same; the latter is left open.

    known: answers that go on where those of the jobs end.
    """
    expected = said_without(make_engine, plain_fields, jobs)
    oracle = Oracle()
    oracle.answers, oracle.wrong = [*known, *answers(expected)], wrong
    engine = make_engine(oracle, **{**plain_fields, **fields})
    counts = Counts(engine)
    found = facts(run(engine, jobs, abort))
    expected_facts = facts(expected)
    for name in expected:
        if name == abort:
            (tokens, _, reason, *_), _ = found[name]
            assert reason == "abort" and tokens == expected_facts[name][0][0][: len(tokens)]
        else:
            assert found[name] == expected_facts[name]
    return counts, engine


@pytest.mark.parametrize("in_flight", [False, True], ids=["alone", "one in flight"])
@pytest.mark.parametrize("wrong", [0.0, 0.4], ids=["right", "partly right"])
def test_drafts_end_at_max_model_len(in_flight: bool, wrong: float) -> None:
    """Rows reach the last place by any number of drafts, and what is behind it is neither written nor read."""
    jobs = [(LONG[: 30 + 7 * index], params(max_tokens=None, logprobs=1, seed=index)) for index in range(4)]
    fields: dict[str, Any] = {"max_model_len": 64}
    counts, engine = check_against(fields, jobs, wrong=wrong, async_scheduling=in_flight)
    cuts = {cut for plan in counts.plans for cut in plan.num_drafts.tolist()}
    assert max(cuts) == K and len(cuts) > 2
    assert counts.num_accepted > 20
    engine.close()


@pytest.mark.parametrize("in_flight", [False, True], ids=["alone", "one in flight"])
def test_a_stop_inside_a_run_drops_what_is_behind_it(in_flight: bool) -> None:
    """A stop token, a stop string, the end of the text: each at every place of a run."""
    free = make_engine(None)
    whole = run(free, [(PROMPTS[0], params(temperature=0.0, max_tokens=24))])
    (said,) = whole.values()
    tokens = said.outputs[0].token_ids
    free.close()
    jobs = [
        (PROMPTS[0], params(temperature=0.0, max_tokens=24, stop_token_ids=[tokens[at]], logprobs=1))
        for at in range(2, 12)
    ]
    text = said.outputs[0].text
    jobs += [(PROMPTS[0], params(temperature=0.0, max_tokens=24, stop=[text[at : at + 3]])) for at in (3, 6, 10, 15)]
    jobs += [(PROMPTS[0], params(temperature=0.0, max_tokens=most)) for most in range(1, 9)]
    counts, engine = check_against({}, jobs, known=answers(whole), async_scheduling=in_flight)
    assert counts.num_accepted > 50
    engine.close()


@pytest.mark.parametrize("in_flight", [False, True], ids=["alone", "one in flight"])
def test_chunks_of_prompts_beside_verification(in_flight: bool) -> None:
    """One budget for all: chunks, drafts that it cuts, and prompt log-probabilities in steps with drafts."""
    jobs = [(PROMPTS[0], params(max_tokens=40, logprobs=1)), (PROMPTS[1], params(max_tokens=40, temperature=0.0))]
    jobs += [(LONG[index:], params(seed=index, prompt_logprobs=1 if index else None)) for index in range(3)]
    counts, engine = check_against(
        {"max_num_batched_tokens": 13, "max_num_seqs": 5}, jobs, wrong=0.2, async_scheduling=in_flight
    )
    mixed = [plan for plan in counts.plans if len(plan.num_drafts) and (plan.num_tokens - plan.num_drafts).max() > 1]
    assert mixed and counts.num_accepted > 20
    engine.close()


@pytest.mark.parametrize("in_flight", [False, True], ids=["alone", "one in flight"])
def test_preemption_and_abort_between_drafts(in_flight: bool) -> None:
    jobs = [(LONG[: 40 + 9 * index], params(max_tokens=60, logprobs=1, seed=index)) for index in range(6)]
    fields: dict[str, Any] = {"max_model_len": 160, "num_gpu_blocks_override": 22, "block_size": 16}
    counts, engine = check_against(fields, jobs, wrong=0.3, abort="r1", async_scheduling=in_flight)
    assert engine.scheduler.num_preemptions > 0 and counts.num_accepted > 40
    engine.close()


def test_drafts_accepted_behind_the_end_of_a_request_are_counted() -> None:
    """As docs/speculation.md tells of the counts: they were verified, though no answer has them."""
    first = [(PROMPTS[0], params(max_tokens=12, temperature=0.0))]
    plain, oracle = make_engine(None), Oracle()
    expected = run(plain, first)
    plain.close()
    said = expected["r0"].outputs[0].token_ids
    end = next(place for place in range(2, K) if said[place] not in said[:place])
    oracle.answers = answers(expected)
    engine = make_engine(oracle)
    stopped = run(engine, [(PROMPTS[0], params(max_tokens=12, temperature=0.0, stop_token_ids=[said[end]]))])
    assert stopped["r0"].outputs[0].token_ids == said[: end + 1]
    stats = engine.scheduler.drafting.stats
    engine.close()
    assert (stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens) == (1, K, K)


@pytest.mark.parametrize("in_flight", [False, True], ids=["alone", "one in flight"])
def test_only_accepted_tokens_are_found_again(in_flight: bool) -> None:
    """A second turn finds as much as without drafts, and what it finds holds no rejected draft."""
    first = [(LONG[:60], params(max_tokens=50, seed=3))]
    plain, oracle = make_engine(None), Oracle()
    drafting = make_engine(oracle, async_scheduling=in_flight)
    expected = run(plain, first)
    oracle.answers, oracle.wrong = answers(expected), 0.5
    assert facts(run(drafting, first)) == facts(expected)
    turn = answers(expected)[0]
    hits = []
    for engine in (plain, drafting):
        engine.add("turn", [*turn, 5, 6, 7], params(logprobs=2, temperature=0.0))
        done: list[RequestOutput] = []
        while engine.has_unfinished:
            done += engine.step()
        hits.append((done[-1].num_cached_tokens, facts({"turn": done[-1]})))
        engine.close()
    assert hits[0] == hits[1] and hits[0][0] is not None and hits[0][0] > 48


SETTINGS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "windows": lambda folder: settings_of(GEMMA, folder),
    "latent": lambda folder: settings_of(DEEPSEEK, folder),
    "reference": lambda _: {"attention_backend": "reference"},
    "flex": lambda _: {"attention_backend": "flex", "attention_mods": sliding_window(24)},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_layers_of_every_kind_verify(name: str, tmp_path: Path) -> None:
    """Windows slide no further than what is known; last layers attend for the tokens of logits alone, several a row."""
    fields = SETTINGS[name](tmp_path) | {"max_num_batched_tokens": 24, "max_model_len": 160}
    lengths = (9, 60) if name == "flex" else (9, 30, 70, 100)
    prompts = [each["prompt_token_ids"] for each in token_prompts(*lengths)]
    jobs = [(prompt, params(max_tokens=14, logprobs=1, detokenize=False, seed=len(prompt))) for prompt in prompts]
    counts, engine = check_against(fields, jobs, wrong=0.2, async_scheduling=True)
    mixed = [plan for plan in counts.plans if len(plan.num_drafts) and (plan.num_tokens - plan.num_drafts).max() > 1]
    assert mixed and counts.num_accepted > 5
    engine.close()


def test_a_row_waits_for_its_mask_alone() -> None:
    """Forms whose masks are never there in time: rows are held at any place of a run, and say the same."""
    jobs = [(PROMPTS[0], params(**form(regex="[a-f]{3,9}(-[0-9]{2}){1,3}"), logprobs=1)), (PROMPTS[1], params())]
    reference = make_engine(None)
    expected = run(reference, jobs)
    reference.close()
    oracle = Oracle()
    oracle.answers = answers(expected)
    engine = make_engine(oracle, async_scheduling=True)
    counts, grammar = Counts(engine), runner_of(engine)._sampler._grammar
    wait, held = grammar._wait, random.Random(3)

    def late(jobs: list[Any], *, has_others: bool) -> None:
        wait(jobs, has_others=has_others)
        grammar._lanes.wait(jobs, len(jobs), 10.0)
        for job in jobs:
            job.is_done = held.random() < 0.7

    grammar._wait = late  # type: ignore[method-assign]
    assert facts(run(engine, jobs)) == facts(expected)
    assert counts.num_held > 0 and counts.num_accepted > 10
    told = engine.scheduler.drafting.stats
    assert 0 <= told.num_draft_tokens - told.num_accepted_tokens <= K, "none is wrong but behind the form's end"
    engine.close()


_KINDS = request_field("kinds", per_token=True, low=0, high=4)


def _sees(b: Any, h: Any, q: Any, kv: Any) -> Any:
    """Fails where a token's kind is 3, which no start foresees."""
    return torch.tensor([True] * 8)[(_KINDS[b, kv] * 3) % 11]


def _by_place(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return score + 0.5 * ((3 * q + kv) % 7)


@pytest.mark.parametrize("wrong", [0.0, 0.4])
def test_S_11_mods_see_drafts_at_their_true_positions(wrong: float) -> None:
    """A score that follows from both places: one off by a place would be another score."""
    fields = {"attention_backend": "reference", "max_model_len": 96, "async_scheduling": True}
    fields["attention_mods"] = AttentionMods(score_mod=_by_place, name="by_place")
    jobs: list[Job] = [(LONG[: 20 + 9 * index], params(max_tokens=20, logprobs=1, seed=index)) for index in range(4)]
    counts, engine = check_against(fields, jobs, wrong=wrong)
    assert counts.num_accepted > 20 and (counts.num_accepted < counts.num_drafted) >= (wrong > 0)
    engine.close()


@pytest.mark.parametrize("in_flight", [False, True], ids=["alone", "one in flight"])
def test_S_11_a_mod_that_fails_behind_the_end_fails_nobody(in_flight: bool) -> None:
    """Drafts may reach a place at which a mod fails; a request fails there once it is there, with what it said."""
    fields = {"attention_backend": "reference", "max_model_len": 64}
    fields["attention_mods"] = AttentionMods(mask_mod=_sees, fields=(_KINDS,), name="sees")
    prompt = [11, 12, 13, 14, 15]
    jobs = [
        (prompt, params(max_tokens=most, logprobs=1, extra_args={"kinds": [0] * 9 + [3]})) for most in (3, 4, 5, 6, 12)
    ]
    jobs += [(prompt, params(max_tokens=12, extra_args={"kinds": [0]}))]
    counts, engine = check_against(fields, jobs, async_scheduling=in_flight)
    assert counts.num_accepted > 5
    assert counts.num_errors >= 2, "those of 6 and 12 tokens get there"
    engine.close()


def test_mods_that_look_ahead_are_refused() -> None:
    with pytest.raises(ValueError, match="num_drafts=3 needs attention in which no query sees a later token"):
        make_engine(Oracle(), attention_backend="flex", attention_mods=AttentionMods(causal=False))


def test_a_worker_without_a_speculator_refuses_drafts_by_name() -> None:
    engine = make_engine(None)
    limits = StepLimits(max_num_rows=64, max_num_tokens=512, max_model_len=512, max_num_drafts=K)
    scheduler = engine.scheduler
    scheduler.drafting = Drafting(limits, scheduler.kv, scheduler._running.rows, cheap_tokens=0)
    engine.add("r", engine.tokenizer.encode(PROMPTS[0]), params())
    with pytest.raises(ValueError, match=r"a plan with 3 drafts of a row.*num_drafts=0"):
        while engine.has_unfinished:
            engine.step()
    engine.close()
