"""The tools of a request: their form, and which of them the answer must or may call.

Owns the checks of `tools` and `tool_choice`. Knows no template and no parser. Invariant: what passes has functions with
distinct plain names and an object (or nothing) as parameters; it repeats nothing of a client's text in an error.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from octavo.request.sampling_params import ParameterError

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


def check_tools(tools: list[Any] | None, most: int) -> list[dict[str, Any]] | None:
    """The tools as a template takes them; None if there are none. Raises ParameterError."""
    if not tools:
        return None
    if len(tools) > most:
        raise ParameterError("tools", f"may hold at most {most}, got {len(tools)}", "too_many_tools")
    names: set[str] = set()
    for index, tool in enumerate(tools):
        name = _check_tool(f"tools[{index}]", tool)
        if name in names:
            raise ParameterError(f"tools[{index}].function.name", "is used by another tool", "duplicate_tool")
        names.add(name)
    return tools


def _check_tool(where: str, tool: Any) -> str:
    def refuse(field: str, text: str) -> ParameterError:
        return ParameterError(f"{where}{field}", text, "invalid_tool")

    if not isinstance(tool, Mapping) or tool.get("type") != "function":
        raise refuse("", "must be an object of type function")
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise refuse(".function", "must be an object")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise refuse(".function.name", "must be 1 to 64 letters, digits, dots, dashes or underscores")
    if not isinstance(function.get("description", ""), str | None):
        raise refuse(".function.description", "must be a string")
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, Mapping):
        raise refuse(".function.parameters", "must be a JSON schema, that is an object")
    return name


def check_choice(choice: Any, tools: list[dict[str, Any]] | None) -> str:
    """What `tool_choice` asks for: "none", "auto", "required", or "=" and the name of the tool to call.

    Raises ParameterError.
    """
    if choice is None:
        return "auto" if tools else "none"
    if isinstance(choice, str):
        if choice not in ("none", "auto", "required"):
            raise ParameterError("tool_choice", "must be none, auto, required or a function", "invalid_value")
        if choice == "required" and not tools:
            raise ParameterError("tool_choice", "required needs tools", "invalid_value")
        return choice if tools else "none"
    function = choice.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    if choice.get("type") != "function" or not isinstance(name, str):
        raise ParameterError("tool_choice", "must be none, auto, required or a function", "invalid_value")
    if name not in {tool["function"]["name"] for tool in tools or ()}:
        raise ParameterError("tool_choice", "names a function that is not among the tools", "invalid_value")
    return f"={name}"
