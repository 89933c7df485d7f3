"""The shape `mamba2` on a GPU, new ways beside old: `bench/h200/mamba2.py PART [...]`; parts are these.

kernels: bits and microseconds of products between two mixers, in turns, and of decoding, by how many programs share a
row's heads. halves: of states whole and in halves, in decoding with several constants, verification and prompts; of
rows that decode beside a prompt, by the scan that it takes, and apart. cuda: of rows that decode, and of their
convolution, by Triton's kernels and by those in CUDA C++. walks: of prompts, by either kernel. rows: of one row's
products, by tiles of `octavo.ops.gemm.gemv`, for the shapes mamba2, 8b and 0.6b.
engine: tokens a second of single, decode64, prefill and decode512 on one engine; `engine bfloat16`: of decode512, with
states in bfloat16; `profile`: then kernels of decoding and of prompts, by the profiler. both: on a second engine too,
whose products have no norm, activation or sum with them, and whose Mamba-2 decodes eight heads a program. --dry: the
kernels' part with tiny shapes on a CPU, with TRITON_INTERPRET=1, whose times say nothing. A table is last.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch

import states
from octavo.bench import gpu_engine
from octavo.llm import LLM
from octavo.ops.activation import GATED_KINDS, activate
from octavo.ops.gemm import LinearWeight, linear, pack_linear
from octavo.ops.gemm.fused import activated_linear, linear_add_at_once, normed_linear
from octavo.ops.norm import add_rms_norm
from states import BF16, DEVICE, DRY, F32, attempt, is_same, show_table

EPS, COPY, PRODUCTS = 1e-5, 4.28e6, 795e6  # bytes and operations a microsecond, as measured for copies and products
HIDDEN, INNER, PROJECTED, MIXED = (64, 192, 128, 64) if DRY else (4096, 21504, 18560, 8192)
ROWS = (1, 3, 8) if DRY else (1, 2, 4, 8, 64, 256, 512, 8192)
SHAPE = "tiny-hybrid" if DRY else "mamba2"
WORKLOADS = ("single",) if DRY else ("single", "decode64", "prefill", "decode512")
# Of one row's products: N, K, with a norm ahead, activation, results in float32 (of a head); else a sum is behind.
ONE_ROW: dict[str, tuple[int, int, bool, str | None, bool]] = {
    "mamba2 project": (18560, 4096, True, None, False),
    "mamba2 up": (21504, 4096, True, "relu2", False),
    "mamba2 down": (4096, 21504, False, None, False),
    "mamba2 out": (4096, 8192, False, None, False),
    "mamba2 head": (131072, 4096, True, None, True),
    "8b qkv": (6144, 4096, True, None, False),
    "8b o": (4096, 4096, False, None, False),
    "8b gates and ups": (24576, 4096, True, "silu", False),
    "8b down": (4096, 12288, False, None, False),
    "0.6b qkv": (4096, 1024, True, None, False),
    "0.6b gates and ups": (6144, 1024, True, "silu", False),
    "0.6b down": (1024, 3072, False, None, False),
    "0.6b head": (151936, 1024, True, None, True),
}
# Of prompts: tokens of rows, those computed before, whether states are kept.
WALKS: tuple[tuple[Sequence[int], Sequence[int], bool], ...] = (
    *((counts, (), True) for counts in ([8192], [4000] * 2, [512] * 16, [512] * 7, [300] * 27, range(130, 0, -1))),
    ([8192], (), False),
    ([200] * 10, (0, 64, 128, 37, 192, 0, 64, 5, 128, 64), True),
)
STEPS = 8  # that are profiled
TURNS = 6  # of one row's product in a graph, one behind the other
# (channels, warps, programs, stages, k of a part), beside the tile in use.
TILES = (
    (64, 4, 264, 6, 128),
    (32, 2, 264, 12, 128),
    (32, 2, 396, 8, 128),
    (32, 2, 396, 4, 128),
    (32, 2, 528, 5, 128),
    (16, 1, 528, 12, 128),
    (16, 1, 256, 8, 256),
    (64, 4, 132, 6, 256),
)


def graph_us(run: Callable[[], object], turns: int = 1) -> float:
    """Microseconds of one of `turns` that a run has, in a graph."""
    if DRY:
        began = time.perf_counter()
        run()
        return (time.perf_counter() - began) * 1e6
    for _ in range(2):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(7):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(3):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / 3 / turns)
    return statistics.median(times)


def in_turns(*runs: Callable[[], object]) -> list[float]:
    """Microseconds of each, the least of three turns: a GPU's clocks fall while it multiplies."""
    times = [[graph_us(run) for run in runs] for _ in range(1 if DRY else 3)]
    return [min(each) for each in zip(*times, strict=True)]


