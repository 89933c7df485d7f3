"""Sampler: logits to tokens, and to log-probabilities where asked.

Owns the order of the stages, the numbers that the drawing kernel needs (temperature, seed), and which rows any stage
changes. Each feature is a class in a file of its own, which keeps its own rows. Does not know requests beyond NewRow,
blocks or the model. Invariants: a row's token and log-probabilities depend on its logits, its tokens, its parameters
and its seed, never on other rows; `__call__` waits for nothing; a row without features meets the drawing kernel, its
NaN check and its cuts, and nothing else.
"""

from __future__ import annotations

from typing import Protocol

import msgspec
import numpy as np
import torch

from octavo.device.staging import Queue, StagedTensor
from octavo.grammar.compiler import NO_GRAMMARS, Grammars
from octavo.ops.sampling import allow_bits_, cut_, draw, nan_rows, token_logprobs, top_logprobs
from octavo.ops.sampling.truncation import FEW
from octavo.plan import NO_INTS, IntArray, NewRow, StepLimits
from octavo.request.outputs import NO_TOKEN, TOO_COMPLEX
from octavo.sampling import logprobs
from octavo.sampling.grammar import PATIENCE, GrammarMask
from octavo.sampling.logprobs import GroupLogprobs, LogprobGroup, LogprobRows
from octavo.sampling.masks import AllowedTokens, BadWords, LogitBias, MinTokens
from octavo.sampling.penalties import Penalties
from octavo.sampling.rows import RowSet, SampleBatch
from octavo.sampling.support import SupportRows, Supports
from octavo.sampling.truncation import Truncation

# what SamplerOutput.failed holds, in StepResult's words; a held row has drawn nothing, which is no failure
FAILURES = ("", "nan_logits", NO_TOKEN, "", TOO_COMPLEX)


class Feature(Protocol):
    """What changes logits for the rows that ask."""

    def add(self, new: NewRow) -> bool:
        """Stage a row. Returns whether it asks for this feature."""

    def remove(self, row: int) -> None:
        """Forget a row, whether it asked or not."""

    def apply_staged(self) -> None:
        """Bring staged rows to the device."""

    def __call__(self, logits: torch.Tensor, batch: SampleBatch) -> None:
        """Change the logits ([S, V] float32, contiguous) of the rows that ask, in place, and no others."""


class SamplerOutput(msgspec.Struct, frozen=True):
    """One step's choice for S logits rows."""

    tokens: torch.Tensor  # [S] int64, always within the vocabulary
    failed: torch.Tensor  # [S] uint8: 0, or why the token means nothing, an index into FAILURES
    logprobs: list[GroupLogprobs]  # empty where no row asked; see to_token_logprobs
    supports: list[Supports] = []  # of rows that asked
    held: IntArray = NO_INTS  # rows that draw the same place again, later


