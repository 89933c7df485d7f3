"""SamplingParams and the checks of prompts: what is refused, how, and what is taken."""

from __future__ import annotations

import dataclasses
import math

import msgspec
import numpy as np
import pytest

import octavo
from octavo.request.repetition import ends_in_repetition
from octavo.request.sampling_params import (
    Limits,
    ParameterError,
    RepetitionDetectionParams,
    RequestOutputKind,
    SamplingParams,
    check,
    check_length,
    check_request_options,
    check_text,
    check_token_ids,
    num_kept,
)

LIMITS = Limits(vocab_size=1000, max_model_len=128, num_token_ids=990, max_token_bytes=8)
HUGE = 10**5000

BAD_FIELDS = [
    ("temperature", [-1, 1e31, -1e-320, math.nan, math.inf, "hot", "0.5", True, None, HUGE, -HUGE, [0.5], 1 + 2j]),
    ("top_p", [0, 0.0, -0.0, 1.1, -0.1, math.nan, "1", True]),
    ("top_k", [-2, 2**31, HUGE, 1.0, True, "5", None]),
    ("min_p", [2, -0.1, math.nan, False]),
    ("n", [0, -1, 16_385, 10**6, 1.0, True, "2", None]),
    ("max_tokens", [0, -1, 2**31, 16.0, True, "16"]),
    ("min_tokens", [-1, 17, 2**31, True, None]),
    ("logprobs", [-2, True, 1.0, "5"]),
    ("prompt_logprobs", [-2, True, 2.0]),
    ("logprob_token_ids", [[-1], [1.0], [True], list(range(129)), "12", 5, {1: 2}]),
    ("stop", [["a"] * 257, ["x" * 256] * 65, "", ["a", ""], "x" * 257, 10_000 * "x", 5, ["a", 1], b"a", "\ud800"]),
    ("stop_token_ids", [[-1], [2**31], [1.5], [True], "1", 5]),
    ("bad_words", [["x"] * 129, [""], "word", [1], ["x" * 1025], ["\udfff"]]),
    ("allowed_token_ids", [[], [-1], [1.0], [True], "1"]),
    ("presence_penalty", [3, -2.1, math.nan, True, "1"]),
    ("frequency_penalty", [3, -3, -math.inf]),
    ("repetition_penalty", [0, -1, 1e30, math.nan, 0.001]),
    ("seed", [2**64, -(2**63) - 1, 1.5, True, "1", HUGE]),
    ("stream_interval", [0, -1, 1.0, None]),
    ("ignore_eos", [1, None, "yes"]),
    ("detokenize", [0]),
    ("include_stop_str_in_output", ["true"]),
    ("output_kind", [1, "DELTA", None]),
    ("logit_bias", [{"5": 1}, {-1: 1}, {1: math.inf}, {1: math.nan}, {1: "1"}, {True: 1}, {1.0: 1}, [1]]),
    ("truncate_prompt_tokens", [0, -2, 1.0, True, "5"]),
    ("flat_logprobs", [1, None]),
    ("skip_reading_prefix_cache", [0, "yes"]),
    ("extra_args", [[1], {"x": object()}, {"x": "y" * 70_000}, "x"]),
    ("repetition_detection", [{"max_pattern_size": 2}, {"x": 1}, 5, "x"]),
    ("structured_outputs", [{}, {"x": 1}, 5, "x"]),
]


@pytest.mark.parametrize(
    ("field", "value"),
    [(field, value) for field, values in BAD_FIELDS for value in values],
    ids=lambda value: value if isinstance(value, str) and len(value) < 30 else type(value).__name__,
)
def test_bad_value_is_refused_with_its_field(field, value):
    with pytest.raises(ParameterError) as caught:
        SamplingParams(**{field: value})
    assert caught.value.field.startswith(field)
    assert str(caught.value).startswith(field)
    assert len(str(caught.value)) <= 300


def test_a_long_value_is_not_repeated():
    with pytest.raises(ParameterError) as caught:
        SamplingParams(stop="secret" * 100)
    assert "secret" not in str(caught.value)
    assert "600" in str(caught.value)


