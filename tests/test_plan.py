"""Plans and results as messages: what is decoded says what was encoded."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from octavo.plan import NewBlocks, NewRow, StepPlan, StepResult, TokenLogprobs
from octavo.request.sampling_params import SamplingParams
from plan_wire import decode, encode
from step_words import blocks_by_row, result_of


def test_a_plan_survives_the_wire() -> None:
    new = NewRow(
        row=3,
        request_id="a",
        token_ids=[5, 6],
        num_prompt=2,
        num_computed=0,
        block_ids=[[1], [2]],
        sampling=SamplingParams(temperature=0.5, stop_token_ids=[9]),
        seed=2**63,
    )
    plan = StepPlan(
        step=7,
        finished_rows=[1],
        new_rows=[new],
        rows=np.array([0, 3]),
        num_tokens=np.array([1, 2], np.int32),
        new_blocks=[NewBlocks(np.array([0, 0]), np.array([8, 9])), NewBlocks(np.array([0]), np.array([10]))],
    )
    found = decode(encode(plan), StepPlan)
    assert (found.rows.tolist(), found.num_tokens.tolist()) == ([0, 3], [1, 2])
    assert [blocks_by_row(blocks) for blocks in found.new_blocks] == [{0: [8, 9]}, {0: [10]}]
    assert (found.new_rows, found.finished_rows, repr(found)) == ([new], [1], repr(plan))


def test_a_result_survives_the_wire() -> None:
    logprobs = {4: [TokenLogprobs([7], [-0.5], [1])]}
    result = result_of(3, [1, 2, 4], [[5, 6], [], [7]], logprobs=logprobs, failed={1: "nan_logits"})
    assert (result.rows.tolist(), result.num_sampled.tolist()) == ([1, 4], [2, 1])
    found = decode(encode(result), StepResult)
    assert found.tokens.tolist() == [[5, 6], [7, 0]] and found.rows.tolist() == [1, 4]
    assert (found.logprobs, found.failed, found.step) == (logprobs, {1: "nan_logits"}, 3)


@pytest.mark.parametrize("rows", [5, [[2], b"1234"], [[2], "text"], []])
def test_an_array_that_is_none_is_refused(rows: object) -> None:
    with pytest.raises(msgspec.ValidationError):
        decode(msgspec.msgpack.encode({"step": 1, "rows": rows}), StepPlan)
