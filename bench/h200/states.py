"""Layers with states on a GPU, one part a call: `python bench/h200/states.py correct|times|decoding|prompts|engine`.

correct: operators against float64, and bits over cuts, batches and rejected drafts. times: microseconds of operators in
a graph beside what their bytes or operations take. prompts [conv|mamba2]: the same of prompts by
Mamba-2 and its convolution, with the bits of other tiles; decoding: of steps; products: of one row's. engine:
octavo-tiny-hybrid with graphs and without, and what requests compile. --dry: the same with tiny shapes on a CPU,
interpreted, whose times say nothing. A table is last.
"""

from __future__ import annotations

import contextlib
import random
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests/states")]

DRY = "--dry" in sys.argv
DEVICE = "cpu" if DRY else "cuda"
BF16, F32 = torch.bfloat16, torch.float32
READS, PRODUCTS = 4.8e6, 800e6  # bytes and operations a microsecond, of an H200; an H100 reads 3.35e6
SHAPES: dict[str, tuple[int, ...]] = {
    "delta": (16, 32, 128, 128),
    "mamba2": (128, 64, 8, 128),
    "conv": (10240, 4),
    "mamba1": (8192, 16),
}
TINY: dict[str, tuple[int, ...]] = {
    "delta": (1, 2, 16, 32),
    "mamba2": (2, 16, 1, 16),
    "conv": (64, 4),
    "mamba1": (32, 16),
}
BEGAN = time.time()
table: list[tuple[str, str]] = []


def attempt(name: str, ask: Callable[..., str], *args: Any) -> None:
    """A line of the table, whatever happens."""
    try:
        text = ask(*args)
    except Exception as error:
        traceback.print_exc()
        text = f"FAILED {type(error).__name__}: {str(error)[:160]}"
    table.append((name, text))
    print(f"[{time.time() - BEGAN:5.1f}s] {name}: {text}", flush=True)


def sizes_of(name: str) -> tuple[int, ...]:
    """Of a case."""
    return (TINY if DRY else SHAPES)[name]


def accuracy(name: str, dtype: torch.dtype) -> str:
    """Prompts in pieces, and decoding across a border."""
    import gpu_states_rig

    lengths = (1, 17, 70) if DRY else (1, 17, 70, 200)
    gpu_states_rig.check_results(DEVICE, name, dtype, lengths, 90, sizes_of(name))
    if name in ("delta", "mamba2"):
        gpu_states_rig.check_decoding(DEVICE, name, dtype, sizes_of(name))
    return "within 3e-5 of float64" if dtype is F32 else "within 3e-2 of float64"


def bits(name: str, dtype: torch.dtype) -> str:
    """Rows alone in one step, and the same rows cut anyhow, beside others, with rejected tokens behind."""
    import gpu_states_rig
    import state_rig
    from octavo.states.gpu import GpuStates

    case = gpu_states_rig.MAKERS[name](dtype, *sizes_of(name))
    state_rig.move(case, DEVICE)
    lengths = (70, 33) if DRY else (130, 200, 64, 65, 15)
    drawn, backend = state_rig.draw_all(case, lengths), GpuStates()
    expected = state_rig.alone(case, backend, drawn, device=DEVICE, block_size=64)
    bad = count = 0
    last = 100, 2, 16 if dtype is BF16 else 64
    cuts = ((7, 3, 64),) if DRY else ((1, 0, 64), (7, 3, 64), (16, 0, 64), (64, 0, 64), last)
    for largest, spoilt, block_size in cuts:
        rng = random.Random(largest)
        rows = state_rig.Rows(case, backend, drawn, device=DEVICE, block_size=block_size, seed=largest)
        for row in range(len(lengths)) if largest == 1 else ():
            rows.keep_one_state(row)
        while left := [row for row, length in enumerate(lengths) if rows.computed[row] < length]:
            chosen = rng.sample(left, rng.randint(1, len(left)))
            rows.compute(
                {row: min(rng.randint(1, largest), lengths[row] - rows.computed[row]) for row in chosen}, spoilt
            )
        for row, (found, own) in enumerate(zip(rows.results, expected, strict=True)):
            wrong = (found != own).any(1).nonzero().flatten().tolist()
            bad, count = bad + len(wrong), count + len(own)
            if wrong:
                print(name, dtype, f"steps of {largest}, row {row} of {len(own)}: differs at {wrong[:20]}")
    return f"{bad} of {count} results differ"


