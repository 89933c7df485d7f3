"""A short convolution where rows decode a token each: which kernel serves them, Triton's or the one in CUDA C++.

Owns the choice, and the examples by which both are compared before that one runs. Invariants: the choice moves no bit;
no launch waits for the device, so graphs may hold it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from octavo.ops.scan import ConvOperands, conv_decode
from octavo.states.agreement import agrees
from octavo.states.base import LayerStates
from octavo.states.example import ENDING, Example, agree
from octavo.states.launches import Told

# Of the rows that are compared, tokens computed before and those of the step: two that begin a chunk, one within it and
# one at its end; and two of a first chunk.
_EXAMPLES = (64, 1), (65, 1), (64 + 41, 1), ENDING, (1, 1), (0, 1)
_COPIED = True
_FEWEST_ROWS = 64  # with fewer, Triton's is as fast

Plain = Callable[[LayerStates, Told, Tensor, Tensor], None]  # x, out


def convolve(own: LayerStates, told: Told, conv: ConvOperands, x: Tensor, out: Tensor, plain: Plain) -> None:
    """Rows of one token. x, out: [tokens, channels]; plain: by Triton's kernel."""
    if _chosen(own, told, conv, x, plain):
        _copied(own, told, conv, x, out)
    else:
        plain(own, told, x, out)


def _chosen(own: LayerStates, told: Told, conv: ConvOperands, x: Tensor, plain: Plain) -> bool:
    """Whether the kernel in CUDA C++ serves a layer, is there, and was found to give Triton's bits."""
    if (
        not _COPIED
        or len(own.inputs.rows) < _FEWEST_ROWS
        or not conv_decode.serves(len(conv.weight), own.chunk, x, told.kept)
    ):
        return False
    macros = _macros(own, told, conv)

    def compare() -> bool:
        return all(agree(_results(own, told, conv, row, plain)) for row in _EXAMPLES)

    return conv_decode.is_loaded(macros, x.device) and agrees(conv_decode.__name__, macros, x.device, compare)


def _results(
    own: LayerStates, told: Told, conv: ConvOperands, row: tuple[int, int], plain: Plain
) -> list[list[Tensor]]:
    """What a row gives by either kernel, and all that is kept of it then. At random."""
    example, dtype = Example(own, told, row, told.kept[0].device), told.kept[0].dtype
    kept = [example.draw(*shape).to(dtype) for shape in example.shapes]
    x = example.draw(1, conv.weight.shape[1]).to(dtype)

    def plainly(own: LayerStates, told: Told) -> tuple[Tensor]:
        out = torch.zeros_like(x)
        plain(own, told, x, out)
        return (out,)

    def copied(own: LayerStates, told: Told) -> tuple[Tensor]:
        out = torch.zeros_like(x)
        _copied(own, told, conv, x, out)
        return (out,)

    return example.results(kept, (plainly, copied))


def _macros(own: LayerStates, told: Told, conv: ConvOperands) -> dict[str, int | str]:
    width, channels = conv.weight.shape
    return conv_decode.macros(
        (width, channels, own.chunk), own.block_size, told.forms, told.kept[0].dtype, (conv.bias is not None, conv.silu)
    )


def _copied(own: LayerStates, told: Told, conv: ConvOperands, x: Tensor, out: Tensor) -> None:
    """By the kernel in CUDA C++."""
    step, (state_table, state_columns, input_table, input_columns) = own.inputs, told.tables
    bias = conv.weight if conv.bias is None else conv.bias
    places = x, conv.weight, bias, out, step.rows, step.query_start, step.seq_lens, state_table, input_table
    numbers = x.stride(0), len(step.rows), state_columns, input_columns, *told.firsts
    to_tell = conv_decode.Told(*(each.data_ptr() for each in (*places, *told.kept)), *numbers)
    conv_decode.launch(to_tell, _macros(own, told, conv), x.device)
