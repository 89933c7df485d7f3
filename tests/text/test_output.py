"""OutputProcessor: updates in, vLLM's outputs out."""

from __future__ import annotations

import random
import time

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.plan import TokenLogprobs
from octavo.request.outputs import Logprob, RequestOutput
from octavo.request.sampling_params import (
    ParameterError,
    RequestOutputKind,
    SamplingParams,
)
from octavo.request.updates import RequestUpdate
from octavo.text.output import OutputProcessor
from octavo.text.tokenizer import Tokenizer
from step_words import scores_of
from tiny_tokenizers import byte_level

TOKENIZER = Tokenizer(byte_level(), {"eos_token": "<|im_end|>"})
EOS = TOKENIZER.eos_token_id
CUMULATIVE, DELTA, FINAL = RequestOutputKind
PROMPT = TOKENIZER.encode("def ")


def _run(tokens, params, *, sizes=(1,), finish="length", processor=None, request_id="r", logprobs=None):
    """Feed `tokens` in updates of the given sizes, over and over. Returns (outputs, aborted ids)."""
    processor = processor or OutputProcessor(TOKENIZER)
    (child_id,) = processor.add(request_id, "def ", PROMPT, params)
    outputs, stopped, at = [], [], 0
    while at < len(tokens):
        size = sizes[len(outputs) % len(sizes)]
        piece, probs = tokens[at : at + size], (logprobs or [])[at : at + size]
        at += size
        last = finish if at >= len(tokens) else None
        new, ended = processor.process([RequestUpdate(child_id, piece, probs, finish_reason=last)])
        outputs += new
        stopped += ended
    assert processor.num_requests == 0
    return outputs, stopped


def _texts(outputs: list[RequestOutput]) -> list[str]:
    return [output.outputs[0].text for output in outputs]


def test_output_kinds_tell_the_same():
    tokens = TOKENIZER.encode("fib(n): return n if n < 2")
    text = TOKENIZER.decode(tokens)
    runs = {kind: _run(tokens, SamplingParams(output_kind=kind))[0] for kind in RequestOutputKind}
    assert len(runs[FINAL]) == 1
    assert len(runs[CUMULATIVE]) == len(runs[DELTA]) == len(tokens)
    assert _texts(runs[FINAL]) == _texts(runs[CUMULATIVE])[-1:] == ["".join(_texts(runs[DELTA]))] == [text]
    assert [runs[kind][-1].finished for kind in RequestOutputKind] == [True] * 3
    assert runs[CUMULATIVE][-1].outputs[0].token_ids == tokens
    assert [output.outputs[0].token_ids for output in runs[DELTA]] == [[token] for token in tokens]
    assert runs[FINAL][0].outputs[0].finish_reason == "length"
    assert runs[FINAL][0].prompt_token_ids == PROMPT


def test_an_output_once_given_is_not_changed_by_the_next():
    outputs, _ = _run(TOKENIZER.encode("fib(n)"), SamplingParams())
    assert [len(output.outputs[0].token_ids) for output in outputs] == list(range(1, len(outputs) + 1))
    assert outputs[0].outputs[0].finish_reason is None


@pytest.mark.parametrize("kind", [CUMULATIVE, DELTA])
def test_stream_interval(kind):
    tokens = TOKENIZER.encode("a b c d e f g h i j k")[:11]
    outputs, _ = _run(tokens, SamplingParams(output_kind=kind, stream_interval=4))
    sizes = [len(output.outputs[0].token_ids) for output in outputs]
    assert sizes == ([1, 5, 9, 11] if kind is CUMULATIVE else [1, 4, 4, 2])


def test_unfinished_character_is_given_at_the_end():
    tokens = TOKENIZER.encode("a\U0001f680")[:-1]
    outputs, _ = _run(tokens, SamplingParams(output_kind=DELTA))
    assert all("\ufffd" not in text for text in _texts(outputs)[:-1])
    assert "".join(_texts(outputs)) == TOKENIZER.decode(tokens)


