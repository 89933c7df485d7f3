"""Wrong attention mods: refused at the start by name; where only a request shows it, fatal to that request alone."""

from __future__ import annotations

import os
import signal
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_checks import assert_idle
from octavo import LLM, AttentionMods, SamplingParams
from octavo.attention import (
    alibi,
    and_,
    causal,
    document,
    prefix,
    prefix_lm,
    request_field,
    rswa,
    temperature,
)
from octavo.attention.mods import ModError
from octavo.attention.mods.check import check_mods
from octavo.attention.mods.failing import leave_out_failing
from octavo.cache.specs import AttentionSpec
from octavo.config.settings import ConfigError
from octavo.plan import StepPlan, StepResult
from octavo.request.validation import ParameterError
from octavo.sched.drafts import Drafting

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "serve"))
LIMITS: dict[str, Any] = {"max_num_seqs": 4, "max_model_len": 100, "max_num_batched_tokens": 64, "num_threads": 1}
PLAIN = AttentionSpec(num_heads=4, num_kv_heads=2, head_size=16, scale=0.25)
SHORT, LONG = torch.ones(80, dtype=torch.bool), torch.ones(100, dtype=torch.bool)
FIELD = request_field("kind")
BOUNDED = request_field("kind", low=0, high=99)
KINDS = request_field("kinds", per_token=True, low=0, high=4)


def keep(b, h, q, kv):
    return kv >= 0


def loop(b, h, q, kv):
    return keep(b, h, q, kv) if q > 4 else kv == q


WRONG: dict[str, tuple[Callable[[], AttentionMods], str]] = {
    "arity": (lambda: AttentionMods(mask_mod=lambda b, h, q: q >= 0), r"mask_mod must take \(b, h, q_idx, kv_idx\)"),
    "score arity": (lambda: AttentionMods(score_mod=keep), r"score_mod must take \(score, b, h, q_idx, kv_idx\)"),
    "if": (lambda: AttentionMods(mask_mod=loop), "mask_mod .*branches on a tensor.*torch.where"),
    "None": (lambda: AttentionMods(mask_mod=lambda b, h, q, kv: None), "mask_mod must give a bool tensor, got None"),
    "float": (lambda: AttentionMods(score_mod=lambda s, *at: 1.0), "score_mod must give a float32 tensor, got float"),
    "int": (lambda: AttentionMods(mask_mod=lambda b, h, q, kv: 1), "mask_mod must give a bool tensor, got int"),
    "ints": (lambda: AttentionMods(mask_mod=lambda b, h, q, kv: kv), "mask_mod must give a bool tensor, got .*int64"),
    "float64": (lambda: AttentionMods(score_mod=lambda s, *at: s.double()), "score_mod must give .*, got .*float64"),
    "shape": (
        lambda: AttentionMods(mask_mod=lambda b, h, q, kv: LONG[:3]),
        r"mask_mod must give one value for a pair, got a tensor of shape \[3\]",
    ),
    "undeclared": (
        lambda: AttentionMods(mask_mod=lambda b, h, q, kv: kv < FIELD[b]),
        r"mask_mod reads the request field 'kind'.*fields=",
    ),
    "another": (lambda: AttentionMods(mask_mod=lambda b, h, q, kv: kv < KINDS[b, kv], fields=(FIELD,)), "'kinds'"),
    "raises": (lambda: AttentionMods(mask_mod=lambda b, h, q, kv: {}[3]), "mask_mod fails: KeyError: 3"),
    "table": (
        lambda: AttentionMods(mask_mod=lambda b, h, q, kv: SHORT[kv]),
        "mask_mod fails.*index 99 is out of bounds.*size 80.*max_model_len=100",
    ),
    "heads": (
        lambda: AttentionMods(score_mod=lambda s, b, h, q, kv: s * torch.ones(2)[h]),
        "score_mod fails.*out of bounds.*size 2",
    ),
    "field's bounds": (
        lambda: AttentionMods(mask_mod=lambda b, h, q, kv: LONG[FIELD[b]], fields=(FIELD,)),
        "mask_mod fails.*with the request field kind=.*low and high",
    ),
    "hint raises": (
        lambda: AttentionMods(mask_mod=keep, some=lambda *at: {}[3]),
        "some fails: KeyError: 3",
    ),
    "hint's shape": (
        lambda: AttentionMods(mask_mod=keep, every=lambda b, q0, q1, k0, k1: torch.ones(7, dtype=torch.bool)),
        "every must give.* shape .* got .*7",
    ),
    "hint's type": (lambda: AttentionMods(mask_mod=keep, some=lambda b, q0, *at: q0), "some must give a bool tensor"),
    "hint's arity": (lambda: AttentionMods(mask_mod=keep, some=keep), r"some must take \(b, q_first, q_last, "),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_mod_is_refused_by_name(name: str) -> None:
    make, message = WRONG[name]
    mods = make()
    with pytest.raises(ConfigError, match=message) as error:
        check_mods([(causal(), PLAIN), (mods, PLAIN)], mods.specs, 100, "cpu")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "mods", [causal(), document(), rswa(4), prefix_lm(), alibi(4), temperature()], ids=lambda mods: mods.name
)
def test_right_mods_pass_in_the_shortest_and_the_longest_engine(mods: AttentionMods) -> None:
    for length in (1, 2, 1 << 24):
        check_mods([(mods, PLAIN)], mods.specs, length, "cpu", slack=128)


