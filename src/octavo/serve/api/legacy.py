"""OpenAI's functions, which tools have replaced: requests that still use them, as requests with tools.

Owns the translation of `functions`, `function_call` and of messages that hold a call. Whether tools are sound is for
`serve.api.tools`. Invariant: a body without these fields comes back as it is; the answer to one with them speaks of
`function_call` as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.request.sampling_params import ParameterError


def with_tools(body: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """A chat's body in today's form, and whether its answer is to hold a `function_call`. Raises ParameterError."""
    messages = body.get("messages")
    if isinstance(messages, list) and any(isinstance(each, Mapping) and each.get("function_call") for each in messages):
        body = body | {"messages": [_with_calls(f"messages[{i}]", each) for i, each in enumerate(messages)]}
    functions, choice = body.get("functions"), body.get("function_call")
    if functions is None and choice is None:
        return body, False
    body = {name: value for name, value in body.items() if name not in ("functions", "function_call")}
    if functions is not None:
        if body.get("tools"):
            raise ParameterError("functions", "excludes tools", "conflicting")
        if not isinstance(functions, list):
            raise ParameterError("functions", "must be a list of objects", "invalid_type")
        body["tools"] = [{"type": "function", "function": function} for function in functions]
        body["parallel_tool_calls"] = False
    if isinstance(choice, Mapping):
        choice = {"type": "function", "function": dict(choice)}
    if choice is not None:
        body.setdefault("tool_choice", choice)
    return body, functions is not None


def _with_calls(name: str, message: Any) -> Any:
    call = message.get("function_call") if isinstance(message, Mapping) else None
    if not call:
        return message
    if not isinstance(call, Mapping):
        raise ParameterError(name, "function_call must be an object", "invalid_message")
    rest = {key: value for key, value in message.items() if key != "function_call"}
    return rest | {"tool_calls": [{"id": "call_0", "type": "function", "function": dict(call)}]}
