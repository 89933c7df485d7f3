"""From the scheduler's updates to what users see: text, log-probabilities, stop strings, outputs.

Owns every request between add and its last output: its text so far, what was handed out, and its `n` completions as
one RequestOutput. Does not know the engine, devices or transport. Invariants: a request gives exactly one output with
`finished`, unless it is dropped; the updates that arrive for a completion after its end are ignored; text that cannot
be made ends its own request alone. A token costs constant time, except that RequestOutputKind.CUMULATIVE copies what
it repeats.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from octavo.request.outputs import (
    MASK_TOO_LARGE,
    MAX_SUPPORT_IDS,
    OUTPUT_FAILED,
    CompletionOutput,
    FlatLogprobs,
    RequestMetrics,
    RequestOutput,
)
from octavo.request.sampling_params import ParameterError, RequestOutputKind, SamplingParams
from octavo.request.updates import RequestUpdate
from octavo.text.detokenizer import NO_TEXT, Detokenizer, StopChecker
from octavo.text.tokenizer import Tokenizer
from octavo.text.told_of_tokens import TokenExperts, TokenSupports, wants_every_token
from octavo.text.weight_versions import TokenVersions

_LOG = logging.getLogger(__name__)


class OutputProcessor:
    """Turns updates into outputs. Used by one thread, but for `add`."""

    def __init__(self, tokenizer: Tokenizer | None, experts: tuple[int, int] = (0, 0)) -> None:
        """Without a tokenizer only requests with `detokenize=False` can be added; tokens then have no text.

        experts: layers, and experts of a token in each, where these are told.
        """
        self._tokenizer, self._experts = tokenizer, experts
        self._decode = tokenizer.decode_token if tokenizer is not None else _no_text
        self._requests: dict[str, _Request] = {}
        self._children: dict[str, _Child] = {}
        self.num_tokens = 0  # of all completions so far, up to their ends

    def check(self, params: SamplingParams) -> None:
        """Raises ParameterError where there is no tokenizer for a request's text."""
        if self._tokenizer is None and params.detokenize:
            raise ParameterError("detokenize", "must be false: there is no tokenizer", "unsupported_parameter")

    def add(
        self, request_id: str, prompt: str | None, prompt_token_ids: Sequence[int], params: SamplingParams
    ) -> list[str]:
        """Begin a request.

        Returns:
            The ids of its `params.n` sequences, by which updates name them: its own id if there is one.

        Raises:
            ParameterError: a request with this id is there already, or there is no tokenizer for its text.

        """
        single = params.n == 1
        child_ids = [request_id] if single else [f"{index}_{request_id}" for index in range(params.n)]
        if request_id in self._requests or any(child_id in self._children for child_id in child_ids):
            raise ParameterError("request_id", "is in use by another request", "conflict")
        self.check(params)
        request = _Request(request_id, prompt, list(prompt_token_ids), params, self._decode, self._experts)
        for index, child_id in enumerate(child_ids):
            child = _Child(request, index, child_id, self._tokenizer)
            request.children.append(child)
            self._children[child_id] = child
        self._requests[request_id] = request
        return child_ids

    def process(self, updates: Iterable[RequestUpdate]) -> tuple[list[RequestOutput], list[str]]:
        """Take the updates of one step.

        A request whose text cannot be made ends with finish_reason "error" and OUTPUT_FAILED as stop_reason.

        Returns:
            The outputs that are due, one per request unless some were held back, and the ids of sequences that ended
            here, by a stop string or a failure, and that the scheduler has to abort.

        """
        outputs: list[RequestOutput] = []
        ended: list[str] = []
        touched: dict[str, _Request] = {}
        now = time.monotonic()
        for update in updates:
            child = self._children.get(update.request_id)
            if child is None:
                continue
            request = child.request
            if child.index and request.owes_prompt_logprobs:
                request.held.append(update)
                continue
            num_before = child.num_tokens
            try:
                if child.take(update, now) and update.finish_reason is None:
                    ended.append(update.request_id)
            except BaseException as error:  # panics of the tokenizers' library are no Exceptions
                touched.pop(request.request_id, None)
                outputs.append(self._fail(request, error, ended))
                continue
            self.num_tokens += child.num_tokens - num_before
            if child.finish_reason is not None:
                del self._children[update.request_id]
            if child.is_due():
                touched[request.request_id] = request
        self._emit(touched.values(), now, outputs, ended)
        for request in touched.values():
            held, request.held = request.held, []
            for update in held:
                more, also_ended = self.process([update])
                outputs += more
                ended += also_ended
        return outputs, ended

    def abort(self, request_ids: Iterable[str]) -> tuple[list[str], list[RequestOutput]]:
        """End requests, named by the ids they were added with. Unknown ids are ignored.

        Returns:
            The ids of their unfinished sequences, which the scheduler has to abort, and their last outputs.

        """
        request_ids = list(request_ids)
        outputs: list[RequestOutput] = []
        ended = self.sequence_ids(request_ids)
        touched: dict[str, _Request] = {}
        for child in [self._children.pop(sequence_id) for sequence_id in ended]:
            request = child.request
            if request.request_id not in self._requests:  # it has just failed
                continue
            try:
                child.end("abort", None)
                touched[request.request_id] = request
            except BaseException as error:
                touched.pop(request.request_id, None)
                outputs.append(self._fail(request, error, []))
        self._emit(touched.values(), time.monotonic(), outputs, [])
        return ended, outputs

    def drop(self, request_ids: Iterable[str]) -> list[str]:
        """End requests without an output. Unknown ids are ignored.

        Returns:
            The ids of their unfinished sequences, which the scheduler has to abort.

        """
        request_ids = list(request_ids)
        ended = self.sequence_ids(request_ids)
        for sequence_id in ended:
            self._children.pop(sequence_id, None)
        for request_id in request_ids:
            request = self._requests.pop(request_id, None)
            if request is not None:
                request.let_go()
        return ended

    def request_of(self, sequence_id: str) -> str | None:
        """The request that an unfinished sequence is one of."""
        child = self._children.get(sequence_id)
        return None if child is None else child.request.request_id

    def sequence_ids(self, request_ids: Iterable[str]) -> list[str]:
        """The ids of unfinished sequences of requests, named as they were added. Unknown ids are ignored."""
        requests = [self._requests[request_id] for request_id in request_ids if request_id in self._requests]
        return [child.child_id for request in requests for child in request.children if child.finish_reason is None]

    @property
    def request_ids(self) -> list[str]:
        """Of requests that have not ended, in the order of their coming."""
        return list(self._requests)

    @property
    def num_requests(self) -> int:
        """Requests that have not ended."""
        return len(self._requests)

    @property
    def num_sequences(self) -> int:
        """Sequences that have not ended."""
        return len(self._children)

    def _emit(self, requests: Iterable[_Request], now: float, outputs: list[RequestOutput], ended: list[str]) -> None:
        for request in requests:
            finished = all(child.finish_reason is not None for child in request.children)
            if finished:
                request.metrics.finished_time = request.wall(now)
            elif request.params.output_kind is RequestOutputKind.FINAL_ONLY:
                continue
            try:
                outputs.append(request.output(finished))
            except BaseException as error:
                outputs.append(self._fail(request, error, ended))
                continue
            if finished:
                del self._requests[request.request_id]
                request.let_go()

    def _fail(self, request: _Request, error: BaseException, ended: list[str]) -> RequestOutput:
        """End a request whose text cannot be made. `ended` gets its sequences. An interrupt is nobody's failure."""
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise error
        _LOG.error("request %s failed", request.request_id, exc_info=error)
        output = request.failed_output()
        ended += self.drop([request.request_id])
        return output