class Sampler:
    """Samples one token per logits row."""

    def __init__(
        self,
        limits: StepLimits,
        *,
        vocab_size: int,
        device: torch.device,
        tokens: torch.Tensor,
        prompt_lens: torch.Tensor,
        logprobs_mode: str = "raw_logprobs",
        max_logprobs: int = 20,
        grammars: Grammars = NO_GRAMMARS,
        queue: Queue,
        mask_patience: float = PATIENCE,
    ) -> None:
        """`tokens` and `prompt_lens` are the request table's: they are read, never written.

        tokens: [max_num_rows + 1, max_model_len] int32, a row's prompt, its committed output, then drafts if there are;
        whatever lies before a batch's position must be there. prompt_lens: [max_num_rows + 1] int32. `vocab_size`:
        the logits' width. `max_logprobs`: -1 means the vocabulary. `grammars` compiles the forms that rows ask for.
        `queue`: see StagedTensor; `mask_patience`: see GrammarMask. Raises ValueError on an unknown `logprobs_mode`.
        """
        if logprobs_mode not in logprobs.MODES:
            raise ValueError(f"logprobs_mode {logprobs_mode!r} is unknown; known: {', '.join(logprobs.MODES)}")
        max_num_rows = limits.max_num_rows + 1  # the null row too
        assert tokens.shape == (max_num_rows, limits.max_model_len), (
            "the request table has another shape than the sampler"
        )
        self._raw = logprobs_mode.startswith("raw_")
        self._as_logits = logprobs_mode.endswith("_logits")
        self._vocab_size = vocab_size
        # what the drawing kernel divides by: 0 for greedy rows, 1 for those that are divided before they are cut
        self._temperature = StagedTensor(max_num_rows, 0, torch.float32, device, queue)
        self._seed = StagedTensor(max_num_rows, 0, torch.int64, device, queue)
        self._changed = RowSet(max_num_rows, device)  # rows with any of the stages
        self._logprobs = LogprobRows(max_num_rows, vocab_size, max_logprobs, device)
        self._supports = SupportRows(max_num_rows, vocab_size, device)
        self._truncation = Truncation(max_num_rows, vocab_size, device, queue)
        self._grammar = GrammarMask(max_num_rows, vocab_size, device, tokens, grammars, mask_patience)
        # the list is the order
        self._stages: tuple[Feature, ...] = (
            LogitBias(max_num_rows, vocab_size, device),
            AllowedTokens(max_num_rows, vocab_size, device),
            self._grammar,
            MinTokens(max_num_rows, vocab_size, device),
            Penalties(max_num_rows, vocab_size, device, tokens, prompt_lens, queue),
            BadWords(max_num_rows, vocab_size, device, tokens, prompt_lens),
        )

    def add(self, *new: NewRow) -> None:
        """Stage rows, new or resumed. What they held before is forgotten."""
        temperatures = []
        for one in new:
            self.remove(one.row)
            uses = [stage.add(one) for stage in self._stages]
            if any(uses):
                self._changed.add(one.row)
            temperatures.append(1.0 if self._truncation.add(one) else one.sampling.temperature)
            self._logprobs.add(one)
            self._supports.add(one)
        rows = np.array([one.row for one in new])
        self._temperature.stage_each(rows, 0, np.array(temperatures))
        self._seed.stage_each(rows, 0, np.array([as_int64(one.seed) for one in new]))

    def remove(self, row: int) -> None:
        """Forget `row`: it finished or was preempted."""
        if self._changed.discard(row):
            for stage in self._stages:
                stage.remove(row)
        self._truncation.remove(row)
        self._logprobs.remove(row)
        self._supports.remove(row)

    def apply_staged(self) -> None:
        """Bring the lists of rows to the device: once per step, before `__call__`. The queue brings all else."""
        if len(self._changed):
            for stage in self._stages:
                stage.apply_staged()

    def is_plain(self, rows_np: IntArray) -> bool:
        """Whether `draw` is all that these rows need: nothing changes or cuts them, none wants log-probabilities."""
        is_changed = self._changed.has_any(rows_np) or self._truncation.select(rows_np) is not None
        return not (is_changed or self._logprobs.wanted(rows_np) or self._supports.wanted(rows_np))

    @property
    def tables(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Temperatures (float32) and seeds (int64) of all table rows: what `draw` takes of plain ones."""
        return self._temperature.data, self._seed.data

    def draw(
        self, logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, *, ahead: int = 0, ready: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(tokens [S] int64, failed [S] uint8) of plain rows. A graph may capture it; the logits stay as they are.

        logits: [S, vocab_size] float32, contiguous; rows, positions: as in SampleBatch, or so many places before.
        ready: whether they were there before the forward pass.
        """
        return draw(logits, rows, *self.tables, positions, ahead=ahead, ready=ready)

    def __call__(self, logits: torch.Tensor, batch: SampleBatch) -> SamplerOutput:
        """Sample from `logits` ([S, vocab_size] float32, contiguous), which may be overwritten."""
        assert logits.is_contiguous() and logits.shape[1] == self._vocab_size, "logits must be [S, vocab_size]"
        groups = self._logprobs.groups(batch)
        changed = self._changed.select(batch.rows_np)
        not_a_number = None if changed is None else nan_rows(logits)  # before a mask can hide it
        untouched: dict[int, torch.Tensor] = {}
        if changed is not None:
            if self._raw and groups:
                users = set(changed.at_np.tolist())
                untouched = {
                    index: logits.index_select(0, group.at)
                    for index, group in enumerate(groups)
                    if not users.isdisjoint(group.at_np.tolist())
                }
            for stage in self._stages:
                stage(logits, batch)
        truncation = self._truncation.select(batch.rows_np)
        supports = self._supports.of(logits, batch, truncation)
        if truncation is not None and groups and not self._raw:  # log-probabilities of what is left
            cut_(logits, batch.rows, truncation)
            truncation = None
        tokens, failed = draw(logits, batch.rows, *self.tables, batch.positions, truncation)
        if changed is not None and not_a_number is not None:
            self._grammar.drawn(tokens)
            failed = not_a_number.view(torch.uint8)
            # only where all of a row is forbidden can the choice be forbidden
            choice = logits.view(-1).index_select(0, changed.at * self._vocab_size + tokens.index_select(0, changed.at))
            blocked = torch.zeros_like(failed).index_copy_(0, changed.at, (choice == -torch.inf).to(torch.uint8) * 2)
            failed = self._grammar.judge(torch.where(failed == 0, blocked, failed))
        found = []
        for index, group in enumerate(groups):
            own = untouched.get(index)
            if own is None:
                own = self._group_logits(group, logits, batch)
            mine = tokens.index_select(0, group.at)
            found.append(logprobs.compute(group, own, mine, as_logits=self._as_logits))
        held = self._grammar.held if changed is not None else NO_INTS
        return SamplerOutput(tokens, failed, found, supports, held)

    def proposed(self, total_len: torch.Tensor, most_drafts: int) -> None:
        """Up to `most_drafts` drafts were written behind the rows' known tokens, total_len [max_num_rows + 1] int32."""
        self._grammar.proposed(total_len, most_drafts)

    def rehearse(self, logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor) -> None:
        """Issue all that a call may launch, while nothing is launched: see `octavo.worker.compile_ahead`."""
        num_rows, vocab_size = logits.shape
        ids, words = rows.new_zeros(num_rows), rows.new_zeros((num_rows, -(-vocab_size // 32)), dtype=torch.int32)
        draw(logits, rows, *self.tables, positions)
        for truncation in self._truncation.ways:
            draw(logits, rows, *self.tables, positions, truncation)
            cut_(logits, rows, truncation)
        token_logprobs(logits, ids)
        top_logprobs(logits, 1)
        top_logprobs(logits[:1], FEW + 1)  # of many, the keys of whole rows
        allow_bits_(logits, ids, words)

    def _group_logits(self, group: LogprobGroup, logits: torch.Tensor, batch: SampleBatch) -> torch.Tensor:
        """The logits of a group that its log-probabilities are made of: as they are, or as they are drawn from."""
        own = logits if len(group.at_np) == len(logits) else logits.index_select(0, group.at)
        if self._raw:
            return own
        divisor = self._temperature.data.index_select(0, batch.rows.index_select(0, group.at))
        return own / torch.where(divisor == 0, 1.0, divisor)[:, None]

    def prompt_logprobs(
        self, logits: torch.Tensor, target_ids: torch.Tensor, num_top: int, temperature: float = 1.0
    ) -> GroupLogprobs:
        """One line per prompt position, see logprobs.prompt_logprobs. Prompts are processed by `temperature` alone."""
        if temperature != 1.0:  # by a tensor, as rows that draw are: a GPU multiplies by a number's reciprocal
            logits = logits / logits.new_full((1, 1), temperature)
        return logprobs.prompt_logprobs(logits, target_ids, num_top, as_logits=self._as_logits)


def as_int64(seed: int) -> int:
    """The low 64 bits of `seed`, read as a signed word: the kernels take the bit pattern."""
    seed &= (1 << 64) - 1
    return seed - (1 << 64) if seed >> 63 else seed
