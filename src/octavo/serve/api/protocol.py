"""The shapes of requests, and how a body becomes one.

Owns the fields of every request and what is said of a field that is unknown, has no effect, or is refused. What a
sampling parameter may be is for SamplingParams alone. Invariant: every field of a body is used, refused, or named in
the request's warnings; with `strict`, unknown ones are refused.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Hashable, Mapping
from typing import Any, Generic, TypeVar, cast

import msgspec

from octavo.config.settings import did_you_mean
from octavo.request.sampling_params import BOOL_FIELDS, FLOAT_FIELDS, INT_FIELDS, SamplingParams
from octavo.request.validation import shown
from octavo.serve.errors import ApiError, bad_request

MAX_WARNINGS = 16
_MAX_NAME = 64  # characters of a field's name that a message repeats


class StreamOptions(msgspec.Struct, kw_only=True):
    """What a stream holds beside the text."""

    include_usage: bool | None = None  # an event with the counts at the end; None: as continuous_usage_stats
    continuous_usage_stats: bool = False  # counts of its choice in each event

    @property
    def at_end(self) -> bool:
        """Whether the counts come at the end."""
        return self.continuous_usage_stats if self.include_usage is None else self.include_usage

    @property
    def in_each(self) -> bool:
        """Whether each event has counts."""
        return self.continuous_usage_stats and self.at_end


class Common(msgspec.Struct, kw_only=True):
    """Fields of both ways to generate."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    priority: Any = 0
    cache_salt: Any = ""
    request_id: Any = None  # a client's name for the request, which its id holds
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    return_weight_versions: bool = False
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    kv_transfer_params: Any = None


class CompletionRequest(Common, kw_only=True):
    """POST /v1/completions."""

    prompt: Any = None
    echo: bool = False
    logprobs: Any = None
    best_of: Any = None
    add_special_tokens: bool = True


