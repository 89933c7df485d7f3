"""Runner: the one place where device work is issued.

Owns the order of a step: apply the plan to the persistent rows, build the batch, prepare attention, run the model,
sample, commit, report. Knows rows, not requests, and no policy. Invariant: state that outlives a step changes only in
`_apply` (from the plan) and in `_commit` (from the device's own results).
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from octavo.attention.base import forward_context
from octavo.device.batch import Batch, InputBuffers, build_batch
from octavo.device.block_table import BlockTables
from octavo.device.request_table import RequestTable
from octavo.kv_cache.pool import KVCachePool
from octavo.model_state.base import ModelState
from octavo.models.base import Model
from octavo.ops.inputs import IntArray, commit_tokens
from octavo.plan import NewRow, StepPlan, StepResult, TokenLogprobs
from octavo.sampling.logprobs import prompt_chunks, to_token_logprobs
from octavo.sampling.rows import SampleBatch
from octavo.sampling.sampler import FAILURES, Sampler

# Logits rows computed at a time for prompt log-probabilities: bounds their memory, changes no bit.
_PROMPT_LOGITS_ROWS = 256


@dataclasses.dataclass(slots=True)
class _PromptLogprobs:
    """What a row still owes of its prompt's log-probabilities."""

    next_position: int
    num_prompt: int
    num_logprobs: int


class Runner:
    """Executes plans on one device."""

    def __init__(
        self,
        model: Model,
        model_state: ModelState,
        pool: KVCachePool,
        requests: RequestTable,
        tables: BlockTables,
        buffers: InputBuffers,
        sampler: Sampler,
    ) -> None:
        """All parts share one device and one set of limits."""
        self._model, self._model_state, self._pool = model, model_state, pool
        self._requests, self._tables, self._buffers, self._sampler = requests, tables, buffers, sampler
        self._prompt_logprobs: dict[int, _PromptLogprobs] = {}

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step and give its results in the order of the batch."""
        self._apply(plan)
        if not len(plan.rows):
            return StepResult(step=plan.step)
        batch = build_batch(plan, self._requests, self._tables, self._buffers)
        with forward_context(self._model_state.prepare(batch)):
            hidden = self._model.forward(batch.input_ids, batch.positions)
        prompt_logprobs = self._collect_prompt_logprobs(batch, hidden) if self._prompt_logprobs else {}
        return self._sample(plan, batch, hidden, prompt_logprobs)

    def _apply(self, plan: StepPlan) -> None:
        for row in plan.finished_rows:
            self._sampler.remove(row)
            self._prompt_logprobs.pop(row, None)
        for new in plan.new_rows:
            self._add(new)
        self._tables.extend(plan.new_blocks)
        self._requests.apply()
        self._tables.apply()
        self._sampler.apply_staged()
        self._pool.zero_blocks(plan.zero_blocks)

    def _add(self, new: NewRow) -> None:
        self._requests.add(new)
        self._tables.append(new.row, new.block_ids, overwrite=True)
        self._sampler.add(new)
        self._model_state.add(new)
        if new.prompt_logprobs_start >= 0:
            wanted = new.sampling.prompt_logprobs
            assert wanted is not None, "a row that owes prompt log-probabilities was asked for them"
            self._prompt_logprobs[new.row] = _PromptLogprobs(new.prompt_logprobs_start, new.num_prompt, wanted)

    def _sample(
        self, plan: StepPlan, batch: Batch, hidden: torch.Tensor, prompt_logprobs: dict[int, list[TokenLogprobs]]
    ) -> StepResult:
        logprobs: dict[int, list[TokenLogprobs]] = {}
        failed: dict[int, str] = {}
        sampling = batch.sampling
        sampled_rows = batch.rows[sampling]
        sampled = torch.empty(0, dtype=torch.int64)
        if len(sampling):
            output = self._sampler(self._logits(batch, hidden), self._sample_batch(batch, sampled_rows))
            sampled = output.tokens
            for place, entry_logprobs in to_token_logprobs(output.logprobs).items():
                logprobs[int(sampled_rows[place])] = [entry_logprobs]
            for place in output.failed.nonzero().flatten().tolist() if output.failed.any() else ():
                failed[int(sampled_rows[place])] = FAILURES[int(output.failed[place])]
        self._commit(batch, sampled_rows, sampled)
        return StepResult(
            step=plan.step,
            rows=sampled_rows,
            tokens=sampled.numpy()[:, None],
            num_sampled=np.ones(len(sampled_rows), np.int64),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            failed=failed,
        )

    def _logits(self, batch: Batch, hidden: torch.Tensor) -> torch.Tensor:
        if len(batch.sampling) == batch.total_tokens:  # every token's logits are wanted: no gather
            return self._model.logits(hidden)
        return self._model.logits(hidden[torch.from_numpy(batch.logits_indices)])

    def _sample_batch(self, batch: Batch, sampled_rows: IntArray) -> SampleBatch:
        positions = batch.seq_lens[torch.from_numpy(batch.sampling)].to(torch.int64)
        rows = torch.from_numpy(sampled_rows)
        return SampleBatch(rows=rows, positions=positions, rows_np=sampled_rows, max_position=batch.max_seq_len)

    def _commit(self, batch: Batch, sampled_rows: IntArray, tokens: torch.Tensor) -> None:
        requests = self._requests
        commit_tokens(
            batch.rows, batch.num_tokens, sampled_rows, tokens,
            requests.token_ids.data, requests.total_len.data, requests.num_computed.data,
        )  # fmt: skip

    def _collect_prompt_logprobs(self, batch: Batch, hidden: torch.Tensor) -> dict[int, list[TokenLogprobs]]:
        """The hidden state at position p scores the prompt's token p + 1."""
        collected: dict[int, list[TokenLogprobs]] = {}
        query_start = batch.query_start.numpy()
        for entry, row in enumerate(batch.rows.tolist()):
            owed = self._prompt_logprobs.get(row)
            if owed is None:
                continue
            end = int(batch.seq_lens[entry])
            first = end - int(batch.num_tokens[entry])
            start, stop = max(owed.next_position - 1, first), min(end, owed.num_prompt - 1)
            if start < stop:
                offset = int(query_start[entry]) - first
                targets = self._requests.token_ids.data[row, start + 1 : stop + 1].to(torch.int64)
                collected[row] = self._score(hidden[start + offset : stop + offset], targets, owed.num_logprobs)
                owed.next_position = stop + 1
            if owed.next_position >= owed.num_prompt:
                del self._prompt_logprobs[row]
        return collected

    def _score(self, hidden: torch.Tensor, targets: torch.Tensor, num_logprobs: int) -> list[TokenLogprobs]:
        entries: list[TokenLogprobs] = []
        for chunk in prompt_chunks(len(targets), max_rows=_PROMPT_LOGITS_ROWS):
            entries += self._sampler.prompt_logprobs(self._model.logits(hidden[chunk]), targets[chunk], num_logprobs)
        return entries
