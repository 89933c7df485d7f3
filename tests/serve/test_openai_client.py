"""openai-python against a running server: what it sends is understood, what it gets back it can read."""

from __future__ import annotations

import asyncio
import json
import math
import re
import time
from collections.abc import Iterator
from typing import Any

import openai
import pydantic
import pytest

from patience import patient
from server_rig import RunningServer, StartServer

KEY = "sk-a-key-for-the-tests"
MESSAGES: Any = [{"role": "user", "content": "What is a list?"}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"enum": ["Paris", "Rome"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}


def _client(server: RunningServer, **options: Any) -> openai.OpenAI:
    return openai.OpenAI(
        **{"base_url": f"{server.url}/v1", "api_key": KEY, "max_retries": 0, "timeout": patient(60), **options}
    )


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with _client(server) as made:
        yield made


@pytest.fixture(scope="module")
def model(client: openai.OpenAI) -> str:
    return client.models.list().data[0].id


def test_models(client: openai.OpenAI, model: str) -> None:
    card = client.models.retrieve(model)
    assert card.id == model and card.object == "model" and card.owned_by
    assert card.max_model_len == 2048  # type: ignore[attr-defined]


def test_completion(client: openai.OpenAI, model: str) -> None:
    answer = client.completions.create(model=model, prompt="def add(a, b):", max_tokens=12, temperature=0)
    assert answer.object == "text_completion" and answer.id and answer.model == model
    (choice,) = answer.choices
    assert choice.text and choice.finish_reason == "length" and choice.index == 0
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12
    again = client.completions.create(model=model, prompt="def add(a, b):", max_tokens=12, temperature=0)
    assert again.choices[0].text == choice.text


def test_several_prompts_and_completions_are_in_order(client: openai.OpenAI, model: str) -> None:
    options: Any = {"model": model, "max_tokens": 4, "temperature": 1.0, "seed": 7}
    both = client.completions.create(prompt=["import", "class A"], n=2, **options)
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    alone = client.completions.create(prompt="class A", n=2, **options)
    assert [choice.text for choice in both.choices[2:]] == [choice.text for choice in alone.choices]


def test_token_ids_in_and_out(client: openai.OpenAI, model: str) -> None:
    answer = client.completions.create(
        model=model, prompt=[5, 6, 7], max_tokens=3, temperature=0, extra_body={"return_token_ids": True}
    )
    choice: Any = answer.choices[0]
    assert len(choice.token_ids) == 3 and all(isinstance(token, int) for token in choice.token_ids)
    again = client.completions.create(model=model, prompt=[[5, 6, 7]], max_tokens=3, temperature=0)
    assert again.choices[0].text == choice.text


def test_completion_stream_says_what_the_whole_says(client: openai.OpenAI, model: str) -> None:
    options: Any = {"model": model, "prompt": "for i in", "max_tokens": 16, "temperature": 0}
    whole = client.completions.create(**options)
    chunks = list(client.completions.create(stream=True, stream_options={"include_usage": True}, **options))
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == whole.choices[0].text
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage
    reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason]
    assert reasons == ["length"]
    assert len({chunk.id for chunk in chunks}) == 1 and len(chunks) > 4


def test_completion_logprobs_and_echo(client: openai.OpenAI, model: str) -> None:
    prompt = [20, 30, 40, 50]
    answer = client.completions.create(model=model, prompt=prompt, max_tokens=1, temperature=0, logprobs=1, echo=True)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.token_logprobs and logprobs.top_logprobs and logprobs.tokens
    assert len(logprobs.token_logprobs) == len(logprobs.top_logprobs) == len(logprobs.tokens) == 5
    assert logprobs.token_logprobs[0] is None and logprobs.top_logprobs[0] is None
    for value, top in list(zip(logprobs.token_logprobs, logprobs.top_logprobs))[1:]:
        assert value is not None and value <= 0 and value in top.values()
    assert logprobs.token_logprobs[-1] == max(logprobs.top_logprobs[-1].values())
    assert logprobs.text_offset and logprobs.text_offset == sorted(logprobs.text_offset)
    assert "".join(logprobs.tokens) == answer.choices[0].text


