"""What a step's metadata says of the lengths of its rows (criteria M5)."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.device.batch import Batch, BatchOrder, StepShape
from octavo.device.graphs import GraphPool, decode_keys
from octavo.device.request_table import RequestTable
from octavo.device.staging import HostQueue
from octavo.model_state.default import DefaultModelState
from octavo.plan import NewRow, StepLimits, StepPlan
from octavo.worker.runner import Runner

MAX_LEN = 64


def make_layout(lengths: Sequence[int]) -> BatchOrder:
    """Rows of which all tokens but the last are computed."""
    requests = RequestTable(
        StepLimits(max_num_rows=8, max_num_tokens=64, max_model_len=MAX_LEN),
        device=torch.device("cpu"),
        queue=HostQueue(),
    )
    for row, length in enumerate(lengths):
        requests.add(
            NewRow(
                row=row,
                request_id=str(row),
                token_ids=[1] * length,
                num_prompt=length,
                num_computed=length - 1,
                block_ids=[[1]],
                sampling=SamplingParams(),
                seed=0,
            )
        )
    return BatchOrder(requests)


def step(lay_out: BatchOrder, rows: Sequence[int]) -> StepShape:
    return lay_out(StepPlan(step=0, rows=np.array(rows), num_tokens=np.ones(len(rows), np.int64)))


def test_M5_1_the_length_of_a_step_is_that_of_its_longest_row() -> None:
    work = step(make_layout([5, 17, 9]), [0, 1, 2])
    assert work.max_seq_len == 17 and type(work.max_seq_len) is int


def test_M5_3_rows_that_do_not_run_and_padding_do_not_raise_it() -> None:
    lay_out = make_layout([5, 60, 9])
    assert step(lay_out, [0, 1, 2]).max_seq_len == 60
    work = step(lay_out, [0, 2])
    assert work.max_seq_len == 10 and step(lay_out, [0, 2]).max_seq_len == 11
    lay_out = make_layout([5, 9, 3])
    step(lay_out, [0, 1, 2])  # the last token of their prompts; they decode from now on
    key = GraphPool(decode_keys(8, (16,))).dispatch(step(lay_out, [0, 1, 2]))
    assert key.num_rows == 4 and key.max_seq_len == 16, "a padded replay takes the graph of its own rows' length"


@pytest.mark.parametrize(("bounds", "expected"), [((), MAX_LEN), ((16,), 16), ((1000,), MAX_LEN)])
def test_M5_2_a_graph_is_captured_for_the_longest_row_that_it_may_serve(bounds: tuple[int, ...], expected: int) -> None:
    seen: list[int] = []

    def view(
        num_rows: int, num_tokens: int, max_query_len: int, max_seq_len: int, max_long: int, **flags: bool
    ) -> None:
        assert flags["is_padded"], "its steps may have fewer tokens"
        seen.append(max_seq_len)

    runner: Any = SimpleNamespace(_padded={}, _max_model_len=MAX_LEN, _buffers=SimpleNamespace(view=view))
    Runner._batch_of(runner, decode_keys(8, bounds)[0])
    assert seen == [expected]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_M5_5_it_bounds_what_the_device_computes_with(asynchronous: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With chunks, preemptions, and a step in flight."""
    seen: list[tuple[int, int]] = []
    prepare = DefaultModelState.prepare

    def spy(self: DefaultModelState, batch: Batch, **options: Any) -> Any:
        seen.append((int(batch.seq_lens.max()), batch.max_seq_len))
        return prepare(self, batch, **options)

    monkeypatch.setattr(DefaultModelState, "prepare", spy)
    small = {"num_gpu_blocks_override": 14, "block_size": 16, "max_num_batched_tokens": 48, "max_num_seqs": 6}
    with LLM("octavo-tiny", max_model_len=96, async_scheduling=asynchronous, **small) as llm:
        params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
        llm.generate([list(range(5, 5 + length)) for length in (3, 40, 56, 20, 33, 7)], params)
    assert len(seen) > 40 and all(true <= bound <= 96 for true, bound in seen)
    assert any(true == bound for true, bound in seen)
