"""Streams: what one request has to say to its reader, however fast or slow that is.

Owns the hand-over from the engine's updates to one consumer, the merging of outputs that were not read in time, and
the facts of a request that metrics are made of. Knows neither the engine nor text. Invariant: a reader sees every
token exactly once (DELTA) or in the latest output (CUMULATIVE), in order, then the end or one exception; what waits
for it is bounded.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Self

import msgspec

from octavo.frontend.request_metrics import RequestFacts
from octavo.request.outputs import CompletionOutput, FlatLogprobs, LogprobsDict, RequestOutput, cut_spans, join_spans
from octavo.request.sampling_params import RequestOutputKind

MAX_UNREAD = 1 << 16  # tokens and log-probabilities that wait for a reader
_MERGE_AT = 16  # outputs


class SlowReaderError(RuntimeError):
    """A stream was not read for so long that it was given up."""


class MergedOutput(RequestOutput, kw_only=True):
    """Several outputs as one, which remembers where each ended: `pieces` takes them apart again."""

    truncation: dict[int, array[int]]  # by completion: ends of its parts in tokens and in characters, in turn


def merge_outputs(outputs: list[RequestOutput]) -> RequestOutput:
    """Consecutive outputs of one request as one: deltas are joined, of whole outputs the last one stays."""
    last = outputs[-1]
    parts: dict[int, list[CompletionOutput]] = {}
    truncation: dict[int, array[int]] = {}
    for output in outputs:
        known = output.truncation if isinstance(output, MergedOutput) else {}
        for part in output.outputs:
            parts.setdefault(part.index, []).append(part)
            own = truncation.setdefault(part.index, array("L"))
            before = own[-2:] if own else (0, 0)
            ends = known.get(part.index) or (len(part.token_ids), len(part.text))
            own.extend(end + before[at % 2] for at, end in enumerate(ends))
    prompt_logprobs = next((o.prompt_logprobs for o in outputs if o.prompt_logprobs is not None), None)
    return MergedOutput(
        request_id=last.request_id,
        prompt=last.prompt,
        prompt_token_ids=last.prompt_token_ids,
        prompt_logprobs=prompt_logprobs,
        outputs=[_join(parts[index]) for index in sorted(parts)],
        finished=last.finished,
        metrics=last.metrics,
        num_cached_tokens=last.num_cached_tokens,
        kv_transfer_params=last.kv_transfer_params,
        truncation=truncation,
    )


def pieces(output: RequestOutput) -> list[CompletionOutput]:
    """The completions of an output as the engine told them, whatever was merged meanwhile: each in order."""
    if not isinstance(output, MergedOutput):
        return output.outputs
    return [piece for whole in output.outputs for piece in _take_apart(whole, output.truncation[whole.index])]


def _take_apart(whole: CompletionOutput, truncation: array[int]) -> Iterator[CompletionOutput]:
    token, char = 0, 0
    last, first = len(truncation) - 2, whole.weight_versions[0].start if whole.weight_versions else 0
    for at in range(0, len(truncation), 2):
        next_token, next_char = truncation[at], truncation[at + 1]
        ends = at == last
        yield CompletionOutput(
            whole.index,
            whole.text[char:next_char],
            whole.token_ids[token:next_token],
            whole.cumulative_logprob if ends else None,
            None if whole.logprobs is None else whole.logprobs[token:next_token],
            whole.finish_reason if ends else None,
            whole.stop_reason if ends else None,
            weight_versions=cut_spans(whole.weight_versions, first + token, first + next_token),
            sampling_mask=None if whole.sampling_mask is None else whole.sampling_mask[token:next_token],
            routed_experts=whole.routed_experts if ends else None,
        )
        token, char = next_token, next_char


def _join(parts: list[CompletionOutput]) -> CompletionOutput:
    last = parts[-1]
    if len(parts) == 1:
        return last
    logprobs: Sequence[LogprobsDict] | None = None
    if isinstance(last.logprobs, FlatLogprobs):
        logprobs = FlatLogprobs.joined([part.logprobs for part in parts if isinstance(part.logprobs, FlatLogprobs)])
    elif last.logprobs is not None:
        logprobs = [entry for part in parts for entry in part.logprobs or ()]
    return msgspec.structs.replace(
        last,
        text="".join([part.text for part in parts]),
        token_ids=[token for part in parts for token in part.token_ids],
        logprobs=logprobs,
        weight_versions=join_spans(part.weight_versions for part in parts),
        sampling_mask=None
        if last.sampling_mask is None
        else [own for part in parts for own in part.sampling_mask or ()],
    )


class Stream:
    """The engine's end of a request."""

    __slots__ = ("_delta", "_error", "_num_unread", "_pending", "_waiter", "ended", "facts", "sequence_ids")

    def __init__(self, facts: RequestFacts, sequence_ids: list[str]) -> None:
        """`sequence_ids` are what updates call the completions."""
        self.facts, self.sequence_ids = facts, sequence_ids
        self.ended = False  # nothing more will be put
        self._delta = facts.params.output_kind is RequestOutputKind.DELTA
        self._pending: list[RequestOutput] = []
        self._num_unread = 0
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    def put(self, output: RequestOutput) -> bool:
        """Hand over an output. False if too much is waiting: the stream is to be given up."""
        self.ended = output.finished
        if self._delta:
            self._pending.append(output)
            self._num_unread += sum(_weight(part) for part in output.outputs)
            if len(self._pending) >= _MERGE_AT:
                self._pending = [merge_outputs(self._pending)]
        else:
            self._pending = [output]
        self._wake()
        return self._num_unread <= MAX_UNREAD or self.ended

    def fail(self, error: Exception) -> None:
        """End with an exception, after what is waiting has been read."""
        self.ended = True
        self._error = error
        self._wake()

    def take(self) -> RequestOutput | None:
        """What is waiting, as one output. Raises the stream's exception once nothing is."""
        pending = self._pending
        if pending:
            self._pending = []
            self._num_unread = 0
            return pending[0] if len(pending) == 1 else merge_outputs(pending)
        if self._error is not None:
            raise self._error
        return None

    @property
    def has_news(self) -> bool:
        """Whether `take` has something to give or to raise."""
        return bool(self._pending) or self._error is not None

    async def wait(self) -> None:
        """Until there is news. For one waiter."""
        if not self.has_news and not self.ended:
            assert self._waiter is None, "a stream has one reader"
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _weight(part: CompletionOutput) -> int:
    logprobs, masks = part.logprobs, sum(map(len, filter(None, part.sampling_mask or ())))
    if isinstance(logprobs, FlatLogprobs):
        return len(part.token_ids) + masks + len(logprobs.token_ids)
    return len(part.token_ids) + masks + (0 if logprobs is None else sum(map(len, logprobs)))