def test_logit_bias_has_a_size_limit():
    SamplingParams(logit_bias=dict.fromkeys(range(100_000), 1.0))
    with pytest.raises(ParameterError, match="100000"):
        SamplingParams(logit_bias=dict.fromkeys(range(100_001), 1.0))


@pytest.mark.parametrize("fields", [
    {"temperature": 0}, {"temperature": -0.0}, {"temperature": 2}, {"temperature": np.float32(0.5)},
    {"top_p": 1}, {"top_p": 5e-324}, {"top_k": -1}, {"top_k": 0}, {"top_k": 10**9}, {"min_p": 1},
    {"n": 64}, {"max_tokens": None}, {"max_tokens": 2**31 - 1}, {"min_tokens": 16}, {"logprobs": 0},
    {"stop": "x" * 256}, {"stop": ("a", "b", "c", "d")}, {"stop_token_ids": range(128)},
    {"seed": 2**64 - 1}, {"seed": -(2**63)}, {"seed": np.int64(3)}, {"logit_bias": {np.int64(3): -100}},
    {"presence_penalty": -2, "frequency_penalty": 2}, {"extra_args": {"a": [1, {"b": None}]}},
])  # fmt: skip
def test_good_value_survives_msgpack(fields):
    params = SamplingParams(**fields)
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams)
    assert again == params


def test_defaults_are_those_of_the_field():
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.max_tokens) == (1, 1.0, 1.0, 0, 16)
    assert (params.stop, params.stop_token_ids, params.bad_words) == ([], [], [])
    assert params.output_kind is RequestOutputKind.CUMULATIVE


def test_a_dict_stands_for_the_class_of_its_fields():
    detection = {"max_pattern_size": 6, "min_count": 4}
    params = SamplingParams(repetition_detection=detection, structured_outputs={"regex": "a+"})
    assert params.repetition_detection == octavo.RepetitionDetectionParams(**detection)
    assert params.structured_outputs == octavo.StructuredOutputsParams(regex="a+")
    assert SamplingParams.from_optional(repetition_detection=detection).repetition_detection.min_count == 4


@pytest.mark.parametrize("value", [1e-320, -0.0, 0, 9e-6])
def test_tiny_temperature_means_greedy(value):
    params = SamplingParams(temperature=value)
    assert params.greedy
    assert math.copysign(1, params.temperature) == 1


@pytest.mark.parametrize("fields", [{"n": np.array([1, 2])}, {"stop": np.array(3)}], ids=str)
def test_arrays_that_are_no_values_are_refused(fields):
    (field,) = fields
    with pytest.raises(ParameterError, match=f"{field}: must be .*, got a ndarray"):
        SamplingParams(**fields)


@pytest.mark.parametrize("stop", [np.array(["a", "b"]), np.array(["a", "b"], object), np.array([])], ids=str)
def test_an_array_of_stop_strings_is_a_list_of_them(stop):
    assert SamplingParams(stop=stop).stop == stop.tolist()
    with pytest.raises(ParameterError, match="stop: may have 16384 characters together, got 16640"):
        SamplingParams(stop=np.array(["x" * 256] * 65))


@pytest.mark.parametrize("words", [[[-1]], [[1.5]], ["ab"], 5], ids=str)
def test_tokens_of_bad_words_are_lists_of_ids(words):
    with pytest.raises(ParameterError, match="bad_words_token_ids"):
        SamplingParams(bad_words_token_ids=words)
    assert SamplingParams(bad_words_token_ids=[[], [3]]).bad_words_token_ids == [[3]]


def test_seed_of_minus_one_means_none():
    assert SamplingParams(seed=-1).seed is None


def test_stop_is_a_list_afterwards():
    assert SamplingParams(stop="end").stop_strings == ["end"]


def test_decoding_checks_too():
    encoded = msgspec.msgpack.encode({"temperature": -3.0})
    with pytest.raises(ValueError, match="temperature"):
        msgspec.msgpack.decode(encoded, type=SamplingParams)


def test_stop_strings_need_text():
    with pytest.raises(ParameterError, match="detokenize"):
        SamplingParams(stop="x", detokenize=False)


