"""What operators of layers with states need not keep of a step's inputs, made NaN: reference operators keep it all.

So whoever reads what only some operators keep gets NaN from all of them.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from octavo.ops.states import store_inputs
from octavo.states.base import LayerStates


def spoil(layers: Iterable[LayerStates]) -> int:
    """Behind a step: of its tokens, those in chunks of which InputsPolicy promises nothing. How many, in all layers."""
    spoiled = 0
    for own in layers:
        if not own.chunk or own.input_table.device.type != "cpu":
            continue
        step = own.inputs
        promised = step.seq_lens.long() // own.chunk * own.chunk - own.chunk  # what lies behind: see InputsPolicy
        promised = promised.repeat_interleave(step.num_queries)
        at = (step.positions[: len(promised)] < promised).nonzero().flatten()  # padding is of no row
        if len(at):
            nothing = [torch.full((len(at), *store.shape), torch.nan) for store in own.kept_inputs]
            rows, positions = step.token_rows[at], step.positions[at]
            store_inputs(own.kept_inputs, own.input_table, rows, positions, own.block_size, nothing)
            spoiled += len(at)
    return spoiled