def operator(
    name: str, counts: Sequence[int], computed: int, *, keeps: bool = True
) -> tuple[Callable[[], object], Any]:
    """(what runs a step of an operator, where rows have `computed` tokens already; what it keeps alive).

    keeps: the states at all borders that the step passes, or none.
    """
    import gpu_states_rig
    import state_rig
    from octavo.states.base import StateInputs
    from octavo.states.gpu import GpuStates

    case = gpu_states_rig.MAKERS[name](BF16, *sizes_of(name))
    state_rig.move(case, DEVICE)
    one = [each[:1] for each in case.draw(torch.Generator().manual_seed(0), 1)]
    drawn = [tuple(each.expand(computed + counts[0], *each.shape[1:]) for each in one)] * len(counts)
    rows = state_rig.Rows(case, GpuStates(), drawn, device=DEVICE, block_size=64)
    rows.pool.buffer.zero_()
    if not keeps:
        rows.own.state_table.zero_()
    starts = torch.tensor([0, *counts]).cumsum(0)
    rows.step.prepare(
        StateInputs(
            max_query_len=max(counts),
            max_seq_len=computed + max(counts),
            rows=torch.arange(len(counts), device=DEVICE),
            query_start=starts.int().to(DEVICE),
            seq_lens=torch.tensor([computed + count for count in counts], dtype=torch.int32, device=DEVICE),
            positions=torch.cat([torch.arange(computed, computed + count) for count in counts]).to(DEVICE),
            verifies=computed % 64 > 0,
        )
    )
    given = [torch.randn(sum(counts), *each.shape[1:], device=DEVICE).to(each.dtype) for each in one]
    return lambda: run_whole(rows, given), rows


def run_whole(rows: Any, given: Sequence[torch.Tensor]) -> torch.Tensor:
    """What the operator gives, and what it leaves to a step's end."""
    result: torch.Tensor = rows.case.run(rows.backend, rows.own, given)
    rows.step.finish()
    return result


def timed(
    name: str, counts: Sequence[int], computed: int, *, keeps: bool = True, layers: int = 1
) -> tuple[float, dict[str, float]]:
    """(microseconds of the operator in a graph, of its kernels by name). keeps: see `operator`.

    layers: how many of them the graph has, one behind the other, each with what it keeps: as a model has them.
    """
    operators = [operator(name, counts, computed, keeps=keeps) for _ in range(layers)]

    def run() -> None:
        for each, _ in operators:
            each()

    us, parts = timed_graph(run)
    operators.clear()
    if not DRY:
        torch.cuda.empty_cache()
    return us / layers, {key: took / layers for key, took in parts.items()}


def timed_graph(run: Callable[[], object]) -> tuple[float, dict[str, float]]:
    """(microseconds in a graph, of its kernels by name)."""
    if DRY:
        began = time.perf_counter()
        run()
        return (time.perf_counter() - began) * 1e6, {"interpreted": 1.0}
    for _ in range(2):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(6):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(3):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / 3)
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    parts = {event.key: event.self_device_time_total for event in profiler.key_averages()}
    return statistics.median(times), {key: us for key, us in parts.items() if us > 0.5}


def shown(parts: dict[str, float]) -> str:
    """The longest kernels."""
    longest = sorted(parts.items(), key=lambda part: -part[1])[:6]
    return ", ".join(f"{kernel[:20]} {us:.0f}" for kernel, us in longest)


def decode(name: str, num_rows: int, computed: int, layers: int = 1) -> str:
    """One token a row. layers: see `timed`."""
    us, parts = timed(name, [1] * num_rows, computed, layers=layers)
    place = computed % 64
    if name == "delta":
        key_heads, heads, keys, values = sizes_of(name)
        state, opened = 4 * heads * keys * values, place * (2 * key_heads * keys + 4 * heads + 2 * heads * values)
        step = 2 * (2 * key_heads * keys + heads * values) + 6 * heads * values + 2 * key_heads * keys
    else:
        heads, size, groups, states = sizes_of(name)
        state, opened = 4 * heads * size * states, place * (2 * heads * size + 2 * groups * states + 8 * heads)
        step = 2 * (heads * size + 2 * groups * states) + 4 * heads * size
    limit = num_rows * (state + opened + step) / READS
    alone = limit / max(parts.values())
    return f"{us:8.1f} us, bytes {limit:7.1f}: {limit / us:4.0%}, longest kernel {alone:4.0%} [{shown(parts)}]"


