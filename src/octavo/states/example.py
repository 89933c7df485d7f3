"""A row of a layer's own shape, by which two kernels are compared before the one that is to serve runs.

Owns the row, its tables, and the shapes of what it would have kept. Does not know which kernels there are, nor what
they read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from octavo.ops import captures
from octavo.ops.scan.kept import Form
from octavo.states.base import LayerStates, StateInputs, StateStep
from octavo.states.launches import Told

ENDING = 64 + 63, 1  # tokens computed before, and those of the step, which end a chunk
Run = Callable[[LayerStates, Told], Sequence[Tensor]]  # gives what a kernel returns


class Example:
    """One row, in blocks of its own. shapes: of the states and inputs that its tables name, [blocks, values] each."""

    def __init__(self, own: LayerStates, told: Told, row: tuple[int, int], device: torch.device) -> None:
        """row: tokens computed before, and those of the step."""
        computed, count = row
        states, num_states = _table_of(told.forms[:1], told.firsts[0], (computed + count) // own.chunk, 1)
        entries = -(-(computed + count) // own.block_size)
        inputs, num_inputs = _table_of(told.forms[1:], told.firsts[1], entries, own.block_size)
        step = StateStep()
        step.prepare(_of_one_row(computed, count, device))
        tables = states.to(device), inputs.to(device)
        self.own = dataclasses.replace(own, state_table=tables[0], input_table=tables[1], step=step)
        self.shapes = [(num_states, told.forms[0][0]), *((num_inputs, form[0]) for form in told.forms[1:])]
        self._places = tables[0], tables[0].stride(0), tables[1], tables[1].stride(0)
        self._forms, self._firsts, self._device = told.forms, told.firsts, device
        self._generator = torch.Generator(device).manual_seed(0)

    def draw(self, *shape: int) -> Tensor:
        """Normal numbers in float32, which follow from what was drawn before."""
        return torch.randn(shape, generator=self._generator, device=self._device)

    def results(self, kept: Sequence[Tensor], runs: Sequence[Run]) -> list[list[Tensor]]:
        """What each run gives, and all that is kept then, of what was: `kept`, of `shapes`."""
        found = []
        for run in runs:
            told = self.told(kept)
            found.append([*run(self.own, told), *told.kept])
        return found

    def told(self, kept: Sequence[Tensor]) -> Told:
        """What kernels are told of a copy of `kept`, of `shapes`, when it is there."""
        copies = tuple(each.clone() for each in kept)
        if self._device.type == "cuda":
            captures.wait_for_device(self._device)  # kernels read states and tables before the kernel ahead has ended
        return Told(copies, self._forms, self._firsts, self._places)


def agree(found: Sequence[Sequence[Tensor]]) -> bool:
    """Whether all runs gave the same bits."""
    first, *others = [[each.view(torch.uint8) for each in one] for one in found]
    return all(all(map(torch.equal, first, one)) for one in others)


def _of_one_row(computed: int, count: int, device: torch.device) -> StateInputs:
    """What a step is told."""
    end = computed + count
    return StateInputs(
        max_query_len=count,
        max_seq_len=end,
        rows=torch.zeros(1, dtype=torch.int64, device=device),
        query_start=torch.tensor([0, count], dtype=torch.int32, device=device),
        seq_lens=torch.tensor([end], dtype=torch.int32, device=device),
        positions=torch.arange(computed, end, device=device),
    )


def _table_of(forms: Sequence[Form], first: int, entries: int, items: int) -> tuple[Tensor, int]:
    """(one row's table, its blocks and the null block). Every column that a layer reads has a block of its own."""
    table = torch.zeros(1, entries * forms[0][7], dtype=torch.int32)
    count = 1
    for entry in range(entries):
        ends = [(first + (items * form[4] - 1) // form[3]) // form[6] for form in forms]
        for column in range(first // forms[0][6], max(ends) + 1):
            table[0, entry * forms[0][7] + column] = count
            count += 1
    return table, count
