"""One row among any number of others: what the tests of every GPU operator share."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

import torch

ROWS = (*range(1, 131), *(2**n for n in range(8, 15)))
MAX_ROWS = ROWS[-1]
DISTINCT = 300  # rows that batches are made of
THE_ROW = 17


def assert_rows_keep_their_bits(
    call: Callable[[torch.Tensor], tuple[torch.Tensor, ...]], num_rows: int = DISTINCT, counts: Iterable[int] = ROWS
) -> None:
    """`call` takes picked rows of `num_rows`; the result of one row alone is compared wherever it lies among others."""
    rng, alone = random.Random(0), call(torch.tensor([THE_ROW], device="cuda"))
    for rows in counts:
        at = rng.randrange(rows)
        pick = torch.randint(0, num_rows, (rows,), generator=torch.Generator().manual_seed(rows))
        pick[at] = THE_ROW
        for place, (ours, expected) in enumerate(zip(call(pick.cuda()), alone, strict=True)):
            assert torch.equal(ours[at], expected[0]), (rows, at, place)
