"""The gated delta rule on a GPU, one part a call: `python bench/h200/delta.py PART [--dry]`.

bits: over cuts, batches and rejected drafts, with the kernels that stream states and walk prompts and without. decode,
prompts: microseconds beside what bytes or operations take. steps: decoding by one kernel, by one that streams behind
Triton's, and by Triton's: bits, times, float64. walked: prompts by CUDA's walk and by Triton's. choices, walks: of
Triton's by tiles, stages, warps and registers, with the bits of prompts beside those of blocks. A table comes last.
See states.py for --dry.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence

import torch

import states  # which finds the tests' rigs

DRY = states.DRY
DTYPE = states.F32 if DRY else states.BF16

# Of the delta rule's decoding: channels and warps of a tile, registers, stages, tiles of a program at most; warps and
# registers of a program that makes a head of the keys ready. None of it moves a bit.
DECODES = (
    ((64, 4), 168, 2, 4, 2, 200),
    ((32, 4), 128, 2, 4, 4, 128),
    ((32, 4), 128, 2, 8, 4, 80),
    ((32, 4), 128, 3, 8, 8, 64),
    ((64, 8), 128, 2, 4, 2, 168),
    ((64, 4), 168, 2, 8, 4, 64),
)


def decode_choices(counts: Sequence[int], computed: int) -> str:
    """Microseconds of the delta rule's decoding by `DECODES`, of the ready kernel, of the stream, and as it was."""
    from octavo.states import gpu

    names = "_STREAM_REGISTERS", "_STREAM_STAGES", "_STREAM_TILES", "_READY_WARPS", "_READY_REGISTERS", "_STREAMED"
    before, tiles, found = [getattr(gpu, name) for name in names], gpu._DELTA_TILES, []
    tile = tiles[gpu._STREAMING]
    for choice in (*DECODES, None):
        tiles[gpu._STREAMING], *values = (*choice, before[5]) if choice else (tile, *before[:5], ())
        for key, value in zip(names, values, strict=True):
            setattr(gpu, key, value)
        with contextlib.suppress(RuntimeError):  # it needs more shared memory than there is
            us, parts = states.timed("delta", counts, computed)
            kernels = " ".join(f"{took:.0f}" for key, took in sorted(parts.items()) if key[:6] == "delta_")
            said = f"{choice[0][0]}x{choice[0][1]} {choice[1:]}" if choice else "not streamed"
            found.append(f"{said}: {us:.1f} ({kernels})")
    for key, value in zip(names, before, strict=True):
        setattr(gpu, key, value)
    tiles[gpu._STREAMING] = tile
    return "\n      ".join(found)


# How the delta rule decodes: the value of `_COPIED`, and of the kernel's module steps of a ring and blocks a processor.
STEPS: dict[str, tuple[int, int, int]] = {
    "Triton's": (0, 0, 0),
    "streamed, 5 x 2": (1, 5, 2),
    "one kernel, 4 x 2": (2, 4, 2),
    "streamed, 9 x 1": (1, 9, 1),
    "one kernel, 3 x 2": (2, 3, 2),
    "one kernel, 9 x 1": (2, 9, 1),
}


@contextlib.contextmanager
def stepping(name: str) -> Iterator[None]:
    """Within: decoding by one of `STEPS`."""
    from octavo.ops.scan import delta_step, delta_stream
    from octavo.states import gpu

    copied, depth, resident = STEPS[name]
    module = delta_step if copied == 2 else delta_stream
    before = gpu._COPIED, module.DEPTH, dict(module.RESIDENT)
    gpu._COPIED = copied
    if copied:
        module.DEPTH, module.RESIDENT[2] = depth, resident
    try:
        yield
    finally:
        gpu._COPIED, module.DEPTH = before[:2]
        module.RESIDENT.update(before[2])


def stepped(name: str) -> list[torch.Tensor]:
    """Results of rows that decode across blocks and a border, a row of padding behind them, and all that is kept."""
    import gpu_states_rig
    import state_rig
    from octavo.states.gpu import GpuStates

    case = gpu_states_rig.MAKERS["delta"](DTYPE, *states.sizes_of("delta"))
    gpu_states_rig.move(case, states.DEVICE)
    begins = (1, 15) if DRY else (1, 15, 30, 47, 62, 63, 64, 79, 126, 130, 190, 200)
    rows = state_rig.Rows(
        case, GpuStates(), state_rig.draw_all(case, [each + 5 for each in begins]), device=states.DEVICE, block_size=64
    )
    with stepping(name):
        rows.compute(dict(enumerate(begins)))
        rows.padded = 1
        for turn in range(1 if DRY else 5):
            rows.compute({(row + turn) % len(begins): 1 for row in range(len(begins))})
    return [*rows.results, rows.pool.buffer.clone()]


def step_bits(name: str, expected: list[torch.Tensor]) -> str:
    """Whether one of `STEPS` gives Triton's bits, and keeps them."""
    if not expected:
        expected += stepped("Triton's")
    differ = [
        int((one.view(torch.uint8) != other.view(torch.uint8)).sum())
        for one, other in zip(stepped(name), expected, strict=True)
    ]
    return f"OTHER BITS, bytes of each row and of what is kept: {differ}" if any(differ) else "Triton's bits"


