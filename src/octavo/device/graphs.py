"""GraphPool: CUDA graphs of steps.

Owns which batch shapes are captured and when, the capture and the replay. Does not know what a step does: it is given
functions that issue one for a padded shape. A decode graph is a whole step, in which every row computes the token that
it sampled last; a mixed graph is a step up to the hidden states that rows sample from, whatever its rows compute.
Invariants: a graph reads and writes memory that stays where it is; graphs share one memory pool, so what one leaves in
it holds until the next replay; a chunk of a prompt never takes a decode graph, however short it is; no bit depends on
which graphs there are.
"""

from __future__ import annotations

import bisect
import dataclasses
import logging
import operator
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from octavo.device.batch import StepShape
from octavo.ops import captures, leaving
from octavo.ops.arrivals import NO_ARRIVALS, NO_GATES, Arrivals, Gates

_LOG = logging.getLogger(__name__)
# 4,608: half of a step of 8,192 tokens, beside 512 rows that decode, as `LLM.generate` starts a batch
_MIXED_TOKENS = (16, 32, 64, 128, 256, 384, 512, 768, 1024, 2048, 3072, 4096, 4608, 6144, 8192, 12288, 16384)
_MOST_VERIFIED = 512  # tokens, all of which give logits
_VERIFY_ROWS = (1, 2, 4, 8, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128)
_MOST_GATED = 64  # tokens: of a prompt all whole blocks of which are loaded fewer are left
ANY_LENGTH = 1 << 31  # more than any request has
_INTS = {2: "<i2", 4: "<i4"}  # by bytes per element


@dataclasses.dataclass(frozen=True, order=True, slots=True)
class GraphKey:
    """The shape that a graph was captured for. 0 rows: no graph, the step is issued kernel by kernel."""

    num_tokens: int
    num_rows: int
    max_seq_len: int = ANY_LENGTH  # of the rows that it serves
    max_long: int = 0  # rows of several tokens that it serves
    is_decode: bool = dataclasses.field(kw_only=True)
    gives_logits: bool = dataclasses.field(default=True, kw_only=True)  # False: a decode step of rows that only draw
    num_drafts: int = dataclasses.field(default=0, kw_only=True)  # the most of a row, in steps in which all verify

    @property
    def size(self) -> tuple[int, int]:
        """Rows, and tokens that give logits, padding included."""
        return self.num_rows, self.num_tokens if self.num_drafts else self.num_rows


EAGER = GraphKey(0, 0, is_decode=False)
Issue = Callable[[GraphKey], torch.Tensor]
_SIZE = operator.attrgetter("num_tokens", "num_rows", "max_seq_len")  # compared faster than the keys themselves
_TOKENS = operator.attrgetter("num_tokens")
_LONG_TOKENS, _FEWEST_LONG = 64, 8  # of a row of several tokens, on average, in a bounded mixed graph


def decode_keys(max_num_rows: int, lengths: Sequence[int] = (), drawn: Collection[int] = ()) -> list[GraphKey]:
    """Padded row counts worth a graph: close together where padding costs most. The last one is `max_num_rows`.

    lengths: there are graphs for rows of at most so many tokens, beside those for any length; all but the first such
    length have fewer counts. drawn: counts at which a model draws as it multiplies; each of them has one graph
    more, for rows that only draw.
    """
    fine = [1, 2, 4, *range(8, 128, 8), *range(128, 256, 16), *range(256, max_num_rows, 32)]
    coarse = [1, 2, 4, 8, *(size for power in range(4, 31) for size in (1 << power, 3 << power - 1))]
    keys = []
    for place, length in enumerate((*lengths, ANY_LENGTH)):
        sizes = [*(size for size in (coarse if place else fine) if size < max_num_rows), max_num_rows]
        keys += [GraphKey(size, size, length, is_decode=True) for size in sizes]
        keys += [dataclasses.replace(key, gives_logits=False) for key in keys[-len(sizes) :] if key.num_rows in drawn]
    return keys


