"""The forms of a prompt that are objects, by vLLM's names.

Owns the two types, which are plain dicts. Invariant: `LLM.generate` takes each of their keys.
"""

from __future__ import annotations

from typing import NotRequired, TypedDict


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str
    cache_salt: NotRequired[str]  # prompts share cached prefixes only with those of the same salt


class TokensPrompt(TypedDict):
    """A prompt as token ids; `prompt` is its text, for the output to show."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]