def step_times(name: str, num_rows: int, computed: int) -> str:
    """Microseconds of one of `STEPS` beside those of bytes."""
    with stepping(name):
        return states.decode("delta", num_rows, computed)


def walk_steps(counts: Sequence[int]) -> str:
    """Microseconds of prompts by Triton's walk and by CUDA's, and whether results and all that is kept are the same."""
    from octavo.states import gpu

    before, found, expected = gpu._WALKS_COPIED, [], []
    for copied in (False, True):
        gpu._WALKS_COPIED = copied
        us, parts = states.timed("delta", counts, 0)
        made = states.made("delta", counts)
        expected = expected or made
        found.append(
            f"{'CUDA' if copied else 'Triton'} {us:.0f}{states.is_same(made, expected)} [{states.shown(parts)}]"
        )
    gpu._WALKS_COPIED = before
    return "us: " + "; ".join(found)


# Of the delta rule's prompts: channels and warps of a walk, chunks on their way or used; warps and registers where
# chunks are made ready. None of it moves a bit.
WALKS = (
    ((32, 4), 2, 8, 128),
    ((32, 4), 3, 8, 128),
    ((64, 8), 2, 4, 255),
    ((16, 4), 2, 8, 255),
)


def walk_choices(counts: Sequence[int]) -> str:
    """Microseconds of the delta rule's prompts by `WALKS`, of its kernels, and as it is without."""
    from octavo.states import gpu

    names = "_DELTA_STAGES", "_CHUNK_WARPS", "_CHUNK_REGISTERS", "_DELTA_WALKED"
    before, tiles, found = [getattr(gpu, name) for name in names], gpu._DELTA_TILES, []
    tile = tiles[gpu._WALKING]
    gpu._DELTA_WALKED = ()
    expected = states.made("delta", counts)[:1]
    for choice in (*WALKS, None):
        tiles[gpu._WALKING], *values = (*choice, before[3]) if choice else (tile, *before[:3], ())
        for key, value in zip(names, values, strict=True):
            setattr(gpu, key, value)
        with contextlib.suppress(RuntimeError):  # it needs more shared memory than there is
            us, parts = states.timed("delta", counts, 0)
            said = f"{choice[0][0]}x{choice[0][1]} {choice[1:]}" if choice else "not walked"
            same = states.is_same(states.made("delta", counts)[:1], expected)
            found.append(f"{said}: {us:.0f}{same} [{states.shown(parts)}]")
    for key, value in zip(names, before, strict=True):
        setattr(gpu, key, value)
    tiles[gpu._WALKING] = tile
    return "\n      ".join(found)


def bits_without(*off: str) -> str:
    """Results that differ between cuts of prompts, where some kernels are not used."""
    from octavo.states import gpu

    before = [getattr(gpu, each) for each in off]
    for each in off:
        setattr(gpu, each, ())
    try:
        return states.bits("delta", DTYPE)
    finally:
        for each, value in zip(off, before, strict=True):
            setattr(gpu, each, value)


def main() -> None:
    """The parts that are asked for."""
    prompts = ([70],) if DRY else ([8192], [512] * 16, [4000] * 2)
    if "bits" in sys.argv:
        states.attempt("accuracy", states.accuracy, "delta", DTYPE)
        states.attempt("bits", states.bits, "delta", DTYPE)
        states.attempt("bits, not walked", bits_without, "_DELTA_WALKED")
        states.attempt("bits, nor streamed", bits_without, "_DELTA_WALKED", "_STREAMED")
    if "steps" in sys.argv:
        expected: list[torch.Tensor] = []
        for name in STEPS:  # one behind the other: what an error leaves of a GPU is of no use
            states.attempt(f"{name}: bits", step_bits, name, expected)
            for num_rows, computed in ((2, 70),) if DRY else ((1, 1056), (64, 1056), (256, 160)):
                states.attempt(f"{name}: {num_rows} rows", step_times, name, num_rows, computed)
        states.attempt("bits over cuts", states.bits, "delta", DTYPE)
        states.attempt("accuracy", states.accuracy, "delta", DTYPE)
    if "walked" in sys.argv:
        for counts in prompts:
            states.attempt(f"walked {len(counts)} x {counts[0]}", walk_steps, counts)
        states.attempt("bits over cuts", states.bits, "delta", DTYPE)
    if "decode" in sys.argv:
        for num_rows, computed in ((1, 70),) if DRY else ((1, 1056), (64, 1056), (64, 1087), (256, 160)):
            states.attempt(f"decode {num_rows} rows at {computed}", states.decode, "delta", num_rows, computed)
    if "prompts" in sys.argv:
        for counts in prompts:
            states.attempt(f"{len(counts)} x {counts[0]}", states.prefill, "delta", len(counts), counts[0])
    if "choices" in sys.argv:
        for num_rows in (2,) if DRY else (64, 256):
            states.attempt(f"decode {num_rows}", decode_choices, [1] * num_rows, 70 if DRY else 160)
    if "walks" in sys.argv:
        for counts in prompts[:2]:
            states.attempt(f"walk {len(counts)} x {counts[0]}", walk_choices, counts)
    states.show_table()


if __name__ == "__main__":
    main()