class _Request:
    """What the completions of a request share."""

    __slots__ = (
        "_arrival",
        "children",
        "decode",
        "experts",
        "held",
        "kv_transfer_params",
        "metrics",
        "num_cached",
        "num_support_ids",
        "params",
        "prompt",
        "prompt_logprobs",
        "prompt_token_ids",
        "request_id",
    )

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        params: SamplingParams,
        decode: Callable[[int], str | None],
        experts: tuple[int, int],
    ) -> None:
        self.experts = experts
        self.request_id, self.prompt, self.prompt_token_ids = request_id, prompt, prompt_token_ids
        self.params, self.decode = params, decode
        self.children: list[_Child] = []
        self.prompt_logprobs: FlatLogprobs | None = None
        if params.prompt_logprobs is not None:
            self.prompt_logprobs = FlatLogprobs(decode)
            self.prompt_logprobs.add((), (), ())  # of the first token
        self.held: list[RequestUpdate] = []  # of further completions, until the first one says what is said once
        self.num_cached = 0
        self.kv_transfer_params: dict[str, Any] | None = None
        self.num_support_ids = 0  # that are kept here
        self._arrival = time.monotonic()
        self.metrics = RequestMetrics(arrival_time=time.time())

    @property
    def owes_prompt_logprobs(self) -> bool:
        """Whether a stream of deltas has yet to say the prompt's log-probabilities, with its first completion."""
        delta = self.params.output_kind is RequestOutputKind.DELTA
        return delta and self.prompt_logprobs is not None and not self.children[0].has_begun

    def wall(self, now: float) -> float:
        """A monotonic time as seconds since the epoch, counted from the arrival."""
        return self.metrics.arrival_time + now - self._arrival

    def let_go(self) -> None:
        """After the last output: what may be large is for its reader alone."""
        self.children.clear()
        self.prompt_logprobs = None

    def shown(self, logprobs: FlatLogprobs | None) -> Any:
        """Log-probabilities in the form that was asked for."""
        return logprobs if logprobs is None or self.params.flat_logprobs else list(logprobs)

    def output(self, finished: bool) -> RequestOutput:
        """What is due now. DELTA: only completions with news; else all of them."""
        delta = self.params.output_kind is RequestOutputKind.DELTA
        due = self.children
        if delta and len(due) > 1:  # an only one is why there is an output
            due = [child for child in due if child.is_due()]
        prompt_logprobs = self.prompt_logprobs
        if delta:
            self.prompt_logprobs = None  # handed out once
        metrics = self.metrics
        return RequestOutput(
            self.request_id,
            self.prompt,
            self.prompt_token_ids,
            self.shown(prompt_logprobs),
            [child.output(delta) for child in due],
            finished,
            RequestMetrics(
                metrics.arrival_time,
                metrics.first_token_time,
                metrics.last_token_time,
                metrics.finished_time,
                metrics.time_in_queue,
            ),
            None,
            self.num_cached,
            self.kv_transfer_params,
        )

    def failed_output(self) -> RequestOutput:
        """The last one, where a text cannot be made: completions that are not told of yet have none."""
        parts = [
            CompletionOutput(child.index, "", [], None, None, "error", OUTPUT_FAILED)
            for child in self.children
            if child.finish_reason is None or child.is_due()
        ]
        known = self.request_id, self.prompt, self.prompt_token_ids, None
        return RequestOutput(*known, parts, True, self.metrics, num_cached_tokens=self.num_cached)


