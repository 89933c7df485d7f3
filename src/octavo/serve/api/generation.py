"""From a parsed request to running streams and back: prompts, parameters, the loop over outputs, counts of tokens.

Owns what completions, chat and responses have in common. Knows no shape of a reply. Invariants: everything is checked
before the first request reaches the engine; however an exchange ends, none of its requests is left running.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any, Protocol

import msgspec
from msgspec import UNSET, UnsetType

from octavo.frontend.frontend import Prompt
from octavo.request.outputs import (
    LOAD_FAILED,
    MASK_TOO_LARGE,
    MAX_SUPPORT_IDS,
    NO_TOKEN,
    NO_WEIGHTS,
    TOO_COMPLEX,
    WEIGHTS_DISCARDED,
    CompletionOutput,
    RequestOutput,
)
from octavo.request.sampling_params import (
    ParameterError,
    RequestOutputKind,
    SamplingParams,
    check_length,
    check_request_options,
    check_text,
    check_token_ids,
    text_limits,
)
from octavo.request.scores import without_answer
from octavo.request.transfer_params import join, with_own
from octavo.serve.api.shapes import CompletionDetails, PromptDetails, Usage
from octavo.serve.engine.given_weights import LOST
from octavo.serve.engine.refusals import (
    EngineDeadError,
    EngineDrainingError,
    EngineHaltedError,
    QueueFullError,
    WeightsLostError,
)
from octavo.serve.engine.stream import OutputStream, SlowReaderError, pieces
from octavo.serve.errors import ApiError, bad_request, not_ready, queue_full
from octavo.serve.http.exchange import Exchange
from octavo.serve.state import ServeState
from octavo.text.no_tokenizer import NoTokenizer

COMPLETION_TOKENS = 16  # of a completion whose request says nothing; a chat fills the context
_DEFAULTS = SamplingParams()
_REQUEST_ID = re.compile(r"[A-Za-z0-9_.-]{1,128}")


class Run(msgspec.Struct, kw_only=True):
    """A checked request: every prompt with the same parameters."""

    id: str  # shown
    key: str  # of no other request
    prompts: list[Prompt]
    params: SamplingParams
    priority: int
    cache_salt: str
    names: tuple[str, ...] = ()  # by which a client may abort it
    only_prompts: bool = False  # what is drawn behind them is nobody's
    transfers: list[dict[str, Any]] = []  # of several prompts: what is said of the blocks of each

    @property
    def num_choices(self) -> int:
        """Completions of all prompts together."""
        return len(self.prompts) * self.params.n


class _Options(Protocol):
    """What all shapes of a request have."""

    priority: int
    cache_salt: str
    stream: bool
    request_id: Any


class Reply(Protocol):
    """An answer in the making."""

    async def whole(self, exchange: Exchange) -> None:
        """Reply when all is done."""

    async def stream(self, exchange: Exchange) -> None:
        """Send events as outputs come."""


def make_run(
    exchange: Exchange,
    prefix: str,
    request: _Options,
    prompts: list[Prompt],
    params: SamplingParams,
    *,
    only_prompts: bool = False,
) -> Run:
    """The run of a request whose prompts and parameters are checked. `prefix`: of its id, which holds the body's."""
    given = read_request_id(request.request_id)
    shown = prefix + (f"{given}-{exchange.own_id[:12]}" if given else exchange.own_id)  # two may give the same
    return Run(
        id=shown,
        names=tuple({shown, exchange.request_id, *filter(None, [given])}),
        key=prefix + exchange.own_id,
        prompts=prompts,
        params=params,
        priority=request.priority,
        cache_salt=request.cache_salt,
        only_prompts=only_prompts,
    )


async def send(state: ServeState, exchange: Exchange, run: Run, reply: Reply, request: _Options) -> None:
    """Reply in the form that the request asks for. Raises ParameterError or ApiError for too many log-probabilities."""
    lengths = [len(prompt.token_ids) for prompt in run.prompts]
    with state.logprobs.held(run.params, state.engine.limits, lengths):
        await (reply.stream if request.stream else reply.whole)(exchange)


