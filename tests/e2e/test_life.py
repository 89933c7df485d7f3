"""Ends that nobody planned: aborts, Ctrl-C, failing steps and failing rows; and what the engine owes after each. Blocks
come back, and whoever is not concerned notices nothing."""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import signal
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from engine_checks import GOOD_PROMPT, GREEDY, assert_idle, good_tokens, num_missing_blocks
from insides import runner_of
from octavo import LLM, SamplingParams
from octavo.request.outputs import CompletionOutput
from octavo.request.sampling_params import ParameterError, RequestOutputKind

LONG = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
BOTH = pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
Logits = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture(scope="module")
def both() -> Iterator[dict[bool, LLM]]:
    """An engine that waits for each step, and one that plans ahead."""
    with LLM(dtype="float32") as sync, LLM(dtype="float32", async_scheduling=True) as ahead:
        yield {False: sync, True: ahead}


def patch_logits(llm: LLM, monkeypatch: pytest.MonkeyPatch, change: Callable[[int, torch.Tensor], object]) -> None:
    """Let `change(call number, logits)` see what the model gives."""
    model = runner_of(llm.engine).model
    compute, calls = model.logits, iter(range(1 << 30))

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        result = compute(hidden)
        change(next(calls), result)
        return result

    monkeypatch.setattr(model, "logits", logits)


@BOTH
@pytest.mark.parametrize("num_taken", [0, 1, 5])
def test_closing_a_stream_frees_its_blocks(both: dict[bool, LLM], num_taken: int, async_scheduling: bool) -> None:
    llm = both[async_scheduling]
    good = good_tokens(llm)
    stream = llm.stream(GOOD_PROMPT, LONG)
    for _ in range(num_taken):
        next(stream)
    assert not num_taken or num_missing_blocks(llm)
    steps = llm.engine.times.num_steps
    stream.close()
    assert_idle(llm)
    assert llm.engine.times.num_steps - steps <= 2
    assert good_tokens(llm) == good


@BOTH
def test_an_abort_frees_blocks_within_two_steps(both: dict[bool, LLM], async_scheduling: bool) -> None:
    """In every state: in the inbox, in the middle of a prompt, waiting, and while it is being answered."""
    engine = both[async_scheduling].engine
    for num_steps in range(6):
        for name, prompt in [("a", [5] * 1500), ("b", [6] * 40), ("c", [7] * 40)]:
            engine.add(name, prompt, LONG)
        ended = [output.request_id for _ in range(num_steps) for output in engine.step() if output.finished]
        assert ended == []
        engine.abort(["a", "b", "c", "unknown"])
        outputs = engine.step() + engine.step()
        assert sorted((o.request_id, o.outputs[0].finish_reason) for o in outputs) == [(n, "abort") for n in "abc"]
        assert_idle(both[async_scheduling])


def test_an_aborted_request_keeps_what_it_had(llm: LLM) -> None:
    """Though nobody looked at its tokens one by one."""
    whole = llm.generate(GOOD_PROMPT, LONG)[0].outputs[0]
    engine = llm.engine
    engine.add(
        "a",
        engine.tokenizer.encode(GOOD_PROMPT),
        msgspec.structs.replace(LONG, output_kind=RequestOutputKind.FINAL_ONLY),
    )
    for _ in range(7):
        assert engine.step() == []
    engine.abort(["a"])
    (output,) = engine.step()
    completion = output.outputs[0]
    assert 5 <= len(completion.token_ids) <= 7 and completion.finish_reason == "abort"
    assert completion.token_ids == whole.token_ids[: len(completion.token_ids)]
    assert completion.text and whole.text.startswith(completion.text.rstrip("\ufffd"))
    assert_idle(llm)


def test_one_stream_goes_on_when_another_is_closed(llm: LLM) -> None:
    whole = llm.generate(GOOD_PROMPT, LONG)[0].outputs[0]
    first, second = llm.stream(GOOD_PROMPT, LONG), llm.stream("import os\n", LONG)
    pieces = [next(first).outputs[0].text, next(first).outputs[0].text]
    next(second)
    second.close()
    pieces += [output.outputs[0].text for output in first]
    assert "".join(pieces) == whole.text
    assert_idle(llm)