def test_stop_strings_end_the_text(client: openai.OpenAI, model: str) -> None:
    options: Any = {"model": model, "prompt": "def f(x):\n    return", "temperature": 0}
    text = client.completions.create(max_tokens=24, **options).choices[0].text
    stop = text[len(text) // 2 : len(text) // 2 + 3]
    answer = client.completions.create(max_tokens=24, stop=[stop], **options)
    assert answer.choices[0].text == text[: text.index(stop)] and answer.choices[0].finish_reason == "stop"


def test_chat(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.create(model=model, messages=MESSAGES, max_completion_tokens=9, temperature=0)
    assert answer.object == "chat.completion"
    message = answer.choices[0].message
    assert message.role == "assistant" and isinstance(message.content, str) and not message.tool_calls
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert answer.usage is not None and 1 <= answer.usage.completion_tokens <= 9


def test_chat_stream(client: openai.OpenAI, model: str) -> None:
    options: Any = {"model": model, "messages": MESSAGES, "max_tokens": 9, "temperature": 0}
    whole = client.chat.completions.create(**options)
    chunks = list(client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **options))
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[0].object == "chat.completion.chunk"
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason


def test_chat_stream_helper(client: openai.OpenAI, model: str) -> None:
    options: Any = {"model": model, "messages": MESSAGES, "temperature": 0, "max_tokens": 40}
    options["extra_body"] = {"structured_outputs": {"choice": ["an answer that takes a few tokens"]}}
    with client.chat.completions.stream(**options) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert final.choices[0].message.content == "an answer that takes a few tokens"


def test_chat_logprobs(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.create(
        model=model, messages=MESSAGES, max_tokens=5, temperature=0, logprobs=True, top_logprobs=3
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content and answer.usage
    assert len(logprobs.content) == answer.usage.completion_tokens
    for entry in logprobs.content:
        assert len(entry.top_logprobs) >= 3 and math.isfinite(entry.logprob) and isinstance(entry.bytes, list)
        assert entry.token == entry.top_logprobs[0].token  # greedy


class Weather(pydantic.BaseModel):
    """What the answer is to be."""

    city: str = pydantic.Field(pattern="^[A-Z][a-z]{2,6}$")
    days: int = pydantic.Field(ge=1, le=9)


def test_structured_output_is_parsed(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.parse(
        model=model, messages=MESSAGES, response_format=Weather, max_tokens=64, temperature=0
    )
    parsed = answer.choices[0].message.parsed
    assert isinstance(parsed, Weather) and answer.choices[0].finish_reason == "stop"


_TWO_TRUTHS = {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 2}


@pytest.mark.parametrize(
    ("constraint", "pattern"),
    [
        ({"choice": ["yes", "no"]}, "yes|no"),
        ({"regex": "[0-9]{3}-[a-f]{2}"}, "[0-9]{3}-[a-f]{2}"),
        ({"json": _TWO_TRUTHS}, r"\[\s*(true|false)\s*,\s*(true|false)\s*\]"),
    ],
)
def test_constraints_of_vllm(client: openai.OpenAI, model: str, constraint: dict[str, Any], pattern: str) -> None:
    answer = client.chat.completions.create(
        model=model, messages=MESSAGES, max_tokens=48, temperature=0, extra_body={"structured_outputs": constraint}
    )
    assert re.fullmatch(pattern, answer.choices[0].message.content or "")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_forced_tool_call(client: openai.OpenAI, model: str, choice: Any) -> None:
    options: Any = {"model": model, "messages": MESSAGES, "tools": [WEATHER], "tool_choice": choice, "max_tokens": 600}
    options["parallel_tool_calls"] = False
    answer = client.chat.completions.create(temperature=0, **options)
    (call,) = answer.choices[0].message.tool_calls or []
    assert call.type == "function" and call.function.name == "get_weather" and call.id  # type: ignore[union-attr]
    arguments = json.loads(call.function.arguments)  # type: ignore[union-attr]
    assert arguments["city"] in ("Paris", "Rome") and 1 <= arguments["days"] <= 9
    name, pieces, ids = "", "", []
    for chunk in client.chat.completions.create(temperature=0, stream=True, **options):
        for delta in (part for each in chunk.choices for part in each.delta.tool_calls or ()):
            assert delta.index == 0 and delta.function is not None
            name += delta.function.name or ""
            pieces += delta.function.arguments or ""
            ids += [delta.id] if delta.id else []
    assert name == "get_weather" and json.loads(pieces) == arguments and len(ids) == 1


def test_a_tool_call_in_a_models_own_words(start_server: StartServer) -> None:
    """The mock engine says its prompt again, so the prompt holds the call."""
    said = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome", "days": 2}}\n</tool_call>'
    with _client(start_server("--tool-call-parser", "hermes")) as client:
        name = client.models.list().data[0].id
        messages: Any = [{"role": "user", "content": said}]
        options: Any = {"model": name, "messages": messages, "tools": [WEATHER], "max_tokens": 200}
        options |= {"stop": ["</tool_call>"], "extra_body": {"include_stop_str_in_output": True}}
        answer = client.chat.completions.create(**options)
        (call,) = answer.choices[0].message.tool_calls or []
        assert json.loads(call.function.arguments) == {"city": "Rome", "days": 2}  # type: ignore[union-attr]
        assert "tool_call>" not in (answer.choices[0].message.content or "")
        assert answer.choices[0].finish_reason == "tool_calls"
        pieces = ""
        for chunk in client.chat.completions.create(stream=True, **options):
            for delta in (part for each in chunk.choices for part in each.delta.tool_calls or ()):
                pieces += (delta.function.arguments if delta.function else None) or ""
        assert json.loads(pieces) == {"city": "Rome", "days": 2}


def test_a_past_tool_call_is_understood_or_refused_as_the_clients_fault(client: openai.OpenAI, model: str) -> None:
    call: Any = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": "{}"}}
    messages: Any = [
        *MESSAGES,
        {"role": "assistant", "content": "I ask.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ]
    answer = client.chat.completions.create(model=model, messages=messages, max_tokens=4)
    assert answer.choices[0].message.role == "assistant"


def test_responses(client: openai.OpenAI, model: str) -> None:
    answer = client.responses.create(model=model, input="What is a list?", max_output_tokens=16, temperature=0)
    assert answer.object == "response" and isinstance(answer.output_text, str)
    assert answer.usage is not None and answer.usage.output_tokens <= 16
    kinds, text = [], ""
    for event in client.responses.create(
        model=model, input="What is a list?", max_output_tokens=16, temperature=0, stream=True
    ):
        kinds.append(event.type)
        text += event.delta if event.type == "response.output_text.delta" else ""
    assert text == answer.output_text and kinds[0] == "response.created"
    assert kinds[-1] in ("response.completed", "response.incomplete")


@pytest.mark.parametrize(
    ("change", "kind", "param"),
    [
        ({"model": "gpt-none"}, openai.NotFoundError, "model"),
        ({"temperature": -1}, openai.BadRequestError, "temperature"),
        ({"max_tokens": 0}, openai.BadRequestError, "max_tokens"),
        ({"messages": []}, openai.BadRequestError, "messages"),
        ({"messages": [{"role": "user", "content": "x " * 9000}]}, openai.BadRequestError, None),
        ({"response_format": {"type": "json_schema"}}, openai.BadRequestError, None),
        ({"extra_body": {"stream_options": {"include_usage": True}}}, openai.BadRequestError, "stream_options"),
    ],
)
def test_errors_have_their_class(
    client: openai.OpenAI, model: str, change: dict[str, Any], kind: type[openai.APIStatusError], param: str | None
) -> None:
    with pytest.raises(kind) as caught:
        client.chat.completions.create(**{"model": model, "messages": MESSAGES, "max_tokens": 4, **change})
    error = caught.value
    assert error.body and error.code and error.type and len(error.message) < 500
    assert param is None or (error.param or "").startswith(param)
    assert error.request_id


def test_an_unknown_path_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="x", input="y")


def test_keys(start_server: StartServer) -> None:
    running = start_server("--api-key", KEY)
    with _client(running) as client, _client(running, api_key="sk-some-other-key-than-it") as other:
        assert client.models.list().data
        with pytest.raises(openai.AuthenticationError) as caught:
            other.models.list()
        assert caught.value.status_code == 401 and KEY not in str(caught.value)


def test_a_stream_that_is_closed_is_aborted(server: RunningServer, client: openai.OpenAI, model: str) -> None:
    before = _figure(server, "vllm:generation_tokens_total")
    stream = client.completions.create(
        model=model, prompt="x", max_tokens=1500, stream=True, extra_body={"ignore_eos": True}
    )
    for _ in range(3):
        next(iter(stream))
    stream.close()
    _until_idle(server)
    assert _figure(server, "vllm:generation_tokens_total") - before < 1500


def test_an_async_task_that_is_cancelled_is_aborted(server: RunningServer, model: str) -> None:
    async def run() -> None:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as client:
            asked = client.completions.create(
                model=model, prompt="y", max_tokens=1900, extra_body={"ignore_eos": True}, timeout=patient(60)
            )
            task = asyncio.create_task(asked)  # type: ignore[arg-type]
            while not await asyncio.to_thread(_num_open, server):
                assert not task.done()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    before = _figure(server, "vllm:generation_tokens_total")
    asyncio.run(run())
    _until_idle(server)
    assert _figure(server, "vllm:generation_tokens_total") - before < 1900


def _until_idle(server: RunningServer) -> None:
    """Until no request runs."""
    began = time.monotonic()
    while time.monotonic() - began < patient(30):
        if not _num_open(server):
            return
        time.sleep(0.02)
    raise AssertionError("a request that nobody waits for goes on")


def _num_open(server: RunningServer) -> int:
    return _figure(server, "octavo:num_requests_open")


def _figure(server: RunningServer, name: str) -> int:
    text = server.get("/metrics").body.decode()
    (line,) = [line for line in text.splitlines() if line.startswith(f"{name}{{")]
    return round(float(line.split()[-1]))


def test_many_at_once_get_their_own_answers(server: RunningServer, model: str) -> None:
    async def run() -> None:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as client:
            prompts = [[10 + index, 20 + index, 30] for index in range(24)]
            options: Any = {"model": model, "max_tokens": 8, "temperature": 0}
            together = await asyncio.gather(*(client.completions.create(prompt=each, **options) for each in prompts))
            for prompt, answer in list(zip(prompts, together))[::6]:
                alone = await client.completions.create(prompt=prompt, **options)
                assert alone.choices[0].text == answer.choices[0].text

    asyncio.run(run())
