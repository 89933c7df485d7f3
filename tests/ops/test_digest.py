"""digest_rows: a function of a row's raw bits, and of nothing else."""

from __future__ import annotations

import pytest
import torch

from octavo.ops.digest import digest_rows


def reference(row: torch.Tensor) -> int:
    """In Python's integers."""
    total, mask = 0, 2**64 - 1
    for index, bits in enumerate(row.view(torch.int32).tolist(), 1):
        z = index * 0x9E3779B97F4A7C15 & mask
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & mask
        z = (z ^ z >> 27) * 0x94D049BB133111EB & mask
        total += bits * ((z ^ z >> 31) | 1)
    return (total + 2**63) % 2**64 - 2**63


@pytest.mark.parametrize("num_rows", [0, 1, 7, 8, 9, 30])
def test_the_fold_of_a_row_is_its_own(num_rows: int) -> None:
    rows = torch.randn(num_rows, 100, generator=torch.Generator().manual_seed(num_rows))
    assert digest_rows(rows).tolist() == [reference(row) for row in rows]


def test_every_bit_counts() -> None:
    row = torch.randn(1, 50, generator=torch.Generator().manual_seed(1))
    folds = {int(digest_rows(row))}
    for column in range(50):
        for bit in (0, 11, 31):
            other = row.clone()
            other.view(torch.int32)[0, column] ^= 1 << bit if bit < 31 else -(2**31)
            folds.add(int(digest_rows(other)))
    assert len(folds) == 151
    zeros = torch.tensor([[0.0, 0.0], [-0.0, 0.0], [0.0, -0.0], [float("nan"), 0.0]])
    assert len(set(digest_rows(zeros).tolist())) == 4