def mixed_keys(
    max_num_rows: int, max_num_tokens: int, length: int = ANY_LENGTH, *, bounded: bool = False
) -> list[GraphKey]:
    """Padded token counts up to `max_num_tokens`, beyond which kernels take longer to run than to issue.

    length: of the longest row that they serve. bounded: they serve few rows of several tokens, since such a row may
    bring tiles of queries that it fills in part, for which a graph has room.
    """
    sizes = [*(size for size in _MIXED_TOKENS if size < max_num_tokens), max_num_tokens]
    keys = []
    for size in sizes:
        num_rows = min(size, max_num_rows)
        most = min(num_rows, max(size // _LONG_TOKENS, _FEWEST_LONG)) if bounded else num_rows
        keys.append(GraphKey(size, num_rows, length, most, is_decode=False))
    return keys


def _nothing(_: GraphKey) -> None:
    """No key asks for anything."""


def _not(_: RuntimeError, __: GraphKey) -> bool:
    """Steps do what they do."""
    return False


def verify_keys(max_num_rows: int, max_num_tokens: int, num_drafts: Callable[[int], int]) -> list[GraphKey]:
    """Steps in which every row verifies drafts, as many as `num_drafts` says of so many rows: two for each row count.

    One holds the whole step, of rows that only draw, the other ends with its hidden states.
    """
    found = []
    for rows in dict.fromkeys([*(size for size in _VERIFY_ROWS if size < max_num_rows), max_num_rows]):
        drafts = num_drafts(rows)
        tokens = rows * (1 + drafts)
        if drafts > 0 and tokens <= min(max_num_tokens, _MOST_VERIFIED):
            for whole in (True, False):
                found.append(GraphKey(tokens, rows, max_long=rows, is_decode=whole, num_drafts=drafts))
    return found


class GraphPool:
    """The graphs of one runner. Without keys it is the null object: every step is EAGER.

    A start captures a few: those that need the most memory, so that the others find it in the pool, and the smallest.
    The others are captured when they are first asked for, or when nothing else is to be done.
    """

    def __init__(self, keys: Sequence[GraphKey] = (), gates: Gates = NO_GATES) -> None:
        """`keys`: the shapes to capture. gates: of blocks that arrive while a graph runs."""
        self.gates = gates
        self._decode = sorted(key for key in keys if key.is_decode and not key.num_drafts)
        self._mixed = sorted(key for key in keys if not key.is_decode and not key.num_drafts)
        self._verify = sorted(key for key in keys if key.num_drafts)
        # beside graphs of the same steps that draw only: seldom asked for
        self._second = {dataclasses.replace(key, gives_logits=True) for key in keys if not key.gives_logits}
        self._graphs: dict[GraphKey, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        self._stream: torch.cuda.Stream | None = None  # of all captures, for libraries keep memory by stream
        self._pool: Any = None
        self._load: Callable[[GraphKey], object] = _nothing
        self._lighten: Callable[[RuntimeError, GraphKey], bool] = _not

    def capture_first(
        self,
        issue: Issue,
        rehearse: Callable[[GraphKey], object],
        reserve: Callable[[GraphKey], object],
        load: Callable[[GraphKey], object] = _nothing,
        lighten: Callable[[RuntimeError, GraphKey], bool] = _not,
    ) -> None:
        """Capture `issue(key)` for the first keys, before any step.

        What `issue` returns, `replay` gives. Memory of the pool that it returns is not kept: it holds until the next
        replay. `rehearse(key)` launches every kernel that `issue(key)` does, and has no effect while tables are empty;
        `reserve(key)` lets whatever grows with a key grow, for a capture is no time for that; nor for what `load(key)`
        does, ahead of every later one. `lighten(error, key)`: whether `issue(key)`, of plain decode steps, does less
        from now on, so that this key, whose capture raised `error`, is worth a second try.
        """
        self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        self._load, self._lighten = load, lighten
        captures.wait_for_device()
        with torch.cuda.stream(self._stream):
            for key in self.first_keys():
                rehearse(key)  # compiles and loads what the graph launches, and finds memory
                if not key.num_drafts:
                    self._capture(key, issue)
                elif not self._try_capture(key, issue):  # a drafter may do what no graph holds
                    self._verify.clear()
            for key in self.missing_keys():
                reserve(key)
        captures.wait_for_device()

    def first_keys(self) -> list[GraphKey]:
        """Of the keys of each kind and length the largest, then the smallest."""
        kinds: dict[tuple[bool, int, bool], list[GraphKey]] = {}
        for key in [*self._mixed, *(key for key in self._decode if key not in self._second), *self._verify]:
            kinds.setdefault((key.is_decode, key.max_seq_len, key.num_drafts > 0), []).append(key)
        return list(dict.fromkeys([*(keys[-1] for keys in kinds.values()), *(keys[0] for keys in kinds.values())]))

    def missing_keys(self) -> list[GraphKey]:
        """What is left to capture, the largest first; last what is seldom asked for."""
        keys = [*reversed(self._decode), *reversed(self._verify), *reversed(self._mixed)]
        left = [key for key in keys if key not in self._graphs]
        return sorted(left, key=self._second.__contains__)

    def has(self, key: GraphKey, issue: Issue) -> bool:
        """Whether there is a graph for a key of `dispatch`. Captures it if need be, while the device goes on.

        Without memory for it, its steps take other graphs from then on, or are EAGER.
        """
        if key in self._graphs:
            return True
        if key is EAGER:
            return False
        with torch.cuda.stream(self._stream):
            self._load(key)
            if not self._try_capture(key, issue):
                (self._verify if key.num_drafts else self._decode if key.is_decode else self._mixed).remove(key)
        return key in self._graphs

    def _try_capture(self, key: GraphKey, issue: Issue) -> bool:
        try:
            self._capture(key, issue)
        except RuntimeError as error:
            _LOG.warning("no graph for steps of %d tokens in %d rows: %s", key.num_tokens, key.num_rows, error)
        return key in self._graphs

    def _capture(self, key: GraphKey, issue: Issue) -> None:
        try:
            self._capture_once(key, issue)
            return
        except RuntimeError as error:
            if not key.is_decode or key.num_drafts or not self._lighten(error, key):
                raise
        self._capture_once(key, issue)  # out here no traceback keeps the memory that the first try took

    def _capture_once(self, key: GraphKey, issue: Issue) -> None:
        is_marked = leaving.is_asked()
        graph = torch.cuda.CUDAGraph(keep_graph=True) if is_marked else torch.cuda.CUDAGraph()
        with captures.capturing():
            # relaxed: launches of a size that no rehearsal had may load kernels
            graph.capture_begin(pool=self._pool, capture_error_mode="relaxed")
            try:
                output = issue(key)
            finally:
                captures.end(graph, self._pool)
            if is_marked:
                leaving.mark(graph)
                graph.instantiate()
        self._graphs[key] = graph, _alias(output)

    def dispatch(self, work: StepShape, *, needs_logits: bool = True) -> GraphKey:
        """The smallest graph that holds a step, or EAGER. needs_logits: not all rows of the decode step only draw."""
        if work.has_drafts:
            return self._dispatch_verification(work, whole=not needs_logits) if work.verifies else EAGER
        keys, num_long = (self._decode, 0) if work.is_decode else (self._mixed, work.num_long)
        num_rows, longest = work.num_rows, work.max_seq_len
        place = bisect.bisect_left(keys, (work.total_tokens, num_rows, longest), key=_SIZE)
        while place < len(keys):
            key = keys[place]
            holds = longest <= key.max_seq_len and num_rows <= key.num_rows and num_long <= key.max_long
            if holds and (key.gives_logits or not needs_logits):
                return key
            place += 1
        return EAGER

    def _dispatch_verification(self, work: StepShape, *, whole: bool) -> GraphKey:
        num_tokens, num_rows, num_drafts = work.total_tokens, work.num_rows, work.max_logits_per_row - 1
        for key in self._verify[bisect.bisect_left(self._verify, num_tokens, key=_TOKENS) :]:
            if num_rows <= key.num_rows and num_drafts <= key.num_drafts and key.is_decode == whole:
                return key
        return EAGER

    def gates_of(self, key: GraphKey) -> Gates:
        """What layers of a graph pass: of one that is shorter than most loads, behind which a request computes."""
        is_gated = key.num_tokens <= _MOST_GATED and not key.is_decode and not key.num_drafts
        return self.gates if is_gated else NO_GATES

    def replay(self, key: GraphKey, arrivals: Arrivals = NO_ARRIVALS) -> torch.Tensor:
        """Run a captured step, behind what arrives or, where it has gates, beside it. Gives what the next one changes.

        What is issued next runs behind all that arrives.
        """
        graph, output = self._graphs[key]
        if not self.gates_of(key):
            arrivals.before_all()
        graph.replay()
        arrivals.before_all()
        return output


class _Memory:
    """Device memory of a tensor as integers, for torch.as_tensor: it is neither kept nor copied."""

    def __init__(self, tensor: torch.Tensor, typestr: str) -> None:
        self.__cuda_array_interface__ = {
            "shape": tuple(tensor.shape),
            "typestr": typestr,
            "data": (tensor.data_ptr(), False),
            "version": 3,
        }


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, which others may be given once `tensor` is gone."""
    assert tensor.is_contiguous(), "graphs give contiguous tensors"
    memory = _Memory(tensor, _INTS[tensor.element_size()])
    return torch.as_tensor(memory, device=tensor.device).view(tensor.dtype)
