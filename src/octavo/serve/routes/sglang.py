"""POST /generate: SGLang's way to generate, from ids or text, one or many.

Owns its shapes, and what its sampling parameters are called here. Invariants: `output_ids` are the tokens that were
drawn; a list in gives a list out, in its order; what the engine does not keep is refused by name.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from octavo.frontend.frontend import Prompt
from octavo.request.outputs import CompletionOutput, LogprobsDict, RequestOutput
from octavo.request.sampling_params import SamplingParams, num_kept
from octavo.serve.api.generation import Run, check_options, drive, make_params, make_run, read_prompts, send
from octavo.serve.api.logprobs import finite
from octavo.serve.api.origin import int32_of
from octavo.serve.api.protocol import SAMPLING, XARGS, read
from octavo.serve.api.transfers import each_transfer, with_transfer
from octavo.serve.errors import bad_request, renaming
from octavo.serve.http.exchange import Exchange
from octavo.serve.routes.tokens import END, refuse_not_kept, sampling_of
from octavo.serve.state import ServeState
from octavo.text.no_tokenizer import NoTokenizer

_DEFAULT_TOKENS = 128
_NAMES = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
    "no_stop_trim": "include_stop_str_in_output",
}
_FORMS = {"json_schema": "json", "regex": "regex", "ebnf": "grammar", "structural_tag": "structural_tag"}
_IGNORED = frozenset({"custom_params", "stop_regex", "stream_interval"})


class GenerateRequest(msgspec.Struct, kw_only=True):
    """The body."""

    text: Any = None
    input_ids: Any = None
    sampling_params: Any = None
    vllm_xargs: Any = None  # vLLM's, here or in sampling_params
    return_logprob: bool = False
    logprob_start_len: Any = -1
    top_logprobs_num: Any = 0
    return_text_in_logprobs: bool = False
    return_sampling_mask: bool = False
    return_routed_experts: bool = False
    routed_experts_start_len: Any = 0
    stream: bool = False
    priority: Any = 0
    request_id: Any = msgspec.field(default=None, name="rid")
    cache_salt: Any = msgspec.field(default="", name="extra_key")
    kv_transfer_params: Any = None


async def create(state: ServeState, exchange: Exchange) -> None:
    """Answer one request."""
    body = await exchange.json()
    refuse_not_kept(body)
    parsed = read(GenerateRequest, body, strict=state.config.strict, sampling=frozenset())
    request = parsed.shape
    if (request.input_ids is None) == (request.text is None):
        raise bad_request("missing_field", "input_ids: give either input_ids or text", "input_ids")
    given = request.sampling_params or {}
    if isinstance(given, list):  # one each, and all alike
        if any(own != given[0] for own in given):
            raise bad_request("unsupported_parameter", "sampling_params: must be alike for all prompts of a request")
        given = given[0] if given else {}
    if not isinstance(given, Mapping):
        raise bad_request("invalid_type", "sampling_params: must be an object", "sampling_params")
    with renaming({own: theirs for theirs, own in _NAMES.items()} | {"prompt": "input_ids"}):
        params = _params(state, request, given, parsed.warnings)
    state.check_ready()
    params = await state.check_structured(exchange, params)
    check_options(state, request, parsed.warnings)
    asked = request.text if request.input_ids is None else request.input_ids
    is_shown = given.get("max_new_tokens", 1) != 0
    names = {"prompt": "text" if request.input_ids is None else "input_ids"}
    with renaming(names):
        async with exchange.watching():
            kept = num_kept(params, state.engine.limits, is_answered=is_shown)
            prompts = await read_prompts(state, asked, kept=kept, is_answered=is_shown)
    many = isinstance(asked, list) and bool(asked) and isinstance(asked[0], str | list)
    run = make_run(exchange, "", request, prompts, params, only_prompts=not is_shown)
    run.transfers = each_transfer(request.kv_transfer_params, len(prompts))
    answer = _Answer(state, run, request, is_list=many or params.n > 1, is_shown=is_shown)
    await send(state, exchange, run, answer, request)


def _params(
    state: ServeState, request: GenerateRequest, given: Mapping[str, Any], warnings: list[str]
) -> SamplingParams:
    renamed: dict[str, Any] = {}
    for name, value in given.items():
        if value is None or name in _IGNORED:
            continue
        if name in _FORMS:
            renamed["structured_outputs"] = {_FORMS[name]: value}
        else:
            renamed[_NAMES.get(name, name)] = value
    if renamed.get("top_k") == 1 << 30:  # its word for all
        renamed["top_k"] = -1
    known = SAMPLING | {XARGS, "structured_outputs"}
    found = sampling_of(state, {k: v for k, v in renamed.items() if k in known}, [], request.vllm_xargs)
    for name in renamed.keys() - found.keys() - {XARGS}:
        shown = name[:64] if name[:64].isidentifier() else "a field"
        warnings.append(f"sampling_params.{shown}: unknown field, ignored")
    found |= {name: True for name in ("return_sampling_mask", "return_routed_experts") if getattr(request, name)}
    if request.return_routed_experts:
        found["routed_experts_prompt_start"] = request.routed_experts_start_len
    if found.get("max_tokens") == 0:
        found["max_tokens"] = 1  # computes the prompt; the token is not shown, see _Answer
    if request.return_logprob:
        found["logprobs"] = request.top_logprobs_num
        if type(request.logprob_start_len) is int and request.logprob_start_len >= 0:
            found["prompt_logprobs"] = request.top_logprobs_num
    found = with_transfer(state, found, request.kv_transfer_params, warnings)
    return make_params(state, found, stream=request.stream, default_max_tokens=_DEFAULT_TOKENS)


class _Answer:
    """One answer in the making."""

    def __init__(self, state: ServeState, run: Run, request: GenerateRequest, *, is_list: bool, is_shown: bool) -> None:
        """is_shown: whether what was drawn was asked for, or the prompt alone."""
        self._state, self._run, self._request, self._is_list, self._is_shown = state, run, request, is_list, is_shown
        self._began = time.monotonic()
        self._said = [_Said() for _ in range(run.num_choices)]
        self._decode = None if isinstance(state.engine.tokenizer, NoTokenizer) else state.engine.tokenizer.decode_token

    async def whole(self, exchange: Exchange) -> None:
        """Reply when all is done."""

        async def take(index: int, output: RequestOutput) -> None:
            self._take(index, output)

        await drive(self._state, exchange, self._run, take, streams=False)
        made = [self._made(place) for place in range(self._run.num_choices)]
        await exchange.reply_json(made if self._is_list else made[0])

    async def stream(self, exchange: Exchange) -> None:
        """Send events, each with all that there is of a completion so far."""

        async def take(index: int, output: RequestOutput) -> None:
            for place in self._take(index, output):
                event = self._made(place) | ({"index": place} if self._is_list else {})
                await exchange.send(b"data: " + msgspec.json.encode(event) + END)

        await drive(self._state, exchange, self._run, take, streams=True)
        await exchange.end_events(b"data: [DONE]" + END)

    def _take(self, index: int, output: RequestOutput) -> list[int]:
        places = []
        for completion in output.outputs:
            place = index * self._run.params.n + completion.index
            self._said[place].add(completion, is_shown=self._is_shown)
            self._said[place].transfer = output.kv_transfer_params or self._said[place].transfer
            self._said[place].num_cached = max(self._said[place].num_cached, output.num_cached_tokens or 0)
            if output.prompt_logprobs is not None:
                self._said[index * self._run.params.n].scores = output.prompt_logprobs
            places.append(place)
        return places

    def _made(self, place: int) -> dict[str, Any]:
        said, prompt = self._said[place], self._run.prompts[place // self._run.params.n]
        first = self._said[place - place % self._run.params.n]
        meta: dict[str, Any] = {
            "id": self._run.id if self._run.num_choices == 1 else f"{self._run.id}-{place}",
            "finish_reason": said.finish_reason(),
            "prompt_tokens": len(prompt.token_ids),
            "completion_tokens": len(said.token_ids),
            "cached_tokens": said.num_cached,
            "e2e_latency": time.monotonic() - self._began,
            "weight_version": said.spans[-1]["version"] if said.spans else None,
            "weight_versions": said.spans,
        }
        if said.transfer is not None:
            meta["kv_transfer_params"] = said.transfer
        if said.masks is not None:
            meta["output_token_sampling_mask"] = said.masks
            meta["output_token_sampling_mask_length"] = len(said.masks)
        if said.experts is not None:
            meta["routed_experts"] = int32_of(said.experts)
        if self._request.return_logprob:
            meta["output_token_logprobs"] = self._lines(said.token_ids, said.logprobs)
            meta["output_top_logprobs"] = self._tops(said.logprobs)
            meta["input_token_logprobs"] = self._prompt_lines(prompt, first.scores)
        return {"text": said.text, "output_ids": said.token_ids, "meta_info": meta}

    def _lines(self, ids: Sequence[int], entries: Sequence[LogprobsDict | None]) -> list[list[Any]]:
        """[log-probability, id, text or null] each."""
        return [
            [None if entry is None else finite(entry[token].logprob), token, self._text(token)]
            for token, entry in zip(ids, entries, strict=True)
        ]

    def _prompt_lines(self, prompt: Prompt, scores: Sequence[LogprobsDict | None] | None) -> list[list[Any]]:
        start = self._request.logprob_start_len
        return [] if scores is None else self._lines(prompt.token_ids, scores)[start:]

    def _tops(self, entries: Sequence[LogprobsDict | None]) -> list[Any]:
        num_top = self._request.top_logprobs_num
        if not num_top:
            return []
        ranked = [sorted((entry or {}).items(), key=lambda item: item[1].rank or 0)[:num_top] for entry in entries]
        return [[[finite(own.logprob), token, self._text(token)] for token, own in line] for line in ranked]

    def _text(self, token: int) -> str | None:
        return self._decode(token) if self._request.return_text_in_logprobs and self._decode is not None else None


class _Said:
    """What there is of one completion."""

    def __init__(self) -> None:
        self.text, self.num_cached = "", 0
        self.transfer: dict[str, Any] | None = None  # where the blocks of its prompt are on offer
        self.token_ids: list[int] = []
        self.logprobs: list[LogprobsDict | None] = []
        self.scores: Sequence[LogprobsDict | None] | None = None
        self.spans: list[dict[str, Any]] = []
        self.masks: list[list[int] | None] | None = None
        self.experts: Any = None
        self._end: CompletionOutput | None = None

    def add(self, part: CompletionOutput, *, is_shown: bool) -> None:
        """What is new of it; its end alone where it is not shown."""
        if part.finish_reason is not None:
            self._end = part if is_shown else msgspec.structs.replace(part, finish_reason="length", stop_reason=None)
        self.experts = part.routed_experts
        if not is_shown:
            return
        self.text += part.text
        self.token_ids += part.token_ids
        self.logprobs += list(part.logprobs or ())
        if part.sampling_mask is not None:
            self.masks = (self.masks or []) + part.sampling_mask
        for span in part.weight_versions:
            if self.spans and self.spans[-1]["version"] == span.version:
                self.spans[-1]["end"] = span.end
            else:
                self.spans.append({"version": span.version, "start": span.start, "end": span.end})

    def finish_reason(self) -> dict[str, Any] | None:
        """Why it ended, in SGLang's words."""
        end = self._end
        if end is None:
            return None
        if end.finish_reason == "length":
            return {"type": "length", "length": len(self.token_ids)}
        if end.finish_reason == "stop":
            matched = end.stop_reason if end.stop_reason is not None else self.token_ids[-1]
            return {"type": "stop", "matched": matched}
        return {"type": str(end.finish_reason), "message": str(end.stop_reason or "")}
