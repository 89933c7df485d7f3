"""Benchmark of the GPU's dense products: `python bench/kernel.py matmul`.

For the products of a 0.6B and an 8B model, at several numbers of rows: Octavo's reproducible product and the library's
free choice, each beside the limit, the larger of the bytes of weight, input and result over a copy's rate and the
operations over a large product's rate; both rates are measured in the same run. `gated` is gate_up with its activation,
a kernel of its own in the library's case. Then all products of a model's step, over distinct weights, in one CUDA
graph. Every result is compared, bit by bit, with the row computed alone.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from cuda_attention import measure_limits
from octavo.ops.gemm import LinearWeight, linear, pack_linear
from octavo.ops.gemm import gpu as matmul
from octavo.ops.gemm.fused import activated_linear

# model -> (layers, {product: (N, K)} of a layer, head)
MODELS = {
    "0.6b": (
        28,
        {"qkv": (4096, 1024), "o": (1024, 2048), "gate_up": (6144, 1024), "down": (1024, 3072)},
        (151936, 1024),
    ),
    "8b": (
        36,
        {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (24576, 4096), "down": (4096, 12288)},
        (151936, 4096),
    ),
}
GATED = "gated"
ROWS = (1, 4, 16, 64, 256, 512, 2048, 8192)
QUICK_ROWS = (1, 16, 256)
MAX_HEAD_ROWS = 512  # more tokens than requests never need logits
ROTATION_BYTES = 200 << 20  # distinct weights of a measurement: more than the L2 holds
LINE = "{model:>5} {product:>8} {m:>5} {us:>9.2f} {library_us:>9.2f} {limit_us:>9.2f} {share:>6.0%} {ratio:>7.2f}"


def captured(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """`call` as a CUDA graph, replayed once."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    graph.replay()
    return graph


def both(call: Callable[[], object], rounds: int) -> tuple[float, float]:
    """(reproducible, fast) seconds of `call` in a CUDA graph, medians of replays in turn."""
    graphs = [captured(call)]
    matmul.select("fast")
    try:
        graphs.append(captured(call))
    finally:
        matmul.select("reproducible")
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        for graph, taken in zip(graphs, times, strict=True):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            taken.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times[0]), statistics.median(times[1])


def make_weights(n: int, k: int, count: int) -> list[LinearWeight]:
    """Distinct random weights."""
    return [pack_linear(torch.randn(n, k, device="cuda", dtype=torch.bfloat16) * 0.02) for _ in range(count)]


def multiply(product: str, x: Tensor, weight: LinearWeight, out: Tensor) -> Tensor:
    """The product, into out; or gates and ups with their activation, which is new."""
    return activated_linear(x, weight, "silu") if product == GATED else linear(x, weight, out=out)


def check(product: str, x: Tensor, weight: LinearWeight, out: Tensor) -> None:
    """The last row, alone, has the bits that it has among the others."""
    last = multiply(product, x, weight, out)[-1:].clone()
    alone = multiply(product, x[-1:], weight, out[-1:])
    assert torch.equal(last, alone), f"{x.shape[0]} rows of {weight.n}, {weight.k} move bits"


def measure(model: str, product: str, shape: tuple[int, int], m: int, rounds: int, limits: tuple[float, float]) -> dict:
    """One row of the table."""
    n, k = shape
    weights = make_weights(n, k, max(1, ROTATION_BYTES // (2 * n * k)) if m < 2048 else 1)
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    out = torch.empty(m, n, device="cuda", dtype=torch.float32 if product == "head" else torch.bfloat16)
    check(product, x, weights[0], out)
    ours, library = both(lambda: [multiply(product, x, weight, out) for weight in weights], rounds)
    out_bytes = out.nbytes // 2 if product == GATED else out.nbytes
    floor = max((2 * n * k + x.nbytes + out_bytes) / limits[0], 2.0 * m * n * k / limits[1])
    us, library_us, limit_us = (1e6 * value for value in (ours / len(weights), library / len(weights), floor))
    return {
        "model": model,
        "product": product,
        "n": n,
        "k": k,
        "m": m,
        "us": us,
        "library_us": library_us,
        "limit_us": limit_us,
        "share": limit_us / us,
        "ratio": library_us / us,
    }


def measure_step(
    model: str,
    layers: int,
    shapes: Sequence[tuple[int, int]],
    head: tuple[int, int],
    rows: Sequence[int],
    rounds: int,
    limits: tuple[float, float],
) -> list[dict]:
    """All products of a step, one after the other, at each number of rows."""
    weights = [*itertools.chain(*zip(*(make_weights(n, k, layers) for n, k in shapes))), *make_weights(*head, 1)]
    records = []
    for m in (m for m in rows if m <= MAX_HEAD_ROWS):
        inputs = {k: torch.randn(m, k, device="cuda", dtype=torch.bfloat16) for _, k in (*shapes, head)}
        outs = {n: torch.empty(m, n, device="cuda", dtype=torch.bfloat16) for n, _ in shapes}
        outs[head[0]] = torch.empty(m, head[0], device="cuda")

        def step() -> None:
            for weight in weights:
                linear(inputs[weight.k], weight, out=outs[weight.n])  # noqa: B023

        ours, library = both(step, rounds)
        floor = sum(
            max((w.num_bytes + inputs[w.k].nbytes + outs[w.n].nbytes) / limits[0], 2.0 * m * w.n * w.k / limits[1])
            for w in weights
        )
        records.append(
            {
                "model": model,
                "product": "step",
                "m": m,
                "us": 1e6 * ours,
                "library_us": 1e6 * library,
                "limit_us": 1e6 * floor,
                "share": floor / ours,
                "ratio": library / ours,
            }
        )
    return records


def run(rounds: int, quick: bool) -> dict[str, object]:
    """Print the tables; the JSON record."""
    limits = measure_limits(rounds)
    print(f"copy {limits[0] / 1e12:.2f} TB/s, bf16 product {limits[1] / 1e12:.0f} TFLOP/s")
    print("model  product     M        us   library     limit  share library/ours")
    records = []
    for model, (layers, products, head) in MODELS.items():
        for m in QUICK_ROWS if quick else ROWS:
            named = {**products, GATED: products["gate_up"]} | ({"head": head} if m <= MAX_HEAD_ROWS else {})
            for product, shape in named.items():
                records.append(measure(model, product, shape, m, rounds, limits))
                print(LINE.format(**records[-1]), flush=True)
        for record in measure_step(
            model, layers, tuple(products.values()), head, QUICK_ROWS if quick else ROWS, rounds, limits
        ):
            records.append(record)
            print(LINE.format(**record), flush=True)
        torch.cuda.empty_cache()
    return {
        "bench": "cuda-matmul",
        "device": torch.cuda.get_device_name(),
        "copy_tb_s": limits[0] / 1e12,
        "product_tflop_s": limits[1] / 1e12,
        "rows": records,
    }
