"""What comes out of the engine: plain data with vLLM's names.

Owns RequestOutput, CompletionOutput, Logprob and RequestMetrics. Knows nothing of how they are made. Invariant: all of
it is msgpack-able (FlatLogprobs apart), and an output that was handed out is never changed afterwards.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, overload

import msgspec

# Stop reasons of outputs that failed on what they asked for, not by a failure of the model: mods of the engine's
# attention that fail on a request, wishes that exclude each other, a form that met a limit on its way.
MOD_FAILED = "attention_mod_failed"
NO_TOKEN = "no_token_allowed"
TOO_COMPLEX = "schema_too_complex"
MASK_TOO_LARGE = "sampling_mask_too_large"
MAX_SUPPORT_IDS = 1 << 22  # of a request's sampling masks that are kept until they are handed out
LOAD_FAILED = "kv_load_failed"  # blocks that a connector was to bring were lost, and the policy is "fail"
REQUESTS_OWN = (NO_TOKEN, TOO_COMPLEX, MASK_TOO_LARGE)
WEIGHTS_BROKEN = "weights_broken"  # an update of the weights failed when some were overwritten
WEIGHTS_DISCARDED = "weights_discarded"  # at sleep level 2, when the request was on its way
NO_WEIGHTS = (WEIGHTS_BROKEN, WEIGHTS_DISCARDED)
NOT_THE_MODELS = (*REQUESTS_OWN, *NO_WEIGHTS, LOAD_FAILED)
OUTPUT_FAILED = "output_failed"  # of outputs whose text could not be made


class Logprob(msgspec.Struct, frozen=True, gc=False):
    """Log-probability of one token at one position."""

    logprob: float
    rank: int | None = None  # 1 is the most likely
    decoded_token: str | None = None


LogprobsDict = dict[int, Logprob]  # token id -> Logprob; the sampled (or prompt) token first


def _no_text(token_id: int) -> str | None:
    return None


class FlatLogprobs(Sequence[Any]):
    """Log-probabilities of many positions in flat arrays, with vLLM's names.

    Those of position p are entries start_indices[p] to end_indices[p] - 1 of `token_ids` (int32), `logprobs` (float32)
    and `ranks` (int32). Read as a list it gives a position's dict, made for the reader; None where there is none.
    """

    __slots__ = ("_ends", "decode", "logprobs", "ranks", "token_ids")

    def __init__(self, decode: Callable[[int], str | None] = _no_text) -> None:
        """Empty. decode: the text of a token."""
        self.decode = decode
        self._ends = array("q")
        self.token_ids, self.logprobs, self.ranks = array("i"), array("f"), array("i")

    def add(self, token_ids: Iterable[int], logprobs: Iterable[float], ranks: Iterable[int]) -> None:
        """The next position; without entries it has no log-probabilities."""
        self.token_ids.extend(token_ids)
        self.logprobs.extend(logprobs)
        self.ranks.extend(ranks)
        self._ends.append(len(self.token_ids))

    def add_packed(self, width: int, token_ids: bytes, logprobs: bytes, ranks: bytes) -> None:
        """The next positions, `width` entries each, as bytes of this machine's int32 and float32."""
        before = len(self.token_ids)
        self.token_ids.frombytes(token_ids)
        self.logprobs.frombytes(logprobs)
        self.ranks.frombytes(ranks)
        self._ends.extend(range(before + width, len(self.token_ids) + 1, width))

    @property
    def start_indices(self) -> list[int]:
        """Per position its first entry."""
        return [0, *self._ends[:-1]] if self._ends else []

    @property
    def end_indices(self) -> list[int]:
        """Per position the one after its last entry."""
        return self._ends.tolist()

    @property
    def decoded_tokens(self) -> list[str | None]:
        """Per entry the token's text."""
        return [self.decode(token_id) for token_id in self.token_ids]

    def bounds(self, position: int) -> tuple[int, int]:
        """First entry of a position, and the one after its last."""
        return (self._ends[position - 1] if position else 0), self._ends[position]

    def __len__(self) -> int:
        """How many positions there are."""
        return len(self._ends)

    def __iter__(self) -> Iterator[Any]:
        """A dict per position."""
        start = 0
        for end in self._ends:
            yield self._dict(start, end)
            start = end

    @overload
    def __getitem__(self, at: int) -> Any: ...
    @overload
    def __getitem__(self, at: slice) -> FlatLogprobs: ...
    def __getitem__(self, at: int | slice) -> Any:
        """A position's dict, or some neighbouring positions. Raises IndexError."""
        if isinstance(at, int):
            return self._dict(*self.bounds(range(len(self._ends))[at]))
        first, last, step = at.indices(len(self._ends))
        if step != 1:
            raise ValueError("only neighbouring positions can be taken")
        part = FlatLogprobs(self.decode)
        if first < last:
            start, end = self.bounds(first)[0], self._ends[last - 1]
            part.token_ids, part.logprobs = self.token_ids[start:end], self.logprobs[start:end]
            part.ranks = self.ranks[start:end]
            part._ends.extend(each - start for each in self._ends[first:last])
        return part

    @staticmethod
    def joined(parts: Sequence[FlatLogprobs]) -> FlatLogprobs:
        """The positions of at least one part, in order."""
        whole = FlatLogprobs(parts[0].decode)
        for part in parts:
            before = len(whole.token_ids)
            whole.token_ids += part.token_ids
            whole.logprobs += part.logprobs
            whole.ranks += part.ranks
            whole._ends.extend(each + before for each in part._ends)
        return whole

    def __eq__(self, other: object) -> bool:
        """Whether the positions hold the same, in whichever form."""
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        """Sizes only."""
        return f"FlatLogprobs({len(self._ends)} positions, {len(self.token_ids)} entries)"

    def _dict(self, start: int, end: int) -> LogprobsDict | None:
        if start == end:
            return None
        entries = zip(self.token_ids[start:end], self.logprobs[start:end], self.ranks[start:end], strict=True)
        return {token_id: Logprob(logprob, rank, self.decode(token_id)) for token_id, logprob, rank in entries}