@pytest.mark.parametrize("backend", ["reference", "flex"])
def test_the_start_evaluates_mods(backend: str) -> None:
    """A prompt that reached the end of the table stopped the engine for all."""
    make, message = WRONG["table"]
    with pytest.raises(ConfigError, match=message):
        LLM(dtype="float32", **LIMITS, attention_backend=backend, attention_mods=make())


def test_fields_within_bounds_reach_every_entry_of_a_table(make_llm: Callable[..., LLM]) -> None:
    mods = AttentionMods(mask_mod=lambda b, h, q, kv: LONG[kv] & LONG[BOUNDED[b]], fields=(BOUNDED,))
    llm = make_llm(**LIMITS, attention_mods=mods)
    assert llm.generate([[5] * 9], SamplingParams(max_tokens=1, extra_args={"kind": 99}))[0].outputs[0].token_ids
    for kind in (-1, 100):
        with pytest.raises(ParameterError, match=rf"extra_args.kind: must be in \[0, 99\], got {kind}"):
            llm.generate([[5] * 9], SamplingParams(max_tokens=1, extra_args={"kind": kind}))


@pytest.mark.parametrize("backend", ["reference", "flex"])
def test_mods_see_no_position_beyond_max_model_len(make_llm: Callable[..., LLM], backend: str) -> None:
    """Tiles and blocks end behind it; a prompt of nearly that length stopped the engine on `flex`."""
    exact = AttentionMods(mask_mod=lambda b, h, q, kv: LONG[kv] & LONG[q])
    llm = make_llm(**LIMITS, attention_backend=backend, attention_mods=and_(document(), exact))
    params = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True, extra_args={"document_ids": [1, 2]})
    assert len(llm.generate([[5] * 97], params)[0].outputs[0].token_ids) == 3


@pytest.mark.parametrize("mods", [prefix(FIELD), prefix_lm("kind")], ids=lambda mods: mods.name)
def test_mods_with_fields_start_with_a_quantized_cache(make_llm: Callable[..., LLM], mods: AttentionMods) -> None:
    """Its scales are measured with the fields' defaults."""
    limits = {**LIMITS, "max_num_batched_tokens": 100}
    llm = make_llm(**limits, kv_cache_dtype="int8", attention_mods=mods)
    params = SamplingParams(max_tokens=1, extra_args={"kind": 4})
    assert llm.generate([[5] * 9], params)[0].outputs[0].finish_reason == "length"


def fails_at_seven(b, h, q, kv):
    """Of a table that has 8 values: what a start cannot foresee of a per-token field in the middle."""
    return torch.tensor([True] * 8)[(KINDS[b, kv] * 3) % 11]


FAILING = AttentionMods(mask_mod=fails_at_seven, fields=(KINDS,))


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("backend", ["reference", "flex"])
def test_what_fails_in_a_step_ends_its_own_request(
    make_llm: Callable[..., LLM], backend: str, asynchronous: bool
) -> None:
    """Others, in prompts, chunks and decode beside it, keep their bits; the engine lives."""
    llm = make_llm(**LIMITS, attention_backend=backend, attention_mods=FAILING, async_scheduling=asynchronous)
    prompts = [[11 + i] * (9 + 23 * i) for i in range(4)]

    def params(kinds: list[int], **more: Any) -> SamplingParams:
        return SamplingParams(
            max_tokens=6, temperature=0, logprobs=1, ignore_eos=True, extra_args={"kinds": kinds}, **more
        )

    good = [params([0]), params([1, 2]), params([1], prompt_logprobs=1), params([2])]
    alone = [llm.generate([prompt], own)[0].outputs for prompt, own in zip(prompts, good, strict=True)]
    llm.reset_prefix_cache()
    wrong = [params([3]), params([0] * 40 + [3]), params([0] * 11 + [3])]  # in the first step, a later one, in decode
    outputs = llm.generate([*prompts, [7] * 30, [7] * 70, [7] * 9], [*good, *wrong])
    assert [output.outputs for output in outputs[:4]] == alone
    ends = [(output.outputs[0].finish_reason, output.outputs[0].stop_reason) for output in outputs[4:]]
    assert ends == [("error", "attention_mod_failed")] * 3
    assert [len(output.outputs[0].token_ids) for output in outputs[4:]] == [0, 0, 3]
    assert_idle(llm)
    assert llm.generate([[7] * 30], wrong[0])[0].outputs[0].finish_reason == "error", "a step of nobody else"
    assert_idle(llm)
    assert llm.generate([prompts[0]], good[0])[0].outputs == alone[0]


