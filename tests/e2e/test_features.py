"""What a request may ask for, seen from LLM: how it ends, what it may say, and what comes with it. One model, greedy
where nothing else matters, so that each wish shows against the plain answer."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from engine_checks import assert_idle
from octavo import LLM, RequestOutput, SamplingParams
from octavo.request.outputs import CompletionOutput, join_spans
from octavo.request.sampling_params import RepetitionDetectionParams, StructuredOutputsParams

NUM_OUTPUT = 32
PROMPT = "import os\nimport sys\nfrom collections import"
EOS = 0
FORCED = 377  # any ordinary token: a bias of 100 makes it the likeliest


def greedy(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": NUM_OUTPUT, "ignore_eos": True, **fields})


def complete(llm: LLM, params: SamplingParams, prompt: Any = PROMPT) -> CompletionOutput:
    (output,) = llm.generate(prompt, params)
    assert output.finished
    assert_idle(llm)
    return output.outputs[0]


@pytest.fixture(scope="module")
def plain(llm: LLM) -> CompletionOutput:
    """The greedy answer without wishes."""
    completion = complete(llm, greedy())
    assert len(completion.token_ids) == NUM_OUTPUT and completion.finish_reason == "length"
    assert llm.get_tokenizer().decode(completion.token_ids) == completion.text
    return completion


def _across_a_border(llm: LLM, completion: CompletionOutput) -> tuple[str, int, int]:
    """A text that begins in one token and ends in the next: with its place in the answer, and that token's number."""
    pieces = [llm.get_tokenizer().decode_token(token) for token in completion.token_ids]
    for index in range(2, len(pieces) - 1):
        at = sum(map(len, pieces[:index])) + len(pieces[index]) - 1
        stop = completion.text[at : at + 2]
        if len(pieces[index]) > 1 and completion.text.find(stop) == at:
            return stop, at, index + 1
    raise AssertionError("the answer has no two tokens whose border is new")


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_is_found_across_a_token_border(llm: LLM, plain: CompletionOutput, include: bool) -> None:
    stop, at, last = _across_a_border(llm, plain)
    found = complete(llm, greedy(stop=["never to be seen", stop], include_stop_str_in_output=include))
    assert found.text == plain.text[: at + (len(stop) if include else 0)]
    assert found.token_ids == plain.token_ids[: last + 1]
    assert (found.finish_reason, found.stop_reason) == ("stop", stop)


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_token_ends_and_is_named(llm: LLM, plain: CompletionOutput, include: bool) -> None:
    token = plain.token_ids[6]
    end = plain.token_ids.index(token)
    found = complete(llm, greedy(stop_token_ids=[5, token], include_stop_str_in_output=include))
    assert found.token_ids == plain.token_ids[: end + 1]
    assert found.text == llm.get_tokenizer().decode(plain.token_ids[: end + include])
    assert (found.finish_reason, found.stop_reason) == ("stop", token)


def test_the_end_of_text_ends(llm: LLM) -> None:
    found = complete(llm, greedy(ignore_eos=False, logit_bias={EOS: 100.0}))
    assert (found.token_ids, found.text) == ([EOS], "")
    assert (found.finish_reason, found.stop_reason) == ("stop", None)


@pytest.mark.parametrize("stops", [{"ignore_eos": False}, {"stop_token_ids": [EOS]}], ids=["eos", "stop token"])
def test_min_tokens_puts_the_end_off(llm: LLM, stops: dict[str, Any]) -> None:
    found = complete(llm, greedy(min_tokens=5, logit_bias={EOS: 100.0}, **stops))
    assert len(found.token_ids) == 6 and found.token_ids[5] == EOS and EOS not in found.token_ids[:5]
    assert found.finish_reason == "stop"


def test_min_tokens_puts_ends_that_are_ignored_off_as_well(llm: LLM) -> None:
    found = complete(llm, greedy(min_tokens=5, max_tokens=8, logit_bias={EOS: 100.0}))
    assert EOS not in found.token_ids[:5] and found.token_ids[5:] == [EOS] * 3
    assert found.finish_reason == "length"


def test_min_tokens_puts_stop_strings_off(llm: LLM) -> None:
    word = llm.get_tokenizer().decode_token(FORCED)
    found = complete(llm, greedy(min_tokens=5, stop=[word], logit_bias={FORCED: 100.0}))
    assert found.text == word * 5 and found.token_ids == [FORCED] * 6 and found.stop_reason == word