def test_from_optional_takes_none_as_default_and_json_shapes():
    params = SamplingParams.from_optional(
        temperature=None,
        n=None,
        max_tokens=None,
        logit_bias={"7": -3},
        repetition_detection={"max_pattern_size": 3, "min_count": 2},
        stop=None,
    )
    assert params.temperature == 1.0
    assert params.max_tokens is None
    assert params.logit_bias == {7: -3.0}
    assert params.repetition_detection.max_pattern_size == 3


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"temprature": 1}, "did you mean temperature"),
        ({"x" * 9000: 1}, "unknown"),
        ({"logit_bias": {"abc": 1}}, "decimal"),
        ({"logit_bias": {"-1": 1}}, "decimal"),
        ({"logit_bias": {"٣": 1}}, "decimal"),
        ({"repetition_detection": {"x": 1}}, "repetition_detection: takes max_pattern_size"),
        ({"bad_words_token_ids": [[1]]}, "unknown"),
    ],
)
def test_from_optional_refuses(fields, text):
    with pytest.raises(ParameterError, match=text) as caught:
        SamplingParams.from_optional(**fields)
    assert len(str(caught.value)) <= 300


def test_an_unknown_parameter_is_a_users_mistake():
    with pytest.raises(ParameterError, match="temprature: unknown sampling parameter, did you mean temperature") as at:
        SamplingParams(temprature=1)
    assert at.value.code == "unknown_field"
    with pytest.raises(TypeError, match="positional"):
        SamplingParams(1)


def test_what_vllm_takes():
    params = SamplingParams(
        temperature=5.0,
        n=200,
        stop=[f"s{i}" for i in range(200)],
        stop_token_ids=list(range(500)),
        logit_bias={1: 1000.0, 2: -300, 3: 7},
        logprobs=-1,
        prompt_logprobs=-1,
        truncate_prompt_tokens=-1,
        flat_logprobs=True,
        skip_reading_prefix_cache=True,
    )
    assert params.logit_bias == {1: 100.0, 2: -100.0, 3: 7.0}
    assert check(params, dataclasses.replace(LIMITS, max_n=200, max_logprobs=1000), 3) == 16
    for field, limits in (
        ("n", dataclasses.replace(LIMITS, max_n=199)),
        ("logprobs", dataclasses.replace(LIMITS, max_n=200)),
        ("n", dataclasses.replace(LIMITS, max_n=200, max_logprobs=1000, max_total_tokens=200 * 16 - 1)),
    ):
        with pytest.raises(ParameterError, match=f"^{field}: .*max_"):
            check(params, limits, 3)


def test_a_truncated_prompt_keeps_its_end():
    def ids(count, **fields):
        params = SamplingParams(**fields)
        return check_token_ids(list(range(count)), LIMITS, num_kept(params, LIMITS))

    assert ids(100, truncate_prompt_tokens=3) == [97, 98, 99]
    assert ids(2, truncate_prompt_tokens=3) == [0, 1]
    assert len(ids(900, truncate_prompt_tokens=-1, max_tokens=28)) == 100
    assert len(ids(900, truncate_prompt_tokens=-1, max_tokens=None)) == 127
    assert len(ids(900, truncate_prompt_tokens=-1, max_tokens=1000)) == 1
    with pytest.raises(ParameterError, match="max_model_len 128, got 128"):
        ids(9, truncate_prompt_tokens=128)


def test_a_truncated_prompt_without_an_answer_may_fill_the_context():
    """A score wants no place behind the prompt, so nothing is left free for one."""
    for most in (-1, 128):
        params = SamplingParams(truncate_prompt_tokens=most, max_tokens=1)
        kept = num_kept(params, LIMITS, is_answered=False)
        assert check_token_ids(list(range(900)), LIMITS, kept, is_answered=False) == list(range(772, 900))
    with pytest.raises(ParameterError, match="at most max_model_len 128, got 129"):
        num_kept(SamplingParams(truncate_prompt_tokens=129), LIMITS, is_answered=False)