def prefill(name: str, num_rows: int, count: int) -> str:
    """Whole prompts, of one layer in a graph, and as one of four: of these the share of the bytes."""
    us, parts = timed(name, [count] * num_rows, 0)
    of_four, _ = timed(name, [count] * num_rows, 0, layers=4)
    limit = prompt_limit(name, num_rows, count, of_four)
    return f"{us:8.0f} us, as one of four {of_four:.0f}, {limit} [{shown(parts)}]"


def prompt_limit(name: str, num_rows: int, count: int, us: float) -> str:
    """What bytes or operations of prompts take, of which the states at borders are what prefix caching keeps."""
    tokens = num_rows * count
    if name == "delta":
        key_heads, heads, keys, values = sizes_of(name)
        num_bytes = 2 * tokens * (2 * key_heads * keys + 2 * heads * values)
        kept = 4 * heads * keys * values
        operations = tokens * heads * (6 * keys * values + 2 * 64 * (keys + values))
    else:
        heads, size, groups, states = sizes_of(name)
        num_bytes = 2 * tokens * (2 * heads * size + 2 * groups * states)
        kept = 4 * heads * size * states
        operations = tokens * (heads * (4 * states * size + 64 * size) + groups * 64 * states)
    all_bytes = num_bytes + num_rows * (count // 64) * kept
    least, most = num_bytes / READS, all_bytes / READS
    return (
        f"bytes {least:.0f}, with states at borders {most:.0f}: {most / us:.0%}; products {operations / PRODUCTS:.0f}"
    )


def advances(counts: Sequence[int]) -> str:
    """Microseconds of Mamba-2 where all rows end a chunk, by what writes their states.

    That is the kernel in CUDA C++, or Triton's, by (channels, warps) of a program.
    """
    from octavo.states import gpu
    from octavo.states.mamba2 import mamba2_advance

    tile, found = gpu._MAMBA2_TILES[gpu._ADVANCING], list[str]()
    for copied, own in ((True, tile), (False, tile), (False, (64, 8))):
        chosen = mock.patch.object(mamba2_advance, "_COPIED", copied)
        with chosen, mock.patch.dict(gpu._MAMBA2_TILES, {gpu._ADVANCING: own}):
            us, parts = timed("mamba2", counts, 127)
        alone = sum(took for key, took in parts.items() if "advance" in key)
        found.append(f"{'CUDA C++' if copied else f'{own[0]}x{own[1]}'} {us:.0f} (it alone {alone:.0f})")
    return f"us: {', '.join(found)}"


def convolution_of(num_rows: int) -> str:
    """Microseconds where rows decode, of a convolution by itself, by channels of a program."""
    from octavo.states import gpu

    before, found = gpu._DECODE_CHANNELS, []
    for channels in (256, 512, 1024):
        gpu._DECODE_CHANNELS = channels
        found.append(f"{channels} channels {timed('conv', [1] * num_rows, 160)[0]:.1f}")
    gpu._DECODE_CHANNELS = before
    return f"us: {', '.join(found)}"


def products(n: int, k: int) -> str:
    """Microseconds of one row's product by [n, k] as a layer runs it, and by the tile of few rows; and their bits."""
    from octavo.ops.gemm import gpu

    weights = [torch.randn(n, k, device=DEVICE).to(BF16) for _ in range(1 if DRY else 6)]  # more than an L2 holds
    x, outs = torch.randn(1, k, device=DEVICE).to(BF16), torch.zeros(2, 1, n, device=DEVICE, dtype=BF16)
    found = []
    for out, tile in zip(outs, (None, gpu.tile_for(1, n, k, BF16)), strict=True):
        for weight in weights:
            gpu.linear(x, weight, None, out, tile)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for weight in weights:
                gpu.linear(x, weight, None, out, tile)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(10):
            graph.replay()
        end.record()
        end.synchronize()
        us = begin.elapsed_time(end) * 1e3 / 10 / len(weights)
        found.append(f"{us:.1f} ({2 * n * k / us / 1e6:.2f} TB/s)")
    return f"us: {', by the tile '.join(found)}; {'same bits' if torch.equal(*outs) else 'OTHER BITS'}"


def made(name: str, counts: Sequence[int]) -> list[torch.Tensor]:
    """What an operator gives of drawn prompts, and all that it keeps."""
    torch.manual_seed(0)
    run, rows = operator(name, counts, 0)
    result = run()
    assert isinstance(result, torch.Tensor)
    return [result.clone(), rows.pool.buffer.clone()]


def is_same(found: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> str:
    """Whether all bits are."""
    same = (
        torch.equal(one.view(torch.uint8), other.view(torch.uint8)) for one, other in zip(found, others, strict=True)
    )
    return "" if all(same) else " OTHER BITS"


def walks(counts: Sequence[int]) -> str:
    """Microseconds of Mamba-2's prompts: (channels, warps, stages, registers) of a walk, and without walks.

    By Triton's kernels.
    """
    from octavo.states import gpu
    from octavo.states.mamba2 import mamba2_prompts

    mamba2_prompts._COPIED, copied = False, mamba2_prompts._COPIED
    before = (gpu._WALK_STAGES, gpu._WALK_REGISTERS, gpu._WALKED, gpu._MAMBA2_TILES[gpu._WALKING])
    found, expected = [f"no states kept {timed('mamba2', counts, 0, keeps=False)[0]:.0f}"], made("mamba2", counts)
    for wide, warps, stages, most in (
        (64, 4, 2, None),
        (64, 4, 3, None),
        (64, 8, 2, None),
        (64, 8, 3, None),
        (64, 8, 2, 128),
        (32, 4, 2, None),
        (32, 4, 2, 168),
        (32, 4, 3, None),
    ):
        gpu._WALK_STAGES, gpu._WALK_REGISTERS, gpu._MAMBA2_TILES[gpu._WALKING] = stages, most, (wide, warps)
        with contextlib.suppress(Exception):  # it needs more shared memory than there is
            us, parts = timed("mamba2", counts, 0)
            same = is_same(made("mamba2", counts), expected)
            alone = parts.get("mamba2_walk", 0)
            found.append(f"{wide}x{warps} {stages} stages {most or 255}: {us:.0f} ({alone:.0f}){same}")
    gpu._WALKED = ()
    same = is_same(made("mamba2", counts)[:1], expected[:1])  # it keeps a chunk of inputs less
    found.append(f"none {timed('mamba2', counts, 0)[0]:.0f}{same}")
    gpu._WALK_STAGES, gpu._WALK_REGISTERS, gpu._WALKED, gpu._MAMBA2_TILES[gpu._WALKING] = before
    mamba2_prompts._COPIED = copied
    return f"us: {', '.join(found)}"


def convolutions(counts: Sequence[int]) -> str:
    """Microseconds of a model's convolution over prompts: (tokens, channels) of a program, and of the other kernel."""
    from octavo.layers import recurrent
    from octavo.states import gpu

    before, chunk, found = (gpu._CONV_TOKENS, gpu._CONV_TILE, gpu._FEW), recurrent.SHORT_CHUNK, []
    recurrent.SHORT_CHUNK = 64  # as beside a scan
    expected = made("conv", counts)
    for tokens, tile, few in ((16, 128, 16), (8, 128, 16), (16, 256, 16), (8, 256, 16), (16, 64, 16), (0, 0, 1 << 30)):
        gpu._CONV_TOKENS, gpu._CONV_TILE, gpu._FEW = tokens, tile, few
        us, same = timed("conv", counts, 0)[0], is_same(made("conv", counts)[:1], expected[:1])
        found.append((f"{tokens}x{tile} {us:.0f}" if tokens else f"for few tokens {us:.0f}") + same)
    gpu._CONV_TOKENS, gpu._CONV_TILE, gpu._FEW = before
    recurrent.SHORT_CHUNK = chunk
    channels, tokens = sizes_of("conv")[0], sum(counts)
    return f"us: {', '.join(found)}; bytes {4 * channels * tokens / READS:.0f}"


@contextlib.contextmanager
def compiled() -> Iterator[list[str]]:
    """Names of the kernels that Triton compiles within, and does not find on disk."""
    import triton

    names: list[str] = []
    knobs = triton.knobs.compilation
    before = knobs.listener
    knobs.listener = lambda *, src, cache_hit, **_: names.append(getattr(src, "name", "?")) if not cache_hit else None
    try:
        yield names
    finally:
        knobs.listener = before


def engine(dtype: str) -> str:
    """Graphs and none give the same, steps with prompts among them, and no request compiles anything."""
    from insides import runner_of
    from octavo import LLM, SamplingParams

    rng = random.Random(0)
    prompts = [{"prompt_token_ids": rng.choices(range(50, 4000), k=rng.randint(1, 150))} for _ in range(24)]
    params = SamplingParams(temperature=0.8, seed=7, max_tokens=70, ignore_eos=True, logprobs=0, detokenize=False)
    shared: dict[str, Any] = {"model": "octavo-tiny-hybrid", "device": DEVICE, "dtype": dtype, "max_model_len": 512}
    found, texts = [], []
    for eager in (False, True):
        began = time.time()
        with (
            LLM(**shared, enforce_eager=eager, max_num_seqs=16, gpu_memory_utilization=0.3) as llm,
            compiled() as names,
        ):
            started = time.time() - began
            outputs = llm.generate(prompts, params, use_tqdm=False)
            logprobs = [
                [next(iter(each.values())).logprob for each in own.outputs[0].logprobs or ()] for own in outputs
            ]
            found.append(([list(own.outputs[0].token_ids) for own in outputs], logprobs))
            keys = list(runner_of(llm.engine)._graphs._graphs)
        kinds = f"{sum(key.is_decode for key in keys)} decode and {sum(not key.is_decode for key in keys)} mixed graphs"
        texts.append(
            f"{'eager' if eager else kinds}: start {started:.1f} s, requests compiled {len(names)} {names[:4]}"
        )
    return f"{'SAME BITS' if found[0] == found[1] else 'BITS DIFFER'}; {'; '.join(texts)}"


def show_table() -> None:
    """All lines."""
    where = "a CPU, interpreted" if DRY else torch.cuda.get_device_name()
    print(f"\n{where}, {time.time() - BEGAN:.0f} s")
    for name, text in table:
        print(f"{name:<30} {text}")


def main() -> None:
    """The parts that are asked for."""
    if "correct" in sys.argv:
        for name in SHAPES:
            attempt(f"accuracy {name} bfloat16", accuracy, name, F32 if DRY else BF16)
            attempt(f"bits {name} bfloat16", bits, name, F32 if DRY else BF16)
        for name in () if DRY else ("delta", "mamba2"):
            attempt(f"bits {name} float32", bits, name, F32)
    if "times" in sys.argv:
        for name in ("mamba2", "delta"):
            steps = ((1, 70),) if DRY else ((1, 1056), (64, 1056), (64, 1087), (256, 160))
            for num_rows, computed in steps:
                attempt(f"decode {name} {num_rows} rows at {computed}", decode, name, num_rows, computed)
            for num_rows, count in ((1, 70),) if DRY else ((1, 8192), (16, 512), (2, 4000)):
                attempt(f"prefill {name} {num_rows} x {count}", prefill, name, num_rows, count)
    if "decoding" in sys.argv:
        for name in ("conv", "mamba2"):
            attempt(f"bits {name} bfloat16", bits, name, F32 if DRY else BF16)
        for num_rows in (2,) if DRY else (1, 8, 64, 256, 512):
            attempt(f"decode mamba2 {num_rows} rows at 160", decode, "mamba2", num_rows, 70 if DRY else 160)
            attempt(f"convolution of {num_rows} rows", convolution_of, num_rows)
        for num_rows in (2,) if DRY else (1, 64, 256):
            attempt(f"all {num_rows} rows at a border", advances, [1] * num_rows)
    if "products" in sys.argv:
        for n, k in () if DRY else ((4096, 8192), (4096, 21504), (4096, 4096), (6144, 4096)):
            attempt(f"product of a row {n} {k}", products, n, k)
    if "prompts" in sys.argv:
        names = [name for name in ("conv", "mamba2") if name in sys.argv] or ["conv", "mamba2"]
        for name in names:
            attempt(f"bits {name} bfloat16", bits, name, F32 if DRY else BF16)
        for counts in ([70],) if DRY else ([512] * 7, [8192], [512]):
            if "conv" in names:
                attempt(f"convolution {len(counts)} x {counts[0]}", convolutions, counts)
            if "mamba2" in names:
                attempt(f"prefill mamba2 {len(counts)} x {counts[0]}", prefill, "mamba2", len(counts), counts[0])
                attempt(f"walks mamba2 {len(counts)} x {counts[0]}", walks, counts)
    if "engine" in sys.argv:
        for dtype in ("bfloat16", "float32"):
            attempt(f"engine {dtype}", engine, dtype)
    show_table()


if __name__ == "__main__":
    main()