@pytest.mark.parametrize("skip", [True, False])
def test_ignored_ends_of_text_go_on_and_are_shown_if_wanted(llm: LLM, skip: bool) -> None:
    found = complete(llm, greedy(max_tokens=4, logit_bias={EOS: 100.0}, skip_special_tokens=skip))
    assert (found.token_ids, found.finish_reason) == ([EOS] * 4, "length")
    assert found.text == ("" if skip else "<|endoftext|>" * 4)


def test_without_max_tokens_the_context_is_filled(llm: LLM) -> None:
    found = complete(llm, greedy(max_tokens=None), prompt=[[5, 6] * 1018])
    assert len(found.token_ids) == 2048 - 2036 and found.finish_reason == "length"


def test_repetition_ends_if_it_is_watched(llm: LLM) -> None:
    watch = RepetitionDetectionParams(max_pattern_size=2, min_count=4)
    found = complete(llm, greedy(logit_bias={FORCED: 100.0}, repetition_detection=watch))
    assert (found.token_ids, found.finish_reason) == ([FORCED] * 4, "repetition")
    assert found.stop_reason == "repetition_detected"
    found = complete(llm, greedy(logit_bias={FORCED: 100.0}, repetition_detection=watch, max_tokens=4))
    assert (found.finish_reason, found.stop_reason) == ("length", None)


def test_no_named_tokens_leave_the_sampled_ones(llm: LLM, plain: CompletionOutput) -> None:
    found = complete(llm, greedy(logprob_token_ids=[]))
    assert [list(entry) for entry in found.logprobs or ()] == [[token] for token in plain.token_ids]


def test_only_allowed_tokens_are_sampled(llm: LLM) -> None:
    allowed = [16, 201, 260]
    found = complete(llm, greedy(temperature=2.0, seed=1, allowed_token_ids=allowed))
    assert set(found.token_ids) == set(allowed)


def test_bad_words_are_not_said(llm: LLM, plain: CompletionOutput) -> None:
    pieces = [llm.get_tokenizer().decode_token(token) for token in plain.token_ids]
    word = next(piece.strip() for piece in pieces if piece.strip().isidentifier())
    found = complete(llm, greedy(bad_words=[word]))
    spoken = {llm.get_tokenizer().decode_token(token) for token in found.token_ids}
    assert not {word, " " + word} & spoken and found.token_ids != plain.token_ids


@pytest.mark.parametrize(
    "fields", [{"repetition_penalty": 1.8}, {"presence_penalty": 2.0}, {"frequency_penalty": 2.0}], ids=str
)
def test_penalties_make_repetition_rarer(llm: LLM, plain: CompletionOutput, fields: dict[str, float]) -> None:
    found = complete(llm, greedy(**fields))
    assert len(set(found.token_ids)) > len(set(plain.token_ids))


def test_no_text_without_detokenize(llm: LLM, plain: CompletionOutput) -> None:
    found = complete(llm, greedy(detokenize=False))
    assert found.text == "" and found.token_ids == plain.token_ids


def test_siblings_are_numbered_and_differ_if_sampled(llm: LLM, plain: CompletionOutput) -> None:
    (output,) = llm.generate(PROMPT, greedy(n=3))
    assert [(c.index, c.token_ids) for c in output.outputs] == [(i, plain.token_ids) for i in range(3)]
    (output,) = llm.generate(PROMPT, greedy(n=3, temperature=1.0, seed=3))
    assert len({tuple(completion.token_ids) for completion in output.outputs}) == 3
    assert_idle(llm)


def test_each_prompt_may_have_its_own_parameters(llm: LLM, plain: CompletionOutput) -> None:
    short, biased = llm.generate([PROMPT, PROMPT], [greedy(max_tokens=3), greedy(logit_bias={FORCED: 100.0})])
    assert short.outputs[0].token_ids == plain.token_ids[:3]
    assert biased.outputs[0].token_ids == [FORCED] * NUM_OUTPUT


def test_outputs_are_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = [[300 + i] * (1 + i % 3) for i in range(9)]
    outputs = llm.generate(prompts, [greedy(max_tokens=9 - i) for i in range(9)])
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert [len(output.outputs[0].token_ids) for output in outputs] == list(range(9, 0, -1))