class OutputStream:
    """The reader's end: an asynchronous iterator of RequestOutputs.

    Closing it (`aclose`), cancelling a task that waits in it, or dropping it aborts the request.
    """

    __slots__ = ("__weakref__", "_abandon", "_done", "_loop", "_stream", "request_id")

    def __init__(self, stream: Stream, abandon: Callable[[str], None]) -> None:
        """`abandon` is told the request's id if the stream is closed before its end."""
        self.request_id = stream.facts.request_id
        self._stream, self._abandon = stream, abandon
        self._loop = asyncio.get_running_loop()
        self._done = False

    def __aiter__(self) -> Self:
        """The stream itself."""
        return self

    async def __anext__(self) -> RequestOutput:
        """The next output: all that has come since the last one."""
        if self._done:
            raise StopAsyncIteration
        stream = self._stream
        try:
            output = stream.take()
            while output is None and not stream.ended:
                await stream.wait()
                output = stream.take()
        except BaseException:  # the stream's own exception, or a cancellation
            self._close()
            raise
        if output is None:
            self._close()
            raise StopAsyncIteration
        self._done = output.finished
        return output

    async def wait(self, seconds: float) -> bool:
        """Wait for the next output without taking it; False if there is none in time. A timeout aborts nothing."""
        if self._done or self._stream.has_news or self._stream.ended:
            return True
        try:
            async with asyncio.timeout(seconds):
                await self._stream.wait()
        except TimeoutError:
            return False
        except BaseException:
            self._close()
            raise
        return True

    async def aclose(self) -> None:
        """Abort the request unless it has ended."""
        self._close()

    def __del__(self) -> None:
        """As `aclose`, for readers that just stop reading."""
        if not self._done and not self._stream.ended and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._abandon, self.request_id)

    def _close(self) -> None:
        if not self._done:
            self._done = True
            if not self._stream.ended:
                self._abandon(self.request_id)
