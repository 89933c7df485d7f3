"""Bad requests through LLM and the command line: one ValueError (one line, exit code 2) that names the field, what was
found and the limit; the engine goes on as if nothing had been."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from engine_checks import GOOD_PROMPT, GREEDY, assert_idle, good_tokens
from octavo import LLM, SamplingParams
from octavo.request.validation import ParameterError
from patience import patient

Octavo = Callable[..., tuple[int, str, str]]
NAN = float("nan")
USER = {"role": "user", "content": "hi"}


@pytest.fixture(scope="module")
def good(llm: LLM) -> list[int]:
    """The answer to the good request before anything bad came."""
    return good_tokens(llm)


def assert_refused(llm: LLM, good: list[int], call: Callable[[], object], field: str, *said: str) -> None:
    with pytest.raises(ValueError) as caught:
        call()
    message = str(caught.value)
    assert message.startswith(field) and all(part in message for part in said), message
    assert "\n" not in message and len(message) <= 300
    assert_idle(llm)
    assert good_tokens(llm) == good


WRONG_TYPE = "text, token ids, an object, or a list of these"
BAD_PROMPTS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "nothing": (None, ("prompts: ", WRONG_TYPE, "NoneType")),
    "number": (5, ("prompts: ", WRONG_TYPE, "int")),
    "bytes": (b"def", ("prompts: ", WRONG_TYPE, "bytes")),
    "empty text": ("", ("prompt: must not be empty",)),
    "empty ids": ([[]], ("prompt: must not be empty",)),
    "null in a list": ([None], ("prompt: ", "must be text or a list of token ids", "null")),
    "object without a prompt": ({}, ("prompt: ", "must be text or a list of token ids", "null")),
    "unknown key": ({"promt": "a"}, ("prompt: unknown key 'promt'", "prompt_token_ids")),
    "text that is a number": ({"prompt": 5}, ("prompt: must be text", "got 5")),
    "ids that are text": ({"prompt_token_ids": "abc"}, ("prompt: must be text", "a string of 3 characters")),
    "lone surrogate": ("a\ud800", ("prompt: holds a lone surrogate at character 1",)),
    "fills the context": ([5] * 2048, ("prompt: 2048 tokens leave no room for an answer within max_model_len 2048",)),
    "text too long for the context": (" a" * 2100, ("prompt: 2100 tokens ", "max_model_len 2048")),
    "id -1": ([5, -1], ("prompt: token id at index 1 must be in [0, 4096), got -1",)),
    "id of the vocabulary's size": ([4096], ("prompt: token id at index 0 must be in [0, 4096), got 4096",)),
    "id 2**63": ([2**63], ("prompt: token id at index 0 ", "[0, 4096)", "9223372036854775808")),
    "id of 5000 bits": ([2**5000], ("prompt: token id at index 0 ", "[0, 4096)", "an integer of 5001 bits")),
    "float id": ([5, 1.0], ("prompt: token id at index 1 must be an integer, got 1.0",)),
    "bool id": ([5, True], ("prompt: token id at index 1 must be an integer, got true",)),
    "text among ids": (["a", 5], ("prompt: token id at index 0 must be an integer, got a string",)),
    "salt of 2000 bytes": ({"prompt": "a", "cache_salt": "s" * 2000}, ("cache_salt: ", "1024 bytes", "2000 char")),
    "salt with a control character": ({"prompt": "a", "cache_salt": "a\n"}, ("cache_salt: ", "control characters")),
    "salt that is a number": ({"prompt": "a", "cache_salt": 5}, ("cache_salt: must be a string, got 5",)),
}


@pytest.mark.parametrize("name", BAD_PROMPTS)
def test_bad_prompt(llm: LLM, good: list[int], name: str) -> None:
    prompt, said = BAD_PROMPTS[name]
    assert_refused(llm, good, lambda: llm.generate(prompt, SamplingParams(temperature=0, max_tokens=8)), *said)


@pytest.mark.parametrize("name", ["nothing", "empty text", "id -1", "unknown key", "salt of 2000 bytes"])
def test_bad_prompt_of_a_stream(llm: LLM, good: list[int], name: str) -> None:
    prompt, said = BAD_PROMPTS[name]
    field = "prompt: " if name == "nothing" else said[0]
    assert_refused(llm, good, lambda: list(llm.stream(prompt, GREEDY)), field)


@pytest.mark.parametrize("text", ["\U0001f600" * 1_000_000, "x" * 30_000_000], ids=["emoji", "30 MB"])
def test_text_that_cannot_fit_is_refused_before_it_is_tokenized(llm: LLM, good: list[int], text: str) -> None:
    started = time.thread_time()  # whatever else the processor does meanwhile
    with pytest.raises(ValueError, match=r"^prompt: \d+ bytes cannot fit in 2048 tokens \(max_model_len\)"):
        llm.generate(text, GREEDY)
    assert time.thread_time() - started < patient(1)
    assert good_tokens(llm) == good


@pytest.mark.parametrize("text", ["a\0b", "\u202eabc", "\u200b\u200d", "e" + "\u0301" * 500, "<|im_start|>"])
def test_odd_text_is_answered(llm: LLM, text: str) -> None:
    assert len(llm.generate(text, GREEDY)[0].outputs[0].token_ids) == 8
    assert_idle(llm)


BAD_MESSAGES: dict[str, tuple[Any, tuple[str, ...]]] = {
    "nothing": (None, ("messages: must be a list of messages",)),
    "number": (5, ("messages: must be a list of messages",)),
    "text": ("hi", ("messages: must be a list of messages",)),
    "one message": (USER, ("messages: must be a list of messages",)),
    "none": ([], ("messages: must not be empty",)),
    "no conversation": ([[]], ("messages: must not be empty",)),
    "a number among them": ([USER, 5], ("messages[1]: must be an object with role and content",)),
    "unknown role": ([{"role": "<root>", "content": "a"}], ("messages[0]: role must be 1 to 64 letters",)),
    "no content": ([USER, {"role": "user"}], ("messages[1]: content of a message from user",)),
    "image": ([{"role": "user", "content": [{"type": "image_url"}]}], ("messages[0]: content part 0 ", "type text")),
    "tool without its call": ([{"role": "tool", "content": "a"}], ("messages[0]: a tool message needs the tool_cal",)),
    "lone surrogate": ([{"role": "user", "content": "\ud800"}], ("messages: holds a lone surrogate",)),
    "too long": (
        [{"role": "user", "content": " a" * 2100}],
        ("prompt: ", "leave no room", "max_model_len 2048"),
    ),
}


@pytest.mark.parametrize("name", BAD_MESSAGES)
def test_bad_messages(llm: LLM, good: list[int], name: str) -> None:
    messages, said = BAD_MESSAGES[name]
    assert_refused(llm, good, lambda: llm.chat(messages, GREEDY), *said)


def test_bad_options_of_a_chat(llm: LLM, good: list[int]) -> None:
    assert_refused(
        llm, good, lambda: llm.chat([USER], continue_final_message=True), "continue_final_message: excludes "
    )
    assert_refused(llm, good, lambda: llm.chat([USER], tools="x"), "tools: must be a list of objects")  # type: ignore[arg-type]


INT32, SEED = "[1, 2147483647]", "[-9223372036854775808, 18446744073709551615]"
# Fields of SamplingParams, and what the refusal says: field first, then limit and value.
BAD_PARAMS: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"temperature": -1}, ("temperature: ", "[0, 1e+30]", "-1")),
    ({"temperature": 1e31}, ("temperature: ", "[0, 1e+30]", "1e+31")),
    ({"temperature": NAN}, ("temperature: must be finite", "nan")),
    ({"temperature": "hot"}, ("temperature: must be a number", "a string of 3 characters")),
    ({"top_p": 0}, ("top_p: ", "(0, 1]", "0")),
    ({"top_p": 1.1}, ("top_p: ", "(0, 1]", "1.1")),
    ({"top_k": -2}, ("top_k: ", "[-1, 2147483647]", "-2")),
    ({"min_p": 2}, ("min_p: ", "[0, 1]", "2")),
    ({"n": 0}, ("n: ", "at least 1", "0")),
    ({"n": 1025}, ("n: ", "max_n 1024", "1025")),
    ({"n": 2**31 - 1}, ("n: ", "--max-n", "2147483647")),
    ({"n": 3.0}, ("n: must be an integer", "3.0")),
    ({"max_tokens": 0}, ("max_tokens: ", INT32, "0")),
    ({"max_tokens": 2**31}, ("max_tokens: ", INT32, "2147483648")),
    ({"min_tokens": 9, "max_tokens": 8}, ("min_tokens: ", "max_tokens 8", "9")),
    ({"min_tokens": 2048, "max_tokens": None}, ("min_tokens: 2048 ", "2047 tokens", "max_model_len 2048")),
    ({"logprobs": 21}, ("logprobs: ", "max_logprobs 20", "21")),
    ({"logprobs": -1}, ("logprobs: -1 ", "max_logprobs -1", "20")),
    ({"logprobs": True}, ("logprobs: must be an integer", "true")),
    ({"prompt_logprobs": 21}, ("prompt_logprobs: ", "max_logprobs 20", "21")),
    ({"logprob_token_ids": [5] * 129}, ("logprob_token_ids: ", "128", "129")),
    ({"logprob_token_ids": [4096]}, ("logprob_token_ids: ", "below 4096", "4096")),
    ({"stop": ["a"] * 257}, ("stop: ", "256", "257")),
    ({"stop": ""}, ("stop[0]: ", "1 to 256 characters", "0")),
    ({"stop": "s" * 10_000}, ("stop[0]: ", "1 to 256 characters", "10000")),
    ({"stop": [5]}, ("stop[0]: must be a string", "5")),
    ({"stop": "a", "detokenize": False}, ("stop: ", "detokenize=True")),
    ({"truncate_prompt_tokens": 2048}, ("truncate_prompt_tokens: ", "max_model_len 2048", "2048")),
    ({"stop_token_ids": [4096]}, ("stop_token_ids: ", "below 4096", "4096")),
    ({"logit_bias": {"abc": 1}}, ("logit_bias token id: must be an integer", "a string of 3 characters")),
    ({"logit_bias": {-1: 1}}, ("logit_bias token id: ", "[0, ", "-1")),
    ({"logit_bias": {4096: 1}}, ("logit_bias: ", "below 4096", "4096")),
    ({"logit_bias": {5: NAN}}, ("logit_bias value: must be finite", "nan")),
    ({"bad_words": ["a"] * 129}, ("bad_words: ", "128", "129")),
    ({"bad_words": ["", "a"]}, ("bad_words[0]: ", "1 to 1024 characters", "0")),
    ({"bad_words": [" "]}, ("bad_words[0]: has no tokens",)),
    ({"bad_words": ["\U0001f600" * 1000]}, ("bad_words: ", "1024 tokens")),
    ({"allowed_token_ids": []}, ("allowed_token_ids: must not be empty",)),
    ({"allowed_token_ids": [4096]}, ("allowed_token_ids: ", "below 4096", "4096")),
    ({"presence_penalty": 3}, ("presence_penalty: ", "[-2, 2]", "3")),
    ({"frequency_penalty": NAN}, ("frequency_penalty: must be finite", "nan")),
    ({"repetition_penalty": 0}, ("repetition_penalty: ", "[0.01, 100]", "0")),
    ({"repetition_penalty": 1e30}, ("repetition_penalty: ", "[0.01, 100]", "1e+30")),
    ({"seed": 2**64}, ("seed: ", SEED, "18446744073709551616")),
    ({"seed": -(2**63) - 1}, ("seed: ", SEED, "-9223372036854775809")),
    ({"seed": 1.5}, ("seed: must be an integer", "1.5")),
    ({"ignore_eos": "yes"}, ("ignore_eos: must be true or false", "a string of 3 characters")),
]


@pytest.mark.parametrize(("fields", "said"), BAD_PARAMS, ids=lambda value: ascii(value)[:40])
def test_bad_parameters(llm: LLM, good: list[int], fields: dict[str, Any], said: tuple[str, ...]) -> None:
    assert_refused(llm, good, lambda: llm.generate("a", SamplingParams(**fields)), *said)


@pytest.mark.parametrize("prompts", [["a b", "c"], ["a"], [[5], [6]], [{"prompt": "a"}, {"prompt": "b"}], [[USER]]])
def test_a_stream_has_one_prompt(llm: LLM, good: list[int], prompts: Any) -> None:
    said = ("prompt: must be one prompt, got a list of ", "`generate` takes several")
    assert_refused(llm, good, lambda: list(llm.stream(prompts, GREEDY)), *said)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"sampling_params": {"temperature": 0}}, ("sampling_params: must be SamplingParams", "dict")),
        ({"sampling_params": 5}, ("sampling_params: must be SamplingParams", "int")),
        ({"sampling_params": [GREEDY, None]}, ("sampling_params[1]: must be SamplingParams", "NoneType")),
        ({"sampling_params": [GREEDY]}, ("sampling_params: 1 given for 2 prompts",)),
        ({"priority": 5}, ("priority: must be a list of integers", "int")),
        ({"priority": [1]}, ("priority: 1 values for 2 prompts",)),
        ({"priority": [1, 10**30]}, ("priority: ", "[-2147483648, 2147483647]", "an integer of 100 bits")),
        ({"priority": [1, 0.5]}, ("priority: must be an integer", "0.5")),
    ],
)
def test_bad_options(llm: LLM, good: list[int], options: dict[str, Any], said: tuple[str, ...]) -> None:
    assert_refused(llm, good, lambda: llm.generate(["a", "b"], **options), *said)


def test_one_bad_prompt_stops_the_good_ones_before_they_start(llm: LLM, good: list[int]) -> None:
    before = llm.engine.scheduler.num_scheduled_tokens
    with pytest.raises(ValueError, match=r"^prompts\[1\]: token id at index 0"):
        llm.generate(["fine", [-1], "fine too"], GREEDY)
    with pytest.raises(ValueError, match=r"^prompts\[2\]: 2100 tokens leave no room"):
        llm.generate(["fine", "fine too", " a" * 2100], GREEDY)
    with pytest.raises(ValueError, match=r"^messages\[1\]\[0\]: role must be"):
        llm.chat([[USER], [{"role": "<root>", "content": "a"}]], GREEDY)
    refusing = "{% if messages[1] %}{{ raise_exception('one, please') }}{% endif %}{{ messages[0].content }}"
    with pytest.raises(ValueError, match=r"^messages\[1\]: template_failed: one, please$") as caught:
        llm.chat([[USER], [USER, USER], [USER]], GREEDY, chat_template=refusing)
    assert isinstance(caught.value, ParameterError) and caught.value.code == "template_failed"
    with pytest.raises(ValueError, match=r"^template_failed: one, please$"):
        llm.chat([USER, USER], GREEDY, chat_template=refusing)
    marked = {"role": "user", "content": "a\ufdd2"}
    with pytest.raises(ValueError, match=r"^messages\[1\]: continue_final_message: messages may not hold"):
        llm.chat([[USER], [marked]], GREEDY, continue_final_message=True, add_generation_prompt=False)
    with pytest.raises(ValueError, match=r"^min_tokens: "):  # known only when the second prompt has been added
        llm.generate(["fine", [5] * 2040], SamplingParams(min_tokens=16))
    assert llm.engine.scheduler.num_scheduled_tokens == before
    assert_idle(llm)
    assert good_tokens(llm) == good


@pytest.mark.parametrize(
    "fields",
    [{"temperature": 1e-320}, {"temperature": 0, "top_k": 10**9}, {"temperature": 0, "top_k": 0, "min_p": 1}],
    ids=str,
)
def test_at_the_limit_is_no_mistake(llm: LLM, good: list[int], fields: dict[str, Any]) -> None:
    params = SamplingParams(max_tokens=8, ignore_eos=True, **fields)
    assert list(llm.generate(GOOD_PROMPT, params)[0].outputs[0].token_ids) == good


def test_arrays_are_prompts(llm: LLM) -> None:
    ids = np.array([5, 6, 7])
    prompts: list[Any] = [[[5, 6, 7]], ids, [*ids], np.stack([ids, ids])]
    listed, one, numbers, two = (llm.generate(prompt, GREEDY) for prompt in prompts)
    assert [len(one), len(numbers), len(two)] == [1, 1, 2]
    assert [output.outputs for output in one + numbers + two] == [listed[0].outputs] * 4


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--temperature", "-1", "a"], ("temperature: ", "[0, 1e+30]", "-1")),
        (["--temperature", "nan", "a"], ("temperature: ", "finite", "nan")),
        (["--top-p", "0", "a"], ("top_p: ", "(0, 1]")),
        (["--top-k", "-2", "a"], ("top_k: ", "[-1, ", "-2")),
        (["--n", "1025", "a"], ("n: ", "max_n 1024", "1025")),
        (["--max-tokens", "0", "a"], ("max_tokens: ", INT32, "0")),
        (["--min-tokens", "2048", "--max-tokens", "none", "a"], ("min_tokens: 2048 ", "max_model_len 2048")),
        (["--logprobs", "21", "a"], ("logprobs: ", "max_logprobs 20", "21")),
        (["--stop", "", "a"], ("stop[0]: ", "1 to 256")),
        (["--stop-token-ids", "4096", "a"], ("stop_token_ids: ", "below 4096", "4096")),
        (["--logit-bias", '{"abc": 1}', "a"], ("logit_bias: ", "token ids in decimal")),
        (["--logit-bias", '{"4096": 1}', "a"], ("logit_bias: ", "below 4096", "4096")),
        (["--allowed-token-ids", "4096", "a"], ("allowed_token_ids: ", "below 4096", "4096")),
        (["--repetition-penalty", "0", "a"], ("repetition_penalty: ", "[0.01, 100]", "0")),
        ([""], ("prompt: must not be empty",)),
        ([" a" * 2100], ("prompt: 2100 tokens leave no room for an answer within max_model_len 2048",)),
        (["fine", ""], ("prompts[1]: must not be empty",)),
    ],
    ids=lambda value: " ".join(value)[:40],
)
def test_bad_requests_of_the_command_line(octavo: Octavo, argv: list[str], said: tuple[str, ...]) -> None:
    code, out, err = octavo("generate", *argv)
    assert code == 2 and out.strip() == ""
    assert err.startswith("octavo: error: ") and err.count("\n") == 1
    assert all(part in err for part in said), err
