"""What the delta rule keeps, by Triton's kernels and by those in CUDA C++: `python bench/h200/gdn_kept.py [--dry]`.

A line for each kept tensor and row that differ: tokens, whether their chunk is open, whether anything reads them again.
"""

from __future__ import annotations

import contextlib
import sys
import time
from unittest import mock

import delta
import torch

import states
from octavo.ops.compile import side_by_side
from octavo.ops.scan.delta import delta_prepare, delta_prompts, delta_step
from octavo.states import delta_gpu

BEGAN = time.time()
DRY = "--dry" in sys.argv
BEGINS = (62, 126, 190) if DRY else (1, 15, 30, 47, 62, 63, 64, 79, 126, 130, 190, 200)
COPIED = {"all": (delta_step, delta_prompts, delta_prepare), "prompts alone": (delta_prompts,)}
COPIED["steps alone"] = (delta_step,)


@contextlib.contextmanager
def running(*kernels):
    """Within: of the kernels in CUDA C++ these."""
    with contextlib.ExitStack() as stack:
        if DRY:
            import emulated

            stack.enter_context(emulated.emulated(2))
        stack.enter_context(delta.copying(*kernels))
        stack.enter_context(mock.patch.object(delta_gpu, "_agrees", lambda *_: True))
        yield


def cut():
    """Rows cut anyhow, and steps behind them."""
    import gpu_states_rig
    import state_rig
    from octavo.states.gpu import GpuStates

    sizes = (1, 2, 128, 128) if DRY else states.sizes_of("delta")
    case = gpu_states_rig.MAKERS["delta"](torch.float16 if DRY else states.BF16, *sizes)
    state_rig.move(case, states.DEVICE)
    drawn = state_rig.draw_all(case, [each + 143 for each in BEGINS])
    rows = state_rig.Rows(case, GpuStates(), drawn, device=states.DEVICE, block_size=64)
    rows.compute(dict(enumerate(BEGINS)))
    if DRY:
        rows.compute({0: 76, 1: 112, 2: 130})
    else:
        rows.compute({row: 40 + row * 9 for row in range(0, len(BEGINS), 2)})
        rows.padded = 1
        rows.compute({row: 17 + row for row in range(1, len(BEGINS), 2)})
    for turn in range(1 if DRY else 5):
        rows.compute({(row + turn) % len(BEGINS): 1 for row in range(len(BEGINS))})
    return rows


def kept(rows):
    """(tensor, row, tokens before it) -> bytes, of all that tables name."""
    own, found = rows.own, {}
    for row, computed in enumerate(rows.computed):
        for name, store in zip(own.input_names, own.kept_inputs):
            at = torch.arange(computed + 64, device=rows.device)
            found[name, row] = items(store, own.input_table, row, at // own.block_size, at % own.block_size)
        for name, store in zip(own.state_names, own.states):
            entry = torch.arange(computed // own.chunk, device=rows.device)
            found[name, row] = items(store, own.state_table, row, entry, 0 * entry)
    return found


def items(store, table, row, entries, offsets):
    """[entries, numbers] of a row."""
    block, part, line = store.places(table, torch.full_like(entries, row), entries, offsets)
    return store.data[block, part, line].reshape(len(entries), -1).contiguous()


def spans(tokens):
    """'62-63, 192-207'."""
    found = []
    for each in tokens:
        if found and found[-1][1] == each - 1:
            found[-1][1] = each
        else:
            found.append([each, each])
    return ", ".join(f"{a}-{b}" for a, b in found)


def said_of(which, found, expected):
    """What differs, of one choice of kernels."""
    one, other = (each.pool.buffer.view(torch.uint8) for each in (found, expected))
    all_bytes, named, lines, read = int((one != other).sum()), 0, [], 0
    those, own = kept(found), kept(expected)
    for (name, row), values in own.items():
        a, b = values.view(torch.uint8), those[name, row].view(torch.uint8)
        named += int((a != b).sum())
        if DRY:  # Triton's interpreter rounds otherwise: which are written
            a, b = values.float().isnan(), those[name, row].float().isnan()
        tokens = (a != b).any(1).nonzero().flatten().tolist()
        if not tokens:
            continue
        end, chunk = found.computed[row], found.own.chunk
        first_open = end // chunk * chunk
        first_read = max(end - chunk + 1, 0) // chunk * chunk  # drafts of two steps are fewer
        again = [each for each in tokens if name == "state" or each >= first_read]
        read += len(again)
        at = tokens[0]
        place = int((values[at] != those[name, row][at]).nonzero()[0])
        lines.append(
            f"  {name} of row {row}, which has {end} tokens: {spans(tokens)}, "
            f"open chunk from {first_open} on, READ AGAIN {spans(again) or 'none'}; at {at}, {place}: "
            f"Triton's {values[at, place]:.4g}, CUDA C++'s {those[name, row][at, place]:.4g}"
        )
    same = all(map(torch.equal, found.results, expected.results))
    print(
        f"[{time.time() - BEGAN:.0f}s] {which}: results {'same' if same else 'OTHER'}; {all_bytes} bytes of the pool "
        f"differ, {all_bytes - named} of them named by no table; {len(lines)} tensors of rows, {read} items read again"
    )
    for line in lines[: 12 if which == "all" else 0]:
        print(line)


if __name__ == "__main__":
    if not DRY:
        try:
            with side_by_side.compiling(lambda *_: None), running(*COPIED["all"]):
                cut()
        except Exception as error:
            print(f"not compiled side by side: {type(error).__name__} {str(error)[:200]}")
        print(f"[{time.time() - BEGAN:.0f}s] compiled")
    with running():
        expected = cut()
        if not DRY:
            said_of("Triton's, twice", cut(), expected)
    for which, kernels in list(COPIED.items())[: 1 if DRY else 3]:
        with running(*kernels):
            said_of(which, cut(), expected)