@pytest.mark.parametrize(("include", "text"), [(False, "fib(n): ret"), (True, "fib(n): return n")])
def test_stop_string_across_tokens(include, text):
    tokens = TOKENIZER.encode("fib(n): return n if n")
    params = SamplingParams(stop=["zzz", "urn n"], include_stop_str_in_output=include, output_kind=DELTA)
    outputs, stopped = _run(tokens, params)
    last = outputs[-1].outputs[0]
    assert "".join(_texts(outputs)) == text
    assert stopped == ["r"]
    assert (last.finish_reason, last.stop_reason, outputs[-1].finished) == ("stop", "urn n", True)


def test_tokens_end_with_the_one_that_completed_the_stop():
    """Several tokens in one update, as speculation gives them: those after the stop are dropped."""
    tokens = [TOKENIZER.encode(char)[0] for char in "abcdef"]
    logprobs = [TokenLogprobs([token], [-1.0], [1]) for token in tokens]
    outputs, stopped = _run(tokens, SamplingParams(stop="bc", logprobs=0), sizes=(6,), logprobs=logprobs)
    output = outputs[0].outputs[0]
    assert (output.text, output.token_ids, len(output.logprobs)) == ("a", tokens[:3], 3)
    assert output.cumulative_logprob == -3.0
    assert output.finish_reason == "stop"
    assert stopped == []  # the scheduler ended it in the same step


def test_stop_string_in_the_last_token_wins_over_length():
    outputs, stopped = _run(TOKENIZER.encode("ab"), SamplingParams(stop="b"))
    assert (outputs[-1].outputs[0].finish_reason, outputs[-1].outputs[0].stop_reason) == ("stop", "b")
    assert stopped == []


@pytest.mark.parametrize(("min_tokens", "text"), [(0, "a"), (2, "axbxc"), (4, "axbxcxd"), (9, "axbxcxdx")])
def test_min_tokens_passes_stop_strings_over(min_tokens, text):
    tokens = [TOKENIZER.encode(char)[0] for char in "axbxcxdx"]
    outputs, _ = _run(tokens, SamplingParams(stop="x", min_tokens=min_tokens))
    expected = {0: "a", 2: "axb", 4: "axbxc", 9: "axbxcxdx"}[min_tokens]
    assert outputs[-1].outputs[0].text == expected


@pytest.mark.parametrize(
    ("include", "skip", "text"),
    [
        (False, True, "ab"),
        (False, False, "ab"),
        (True, True, "ab"),
        (True, False, "ab<|im_end|>"),
    ],
)
def test_the_token_that_stops_is_kept_but_has_no_text(include, skip, text):
    params = SamplingParams(include_stop_str_in_output=include, skip_special_tokens=skip)
    outputs, _ = _run([*TOKENIZER.encode("ab"), EOS], params, finish="stop")
    output = outputs[-1].outputs[0]
    assert (output.text, output.token_ids[-1]) == (text, EOS)


def test_held_text_comes_out_at_the_end():
    outputs, _ = _run(TOKENIZER.encode("ab##"), SamplingParams(stop="###", output_kind=DELTA))
    assert "".join(_texts(outputs)) == "ab##"


def test_no_text_without_detokenize():
    outputs, _ = _run(TOKENIZER.encode("ab"), SamplingParams(detokenize=False))
    assert _texts(outputs)[-1] == ""
    processor = OutputProcessor(None)
    with pytest.raises(ParameterError, match="detokenize"):
        processor.add("r", None, [1], SamplingParams())
    outputs, _ = _run([5, 6], SamplingParams(detokenize=False), processor=processor)
    assert outputs[-1].outputs[0].token_ids == [5, 6]


def test_logprobs_are_dicts_with_the_sampled_token_first():
    tokens = TOKENIZER.encode(" the")
    entry = TokenLogprobs([tokens[0], 50, 60], [-2.0, -0.5, -1.0], [3, 1, 2])
    outputs, _ = _run(tokens[:1], SamplingParams(logprobs=2), logprobs=[entry])
    (found,) = outputs[0].outputs[0].logprobs
    assert list(found) == [tokens[0], 50, 60]
    assert found[tokens[0]] == Logprob(-2.0, 3, TOKENIZER.decode_token(tokens[0]))
    assert outputs[0].outputs[0].cumulative_logprob == -2.0