@pytest.mark.parametrize(
    ("fields", "num_prompt", "field"),
    [
        ({"logprobs": 21}, 3, "logprobs"),
        ({"prompt_logprobs": 21}, 3, "prompt_logprobs"),
        ({"stop_token_ids": [1000]}, 3, "stop_token_ids"),
        ({"allowed_token_ids": [1, 1000]}, 3, "allowed_token_ids"),
        ({"logit_bias": {1000: 1}}, 3, "logit_bias"),
        ({"logprob_token_ids": [5000]}, 3, "logprob_token_ids"),
        ({"bad_words": ["x"], "bad_words_token_ids": [[1], [2, 1000]]}, 3, "bad_words"),
        ({"min_tokens": 100, "max_tokens": 120}, 100, "min_tokens"),
        ({"min_tokens": 29, "max_tokens": None}, 100, "min_tokens"),
        ({}, 0, "prompt"),
        ({}, 128, "prompt"),
        ({}, 9000, "prompt"),
    ],
)
def test_what_does_not_suit_the_model_is_refused(fields, num_prompt, field):
    with pytest.raises(ParameterError) as caught:
        check(SamplingParams(**fields), LIMITS, num_prompt)
    assert caught.value.field == field


def test_n_times_max_tokens_has_a_budget():
    limits = Limits(vocab_size=10, max_model_len=100_000)
    assert check(SamplingParams(n=10, max_tokens=None), limits, 1) == 99_999
    with pytest.raises(ParameterError, match="1048576"):
        check(SamplingParams(n=11, max_tokens=None), limits, 1)


@pytest.mark.parametrize(
    ("max_tokens", "num_prompt", "expected"),
    [
        (16, 10, 16),
        (16, 120, 8),
        (None, 100, 28),
        (500, 127, 1),
        (2**31 - 1, 1, 127),
    ],
)
def test_max_tokens_is_cut_to_the_room(max_tokens, num_prompt, expected):
    assert check(SamplingParams(max_tokens=max_tokens), LIMITS, num_prompt) == expected


def test_too_long_a_prompt_says_both_numbers():
    """It named max_tokens too, which is cut to the room there is and refuses nothing."""
    said = r"^prompt: 9000 tokens leave no room for an answer within max_model_len 128"
    for refused in (lambda: check_length(9000, LIMITS), lambda: check(SamplingParams(max_tokens=100), LIMITS, 9000)):
        with pytest.raises(ParameterError, match=said) as caught:
            refused()
        assert caught.value.code == "context_length_exceeded"


def test_parameters_may_be_changed_and_a_clone_shares_nothing():
    params = SamplingParams(stop="a", logit_bias={5: 1.0}, extra_args={"x": [1]})
    other = params.clone()
    assert other == params
    params.temperature, params.stop = 0.25, "b"
    params.logit_bias[6], params.extra_args["x"][0] = 2.0, 2
    assert (other.temperature, other.stop) == (1.0, ["a"])
    assert (other.logit_bias, other.extra_args) == ({5: 1.0}, {"x": [1]})
    assert params.clone().stop == ["b"]
    for wrong in (0, 1.5, 10**30):
        with pytest.raises(ParameterError, match=r"top_p: must be in \(0, 1\], got "):
            SamplingParams(top_p=wrong)
    params.top_p = 7
    with pytest.raises(ParameterError, match="top_p"):
        params.clone()
    with pytest.raises(AttributeError):
        params.temprature = 1


def test_names_of_others_say_what_to_use():
    for name, hint in (("guided_decoding", "structured_outputs"), ("best_of", "n completions")):
        with pytest.raises(ParameterError, match=hint):
            SamplingParams(**{name: 1})


def test_no_completion_is_told_without_the_highest_number():
    with pytest.raises(ParameterError, match=r"^n: must be at least 1, got 0$"):
        SamplingParams(n=0)


