"""Runner: the one place where device work is issued.

Owns the order of a step: apply the plan to the persistent rows, lay out the batch, prepare attention, run the model,
sample, commit, report; and which of it a graph replays. Knows rows, not requests, and no policy. Invariants: state that
outlives a step changes only in `_apply` (from the plan) and by `commit_tokens` (from the device's own results); nothing
between `issue` and `PendingStep.result` waits for the device, but for features that say so.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import numpy as np
import torch

from octavo.attention.base import ForwardContext, forward_context
from octavo.attention.mods import ModError
from octavo.cache.pool import KVCachePool
from octavo.device.batch import Batch, BatchOrder, InputBuffers, StepShape
from octavo.device.block_table import BlockTables
from octavo.device.graphs import EAGER, GraphKey, GraphPool
from octavo.device.request_table import RequestTable
from octavo.device.staging import Queue
from octavo.layers.expert_recorder import ExpertRecorder
from octavo.model_state.base import ModelState
from octavo.models.base import Model
from octavo.ops.arrivals import NO_ARRIVALS, NO_GATES, Arrivals, Gates
from octavo.ops.cache_write.zero_blocks import zero_blocks
from octavo.ops.gemm import load_kernels
from octavo.ops.inputs import commit_drafts, commit_tokens
from octavo.plan import NO_INTS, IntArray, NewRow, StepPlan
from octavo.request.outputs import MOD_FAILED
from octavo.sampling.grammar import HELD
from octavo.sampling.logprobs import GroupLogprobs
from octavo.sampling.prompt_scores import ROWS_AT_A_TIME, PromptScores
from octavo.sampling.rows import SampleBatch
from octavo.sampling.sampler import Sampler
from octavo.speculate.drafter import Drafter
from octavo.worker.compile_ahead import MOST_DRAFTED, Shape, compile_ahead
from octavo.worker.observe_logits import LogitsObserver
from octavo.worker.results import NO_CHOSEN, NO_RUNS, NOTHING_TOLD, PendingStep, Runs, Told, chosen_experts


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
        graphs: GraphPool,
        *,
        writes: Queue,
        drafter: Drafter,
        kept_experts: tuple[int, int] = (0, 0),
    ) -> None:
        """All parts share one device and one set of limits. writes: to their tensors. kept_experts: see Resolved."""
        self._writes, self._drafter = writes, drafter
        self._taps_last = drafter.reads_last(model.arch.num_layers)  # a last layer then gives all tokens
        assert isinstance(model, torch.nn.Module), "models are trees of layers"
        self._experts = ExpertRecorder(model, kept_experts, buffers.limits.max_num_tokens, buffers.turn.device)
        self.model, self._model_state, self._pool = model, model_state, pool
        self._requests, self._tables, self._buffers, self._sampler = requests, tables, buffers, sampler
        self._graphs, self.gates, self._max_model_len = graphs, graphs.gates, buffers.limits.max_model_len
        self._lay_out = BatchOrder(requests)
        self._padded: dict[GraphKey, Batch] = {}  # what the graphs read and fill
        self._turn = 0  # which of the two results the last step fills
        self._events = [torch.cuda.Event() for _ in range(2)] if buffers.turn.is_cuda else [None, None]  # of the turns
        self._prompts = PromptScores(sampler, model.logits, requests.token_ids.data)
        self._observers: list[LogitsObserver] = []
        self._arrivals = NO_ARRIVALS  # of the step at hand

    def enter_thread(self) -> None:
        """Let the calling thread issue steps: what a GPU's driver is called with is a thread's own."""
        if self._buffers.turn.is_cuda:
            torch.cuda.current_stream(self._buffers.turn.device).query()

    @property
    def cache(self) -> torch.Tensor:
        """The memory of all blocks, as one tensor."""
        return self._pool.buffer

    @property
    def cache_blocks(self) -> torch.Tensor:
        """The same bytes by blocks, uint8 [pages, num_blocks, bytes of a page]."""
        return self._pool.data

    @property
    def cache_views(self) -> list[torch.Tensor]:
        """The same bytes by layers, [kernel blocks, heads, tokens, channels] each."""
        return self._pool.views

    def observe(self, observer: LogitsObserver) -> None:
        """Show the logits of every step to `observer`, from now on."""
        self._observers.append(observer)

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture the graphs that a start needs, or all where kernels are not compiled yet. Before the first step."""
        self._graphs.capture_first(
            self._record,
            functools.partial(self._record, warmup_only=True),
            reserve=lambda key: self._prepare(self._batch_of(key)),
            load=self._load,
            lighten=self._drafter.leave_graphs,
        )
        self._buffers.turn.zero_()
        if not self._graphs.missing_keys():
            return
        from octavo.ops.compile import launch  # needs Triton

        while launch.has_compiled() and self.capture_next():  # no step is to wait for what else is to be compiled
            pass

    @torch.inference_mode()
    def compile_ahead(self, told: Callable[[int, int, str], object]) -> int:
        """Compile what steps launch, side by side, before the first; how many kernels were missing. See that module."""
        return compile_ahead(self, told, self._buffers.limits)

    def graph_keys(self) -> list[GraphKey]:
        """See `compile_ahead.Rehearser`."""
        return list(dict.fromkeys([*self._graphs.first_keys(), *self._graphs.missing_keys()]))

    def rehearse(self, key: GraphKey) -> object:
        """See `compile_ahead.Rehearser`."""
        return self._record(key, warmup_only=True)

    def rehearse_writes(self) -> object:
        """See `compile_ahead.Rehearser`."""
        from octavo.ops.inputs.staged_write_gpu import WORDS_PER_RUN, RunWriter  # needs Triton

        return RunWriter()(torch.zeros(2 * WORDS_PER_RUN, dtype=torch.int32, pin_memory=True), 1, 1)

    def rehearse_step(self, shape: Shape) -> None:
        """See `compile_ahead.Rehearser`."""
        rows, tokens, query_len, seq_len, every, num_drafts = shape
        work = shape.drafts
        batch = self._buffers.view(rows, tokens, query_len, seq_len, rows, every=every, drafts=work)
        hidden = self._forward(batch, for_capture=False, warmup_only=True)
        logits = self.model.logits(hidden[: rows * (1 + num_drafts)])
        of_rows, positions = batch.rows, batch.next_positions
        if work is not None:
            given = self._buffers.drafted(work, batch)
            of_rows, positions = given.rows, given.positions
        self._sampler.rehearse(logits, of_rows, positions)
        if every:
            scored = hidden[:ROWS_AT_A_TIME]
            self._prompts.score(scored, batch.positions[: len(scored)], 1)
        drawn = self._sampler.draw(logits, of_rows, positions)
        if work is not None:
            self._commit_drafts(batch, *drawn)
        else:
            for again in (False, True):
                self._commit(batch, *drawn, again=again)
        if self._drafter.is_on:
            depth = min(self._buffers.limits.max_num_drafts, max(MOST_DRAFTED // rows, 1))
            self._drafter.propose(batch, self._sample_of(batch), depth, np.full(rows, seq_len))

    @property
    def num_uncaptured(self) -> int:
        """Graphs that the start has left."""
        return len(self._graphs.missing_keys())

    @torch.inference_mode()
    def capture_next(self) -> bool:
        """Capture one of the graphs that the start has left; False if there is none. Between two steps."""
        for key in self._graphs.missing_keys():
            self._graphs.has(key, self._record)
            return True
        return False

    def computes(self) -> bool:
        """Whether a step runs on a GPU now. Any thread may ask."""
        return not all(event is None or event.query() for event in self._events)

    def issue(self, plan: StepPlan, arrivals: Arrivals = NO_ARRIVALS) -> PendingStep:
        """Issue one step. On a GPU it runs on while the caller goes on; steps run in the order of their issue.

        arrivals: blocks that come while it runs. Raises RuntimeError where the device has no memory left for it.
        """
        self._arrivals = arrivals
        try:
            with torch.inference_mode():
                return self._issue(plan)
        except torch.OutOfMemoryError as error:
            raise RuntimeError(
                f"the activations of a step of {int(plan.num_tokens.sum())} tokens in {len(plan.rows)} rows do not fit "
                "the GPU beside weights, graphs and cache: lower gpu_memory_utilization or max_num_batched_tokens"
            ) from error

    def _issue(self, plan: StepPlan) -> PendingStep:
        self._apply(plan)
        if not len(plan.rows):
            self._bring()
            return PendingStep(plan.step, self._buffers.results[0, :0])
        return self._issue_laid_out(plan, self._lay_out(plan))

    def _issue_laid_out(self, plan: StepPlan, work: StepShape) -> PendingStep:
        try:
            return self._try(plan, work)
        except ModError as error:
            if work.has_drafts:  # a request may end before the place at which a mod fails: drafts are no reason to fail
                return self._issue_laid_out(plan, work.without_drafts())
            return self._issue_sound(plan, work, error)

    def _try(
        self, plan: StepPlan, work: StepShape, failed: Mapping[int, str] | None = None, unsampled: IntArray = NO_INTS
    ) -> PendingStep:
        """`_issue_work`, which a ModError undoes. That keeps nothing of the step, behind which others are tried."""
        try:
            return self._issue_work(plan, work, failed, unsampled)
        except ModError as error:
            told = str(error)
        self._take_back_turn()
        raise ModError(told)

    def _issue_work(
        self, plan: StepPlan, work: StepShape, failed: Mapping[int, str] | None = None, unsampled: IntArray = NO_INTS
    ) -> PendingStep:
        """Issue what a step computes. failed, unsampled: see PendingStep."""
        decodes = work.is_decode or work.verifies
        scores = not decodes and self._prompts.wanted(work.rows)
        is_plain = decodes and not self._observers and self._sampler.is_plain(work.rows)
        told = self._experts.rows.intersection(work.rows.tolist()) if self._experts.rows else ()
        every = scores or (self._taps_last and not decodes) or (bool(told) and not work.is_decode)
        key = EAGER if every else self._graphs.dispatch(work, needs_logits=not is_plain)
        self._buffers.stage(work, *((work.num_rows, work.num_logit_tokens) if key is EAGER else key.size))
        self._bring()
        if not self._graphs.has(key, self._record):  # nothing is staged any more that a capture would launch
            key = EAGER
        self._turn ^= 1
        prompt_logprobs: dict[int, list[GroupLogprobs]] = {}
        is_within = key.is_decode and is_plain and self._drafter.is_within(key)
        proposed = is_within and (key.num_drafts > 0 or not plan.depth)
        if key.is_decode:
            output = self._graphs.replay(key, self._arrivals)
            drawn = NOTHING_TOLD if is_plain else self._sample_again(work, output)
        else:
            if key is EAGER:
                batch = self._view(work, every=every)
                hidden = self._forward(batch, for_capture=False)
            else:
                batch, hidden = self._batch_of(key), self._graphs.replay(key, self._arrivals)
            if scores:
                prompt_logprobs = self._prompts.collect(work, hidden)
            drawn = self._sample(work, batch, hidden)
        rows = work.rows if len(work.sampling) == work.num_rows else work.rows[work.sampling]
        if key.is_decode and (told or self._drafter.is_on):
            batch = self._batch_of(key)
        if self._drafter.is_on:
            if not proposed:
                self._drafter.propose(batch, self._sample_of(batch), plan.depth, work.seq_lens)
            self._sampler.proposed(self._requests.tensors.total_len, self._buffers.limits.max_num_drafts)
        num_lines, runs = len(rows), NO_RUNS
        if work.has_drafts:
            num_lines = work.num_rows
            runs = Runs(work.sampling, self._buffers.counts[self._turn], work.num_drafts)
        return PendingStep(
            plan.step,
            self._buffers.results[self._turn, :num_lines],
            rows,
            drawn.logprobs,
            prompt_logprobs,
            event=self._events[self._turn],
            failed=failed,
            unsampled=unsampled,
            runs=runs,
            supports=drawn.supports,
            experts=chosen_experts(self._experts, work, batch.positions, told) if told else NO_CHOSEN,
        )

    def _view(self, work: StepShape, *, every: bool = False) -> Batch:
        """The batch of a step that no graph serves. every: hidden states of all tokens are asked for."""
        return self._buffers.view(
            work.num_rows,
            work.total_tokens,
            work.max_query_len,
            work.max_seq_len,
            work.num_long,
            every=every,
            drafts=work if work.has_drafts else None,
        )

    def _issue_sound(self, plan: StepPlan, work: StepShape, error: ModError) -> PendingStep:
        """A step some of whose rows' mods fail, without these rows: they end, the others' bits are as ever.

        What the first try has stored of K and V is stored again.
        """
        from octavo.attention.mods.failing import leave_out_failing

        def issue(sound: IntArray, wrong: list[int]) -> PendingStep:
            failed = {int(work.rows[place]): MOD_FAILED for place in wrong}
            unsampled = work.rows[[place for place in work.sampling if place in wrong]]
            if len(sound):
                return self._try(plan, work.only(sound), failed, unsampled)
            nothing, event = self._buffers.results[0, :0], self._events[self._turn ^ 1]  # what was tried may run yet
            return PendingStep(plan.step, nothing, event=event, failed=failed, unsampled=unsampled)

        return leave_out_failing(work.num_rows, error, lambda some: self._fails(work.only(some)), issue)

    def _fails(self, part: StepShape) -> ModError | None:
        """What a step's part fails with. Nothing is committed."""
        self._buffers.stage(part, part.num_rows)
        self._bring()
        try:
            self._forward(self._view(part), for_capture=False)
        except ModError as error:
            return ModError(str(error))  # see _try
        finally:
            self._take_back_turn(host=False)
        return None

    def _take_back_turn(self, *, host: bool = True) -> None:
        """A step that was not committed has had no turn; its inputs were gathered."""
        self._buffers.turn.bitwise_xor_(1)
        if host:
            self._turn ^= 1

    def _apply(self, plan: StepPlan) -> None:
        for row in plan.finished_rows:
            self._sampler.remove(row)
            self._prompts.remove(row)
            self._experts.rows.discard(row)
        if plan.new_rows:
            self._requests.add(*plan.new_rows)
            self._sampler.add(*plan.new_rows)
            self._tables.begin(np.array([new.row for new in plan.new_rows]), [new.block_ids for new in plan.new_rows])
        for new in plan.new_rows:
            self._add(new)
        self._tables.extend(plan.new_blocks)
        zero_blocks(self._pool.data, plan.zero_blocks)

    def _bring(self) -> None:
        """Bring what was staged to the device."""
        self._writes.apply()
        self._sampler.apply_staged()

    def _add(self, new: NewRow) -> None:
        self._model_state.add(new)
        for observer in self._observers:
            observer.add(new)
        self._prompts.add(new)
        if new.sampling.return_routed_experts:
            self._experts.rows.add(new.row)

    def _record(self, key: GraphKey, *, warmup_only: bool = False) -> torch.Tensor:
        """Issue what a graph holds: a step up to its hidden states, or a whole decode step.

        That gives its logits, or where there are none its hidden states. warmup_only: some layers may be left out, see
        ForwardContext.
        """
        batch = self._batch_of(key)
        gates = self._graphs.gates_of(key)
        hidden = self._forward(batch, for_capture=True, warmup_only=warmup_only, gates=gates)
        if not key.is_decode:
            return hidden
        output = hidden
        if key.num_drafts:
            rows = self._buffers.logit_rows(batch.total_tokens)
            drawn = self._sampler.draw(self.model.logits(hidden), rows, batch.positions, ahead=1, ready=True)
            self._commit_drafts(batch, *drawn)
        elif key.gives_logits:
            output = self.model.logits(hidden)
            self._commit(batch, *self._sampler.draw(output, batch.rows, batch.next_positions))
        else:
            drawn = self.model.draw(hidden, batch.rows, *self._sampler.tables, batch.next_positions)
            self._commit(batch, *drawn)
        if self._drafter.is_within(key):
            lengths = np.full(batch.num_rows, batch.max_seq_len)
            self._drafter.propose(batch, self._sample_of(batch), key.num_drafts, lengths, for_capture=True)
        return output

    def _batch_of(self, key: GraphKey) -> Batch:
        """The padded batch of the steps that one graph serves."""
        batch = self._padded.get(key)
        if batch is None:
            longest, length = (min(most, self._max_model_len) for most in (key.num_tokens, key.max_seq_len))
            longest = 1 + key.num_drafts if key.is_decode or key.num_drafts else longest
            sizes, every = (key.num_rows, key.num_tokens, longest, length, key.max_long), key.num_drafts > 0
            batch = self._padded[key] = self._buffers.view(*sizes, every=every, apart=every, is_padded=True)
        return batch

    @staticmethod
    def _load(key: GraphKey) -> None:
        for num_tokens in {key.num_tokens, key.num_rows}:
            load_kernels(num_tokens)

    def _prepare(self, batch: Batch, *, for_capture: bool = False) -> ForwardContext:
        self._buffers.gather(batch)
        return self._model_state.prepare(batch, for_capture=for_capture)

    def _forward(
        self, batch: Batch, *, for_capture: bool, warmup_only: bool = False, gates: Gates = NO_GATES
    ) -> torch.Tensor:
        if not for_capture:
            self._arrivals.before_all()
        context = self._prepare(batch, for_capture=for_capture)
        context.warmup_only, context.taps, context.gates = warmup_only, self._drafter.taps, gates
        with forward_context(context):
            hidden = self.model.forward(batch.input_ids, batch.positions)
        self._model_state.finish()
        if self._taps_last:
            self._drafter.taps.keep(self.model.arch.num_layers, hidden)
        return hidden

    def _sample(self, work: StepShape, batch: Batch, hidden: torch.Tensor) -> Told:
        """Sample and commit. Gives what rows asked for. hidden: what the batch asks for."""
        if work.has_drafts:
            return self._verify(work, batch, hidden)
        num_samples = len(work.sampling)
        if not num_samples:
            no_tokens = batch.positions[:0]
            self._commit(batch, no_tokens, no_tokens.to(torch.uint8))
            return NOTHING_TOLD
        if batch.logit_tokens is None and work.num_rows < work.total_tokens:
            hidden = hidden.index_select(0, self._buffers.logit_tokens.data[0, : work.num_rows])
        at = self._buffers.sampling.data[0, :num_samples]
        if num_samples < work.num_rows:
            hidden = hidden.index_select(0, at)
        logits = self.model.logits(hidden[:num_samples])
        drawn = self._sample_batch(work, batch, at)
        self._show(work, logits, drawn)
        output = self._sampler(logits, drawn)
        self._commit(batch, output.tokens, output.failed)
        self._take_back(output.held)
        return Told(output.logprobs, output.supports)

    def _verify(self, work: StepShape, batch: Batch, hidden: torch.Tensor) -> Told:
        """`_sample` where rows have drafts: draw at each of their places, accept what was drawn, and commit that."""
        given = self._buffers.drafted(work, batch)
        if batch.logit_tokens is None and work.num_logit_tokens < work.total_tokens:
            hidden = hidden.index_select(0, given.tokens)
        rows_np = np.repeat(work.rows[work.sampling], work.logits_per_row[work.sampling])
        at = self._buffers.sampling.data[0, : len(rows_np)]
        logits = self.model.logits(hidden.index_select(0, at))
        drawn = SampleBatch(
            rows=given.rows.index_select(0, at),
            positions=given.positions.index_select(0, at),
            rows_np=rows_np,
            max_position=work.max_seq_len,
            has_drafts=True,
        )
        for observe in self._observers:  # bounds will not do for what is told apart by its position: it waits
            observe(logits, rows_np, drawn.positions.cpu().numpy())
        output = self._sampler(logits, drawn)
        self._commit_drafts(batch, output.tokens, output.failed)
        return Told(output.logprobs, output.supports)

    def _show(self, work: StepShape, logits: torch.Tensor, drawn: SampleBatch) -> None:
        for observe in self._observers:  # lengths are bounds where drafts of a step in flight may be rejected
            exact = drawn.positions.cpu().numpy() if self._drafter.is_on else work.seq_lens[work.sampling]
            observe(logits, work.rows[work.sampling], exact)

    def _sample_again(self, work: StepShape, logits: torch.Tensor) -> Told:
        """After a graph has sampled as if all rows were plain: replace its tokens where some are not.

        logits: [R and padding, vocab_size].
        """
        logits, is_plain = logits[: work.num_rows], self._sampler.is_plain(work.rows)
        if is_plain and not self._observers:
            return NOTHING_TOLD
        batch = self._buffers.view(work.num_rows, work.num_rows, 1, work.max_seq_len)
        drawn = self._sample_batch(work, batch, self._buffers.sampling.data[0, : work.num_rows])
        self._show(work, logits, drawn)
        if is_plain:
            return NOTHING_TOLD
        output = self._sampler(logits, drawn)
        self._commit(batch, output.tokens, output.failed, again=True)
        self._take_back(output.held)
        return Told(output.logprobs, output.supports)

    def _sample_batch(self, work: StepShape, batch: Batch, at: torch.Tensor) -> SampleBatch:
        return SampleBatch(
            rows=batch.rows.index_select(0, at),
            positions=batch.next_positions.index_select(0, at),
            rows_np=work.rows[work.sampling],
            max_position=work.max_seq_len,
        )

    def _commit(self, batch: Batch, tokens: torch.Tensor, failed: torch.Tensor, *, again: bool = False) -> None:
        commit_tokens(batch, self._requests.tensors, self._sample_of(batch), tokens, failed, again=again)

    def _commit_drafts(self, batch: Batch, tokens: torch.Tensor, failed: torch.Tensor) -> None:
        num_drafts = self._buffers.num_drafts.data[0, : batch.num_rows]
        commit_drafts(batch, self._requests.tensors, self._sample_of(batch), num_drafts, tokens, failed, HELD)

    def _sample_of(self, batch: Batch) -> torch.Tensor:
        return self._buffers.sample_of.data[0, : batch.num_rows]

    def _take_back(self, held: IntArray) -> None:
        """Rows that drew nothing compute the same token in their next step, also where that is planned already."""
        if len(held):
            self._lay_out.take_back(held)