def check_options(state: ServeState, request: _Options, warnings: list[str]) -> None:
    """Check what a request carries beside prompt and parameters, and tell what of it changes nothing.

    Raises ParameterError.
    """
    check_request_options(request.cache_salt, request.priority)
    if request.priority and state.engine.config.scheduling_policy != "priority":
        warnings.append("priority: has no effect (--scheduling-policy)")
    if request.request_id is not None and not read_request_id(request.request_id):
        warnings.append("request_id: is ignored: an id has 1 to 128 letters, digits, dots, dashes and underscores")


def read_request_id(given: Any) -> str:
    """A client's name for its request; "" if it is none."""
    return given if isinstance(given, str) and _REQUEST_ID.fullmatch(given) else ""


def tell_of_cut(state: ServeState, warnings: list[str], name: str, max_tokens: Any, prompts: Sequence[Prompt]) -> None:
    """Warn of a `max_tokens`, by the name that the client used, that the context does not leave room for."""
    most = state.engine.limits.max_model_len
    room = most - max(len(prompt.token_ids) for prompt in prompts)
    if isinstance(max_tokens, int) and max_tokens > room > 0:
        cut = f"is cut to the {room} that the prompt leaves of max_model_len {most}"
        warnings.append(f"{name}: {max_tokens} tokens, {cut}")


async def read_prompts(
    state: ServeState,
    given: Any,
    *,
    add_special_tokens: bool = True,
    kept: int | None = None,
    is_answered: bool = True,
) -> list[Prompt]:
    """`prompt` of a request: a text, token ids, or a list of these. kept: only so many last tokens of each count.

    is_answered: tokens are wanted behind them, for which there has to be room. Raises ParameterError.
    """
    if given is None:
        raise ParameterError("prompt", "is missing", "missing_field")
    limits, most = state.engine.limits, state.config.max_prompts
    many = given if isinstance(given, list) and given and isinstance(given[0], str | list) else [given]
    if len(many) > most:
        message = f"may hold at most {most} prompts (--max-prompts), got {len(many)}"
        raise ParameterError("prompt", message, "too_many_prompts")
    prompts = []
    total = num_chars = 0
    for entry in many:
        if isinstance(entry, str):
            read = await read_text(state, entry, num_chars, add_special_tokens=add_special_tokens, kept=kept)
            num_chars += len(entry)
            prompts.append(read)
            check_length(len(prompts[-1].token_ids), limits, is_answered=is_answered)
        else:
            prompts.append(Prompt(check_token_ids(entry, limits, kept, is_answered=is_answered), None))
        total += len(prompts[-1].token_ids)
        if total > limits.max_total_tokens:
            message = f"all prompts together may hold at most {limits.max_total_tokens} tokens (--max-total-tokens)"
            raise ParameterError("prompt", message, "too_many_prompts")
    return prompts


async def read_text(
    state: ServeState,
    text: str,
    num_chars_before: int = 0,
    *,
    add_special_tokens: bool = True,
    kept: int | None = None,
) -> Prompt:
    """A text as a prompt, behind others of the request with so many characters. Raises ParameterError.

    kept: so many last tokens count; a prompt that lacks some of its text has none.
    """
    check_text(text, text_limits(state.engine.limits, kept))
    token_ids = await state.texts.encode(text, add_special_tokens=add_special_tokens, num_chars_before=num_chars_before)
    if kept is not None and len(token_ids) > kept:
        return Prompt(token_ids[-kept:], None)
    return Prompt(token_ids, text)


