"""POST /v1/chat/completions.

Owns the shape of its replies and events. What of an answer is content, reasoning or a call of a tool is for the
parsers. Invariants: the first event of a choice names the role and comes with the first token, not before; the last one
before the usage has the finish reason.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import UNSET

from octavo.frontend.frontend import Prompt
from octavo.request.outputs import CompletionOutput, FlatLogprobs, RequestOutput
from octavo.request.sampling_params import SamplingParams, num_kept
from octavo.serve.api.answer import Answer, Answers, plan_answers
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
from octavo.serve.api.legacy import with_tools
from octavo.serve.api.logprobs import TokenTexts, chat_logprobs
from octavo.serve.api.origin import tell_origin
from octavo.serve.api.protocol import ChatRequest, Parsed, StreamOptions, read
from octavo.serve.api.shapes import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    joined_call,
)
from octavo.serve.api.transfers import with_transfer
from octavo.serve.errors import bad_request, renaming
from octavo.serve.http import json_pieces
from octavo.serve.http.exchange import Exchange
from octavo.serve.http.json_pieces import array, joined, with_fields
from octavo.serve.routes.completions import DONE, END, check_stream_options, follow_settings
from octavo.serve.sandbox.grammar import form_names, from_request
from octavo.serve.state import ServeState


async def create(state: ServeState, exchange: Exchange) -> None:
    """Answer one request."""
    body, legacy = with_tools(await exchange.json())
    parsed = read(ChatRequest, body, strict=state.config.strict)
    request = parsed.shape
    follow_settings(state.config, request)
    model = state.check_model(request.model)
    names = {"logprobs": "top_logprobs", **form_names(request.response_format, request.structured_outputs)}
    if request.max_completion_tokens is not None:
        names["max_tokens"] = "max_completion_tokens"
    with renaming(names):
        await _create(state, exchange, parsed, model, legacy=legacy)


async def _create(
    state: ServeState, exchange: Exchange, parsed: Parsed[ChatRequest], model: str, *, legacy: bool
) -> None:
    request = parsed.shape
    answers = plan_answers(state, request)
    params = _params(state, parsed, answers)
    state.check_ready()
    check_options(state, request, parsed.warnings)
    params = await state.check_structured(exchange, params)
    async with exchange.watching():
        prompt = await _render(state, request, answers, num_kept(params, state.engine.limits))
    if answers.tools and not state.tokenizer.template.takes_tools():
        parsed.warnings.append("tools: the chat template does not show them to the model (--chat-template)")
    if answers.choice == "auto" and state.parsers.tools is None:
        parsed.warnings.append("tools: calls are not looked for in the answer (--tool-call-parser)")
    if request.reasoning_effort is not None and not _takes_effort(state):
        parsed.warnings.append("reasoning_effort: has no effect (--allowed-template-kwargs)")
    name = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
    asked = request.max_completion_tokens or parsed.sampling.get("max_tokens")
    tell_of_cut(state, parsed.warnings, name, asked, [prompt])
    run = make_run(exchange, "chatcmpl-", request, [prompt], params)
    await send(
        state, exchange, run, _Reply(state, run, request, model, parsed.warnings, answers, legacy=legacy), request
    )


def _takes_effort(state: ServeState) -> bool:
    """Whether the template is told of `reasoning_effort`."""
    return state.takes("reasoning_effort")


async def _render(state: ServeState, request: ChatRequest, answers: Answers, kept: int | None) -> Prompt:
    kwargs = dict(request.chat_template_kwargs or {})
    if request.reasoning_effort is not None and _takes_effort(state):
        kwargs.setdefault("reasoning_effort", request.reasoning_effort)
    return await render_chat(
        state,
        request.messages,
        tools=answers.shown,
        documents=request.documents,
        add_special_tokens=request.add_special_tokens,
        add_generation_prompt=request.add_generation_prompt and not request.continue_final_message,
        continue_final_message=request.continue_final_message,
        template_kwargs=kwargs,
        kept=kept,
    )


def _params(state: ServeState, parsed: Parsed[ChatRequest], answers: Answers) -> SamplingParams:
    request = parsed.shape
    given = with_transfer(state, parsed.sampling, request.kv_transfer_params, parsed.warnings)
    check_stream_options(request.stream, request.stream_options)
    if request.max_completion_tokens is not None:
        given["max_tokens"] = request.max_completion_tokens
    if request.logprobs:
        given["logprobs"] = request.top_logprobs if request.top_logprobs is not None else 0
    elif request.top_logprobs not in (None, 0):
        raise bad_request("unsupported_parameter", "top_logprobs: needs logprobs", "top_logprobs")
    if answers.needs_special_tokens:
        given["skip_special_tokens"] = False
    structured = from_request(request.response_format, request.structured_outputs)
    forced = answers.forced
    if forced is not None and structured is not None:
        raise bad_request("conflicting", "tool_choice: excludes a form of the output", "tool_choice")
    given["structured_outputs"] = forced or structured
    return make_params(state, given, stream=request.stream, default_max_tokens=None)


def _last_words(request: ChatRequest) -> str:
    """The text of the last message, if it is the assistant's: what an answer with `echo` begins with."""
    last = request.messages[-1]
    content = last.get("content") if last.get("role") == "assistant" else ""
    if isinstance(content, list):
        content = "\n".join(part["text"] for part in content)
    return content or ""


