"""The only words between scheduler and worker.

Owns StepPlan (what to run), NewRow (a request's first appearance in a row) and StepResult (what came out). They are
frozen and msgpack-able, so the two sides may live in one process, two processes or two hosts. This file does not know
how a plan is made or executed. Invariant: a plan is a difference; a worker that has executed plans 0..N-1 needs plan N
and nothing else.
"""

from __future__ import annotations

import msgspec

from octavo.sampling_params import SamplingParams


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
    eos_token_ids: list[int] = []  # what min_tokens forbids, beside sampling.stop_token_ids
    prompt_logprobs_start: int = -1  # first prompt position whose log-probabilities are wanted; -1: none


class StepPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One step: `rows[i]` computes its next `num_tokens[i]` tokens, the last `len(drafts[rows[i]])` of them drafts."""

    step: int
    finished_rows: list[int] = []  # rows that ended since the last plan (finished, aborted or preempted): free first
    new_rows: list[NewRow] = []
    rows: list[int] = []
    num_tokens: list[int] = []
    new_blocks: list[tuple[int, list[list[int]]]] = []  # (old row, per group the block ids to append)
    drafts: dict[int, list[int]] = {}
    zero_blocks: list[int] = []  # fresh blocks of groups that need zeroed bytes
    connector_orders: bytes = b""

    def __repr__(self) -> str:
        """Printable without token ids: shapes only."""
        new = [(r.row, len(r.token_ids), r.num_computed) for r in self.new_rows]
        work = dict(zip(self.rows, self.num_tokens, strict=True))
        return f"StepPlan(step={self.step}, finished={self.finished_rows}, new={new}, tokens={work})"


class TokenLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities at one position: the chosen token first, then the others that were asked for."""

    token_ids: list[int]
    logprobs: list[float]
    ranks: list[int]  # 1 is the most likely


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a step gave. `tokens[i]` belongs to `rows[i]`; it is empty where the row's prompt is not finished."""

    step: int
    rows: list[int]
    tokens: list[list[int]]
    logprobs: dict[int, list[TokenLogprobs]] = {}  # row -> one entry per token of the row
    prompt_logprobs: dict[int, list[TokenLogprobs]] = {}  # row -> entries for consecutive prompt positions
    failed: dict[int, str] = {}  # row -> reason, e.g. "nan_logits"; only that request fails
