"""The real engine with a broken model: a request with seed 666 gets NaN logits from its third token on."""

from __future__ import annotations

import sys
from typing import Any

import torch

from octavo.plan import NewRow
from octavo.sampling.sampler import Sampler
from octavo.serve.engine.process import main

POISON = 666
_starts: dict[int, int] = {}  # row -> sequence length from which on it fails
_add, _call = Sampler.add, Sampler.__call__


def _poisoned_add(self: Sampler, *rows: NewRow) -> None:
    for new in rows:
        _starts.pop(new.row, None)
        if new.sampling.seed == POISON:
            _starts[new.row] = new.num_prompt + 2
    _add(self, *rows)


def _poisoned_call(self: Sampler, logits: torch.Tensor, batch: Any) -> Any:
    for place, row in enumerate(batch.rows_np.tolist()):
        if row in _starts and int(batch.positions[place]) >= _starts[row]:
            logits[place] = float("nan")
    return _call(self, logits, batch)


Sampler.add = _poisoned_add  # type: ignore[method-assign]
Sampler.__call__ = _poisoned_call  # type: ignore[method-assign]

if __name__ == "__main__":
    main(sys.argv[1:])
