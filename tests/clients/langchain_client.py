"""langchain-openai against a server: `python langchain_client.py URL`, in its own environment."""

from __future__ import annotations

import importlib.metadata
import json
import sys
from typing import Any, Literal

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel

QUESTION = "What is a list?"


class Weather(BaseModel):
    """The weather of a city."""

    city: Literal["Paris", "Rome"]


@tool
def get_weather(city: Literal["Paris", "Rome"]) -> str:
    """The weather of a city."""
    return f"sunny in {city}"


def main(url: str) -> None:
    """Use each part once; print what came."""
    options: Any = {
        "base_url": f"{url}/v1",
        "api_key": "none",
        "model": "octavo-tiny",
        "temperature": 0,
        "max_retries": 0,
    }
    chat = ChatOpenAI(**options, max_tokens=24)
    answer = chat.invoke(QUESTION)
    chunks = list(ChatOpenAI(**options, max_tokens=24, stream_usage=True).stream(QUESTION))
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole = whole + chunk
    structured = ChatOpenAI(**options, max_tokens=64).with_structured_output(Weather, method="json_schema")
    called = ChatOpenAI(**options, max_tokens=64).bind_tools([get_weather], tool_choice="get_weather").invoke(QUESTION)
    with_logprobs = chat.bind(logprobs=True, top_logprobs=2).invoke(QUESTION)
    try:
        ChatOpenAI(**{**options, "model": "none"}).invoke(QUESTION)
        error = ""
    except Exception as raised:
        error = next(each.__name__ for each in type(raised).__mro__ if each.__module__.startswith("openai"))
    said = {
        "versions": {name: importlib.metadata.version(name) for name in ("langchain-openai", "openai")},
        "answer": answer.content,
        "usage": _counts(answer.usage_metadata),
        "streamed": whole.content,
        "stream_usage": _counts(whole.usage_metadata),
        "num_chunks": len(chunks),
        "batch": [each.content for each in chat.batch([QUESTION] * 3)],
        "structured": structured.invoke(QUESTION).model_dump(),
        "tool_calls": called.tool_calls,
        "num_logprobs": len(with_logprobs.response_metadata["logprobs"]["content"]),
        "completion": OpenAI(**options, max_tokens=8).invoke("def f(x):"),
        "error": error,
    }
    print(json.dumps(said))


def _counts(usage: Any) -> dict[str, int]:
    return {name: usage[name] for name in ("input_tokens", "output_tokens", "total_tokens")}


if __name__ == "__main__":
    main(sys.argv[1])
