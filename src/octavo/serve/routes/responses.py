"""POST /v1/responses: OpenAI's newer form of a chat, for text.

Owns the reading of its input items, and the shape of its replies and events. Nothing is stored: a conversation is sent
anew each time. Invariant: events are numbered from 0 without gaps, and the last one holds the whole response.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import UNSET

from octavo.request.outputs import CompletionOutput, RequestOutput
from octavo.request.sampling_params import ParameterError, SamplingParams
from octavo.serve.api.answer import Parts, plan_answers
from octavo.serve.api.generation import (
    Run,
    TokenCounter,
    check_options,
    drive,
    make_params,
    make_run,
    render_chat,
    send,
    tell_of_cut,
)
from octavo.serve.api.items import Event, Items
from octavo.serve.api.protocol import ChatRequest, Parsed, ResponsesRequest, read
from octavo.serve.api.transfers import each_transfer, with_transfer
from octavo.serve.errors import ApiError, bad_request, renaming
from octavo.serve.http.exchange import Exchange
from octavo.serve.sandbox.grammar import client_names, from_response_format
from octavo.serve.state import ServeState

_SAMPLING = frozenset(
    {
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "seed",
        "stop",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "ignore_eos",
        "min_tokens",
        "thinking_token_budget",
        "extra_args",
    }
)
_TEXT_PARTS = ("input_text", "output_text", "text")
_ROLES = ("user", "assistant", "system", "developer")


async def create(state: ServeState, exchange: Exchange) -> None:
    """Answer one request."""
    body = await exchange.json()
    for name in ("tools", "tool_choice"):
        if body.get(name) not in (None, [], "none", "auto"):
            raise bad_request("unsupported_parameter", f"{name}: is not supported here; use chat completions", name)
    body = {name: value for name, value in body.items() if name not in ("tools", "tool_choice", "parallel_tool_calls")}
    parsed = read(ResponsesRequest, body, strict=state.config.strict, sampling=_SAMPLING)
    request = parsed.shape
    model = state.check_model(request.model)
    with renaming({"max_tokens": "max_output_tokens", **client_names("text.format", "text.format.schema")}):
        params = _params(state, parsed)
        state.check_ready()
        check_options(state, request, parsed.warnings)
        params = await state.check_structured(exchange, params)
    messages = read_input(request.input, request.instructions)
    with renaming({"messages": "input"}):
        async with exchange.watching():
            prompt = await render_chat(state, messages, template_kwargs=None)
    tell_of_cut(state, parsed.warnings, "max_output_tokens", request.max_output_tokens, [prompt])
    run = make_run(exchange, "resp_", request, [prompt], params)
    run.transfers = each_transfer(request.kv_transfer_params, 1)
    await send(state, exchange, run, _Reply(state, run, request, model, parsed.warnings), request)


def _params(state: ServeState, parsed: Parsed[ResponsesRequest]) -> SamplingParams:
    request = parsed.shape
    given = with_transfer(state, parsed.sampling, request.kv_transfer_params, parsed.warnings)
    if request.max_output_tokens is not None:
        given["max_tokens"] = request.max_output_tokens
    if request.top_logprobs not in (None, 0):
        raise bad_request("unsupported_parameter", "top_logprobs: is not supported here", "top_logprobs")
    if request.text is not None:
        given["structured_outputs"] = from_response_format(request.text.format, "text.format")
    return make_params(state, given, stream=request.stream, default_max_tokens=None)


def read_input(given: Any, instructions: str | None) -> list[dict[str, Any]]:
    """`input` as messages. Raises ParameterError."""
    messages: list[dict[str, Any]] = []
    if instructions is not None:
        messages.append({"role": "system", "content": instructions})
    if given is None:
        raise ParameterError("input", "is missing", "missing_field")
    if isinstance(given, str):
        if not given:
            raise ParameterError("input", "must not be empty", "empty_prompt")
        return [*messages, {"role": "user", "content": given}]
    if not isinstance(given, list):
        raise ParameterError("input", "must be a text or a list of items", "invalid_type")
    if not given:
        raise ParameterError("input", "must not be empty", "empty_prompt")
    return messages + [message for i, item in enumerate(given) for message in _read_item(f"input[{i}]", item)]


def _read_item(name: str, item: Any) -> list[dict[str, Any]]:
    if not isinstance(item, Mapping):
        raise ParameterError(name, "must be an object", "invalid_message")
    kind = item.get("type", "message")
    if kind == "reasoning":
        return []
    if kind != "message":
        raise ParameterError(name, "only messages are supported here", "unsupported_parameter")
    role, content = item.get("role"), item.get("content")
    if role not in _ROLES:
        raise ParameterError(name, f"role must be one of {', '.join(_ROLES)}", "invalid_message")
    if isinstance(content, list):
        texts: list[str] = []
        for part in content:
            if not isinstance(part, Mapping) or part.get("type") not in _TEXT_PARTS:
                raise ParameterError(name, "content parts must be text", "invalid_message")
            if not isinstance(part.get("text"), str):
                raise ParameterError(name, "content parts must hold text", "invalid_message")
            texts.append(part["text"])
        content = "\n".join(texts)
    if not isinstance(content, str):
        raise ParameterError(name, "content must be text or a list of text parts", "invalid_message")
    return [{"role": "system" if role == "developer" else role, "content": content}]


class _Reply:
    """One reply in the making."""

    def __init__(self, state: ServeState, run: Run, request: ResponsesRequest, model: str, warnings: list[str]) -> None:
        self._state, self._run, self._request, self._model = state, run, request, model
        self._warnings = warnings
        self._count = TokenCounter(run)
        self._created = int(time.time())
        self._answer = plan_answers(state, ChatRequest()).begin(run.prompts[0].text or "", run.params)
        self._items = Items(run.key.removeprefix("resp_"))
        self._number = 0
        self._finish: str | None = None

    async def whole(self, exchange: Exchange) -> None:
        """Reply when all is done."""

        async def take(index: int, output: RequestOutput) -> None:
            self._count.see(index, output)
            self._count.add(index, output.outputs[0])
            self._take(self._answer.whole(output.outputs[0]), output.outputs[0])

        await drive(self._state, exchange, self._run, take, streams=False)
        self._items.end("")
        self._count.note(exchange)
        await exchange.reply_json(self._response())

    async def stream(self, exchange: Exchange) -> None:
        """Send events as outputs come."""

        async def take(index: int, output: RequestOutput) -> None:
            self._count.see(index, output)
            events = self._opening() if self._number == 0 else []
            for completion in output.outputs:
                self._count.add(index, completion)
                events += self._events(self._take(self._answer.feed(completion), completion))
            if events:
                await exchange.send(b"".join(events))

        try:
            await drive(self._state, exchange, self._run, take, streams=True)
        except ApiError as error:
            failed = {"code": "server_error", "message": error.message}
            last = self._event("response.failed", response=self._response(status="failed", error=failed))
            await exchange.send(last)
            raise
        self._count.note(exchange)
        await exchange.end_events(b"".join(self._closing()))

    def _take(self, parts: Parts, completion: CompletionOutput) -> list[Event]:
        self._finish = completion.finish_reason
        return self._items.take(parts.stretches)

    def _opening(self) -> list[bytes]:
        running = self._response(status="in_progress")
        return [
            self._event("response.created", response=running),
            self._event("response.in_progress", response=running),
        ]

    def _closing(self) -> list[bytes]:
        response = self._response()
        last = self._events(self._items.end(response["status"]))
        return [*last, self._event(f"response.{response['status']}", response=response)]

    def _events(self, events: list[Event]) -> list[bytes]:
        return [self._event(kind, **fields) for kind, fields in events]

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return b"event: " + kind.encode() + b"\ndata: " + msgspec.json.encode(data) + b"\n\n"

    def _response(self, status: str = "", error: Any = None) -> dict[str, Any]:
        cut = self._finish in ("length", "abort")
        why = "aborted" if self._finish == "abort" else "max_output_tokens"
        status = status or ("incomplete" if cut else "completed")
        done = status in ("completed", "incomplete")
        params, request = self._run.params, self._request
        response = {
            "id": self._run.id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": error,
            "incomplete_details": {"reason": why} if status == "incomplete" else None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata or {},
            "model": self._model,
            "output": self._items.whole(status) if done else [],
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "temperature": params.temperature,
            "text": {"format": (request.text.format if request.text else None) or {"type": "text"}},
            "tool_choice": "none",
            "tools": [],
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": self._usage() if done else None,
        }
        if done and (told := self._count.kv_transfer_params) is not UNSET:
            response["kv_transfer_params"] = told
        return response | ({"warnings": self._warnings} if self._warnings else {})

    def _usage(self) -> dict[str, Any]:
        count = self._count
        return {
            "input_tokens": count.num_prompt,
            "input_tokens_details": {"cached_tokens": count.num_cached},
            "output_tokens": count.num_output,
            "output_tokens_details": {"reasoning_tokens": self._answer.num_reasoning_tokens},
            "total_tokens": count.num_prompt + count.num_output,
        }