class _Child:
    """One completion. `_pieces` is its text not yet handed out (DELTA) or all of it."""

    __slots__ = (
        "_cumulative",
        "_detokenizer",
        "_experts",
        "_logprobs",
        "_num_sent",
        "_pieces",
        "_sent_end",
        "_stop",
        "_stream_interval",
        "_streams",
        "_supports",
        "_token_ids",
        "_versions",
        "child_id",
        "finish_reason",
        "index",
        "request",
        "stop_reason",
    )

    def __init__(self, request: _Request, index: int, child_id: str, tokenizer: Tokenizer | None) -> None:
        params = request.params
        self.request, self.index, self.child_id = request, index, child_id
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self._detokenizer: Detokenizer = NO_TEXT
        if params.detokenize and tokenizer is not None:
            self._detokenizer = tokenizer.detokenizer(
                request.prompt_token_ids, params.skip_special_tokens, params.spaces_between_special_tokens
            )
        stops = params.stop_strings
        self._stop = StopChecker(stops, params.include_stop_str_in_output) if stops else None
        self._streams = params.output_kind is not RequestOutputKind.FINAL_ONLY
        self._stream_interval = params.stream_interval
        wanted = params.logprobs is not None or params.logprob_token_ids is not None
        self._logprobs = FlatLogprobs(request.decode) if wanted else None
        self._supports = TokenSupports() if params.return_sampling_mask else None
        self._experts: TokenExperts | None = None  # once the first come
        self._cumulative = 0.0
        self._token_ids: list[int] = []
        self._versions = _PLAIN_VERSIONS
        self._pieces: list[str] = []
        self._num_sent, self._sent_end = 0, False  # tokens handed out, and whether the end was

    @property
    def num_tokens(self) -> int:
        """Tokens so far."""
        return len(self._token_ids)

    @property
    def has_begun(self) -> bool:
        """Whether it has a token, or has ended."""
        return bool(self._token_ids) or self.finish_reason is not None

    def is_due(self) -> bool:
        """Whether there is something to hand out: the end, the first token, or an interval's worth of tokens."""
        if self.finish_reason is not None:
            return not self._sent_end
        if not self._streams:
            return False
        num_new = len(self._token_ids) - self._num_sent
        return num_new >= self._stream_interval or (num_new > 0 and self._num_sent == 0)

    def take(self, update: RequestUpdate, now: float) -> bool:
        """Take one update. Returns whether a stop string ended the completion."""
        request, params = self.request, self.request.params
        if self.index == 0 and update.num_cached > request.num_cached:  # further ones find the first one's blocks
            request.num_cached = update.num_cached
        if update.kv_transfer_params is not None:
            request.kv_transfer_params = update.kv_transfer_params
        if update.queue_time is not None and request.metrics.time_in_queue is None:
            request.metrics.time_in_queue = update.queue_time
        if request.prompt_logprobs is not None and self.index == 0 and update.prompt_logprobs.num_positions:
            part = update.prompt_logprobs
            request.prompt_logprobs.add_packed(part.width, part.token_ids, part.logprobs, part.ranks)
        if update.experts.positions:
            self._experts = self._experts or TokenExperts(request.experts)
            self._experts.add(update.experts)
        if update.weights_version or update.weights_mixed:
            self._versions = self._versions.then(len(self._token_ids), update.weights_version, update.weights_mixed)
        if update.tokens:
            metrics = request.metrics
            metrics.last_token_time = request.wall(now)
            if metrics.first_token_time is None:
                metrics.first_token_time = metrics.last_token_time
            if self._take_tokens(update, params):
                return True
        if update.finish_reason is not None:
            self.end(str(update.finish_reason), update.error or update.stop_reason)
        return False

    def end(self, finish_reason: str, stop_reason: int | str | None) -> None:
        """The completion is over: let go of the text that was held back."""
        self.finish_reason, self.stop_reason = finish_reason, stop_reason
        rest = self._detokenizer.flush()
        if self._stop is not None:
            shown, _ = self._stop.feed(rest, active=False)
            rest = shown + self._stop.flush()
        if rest:
            self._pieces.append(rest)

    def output(self, delta: bool) -> CompletionOutput:
        """The completion as it stands, or what is new of it."""
        text = "".join(self._pieces)
        logprobs = self._logprobs
        versions = self._versions.spans(self._num_sent if delta else 0, len(self._token_ids))
        supports = experts = None
        if self._supports is not None:
            supports = self._supports.take(len(self._token_ids) - (self._num_sent if delta else 0), keeps=not delta)
            self.request.num_support_ids -= sum(map(len, filter(None, supports))) if delta else 0
        if self._experts is not None and self.finish_reason is not None:
            num_tokens = len(self.request.prompt_token_ids) + len(self._token_ids)
            experts = self._experts.whole(num_tokens - 1)[self.request.params.routed_experts_prompt_start :]
        if delta:
            token_ids = self._token_ids[self._num_sent :]
            if logprobs is not None:  # handed over: they are not kept here as well
                self._logprobs = FlatLogprobs(self.request.decode)
            self._pieces.clear()
        else:
            token_ids = self._token_ids.copy()
            logprobs = None if logprobs is None else logprobs[:]
            self._pieces[:] = [text]
        self._num_sent = len(self._token_ids)
        self._sent_end = self.finish_reason is not None
        cumulative = self._cumulative if logprobs is not None else None
        return CompletionOutput(
            self.index,
            text,
            token_ids,
            cumulative,
            self.request.shown(logprobs),
            self.finish_reason,
            self.stop_reason,
            None,
            versions,
            supports,
            experts,
        )

    def _take_tokens(self, update: RequestUpdate, params: SamplingParams) -> bool:
        """Append tokens with their text up to a stop. Returns whether one was found here."""
        tokens, logprobs = update.tokens, update.logprobs
        if self._detokenizer is NO_TEXT and not wants_every_token(params):
            self._token_ids += tokens
            return False
        # the text of the token that stopped the request is no part of the answer, unless asked for
        silent = update.finish_reason == "stop" and not params.include_stop_str_in_output
        last = len(tokens) - 1
        for i, token_id in enumerate(tokens):
            self._token_ids.append(token_id)
            if update.supports and self._supports is not None:
                self.request.num_support_ids += self._supports.add(update.supports[i])
                if self.request.num_support_ids > MAX_SUPPORT_IDS:
                    self.finish_reason, self.stop_reason = "error", MASK_TOO_LARGE
                    return True
            if logprobs and self._logprobs is not None:
                entry = logprobs[i]
                self._logprobs.add(entry.token_ids, entry.logprobs, entry.ranks)
                self._cumulative += entry.logprobs[0]
            if silent and i == last:
                return False
            text = self._detokenizer.add(token_id)
            if self._stop is not None:
                text, found = self._stop.feed(text, active=len(self._token_ids) > params.min_tokens)
                if found is not None:
                    self.finish_reason, self.stop_reason = "stop", found
                    self._pieces.append(text)
                    return True
            if text:
                self._pieces.append(text)
        return False


_PLAIN_VERSIONS = TokenVersions()


def _no_text(token_id: int) -> str | None:
    return None