class ChatRequest(Common, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Any = None
    logprobs: bool = False
    top_logprobs: Any = None
    max_completion_tokens: Any = None
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    include_reasoning: bool = True
    echo: bool = False  # begin the answer with the last message, if that is the assistant's
    reasoning_effort: str | None = None
    add_generation_prompt: bool = True
    add_special_tokens: bool = False  # beside those that the template writes
    continue_final_message: bool = False
    documents: list[Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TextFormat(msgspec.Struct, kw_only=True):
    """`text` of a response: only its format is used."""

    format: dict[str, Any] | None = None


class ResponsesRequest(msgspec.Struct, kw_only=True):
    """POST /v1/responses."""

    model: str | None = None
    input: Any = None
    instructions: str | None = None
    max_output_tokens: Any = None
    stream: bool = False
    text: TextFormat | None = None
    top_logprobs: Any = None
    metadata: dict[str, Any] | None = None
    priority: Any = 0
    cache_salt: Any = ""
    request_id: Any = None
    kv_transfer_params: Any = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """POST /tokenize: a prompt or messages."""

    model: str | None = None
    prompt: Any = None
    messages: Any = None
    add_special_tokens: bool | None = None  # None: around a prompt, and not beside what a chat template writes
    return_token_strs: bool = False
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: list[Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """POST /detokenize."""

    model: str | None = None
    tokens: Any = None
    skip_special_tokens: bool = False


Shape = CompletionRequest | ChatRequest | ResponsesRequest | TokenizeRequest | DetokenizeRequest
_S = TypeVar("_S", bound=msgspec.Struct)

# Sampling parameters that a body may give under their own name.
_NOT_IN_BODIES = {
    "output_kind",
    "bad_words_token_ids",
    "detokenize",
    "stream_interval",
    "logprobs",
    "scored_token_id",
    "structured_outputs",
    "thinking",
}
SAMPLING = frozenset(SamplingParams.__struct_fields__) - _NOT_IN_BODIES

# Fields of OpenAI's and vLLM's APIs that are taken and change nothing here: reported, never refused.
IGNORED = frozenset({
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "prediction", "verbosity", "web_search_options", "include", "truncation", "background", "conversation",
    "max_tool_calls", "prompt_cache_options", "stream_interval", "mm_processor_kwargs", "detokenize",
    "media_io_kwargs", "reasoning",
    "modalities", "stream_options",
})  # fmt: skip

# Fields that would change the answer and that there is no support for: (code, what to say).
_UNSUPPORTED = ("unsupported_parameter", "is not supported")
_NOT_ALLOWED = ("not_allowed", "is not allowed in a request")
REFUSED: dict[str, tuple[str, str]] = {
    **dict.fromkeys(
        ("suffix", "prompt_embeds", "use_beam_search", "length_penalty", "logits_processors",
         "audio", "previous_response_id", "n_discard", "moderation"),
        _UNSUPPORTED,
    ),
    **dict.fromkeys(("chat_template", "bad_words_token_ids", "scored_token_id", "lora_request"), _NOT_ALLOWED),
    **dict.fromkeys(
        ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_decoding_backend",
         "guided_whitespace_pattern"),
        ("unsupported_parameter", "is gone; use structured_outputs"),
    ),
}  # fmt: skip

# Values of refused fields that ask for nothing, beside false, "" and an empty list.
_HARMLESS: dict[str, float] = {"length_penalty": 1.0}
XARGS = "vllm_xargs"  # vLLM's name of extra_args in a body

# Integers that are no sampling parameters of their own name.
_INTS = frozenset({"priority", "top_logprobs", "max_completion_tokens", "max_output_tokens", "best_of", "logprobs"})
_INTEGER = re.compile(r"[+-]?[0-9]{1,20}")
_NUMBER = re.compile(r"[+-]?([0-9]{1,20}(\.[0-9]{0,40})?|\.[0-9]{1,40})([eE][+-]?[0-9]{1,3})?")

_AT = re.compile(r" - at `(?:key in )?\$\.?([^`]*)`$")


@dataclasses.dataclass(frozen=True, slots=True)
class Parsed(Generic[_S]):
    """A request's body, read."""

    shape: _S
    sampling: dict[str, Any]  # as given, unchecked; null only where it has a meaning
    warnings: list[str]


def read(kind: type[_S], body: Mapping[str, Any], *, strict: bool, sampling: frozenset[str] = SAMPLING) -> Parsed[_S]:
    """A body as a request of a kind. Raises ApiError naming the field."""
    fields: dict[str, Any] = {}
    params: dict[str, Any] = {}
    warnings: list[str] = []
    own, flags = kind.__struct_encode_fields__, _flags_of(cast(Hashable, kind))
    for name, value in body.items():
        if value is None:
            if name == "max_tokens":
                params[name] = None  # fill the context
            continue
        if name in own:
            fields[name] = _number(value, int) if name in _INTS else _flag(value) if name in flags else value
        elif name in sampling:
            params.setdefault(name, _lax(name, value))
        elif name == XARGS and "extra_args" in sampling:
            params["extra_args"] = with_xargs(body.get("extra_args"), value)
        elif name in REFUSED:
            code, text = REFUSED[name]
            if value not in (False, "", []) and not _is_harmless(name, value):
                raise bad_request(code, f"{name}: {text}", name)
        elif name in IGNORED:
            warnings.append(f"{name}: has no effect")
        elif strict or len(warnings) < MAX_WARNINGS:
            warnings.append(_unknown(name, [*own, *sampling], strict))
        else:
            warnings.append("")  # only counted: the search for a near name takes its time
    if len(warnings) > MAX_WARNINGS:
        warnings = [*warnings[:MAX_WARNINGS], f"and {len(warnings) - MAX_WARNINGS} more"]
    try:
        return Parsed(msgspec.convert(fields, kind), params, warnings)
    except msgspec.ValidationError as error:
        raise _wrong_type(str(error)) from None


@functools.cache
def _flags_of(kind: Hashable) -> frozenset[str]:
    """The fields of a request that are true or false."""
    return frozenset(
        field.name
        for field in msgspec.structs.fields(cast(type[msgspec.Struct], kind))
        if field.type in (bool, bool | None)
    )


def _flag(value: Any) -> Any:
    """True or false from its text."""
    return {"true": True, "false": False}.get(value.lower(), value) if isinstance(value, str) else value


def _is_harmless(name: str, value: Any) -> bool:
    return name in _HARMLESS and not isinstance(value, bool) and _number(value, float) == _HARMLESS[name]


def with_xargs(extra: Any, given: Any, field: str = XARGS) -> Any:
    """`extra_args` with what `vllm_xargs` holds, which the client calls `field`. Raises ApiError for a name in both."""
    if not isinstance(given, dict):
        raise bad_request("invalid_type", f"{field}: must be an object, got {shown(given)}", field)
    if not isinstance(extra, dict):
        return given if extra is None else extra  # what is wrong with it is told with the other parameters
    if twice := next((name for name in given if name in extra), None):
        name = f"{field}.{twice[:_MAX_NAME]}" if twice[:_MAX_NAME].isidentifier() else field
        raise bad_request("conflicting", f"{name}: is given in extra_args too", name)
    return extra | given


def _lax(name: str, value: Any) -> Any:
    """A sampling parameter with its numbers as numbers: vLLM takes "3" and 3.0 for 3."""
    if name in INT_FIELDS:
        return _number(value, int)
    if name in BOOL_FIELDS:
        return _flag(value)
    if name in FLOAT_FIELDS:
        return _number(value, float)
    if name == "logit_bias" and isinstance(value, dict):
        return {key: _number(bias, float) for key, bias in value.items()}
    return value


def _number(value: Any, kind: type[int] | type[float]) -> Any:
    """A number of a kind from its text, or an integer from a float that is one; else the value as it is."""
    if isinstance(value, str) and _NUMBER.fullmatch(value):
        value = int(value) if _INTEGER.fullmatch(value) else float(value)
    if kind is int and isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def _unknown(name: str, known: list[str], strict: bool) -> str:
    shown = name[:_MAX_NAME] if name[:_MAX_NAME].isidentifier() else "a field"
    hint = did_you_mean(name[:_MAX_NAME], known)
    if strict:
        text = f"{shown}: unknown field" + (f", {hint}" if hint else "")
        raise bad_request("unknown_field", text, shown)
    return f"{shown}: unknown field, ignored" + (f"; {hint}" if hint else "")


def _wrong_type(text: str) -> ApiError:
    """msgspec's words, "Expected `int`, got `str` - at `$.a.b`", as ours."""
    match = _AT.search(text)
    where = match[1] if match else ""
    said = text[: match.start()] if match else text
    said = said.replace("`", "").replace(" | null", "")
    return bad_request("invalid_type", f"{where}: {said[:1].lower()}{said[1:]}", where or None)