async def render_chat(
    state: ServeState,
    messages: Any,
    *,
    template_kwargs: Mapping[str, Any] | None,
    kept: int | None = None,
    **options: Any,
) -> Prompt:
    """A conversation as a prompt, of which the last `kept` tokens count. Raises ParameterError."""
    if messages is None:
        raise ParameterError("messages", "is missing", "missing_field")
    for name in template_kwargs or ():
        if not state.may_set(name):
            shown = name[:64] if name[:64].isidentifier() else "a name"
            raise ParameterError("chat_template_kwargs", f"{shown} is not allowed here", "not_allowed")
    variables = {**state.config.default_chat_template_kwargs, **(template_kwargs or {})}
    limits, is_chat = state.engine.limits, bool(options.get("add_generation_prompt", True))
    options |= {"chat_template_kwargs": variables, "content_format": state.config.chat_template_content_format}
    text, token_ids = await state.texts.render_chat(messages, text_limits(limits, kept), **options)
    return Prompt(check_token_ids(token_ids, limits, kept), text, is_chat=is_chat)


def make_params(
    state: ServeState, given: Mapping[str, Any], *, stream: bool, default_max_tokens: int | None
) -> SamplingParams:
    """The checkpoint's defaults with what was given. Raises ParameterError."""
    base = state.engine.default_sampling
    fields = {name: value for name in _MAY_BE_SET if (value := getattr(base, name)) != getattr(_DEFAULTS, name)}
    fields.setdefault("max_tokens", default_max_tokens)
    fields["stream_interval"] = state.config.stream_interval
    fields |= given
    if isinstance(state.engine.tokenizer, NoTokenizer):
        state.engine.tokenizer.check_text_free(fields.get("stop"), fields.get("structured_outputs"))
        fields["detokenize"] = False
    kind = RequestOutputKind.DELTA if stream else RequestOutputKind.FINAL_ONLY
    return SamplingParams.from_optional(**fields | {"output_kind": kind, "flat_logprobs": True})


_MAY_BE_SET = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "max_tokens",
)


async def submit(state: ServeState, run: Run) -> list[OutputStream]:
    """Start every prompt of a run, or none. Raises ParameterError or ApiError."""
    _check_room(state, run)
    streams: list[OutputStream] = []
    try:
        for index, prompt in enumerate(run.prompts):
            params = with_own(run.params, run.transfers[index]) if run.transfers else run.params
            params = state.thinking.apply(params, prompt.text, prompt.token_ids, may_open=prompt.is_chat)
            token_ids = prompt.token_ids
            if run.only_prompts:
                token_ids, params = without_answer(token_ids, params, state.engine.limits)
            streams.append(
                state.engine.generate(
                    f"{run.key}-{index}",
                    token_ids,
                    params,
                    prompt=prompt.text,
                    priority=run.priority,
                    cache_salt=run.cache_salt,
                )
            )
        return streams
    except QueueFullError as error:
        refusal: Exception = queue_full(str(error), error.retry_after)
    except EngineDeadError as error:
        refusal = not_ready(state.engine.state, error.retry_after)
    except EngineHaltedError as error:
        refusal = ApiError(503, error.code, str(error), headers=[(b"retry-after", b"1")])
    except ParameterError as error:
        refusal = error
    for stream in streams:
        await stream.aclose()
    raise refusal


def _check_room(state: ServeState, run: Run) -> None:
    """Refuse what the queue could never take, however often it were sent: one prompt it takes when nothing waits."""
    engine, num_prompts = state.engine, len(run.prompts)
    running, waiting = engine.info.max_num_seqs if engine.info else 0, engine.max_num_queued_reqs
    if num_prompts == 1:
        return
    if run.num_choices > running + waiting:
        asked = f"{num_prompts} prompts" + (f" x n {run.params.n} = {run.num_choices}" if run.params.n > 1 else "")
        message = f"{asked} are more than run and wait at once: max_num_seqs {running} + max_num_queued_reqs {waiting}"
        message += "; send fewer at a time, or raise --max-num-queued-reqs"
        raise ParameterError("prompt", message, "too_many_prompts")
    num_tokens, most = sum(len(prompt.token_ids) for prompt in run.prompts), engine.max_num_queued_tokens
    if most is not None and num_tokens > most:
        message = f"{num_tokens} tokens of all prompts exceed {most} (max_num_queued_tokens)"
        raise ParameterError("prompt", message, "too_many_prompts")