@BOTH
def test_generate_works_within_a_stream(both: dict[bool, LLM], async_scheduling: bool) -> None:
    llm = both[async_scheduling]
    good = good_tokens(llm)
    tokens: list[int] = []
    for output in llm.stream(GOOD_PROMPT, GREEDY):
        tokens += output.outputs[0].token_ids
        assert llm.generate(GOOD_PROMPT, GREEDY)[0].outputs[0].token_ids == good
    assert tokens == good
    assert_idle(llm)


@BOTH
@pytest.mark.parametrize("priority", [None, [1, 0, 0, 0]], ids=["in order", "by priority"])
def test_prompts_beyond_half_a_step_are_queued_while_the_first_ones_run(
    both: dict[bool, LLM], monkeypatch: pytest.MonkeyPatch, async_scheduling: bool, priority: list[int] | None
) -> None:
    llm = both[async_scheduling]
    prompts = [[5] * 6, [6] * 5, [7] * 3, [8] * 9]
    expected = [llm.generate([prompt], GREEDY)[0].outputs[0].token_ids for prompt in prompts]
    events: list[str] = []
    engine = llm.engine
    queue, step = engine.queue, engine.step
    with monkeypatch.context() as patch:
        patch.setattr(engine, "resolved", dataclasses.replace(engine.resolved, max_num_batched_tokens=20))
        patch.setattr(engine, "queue", lambda *given, **more: (events.append("queue"), queue(*given, **more)))
        patch.setattr(engine, "step", lambda: (events.append("step"), step())[1])
        outputs = llm.generate(prompts, GREEDY, priority=priority)
        assert [output.outputs[0].token_ids for output in outputs] == expected
        num_first = 2 if async_scheduling and priority is None else 4
        begin = ["queue"] * num_first + ["step"] + ["queue"] * (4 - num_first) + ["step"]
        assert events[: len(begin)] == begin and events.count("queue") == 4
        events.clear()
        with pytest.raises(ParameterError):
            llm.generate([*prompts, [10**6]], GREEDY)
        with pytest.raises(ParameterError):
            llm.generate(prompts, [GREEDY] * 3 + [SamplingParams(allowed_token_ids=[10**6])])
        assert not events, "nothing was queued, since one of them cannot be"
    assert_idle(llm)


@BOTH
def test_ctrl_c_in_generate_leaves_the_engine_idle_and_usable(
    both: dict[bool, LLM], monkeypatch: pytest.MonkeyPatch, async_scheduling: bool
) -> None:
    llm = both[async_scheduling]
    good = good_tokens(llm)

    def interrupt(call: int, logits: torch.Tensor) -> None:
        if call == 3:
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        patch_logits(llm, patch, interrupt)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([GOOD_PROMPT, "import os\n"], LONG)
    assert_idle(llm)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert good_tokens(llm) == good


def test_ctrl_c_between_prompts_takes_the_queued_ones_back(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = llm.engine.queue
    good = good_tokens(llm)
    before = llm.engine.scheduler.num_scheduled_tokens

    def interrupt(request_id: str, *arguments: Any, **more: Any) -> None:
        queue(request_id, *arguments, **more)
        os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine, "queue", interrupt)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(GOOD_PROMPT, LONG)
    assert_idle(llm)
    assert llm.engine.scheduler.num_scheduled_tokens == before, "nothing ran"
    assert good_tokens(llm) == good


@BOTH
def test_a_second_ctrl_c_ends_a_step_at_once_and_the_engine_says_so(make_llm: Any, async_scheduling: bool) -> None:
    llm = make_llm(async_scheduling=async_scheduling)

    def hang(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    llm.engine.scheduler.schedule = hang
    with pytest.raises(KeyboardInterrupt):
        llm.generate(GOOD_PROMPT, LONG)
    with pytest.raises(RuntimeError, match="the engine stopped: KeyboardInterrupt"):
        llm.generate(GOOD_PROMPT, LONG)


@BOTH
def test_a_failing_step_stops_the_engine_which_says_so_from_then_on(
    make_llm: Any, monkeypatch: pytest.MonkeyPatch, async_scheduling: bool
) -> None:
    llm = make_llm(async_scheduling=async_scheduling)

    def fail(call: int, logits: torch.Tensor) -> None:
        if call == 3:
            raise MemoryError("no room for the logits")

    stream = llm.stream("import os\n", LONG)
    next(stream)
    patch_logits(llm, monkeypatch, fail)
    with pytest.raises(MemoryError, match="no room"):
        llm.generate(GOOD_PROMPT, LONG)
    with pytest.raises(RuntimeError, match="the engine stopped: MemoryError"):
        list(stream)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="the engine stopped: MemoryError"):
            llm.generate(GOOD_PROMPT, LONG)


