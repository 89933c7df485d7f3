"""POST /v1/completions.

Owns the shape of its replies and events, echo among them. Invariants: choices are prompt-major: choice i of prompt p
has the index p * n + i; with `echo` and `logprobs` the lists hold the prompt's tokens and then the generated ones.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from octavo.frontend.frontend import Prompt
from octavo.request.outputs import CompletionOutput, FlatLogprobs, LogprobsDict, RequestOutput
from octavo.request.sampling_params import SamplingParams, num_kept
from octavo.serve.api.generation import (
    COMPLETION_TOKENS,
    Run,
    TokenCounter,
    check_options,
    drive,
    make_params,
    make_run,
    read_prompts,
    send,
    tell_of_cut,
)
from octavo.serve.api.logprobs import Offsets, TokenTexts, completion_logprobs
from octavo.serve.api.origin import tell_origin
from octavo.serve.api.protocol import Common, CompletionRequest, Parsed, StreamOptions, read
from octavo.serve.api.shapes import Completion, CompletionChoice
from octavo.serve.api.transfers import each_transfer, with_transfer
from octavo.serve.errors import bad_request, renaming
from octavo.serve.http import json_pieces
from octavo.serve.http.exchange import Exchange
from octavo.serve.http.json_pieces import array, joined, with_fields
from octavo.serve.sandbox.grammar import form_names, from_request
from octavo.serve.settings import ServeConfig
from octavo.serve.state import ServeState

END = b"\n\n"
DONE = b"data: [DONE]" + END
_ENCODER = msgspec.json.Encoder()


async def create(state: ServeState, exchange: Exchange) -> None:
    """Answer one request."""
    parsed = read(CompletionRequest, await exchange.json(), strict=state.config.strict)
    request = parsed.shape
    follow_settings(state.config, request)
    model = state.check_model(request.model)
    with renaming(form_names(request.response_format, request.structured_outputs)):
        params = _params(state, parsed)
        state.check_ready()
        params = await state.check_structured(exchange, params)
    check_options(state, request, parsed.warnings)
    only_prompt = _only_prompt(parsed)
    special = request.add_special_tokens
    kept = num_kept(params, state.engine.limits, is_answered=not only_prompt)
    async with exchange.watching():
        prompts = await read_prompts(
            state, request.prompt, add_special_tokens=special, kept=kept, is_answered=not only_prompt
        )
    tell_of_cut(state, parsed.warnings, "max_tokens", parsed.sampling.get("max_tokens"), prompts)
    run = make_run(exchange, "cmpl-", request, prompts, params, only_prompts=only_prompt)
    run.transfers = each_transfer(request.kv_transfer_params, len(prompts))
    await send(
        state, exchange, run, _Answer(state, run, request, model, parsed.warnings, only_prompt=only_prompt), request
    )


def _params(state: ServeState, parsed: Parsed[CompletionRequest]) -> SamplingParams:
    request = parsed.shape
    given = with_transfer(state, parsed.sampling, request.kv_transfer_params, parsed.warnings)
    check_stream_options(request.stream, request.stream_options)
    best_of = request.best_of
    if best_of is not None and (isinstance(best_of, bool) or best_of != given.get("n", 1)):
        raise bad_request("unsupported_parameter", "best_of: must equal n, or be left out", "best_of")
    if request.logprobs is not None:
        given["logprobs"] = request.logprobs
        if request.echo:
            given.setdefault("prompt_logprobs", request.logprobs)
    if _only_prompt(parsed):
        given["max_tokens"] = 1  # computes the prompt; the token is not shown, see _Answer
    given["structured_outputs"] = from_request(request.response_format, request.structured_outputs)
    return make_params(state, given, stream=request.stream, default_max_tokens=COMPLETION_TOKENS)


def follow_settings(config: ServeConfig, request: Common) -> None:
    """What the server's settings wish of every answer."""
    request.return_tokens_as_token_ids |= config.return_tokens_as_token_ids
    if request.stream and config.enable_force_include_usage:
        options = request.stream_options or StreamOptions()
        request.stream_options = msgspec.structs.replace(options, include_usage=True)


