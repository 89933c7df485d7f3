"""The shape `mamba2` on a GPU, new ways beside old: `python bench/h200/mamba2.py kernels|engine|both [bfloat16]`.

kernels: bits and microseconds of products between two mixers and of decoding, by how many programs share a row's heads.
engine: tokens a second of single, decode64, decode512 and prefill on one engine, with states in float32 or bfloat16;
`both`: on a second engine too, whose products have no norm, activation or sum with them, and whose Mamba-2 decodes
eight heads a program behind a convolution apart. --dry: the kernels' part with tiny shapes on a CPU, with
TRITON_INTERPRET=1, whose times say nothing. A table is last.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from unittest import mock

import torch

import states
from octavo.ops.activation import activate
from octavo.ops.gemm import LinearWeight, linear, pack_linear
from octavo.ops.gemm.fused import activated_linear, linear_add_at_once, normed_linear
from octavo.ops.norm import add_rms_norm
from states import BF16, DEVICE, DRY, F32, attempt, is_same, show_table

EPS, COPY, PRODUCTS = 1e-5, 4.28e6, 795e6  # bytes and operations a microsecond, as measured for copies and products
HIDDEN, INNER, PROJECTED, MIXED = (64, 192, 128, 64) if DRY else (4096, 21504, 18560, 8192)
ROWS = (1, 3, 8) if DRY else (1, 2, 4, 8, 64, 256, 512, 8192)
SHAPE = "tiny-hybrid" if DRY else "mamba2"
WORKLOADS = ("single",) if DRY else ("single", "decode64", "prefill", "decode512")


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
        old, new = graph_us(lambda: self.old(rows)), graph_us(lambda: self.new(rows))
        weights = sum(each.n * each.k for each in (self.out, self.up, self.down, self.project))
        limit = max(2 * weights / COPY, 2 * weights * rows / PRODUCTS)
        return f"{text}us: old {old:7.1f}, new {new:7.1f}, limit {limit:7.1f}"

    def squared(self, rows: int) -> str:
        """The product with its squared ReLU alone, apart and in one."""
        x = self.stream[:rows]
        old = graph_us(lambda: activate(linear(x, self.up), "relu2"))
        plain, new = graph_us(lambda: linear(x, self.up)), graph_us(lambda: activated_linear(x, self.up, "relu2"))
        same = torch.equal(activate(linear(x, self.up), "relu2"), activated_linear(x, self.up, "relu2"))
        limit = max(2 * INNER * HIDDEN / COPY, 2 * INNER * HIDDEN * rows / PRODUCTS)
        text = "same bits" if same else "OTHER BITS"
        return f"{text}; us: {old:.1f} ({plain:.1f} of it the product), {new:.1f} in one, limit {limit:.1f}"

    def gemv_tiles(self, weight: LinearWeight, activation: str | None) -> str:
        """Of one row by a norm and a large weight: tiles of `octavo.ops.gemm.gemv`."""
        from octavo.ops.gemm import gemv

        x, found = self.stream[:1], []
        expected = normed_linear(x, self.norm, EPS, weight, activation=activation)
        chosen = None if DRY else gemv.tile_for(weight.n, weight.k, True, False, 132)
        for tile in (
            chosen,
            gemv.Tile(32, 2, 264, 6, 256),
            gemv.Tile(32, 2, 264, 12, 128),
            gemv.Tile(64, 4, 132, 6, 128),
            gemv.Tile(32, 2, 396, 8, 128),
        ):
            with mock.patch.object(gemv, "tile_for", lambda *_, tile=tile: tile):
                with contextlib.suppress(Exception):  # it needs more shared memory than there is
                    us = graph_us(lambda: normed_linear(x, self.norm, EPS, weight, activation=activation))
                    same = torch.equal(normed_linear(x, self.norm, EPS, weight, activation=activation), expected)
                    found.append(f"{tile and (tile.channels, tile.programs, tile.stages, tile.part)} {us:.1f}")
                    found[-1] += "" if same else " OTHER BITS"
        return f"us: {', '.join(found)}; bytes {2 * weight.n * weight.k / COPY:.1f}"


def cuts(dtype: torch.dtype) -> str:
    """A convolution and Mamba-2 over prompts, cut anyhow, and where rows decode."""
    import state_rig

    case, spec = state_rig.convolved_mamba2(dtype, states.sizes_of("mamba2"), device=DEVICE)
    return states.bits_of(case, spec, dtype)


def decoding(num_rows: int, computed: int) -> str:
    """Microseconds and bits of a convolution and Mamba-2, apart and in one, by programs that share a row's heads."""
    import state_rig
    from octavo.states import gpu

    sizes = states.sizes_of("mamba2")
    heads, found, expected = sizes[0], list[str](), list[torch.Tensor]()
    chosen = gpu.programs_of(heads, num_rows)
    counts = [heads if num_rows < 16 else 16, chosen, *(count for count in (2, 3, 4, 6, 8, 12, 24, heads))]
    torch.manual_seed(1)
    case, spec = state_rig.convolved_mamba2(BF16, sizes, device=DEVICE)
    apart, _ = state_rig.convolved_mamba2(BF16, sizes, device=DEVICE, apart=True)
    run, rows = states.operator_of(case, spec, [1] * num_rows, computed)
    for name, store in zip(rows.own.input_names, rows.own.kept_inputs, strict=True):
        kept = store.data.normal_()
        if name in ("decay", "dt"):
            kept.abs_().mul_(-0.1 if name == "decay" else 0.1)
    for store in rows.own.states:
        store.data.normal_()
    for count in dict.fromkeys(counts):
        if count > heads or (not DRY and (num_rows * heads / count > 24 * 1024 or num_rows * count > 8192)):
            continue
        with mock.patch.object(gpu, "programs_of", lambda *_, count=count: count):
            text = f"{count}:"
            for ahead in (True, False):
                rows.case = apart if ahead else case
                us, result = graph_us(run), run()
                assert isinstance(result, torch.Tensor)
                made = [result, rows.pool.buffer]
                expected = expected or [each.clone() for each in made]
                text += f"{'' if ahead else ','} {us:.1f}" + is_same(made, expected)
            found.append(text)
    return f"chosen {chosen}; programs: us apart, in one; {'; '.join(found)}"


