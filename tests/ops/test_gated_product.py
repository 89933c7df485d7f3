"""Which products of gates and ups run in the kernel for many rows: host rules, no GPU."""

from __future__ import annotations

import pytest
import torch

from octavo.ops.gpu.cluster_product import MAX_ROWS
from octavo.ops.gpu.gated_product import MIN_ROWS, has_shape, serves


@pytest.mark.parametrize(
    ("rows", "n", "k", "why_not"),
    [
        (MIN_ROWS, 6144, 1024, ""),
        (8192, 6144, 2048, ""),
        (MIN_ROWS - 1, 6144, 1024, "few rows are another kernel's"),
        (8192, 24576, 4096, "by a long K the library is as fast"),
        (1024, 6144, 1000, "K is whole stages"),
        (1024, 6208, 1024, "channels are whole tiles"),
    ],
)
def test_what_it_takes(rows: int, n: int, k: int, why_not: str) -> None:
    assert has_shape(rows, n, k) == (not why_not)


def test_it_begins_where_the_kernel_for_fewer_rows_ends() -> None:
    assert MIN_ROWS == MAX_ROWS + 1


def test_a_cpu_has_no_such_kernel() -> None:
    x, weight = torch.empty(1024, 1024, dtype=torch.bfloat16), torch.empty(6144, 1024, dtype=torch.bfloat16)
    assert not serves(x, weight)