def _only_prompt(parsed: Parsed[CompletionRequest]) -> bool:
    """Whether the prompt shall be said and scored, and nothing else."""
    most = parsed.sampling.get("max_tokens")
    return parsed.shape.echo and type(most) is int and most == 0


def check_stream_options(stream: bool, options: StreamOptions | None) -> None:
    """Raise ApiError for options without a stream."""
    if options is not None and not stream:
        raise bad_request("unsupported_parameter", "stream_options: needs stream", "stream_options")


class _Choice:
    """What a choice of a stream remembers."""

    __slots__ = ("begun", "offsets")

    def __init__(self, offsets: Offsets | None) -> None:
        """`offsets`: if log-probabilities are wanted."""
        self.offsets = offsets
        self.begun = False


class _Answer:
    """One answer in the making."""

    __slots__ = (
        "_count",
        "_created",
        "_echoed",
        "_fingerprint",
        "_model",
        "_only_prompt",
        "_request",
        "_run",
        "_scores",
        "_state",
        "_warnings",
    )

    def __init__(
        self,
        state: ServeState,
        run: Run,
        request: CompletionRequest,
        model: str,
        warnings: list[str],
        *,
        only_prompt: bool,
    ) -> None:
        """only_prompt: nothing of what was generated is shown or counted."""
        self._state, self._run, self._request, self._model = state, run, request, model
        self._count = TokenCounter(run)
        self._created = int(time.time())
        self._warnings: Any = warnings or UNSET
        self._fingerprint = state.fingerprint
        self._only_prompt = only_prompt
        self._scores: list[Sequence[LogprobsDict | None] | None] = [None] * len(run.prompts)  # of the prompts' tokens
        self._echoed = [self._prompt_text(prompt) if request.echo else "" for prompt in run.prompts]

    async def whole(self, exchange: Exchange) -> None:
        """Reply when all is done."""
        done: dict[int, tuple[int, CompletionOutput]] = {}

        async def take(index: int, output: RequestOutput) -> None:
            self._see(index, output)
            for completion in output.outputs:
                self._count.add(index, completion)
                done[index * self._run.params.n + completion.index] = index, completion

        await drive(self._state, exchange, self._run, take, streams=False)
        self._count.note(exchange)
        head = Completion(
            id=self._run.id,
            created=self._created,
            model=self._model,
            choices=UNSET,
            usage=self._count.usage(),
            system_fingerprint=self._fingerprint,
            kv_transfer_params=self._count.kv_transfer_params,
            warnings=self._warnings,
        )
        choices = array(self._choice(*done[place]) for place in sorted(done))
        await exchange.reply_pieces(with_fields(_ENCODER.encode(head), [("choices", choices)]))

    async def stream(self, exchange: Exchange) -> None:
        """Send events as outputs come."""
        options = self._request.stream_options or StreamOptions()
        n = self._run.params.n
        echoed = [text for text in self._echoed for _ in range(n)]
        scored = self._request.logprobs is not None
        states = [_Choice(self._offsets(text) if scored else None) for text in echoed]

        async def take(index: int, output: RequestOutput) -> None:
            self._see(index, output)
            events: list[bytes] = []
            for completion in output.outputs:
                place = index * n + completion.index
                warnings = self._warnings if place == 0 and not states[0].begun else UNSET
                self._count.add(index, completion)
                counted = place if options.in_each else -1
                if not states[place].begun:
                    events += await self._first(index, completion, states[place], counted, warnings)
                    continue
                choice = self._delta(completion, place, states[place])
                if choice is not None or options.in_each:
                    events.append(self._event([choice] if choice else [], counted))
            if events:
                await exchange.send(b"".join(events))

        await drive(self._state, exchange, self._run, take, streams=True)
        self._count.note(exchange)
        usage = self._event([], None) if options.at_end else b""
        await exchange.end_events(usage + DONE)

    def _see(self, index: int, output: RequestOutput) -> None:
        """Take note of what an output says of its prompt."""
        self._count.see(index, output)
        if output.prompt_logprobs is not None:
            self._scores[index] = output.prompt_logprobs
        if self._only_prompt:
            for completion in output.outputs:
                completion.text, completion.token_ids, completion.weight_versions = "", [], []
                completion.sampling_mask = None if completion.sampling_mask is None else []
                completion.logprobs = None if completion.logprobs is None else []
                if completion.finish_reason is not None:
                    completion.finish_reason, completion.stop_reason = "length", None

    def _event(self, choices: list[CompletionChoice] | UnsetType, counted: int | None, warnings: Any = UNSET) -> bytes:
        """counted: the choice whose tokens are told; None: all, -1: none."""
        chunk = Completion(
            id=self._run.id,
            created=self._created,
            model=self._model,
            choices=choices,
            usage=self._count.usage(counted) if counted != -1 else UNSET,
            system_fingerprint=self._fingerprint,
            warnings=warnings,
        )
        return b"data: " + _ENCODER.encode(chunk) + END

    def _choice(
        self, index: int, completion: CompletionOutput, offsets: Offsets | None = None, *, scored: bool = True
    ) -> Iterator[bytes]:
        """A choice from its beginning, in pieces. scored: with the prompt's log-probabilities, if they were wanted."""
        request, prompt = self._request, self._run.prompts[index]
        choice = CompletionChoice(
            index=index * self._run.params.n + completion.index,
            text=self._echoed[index] + completion.text,
            finish_reason=completion.finish_reason,
            stop_reason=completion.stop_reason,
        )
        if request.return_token_ids:
            choice.token_ids, choice.prompt_token_ids = completion.token_ids, prompt.token_ids
        tell_origin(choice, completion, versions=request.return_weight_versions)
        scores, fields = self._scores[index], []
        if request.logprobs is not None:
            choice.logprobs = UNSET
            token_ids, parts = completion.token_ids, [scores if request.echo else None, completion.logprobs]
            if request.echo:
                token_ids = prompt.token_ids + token_ids
            flat = FlatLogprobs.joined([part for part in parts if isinstance(part, FlatLogprobs)])
            offsets = offsets or self._offsets(self._echoed[index])
            fields.append(("logprobs", json_pieces.completion_logprobs(self._texts, offsets, token_ids, flat)))
        if isinstance(scores, FlatLogprobs) and scored and not self._scores_in_echo:
            fields.append(("prompt_logprobs", json_pieces.prompt_logprobs(scores)))
        return with_fields(_ENCODER.encode(choice), fields)

    async def _first(
        self, index: int, completion: CompletionOutput, state: _Choice, counted: int, warnings: Any
    ) -> list[bytes]:
        """The first event of a choice: what is said once comes with it."""
        state.begun = True
        head = self._event(UNSET, counted, warnings).removesuffix(END)
        choices = array([self._choice(index, completion, state.offsets, scored=completion.index == 0)])
        return [await joined(with_fields(head, [("choices", choices)])), END]

    def _delta(self, completion: CompletionOutput, place: int, state: _Choice) -> CompletionChoice | None:
        """A choice of a later event; None if there is nothing to say."""
        request = self._request
        choice = CompletionChoice(
            index=place,
            text=completion.text,
            finish_reason=completion.finish_reason,
            stop_reason=completion.stop_reason,
        )
        if state.offsets is not None:
            entries = completion.logprobs or ()
            choice.logprobs = completion_logprobs(self._texts, state.offsets, completion.token_ids, entries)
        if request.return_token_ids:
            choice.token_ids = completion.token_ids
        tell_origin(choice, completion, versions=request.return_weight_versions)
        tells_tokens = request.return_token_ids or request.return_weight_versions
        says_more = request.logprobs is not None or tells_tokens or self._run.params.return_sampling_mask
        return choice if choice.text or choice.finish_reason or says_more else None

    @property
    def _scores_in_echo(self) -> bool:
        """Whether the prompt's log-probabilities stand before the output's."""
        return self._request.echo and self._request.logprobs is not None

    @property
    def _texts(self) -> TokenTexts:
        return TokenTexts(self._state.engine.tokenizer, self._request.return_tokens_as_token_ids)

    def _offsets(self, echoed: str = "") -> Offsets:
        return Offsets(self._state.engine.tokenizer, self._run.params.skip_special_tokens, echoed)

    def _prompt_text(self, prompt: Prompt) -> str:
        if prompt.text is not None:
            return prompt.text
        return self._state.engine.tokenizer.decode(prompt.token_ids, skip_special_tokens=False)