@contextlib.contextmanager
def before() -> Iterator[None]:
    """Layers run as they did: a product by itself, no token left out of the last layer, eight heads a program."""
    from octavo.layers import fusions, mlp
    from octavo.layers.recurrent import Mamba2Scan
    from octavo.states import gpu

    def eight_heads(num_heads: int, num_rows: int) -> int:
        return num_heads // max(1, min(8, num_rows * num_heads // 1024))

    rows = tuple(row for row in fusions.FUSIONS if row.name not in ("normed_linear", "normed_mlp", "linear_add"))
    with (
        mock.patch.object(fusions, "FUSIONS", rows),
        mock.patch.object(fusions.LayerLines, "mixes_no_tokens", False),
        mock.patch.object(mlp, "activated_linear", lambda x, weight, kind: activate(linear(x, weight), kind)),
        mock.patch.object(gpu, "programs_of", eight_heads),
        mock.patch.object(Mamba2Scan, "mix_behind", lambda self, conv, xbc, dt: self.mix(conv.mix(xbc), dt)),
    ):
        yield


def engine(state_dtype: str) -> str:
    """Tokens a second of the workloads."""
    from octavo.bench import gpu_engine
    from octavo.bench.engine import dummy_model
    from octavo.bench.shapes import SHAPES

    fields = {"device": DEVICE, "dtype": "bfloat16", "numerics": "reproducible", "state_dtype": state_dtype}
    run, found = gpu_engine.Run(SHAPE, SHAPES[SHAPE], fields, dummy_model), []
    began = time.time()
    with run.engine() as llm:
        llm.engine.capture_rest()
        started = time.time() - began
        for name in WORKLOADS:
            record = gpu_engine._timed(run, llm, name, COPY * 1e6, PRODUCTS * 1e6)
            found.append(f"{name} {record['value']:.1f}")
            print(f"{name}: {record}", flush=True)
    return f"{', '.join(found)} tokens/s; start and graphs {started:.0f} s, all {time.time() - began:.0f} s"


def main() -> None:
    """The parts that are asked for."""
    if "kernels" in sys.argv:
        products = Products()
        for rows in ROWS:
            attempt(f"products of {rows} rows", products.compare, rows)
        for rows in (8,) if DRY else (5, 64, 128, 256, 320, 400, 512, 1024, 2048, 8192):
            attempt(f"squared, {rows} rows", products.squared, rows)
        attempt("one row, up", products.gemv_tiles, products.up, "relu2")
        attempt("one row, project", products.gemv_tiles, products.project, None)
        del products
        attempt("bits over cuts", cuts, F32 if DRY else BF16)
        for rows in (2,) if DRY else (1, 4, 8, 16, 64, 128, 256, 512):
            attempt(f"decoding, {rows} rows", decoding, rows, 70 if DRY else 160)
    state_dtype = "bfloat16" if "bfloat16" in sys.argv else "float32"
    if "both" in sys.argv:
        with before():
            attempt("before", engine, state_dtype)
    if "both" in sys.argv or "engine" in sys.argv:
        attempt(f"now, states in {state_dtype}", engine, state_dtype)
    show_table()


if __name__ == "__main__":
    main()