# In a stream a completion comes in the pieces that the engine told, several in one output where they waited.
Take = Callable[[int, RequestOutput], Awaitable[None]]


async def drive(state: ServeState, exchange: Exchange, run: Run, take: Take, *, streams: bool) -> None:
    """Run to the end: `take(prompt index, output)` for every output.

    Raises ApiError if the run fails, ClientLeftError if nobody waits for it any more.
    """
    outputs = await submit(state, run)
    seconds = state.config.request_timeout
    state.runs[run.key] = run.names
    state.open(exchange, streams=streams)
    try:
        async with exchange.watching():
            if streams:
                await exchange.begin_events()
            try:
                async with asyncio.timeout(seconds) as clock:
                    await _consume(outputs, take, streams=streams)
            except TimeoutError:
                if not clock.expired():
                    raise
                raise ApiError(504, "timeout", f"the request took longer than {seconds:g} s") from None
    finally:
        state.end(exchange)
        del state.runs[run.key]
        for stream in outputs:
            await stream.aclose()


async def _consume(outputs: Sequence[OutputStream], take: Take, *, streams: bool) -> None:
    failures: dict[tuple[int, int], ApiError] = {}  # by prompt and completion

    async def one(index: int) -> None:
        async for output in outputs[index]:
            await hand_on(index, output)
            del output  # it is not kept while the next one is waited for

    async def hand_on(index: int, output: RequestOutput) -> None:
        parts = pieces(output)
        if parts is output.outputs and all(part.finish_reason != "error" for part in parts):
            await take(index, output)
        elif told := list(_told(index, parts, failures, streams=streams)):
            await take(index, msgspec.structs.replace(output, outputs=told))

    try:
        await _all([one(index) for index in range(len(outputs))])
    except (EngineDeadError, SlowReaderError) as error:
        raise _from_outside(error) from None
    if failures:  # a stream says all that comes before: what is shown does not depend on who fails when
        raise failures[min(failures)]


def _told(
    index: int, parts: list[CompletionOutput], failures: dict[tuple[int, int], ApiError], *, streams: bool
) -> Iterator[CompletionOutput]:
    """What a client is told of the parts of prompt `index`. Takes note of what failed, or raises it."""
    for completion in parts:
        failure = _failure(completion)
        if failure is not None and not streams:
            raise failure
        if failure is not None:
            failures[index, completion.index] = failure
            completion = msgspec.structs.replace(completion, finish_reason=None, stop_reason=None)
        if failure is None or completion.text or completion.token_ids:
            yield completion


