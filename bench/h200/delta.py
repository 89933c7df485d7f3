"""The gated delta rule on a GPU, one part a call: `python bench/h200/delta.py PART [--dry]`.

bits: over cuts, batches and rejected drafts, with the kernels that stream states and walk prompts and without. decode,
prompts: microseconds beside what bytes or operations take. steps, walked: decoding and prompts by Triton's kernels and
by those in CUDA C++, bits and times. beside: rows that decode beside a prompt. verify: rows that verify drafts. engine,
plain: tokens a second of the shape `gdn`, as it is and by Triton alone. choices, walks: of Triton's by tiles, stages,
warps and registers, with the bits of prompts beside those of blocks. A table comes last. See states.py for --dry.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import time
from collections.abc import Iterator, Sequence
from types import ModuleType
from unittest import mock

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
    from octavo.states import delta_gpu as gpu

    names = "_STREAM_REGISTERS", "_STREAM_STAGES", "_STREAM_TILES", "_READY_WARPS", "_READY_REGISTERS", "_STREAMED"
    before, tiles, found = [getattr(gpu, name) for name in names], gpu._TILES, []
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


# How the delta rule decodes: of the one kernel steps of a ring, and blocks a processor.
STEPS: dict[str, tuple[int, int] | None] = {
    "Triton's": None,
    "one kernel, 4 x 2": (4, 2),
    "one kernel, 3 x 2": (3, 2),
}


@contextlib.contextmanager
def copying(*kernels: ModuleType) -> Iterator[None]:
    """Within: of the kernels in CUDA C++ these run, where they serve."""
    from octavo.states import delta_gpu

    with mock.patch.multiple(delta_gpu, _COPIED=kernels, _FEWEST_STEPS=1):
        yield


@contextlib.contextmanager
def stepping(name: str) -> Iterator[None]:
    """Within: decoding by one of `STEPS`."""
    from octavo.ops.scan.delta import delta_step

    choice = STEPS[name]
    depth, resident = choice or (delta_step.DEPTH, delta_step.RESIDENT[2])
    with (
        copying(*(delta_step,) * (choice is not None)),
        mock.patch.object(delta_step, "DEPTH", depth),
        mock.patch.dict(delta_step.RESIDENT, {2: resident}),
    ):
        yield


def stepped(name: str) -> list[torch.Tensor]:
    """Results of rows that decode across blocks and a border, a row of padding behind them, and all that is kept."""
    import gpu_states_rig
    import state_rig
    from octavo.states.gpu import GpuStates

    case = gpu_states_rig.MAKERS["delta"](DTYPE, *states.sizes_of("delta"))
    state_rig.move(case, states.DEVICE)
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
    """Microseconds of one of `STEPS` beside those of bytes, of one layer in a graph and of four."""
    with stepping(name):
        return "; ".join(states.decode("delta", num_rows, computed, layers) for layers in (1, 4))


# How prompts are walked, and chunks made ready: warp groups of a block that walks, and blocks of a processor that makes
# ready; 0 is Triton's.
WALKING = ((0, 0), (2, 0), (1, 0), (2, 4), (2, 3), (1, 4))


@contextlib.contextmanager
def walking(groups: int, resident: int) -> Iterator[None]:
    """Within: prompts by one of `WALKING`, whatever bits it has."""
    from octavo.ops.scan.delta import delta_prepare, delta_prompts
    from octavo.states import delta_gpu

    kernels = *((delta_prompts,) if groups else ()), *((delta_prepare,) if resident else ())
    with (
        copying(*kernels),
        mock.patch.object(delta_prompts, "groups_of", lambda *_: groups),
        mock.patch.dict(delta_prepare.RESIDENT, {2: resident or 4}),
        mock.patch.object(delta_gpu, "_agrees", lambda *_: True),
    ):
        yield


def walk_steps(counts: Sequence[int]) -> str:
    """Microseconds of prompts by `WALKING`, alone and as one of four layers, and whether what is kept is the same."""
    found, expected = list[str](), list[torch.Tensor]()
    for groups, resident in WALKING:
        with walking(groups, resident):
            made = states.made("delta", counts)
            expected = expected or made
            same = states.is_same(made, expected)
            us, parts = states.timed("delta", counts, 0)
            of_four, _ = states.timed("delta", counts, 0, layers=4)
        limit = states.prompt_limit("delta", len(counts), counts[0], of_four)
        said = f"{us:.0f} and {of_four:.0f}{same} [{states.shown(parts)}], {limit}"
        found.append(f"{groups} groups, {resident} blocks: {said}")
    return "us by\n      " + "\n      ".join(found)


def differences(groups: int, resident: int) -> str:
    """What differs between Triton's kernels and these, of the examples that a first launch compares: bits of each."""
    from octavo.ops.scan.delta import delta_prepare, delta_prompts
    from octavo.states import delta_check, delta_gpu
    from octavo.states.reference import DELTA_INPUTS

    _, rows = states.operator("delta", [70], 0)
    (key_heads, heads, keys, values), rule = states.sizes_of("delta"), rows.case.part.operands
    told = rows.backend._tell(rows.own, "delta", ("state",), DELTA_INPUTS, (values, keys, values, values, 1, 1))
    like = torch.empty(0, 2 * key_heads * keys + heads * values, dtype=states.BF16, device=states.DEVICE)
    those = {delta_prompts} | ({delta_prepare} if resident else set())
    runs = [
        functools.partial(delta_gpu.gated_delta, choose=choose)
        for choose in (lambda *_: False, lambda kernel, *_: kernel in those)
    ]
    found = []
    with walking(groups, resident):
        for kernel in those:
            macros = kernel.macros((heads, key_heads), rows.own.block_size, told.forms, like.dtype)
            assert kernel.is_loaded(macros, like.device)
        for row in (delta_check.PROMPT, delta_check.CONTINUED):
            made = delta_check.results(rows.own, told, rule, like, row, runs)
            names = "out", "state", "key", "value", "update", "total", "rate"
            for name, one, other in zip(names, *made, strict=True):
                kind = {2: torch.int16, 4: torch.int32}[one.element_size()]
                bad = (one.view(kind) != other.view(kind)).flatten()
                if bad.any():
                    apart = (one.double() - other.double()).flatten()[bad].abs().max()
                    first = bad.nonzero()[0].item()
                    found.append(f"{row} {name}: {bad.sum()} of {bad.numel()}, {apart:.3g} apart, first {first}")
    return "; ".join(found) or "nothing"


