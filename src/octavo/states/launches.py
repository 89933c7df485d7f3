"""What launches of operators with states on a GPU share: what a kernel is told of a layer, and the sums of gates.

Invariant: no launch waits for the device, so graphs may hold it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.ops.scan.gates_gpu import scan_gates
from octavo.ops.scan.kept import Form
from octavo.states.base import LayerStates, StateInputs

FEW = 16  # tokens of a row that are a short step
_HEADS, _AHEAD = 32, 16  # of a program that sums gates; tokens that are on their way to it
PLAIN: dict[str, Any] = {"enable_fp_fusion": False}  # so that no kernel rounds less than another


class Told(NamedTuple):
    """What kernels are told of the tensors of one operator of one layer."""

    kept: tuple[Tensor, ...]
    forms: tuple[Form, ...]
    firsts: tuple[int, int]  # parts: of the layer's states, of its inputs
    tables: tuple[Tensor, int, Tensor, int]  # of states and of inputs, and their columns


def kind_of(max_query_len: int) -> str:
    """Which tiles serve rows of so many tokens at most."""
    return "decode" if max_query_len == 1 else "short" if max_query_len <= FEW else "long"


def has_prompts(step: StateInputs) -> bool:
    """Whether rows of several tokens are taken for prompts, most of which begin at a border: not where they verify."""
    return step.max_query_len > (FEW if step.verifies else 1)


def is_streamable(told: Told, keys: int) -> bool:
    """Whether a head's state lies in one line, and what a token brings too."""
    return not told.forms[0][5] % keys and all(form[4] == 1 for form in told.forms[1:])


def precision(x: Tensor) -> str:
    """Of products of float32, which those of 16-bit types are not."""
    return "tf32x3" if x.dtype is torch.float32 else "tf32"


def gates(
    own: LayerStates,
    told: Told,
    a: Tensor,
    b: Tensor,
    decay: Tensor,
    dt_bias: Tensor,
    limits: tuple[float, float],
    *,
    slots: tuple[int, int],
) -> tuple[Tensor, Tensor]:
    """(total, rate or dt), [T, heads] float32. slots: of the two among what is kept. Limits make it Mamba-2's."""
    step, heads = own.inputs, len(decay)
    # each aligned, at any length
    total, second = (torch.empty(len(a), heads, dtype=torch.float32, device=a.device) for _ in range(2))
    is_one, num_rows = step.max_query_len == 1, len(step.rows)
    grid = num_rows if is_one else len(a) // own.chunk + 2 * num_rows, -(-heads // _HEADS)
    first, last = slots
    scan_gates[grid](
        a, b, a.stride(0), b.stride(0), decay, dt_bias, total, second, step.rows, step.query_start, step.seq_lens,
        num_rows, *told.tables[2:], told.kept[first], told.kept[last], told.firsts[1], *limits,
        HEADS=heads, TILE=_HEADS, CHUNK=own.chunk, BLOCK=own.block_size, TOTAL_FORM=told.forms[first],
        SECOND_FORM=told.forms[last], DELTA=not any(limits), ONE=is_one,
        AHEAD=1 if is_one else _AHEAD, num_warps=1, **PLAIN,
    )  # fmt: skip
    return total, second