def _joined(parts: list[RequestOutput], index: int) -> CompletionOutput:
    """The completion that the parts of a stream make up."""
    mine = [completion for part in parts for completion in part.outputs if completion.index == index]
    assert all(completion.finish_reason is None for completion in mine[:-1])
    return msgspec.structs.replace(
        mine[-1],
        text="".join(completion.text for completion in mine),
        token_ids=[token for completion in mine for token in completion.token_ids],
        logprobs=[entry for completion in mine for entry in completion.logprobs or ()],
        weight_versions=join_spans(completion.weight_versions for completion in mine),
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"stop": ["impor", "\n\n"]},
        {"temperature": 1.5, "seed": 5},
        {"n": 2, "seed": 1, "temperature": 1.0},
        {"stream_interval": 7},
        {"skip_special_tokens": False, "logit_bias": {EOS: 100.0}},
    ],
    ids=str,
)
def test_a_stream_joined_is_the_whole_answer(llm: LLM, fields: dict[str, Any]) -> None:
    params = greedy(logprobs=2, **fields)
    parts = list(llm.stream(PROMPT, params))
    assert [part.finished for part in parts] == [False] * (len(parts) - 1) + [True]
    (whole,) = llm.generate(PROMPT, params)
    assert [_joined(parts, index) for index in range(params.n)] == whole.outputs
    assert_idle(llm)


def test_priority_says_who_runs_first(make_llm: Any) -> None:
    llm = make_llm(scheduling_policy="priority", max_num_seqs=1)
    outputs = llm.generate([PROMPT] * 4, greedy(max_tokens=2), priority=[2, 0, 3, 1])
    ended = [output.metrics.finished_time for output in outputs if output.metrics is not None]
    assert sorted(range(4), key=ended.__getitem__) == [1, 3, 0, 2]


def test_a_warm_prompt_is_found_in_the_cache(llm: LLM) -> None:
    prompt = list(range(100, 150))
    cold, warm = (llm.generate([prompt], greedy())[0] for _ in range(2))
    assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, 48)
    assert cold.outputs == warm.outputs
    assert llm.reset_prefix_cache()
    assert llm.generate([prompt], greedy())[0].num_cached_tokens == 0


def test_a_salt_separates_caches(llm: LLM) -> None:
    ids = list(range(200, 250))

    def num_cached(**salt: str) -> int | None:
        return llm.generate({"prompt_token_ids": ids, **salt}, greedy(max_tokens=2))[0].num_cached_tokens

    assert [num_cached(cache_salt="a"), num_cached(cache_salt="b"), num_cached()] == [0, 0, 0]
    assert [num_cached(cache_salt="a"), num_cached(cache_salt="b"), num_cached()] == [48, 48, 48]


def test_chat_renders_the_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hi <|im_end|>"}, {"role": "assistant", "content": "def f("}]
    (output,) = llm.chat(messages[:1], greedy(max_tokens=4))
    assert output.prompt == "<|im_start|>user\nhi <|im_end|><|im_end|>\n<|im_start|>assistant\n"
    ids = output.prompt_token_ids
    assert ids.count(llm.get_tokenizer().backend.token_to_id("<|im_end|>")) == 1, "the user's is plain text"
    open_ended, whole = (
        llm.chat(messages, greedy(max_tokens=4), add_generation_prompt=False, continue_final_message=more)[0]
        for more in (True, False)
    )
    assert open_ended.prompt is not None and open_ended.prompt.endswith("assistant\ndef f(")
    assert whole.prompt == open_ended.prompt + "<|im_end|>\n"


def test_several_conversations_are_answered_in_order(llm: LLM) -> None:
    needs_update = [[{"role": "user", "content": text}] for text in ("one", "two")]
    together = llm.chat(needs_update, greedy(max_tokens=6))
    alone = [llm.chat(talk, greedy(max_tokens=6))[0] for talk in needs_update]
    assert [output.outputs for output in together] == [output.outputs for output in alone]
    streamed = list(llm.stream(needs_update[0], greedy(max_tokens=6)))
    assert "".join(part.outputs[0].text for part in streamed) == alone[0].outputs[0].text


def test_a_chat_takes_variables_of_its_template(make_llm: Any) -> None:
    llm = make_llm(reasoning_parser="qwen3")
    sources = llm.get_tokenizer().template.sources
    sources["default"] = "{{ messages[0]['content'] }}{% if enable_thinking %}<think>\n{% endif %}"
    form = StructuredOutputsParams(choice=["yes", "no"])
    params = SamplingParams(temperature=0, max_tokens=40, structured_outputs=form, thinking_token_budget=3)
    chat = [{"role": "user", "content": "def f"}]
    (thought,) = llm.chat(chat, params, chat_template_kwargs={"enable_thinking": True})
    assert thought.prompt == "def f<think>\n" and thought.outputs[0].text.endswith(("</think>yes", "</think>no"))
    (plain,) = llm.chat(chat, params, chat_template_kwargs={"enable_thinking": False})
    assert plain.prompt == "def f" and plain.outputs[0].text in ("yes", "no")