async def _all(works: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Run them side by side. Raises the exception of the first one that fails, and cancels the others."""
    if len(works) == 1:
        await works[0]
        return
    try:
        async with asyncio.TaskGroup() as group:
            for work in works:
                group.create_task(work)
    except* Exception as errors:
        first = errors.exceptions[0]
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        failure = first
    else:
        return
    raise failure


def _from_outside(error: EngineDeadError | SlowReaderError) -> ApiError:
    """What a client is told of what ended a running request from outside."""
    if isinstance(error, EngineDrainingError):
        return ApiError(503, "draining", "the server shut down before the end")
    if isinstance(error, WeightsLostError):
        return ApiError(503, LOST, str(error))
    if isinstance(error, EngineDeadError):
        headers = [(b"retry-after", b"%d" % max(1, round(error.retry_after)))]
        return ApiError(503, "engine_restarted", "the engine went away; try again", headers=headers)
    return ApiError(408, "slow_reader", "the stream was not read in time")


def _failure(completion: CompletionOutput) -> ApiError | None:
    """What a client is told of a completion that failed."""
    if completion.finish_reason == "error" and completion.stop_reason == NO_TOKEN:
        message = "the output's form, and the tokens that are allowed or forbidden, leave no token to go on with"
        return bad_request(NO_TOKEN, message)
    if completion.finish_reason == "error" and completion.stop_reason == MASK_TOO_LARGE:
        text = (
            f"return_sampling_mask: the masks of the answer have more than {MAX_SUPPORT_IDS} ids: set top_k, or stream"
        )
        return bad_request(MASK_TOO_LARGE, text, "return_sampling_mask")
    if completion.finish_reason == "error" and completion.stop_reason == TOO_COMPLEX:
        return bad_request(TOO_COMPLEX, "the output's form is too complex: it met a limit within the text")
    if completion.finish_reason == "error" and completion.stop_reason == LOAD_FAILED:
        message = "blocks of this request were lost on their way here: try again, or let the server recompute them"
        return ApiError(500, LOAD_FAILED, message)
    if completion.finish_reason == "error" and completion.stop_reason in NO_WEIGHTS:
        message = "the weights were discarded or partly overwritten while this request ran: send a whole update"
        return ApiError(503, WEIGHTS_DISCARDED, message, headers=[(b"retry-after", b"1")])
    if completion.finish_reason == "error":
        return ApiError(
            500,
            "internal_model_error",
            f"the model failed on this request: {completion.stop_reason}",
            headers=[(b"x-should-retry", b"false")],
        )
    return None


class TokenCounter:
    """Counts the tokens of a run for `usage`."""

    __slots__ = ("_cached", "_n", "_outputs", "_prompts", "_told", "num_reasoning")

    def __init__(self, run: Run) -> None:
        """Prompts count once, whatever `n` is."""
        self.num_reasoning: int | None = None  # None: this model does not reason
        self._prompts = [len(prompt.token_ids) for prompt in run.prompts]
        self._cached = [0] * len(run.prompts)
        self._told: list[dict[str, Any] | None] = [None] * len(run.prompts)  # what the engine's connector answers
        self._n = run.params.n
        self._outputs = [0] * run.num_choices

    def see(self, index: int, output: RequestOutput) -> None:
        """Note what an output of prompt `index` says of the cache."""
        self._cached[index] = max(self._cached[index], output.num_cached_tokens or 0)
        if output.kv_transfer_params is not None:
            self._told[index] = output.kv_transfer_params

    def add(self, index: int, completion: CompletionOutput) -> None:
        """Take a completion's new tokens into account."""
        self._outputs[index * self._n + completion.index] += len(completion.token_ids)

    @property
    def kv_transfer_params(self) -> dict[str, Any] | UnsetType:
        """What the engine's connector answers, in the form of a request with as many prompts."""
        told = join(self._told)
        return UNSET if told is None else told

    @property
    def num_prompt(self) -> int:
        """Tokens of all prompts."""
        return sum(self._prompts)

    @property
    def num_output(self) -> int:
        """Tokens of all completions."""
        return sum(self._outputs)

    @property
    def num_cached(self) -> int:
        """Prompt tokens that the prefix cache saved."""
        return sum(self._cached)

    def usage(self, place: int | None = None) -> Usage:
        """As it stands: of all, or of the choice at `place` alone, which no other choice's pace can change."""
        num_prompt, num_output, num_cached = self.num_prompt, self.num_output, self.num_cached
        if place is not None:
            index = place // self._n
            num_prompt, num_output, num_cached = self._prompts[index], self._outputs[place], self._cached[index]
        usage = Usage(num_prompt, num_prompt + num_output, num_output, PromptDetails(num_cached))
        if self.num_reasoning is not None:
            usage.completion_tokens_details = CompletionDetails(self.num_reasoning)
        return usage

    def note(self, exchange: Exchange) -> None:
        """For the log."""
        exchange.notes |= {"prompt_tokens": self.num_prompt, "output_tokens": self.num_output}