def test_a_sampled_token_among_the_top_ones_stands_once():
    entry = TokenLogprobs([50, 50, 60], [-0.5, -0.5, -1.0], [1, 1, 2])
    outputs, _ = _run([50], SamplingParams(logprobs=2), logprobs=[entry])
    assert list(outputs[0].outputs[0].logprobs[0]) == [50, 60]


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_prompt_logprobs_begin_with_none(kind):
    processor = OutputProcessor(TOKENIZER)
    processor.add("r", None, [1, 2, 3], SamplingParams(prompt_logprobs=0, output_kind=kind))
    entries = [TokenLogprobs([token], [-1.0], [1]) for token in (2, 3)]
    assert processor.process([RequestUpdate("r", prompt_logprobs=scores_of(entries[:1]))]) == ([], [])
    first, _ = processor.process([RequestUpdate("r", [5], prompt_logprobs=scores_of(entries[1:]))])
    last, _ = processor.process([RequestUpdate("r", [6], finish_reason="length")])
    outputs = first + last
    found = outputs[0].prompt_logprobs
    assert [entry and list(entry) for entry in found] == [None, [2], [3]]
    assert (outputs[-1].prompt_logprobs is None) == (kind is DELTA)


def test_logprobs_are_none_if_nobody_asked():
    outputs, _ = _run([5], SamplingParams())
    output = outputs[0].outputs[0]
    assert (output.logprobs, output.cumulative_logprob, outputs[0].prompt_logprobs) == (None, None, None)


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_n_completions_are_one_output(kind):
    processor = OutputProcessor(TOKENIZER)
    ids = processor.add("r", "p", PROMPT, SamplingParams(n=3, output_kind=kind))
    assert len(set(ids)) == 3
    texts, outputs = ["aa", "b", "ccc"], []
    tokens = [[TOKENIZER.encode(char)[0] for char in text] for text in texts]
    for step in range(3):
        updates = [
            RequestUpdate(ids[i], [row[step]], finish_reason="length" if step == len(row) - 1 else None)
            for i, row in enumerate(tokens)
            if step < len(row)
        ]
        new, _ = processor.process(updates)
        assert len(new) <= 1
        outputs += new
    assert [output.finished for output in outputs] == ([True] if kind is FINAL else [False, False, True])
    joined = {0: "", 1: "", 2: ""}
    for output in outputs:
        for completion in output.outputs:
            joined[completion.index] = (
                completion.text if kind is not DELTA else joined[completion.index] + completion.text
            )
    assert list(joined.values()) == texts
    if kind is not DELTA:
        assert [completion.index for completion in outputs[-1].outputs] == [0, 1, 2]
    assert processor.num_requests == 0


def test_stop_of_one_completion_leaves_the_others():
    processor = OutputProcessor(TOKENIZER)
    ids = processor.add("r", "p", PROMPT, SamplingParams(n=2, stop="a"))
    a, b = (TOKENIZER.encode(char)[0] for char in "ab")
    outputs, stopped = processor.process([RequestUpdate(ids[0], [a]), RequestUpdate(ids[1], [b])])
    assert stopped == [ids[0]]
    assert not outputs[0].finished
    late, _ = processor.process([RequestUpdate(ids[0], [b]), RequestUpdate(ids[1], [b], finish_reason="length")])
    assert [completion.text for completion in late[0].outputs] == ["", "bb"]


def test_abort_gives_a_last_output_and_later_updates_are_ignored():
    processor = OutputProcessor(TOKENIZER)
    (child_id,) = processor.add("r", "p", PROMPT, SamplingParams(stop="###"))
    processor.process([RequestUpdate(child_id, TOKENIZER.encode("ab#"))])
    ended, outputs = processor.abort(["r", "unknown"])
    assert ended == [child_id]
    assert (outputs[0].finished, outputs[0].outputs[0].finish_reason, outputs[0].outputs[0].text) == (
        True,
        "abort",
        "ab#",
    )
    assert processor.process([RequestUpdate(child_id, [5], finish_reason="length")]) == ([], [])
    assert processor.abort(["r"]) == ([], [])
    assert processor.num_requests == 0


def test_error_names_its_reason():
    processor = OutputProcessor(TOKENIZER)
    processor.add("r", "p", PROMPT, SamplingParams())
    outputs, _ = processor.process([RequestUpdate("r", finish_reason="error", error="nan_logits")])
    assert (outputs[0].outputs[0].finish_reason, outputs[0].outputs[0].stop_reason) == ("error", "nan_logits")


