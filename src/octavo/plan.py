"""The only words between scheduler and worker.

Owns StepPlan (what to run), NewRow (a request's first appearance in a row), NewBlocks (how old rows grow), StepResult
(what came out) and StepLimits (how large plans get). They are frozen, arrays included, and msgpack-able by `encode` and
`decode`, so the two sides may live in one process, two processes or two hosts. What there is per running row is an
array. This file does not know how a plan is made or executed. Invariant: a plan is a difference; a worker that has
executed plans 0..N-1 needs plan N and nothing else.
"""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from octavo.request.sampling_params import SamplingParams

IntArray = NDArray[np.integer]

NO_INTS: IntArray = np.zeros(0, np.int64)
NO_INTS.flags.writeable = False


class StepLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What no plan goes beyond: the scheduler keeps to it, and tables and buffers are as large."""

    max_num_rows: int  # of a step, and requests that run at once
    max_num_tokens: int  # of a step
    max_model_len: int  # tokens of a request, prompt and output
    max_num_drafts: int = 0  # of a row in one step
    num_lookahead: int = 0  # tokens behind a step's last one that a drafter's layers are written for
    num_next_tokens: int = 0  # tokens behind a token from which its entry in these follows as well

    @property
    def num_unsure(self) -> int:
        """The most tokens by which a row's blocks are ahead of what is known of it.

        By a step that runs and the next one, all of whose drafts may count, and what a drafter's layers are written
        for behind them.
        """
        return 2 * (1 + self.max_num_drafts) + self.num_lookahead


class NewRow(msgspec.Struct, frozen=True, kw_only=True):
    """A request that enters a row: new, or resumed after preemption (which is completion)."""

    row: int
    request_id: str
    token_ids: list[int]  # every known token: the prompt, then output replayed after preemption
    num_prompt: int  # of these, the prompt
    num_computed: int  # of these, tokens whose K and V are in the cache already (a prefix hit)
    block_ids: list[list[int]]  # per cache group, in logical order
    sampling: SamplingParams
    seed: int  # resolved: never None
    eos_token_ids: list[int] = []  # also ignored ones: what min_tokens forbids, beside sampling.stop_token_ids
    prompt_logprobs_start: int = -1  # first prompt position whose log-probabilities are wanted; -1: none


class NewBlocks(msgspec.Struct, frozen=True, eq=False):
    """Blocks of one cache group for rows that are there already, in pairs: row rows[i] gets block_ids[i] appended.

    The pairs of a row are neighbours, in logical order.
    """

    rows: IntArray  # [E]
    block_ids: IntArray  # [E]


class StepPlan(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One step: `rows[i]` computes its next `num_tokens[i]` tokens, the last `num_drafts[i]` of them drafts.

    Drafts themselves never cross: they lie in the worker's rows, behind the known tokens. How many of them are accepted
    the scheduler learns with the result, so the worker's bounds of what rows have computed are corrected by `computed`.
    """

    step: int
    finished_rows: list[int] = []  # rows that ended since the last plan (finished, aborted or preempted): free first
    new_rows: list[NewRow] = []
    rows: IntArray = NO_INTS  # [R], each row once
    num_tokens: IntArray = NO_INTS  # [R], at least 1
    new_blocks: list[NewBlocks] = []  # per cache group; empty where no row grows
    num_drafts: IntArray = NO_INTS  # [R]; empty: no row has any
    computed: IntArray = NO_INTS  # [R] bounds of what rows have computed before; empty: the worker's own are exact
    depth: int = 0  # the most drafts that a row of the next step may verify: as many are proposed behind this one
    zero_blocks: list[int] = []  # fresh blocks of groups that need zeroed bytes
    load: int = -1  # a transfer for which the step waits on the device: nothing of it can fail any more; -1: none

    @property
    def has_work(self) -> bool:
        """Whether it says anything: a plan without rows may still end some."""
        return bool(len(self.rows) or self.finished_rows)

    def __repr__(self) -> str:
        """Printable without token ids: shapes only."""
        new = [(r.row, len(r.token_ids), r.num_computed) for r in self.new_rows]
        work = dict(zip(self.rows.tolist(), self.num_tokens.tolist(), strict=True))
        return f"StepPlan(step={self.step}, finished={self.finished_rows}, new={new}, tokens={work})"


class TokenLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities at one position: the chosen token first, then the others that were asked for."""

    token_ids: list[int]
    logprobs: list[float]
    ranks: list[int]  # 1 is the most likely


class PromptLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities at consecutive positions of a prompt, `width` at each: TokenLogprobs as arrays.

    12 bytes each, where Python's lists take 100: a long prompt has millions of them.
    """

    width: int  # at least 1
    token_ids: bytes  # int32, little-endian, position after position
    logprobs: bytes  # float32
    ranks: bytes  # int32

    @staticmethod
    def of_arrays(token_ids: IntArray, logprobs: NDArray[np.floating], ranks: IntArray) -> PromptLogprobs:
        """From arrays of one shape, [positions, width]."""
        assert token_ids.shape == logprobs.shape == ranks.shape, "every id has its number and its rank"
        return PromptLogprobs(
            token_ids.shape[1],
            token_ids.astype("<i4").tobytes(),
            logprobs.astype("<f4").tobytes(),
            ranks.astype("<i4").tobytes(),
        )

    @property
    def num_positions(self) -> int:
        """How many positions there are."""
        return len(self.token_ids) // (4 * self.width)

    def arrays(self) -> tuple[IntArray, NDArray[np.float32], IntArray]:
        """Ids, values and ranks, each [positions, width]. Raises ValueError where sizes do not agree."""
        shape = (self.num_positions, self.width)
        return (
            np.frombuffer(self.token_ids, "<i4").reshape(shape),
            np.frombuffer(self.logprobs, "<f4").reshape(shape),
            np.frombuffer(self.ranks, "<i4").reshape(shape),
        )

    def cut(self) -> tuple[PromptLogprobs, PromptLogprobs]:
        """The first half of the positions, and the rest."""
        at = self.num_positions // 2 * self.width * 4
        parts = [(part[:at], part[at:]) for part in (self.token_ids, self.logprobs, self.ranks)]
        first, rest = zip(*parts, strict=True)
        return PromptLogprobs(self.width, *first), PromptLogprobs(self.width, *rest)


NO_PROMPT_LOGPROBS = PromptLogprobs(1, b"", b"", b"")


class RoutedExperts(msgspec.Struct, frozen=True):
    """Which experts the tokens at some positions of a request were sent to."""

    positions: bytes  # int32, little-endian
    experts: bytes  # int16, position after position, of each all layers' choices, best first; -1: no such layer

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self.positions)


NO_EXPERTS = RoutedExperts(b"", b"")


class StepResult(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What a step gave to the rows that sampled: those of which it computed the last known token. In any order."""

    step: int
    rows: IntArray = NO_INTS  # [S]
    tokens: IntArray = np.zeros(
        (0, 1), np.int64
    )  # [S, W], of which num_sampled[i] of line i count; W = 1 without drafts
    num_sampled: IntArray = NO_INTS  # [S], accepted drafts and one more; 0: the row was held, computes its token again
    held: IntArray = NO_INTS  # [any] with drafts, rows whose run a late mask ended: it has no one more, the rest waits
    logprobs: dict[int, list[TokenLogprobs]] = {}  # row -> one entry per token of the row
    prompt_logprobs: dict[int, PromptLogprobs] = {}  # row -> those of consecutive prompt positions
    supports: dict[int, list[bytes]] = {}  # row -> of each token the ids that could be drawn, int32; empty: all
    experts: dict[int, RoutedExperts] = {}  # row -> of the tokens that it computed, whether it sampled or not
    failed: dict[int, str] = {}  # row -> reason, e.g. "nan_logits"; only that request fails