@BOTH
@pytest.mark.parametrize("poison", [float("nan"), float("inf")], ids=str)
def test_a_poisoned_row_fails_alone_and_its_blocks_are_not_hit(
    both: dict[bool, LLM], monkeypatch: pytest.MonkeyPatch, async_scheduling: bool, poison: float
) -> None:
    llm = both[async_scheduling]
    llm.reset_prefix_cache()
    prompts = [[30 + i] * 20 for i in range(3)]
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=40, ignore_eos=True, logprobs=1)
    alone = [llm.generate([prompt], params)[0].outputs for prompt in prompts]
    llm.reset_prefix_cache()

    def spoil(call: int, logits: torch.Tensor) -> None:
        if call == 25:  # rows are in the order of the prompts; 20 tokens and these make more than two blocks
            logits[1, 7] = poison if poison != poison else -poison
            logits[1, 8] = float("nan")

    with monkeypatch.context() as patch:
        patch_logits(llm, patch, spoil)
        first, failed, last = llm.generate(prompts, params)
    assert [first.outputs, last.outputs] == [alone[0], alone[2]]
    completion = failed.outputs[0]
    assert (completion.finish_reason, completion.stop_reason) == ("error", "nan_logits")
    assert completion.token_ids == alone[1][0].token_ids[:25]
    assert_idle(llm)
    again = llm.generate(prompts, params)
    assert [output.num_cached_tokens for output in again] == [16, 0, 16]
    assert [output.outputs for output in again] == alone


def test_when_nothing_is_allowed_the_request_fails_and_says_why(llm: LLM) -> None:
    both = SamplingParams(allowed_token_ids=[377], bad_words=[llm.get_tokenizer().decode_token(377)], temperature=1.0)
    failed, fine = llm.generate([GOOD_PROMPT] * 2, [both, GREEDY])
    assert (failed.outputs[0].finish_reason, failed.outputs[0].stop_reason) == ("error", "no_token_allowed")
    assert fine.outputs[0].token_ids == good_tokens(llm)


@BOTH
def test_nothing_is_computed_that_is_not_needed(
    make_llm: Any, held_out_prompts: list[str], async_scheduling: bool
) -> None:
    """Planning ahead knows the last token from the lengths: a request costs its prompt and all but its last token."""
    llm = make_llm(async_scheduling=async_scheduling, enable_prefix_caching=False)
    prompts = held_out_prompts[:8]
    wanted = 0
    for count, prompt in enumerate(prompts, 1):
        (output,) = llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True))
        wanted += len(output.prompt_token_ids) + count - 1
        assert llm.engine.scheduler.num_scheduled_tokens == wanted
    params = [SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True) for count in range(1, 9)]
    llm.generate(prompts, params)
    assert llm.engine.scheduler.num_scheduled_tokens == 2 * wanted


def test_two_engines_live_in_one_process(llm: LLM, make_llm: Any) -> None:
    other = make_llm(dtype="bfloat16", block_size=32, async_scheduling=True)
    good, others = good_tokens(llm), good_tokens(other)
    first, second = llm.stream(GOOD_PROMPT, GREEDY), other.stream(GOOD_PROMPT, GREEDY)
    pairs = list(zip(first, second, strict=True))
    assert [output.outputs[0].token_ids[0] for output, _ in pairs] == good
    assert [output.outputs[0].token_ids[0] for _, output in pairs] == others
    other.close()
    assert good_tokens(llm) == good


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"async_scheduling": True},
        {"model": "octavo-tiny-hybrid"},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
        {"speculative_config": {"method": "mtp", "model": "octavo-tiny-mtp", "num_speculative_tokens": 2}},
    ],
    ids=["plain", "async", "hybrid", "ngram", "mtp"],
)
def test_a_closed_engines_memory_is_gone_without_the_collector(make_llm: Any, fields: dict[str, Any]) -> None:
    """It was not: worker and cache were garbage in a cycle, and stayed until the oldest generation was looked at."""
    llm = make_llm(**fields)
    llm.generate(GOOD_PROMPT, GREEDY)
    cache = weakref.ref(runner_of(llm.engine).cache)
    gc.disable()
    try:
        llm.close()
        assert cache() is None
    finally:
        gc.enable()