def walk_bits(groups: int, resident: int) -> str:
    """Results that differ between cuts of prompts."""
    from octavo.ops.scan.delta import delta_step
    from octavo.states import delta_gpu

    with walking(groups, resident), mock.patch.object(delta_gpu, "_COPIED", (*delta_gpu._COPIED, delta_step)):
        return states.bits("delta", DTYPE)


def beside_a_prompt(num_rows: int, count: int, *kernels: ModuleType) -> str:
    """Bits and microseconds of rows that decode beside a prompt: all by one scan, and rows of one token apart."""
    torch.manual_seed(1)
    run, rows = states.operator("delta", [count] * (num_rows + 1), 0)
    with copying(*kernels):
        run()
    counts, before = [1] * num_rows + [count], [count] * num_rows + [0]
    starts, lengths = torch.tensor([0, *counts]).cumsum(0), [sum(own) for own in zip(before, counts, strict=True)]
    step = dataclasses.replace(
        rows.own.inputs,
        max_query_len=count,
        max_seq_len=max(lengths),
        query_start=starts.int().to(states.DEVICE),
        seq_lens=torch.tensor(lengths, dtype=torch.int32, device=states.DEVICE),
        positions=torch.cat([torch.arange(own, end) for own, end in zip(before, lengths, strict=True)]).to(
            states.DEVICE
        ),
    )
    one = rows.case.draw(torch.Generator().manual_seed(0), 1)
    given = [torch.randn(sum(counts), *each.shape[1:], device=states.DEVICE).to(each.dtype) for each in one]
    found, made = list[str](), list[torch.Tensor]()
    for name, bounds in (("by one scan", None), ("apart", (num_rows, 1)), ("of a graph", (num_rows + 1,) * 2)):
        rows.step.prepare(dataclasses.replace(step, bounds=bounds))
        with copying(*kernels):
            result = rows.case.run(rows.backend, rows.own, given)
            us, parts = states.timed_graph(lambda: rows.case.run(rows.backend, rows.own, given))
        made = made or [result.clone()]
        found.append(f"{name} {us:.0f}{states.is_same([result], made)} [{states.shown(parts)}]")
    return "us: " + "; ".join(found)


def verified(num_rows: int, count: int, computed: int) -> str:
    """Microseconds where rows verify drafts: by Triton's kernels, by which such steps go, and by those for prompts."""
    from octavo.ops.scan.delta import delta_prepare, delta_prompts
    from octavo.states import delta_gpu

    found = []
    for few, kernels in ((delta_gpu.FEW, ()), (1, (delta_prompts, delta_prepare))):
        with mock.patch.object(delta_gpu, "FEW", few), copying(*kernels):
            us, parts = states.timed("delta", [count] * num_rows, computed, layers=4)
        found.append(f"{'CUDA' if kernels else 'Triton'} {us:.1f} [{states.shown(parts)}]")
    return "us: " + "; ".join(found)


def checks() -> str:
    """What the comparisons ahead of a first launch found."""
    from octavo.states import agreement

    return ", ".join(f"{str(what[0]).rpartition('.')[2]} {agrees}" for what, agrees in agreement._found.items())


