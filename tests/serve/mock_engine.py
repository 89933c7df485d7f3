"""A mock engine: the engine process without a model, for load, soak and fault tests.

Owns what stands in for a worker: the tokens of a sequence are its prompt, said again and again, at a pace that can be
set. Everything else is real: the loop, the scheduler, its blocks, the messages. Imports no torch. Invariant: output
token i of a sequence is `prompt_token_ids[i % len(prompt_token_ids)]`, whatever runs beside it.

Run as `python mock_engine.py [--step-seconds S] [--stop-after N] [--load-seconds S] [--faults] FD
PARENT`. With `--faults`, `extra_args={"fault": NAME, "fault_after": N}` breaks a request at its output token N:
"nan_logits", "bad_token" and "nan_logprob" that request alone, "raise", "exit" and "hang" the engine.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

import numpy as np

from octavo.cache.groups import make_groups
from octavo.cache.specs import AttentionSpec
from octavo.checkpoint.config_reader.checkpoint import read_arch
from octavo.checkpoint.hub import find_model
from octavo.config.engine_config import DEFAULT_BLOCK_SIZE, EngineConfig, resolve_max_logprobs
from octavo.engine import EngineCore
from octavo.frontend.messages import EngineInfo
from octavo.observe import Phases
from octavo.plan import NO_PROMPT_LOGPROBS, NewRow, PromptLogprobs, StepLimits, StepPlan, StepResult, TokenLogprobs
from octavo.request.sampling_params import SamplingParams
from octavo.sched.kv_manager import KVManager
from octavo.sched.scheduler import Scheduler
from octavo.serve.engine.process import main as run_engine
from octavo.worker.executor import InlineExecutor, PendingResult

COMMAND = (sys.executable, str(Path(__file__).resolve()))
DEFAULT_SEQS = 4096
_NUM_BLOCKS = 1 << 16
_LOGPROB = -0.5  # of what is said; of the r-th likeliest beside it: r times as much


@dataclasses.dataclass(slots=True)
class _Row:
    tokens: list[int]
    num_prompt: int
    num_computed: int
    params: SamplingParams
    next_prompt_logprob: int  # position; -1: none are owed


class MockWorker:
    """Executes plans as a worker would, but knows the answer."""

    def __init__(
        self,
        vocab_size: int,
        *,
        step_seconds: float = 0.0,
        stop_after: int = 0,
        eos_token_id: int = 0,
        faults: bool = False,
    ) -> None:
        """`step_seconds`: how long a step takes. `stop_after`: tokens until end-of-text is said; 0: never."""
        self._vocab_size, self._step_seconds = vocab_size, step_seconds
        self._stop_after, self._eos_token_id, self._faults = stop_after, eos_token_id, faults
        self._rows: dict[int, _Row] = {}
        self._failed: dict[int, str] = {}  # of the step that runs

    def issue(self, plan: StepPlan) -> PendingResult:
        """Run one step."""
        done: Future[StepResult] = Future()
        done.set_result(self._execute(plan))
        return done

    def _execute(self, plan: StepPlan) -> StepResult:
        if self._step_seconds and len(plan.rows):
            time.sleep(self._step_seconds)
        for number in plan.finished_rows:
            del self._rows[number]
        for new in plan.new_rows:
            self._rows[new.row] = _new_row(new)
        self._failed = {}
        rows, tokens = plan.rows.tolist(), list[list[int]]()
        logprobs: dict[int, list[TokenLogprobs]] = {}
        prompt_logprobs: dict[int, PromptLogprobs] = {}
        for number, num_tokens in zip(rows, plan.num_tokens.tolist(), strict=True):
            row = self._rows[number]
            row.num_computed += num_tokens
            if row.next_prompt_logprob >= 0:
                prompt_logprobs[number] = self._prompt_logprobs(row)
            if row.num_computed < len(row.tokens):
                tokens.append([])
                continue
            token = self._next(number, row)
            tokens.append([token])
            row.tokens.append(token)
            if row.params.logprobs is not None or row.params.logprob_token_ids is not None:
                logprobs[number] = [self._entry(token, row.params.logprobs or 0, row)]
        given = [(number, own) for number, own in zip(rows, tokens, strict=True) if own]
        return StepResult(
            step=plan.step,
            rows=np.array([number for number, _ in given], np.int64),
            tokens=np.array([own for _, own in given], np.int64).reshape(-1, 1),
            num_sampled=np.ones(len(given), np.int64),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            failed=self._failed,
        )

    def _next(self, number: int, row: _Row) -> int:
        index = len(row.tokens) - row.num_prompt
        if self._faults and row.params.extra_args:
            fault = row.params.extra_args.get("fault")
            if fault and index == row.params.extra_args.get("fault_after", 0):
                return self._break(fault, number)
        if self._stop_after and index + 1 >= self._stop_after:
            return self._eos_token_id
        return row.tokens[index % row.num_prompt]

    def _break(self, fault: object, number: int) -> int:
        if fault == "raise":
            raise RuntimeError("a mock failure")
        if fault == "exit":
            os._exit(7)
        if fault == "hang":
            time.sleep(1e6)
        if fault == "nan_logits":
            self._failed[number] = "nan_logits"
        return self._vocab_size if fault == "bad_token" else 0

    def _entry(self, token: int, num_top: int, row: _Row | None = None) -> TokenLogprobs:
        """The chosen token, then the likeliest ones: the chosen one and its successors."""
        extra = (row.params.extra_args or {}) if row is not None and self._faults else {}
        first = math.nan if extra.get("fault") == "nan_logprob" else _LOGPROB
        top = [(token + r) % self._vocab_size for r in range(num_top)]
        top_logprobs = [_LOGPROB * (r + 1) for r in range(num_top)]
        return TokenLogprobs([token, *top], [first, *top_logprobs], [1, *range(1, num_top + 1)])

    def _prompt_logprobs(self, row: _Row) -> PromptLogprobs:
        end = min(row.num_computed, row.num_prompt - 1)
        start = row.next_prompt_logprob
        entries = [self._entry(row.tokens[p], row.params.prompt_logprobs or 0) for p in range(start, end + 1)]
        row.next_prompt_logprob = -1 if end == row.num_prompt - 1 else max(end + 1, start)
        return packed(entries)


def packed(entries: Sequence[TokenLogprobs]) -> PromptLogprobs:
    """Entries of one width, as a worker gives them."""
    if not entries:
        return NO_PROMPT_LOGPROBS
    columns = [[getattr(entry, name) for entry in entries] for name in ("token_ids", "logprobs", "ranks")]
    return PromptLogprobs.of_arrays(*map(np.array, columns))


def _new_row(new: NewRow) -> _Row:
    return _Row(list(new.token_ids), new.num_prompt, new.num_computed, new.sampling, new.prompt_logprobs_start)


def build_core(config: EngineConfig, phases: Phases, options: argparse.Namespace) -> tuple[EngineCore, EngineInfo]:
    """A core on the mock worker, sized by the config where it says something."""
    with phases("mock load"):
        time.sleep(options.load_seconds)
    arch = read_arch(find_model(config.model), config.model_packages, config.hf_overrides)
    length = (
        config.max_model_len if config.max_model_len not in (None, -1) else arch.default_length or arch.max_position
    )
    assert length is not None, "a length that is not resolved is the checkpoint's"
    max_num_seqs = config.max_num_seqs or DEFAULT_SEQS
    num_tokens = config.max_num_batched_tokens or max(8192, max_num_seqs)
    num_blocks = config.num_gpu_blocks_override or _NUM_BLOCKS
    block_size = config.block_size or DEFAULT_BLOCK_SIZE["cpu"]
    specs = [
        AttentionSpec(num_heads=arch.num_heads, num_kv_heads=arch.num_kv_heads, head_size=arch.head_size, scale=1.0)
    ] * arch.num_layers
    kv = KVManager(make_groups(specs, block_size), num_blocks, enable_prefix_caching=config.enable_prefix_caching)
    scheduler = Scheduler(kv, StepLimits(max_num_rows=max_num_seqs, max_num_tokens=num_tokens, max_model_len=length))
    eos_token_ids = list(arch.eos_token_ids)
    worker = MockWorker(
        arch.vocab_size,
        step_seconds=options.step_seconds,
        stop_after=options.stop_after,
        eos_token_id=eos_token_ids[0] if eos_token_ids else 0,
        faults=options.faults,
    )
    info = EngineInfo(
        device="mock",
        dtype="none",
        attention_backend="none",
        vocab_size=arch.vocab_size,
        max_model_len=length,
        max_logprobs=resolve_max_logprobs(config, arch),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=num_tokens,
        enable_prefix_caching=config.enable_prefix_caching,
        block_size=block_size,
        num_blocks=num_blocks,
        phases=phases.entries,
    )
    executor = InlineExecutor(worker)
    return EngineCore(scheduler, executor, eos_token_ids=eos_token_ids, seed=config.seed), info


def main(argv: Sequence[str]) -> None:
    """Run the engine process."""
    parser = argparse.ArgumentParser(prog="mock_engine")
    parser.add_argument("--step-seconds", type=float, default=0.0)
    parser.add_argument("--stop-after", type=int, default=0)
    parser.add_argument("--load-seconds", type=float, default=0.0)
    parser.add_argument("--faults", action="store_true")
    parser.add_argument("connection")
    parser.add_argument("parent")
    options = parser.parse_args(argv)
    run_engine([options.connection, options.parent], lambda config, phases: build_core(config, phases, options))


if __name__ == "__main__":
    main(sys.argv[1:])