def test_drafts_of_a_step_that_fails_are_taken_away_and_not_counted(
    make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mod may fail for a draft alone: the step is computed without any."""
    seen: list[tuple[int, int]] = []
    take_back = Drafting.take_back_rejected

    def spy(drafting: Drafting, plan: StepPlan, result: StepResult, left: Any) -> None:
        seen.append((result.tokens.shape[1], int((plan.num_drafts > 0).sum())))
        take_back(drafting, plan, result, left)

    monkeypatch.setattr(Drafting, "take_back_rejected", spy)
    drafts = {"method": "ngram", "num_speculative_tokens": 4, "adaptive_depth": False}
    llm = make_llm(**LIMITS, attention_backend="reference", attention_mods=FAILING, speculative_config=drafts)
    good, wrong = (
        SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, extra_args={"kinds": kinds})
        for kinds in ([0], [0] * 14 + [3])
    )
    _, failed = llm.generate([[5] * 9, [7] * 9], [good, wrong])
    assert failed.outputs[0].finish_reason == "error"
    assert any(width == 1 and num_rows for width, num_rows in seen)
    assert llm.engine.stats.num_drafts == sum(num_rows for width, num_rows in seen if width > 1) > 0


@pytest.mark.parametrize("asynchronous", [False, True])
def test_states_of_others_do_not_advance_twice_in_a_step_that_fails(asynchronous: bool) -> None:
    """The second state of a row may take the place of the first, if no step of it is computed again."""
    fields = {"attention_backend": "reference", "attention_mods": FAILING, "enable_prefix_caching": False}
    model, limits = "octavo-tiny-hybrid", {**LIMITS, "max_model_len": 160, "max_num_batched_tokens": 256}
    with LLM(model, dtype="float32", async_scheduling=asynchronous, **limits, **fields) as llm:
        good, wrong = (
            SamplingParams(max_tokens=22, temperature=0, logprobs=0, ignore_eos=True, extra_args={"kinds": kinds})
            for kinds in ([0], [0] * 127 + [3])
        )
        alone = llm.generate([[5, 6, 7] * 37], good)[0].outputs
        beside, failed = llm.generate([[5, 6, 7] * 37, [9] * 111], [good, wrong])
        assert failed.outputs[0].finish_reason == "error"
        assert beside.outputs == alone


class NoText(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


@pytest.mark.parametrize("error", [KeyError, SystemExit, NoText, KeyboardInterrupt, GeneratorExit])
def test_a_mod_that_fails_for_everybody_leaves_the_engine(make_llm: Callable[..., LLM], error: type) -> None:
    broken: list[int] = []

    def fails(b, h, q, kv):
        if broken:
            raise error(3)
        return kv >= 0

    llm = make_llm(**LIMITS, attention_mods=AttentionMods(mask_mod=fails))
    params = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
    before = llm.generate([[5] * 9], params)[0].outputs
    broken.append(1)
    ends = [output.outputs[0].stop_reason for output in llm.generate([[5] * 9, [6] * 9, [7] * 9], params)]
    assert ends == ["attention_mod_failed"] * 3
    broken.clear()
    assert llm.generate([[5] * 9], params)[0].outputs == before


def test_a_mod_that_fails_by_chance_ends_nobody_who_does_not_fail_alone(make_llm: Callable[..., LLM]) -> None:
    """Where no part of the step failed again the engine ended, for all."""
    left: list[int] = []  # calls until each failure
    made, still_there = list[weakref.ref[torch.Tensor]](), list[bool]()

    def fails(b, h, q, kv):
        left[:] = [number - 1 for number in left]
        still_there.extend(each() is not None for each in made)
        if 0 in left:
            scores = kv + 1
            made.append(weakref.ref(scores))
            raise KeyError(3)
        return kv >= 0

    from insides import runner_of  # a server reads this file as well

    llm = make_llm(**LIMITS, attention_backend="reference", attention_mods=AttentionMods(mask_mod=fails))
    runner, turns = runner_of(llm.engine), list[int]()
    issue = runner.issue

    def spy(plan: StepPlan, *own: Any) -> Any:
        before, pending = runner._turn, issue(plan, *own)
        turns.append(before ^ runner._turn ^ (not len(plan.rows)))
        assert runner._buffers.turn.item() == runner._turn
        return pending

    runner.issue = spy
    params = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True, logprobs=1)
    before = [each.outputs for each in llm.generate([[5] * 9, [6] * 9, [7] * 9], params)]
    # Of a prompt's step, in which each of 7 layers asks of each row by itself: once; and when it is tried again, behind
    # two rows and then one that did not fail.
    for calls in ([1], [9], [1, 1 + 2 * 7 + 7 + 1]):
        left[:] = calls
        llm.reset_prefix_cache()
        assert [each.outputs for each in llm.generate([[5] * 9, [6] * 9, [7] * 9], params)] == before
        assert max(left) < 0, "it did fail"
    assert still_there and not any(still_there), "a step that failed keeps memory from those that try again"
    assert turns and all(turns), "results took the place of those of the step before, which may not be read yet"


def test_rows_that_fail_together_and_never_alone_end_some_time() -> None:
    error, issued = ModError("together"), []

    def issue(sound: Any, failing: list[int]) -> list[int]:
        issued.append(sound.tolist())
        if len(sound) > 1:
            raise error
        return failing

    fails = leave_out_failing(3, error, lambda some: error if some.tolist() == [2] else None, issue)
    assert fails == [2, 0, 1]
    assert issued[0] == [0, 1] and issued[-1] == [] and len(issued) < 20


def test_a_second_ctrl_c_within_a_mod_is_the_users(make_llm: Callable[..., LLM]) -> None:
    asked: list[int] = []

    def hangs(b, h, q, kv):
        while asked:
            os.kill(os.getpid(), signal.SIGINT)
        return kv >= 0

    llm = make_llm(**LIMITS, attention_mods=AttentionMods(mask_mod=hangs))
    asked.append(1)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[5] * 9], SamplingParams(max_tokens=3))


class Event:
    """In place of a GPU's, of work that runs until somebody waits."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def record(self) -> None:
        self.told.append("record")

    def synchronize(self) -> None:
        self.told.append("synchronize")

    def query(self) -> bool:
        return self.told[-1:] != ["record"]


def test_a_step_in_which_all_fail_is_over_when_what_was_tried_is(make_llm: Callable[..., LLM]) -> None:
    """Its blocks are given to others then, who may write to them beside the steps."""
    from insides import runner_of  # a server reads this file as well

    llm = make_llm(**LIMITS, attention_mods=FAILING, async_scheduling=False)
    runner = runner_of(llm.engine)
    runner._events, seen, issue = [Event(), Event()], [], runner._issue_sound

    def issue_sound(*args: Any) -> Any:
        for event in runner._events:
            event.told.clear()
        pending = issue(*args)
        seen.append(runner.computes())
        result = pending.result()
        seen.append(runner.computes())
        assert result.failed
        return pending

    runner._issue_sound = issue_sound
    wrong = SamplingParams(max_tokens=2, temperature=0, extra_args={"kinds": [3]})
    assert llm.generate([[7] * 30], wrong)[0].outputs[0].finish_reason == "error"
    assert seen == [True, False]


def test_over_http_the_request_gets_an_error_and_the_engine_stays() -> None:
    from server_rig import RunningServer

    flags = [f"--{name.replace('_', '-')}={value}" for name, value in LIMITS.items()]
    mods = f"--attention-mods={Path(__file__).resolve()}:FAILING"
    with RunningServer("--dtype=float32", mods, *flags, env={"PYTHONPATH": f"{HERE}:{HERE.parents[1] / 'src'}"}) as up:
        body = {"model": "octavo-tiny", "prompt": [5] * 20, "max_tokens": 4, "temperature": 0}
        before = up.wait_ready().post("/v1/completions", body)
        wrong = up.post("/v1/completions", {**body, "extra_args": {"kinds": [3]}})
        assert wrong.status == 500 and wrong.json()["error"]["code"] == "internal_model_error"
        assert "attention_mod_failed" in wrong.json()["error"]["message"]
        after = up.post("/v1/completions", body)
        assert (before.status, after.status) == (200, 200)
        assert before.json()["choices"] == after.json()["choices"]
        for kinds in ([0] * 40_000, {"lengths": [9, 40_000, 1], "values": [0, 1, 2]}):
            assert up.post("/v1/completions", {**body, "extra_args": {"kinds": kinds}}).status == 200
        misspelt = up.post("/v1/completions", {**body, "extra_args": {"kindz": [1]}})
        assert misspelt.status == 400 and "did you mean kinds?" in misspelt.json()["error"]["message"]
        assert "attention mod fails_at_seven: IndexError" in up.stderr()
        assert "engine_restarted" not in up.stderr()