class _Reply:
    """One reply in the making."""

    def __init__(
        self,
        state: ServeState,
        run: Run,
        request: ChatRequest,
        model: str,
        warnings: list[str],
        answers: Answers,
        *,
        legacy: bool,
    ) -> None:
        self._echoed = _last_words(request) if request.echo else ""
        self._legacy = legacy  # calls are told as `function_call`
        self._state, self._run, self._request, self._model = state, run, request, model
        self._texts = TokenTexts(state.tokenizer, request.return_tokens_as_token_ids)
        self._count = TokenCounter(run)
        self._created = int(time.time())
        self._fingerprint = state.fingerprint
        self._warnings: Any = warnings or UNSET
        self._encoder = msgspec.json.Encoder()
        self._answers = [answers.begin(run.prompts[0].text or "", run.params) for _ in range(run.params.n)]

    async def whole(self, exchange: Exchange) -> None:
        """Reply when all is done."""
        last: list[RequestOutput] = []

        async def take(index: int, output: RequestOutput) -> None:
            self._count.see(index, output)
            for completion in output.outputs:
                self._count.add(index, completion)
            last[:] = [output]

        await drive(self._state, exchange, self._run, take, streams=False)
        self._count.note(exchange)
        output = last[0]
        reply = ChatCompletion(
            id=self._run.id,
            created=self._created,
            model=self._model,
            choices=UNSET,
            usage=self._usage(),
            system_fingerprint=self._fingerprint,
            kv_transfer_params=self._count.kv_transfer_params,
            warnings=self._warnings,
        )
        if self._request.return_token_ids:
            reply.prompt_token_ids = output.prompt_token_ids
        fields = [("choices", array(self._choice(completion) for completion in output.outputs))]
        if isinstance(output.prompt_logprobs, FlatLogprobs):
            fields.append(("prompt_logprobs", json_pieces.prompt_logprobs(output.prompt_logprobs)))
        await exchange.reply_pieces(with_fields(self._encoder.encode(reply), fields))

    async def stream(self, exchange: Exchange) -> None:
        """Send events as outputs come."""
        options = self._request.stream_options or StreamOptions()
        begun = [False] * self._run.params.n

        async def take(index: int, output: RequestOutput) -> None:
            self._count.see(index, output)
            events = []
            for completion in output.outputs:
                if not begun[completion.index]:
                    begun[completion.index] = True
                    delta = ChatDelta(role="assistant", content=self._echoed)
                    first = ChatChunkChoice(index=completion.index, delta=delta)
                    events.append(await self._first(first, options.in_each, output))
                self._count.add(index, completion)
                choice = self._delta(completion)
                if choice is not None:
                    events.append(self._event([choice], options.in_each))
            if events:
                await exchange.send(b"".join(events))

        await drive(self._state, exchange, self._run, take, streams=True)
        self._count.note(exchange)
        usage = self._event([], True) if options.at_end else b""
        await exchange.end_events(usage + DONE)

    async def _first(self, choice: ChatChunkChoice, with_usage: bool, output: RequestOutput) -> bytes:
        """The first event of a choice: what is said once comes with it, that of all with the first choice."""
        said = {}
        if self._request.return_token_ids:
            said["prompt_token_ids"] = output.prompt_token_ids
        if choice.index > 0:
            return self._event([choice], with_usage, **said)
        event = self._event([choice], with_usage, warnings=self._warnings, **said)
        if not isinstance(output.prompt_logprobs, FlatLogprobs):
            return event
        scores = json_pieces.prompt_logprobs(output.prompt_logprobs)
        return await joined(with_fields(event.removesuffix(END), [("prompt_logprobs", scores)])) + END

    def _event(self, choices: list[ChatChunkChoice], with_usage: bool, **said: Any) -> bytes:
        place = choices[0].index if choices else None
        chunk = ChatCompletion(
            id=self._run.id,
            object="chat.completion.chunk",
            created=self._created,
            model=self._model,
            choices=choices,
            usage=self._usage(place) if with_usage else UNSET,
            system_fingerprint=self._fingerprint,
            **said,
        )
        return b"data: " + self._encoder.encode(chunk) + END

    def _choice(self, completion: CompletionOutput) -> Iterator[bytes]:
        answer = self._answers[completion.index]
        parts = answer.whole(completion)
        content = self._echoed + parts.content
        message = ChatMessage(content=content or (None if parts.tool_calls or parts.reasoning else ""))
        if parts.reasoning and self._request.include_reasoning:
            message.reasoning = message.reasoning_content = parts.reasoning
        if parts.tool_calls and self._legacy:
            message.function_call = parts.tool_calls[0].function
        elif parts.tool_calls:
            message.tool_calls = parts.tool_calls
        choice = ChatChoice(
            index=completion.index,
            message=message,
            finish_reason=self._finish_reason(answer, completion),
            stop_reason=completion.stop_reason,
        )
        if self._request.return_token_ids:
            choice.token_ids = completion.token_ids
        tell_origin(choice, completion, versions=self._request.return_weight_versions)
        fields = []
        if self._request.logprobs and isinstance(completion.logprobs, FlatLogprobs):
            choice.logprobs = UNSET
            num_top = self._run.params.logprobs or 0
            found = json_pieces.chat_logprobs(self._texts, completion.token_ids, completion.logprobs, num_top)
            fields.append(("logprobs", found))
        return with_fields(self._encoder.encode(choice), fields)

    def _delta(self, completion: CompletionOutput) -> ChatChunkChoice | None:
        """A choice of an event; None if there is nothing to say."""
        answer: Answer = self._answers[completion.index]
        parts = answer.feed(completion)
        delta = ChatDelta()
        if parts.content:
            delta.content = parts.content
        if parts.reasoning and self._request.include_reasoning:
            delta.reasoning = delta.reasoning_content = parts.reasoning
        if parts.tool_calls and self._legacy:
            delta.function_call = joined_call(parts.tool_calls)
        elif parts.tool_calls:
            delta.tool_calls = parts.tool_calls
        choice = ChatChunkChoice(index=completion.index, delta=delta, logprobs=self._logprobs(completion))
        if completion.finish_reason is not None:
            choice.finish_reason = self._finish_reason(answer, completion)
            choice.stop_reason = completion.stop_reason
        if self._request.return_token_ids:
            choice.token_ids = completion.token_ids
        tell_origin(choice, completion, versions=self._request.return_weight_versions)
        empty = delta == ChatDelta() and choice.finish_reason is None and not self._says_more
        return None if empty else choice

    def _finish_reason(self, answer: Answer, completion: CompletionOutput) -> str | None:
        reason = answer.finish_reason(completion.finish_reason)
        return "function_call" if self._legacy and reason == "tool_calls" else reason

    @property
    def _says_more(self) -> bool:
        """Whether events have more than text."""
        options = self._request.stream_options
        counts = options is not None and options.in_each
        tells_tokens = self._request.return_token_ids or self._request.return_weight_versions
        return self._request.logprobs or tells_tokens or self._run.params.return_sampling_mask or counts

    def _usage(self, place: int | None = None) -> Any:
        answers = self._answers if place is None else self._answers[place : place + 1]
        if answers[0].reasons:
            self._count.num_reasoning = sum(answer.num_reasoning_tokens for answer in answers)
        return self._count.usage(place)

    def _logprobs(self, completion: CompletionOutput) -> ChatLogprobs | None:
        if not self._request.logprobs:
            return None
        num_top = self._run.params.logprobs or 0
        return chat_logprobs(self._texts, completion.token_ids, completion.logprobs or [], num_top)