def test_an_id_in_use_is_refused():
    processor = OutputProcessor(TOKENIZER)
    processor.add("r", "p", PROMPT, SamplingParams(n=2))
    for request_id in ("r", "0_r"):
        with pytest.raises(ParameterError, match="in use"):
            processor.add(request_id, "p", PROMPT, SamplingParams())
    assert processor.num_requests == 1


def test_metrics_and_cached_tokens():
    processor = OutputProcessor(TOKENIZER)
    before = time.time()
    processor.add("r", "p", PROMPT, SamplingParams())
    first, _ = processor.process([RequestUpdate("r", [5], num_cached=3, queue_time=0.25)])
    last, _ = processor.process([RequestUpdate("r", [6], finish_reason="length")])
    metrics = last[0].metrics
    assert first[0].metrics.finished_time is None
    assert (
        before <= metrics.arrival_time <= metrics.first_token_time <= metrics.last_token_time <= metrics.finished_time
    )
    assert metrics.time_in_queue == 0.25
    assert last[0].num_cached_tokens == 3


def test_outputs_survive_msgpack():
    entry = TokenLogprobs([5], [-1.0], [1])
    outputs, _ = _run([5], SamplingParams(logprobs=0), logprobs=[entry])
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(outputs), type=list[RequestOutput]) == outputs


@settings(max_examples=150, deadline=None)
@given(
    text=st.text(alphabet="ab#\u00e9\U0001f680 ", max_size=30),
    stops=st.lists(st.text(alphabet="ab#\u00e9\U0001f680", min_size=1, max_size=4), max_size=3),
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    interval=st.integers(1, 4),
    include=st.booleans(),
)
def test_kinds_pieces_and_intervals_never_change_the_answer(text, stops, sizes, interval, include):
    tokens = TOKENIZER.encode(text) or [5]
    common = {"stop": stops, "include_stop_str_in_output": include}
    final, _ = _run(tokens, SamplingParams(output_kind=FINAL, **common))
    deltas, _ = _run(tokens, SamplingParams(output_kind=DELTA, stream_interval=interval, **common), sizes=sizes)
    whole = final[0].outputs[0]
    assert "".join(_texts(deltas)) == whole.text
    assert [token for delta in deltas for token in delta.outputs[0].token_ids] == whole.token_ids
    assert not any("\ufffd" in delta for delta in _texts(deltas))
    last = deltas[-1].outputs[0]
    assert (last.finish_reason, last.stop_reason) == (whole.finish_reason, whole.stop_reason)
    if whole.stop_reason is None:
        assert whole.text == TOKENIZER.decode(tokens)


@pytest.mark.parametrize("kind", [DELTA, FINAL])
def test_cost_of_a_token_does_not_grow_with_the_text(kind):
    """A ratio of 20 separates linear from quadratic with much room for a busy machine."""
    rng = random.Random(0)
    tokens = [rng.randrange(1, 400) for _ in range(40_000)]
    params = SamplingParams(output_kind=kind, stop=["never###seen"], max_tokens=None)

    def cost(num: int) -> float:
        started = time.process_time()
        _run(tokens[:num], params)
        return (time.process_time() - started) / num

    cost(1000)
    assert cost(40_000) < 20 * cost(2000)


def test_further_completions_wait_for_what_the_first_one_says():
    """In a stream of deltas; each of their tokens is then an output of its own, as without the wait."""
    processor = OutputProcessor(None)
    params = SamplingParams(n=2, prompt_logprobs=0, output_kind=DELTA, detokenize=False)
    first, second = processor.add("r", None, [1, 2], params)
    scores = scores_of([TokenLogprobs([2], [-1.0], [1])])
    early = [RequestUpdate(second, [5]), RequestUpdate(second, [6], finish_reason="length")]
    assert [processor.process([update]) for update in early] == [([], [])] * 2
    outputs, _ = processor.process([RequestUpdate(first, [7], prompt_logprobs=scores)])
    assert [[part.token_ids for part in output.outputs] for output in outputs] == [[[7]], [[5]], [[6]]]
    assert [output.prompt_logprobs is None for output in outputs] == [False, True, True]
    (last,), _ = processor.process([RequestUpdate(first, [8], finish_reason="length")])
    assert last.finished and processor.num_requests == 0
