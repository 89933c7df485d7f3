"""Plans of attention for graphs: rows may be shorter than host numbers say, and memory is there before a capture."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

paged_plan = pytest.importorskip("octavo.ops.attention.paged_plan", reason="needs Triton")
from octavo.attention.base import AttentionInputs  # noqa: E402
from octavo.attention.paged import PagedBackend  # noqa: E402
from octavo.ops.attention.mask_spec import MaskSpec  # noqa: E402

CPU = torch.device("cpu")
HEADS = (8, 1, 128)  # a tile of rows of few queries holds 8


class Nothing:
    """A kernel that is not launched."""

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *_, **__: None


def plan(num_rows: int, queries: int, **fields: Any) -> Any:
    """Of rows that have so many tokens each, or fewer."""
    scratch = paged_plan.Scratch(CPU)
    planner = paged_plan.Planner(paged_plan.Heads(*HEADS), MaskSpec(scale=0.1), torch.bfloat16, CPU, scratch, 132)
    starts, lengths = torch.zeros(num_rows + 1, dtype=torch.int32), torch.zeros(num_rows, dtype=torch.int32)
    numbers = {"num_tokens": num_rows * queries, "max_query_len": queries, "max_seq_len": 256}
    return planner.plan(starts, lengths, **numbers, **fields)


@pytest.mark.parametrize("num_rows", [1, 4])
def test_rows_of_few_queries_are_looked_for_wherever_there_may_be_some(
    num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paged_plan, "divide", Nothing())
    assert plan(num_rows, 16).rows is None, "all have as many as they can"
    for fields in ({"is_padded": True}, {"for_capture": True}):
        found = plan(num_rows, 16, **fields)
        assert found.rows is not None and found.rows.short == found.tiles.short == 8
    assert plan(num_rows, 16, is_padded=True, min_query_len=9).rows is None


def test_a_backend_plans_by_what_a_batch_says_of_its_tokens() -> None:
    seen: list[bool] = []
    backend: Any = object.__new__(PagedBackend)
    planner = SimpleNamespace(plan=lambda *_, is_padded, **__: seen.append(is_padded))
    backend._planners = {None: planner}
    numbers = {"num_rows": 1, "num_tokens": 4, "max_query_len": 4, "max_seq_len": 16, "block_size": 16}
    starts, ints = torch.zeros(2, dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32)
    tensors = {"query_start": starts, "seq_lens": ints[0], "block_table": ints, "slot_mapping": torch.zeros(4)}
    for is_padded in (True, False):
        backend.prepare(AttentionInputs(**numbers, **tensors, is_padded=is_padded))
    assert seen == [True, False]


def test_counters_do_not_begin_inside_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their zeros would be written when that graph runs, and not before somebody else counts by them."""
    scratch = paged_plan.Scratch(CPU)
    scratch.reserve(1, 16, 5)
    monkeypatch.setattr(paged_plan, "_captures", lambda device: True)
    scratch.reserve(2, 16, 5, for_capture=True)
    with pytest.raises(RuntimeError, match="attention has 5 counters and a graph needs 6: reserve them before"):
        scratch.reserve(2, 16, 6, for_capture=True)
    assert scratch.counters.tolist() == [0] * 5
