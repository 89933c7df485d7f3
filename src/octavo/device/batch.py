"""StepShape, InputBuffers and Batch: one step's inputs.

Owns what the host knows of a step (StepShape), the static tensors that a step's inputs live in, and the views of them
that one step uses (Batch). They follow each step from the plan and the persistent rows alone; what survives a step are
addresses, and the arrays of rows that decode again. Knows no requests. Invariant: rows with few queries come first;
host maxima are bounds on what the device holds; padding names the null row, the last row of every table.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from octavo.device.block_table import BlockTables
from octavo.device.request_table import RequestTable
from octavo.device.staging import StagedTensor, WriteQueue
from octavo.ops.inputs import gather_inputs
from octavo.ops.inputs.tensors import GroupTables, LastTokens, StepInputs
from octavo.plan import NO_INTS, IntArray, StepPlan


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepShape:
    """What a step computes, as the host knows it. R rows with T tokens in all, of which S rows sample."""

    rows: IntArray  # [R] int64, row of each batch entry
    num_tokens: IntArray  # [R] int64, queries of each
    query_start: IntArray  # [R + 1] int32
    seq_lens: IntArray  # [R] int32, host upper bounds
    max_query_len: int
    max_seq_len: int  # of seq_lens
    sampling: IntArray  # [S] int64, batch entries whose last query gives logits
    is_decode: bool  # every row computes the one token that was sampled last

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

    def only(self, places: IntArray) -> StepShape:
        """The same of some batch entries alone: places [N] int64, at least one, in order."""
        num_tokens, seq_lens = self.num_tokens[places], self.seq_lens[places]
        query_start = np.zeros(len(places) + 1, np.int32)
        num_tokens.cumsum(out=query_start[1:])
        return dataclasses.replace(
            self,
            rows=self.rows[places],
            num_tokens=num_tokens,
            query_start=query_start,
            seq_lens=seq_lens,
            max_query_len=int(num_tokens.max()),
            max_seq_len=int(seq_lens.max()),
            sampling=np.isin(places, self.sampling).nonzero()[0],
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Batch(StepInputs):
    """One step on the device: views of R rows and T tokens, padding included."""

    max_seq_len: int  # host upper bound
    max_long: int  # host upper bound of rows with several tokens, which come after the others
    slot_mapping: list[torch.Tensor]  # per group [T] int64
    block_tables: list[torch.Tensor]  # per group [R, width] int32, kernel block ids
    last_tokens: LastTokens | None  # of the rows, whose hidden states alone are asked for; None: those of all tokens

    @property
    def num_rows(self) -> int:
        """R."""
        return len(self.seq_lens)

    @property
    def total_tokens(self) -> int:
        """T."""
        return len(self.input_ids)


class BatchOrder:
    """Puts the rows of plans in order. Knows the last step: rows that all decode again cost a comparison."""

    def __init__(self, requests: RequestTable) -> None:
        """`requests`: whose tokens are counted as issued."""
        self._requests = requests
        self._last: StepShape | None = None  # if it was a decode step
        self._last_rows, self._last_counts = NO_INTS, NO_INTS  # of its plan

    def __call__(self, plan: StepPlan) -> StepShape:
        """The order of a plan's rows, and what follows from it on the host. Counts the step's tokens as issued.

        Rows that decode as in the last step keep that step's arrays, but for their lengths.
        """
        rows, counts = plan.rows, plan.num_tokens
        if (
            self._last is not None
            and not plan.new_rows
            and (rows is self._last_rows or np.array_equal(rows, self._last_rows))
            and (counts is self._last_counts or np.array_equal(counts, self._last_counts))
        ):
            work = _next(self._last)
        else:
            work = _lay_out(plan, self._requests)
        self._last, self._last_rows, self._last_counts = work if work.is_decode else None, rows, counts
        self._requests.num_computed_upper[work.rows] = work.seq_lens
        return work

    def take_back(self, rows: IntArray) -> None:
        """See RequestTable.take_back."""
        self._last = None
        self._requests.take_back(rows)


def _next(last: StepShape) -> StepShape:
    """The decode step after `last`, of the same rows."""
    return StepShape(
        rows=last.rows,
        num_tokens=last.num_tokens,
        query_start=last.query_start,
        seq_lens=last.seq_lens + 1,
        max_query_len=1,
        max_seq_len=last.max_seq_len + 1,
        sampling=last.sampling,
        is_decode=True,
    )


def _lay_out(plan: StepPlan, requests: RequestTable) -> StepShape:
    rows, num_tokens = plan.rows, plan.num_tokens
    max_query_len = int(num_tokens.max())
    if max_query_len > 1:
        order = num_tokens.argsort(kind="stable")
        rows, num_tokens = rows[order], num_tokens[order]
    query_start = np.zeros(len(rows) + 1, np.int32)
    num_tokens.cumsum(out=query_start[1:])
    before = requests.num_computed_upper[rows]
    upper = before + num_tokens
    prefill_len = requests.prefill_len_np[rows]
    return StepShape(
        rows=rows,
        num_tokens=num_tokens,
        query_start=query_start,
        seq_lens=upper,
        max_query_len=max_query_len,
        max_seq_len=int(upper.max()),
        sampling=(upper >= prefill_len).nonzero()[0],
        is_decode=max_query_len == 1 and bool((before >= prefill_len).all()),
    )


class InputBuffers:
    """Static tensors, large enough for any step."""

    def __init__(
        self,
        requests: RequestTable,
        tables: BlockTables,
        *,
        max_num_rows: int,
        max_num_tokens: int,
        device: torch.device,
        queue: WriteQueue | None = None,
    ) -> None:
        """Sized by the two limits of a step and by the widths of the block tables. `queue`: see StagedTensor."""
        self._requests = requests
        self._max_num_rows, self._max_num_tokens = max_num_rows, max_num_tokens
        self.input_ids = torch.zeros(max_num_tokens, dtype=torch.int64, device=device)
        self.positions = torch.zeros(max_num_tokens, dtype=torch.int64, device=device)
        self.seq_lens = torch.zeros(max_num_rows, dtype=torch.int32, device=device)
        self.next_positions = torch.zeros(max_num_rows, dtype=torch.int64, device=device)
        self.turn = torch.zeros(1, dtype=torch.int32, device=device)
        # of the last two steps, which is as many as may be outstanding: written by the device, with no copy between
        self.results = torch.zeros((2, max_num_rows), dtype=torch.int64, pin_memory=device.type == "cuda")
        self.slot_mapping = torch.full((len(tables.tables), max_num_tokens), -1, dtype=torch.int64, device=device)
        self.block_tables = [
            torch.zeros((max_num_rows, table.data.shape[1]), dtype=torch.int32, device=device)
            for table in tables.tables
        ]
        self._groups = GroupTables(
            [table.data for table in tables.tables], self.block_tables, self.slot_mapping, tables.block_sizes
        )
        self.rows = StagedTensor(1, max_num_rows, torch.int64, device, queue)
        self.query_start = StagedTensor(1, max_num_rows + 1, torch.int32, device, queue)
        self.sample_of = StagedTensor(1, max_num_rows, torch.int32, device, queue)  # entry -> its sample, -1: none
        self.sampling = StagedTensor(1, max_num_rows, torch.int64, device, queue)  # [S] entries
        self.last_tokens = StagedTensor(1, max_num_rows, torch.int64, device, queue)  # [R] of each row, padding: of all
        self.last_start = StagedTensor(1, max_num_rows + 1, torch.int32, device, queue)  # query_start of these alone
        self._decode_rows = NO_INTS  # what the staged tensors hold, if a decode step is all they hold
        self._decode_width = 0

    @property
    def limits(self) -> tuple[int, int]:
        """Rows and tokens of the largest step."""
        return self._max_num_rows, self._max_num_tokens

    def stage(self, work: StepShape, num_rows: int) -> None:
        """Stage which rows run, padded to `num_rows`. A decode step of the same rows as the last one stages nothing.

        Raises ValueError for a step that is larger than what these buffers were made for.
        """
        if num_rows > self._max_num_rows or work.total_tokens > self._max_num_tokens:
            raise ValueError(
                f"a step of {num_rows} rows and {work.total_tokens} tokens exceeds max_num_seqs={self._max_num_rows} "
                f"or max_num_batched_tokens={self._max_num_tokens}"
            )
        if work.is_decode and num_rows == self._decode_width and work.rows is self._decode_rows:  # see BatchOrder
            return
        self._decode_rows, self._decode_width = (work.rows, num_rows) if work.is_decode else (NO_INTS, 0)
        num_real = work.num_rows
        rows = np.full(num_rows, self._requests.null_row, np.int64)
        rows[:num_real] = work.rows
        query_start = np.full(num_rows + 1, work.query_start[-1], np.int32)
        query_start[:num_real] = work.query_start[:-1]
        sample_of = np.full(num_rows, -1, np.int32)
        sample_of[work.sampling] = np.arange(len(work.sampling), dtype=np.int32)
        self.rows.stage(0, 0, rows)
        self.query_start.stage(0, 0, query_start)
        self.sample_of.stage(0, 0, sample_of)
        self.sampling.stage(0, 0, work.sampling)
        self.last_tokens.stage(0, 0, query_start[1:] - 1)
        self.last_start.stage(0, 0, np.arange(num_rows + 1).clip(max=num_real))

    def apply(self) -> None:
        """Bring the staged rows to the device."""
        staged = self.rows, self.query_start, self.sample_of, self.sampling, self.last_tokens, self.last_start
        for tensor in staged:
            tensor.apply()

    def gather(self, batch: Batch) -> None:
        """Fill the tensors of `batch`, a view of these buffers, from the rows. A graph may capture it."""
        gather_inputs(batch, self._requests.tensors, self._groups)

    def view(
        self,
        num_rows: int,
        num_tokens: int,
        max_query_len: int,
        max_seq_len: int,
        max_long: int = 0,
        *,
        every: bool = False,
    ) -> Batch:
        """The leading parts of the static tensors as a batch. every: hidden states of all tokens are asked for."""
        last_tokens = None
        if num_rows < num_tokens and not every:
            last_tokens = LastTokens(self.last_tokens.data[0, :num_rows], self.last_start.data[0, : num_rows + 1])
        return Batch(
            max_query_len=max_query_len,
            max_seq_len=max_seq_len,
            max_long=max_long,
            rows=self.rows.data[0, :num_rows],
            input_ids=self.input_ids[:num_tokens],
            positions=self.positions[:num_tokens],
            query_start=self.query_start.data[0, : num_rows + 1],
            seq_lens=self.seq_lens[:num_rows],
            next_positions=self.next_positions[:num_rows],
            turn=self.turn,
            results=self.results,
            slot_mapping=[slots[:num_tokens] for slots in self.slot_mapping],
            block_tables=[table[:num_rows] for table in self.block_tables],
            last_tokens=last_tokens,
        )