def engine() -> str:
    """Tokens a second of the shape `gdn`."""
    from octavo.bench import gpu_engine
    from octavo.bench.engine import dummy_model
    from octavo.bench.shapes import SHAPES

    fields = {"device": states.DEVICE, "dtype": "bfloat16", "numerics": "reproducible"}
    shape = "tiny-hybrid" if DRY else "gdn"
    run, found, began = gpu_engine.Run(shape, SHAPES[shape], fields, dummy_model), [], time.time()
    with run.engine() as llm:
        llm.engine.capture_rest()
        started = time.time() - began
        for name in ("single",) if DRY else ("decode64", "prefill"):
            record = gpu_engine._timed(run, llm, name, 4.28e12, 7.2e14)
            found.append(f"{name} {record['value']:.1f}")
            print(f"{name}: {record}", flush=True)
    return f"{', '.join(found)} tokens/s; start and graphs {started:.0f} s, all {time.time() - began:.0f} s"


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
    from octavo.states import delta_gpu as gpu

    names = "_WALK_STAGES", "_CHUNK_WARPS", "_CHUNK_REGISTERS", "_WALKED"
    before, tiles, found = [getattr(gpu, name) for name in names], gpu._TILES, []
    tile = tiles[gpu._WALKING]
    gpu._WALKED = ()
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
    from octavo.states import delta_gpu as gpu

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
    from octavo.ops.scan.delta import delta_prepare, delta_prompts, delta_step

    prompts = ([70],) if DRY else ([8192], [512] * 16, [4000] * 2)
    if "bits" in sys.argv:
        states.attempt("accuracy", states.accuracy, "delta", DTYPE)
        states.attempt("bits", states.bits, "delta", DTYPE)
        states.attempt("bits, not walked", bits_without, "_WALKED")
        states.attempt("bits, nor streamed", bits_without, "_WALKED", "_STREAMED")
    if "steps" in sys.argv:
        expected: list[torch.Tensor] = []
        for name in STEPS:  # one behind the other: what an error leaves of a GPU is of no use
            states.attempt(f"{name}: bits", step_bits, name, expected)
            for num_rows, computed in ((2, 70),) if DRY else ((1, 1056), (8, 1056), (64, 1056), (64, 1087), (256, 160)):
                states.attempt(f"{name}: {num_rows} rows at {computed}", step_times, name, num_rows, computed)
        states.attempt("compared", checks)
        with copying(delta_step):
            states.attempt("bits over cuts", states.bits, "delta", DTYPE)
    if "beside" in sys.argv:
        for num_rows, count in ((2, 70),) if DRY else ((64, 512), (256, 512)):
            name = f"{num_rows} rows beside {count} tokens"
            states.attempt(f"{name}, Triton's", beside_a_prompt, num_rows, count)
            kernels = delta_step, delta_prompts, delta_prepare
            states.attempt(name, beside_a_prompt, num_rows, count, *kernels)
    if "verify" in sys.argv:
        for num_rows, count in ((2, 3),) if DRY else ((1, 5), (8, 5), (64, 5), (64, 2)):
            computed = 70 if DRY else 1056
            states.attempt(f"{num_rows} rows verify {count}", verified, num_rows, count, computed)
    if "walked" in sys.argv:
        for groups, resident in ((2, 0), (1, 0), (2, 4)):
            states.attempt(f"differs, {groups} groups, {resident} blocks", differences, groups, resident)
        for counts in (*prompts, *(() if DRY else ([2048] * 4, [64], [40] * 4, [300] * 27))):
            states.attempt(f"walked {len(counts)} x {counts[0]}", walk_steps, counts)
        with copying(delta_prompts, delta_prepare):
            states.made("delta", [70])
        states.attempt("compared", checks)
        for groups, resident in ((2, 4), (1, 3)):
            states.attempt(f"bits over cuts, {groups} groups, {resident} blocks", walk_bits, groups, resident)
    if "decode" in sys.argv:
        for num_rows, computed in ((1, 70),) if DRY else ((1, 1056), (64, 1056), (64, 1087), (256, 160)):
            states.attempt(f"decode {num_rows} rows at {computed}", states.decode, "delta", num_rows, computed)
    if "prompts" in sys.argv:
        for counts in prompts:
            states.attempt(f"{len(counts)} x {counts[0]}", states.prefill, "delta", len(counts), counts[0])
    if "engine" in sys.argv:
        states.attempt("gdn", engine)
    if "plain" in sys.argv:
        with copying():
            states.attempt("gdn by Triton alone", engine)
    if "choices" in sys.argv:
        for num_rows in (2,) if DRY else (64, 256):
            states.attempt(f"decode {num_rows}", decode_choices, [1] * num_rows, 70 if DRY else 160)
    if "walks" in sys.argv:
        for counts in prompts[:2]:
            states.attempt(f"walk {len(counts)} x {counts[0]}", walk_choices, counts)
    states.show_table()


if __name__ == "__main__":
    main()
