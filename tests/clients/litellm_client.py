"""litellm against a server: `python litellm_client.py URL`, in its own environment."""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import sys
from collections.abc import Callable
from typing import Any

import litellm

MESSAGES = [{"role": "user", "content": "What is a list?"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "get_weather", "description": "Weather.", "parameters": SCHEMA}}


def _failure(call: Callable[..., Any], **options: Any) -> str:
    try:
        call(**options)
    except Exception as error:
        return type(error).__name__
    return ""


def _provider(name: str, url: str) -> dict[str, Any]:
    options: Any = {"model": f"{name}/octavo-tiny", "api_base": f"{url}/v1", "api_key": "none", "temperature": 0}
    options |= {"messages": MESSAGES, "max_tokens": 24, "num_retries": 0}
    answer = litellm.completion(**options)
    streamed = litellm.completion(**options, stream=True)
    return {
        "answer": answer.choices[0].message.content,
        "usage": answer.usage.model_dump(),
        "streamed": "".join(chunk.choices[0].delta.content or "" for chunk in streamed if chunk.choices),
        "unknown_model": _failure(litellm.completion, **{**options, "model": f"{name}/none"}),
        "bad_parameter": _failure(litellm.completion, **{**options, "temperature": -5}),
    }


def main(url: str) -> None:
    """Use each part once; print what came."""
    common: Any = {"model": "hosted_vllm/octavo-tiny", "api_base": f"{url}/v1", "api_key": "none", "temperature": 0}
    chat: Any = {**common, "messages": MESSAGES, "max_tokens": 64}
    schema = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA, "strict": True}}
    forced = {"type": "function", "function": {"name": "get_weather"}}
    called = litellm.completion(**chat, tools=[TOOL], tool_choice=forced)
    call = called.choices[0].message.tool_calls[0].function
    asynchronous = asyncio.run(litellm.acompletion(**{**chat, "max_tokens": 24}))
    said = {
        "version": importlib.metadata.version("litellm"),
        "hosted_vllm": _provider("hosted_vllm", url),
        "openai": _provider("openai", url),
        "asynchronous": asynchronous.choices[0].message.content,
        "text_completion": litellm.text_completion(
            **{**common, "model": "text-completion-openai/octavo-tiny"}, prompt="def f(x):", max_tokens=8
        )
        .choices[0]
        .text,
        "structured": litellm.completion(**chat, response_format=schema).choices[0].message.content,
        "tool_call": {"name": call.name, "arguments": call.arguments},
    }
    print(json.dumps(said))


if __name__ == "__main__":
    main(sys.argv[1])
