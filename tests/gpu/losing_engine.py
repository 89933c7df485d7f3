"""The real engine on a GPU that is lost: a request with seed 666 makes a kernel assert at its second step."""

from __future__ import annotations

import sys

import torch

from octavo.plan import NewRow, StepPlan
from octavo.serve.engine.process import main
from octavo.worker.results import PendingStep
from octavo.worker.runner import Runner

POISON = 666
_poisoned: set[int] = set()  # rows
_add, _issue = Runner._add, Runner._issue


def _note(self: Runner, new: NewRow) -> None:
    if new.sampling.seed == POISON:
        _poisoned.add(new.row)
    _add(self, new)


def _lose(self: Runner, plan: StepPlan) -> PendingStep:
    if not plan.new_rows and _poisoned.intersection(plan.rows.tolist()):
        torch._assert_async(torch.zeros(1, device="cuda"))
    return _issue(self, plan)


Runner._add = _note  # type: ignore[method-assign]
Runner._issue = _lose  # type: ignore[method-assign]

if __name__ == "__main__":
    main(sys.argv[1:])
