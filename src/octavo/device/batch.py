"""StepShape, InputBuffers and Batch: one step's inputs.

Owns what the host knows of a step (StepShape), the static tensors that a step's inputs live in, and the views of them
that one step uses (Batch). They follow each step from the plan and the persistent rows alone; what survives a step are
addresses, and the arrays of rows that decode again. Knows no requests. Invariant: rows with few queries come first;
host maxima are bounds on what the device holds; padding names the null row, the last row of every table.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import torch

from octavo.device.block_table import BlockTables
from octavo.device.request_table import RequestTable
from octavo.device.staging import Queue, StagedTensor
from octavo.ops.inputs import gather_inputs
from octavo.ops.inputs.tensors import GroupTables, LogitTokens, StepInputs
from octavo.plan import NO_INTS, IntArray, StepLimits, StepPlan


class StepShape(msgspec.Struct, frozen=True, kw_only=True):
    """What a step computes, as the host knows it. R rows with T tokens in all, of which S rows sample."""

    rows: IntArray  # [R] int64, row of each batch entry
    num_tokens: IntArray  # [R] int64, queries of each
    query_start: IntArray  # [R + 1] int32
    seq_lens: IntArray  # [R] int32, host upper bounds
    max_query_len: int
    max_seq_len: int  # of seq_lens
    sampling: IntArray  # [S] int64, batch entries that sample: at their last query, and at their drafts
    is_decode: bool  # every row computes the one token that was sampled last
    verifies: bool = False  # every row computes that and drafts, some row has any
    # [R], how many of its last queries are drafts; empty: no row has any
    num_drafts: IntArray = NO_INTS

    @property
    def num_rows(self) -> int:
        """R."""
        return len(self.rows)

    @property
    def total_tokens(self) -> int:
        """T."""
        return int(self.query_start[-1])

    @property
    def num_long(self) -> int:
        """How many rows compute several tokens. They come last."""
        return self.num_rows - int(self.num_tokens.searchsorted(1, side="right"))

    @property
    def has_drafts(self) -> bool:
        """Whether any row computes drafts. Such a row samples."""
        return len(self.num_drafts) > 0

    @property
    def logits_per_row(self) -> IntArray:
        """[R]: the last query of each row gives logits, and so do the drafts before it. Of a step with drafts."""
        return self.num_drafts + 1

    @property
    def num_logit_tokens(self) -> int:
        """L of LogitTokens."""
        return self.total_tokens if self.verifies else self.num_rows + int(self.num_drafts.sum())

    @property
    def max_logits_per_row(self) -> int:
        """The most tokens of a row that give logits."""
        return self.max_query_len if self.verifies else 1 + int(self.num_drafts.max(initial=0))

    def without_drafts(self) -> StepShape:
        """The same of a step with drafts, less these."""
        num_tokens = self.num_tokens - self.num_drafts
        order = num_tokens.argsort(kind="stable")
        undrafted = msgspec.structs.replace(
            self,
            rows=self.rows[order],
            num_tokens=num_tokens[order],
            seq_lens=(self.seq_lens - self.num_drafts)[order],
            sampling=np.isin(order, self.sampling).nonzero()[0],
            num_drafts=NO_INTS,
            verifies=False,
        )
        return undrafted.only(np.arange(self.num_rows))

    def only(self, places: IntArray) -> StepShape:
        """The same of some batch entries alone: places [N] int64, at least one, in order."""
        num_tokens, seq_lens = self.num_tokens[places], self.seq_lens[places]
        num_drafts = self.num_drafts[places] if self.has_drafts else NO_INTS
        query_start = np.zeros(len(places) + 1, np.int32)
        num_tokens.cumsum(out=query_start[1:])
        return msgspec.structs.replace(
            self,
            rows=self.rows[places],
            num_tokens=num_tokens,
            query_start=query_start,
            seq_lens=seq_lens,
            max_query_len=int(num_tokens.max()),
            max_seq_len=int(seq_lens.max()),
            sampling=np.isin(places, self.sampling).nonzero()[0],
            num_drafts=num_drafts if num_drafts.any() else NO_INTS,
            verifies=False,
        )


class Batch(StepInputs, frozen=True, kw_only=True):
    """One step on the device: views of R rows and T tokens, padding included."""

    max_seq_len: int  # host upper bound
    max_long: int  # host upper bound of rows with several tokens, which come after the others
    slot_mapping: list[torch.Tensor]  # per table of attention [T] int64
    block_tables: list[torch.Tensor]  # per table of attention [R, width] int32, kernel block ids
    logit_tokens: LogitTokens | None  # whose hidden states alone are asked for; None: those of all tokens
    apart: bool = False  # of a graph whose rows all verify: none reads what another one stores
    verifies: bool = False  # rows of several tokens have drafts
    is_padded: bool = False  # of a graph: rows may have fewer tokens than T says, the last ones then are of no row

    @property
    def num_rows(self) -> int:
        """R."""
        return len(self.seq_lens)

    @property
    def total_tokens(self) -> int:
        """T."""
        return len(self.input_ids)


class BatchOrder:
    """Puts the rows of plans in order. Knows the last step: rows that all go on as in it cost a comparison."""

    def __init__(self, requests: RequestTable) -> None:
        """`requests`: whose tokens are counted as issued."""
        self._requests = requests
        self._last: StepShape | None = None  # if every row computed its last token in it, and drafts or none
        self._last_plan = StepPlan(step=-1)
        self._prefill_len: IntArray = NO_INTS  # of its rows, where some verified drafts
        self._is_in_order = False  # its rows are in the plan's order

    def __call__(self, plan: StepPlan) -> StepShape:
        """The order of a plan's rows, and what follows from it on the host. Counts the step's tokens as issued.

        Rows that decode as in the last step, or verify as many drafts, keep that step's arrays, but for their lengths.
        """
        work, last = None, self._last
        if last is not None and not plan.new_rows:
            work = self._verify_again(plan, last) if len(plan.computed) else self._decode_again(plan, last)
        if work is None:
            work = _lay_out(plan, self._requests)
            self._prefill_len = self._requests.prefill_len_np[work.rows] if work.verifies else NO_INTS
            self._is_in_order = work.rows is plan.rows
        self._last, self._last_plan = work if work.is_decode or work.verifies else None, plan
        self._requests.num_computed_upper[work.rows] = work.seq_lens
        return work

    def _decode_again(self, plan: StepPlan, last: StepShape) -> StepShape | None:
        """The decode step after `last`, of the same rows; None: it is another one."""
        before = self._last_plan
        is_like = last.is_decode and not len(plan.num_drafts) and _are_equal(plan.rows, before.rows)
        if not is_like or not _are_equal(plan.num_tokens, before.num_tokens):
            return None
        return StepShape(
            rows=last.rows,
            num_tokens=last.num_tokens,
            query_start=last.query_start,
            seq_lens=last.seq_lens + 1,
            max_query_len=1,
            max_seq_len=last.max_seq_len + 1,
            sampling=last.sampling,
            is_decode=True,
            num_drafts=NO_INTS,
        )

    def _verify_again(self, plan: StepPlan, last: StepShape) -> StepShape | None:
        """The step after `last`, in which the rows of its plan verify as many drafts, all alike; None: another one.

        So is one with a row that was held before it had any output: it computes the end of its prompt.
        """
        before = self._last_plan
        is_like = last.verifies and self._is_in_order and _are_equal(plan.num_drafts, before.num_drafts)
        if not is_like or not _are_equal(plan.rows, before.rows) or not _are_equal(plan.num_tokens, before.num_tokens):
            return None
        if (plan.computed < self._prefill_len).any():
            return None
        seq_lens = plan.computed + plan.num_tokens
        return StepShape(
            rows=last.rows,
            num_tokens=last.num_tokens,
            query_start=last.query_start,
            seq_lens=seq_lens,
            max_query_len=last.max_query_len,
            max_seq_len=int(seq_lens.max()),
            sampling=last.sampling,
            is_decode=False,
            verifies=True,
            num_drafts=last.num_drafts,
        )

    def take_back(self, rows: IntArray) -> None:
        """See RequestTable.take_back."""
        self._last = None
        self._requests.take_back(rows)


def _are_equal(ones: IntArray, others: IntArray) -> bool:
    return ones is others or np.array_equal(ones, others)


def _lay_out(plan: StepPlan, requests: RequestTable) -> StepShape:
    rows, num_tokens, num_drafts = plan.rows, plan.num_tokens, plan.num_drafts
    if len(plan.computed):
        requests.num_computed_upper[rows] = plan.computed
    max_query_len = int(num_tokens.max())
    if max_query_len > 1 and num_tokens.min() < max_query_len:
        order = num_tokens.argsort(kind="stable")
        rows, num_tokens = rows[order], num_tokens[order]
        num_drafts = num_drafts[order] if len(num_drafts) else num_drafts
    query_start = np.zeros(len(rows) + 1, np.int32)
    num_tokens.cumsum(out=query_start[1:])
    before = requests.num_computed_upper[rows]
    upper = before + num_tokens
    prefill_len = requests.prefill_len_np[rows]
    decodes = bool((before >= prefill_len).all())
    return StepShape(
        rows=rows,
        num_tokens=num_tokens,
        query_start=query_start,
        seq_lens=upper,
        max_query_len=max_query_len,
        max_seq_len=int(upper.max()),
        sampling=(upper >= prefill_len).nonzero()[0],
        is_decode=max_query_len == 1 and decodes,
        verifies=len(num_drafts) > 0 and decodes and bool((num_tokens == num_drafts + 1).all()),
        num_drafts=num_drafts,
    )


class InputBuffers:
    """Static tensors, large enough for any step."""

    def __init__(
        self,
        requests: RequestTable,
        tables: BlockTables,
        limits: StepLimits,
        *,
        device: torch.device,
        queue: Queue,
    ) -> None:
        """Sized by the limits of a step and by the widths of the block tables. `queue`: see StagedTensor."""
        self._requests, self.limits = requests, limits
        max_num_rows, max_num_tokens = limits.max_num_rows, limits.max_num_tokens
        max_num_drafts = limits.max_num_drafts
        self.input_ids = torch.zeros(max_num_tokens, dtype=torch.int64, device=device)
        self.positions = torch.zeros(max_num_tokens, dtype=torch.int64, device=device)
        self.seq_lens = torch.zeros(max_num_rows, dtype=torch.int32, device=device)
        self.next_positions = torch.zeros(max_num_rows, dtype=torch.int64, device=device)
        self.turn = torch.zeros(1, dtype=torch.int32, device=device)
        # of the last two steps, which is as many as may be outstanding: written by the device, with no copy between
        width, pinned = 1 + max_num_drafts, device.type == "cuda"
        self.results = torch.zeros((2, max_num_rows, width), dtype=torch.int64, pin_memory=pinned)
        self.counts = torch.zeros((2, max_num_rows), dtype=torch.int64, pin_memory=pinned)
        gathered = tables.tables[: tables.num_gathered]
        self.slot_mapping = torch.full((len(gathered), max_num_tokens), -1, dtype=torch.int64, device=device)
        self.block_tables = [
            torch.zeros((max_num_rows, table.data.shape[1]), dtype=torch.int32, device=device) for table in gathered
        ]
        sizes = tables.block_sizes[: tables.num_gathered]
        self._groups = GroupTables([table.data for table in gathered], self.block_tables, self.slot_mapping, sizes)
        self.rows = StagedTensor(1, max_num_rows, torch.int64, device, queue)
        self.query_start = StagedTensor(1, max_num_rows + 1, torch.int32, device, queue)
        self.sample_of = StagedTensor(1, max_num_rows, torch.int32, device, queue)  # entry -> its sample, -1: none
        # [S] which of the L tokens that give logits are sampled from; L = R without drafts
        self.sampling = StagedTensor(1, max_num_rows * width, torch.int64, device, queue)
        # LogitTokens.tokens [L], padding: the last of all; and query_start of these alone
        self.logit_tokens = StagedTensor(1, max_num_rows * width, torch.int64, device, queue)
        self.logit_start = StagedTensor(1, max_num_rows + 1, torch.int32, device, queue)
        # of steps with drafts alone
        self.num_drafts = StagedTensor(1, max_num_rows, torch.int32, device, queue)  # [R]
        self._logit_rows = StagedTensor(1, max_num_rows * width, torch.int64, device, queue)  # [L]
        self._logit_positions = torch.zeros(max_num_rows * width, dtype=torch.int64, device=device)
        self._viewed: tuple[tuple[int, ...], dict[str, Any]] = (), {}  # sizes of the last view, and its tensors
        self._decode_rows = NO_INTS  # what the staged tensors hold, if a decode step is all they hold
        self._decode_width = 0
        self._verified: tuple[StepShape, int, int] | None = None  # the last step, if all of its rows verified drafts

    def stage(self, work: StepShape, num_rows: int, num_logits: int = 0) -> None:
        """Stage which rows run, padded to `num_rows`, and of a step with drafts to `num_logits` logit tokens.

        A decode step of the same rows as the last one stages nothing, nor do as many drafts of the same rows.

        Raises ValueError for a step that is larger than what these buffers were made for.
        """
        if work.has_drafts and work.max_logits_per_row - 1 > self.limits.max_num_drafts:
            raise ValueError(
                f"a plan with {work.max_logits_per_row - 1} drafts of a row, where the worker's speculator proposes "
                f"num_drafts={self.limits.max_num_drafts}: make scheduler and worker with one speculator"
            )
        if num_rows > self.limits.max_num_rows or work.total_tokens > self.limits.max_num_tokens:
            raise ValueError(
                f"a step of {num_rows} rows and {work.total_tokens} tokens exceeds "
                f"max_num_seqs={self.limits.max_num_rows} or max_num_batched_tokens={self.limits.max_num_tokens}"
            )
        if work.is_decode and num_rows == self._decode_width and work.rows is self._decode_rows:  # see BatchOrder
            return
        self._decode_rows, self._decode_width = (work.rows, num_rows) if work.is_decode else (NO_INTS, 0)
        if self._has_staged(work, num_rows, num_logits):
            return
        num_real = work.num_rows
        rows = np.full(num_rows, self._requests.null_row, np.int64)
        rows[:num_real] = work.rows
        query_start = np.full(num_rows + 1, work.query_start[-1], np.int32)
        query_start[:num_real] = work.query_start[:-1]
        self.rows.stage(0, 0, rows)
        self.query_start.stage(0, 0, query_start)
        if work.has_drafts:
            self._stage_drafts(work, num_rows, max(num_logits, work.num_logit_tokens))
            return
        sample_of = np.full(num_rows, -1, np.int32)
        sample_of[work.sampling] = np.arange(len(work.sampling), dtype=np.int32)
        self.sample_of.stage(0, 0, sample_of)
        self.sampling.stage(0, 0, work.sampling)
        self.logit_tokens.stage(0, 0, query_start[1:] - 1)
        self.logit_start.stage(0, 0, np.arange(num_rows + 1).clip(max=num_real))

    def _has_staged(self, work: StepShape, num_rows: int, num_logits: int) -> bool:
        """Whether the last step verified as many drafts of the same rows; remembers this one."""
        last, self._verified = self._verified, (work, num_rows, num_logits) if work.verifies else None
        if last is None or self._verified is None or last[1:] != self._verified[1:]:
            return False
        before = last[0]
        if before.rows is work.rows and before.num_drafts is work.num_drafts:  # see BatchOrder
            return True
        return np.array_equal(before.rows, work.rows) and np.array_equal(before.num_drafts, work.num_drafts)

    def _stage_drafts(self, work: StepShape, num_rows: int, num_logits: int) -> None:
        """Which tokens give logits, and which of these are sampled from, where a row has several."""
        per_row = work.logits_per_row
        end = per_row.cumsum()
        within = np.arange(work.num_logit_tokens) - np.repeat(end - per_row, per_row)
        is_sampled = np.zeros(work.num_rows, np.bool_)
        is_sampled[work.sampling] = True
        num_sampled = per_row[work.sampling]
        sample_of = np.full(num_rows, -1, np.int32)
        sample_of[work.sampling] = num_sampled.cumsum() - num_sampled
        num_drafts = np.zeros(num_rows, np.int32)
        num_drafts[: work.num_rows] = work.num_drafts
        logit_rows = np.full(num_logits, self._requests.null_row, np.int64)
        logit_rows[: work.num_logit_tokens] = np.repeat(work.rows, per_row)
        logit_start = np.full(num_rows + 1, work.num_logit_tokens, np.int32)
        logit_start[: work.num_rows] = end - per_row
        self.sample_of.stage(0, 0, sample_of)
        self.sampling.stage(0, 0, np.repeat(is_sampled, per_row).nonzero()[0])
        self.logit_tokens.stage(0, 0, np.repeat(work.query_start[1:] - per_row, per_row) + within)
        self.logit_start.stage(0, 0, logit_start)
        self.num_drafts.stage(0, 0, num_drafts)
        self._logit_rows.stage(0, 0, logit_rows)

    def gather(self, batch: Batch) -> None:
        """Fill the tensors of `batch`, a view of these buffers, from the rows. A graph may capture it."""
        gather_inputs(batch, self._requests.tensors, self._groups)

    def logit_rows(self, num_logits: int) -> torch.Tensor:
        """[num_logits] int64: the row of each token that gives logits, with drafts; of padding the null row."""
        return self._logit_rows.data[0, :num_logits]

    def drafted(self, work: StepShape, batch: Batch) -> LogitTokens:
        """The tokens that give logits in a step with drafts, whose inputs are gathered."""
        logits = self._logit_tokens(work.num_rows, work.num_logit_tokens, work.max_logits_per_row)
        torch.add(batch.positions.index_select(0, logits.tokens), 1, out=logits.positions)
        return logits

    def _logit_tokens(self, num_rows: int, num_logits: int, max_per_row: int) -> LogitTokens:
        """Without drafts there is one for each row, and what `gather` fills for rows is said of these."""
        tokens, start = self.logit_tokens.data[0, :num_logits], self.logit_start.data[0, : num_rows + 1]
        if max_per_row == 1:
            return LogitTokens(tokens, self.rows.data[0, :num_rows], self.next_positions[:num_rows], start)
        rows, positions = self.logit_rows(num_logits), self._logit_positions[:num_logits]
        return LogitTokens(tokens, rows, positions, start, max_per_row)

    def view(
        self,
        num_rows: int,
        num_tokens: int,
        max_query_len: int,
        max_seq_len: int,
        max_long: int = 0,
        *,
        every: bool = False,
        drafts: StepShape | None = None,
        apart: bool = False,
        is_padded: bool = False,
    ) -> Batch:
        """The leading parts of the static tensors as a batch. every: hidden states of all tokens are asked for.

        drafts: the step, if it has some. apart, is_padded: see Batch.
        """
        num_logits, max_logits = (
            (num_rows, 1) if drafts is None else (drafts.num_logit_tokens, drafts.max_logits_per_row)
        )
        sizes = num_rows, num_tokens, num_logits, max_logits, every
        if sizes != self._viewed[0]:
            self._viewed = sizes, self._views(*sizes)
        tensors = self._viewed[1]
        return Batch(
            max_query_len=max_query_len,
            max_seq_len=max_seq_len,
            max_long=max_long,
            apart=apart,
            is_padded=is_padded,
            verifies=apart or drafts is not None,
            **tensors,
        )

    def _views(self, num_rows: int, num_tokens: int, num_logits: int, max_logits: int, every: bool) -> dict[str, Any]:
        """The tensors of `view`."""
        logit_tokens = None
        if num_logits < num_tokens and not every:
            logit_tokens = self._logit_tokens(num_rows, num_logits, max_logits)
        return {
            "rows": self.rows.data[0, :num_rows],
            "input_ids": self.input_ids[:num_tokens],
            "positions": self.positions[:num_tokens],
            "query_start": self.query_start.data[0, : num_rows + 1],
            "seq_lens": self.seq_lens[:num_rows],
            "next_positions": self.next_positions[:num_rows],
            "turn": self.turn,
            "results": self.results,
            "counts": self.counts,
            "slot_mapping": [slots[:num_tokens] for slots in self.slot_mapping],
            "block_tables": [table[:num_rows] for table in self.block_tables],
            "logit_tokens": logit_tokens,
        }
