"""Structured outputs: a row's output stays within the form that its request asks for, once its reasoning has ended.

Owns one matcher per row that asks, and forbids the tokens that its grammar does not allow next. Does not know how
forms are compiled (`octavo.grammar.compiler`), where reasoning ends (`octavo.sampling.thinking`), nor when a request
ends: where its grammar is complete a row may sample EOS, and where nothing else can follow it must. Invariants: what is
forbidden is a function of the request and of the row's output before the position, so preemption, replay and steps in
flight need no care, and an allowed token keeps its bits; no form is compiled within a step, and rows that ask for no
form wait for masks for a twentieth of a step's time at most.

A row with drafts has several lines of logits, each with the mask behind the drafts before it. On a GPU the drafts are
copied to the host as soon as they are written, beside the tokens that count, and waited for as drawn tokens are.

Masks are made beside the steps (`mask_jobs`). On CPU the next one is begun as soon as a token is drawn. On a GPU each
drawn token is copied to the host as soon as it is there, and the next call waits for that copy alone: the forward pass
issued since then runs meanwhile. A row whose mask is not there in time is held: it draws nothing in this step, and the
same token's place again in a later one. Where every row of a step would be held, the step waits for the first mask.
"""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Iterator

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from octavo.device.staging import PinnedRing
from octavo.grammar.compiler import Grammars
from octavo.ops.copying import to_device
from octavo.ops.sampling import allow_bits_
from octavo.plan import NO_INTS, IntArray, NewRow
from octavo.sampling.mask_jobs import MaskJob, MaskLanes
from octavo.sampling.rows import RowSet, SampleBatch, Selection
from octavo.sampling.thinking import AfterThinking, Anything, Form
from octavo.sampling.told import ToldTokens

HELD, TOO_COMPLEX = 3, 4  # places in `sampler.FAILURES`
PATIENCE = 0.05  # of a step's time that it waits for masks
_FIRST_WAIT = 0.02  # seconds for the first mask, where no row could go on without one
_POLL_SECONDS = 0.0002  # between two looks at the GPU
_USUAL_SECONDS = 0.0002  # that a mask may take of a step of rows that all ask, unless its form's last ones were slow
_NUM_PACES = 16  # steps of which the quickest tells how long a step takes
_INF = float("inf")


class _Row(msgspec.Struct, eq=False):
    """A row that asks. `tokens` holds what it has said, on a GPU as far as the host knows."""

    matcher: Form
    start: int  # where its output begins in the request table
    tokens: list[int]
    lock: threading.Lock
    job: MaskJob | None = None  # the latest
    drafts: list[int] = []  # on a GPU: behind what it has said


class _Drawn(msgspec.Struct, frozen=True):
    """Tokens on their way to the host, and the rows that they continue."""

    rows: list[tuple[int, _Row]]
    tokens: NDArray[np.int64]
    event: torch.cuda.Event


class _Current(msgspec.Struct, frozen=True):
    """The rows of this step that ask, one entry per line of their logits."""

    selection: Selection
    numbers: IntArray  # the rows' numbers
    rows: list[_Row]
    jobs: list[MaskJob]
    codes: NDArray[np.uint8]  # 0, HELD or TOO_COMPLEX
    has_others: bool  # rows that ask for nothing