class RequestMetrics(msgspec.Struct):
    """When things happened: seconds since the epoch, whose differences come from a monotonic clock."""

    arrival_time: float
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    time_in_queue: float | None = None  # seconds


class WeightsSpan(msgspec.Struct, frozen=True, gc=False):
    """Output tokens start to end - 1, counted from the completion's first, and the weights that drew them."""

    version: str
    start: int
    end: int
    mixed: bool = False  # they attend K and V of older weights too


def join_spans(parts: Iterable[Sequence[WeightsSpan]]) -> list[WeightsSpan]:
    """Spans of neighbouring parts of one completion, as those of the whole."""
    joined: list[WeightsSpan] = []
    for span in (span for part in parts for span in part):
        before = joined[-1] if joined else None
        if before is not None and (before.version, before.mixed) == (span.version, span.mixed):
            joined[-1] = WeightsSpan(span.version, before.start, span.end, span.mixed)
        else:
            joined.append(span)
    return joined


def cut_spans(spans: Sequence[WeightsSpan], start: int, end: int) -> list[WeightsSpan]:
    """What of `spans` lies in start to end - 1, counted from the completion's first token."""
    cut = (WeightsSpan(s.version, max(s.start, start), min(s.end, end), s.mixed) for s in spans)
    return [span for span in cut if span.start < span.end]


class CompletionOutput(msgspec.Struct):
    """One completion of a request, as a whole or the part since the last output (RequestOutputKind.DELTA)."""

    index: int  # of the request's n completions
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None  # of all sampled tokens so far, if logprobs were asked for
    logprobs: Sequence[LogprobsDict] | None  # one per token of token_ids
    finish_reason: str | None = None  # "stop", "length", "abort", "error", "repetition"; None: goes on
    stop_reason: int | str | None = None  # the stop string, the stop token's id, or the error's reason
    lora_request: None = None
    weight_versions: list[WeightsSpan] = []  # of token_ids, in order; neighbours differ
    # per token of token_ids the ids that could be drawn in its place, ascending; None: all
    sampling_mask: list[list[int] | None] | None = None
    # of all tokens but the last, the prompt's among them: [tokens, layers, ranks] int16, with the completion's end
    routed_experts: Any = None

    def finished(self) -> bool:
        """Whether the completion has ended."""
        return self.finish_reason is not None


class RequestOutput(msgspec.Struct):
    """What is known of a request: the prompt and its completions."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    # per prompt token, None for the first; DELTA: given once, with the first completion's first tokens
    prompt_logprobs: Sequence[LogprobsDict | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics | None = None
    lora_request: None = None
    num_cached_tokens: int | None = None
    kv_transfer_params: dict[str, Any] | None = None  # once finished: where a connector has its blocks