class Products:
    """A mixer's output product up to the squared ReLU, and that MLP's last product up to the next mixer's first."""

    def __init__(self) -> None:
        """Random weights and rows."""
        torch.manual_seed(0)
        self.out, self.up = self._weight(HIDDEN, MIXED), self._weight(INNER, HIDDEN)
        self.down, self.project = self._weight(HIDDEN, INNER), self._weight(PROJECTED, HIDDEN)
        self.norm = torch.rand(HIDDEN, device=DEVICE) + 0.5
        count = max(ROWS)
        self.mixed, self.stream = self._rows(count, MIXED), self._rows(count, HIDDEN)
        self.first: list[torch.Tensor] = []  # the results of the fewest rows

    def _weight(self, n: int, k: int) -> LinearWeight:
        return pack_linear((torch.randn(n, k, device=DEVICE) * k**-0.5).to(BF16))

    def _rows(self, count: int, size: int) -> torch.Tensor:
        return torch.randn(count, size, device=DEVICE).to(BF16)

    def old(self, rows: int) -> list[torch.Tensor]:
        """Each operator by itself."""
        normed, total = add_rms_norm(linear(self.mixed[:rows], self.out), self.stream[:rows], self.norm, EPS)
        inner = activate(linear(normed, self.up), "relu2")
        normed, last = add_rms_norm(linear(inner, self.down), total, self.norm, EPS)
        return [total, inner, last, linear(normed, self.project)]

    def new(self, rows: int) -> list[torch.Tensor]:
        """As the lines of such layers are run."""
        found, stream = list[torch.Tensor](), self.stream[:rows]
        x = self.mixed[:rows]
        for before, behind, activation in ((self.out, self.up, "relu2"), (self.down, self.project, None)):
            whole = linear_add_at_once(x, before, None, stream)
            if whole is None:
                normed, whole = add_rms_norm(linear(x, before), stream, self.norm, EPS)
                x = activated_linear(normed, behind, activation) if activation else linear(normed, behind)
            else:
                x = normed_linear(whole, self.norm, EPS, behind, activation=activation)
            found += [whole, x]
            stream = whole
        return found

    def compare(self, rows: int) -> str:
        """Bits of both ways, and of the first rows beside fewer; microseconds."""
        found, expected = self.new(rows), self.old(rows)
        text = "OTHER BITS; " if is_same(found, expected) else "same bits; "
        self.first = self.first or found
        if is_same([each[: len(kept)] for each, kept in zip(found, self.first, strict=True)], self.first):
            text += "ROWS DIFFER FROM FEWER; "
        old, new = in_turns(lambda: self.old(rows), lambda: self.new(rows))
        weights = sum(each.n * each.k for each in (self.out, self.up, self.down, self.project))
        limit = max(2 * weights / COPY, 2 * weights * rows / PRODUCTS)
        return f"{text}us: old {old:7.1f}, new {new:7.1f}, limit {limit:7.1f}"

    def squared(self, rows: int) -> str:
        """The product with its squared ReLU alone, apart and in one."""
        x = self.stream[:rows]
        old, plain, new = in_turns(
            lambda: activate(linear(x, self.up), "relu2"),
            lambda: linear(x, self.up),
            lambda: activated_linear(x, self.up, "relu2"),
        )
        same = torch.equal(activate(linear(x, self.up), "relu2"), activated_linear(x, self.up, "relu2"))
        limit = max(2 * INNER * HIDDEN / COPY, 2 * INNER * HIDDEN * rows / PRODUCTS)
        text = "same bits" if same else "OTHER BITS"
        return f"{text}; us: {old:.1f} ({plain:.1f} of it the product), {new:.1f} in one, limit {limit:.1f}"


