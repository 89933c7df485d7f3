"""Mamba-2's kernels in CUDA C++, lanes on a CPU, beside Triton's interpreted; or both on a GPU, bit by bit.

On a CPU so few blocks run that they have several tasks, one behind the other.
"""

from __future__ import annotations

import contextlib
import unittest.mock
from collections.abc import Sequence

import torch

import state_rig as rig
from emulated import advances_emulated, decodes_emulated, walks_emulated
from octavo.states.gpu import GpuStates
from octavo.states.mamba2 import mamba2_advance, mamba2_decode, mamba2_prompts


def advanced_in_cuda(device: str = "cpu") -> None:
    """States of Mamba-2 by the kernel in CUDA C++, lanes on a CPU, beside Triton's: of layers, rows and tasks in turn.

    On a CPU they are near each other: Triton's interpreter rounds to bfloat16 towards zero.
    """
    case, emulates = rig.CASES["mamba2"](torch.bfloat16, 8, 64, 2, 128), device == "cpu"
    spec, drawn, found = rig.state_spec(case.part), rig.draw_all(case, (129, 65, 64)), []
    rig.move(case, device)
    for copied, blocks in ((False, 0), (True, 3)) if emulates else ((False, 0), (True, 0)):
        own = {"_COPIED": copied} | ({"agrees": lambda *_: True} if emulates else {})
        where = advances_emulated(blocks) if emulates else contextlib.nullcontext([])
        with unittest.mock.patch.multiple(mamba2_advance, **own), where as launches:
            rows = rig.Rows(case, GpuStates(), drawn, block_size=64, beside=[spec], device=device)
            rows.padded = 1
            for counts in ({1: 64, 0: 63, 2: 60}, {1: 1, 0: 1}, {0: 63, 2: 3}, {2: 1, 0: 1}, {0: 1}):
                rows.compute(counts)
        assert launches == ["mamba2_advance"] * (5 if copied and emulates else 0), launches
        store, states = rows.own.states[0], []
        for row, border in ((0, 1), (0, 2), (2, 1)):
            ids = rows.own.state_table[row, (border - 1) * store.blocks : border * store.blocks].long()
            lines = store.data[ids].flatten(0, 2).flatten(1)  # a head each, by block and part: what no head has is NaN
            halves = lines.contiguous().view(torch.int16).unflatten(1, (2, -1)).int()
            states.append(((halves[:, 0] << 16) + halves[:, 1]).view(torch.float32).nan_to_num())
        found.append([*(each.float() for each in rows.results), *states])
    for others in found[1:]:
        for one, other in zip(found[0], others, strict=True):
            assert one.shape == other.shape
            assert (one - other).abs().max() <= (1e-2 * one.abs().max() if emulates else 0)


def decoded_in_cuda(device: str = "cpu", shapes: Sequence[tuple[int, int]] = ()) -> None:
    """Rows of Mamba-2 that decode by the kernel in CUDA C++, lanes on a CPU, beside Triton's: in blocks and tasks.

    On a CPU they are near each other: Triton's interpreter rounds to bfloat16 towards zero. Gates are alike.
    shapes: heads and groups.
    """
    emulates = device == "cpu"
    for heads, groups in shapes or (((8, 2), (24, 1), (16, 1)) if emulates else ((128, 8), (24, 1))):
        case, found = rig.CASES["mamba2"](torch.bfloat16, heads, 64, groups, 128), []
        drawn = rig.draw_all(case, (129, 65, 64, 3))
        rig.move(case, device)
        for copied, blocks in ((False, 0), (True, 3)) if emulates else ((False, 0), (True, 0)):
            own = {"_COPIED": copied, "_FEWEST_ROWS": 0} | ({"agrees": lambda *_: True} if emulates else {})
            where = decodes_emulated(blocks) if emulates else contextlib.nullcontext([])
            with unittest.mock.patch.multiple(mamba2_decode, **own), where as launches:
                rows = rig.Rows(case, GpuStates(), drawn, block_size=64, device=device)
                rows.padded = 1
                for counts in ({1: 64, 0: 63, 2: 62}, {3: 1, 1: 1, 0: 1, 2: 1}, {3: 1, 2: 1, 0: 64}, {3: 1, 0: 1}):
                    rows.compute(counts)
            assert launches == ["mamba2_decode"] * (4 if copied and emulates else 0), launches
            kept = [store.data.float().nan_to_num() for store in rows.own.kept_inputs]
            found.append([*(each.float() for each in rows.results), *kept])
        for others in found[1:]:
            for one, other in zip(found[0], others, strict=True):
                assert one.shape == other.shape
                assert (one - other).abs().max() <= (2e-2 * one.abs().max() if emulates else 0)


def walked_in_cuda(device: str = "cpu") -> None:
    """Prompts of Mamba-2 by the kernel in CUDA C++, lanes on a CPU, beside Triton's: in blocks and tasks.

    From states on over chunks, to a chunk's end, an open chunk, rows that begin within one, behind a row of one token,
    and padding. On a CPU they are near each other: Triton's interpreter rounds to bfloat16 towards zero. Inputs that
    are kept are the same.
    """
    emulates = device == "cpu"
    case, found = rig.CASES["mamba2"](torch.bfloat16, *((8, 64, 2, 128) if emulates else (128, 64, 8, 128))), []
    longest = 151 if emulates else 231  # behind a state: whole chunks, and an open one
    drawn = rig.draw_all(case, (64 + longest, 128, 121, 74, 2))
    rig.move(case, device)
    for copied, blocks in ((False, 0), (True, 3)) if emulates else ((False, 0), (True, 0)):
        own = {"_COPIED": copied} | ({"agrees": lambda *_: True} if emulates else {})
        where = walks_emulated(blocks) if emulates else contextlib.nullcontext([])
        with unittest.mock.patch.multiple(mamba2_prompts, **own), where as launches:
            rows = rig.Rows(case, GpuStates(), drawn, block_size=64, device=device)
            for counts in ({4: 1, 1: 64, 0: 64, 2: 21}, {4: 1, 1: 64, 2: 100, 0: longest, 3: 64}):
                rows.compute(counts)
                rows.padded = 1
            rows.compute({3: 10})  # so few that Triton's serve them
        assert not emulates or launches == ["mamba2_prompts"] * (2 if copied else 0), launches
        blocks = rows.own.input_table.flatten().long()
        kept = [store.data[blocks].float().nan_to_num().cpu() for store in rows.own.kept_inputs]
        found.append([*(each.float() for each in rows.results), *kept, states_of(rows)])
    for others in found[1:]:
        for place, (one, other) in enumerate(zip(found[0], others, strict=True)):
            assert one.shape == other.shape
            is_input = len(drawn) <= place < len(drawn) + 4
            assert (one - other).abs().max() <= (1e-2 * one.abs().max() if emulates and not is_input else 0), place


def states_of(rows: rig.Rows) -> torch.Tensor:
    """[lines, numbers] float32: a head's states each, which lie in halves, in all blocks that rows have for states."""
    lines = rows.own.states[0].data[rows.own.state_table.flatten().long()].flatten(0, 2).flatten(1)
    halves = lines.contiguous().view(torch.int16).unflatten(1, (2, -1)).int()
    return ((halves[:, 0] << 16) + halves[:, 1]).view(torch.float32).nan_to_num().cpu()  # what no head has is NaN