class GrammarMask:
    """Forbids what the grammar of a row does not allow."""

    def __init__(
        self,
        max_num_rows: int,
        vocab_size: int,
        device: torch.device,
        tokens: torch.Tensor,
        grammars: Grammars,
        patience: float = PATIENCE,
    ) -> None:
        """`tokens` is the request table's, see Sampler. `patience`: in step times; inf: no row is ever held."""
        self._rows = RowSet(max_num_rows, device)
        self._vocab_size = vocab_size
        self._device = device
        self._tokens_np = tokens.numpy() if device.type == "cpu" else None
        self._ring = None if device.type == "cpu" else PinnedRing()
        self._grammars = grammars
        eight = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
        self._bounds = np.where(eight, _INF, -_INF).astype(np.float32)  # [256, 8]: of a byte of eight tokens' bits
        self._of_row: dict[int, _Row] = {}
        self._tokens = tokens
        self._told = None if self._ring is None else ToldTokens(tokens, self._ring)
        self._verifies = False  # somebody proposes drafts: what is drawn need not be what counts
        self._told_rows: list[_Row] = []  # of whom the copy tells
        self._drawn: list[_Drawn] = []  # at most one, on a GPU
        self._current: _Current | None = None
        self._lanes = MaskLanes()
        self._patience = patience
        self._paces: collections.deque[float] = collections.deque([0.001], maxlen=_NUM_PACES)
        self._ended_at = 0.0  # the last call

    def add(self, new: NewRow) -> bool:
        """Start a row's matcher. Returns whether it asks for a form, or for an end of its reasoning."""
        structured, thinking = new.sampling.structured_outputs, new.sampling.thinking
        if structured is None and thinking is None:
            return False
        form: Form = Anything() if structured is None else self._grammars.matcher(structured)
        if thinking is not None:
            budget = new.sampling.thinking_token_budget
            form = AfterThinking(self._grammars, thinking, budget, form)
        said = list(map(int, new.token_ids[new.num_prompt :]))
        row = _Row(form, new.num_prompt, said, threading.Lock())
        self._of_row[new.row] = row
        self._rows.add(new.row)
        self._job(row, np.array(said, np.int32))  # the first mask is made while the prompt is computed
        return True

    def remove(self, row: int) -> None:
        """Forget `row`."""
        self._rows.discard(row)
        gone = self._of_row.pop(row, None)
        if gone is not None and gone.job is not None:
            gone.job.cancelled = True

    def apply_staged(self) -> None:
        """Nothing is staged: a matcher follows the row's tokens."""

    def __call__(self, logits: torch.Tensor, batch: SampleBatch) -> None:
        """Change `logits` ([S, vocab_size] float32, contiguous) in place. A row without any allowed token gets -inf."""
        self._current = None
        selection = self._rows.select(batch.rows_np)
        if selection is None:
            return
        began = time.perf_counter()
        self._paces.append(began - self._ended_at)
        numbers = batch.rows_np[selection.at_np]
        rows = [self._of_row[row] for row in numbers.tolist()]
        self._verifies |= batch.has_drafts
        tokens_np = self._tokens_np
        if tokens_np is None:
            self._settle()
            jobs = [self._job(row, output) for row, output in self._outputs(numbers.tolist(), rows)]
        else:
            positions = batch.positions.index_select(0, selection.at).tolist()
            places = zip(rows, numbers.tolist(), positions, strict=True)
            jobs = [self._job(row, tokens_np[at, row.start : position]) for row, at, position in places]
        has_others = len(jobs) < len(batch.rows_np)
        self._wait(jobs, has_others=has_others)
        codes = np.zeros(len(jobs), np.uint8)
        bits = np.full((len(jobs), self._grammars.num_words), -1, np.int32)
        for place, job in enumerate(jobs):
            if not job.is_done:
                codes[place] = HELD
            elif job.met_limit:
                codes[place] = TOO_COMPLEX
            else:
                bits[place] = job.bits
        self._current = _Current(selection, numbers, rows, jobs, codes, has_others)
        if self._tokens_np is None:
            allow_bits_(logits, selection.at, to_device(bits, self._device))
        else:
            self._hide_on_cpu(logits, selection, bits)
        self._ended_at = time.perf_counter()

    @staticmethod
    def _outputs(numbers: list[int], rows: list[_Row]) -> Iterator[tuple[_Row, NDArray[np.int32]]]:
        """What each line of logits stands behind: of a row what it has said, and with each line a draft more."""
        num_lines: dict[int, int] = {}
        for number, row in zip(numbers, rows, strict=True):
            num_drafts = num_lines[number] = num_lines.get(number, -1) + 1
            assert num_drafts <= len(row.drafts), "drafts are verified that nobody has written"
            yield row, np.array(row.tokens + row.drafts[:num_drafts], np.int32)

    def _job(self, row: _Row, output: NDArray[np.int32]) -> MaskJob:
        """The mask behind `output`, begun now unless it was begun before."""
        job = row.job
        if job is None or not np.array_equal(job.output, output):
            job = row.job = MaskJob(row.matcher, row.lock, output.astype(np.int32), self._grammars.num_words)
            self._lanes.submit(job)
        return job

    def _wait(self, jobs: list[MaskJob], *, has_others: bool) -> None:
        """For masks, as long as that costs the other rows no more than they are to bear."""
        pending = [job for job in jobs if not job.is_done]
        if not pending:
            return
        if self._ring is not None:  # while the GPU computes logits, waiting costs nothing
            ahead = torch.cuda.Event()
            ahead.record()
            while pending and not ahead.query():
                self._lanes.wait(pending, len(pending), _POLL_SECONDS)
                pending = [job for job in pending if not job.is_done]
        if not has_others and len(pending) == len(jobs):
            self._lanes.wait(pending, 1, _FIRST_WAIT)
        seconds = self._patience * min(self._paces)
        if not has_others:
            seconds += _USUAL_SECONDS * sum(not job.matcher.is_slow for job in pending)
        self._lanes.wait(pending, len(pending), min(seconds, threading.TIMEOUT_MAX))

    def _hide_on_cpu(self, logits: torch.Tensor, selection: Selection, bits: NDArray[np.int32]) -> None:
        # numpy: tensors of this size would wake PyTorch's threads, which then compete with those of the operators;
        # the minimum with +inf keeps every bit of a cell
        bounds = self._bounds[bits.view(np.uint8)].reshape(len(bits), -1)[:, : self._vocab_size]
        logits_np = logits.numpy()
        for at, bound in zip(selection.at_np, bounds, strict=True):
            np.minimum(logits_np[at], bound, out=logits_np[at])

    def judge(self, failed: torch.Tensor) -> torch.Tensor:
        """`failed` ([S] uint8, see SamplerOutput) with the rows that are held or cannot go on, where it is 0."""
        current = self._current
        if current is None or not current.codes.any():
            return failed
        own = torch.zeros_like(failed).index_copy_(0, current.selection.at, to_device(current.codes, self._device))
        return torch.where(failed == 0, own, failed)

    @property
    def held(self) -> IntArray:
        """The rows that the last call held."""
        current = self._current
        if current is None:
            return NO_INTS
        return current.numbers[current.codes == HELD]

    def drawn(self, tokens: torch.Tensor) -> None:
        """Take note of what was drawn after the last call: `tokens` [S] int64 are the rows' next ones."""
        current = self._current
        if current is None:
            return
        said = (current.codes == 0).nonzero()[0]
        if self._verifies:  # what of it counts is not known yet
            return
        if self._ring is None:
            drawn = tokens.numpy()[current.selection.at_np]
            for place in said.tolist():  # begun now, unless all wait for all: then they are quicker undisturbed
                row, job = current.rows[place], current.jobs[place]
                if current.has_others or job.matcher.is_slow:
                    self._job(row, np.append(job.output, drawn[place]).astype(np.int32))
            return
        if not len(said):
            return
        at = current.selection.at
        if len(said) < len(current.rows):
            at = at.index_select(0, to_device(said, self._device))
        slot, event = self._ring.take(2 * len(said))
        host = slot[: 2 * len(said)].view(torch.int64)
        host.copy_(tokens.index_select(0, at), non_blocking=True)
        event.record()
        rows = current.numbers[said].tolist()
        self._drawn.append(_Drawn([(row, self._of_row[row]) for row in rows], host.numpy(), event))

    def proposed(self, total_len: torch.Tensor, most_drafts: int) -> None:
        """Drafts were written behind the rows' known tokens, of which there are total_len [max_num_rows + 1] int32."""
        self._verifies = True
        self._drawn.clear()  # all that is known is told of
        if self._told is not None and self._of_row and self._current is not None:
            self._told_rows = list(self._of_row.values())
            self._told.begin(list(self._of_row), total_len, most_drafts)

    def _settle(self) -> None:
        """Wait for the tokens on their way, and append them to the rows that still are who they were."""
        if self._told is not None:
            for was, line in zip(self._told_rows, self._told.take(), strict=False):
                if self._of_row.get(line.number) is not was:
                    continue
                lacking, was.drafts = line.total - was.start - len(was.tokens), line.drafts
                if lacking > len(line.last):  # nobody has asked for so long: this waits for the step
                    was.tokens = self._tokens[line.number, was.start : line.total].tolist()
                elif lacking > 0:
                    was.tokens += line.last[-lacking:]
        for drawn in self._drawn:
            drawn.event.synchronize()
            for (row, was), token in zip(drawn.rows, drawn.tokens.tolist(), strict=True):
                if self._of_row.get(row) is was:
                    was.tokens.append(token)
        self._drawn.clear()
