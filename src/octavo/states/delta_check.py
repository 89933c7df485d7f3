"""Whether the gated delta rule's kernels in CUDA C++ give Triton's bits: both run an example of a layer's own shape.

Owns the example: a row, its tables, and what it would have kept, drawn at random, in memory of its own. Does not know
which kernels there are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from octavo.ops import captures
from octavo.ops.scan import DeltaOperands
from octavo.ops.scan.kept import Form
from octavo.states.base import LayerStates, StateInputs, StateStep
from octavo.states.launches import Told

Run = Callable[[LayerStates, Told, DeltaOperands, Tensor, Tensor, Tensor], Tensor]
PROMPT = 64, 86  # tokens computed before, and those of the step: from a state on, past a border, into an open chunk
CONTINUED = 64 + 41, 86  # from within a block of 16 tokens on
DECODED = 64 + 41, 1
ENDING = 64 + 63, 1  # a chunk


def results(
    own: LayerStates, told: Told, rule: DeltaOperands, like: Tensor, row: tuple[int, int], runs: Sequence[Run]
) -> list[list[Tensor]]:
    """What each run gives of one row, and all that is then kept. like: of the type of what tokens bring."""
    computed, count = row
    device, generator = like.device, torch.Generator(like.device).manual_seed(0)
    states, num_states = table_of(told.forms[:1], told.firsts[0], (computed + count) // own.chunk, 1)
    entries = -(-(computed + count) // own.block_size)
    inputs, num_inputs = table_of(told.forms[1:], told.firsts[1], entries, own.block_size)
    step = StateStep()
    step.prepare(of_one_row(computed, count, device))
    tables = states.to(device), inputs.to(device)
    example = dataclasses.replace(own, state_table=tables[0], input_table=tables[1], step=step)
    shapes = [(num_states, told.forms[0][0]), *((num_inputs, form[0]) for form in told.forms[1:])]

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    kept = [draw(*shape) for shape in shapes]
    kept[1] *= rule.key_size**-0.5
    kept[4], kept[5] = -kept[4].abs(), kept[5].sigmoid()
    kept = [each.to(store.dtype) for each, store in zip(kept, told.kept, strict=True)]
    channels = 2 * rule.num_key_heads * rule.key_size + rule.num_heads * rule.value_size
    given = [draw(count, width).to(like.dtype) for width in (channels, rule.num_heads, rule.num_heads)]
    found = []
    for run in runs:
        own_kept = tuple(each.clone() for each in kept)
        if device.type == "cuda":
            captures.wait_for_device(device)  # kernels read states and tables before the kernel ahead has ended
        places = tables[0], tables[0].stride(0), tables[1], tables[1].stride(0)
        out = run(example, Told(own_kept, told.forms, told.firsts, places), rule, given[0], given[1], given[2])
        found.append([out, *own_kept])
    return found


def agree(found: Sequence[Sequence[Tensor]]) -> bool:
    """Whether all runs gave the same bits."""
    first, *others = [[each.view(torch.uint8) for each in one] for one in found]
    return all(all(map(torch.equal, first, one)) for one in others)


def of_one_row(computed: int, count: int, device: torch.device) -> StateInputs:
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


def table_of(forms: Sequence[Form], first: int, entries: int, items: int) -> tuple[Tensor, int]:
    """(one row's table, its blocks and the null block). Every column that a layer reads has a block of its own."""
    table = torch.zeros(1, entries * forms[0][7], dtype=torch.int32)
    count = 1
    for entry in range(entries):
        ends = [(first + (items * form[4] - 1) // form[3]) // form[6] for form in forms]
        for column in range(first // forms[0][6], max(ends) + 1):
            table[0, entry * forms[0][7] + column] = count
            count += 1
    return table, count
