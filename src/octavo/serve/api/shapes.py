"""The shapes of responses, OpenAI's with vLLM's additions.

Owns the structs and nothing of how they are filled. Invariant: a field that a client may index is always there, null
where there is nothing; UNSET ones are left out of the JSON.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType


class PromptDetails(msgspec.Struct):
    """Of the prompt's tokens."""

    cached_tokens: int = 0


class CompletionDetails(msgspec.Struct):
    """Of the generated tokens."""

    reasoning_tokens: int = 0


class Usage(msgspec.Struct):
    """Counts of tokens."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails | UnsetType = UNSET


class CompletionLogprobs(msgspec.Struct):
    """One entry per token in each list; null for a token without one (the first of a prompt)."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class Origin(msgspec.Struct, kw_only=True):
    """What a choice says of where its tokens came from, if that was asked for."""

    weight_versions: list[dict[str, Any]] | UnsetType = UNSET
    routed_experts: str | UnsetType = UNSET
    sampling_mask: list[list[int] | None] | UnsetType = UNSET


class CompletionChoice(Origin, kw_only=True):
    """One completion, whole or a part of a stream."""

    index: int
    text: str
    logprobs: CompletionLogprobs | UnsetType | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class Completion(msgspec.Struct, kw_only=True):
    """Of /v1/completions: the response, and an event of its stream."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice] | UnsetType
    usage: Usage | UnsetType | None = UNSET
    system_fingerprint: str | UnsetType = UNSET
    kv_transfer_params: dict[str, Any] | UnsetType = UNSET
    warnings: list[str] | UnsetType = UNSET


class TopLogprob(msgspec.Struct):
    """A token that could have been."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct):
    """A token that was sampled."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    """One entry per token."""

    content: list[TokenLogprob]
    refusal: None = None


class FunctionCall(msgspec.Struct):
    """A call of a tool, or a piece of one."""

    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class ToolCall(msgspec.Struct, kw_only=True):
    """An entry of tool_calls; in a stream id, type and name come once, then pieces of the arguments by index."""

    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: FunctionCall


def joined_call(pieces: list[ToolCall]) -> FunctionCall:
    """Pieces of one call as one piece."""
    call = FunctionCall(arguments="".join([piece.function.arguments or "" for piece in pieces]))
    for piece in pieces:
        if piece.function.name is not UNSET:
            call.name = piece.function.name
    return call


class ChatMessage(msgspec.Struct, kw_only=True):
    """What the assistant says. Reasoning has both names that clients look for."""

    role: str = "assistant"
    content: str | None = None
    refusal: None = None
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET
    function_call: FunctionCall | UnsetType = UNSET  # where the request had functions instead of tools


class ChatDelta(msgspec.Struct, kw_only=True):
    """What is new of a message."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET
    function_call: FunctionCall | UnsetType = UNSET  # where the request had functions instead of tools


class ChatChoice(Origin, kw_only=True):
    """One answer."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | UnsetType | None = None
    finish_reason: str | None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatChunkChoice(Origin, kw_only=True):
    """A part of one answer."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, kw_only=True):
    """Of /v1/chat/completions: the response, and with chunks as choices an event of its stream."""

    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice] | list[ChatChunkChoice] | UnsetType
    usage: Usage | UnsetType | None = UNSET
    system_fingerprint: str | UnsetType = UNSET
    kv_transfer_params: dict[str, Any] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    warnings: list[str] | UnsetType = UNSET


class ModelCard(msgspec.Struct, kw_only=True):
    """An entry of /v1/models."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "octavo"
    root: str
    parent: None = None
    max_model_len: int
    permission: list[dict[str, Any]] = []


class ModelList(msgspec.Struct, kw_only=True):
    """/v1/models."""

    object: str = "list"
    data: list[ModelCard]