@pytest.mark.parametrize(
    ("token_ids", "code", "text"),
    [
        ([], "empty_prompt", "empty"),
        ([[]], "invalid_token_id", "index 0"),
        ([1, -1], "invalid_token_id", "index 1"),
        ([990], "invalid_token_id", "index 0"),
        ([2**63], "invalid_token_id", "index 0"),
        ([HUGE], "invalid_token_id", "bits"),
        ([1, 2, 3.0], "invalid_token_id", "index 2"),
        ([True], "invalid_token_id", "index 0"),
        (["1"], "invalid_token_id", "index 0"),
        (["\ud800"], "invalid_token_id", "index 0"),
        ([None], "invalid_token_id", "index 0"),
        ([1] * 128, "context_length_exceeded", "128"),
        ("text", "invalid_type", "token ids"),
        (5, "invalid_type", "token ids"),
        ({1: 2}, "invalid_type", "token ids"),
        (np.array(3), "invalid_type", "token ids"),
        (np.array([1.0]), "invalid_token_id", "index 0"),
        (None, "invalid_type", "null"),
        ([5, np.array([1, 2])], "invalid_token_id", "index 1 must be an integer, got a ndarray"),
    ],
)
def test_bad_token_ids_are_refused(token_ids, code, text):
    with pytest.raises(ParameterError, match=text) as caught:
        check_token_ids(token_ids, LIMITS)
    assert caught.value.code == code


@pytest.mark.parametrize("token_ids", [[0, 989], (1, 2), np.array([1, 2]), [np.int32(5)], range(3)])
def test_good_token_ids_become_plain_ints(token_ids):
    checked = check_token_ids(token_ids, LIMITS)
    assert checked == [int(token) for token in token_ids]
    assert {type(token) for token in checked} == {int}


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("", "empty_prompt"),
        (None, "invalid_type"),
        (b"x", "invalid_type"),
        ("a\ud800", "invalid_unicode"),
        ("x" * 1025, "context_length_exceeded"),
        ("\u20ac" * 342, "context_length_exceeded"),
    ],
)
def test_bad_text_is_refused(text, code):
    with pytest.raises(ParameterError) as caught:
        check_text(text, LIMITS)
    assert caught.value.code == code


@pytest.mark.parametrize("text", ["\0", "\u202e\u200b", "x" * 1024, "\u20ac" * 341, "<|im_end|>"])
def test_odd_text_is_taken(text):
    assert check_text(text, LIMITS) == text


@pytest.mark.parametrize(
    "options",
    [
        {"cache_salt": "x" * 1025},
        {"cache_salt": "a\nb"},
        {"cache_salt": 5},
        {"cache_salt": "\ud800"},
        {"priority": 10**30},
        {"priority": True},
        {"priority": 1.0},
        {"priority": None},
    ],
)
def test_bad_request_options_are_refused(options):
    with pytest.raises(ParameterError):
        check_request_options(**options)


def test_good_request_options_are_taken():
    check_request_options("tenant 1 \u00e9", -5)
    check_request_options()


@pytest.mark.parametrize(
    "fields",
    [
        {"max_pattern_size": 2},
        {"max_pattern_size": 2, "min_count": 1},
        {"min_pattern_size": 1},
        {"max_pattern_size": 1025, "min_count": 2},
        {"max_pattern_size": 2.0, "min_count": 2},
    ],
)
def test_bad_repetition_detection_is_refused(fields):
    with pytest.raises(ParameterError, match="repetition_detection"):
        RepetitionDetectionParams(**fields)


def _repeats_by_definition(tokens, detection):
    sizes = range(max(1, detection.min_pattern_size), detection.max_pattern_size + 1)
    return any(
        len(tokens) >= size * detection.min_count
        and tokens[-size * detection.min_count :] == tokens[-size:] * detection.min_count
        for size in sizes
    )


def test_repetition_is_found_as_defined():
    rng = np.random.default_rng(0)
    found = 0
    for _ in range(3000):
        tokens = rng.integers(0, 2, rng.integers(0, 14)).tolist()
        low, high = sorted(rng.integers(0, 5, 2).tolist())
        count = int(rng.integers(2, 5))
        detection = RepetitionDetectionParams(min_pattern_size=low, max_pattern_size=high, min_count=count)
        expected = _repeats_by_definition(tokens, detection)
        assert ends_in_repetition(tokens, detection) == expected
        found += expected
    assert 300 < found < 2700