@BOTH
def test_a_closed_engine_says_so(async_scheduling: bool) -> None:
    with LLM(dtype="float32", async_scheduling=async_scheduling) as llm:
        good_tokens(llm)
        llm.close()
    llm.close()
    with pytest.raises(RuntimeError, match="it was closed"):
        llm.generate(GOOD_PROMPT, GREEDY)


GEMMA = {
    "architectures": ["Gemma3ForCausalLM"], "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "torch_dtype": "float32", "eos_token_id": 1,
    "sliding_window": 24, "sliding_window_pattern": 2, "query_pre_attn_scalar": 32,
}  # fmt: skip


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model of two cache groups, full and sliding window, without weights or tokenizer."""
    folder = tmp_path_factory.mktemp("gemma")
    (folder / "config.json").write_text(json.dumps(GEMMA))
    return str(folder)


def _gemma_answers(llm: LLM, prompts: list[list[int]]) -> list[list[CompletionOutput]]:
    params = [
        SamplingParams(temperature=1.0, seed=i, max_tokens=60, ignore_eos=True, detokenize=False, logprobs=1)
        for i in range(len(prompts))
    ]
    answers = [output.outputs for output in llm.generate(prompts, params)]
    assert_idle(llm)
    return answers


def test_two_cache_groups_give_the_same_in_every_setting(gemma: str, make_llm: Any) -> None:
    prompts = [[(7 * i + j * j) % 300 for j in range(10 + 23 * i)] for i in range(6)]
    common = {"model": gemma, "load_format": "dummy", "dtype": "float32", "max_model_len": 256}
    llm = make_llm(**common, enable_prefix_caching=False)
    assert llm.engine.scheduler.kv.num_groups == 2
    alone = [_gemma_answers(llm, [prompt])[0] for prompt in prompts[:1]]
    expected = _gemma_answers(llm, prompts)
    assert expected[:1] == alone
    small = {"num_gpu_blocks_override": 40, "max_num_batched_tokens": 48, "max_num_seqs": 6}
    for fields in ({}, {"async_scheduling": True}, small, {**small, "async_scheduling": True}):
        other = make_llm(**common, **fields)
        for _ in range(2):
            assert _gemma_answers(other, prompts) == expected, fields
        assert not fields.get("num_gpu_blocks_override") or other.engine.scheduler.num_preemptions > 0


def test_a_model_without_a_tokenizer_says_what_it_needs(gemma: str, make_llm: Any, tmp_path: Path) -> None:
    llm = make_llm(model=gemma, load_format="dummy")
    with pytest.raises(ValueError, match=r"^prompt: .*no tokenizer\.json: pass token ids"):
        llm.generate("a", GREEDY)
    with pytest.raises(ValueError, match=r"^detokenize: must be false"):
        llm.generate([[5]], GREEDY)
    with pytest.raises(ValueError, match=r"^messages: .*no tokenizer"):
        llm.chat([{"role": "user", "content": "a"}], GREEDY)
    assert_idle(llm)


def test_text_that_cannot_be_made_fails_its_own_request(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A panic of the tokenizers' library in one request lost the outputs of all."""

    class Panicking:
        def add(self, *token_ids: int) -> str:
            raise BaseException("a panic")

        flush = add

    make = llm.get_tokenizer().detokenizer
    swapped = lambda prompt, *more: Panicking() if list(prompt) == [99] else make(prompt, *more)  # noqa: E731
    expected = llm.generate(GOOD_PROMPT, GREEDY)
    monkeypatch.setattr(llm.get_tokenizer(), "detokenizer", swapped)
    bad, good = llm.generate([[99], GOOD_PROMPT], GREEDY)
    assert (bad.outputs[0].finish_reason, bad.outputs[0].stop_reason) == ("error", "output_failed")
    assert good.outputs[0].text == expected[0].outputs[0].text
    assert_idle(llm)
