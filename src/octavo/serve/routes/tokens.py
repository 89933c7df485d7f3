"""POST /inference/v1/generate: token ids in, token ids out; vLLM's name and shapes.

Owns the shapes and what of them is refused. Invariants: no text is made of ids and no ids of text: the ids that come
are those that are computed, and those that go are those that were drawn, the stop token's among them; each choice says
which weights drew it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from octavo.frontend.frontend import Prompt
from octavo.request.outputs import CompletionOutput, FlatLogprobs, LogprobsDict, RequestOutput
from octavo.request.sampling_params import check_token_ids, num_kept
from octavo.request.structured_outputs import read_structured_outputs
from octavo.request.transfer_params import NAME as TRANSFER
from octavo.serve.api.generation import Run, TokenCounter, check_options, drive, make_params, make_run, send
from octavo.serve.api.logprobs import TokenTexts, chat_logprobs, finite
from octavo.serve.api.origin import npy_of, spans_of
from octavo.serve.api.protocol import SAMPLING, XARGS, StreamOptions, read, with_xargs
from octavo.serve.api.shapes import ChatLogprobs, Usage
from octavo.serve.api.transfers import each_transfer, with_transfer
from octavo.serve.errors import bad_request
from octavo.serve.http.exchange import Exchange
from octavo.serve.state import ServeState

END = b"\n\n"
# What an engine would have to keep for each token, and does not: refused where it is asked for.
NOT_KEPT = {
    "routed_experts": "replaying experts is not supported: they follow from the tokens, in bits",
    "return_hidden_states": "hidden states are not kept",
    "features": "this model takes tokens alone",
    "lora_request": "adapters are not supported",
    "lora_path": "adapters are not supported",
}
_KNOWN = SAMPLING | {"logprobs", "structured_outputs"}  # other routes take these two elsewhere
_NO_EFFECT = frozenset({"detokenize", "output_kind", "stream_interval", "flat_logprobs"})


class TokensRequest(msgspec.Struct, kw_only=True):
    """The body."""

    model: str | None = None
    token_ids: Any = None
    sampling_params: dict[str, Any] = {}
    vllm_xargs: Any = None  # here or in sampling_params
    stream: bool = False
    stream_options: StreamOptions | None = None
    priority: Any = 0
    cache_salt: Any = ""
    request_id: Any = None
    return_sampling_mask: bool = False  # as sampling parameters of these names
    return_routed_experts: bool = False
    kv_transfer_params: Any = None


class TokensChoice(msgspec.Struct, kw_only=True):
    """One completion, or what is new of it."""

    index: int
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int]
    weight_versions: list[dict[str, Any]]
    routed_experts: str | None = None
    sampling_mask: list[list[int] | None] | None = None


class Tokens(msgspec.Struct, kw_only=True):
    """The reply, or an event."""

    request_id: str
    created: int
    model: str
    choices: list[TokensChoice]
    prompt_logprobs: Any = None
    kv_transfer_params: dict[str, Any] | None = None
    usage: Usage | UnsetType = UNSET
    warnings: list[str] | UnsetType = UNSET


async def create(state: ServeState, exchange: Exchange) -> None:
    """Answer one request."""
    body = await exchange.json()
    refuse_not_kept(body)
    parsed = read(TokensRequest, body, strict=state.config.strict, sampling=frozenset())
    request = parsed.shape
    model = state.check_model(request.model)
    given = sampling_of(state, request.sampling_params, parsed.warnings, request.vllm_xargs)
    if request.return_sampling_mask:
        given["return_sampling_mask"] = True
    if request.return_routed_experts or state.engine.limits.experts[0]:  # an engine that keeps them says them here
        given.setdefault("return_routed_experts", True)
    given["detokenize"] = False
    given = with_transfer(state, given, request.kv_transfer_params, parsed.warnings)
    params = make_params(state, given, stream=request.stream, default_max_tokens=None)
    state.check_ready()
    params = await state.check_structured(exchange, params)
    check_options(state, request, parsed.warnings)
    prompt = Prompt(check_token_ids(request.token_ids, state.engine.limits, num_kept(params, state.engine.limits)))
    run = make_run(exchange, "", request, [prompt], params)
    run.transfers = each_transfer(request.kv_transfer_params, 1)
    await send(state, exchange, run, _Answer(state, run, request, model, parsed.warnings), request)


def refuse_not_kept(body: Mapping[str, Any]) -> None:
    """Raise ApiError for what is asked for and cannot be told."""
    for name, why in NOT_KEPT.items():
        if body.get(name):
            raise bad_request("unsupported_parameter", f"{name}: {why}", name)


def sampling_of(state: ServeState, given: Mapping[str, Any], warnings: list[str], xargs: Any = None) -> dict[str, Any]:
    """vLLM's sampling parameters as they are checked here. xargs: `vllm_xargs` that stands beside them.

    Raises ApiError or ParameterError.
    """
    refuse_not_kept(given)
    if given.get(TRANSFER) is not None:
        text = f"sampling_params.{TRANSFER}: belongs beside sampling_params"
        raise bad_request("not_allowed", text, f"sampling_params.{TRANSFER}")
    found = {name: value for name, value in given.items() if value is not None and name not in _NO_EFFECT}
    for field, more in ((f"sampling_params.{XARGS}", found.pop(XARGS, None)), (XARGS, xargs)):
        if more is not None:
            found["extra_args"] = with_xargs(found.get("extra_args"), more, field)
    known = {name: value for name, value in found.items() if name in _KNOWN}
    if len(known) < len(found):
        first = next(name for name in found if name not in known)[:64]
        shown = first if first.isidentifier() else "a field"
        if state.config.strict:
            raise bad_request("unknown_field", f"sampling_params.{shown}: unknown field", f"sampling_params.{shown}")
        warnings.append(f"sampling_params.{shown}: unknown field, ignored")
    if "structured_outputs" in known:
        known["structured_outputs"] = read_structured_outputs(known["structured_outputs"])
    return known


class _Answer:
    """One answer in the making."""

    def __init__(self, state: ServeState, run: Run, request: TokensRequest, model: str, warnings: list[str]) -> None:
        self._state, self._run, self._request, self._model = state, run, request, model
        self._count = TokenCounter(run)
        self._created = int(time.time())
        self._warnings: Any = warnings or UNSET
        self._texts = TokenTexts(state.engine.tokenizer, as_ids=True)
        self._scores: Any = None

    async def whole(self, exchange: Exchange) -> None:
        """Reply when all is done."""
        done: dict[int, TokensChoice] = {}

        async def take(index: int, output: RequestOutput) -> None:
            self._see(index, output)
            for completion in output.outputs:
                done[completion.index] = self._choice(index, completion)

        await drive(self._state, exchange, self._run, take, streams=False)
        self._count.note(exchange)
        await exchange.reply_json(self._made([done[place] for place in sorted(done)], at_end=True))

    async def stream(self, exchange: Exchange) -> None:
        """Send events as outputs come."""
        options = self._request.stream_options or StreamOptions()

        async def take(index: int, output: RequestOutput) -> None:
            self._see(index, output)
            for completion in output.outputs:
                made = self._made([self._choice(index, completion)], at_end=False)
                self._warnings, self._scores = UNSET, None
                await exchange.send(b"data: " + msgspec.json.encode(made) + END)

        await drive(self._state, exchange, self._run, take, streams=True)
        self._count.note(exchange)
        last = b"data: " + msgspec.json.encode(self._made([], at_end=True)) + END if options.at_end else b""
        await exchange.end_events(last + b"data: [DONE]" + END)

    def _see(self, index: int, output: RequestOutput) -> None:
        self._count.see(index, output)
        if output.prompt_logprobs is not None:
            self._scores = [_entry(entry) for entry in output.prompt_logprobs]

    def _made(self, choices: list[TokensChoice], *, at_end: bool) -> Tokens:
        return Tokens(
            request_id=self._run.id,
            created=self._created,
            model=self._model,
            choices=choices,
            prompt_logprobs=self._scores,
            kv_transfer_params=self._count.kv_transfer_params or None,
            usage=self._count.usage() if at_end else UNSET,
            warnings=self._warnings,
        )

    def _choice(self, index: int, completion: CompletionOutput) -> TokensChoice:
        self._count.add(index, completion)
        logprobs = None
        if isinstance(completion.logprobs, FlatLogprobs):
            num_top = self._run.params.logprobs or 0
            logprobs = chat_logprobs(self._texts, completion.token_ids, completion.logprobs, num_top)
        return TokensChoice(
            index=completion.index,
            logprobs=logprobs,
            finish_reason=completion.finish_reason,
            stop_reason=completion.stop_reason,
            token_ids=completion.token_ids,
            weight_versions=spans_of(completion),
            routed_experts=None if completion.routed_experts is None else npy_of(completion.routed_experts),
            sampling_mask=completion.sampling_mask,
        )


def _entry(entry: LogprobsDict | None) -> dict[str, Any] | None:
    """A prompt's token and its alternatives."""
    if entry is None:
        return None
    return {str(token): {"logprob": finite(own.logprob), "rank": own.rank} for token, own in entry.items()}
