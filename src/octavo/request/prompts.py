"""Prompts from Python: their forms that are objects, by vLLM's names, and which of several an error is about.

Owns the two types, which are plain dicts, and knows nothing of what is in a prompt. Invariant: `LLM.generate` takes
each of their keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NotRequired, TypedDict, TypeVar

from octavo.request.validation import ParameterError

_T = TypeVar("_T")
_OF_PROMPTS = ("prompt", "messages")  # fields of errors that are about a prompt, not about parameters
_OF_CHATS = ("template_failed", "invalid_message")  # codes of such, whatever their field


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str
    cache_salt: NotRequired[str]  # prompts share cached prefixes only with those of the same salt


class TokensPrompt(TypedDict):
    """A prompt as token ids; `prompt` is its text, for the output to show."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]


def for_each(argument: str, read: Callable[..., _T], *columns: Iterable[Any]) -> list[_T]:
    """`read` of each row of the columns, in order. An error about one of several prompts says which: `prompts[1]`."""
    rows, done = list(zip(*columns, strict=True)), list[_T]()
    try:
        for row in rows:
            done.append(read(*row))
    except ParameterError as error:
        name, bracket, rest = error.field.partition("[")
        if len(rows) == 1 or (name not in _OF_PROMPTS and error.code not in _OF_CHATS):
            raise
        place, said = f"{argument}[{len(done)}]", str(error)
        if name in _OF_PROMPTS:
            place, said = f"{place}{bracket}{rest}", said.removeprefix(f"{error.field}: ")
        raise ParameterError(place, said, error.code) from None
    return done


def refuse_several(prompt: object) -> None:
    """Raise ParameterError for a list of prompts where there can be one. Token ids and messages are one."""
    if isinstance(prompt, str) or not isinstance(prompt, Sequence) or not prompt:
        return
    first = prompt[0]
    if isinstance(first, Sequence) or (isinstance(first, Mapping) and {"prompt", "prompt_token_ids"} & first.keys()):
        message = f"must be one prompt, got a list of {len(prompt)}: `generate` takes several"
        raise ParameterError("prompt", message, "invalid_type")