def gemv_of(name: str) -> str:
    """Of a product of one row: its microseconds by tiles, with what the bytes take."""
    from octavo.ops.gemm import gemv

    n, k, is_normed, activation, is_head = ONE_ROW[name]
    sides = 2 if activation in GATED_KINDS else 1
    torch.manual_seed(2)
    weight = (torch.randn(n, k, device=DEVICE, dtype=BF16) * k**-0.5).contiguous()
    x, norm = torch.randn(1, k, device=DEVICE, dtype=BF16), torch.rand(k, device=DEVICE) + 0.5
    residual = None if is_normed else torch.randn(1, n, device=DEVICE, dtype=BF16)
    out = torch.empty(1, n // sides, device=DEVICE, dtype=F32 if is_head else BF16)
    options: dict[str, Any] = {"norm": norm if is_normed else None, "eps": EPS, "residual": residual}

    def run() -> None:
        for _ in range(TURNS):
            gemv.product(x, weight, out, activation=activation, **options)

    found, expected, own = list[str](), list[torch.Tensor](), gemv.tile_for(n, k, is_normed, sides == 2, 132, is_head)
    tiles = [] if own is None else [own]
    for channels, warps, programs, stages, part in TILES:
        groups, left = divmod(n // sides, channels)
        if not left and stages <= k // part + 1:
            tiles.append(gemv.Tile(channels, warps, min(programs, groups), stages, part))
    for tile in dict.fromkeys(tiles):
        with mock.patch.object(gemv, "tile_for", lambda *_, tile=tile: tile):
            with contextlib.suppress(Exception):  # it needs more shared memory than there is
                us = graph_us(run, TURNS)
                text = f"{tile.channels}x{tile.programs}x{tile.stages}x{tile.part} {us:.1f}"
                expected = expected or [out.clone()]
                found.append(text + is_same([out], expected))
    return f"us: {', '.join(found)}; bytes {2 * n * k / COPY:.1f}"


def fill(rows: Any) -> None:
    """All that is kept, at random."""
    for name, store in zip(rows.own.input_names, rows.own.kept_inputs, strict=True):
        kept = store.data.normal_()
        if name in ("decay", "dt"):
            kept.abs_().mul_(-0.1 if name == "decay" else 0.1)
    for store in rows.own.states:
        store.data.view(BF16).normal_()


def decoding(num_rows: int, computed: int) -> str:
    """Microseconds and bits of Mamba-2's decoding, by programs that share a row's heads."""
    from octavo.states import gpu

    heads, found, expected = states.sizes_of("mamba2")[0], list[str](), list[torch.Tensor]()
    chosen = gpu.programs_of(heads, num_rows, gpu._STREAMS[True].room)
    run, rows = states.operator("mamba2", [1] * num_rows, computed)
    fill(rows)
    for count in dict.fromkeys((chosen, *((1, 2) if DRY else (3, 6, 8, 16, 24, heads)))):
        if not DRY and (num_rows * heads / count > 24 * 1024 or num_rows * count > 8192):
            continue
        with by_triton(), mock.patch.object(gpu, "programs_of", lambda *_, count=count: count):
            us, result = graph_us(run), run()
            assert isinstance(result, torch.Tensor)
            made = [result, rows.pool.buffer]
            expected = expected or [each.clone() for each in made]
            found.append(f"{count} {us:.1f}" + is_same(made, expected))
    return f"chosen {chosen}; us by programs: {', '.join(found)}"


def by_triton() -> contextlib.ExitStack:
    """Within, rows decode by Triton's kernels."""
    from octavo.states import conv_decode
    from octavo.states.mamba2 import mamba2_decode

    stack = contextlib.ExitStack()
    for module in (conv_decode, mamba2_decode):
        stack.enter_context(mock.patch.object(module, "_COPIED", False))
    return stack


def in_cuda(name: str, num_rows: int, computed: Sequence[int]) -> str:
    """Bits and microseconds of rows that decode, by Triton's kernels and by those in CUDA C++, however few they are.

    computed: tokens of the rows, in turn.
    """
    from octavo.states import conv_decode
    from octavo.states.mamba2 import mamba2_decode

    run, rows = states.operator(name, [1] * num_rows, max(computed))
    torch.manual_seed(0)
    fill(rows)
    lengths = [computed[row % len(computed)] + 1 for row in range(num_rows)]
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    rows.step.prepare(dataclasses.replace(rows.own.inputs, max_seq_len=max(lengths), seq_lens=seq_lens))
    with by_triton():
        before, expected = graph_us(run), [run().clone(), rows.pool.buffer.clone()]  # type: ignore[attr-defined]
    module = mamba2_decode if name == "mamba2" else conv_decode
    with mock.patch.object(module, "_FEWEST_ROWS", 0):
        now, made = graph_us(run), [run(), rows.pool.buffer]
    return f"{before:.1f}, {now:.1f} us" + is_same(made, expected)  # type: ignore[arg-type]


def step_of(rows: Any, before: Sequence[int], counts: Sequence[int]) -> Callable[[], torch.Tensor]:
    """A step of random tokens. before: those that rows have computed."""
    starts, lengths = torch.tensor([0, *counts]).cumsum(0), [sum(own) for own in zip(before, counts, strict=True)]
    inputs = dataclasses.replace(
        rows.own.inputs,
        max_query_len=max(counts),
        max_seq_len=max(lengths),
        query_start=starts.int().to(DEVICE),
        seq_lens=torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
        positions=torch.cat([torch.arange(own, end) for own, end in zip(before, lengths, strict=True)]).to(DEVICE),
    )
    rows.step.prepare(inputs)
    one = rows.case.draw(torch.Generator().manual_seed(0), 1)
    given = [torch.randn(sum(counts), *each.shape[1:], device=DEVICE).to(each.dtype) for each in one]
    return lambda: states.run_whole(rows, given)


def behind_prompts(computed: int, counts: Sequence[int], restarted: int = 0) -> tuple[Callable[[], Any], Any]:
    """(a step of Mamba-2 of rows that have computed so many tokens, or of prompts where it is 0; what they keep).

    restarted: of the last rows, whose tokens are a prompt's, from its beginning on.
    """
    torch.manual_seed(1)
    prompts, rows = states.operator("mamba2", [computed] * len(counts) if computed else counts, 0)
    if not computed:
        return prompts, rows
    prompts()
    before = [0 if place >= len(counts) - restarted else computed for place in range(len(counts))]
    return step_of(rows, before, counts), rows


def of_states(counts: Sequence[int], computed: int) -> str:
    """Bits and microseconds of Mamba-2 with states that are kept whole, and in halves.

    Decoding by several streams: see `octavo.states.gpu`.
    """
    from octavo.states import gpu

    found, expected = list[str](), list[torch.Tensor]()
    others = [(2, 2, 255, 528), (4, 3, 168, 396), (4, 2, 128, 528)] if max(counts) == 1 and not DRY else []
    for name, parts, ways in (("whole", False, []), ("halves", True, others)):
        with mock.patch.object(gpu, "_is_parted", lambda *_, parts=parts: parts):
            run, rows = behind_prompts(computed, counts)
            for stream in (gpu._STREAMS[parts], *(gpu.Stream(*way) for way in ways)):
                with by_triton(), mock.patch.dict(gpu._STREAMS, {parts: stream}):
                    us, result = graph_us(run), run()
                expected = expected or [result.clone()]
                found.append(f"{name} {tuple(stream)} {us:.1f}" + is_same([result], expected))
        del run, rows
    return f"us: {', '.join(found)}"


def walk(counts: Sequence[int], before: Sequence[int] = (), keeps: bool = True, is_timed: bool = False) -> str:
    """Bits of prompts, by Triton's walk and by the one in CUDA C++; or microseconds of the operator, by turns.

    before: tokens that rows have computed; keeps: their states.
    """
    from octavo.states.mamba2 import mamba2_prompts

    before = before or [0] * len(counts)
    _, rows = states.operator("mamba2", [max(counts) + max(before), *counts[1:]], 0, keeps=keeps)
    torch.manual_seed(3)
    if any(before):
        fill(rows)
    run = step_of(rows, before, counts)

    def by(copied: bool) -> torch.Tensor:
        with mock.patch.multiple(mamba2_prompts, _COPIED=copied, agrees=lambda *_: True):
            return run()

    kept, found = rows.pool.buffer.clone(), []
    with mock.patch.object(mamba2_prompts, "_copied", wraps=mamba2_prompts._copied) as launched:
        for copied in (False, True):
            rows.pool.buffer.copy_(kept)
            found.append([by(copied).clone(), rows.pool.buffer.clone()])
    if not launched.called:
        return "NOT LAUNCHED"
    if is_timed:
        return "us: Triton {:.0f}, CUDA C++ {:.0f}".format(*in_turns(lambda: by(False), lambda: by(True)))
    written = (found[0][1].view(torch.int32) != kept.view(torch.int32)).sum()
    return (is_same(*found).strip() or "same bits") + f", of {found[0][0].numel()} results and {written} words kept"


def beside_a_prompt(num_rows: int, count: int) -> str:
    """Bits and microseconds of Mamba-2 where rows decode beside a prompt: all by its scan; rows of one token apart."""
    run, rows = behind_prompts(count, [1] * num_rows + [count], 1)
    whole, found, made = rows.own.inputs, list[str](), list[torch.Tensor]()
    for name, bounds in (("by its scan", None), ("apart", (num_rows, 1)), ("of a graph", (num_rows + 1,) * 2)):
        rows.step.prepare(dataclasses.replace(whole, bounds=bounds))
        us, result = graph_us(run), run()
        made = made or [result.clone()]
        found.append(f"{name} {us:.1f}" + is_same([result], made))
    return f"us: {', '.join(found)}"


@contextlib.contextmanager
def before() -> Iterator[None]:
    """Layers run as they did: a product by itself, no token left out of the last layer, eight heads a program."""
    from octavo.layers import fusions, mlp
    from octavo.states import gpu

    def eight_heads(num_heads: int, num_rows: int, _: int) -> int:
        return num_heads // max(1, min(8, num_rows * num_heads // 1024))

    rows = tuple(row for row in fusions.FUSIONS if row.name not in ("normed_linear", "normed_mlp", "linear_add"))
    with (
        mock.patch.object(fusions, "FUSIONS", rows),
        mock.patch.object(fusions.LayerLines, "mixes_no_tokens", False),
        mock.patch.object(mlp, "activated_linear", lambda x, weight, kind: activate(linear(x, weight), kind)),
        mock.patch.object(gpu, "programs_of", eight_heads),
        by_triton(),
    ):
        yield


def profile_decode(run: gpu_engine.Run, llm: LLM, num_rows: int) -> None:
    """Print the kernels of a decode step of requests of about 150 tokens."""
    from torch.profiler import ProfilerActivity, profile

    from octavo.bench import gpu_profile

    with gpu_engine._decoding(llm, num_rows, 16) as lengths:
        began = time.perf_counter()
        with profile(activities=[ProfilerActivity.CPU if DRY else ProfilerActivity.CUDA]) as profiler:
            for _ in range(STEPS):
                llm.engine.step()
            if not DRY:
                torch.cuda.synchronize()
        us = (time.perf_counter() - began) * 1e6 / STEPS
    print(f"decode of {num_rows} rows: {us:.0f} us a step, under the profiler")
    work = gpu_profile.least_work(run.facts, gpu_profile.decode_load([n + STEPS // 2 for n in lengths]))
    gpu_engine._families(profiler, STEPS, work, COPY * 1e6, PRODUCTS * 1e6)


def engine(state_dtype: str, workloads: Sequence[str]) -> str:
    """Tokens a second of the workloads."""
    from octavo.bench.engine import dummy_model
    from octavo.bench.shapes import SHAPES

    fields = {"device": DEVICE, "dtype": "bfloat16", "numerics": "reproducible", "state_dtype": state_dtype}
    run, found = gpu_engine.Run(SHAPE, SHAPES[SHAPE], fields, dummy_model), []
    began = time.time()
    with run.engine() as llm:
        llm.engine.capture_rest()
        started = time.time() - began
        for name in workloads:
            record = gpu_engine._timed(run, llm, name, COPY * 1e6, PRODUCTS * 1e6)
            found.append(f"{name} {record['value']:.1f}")
        if "profile" in sys.argv:
            for rows in (1,) if DRY else (1, 64, 512):
                profile_decode(run, llm, rows)
            if not DRY:
                gpu_engine._profile_prefill(run, llm, COPY * 1e6, PRODUCTS * 1e6)
    return f"{', '.join(found)} tokens/s; start and graphs {started:.0f} s, all {time.time() - began:.0f} s"


def main() -> None:
    """The parts that are asked for."""
    if "kernels" in sys.argv:
        products = Products()
        for rows in ROWS:
            attempt(f"products of {rows} rows", products.compare, rows)
        for rows in (8,) if DRY else (64, 320, 400, 1024, 8192):
            attempt(f"squared, {rows} rows", products.squared, rows)
        del products
        attempt("bits over cuts", states.bits, "mamba2", F32 if DRY else BF16)
        for rows in (2,) if DRY else (1, 8, 16, 64, 256, 512):
            attempt(f"decoding, {rows} rows", decoding, rows, 70 if DRY else 160)
    if "halves" in sys.argv:
        attempt("bits over cuts", states.bits, "mamba2", F32 if DRY else BF16)
        for rows in (2,) if DRY else (1, 16, 64, 256, 512):
            attempt(f"decoding, {rows} rows", of_states, [1] * rows, 70 if DRY else 160)
        for counts in ([5] * 2,) if DRY else ([1] * 64, [5] * 64):
            attempt(f"{len(counts)} rows of {counts[0]} to a border", of_states, counts, 128 - counts[0])
        attempt("rows of 5 within a chunk", of_states, [5] * (2 if DRY else 64), 100)
        attempt("that border, by tiles", states.advances, [1] * (2 if DRY else 64))
        for counts in ([70],) if DRY else ([512] * 16, [4000] * 2):
            attempt(f"prompts of {counts[0]}", of_states, counts, 0)
        rows, count = (2, 70) if DRY else (512, 480)
        attempt(f"{rows} rows beside {count} tokens", beside_a_prompt, rows, count)
    if "cuda" in sys.argv:
        for rows in (2,) if DRY else (1, 8, 16, 32, 64, 128, 256, 512):
            for name in ("mamba2", "conv"):
                attempt(f"{name}, {rows} rows", in_cuda, name, rows, [70 if DRY else 160])
        if not DRY:
            attempt(
                "mamba2, 512 rows of several lengths",
                in_cuda,
                "mamba2",
                512,
                [n for n in range(64, 192) if n % 64 < 63],
            )
    for counts, before, keeps in WALKS if "walks" in sys.argv else ():
        name = f"{len(counts)} x {counts[0]}{', from some on' if before else ''}{'' if keeps else ', no states kept'}"
        attempt(f"bits of {name}", walk, counts, before, keeps)
        if keeps and not before and len(counts) < 100:
            attempt(f"us of {name}", walk, counts, before, keeps, True)
    for name in ONE_ROW if "rows" in sys.argv else ():
        attempt(f"one row, {name}", gemv_of, name)
    state_dtype = "bfloat16" if "bfloat16" in sys.argv else "float32"
    workloads = WORKLOADS[-1:] if state_dtype == "bfloat16" else WORKLOADS
    if "both" in sys.argv:
        with before():
            attempt("before", engine, state_dtype, workloads)
    if "both" in sys.argv or "engine" in sys.argv:
        attempt(f"now, states in {state_dtype}", engine, state_dtype, workloads)
    show_table()


if __name__ == "__main__":
    main()
