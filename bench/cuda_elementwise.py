"""Benchmark of the elementwise GPU operators: `python bench/kernel.py elementwise`.

Counts the bytes that each operator must read and write, against a copy's bytes read and written per second, measured in
the same run. Launches are timed in a CUDA graph, over buffers that together exceed the L2 cache where rows are many.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from cuda_attention import measure_copy, seconds
from octavo.ops.activation import gated_activation
from octavo.ops.embedding import gather_rows
from octavo.ops.norm import add_rms_norm, rms_norm
from octavo.ops.rope import qk_norm_rope_store, rope_table

# hidden size, heads, KV heads, inner size; heads have 128 channels
SHAPES = {"0.6b": (1024, 16, 8, 3072), "8b": (4096, 32, 8, 12288)}
ROWS = (1, 64, 512, 4096, 16384)
HEAD, BLOCK, VOCAB = 128, 16, 151936
ROTATION_BYTES = 200 << 20
Case = tuple[str, int, Callable[[int], object]]


def random(*shape: int) -> Tensor:
    """Normal bfloat16 on the GPU."""
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def cases(shape: tuple[int, int, int, int], rows: int, copies: int) -> Iterator[Case]:
    """(name, bytes, call of one of the copies)."""
    hidden, heads, kv_heads, inner = shape
    line, width = rows * hidden * 2, (heads + 2 * kv_heads) * HEAD
    xs, residuals = ([random(rows, hidden) for _ in range(copies)] for _ in range(2))
    weight, ids = torch.ones(hidden, device="cuda"), torch.randint(0, VOCAB, (rows,), device="cuda")
    yield "rms_norm", 2 * line, lambda i: rms_norm(xs[i], weight, 1e-6)
    yield "add_rms_norm", 4 * line, lambda i: add_rms_norm(xs[i], residuals[i], weight, 1e-6)
    table = random(VOCAB, hidden)
    yield "gather_rows", 2 * line, lambda i: gather_rows(ids, table, torch.bfloat16)
    qkvs = [random(rows, width) for _ in range(copies)]
    cos_sin, norm = rope_table(HEAD, 4096).cuda(), torch.ones(HEAD, device="cuda")
    positions, slots = torch.randint(0, 4096, (rows,), device="cuda"), torch.randperm(rows, device="cuda")
    kv = torch.empty(rows // BLOCK + 1, kv_heads, BLOCK, 2 * HEAD, device="cuda", dtype=torch.bfloat16)
    yield (
        "qk_norm_rope_store",
        rows * (width * 4 + HEAD * 4 + 16),
        lambda i: qk_norm_rope_store(qkvs[i], positions, cos_sin, norm, norm, 1e-6, heads, kv_heads, HEAD, kv, slots),
    )
    gate_ups = [random(rows, 2 * inner) for _ in range(copies)]
    yield "gated_activation", rows * inner * 6, lambda i: gated_activation(gate_ups[i], "silu")


def run(rounds: int, quick: bool) -> dict[str, object]:
    """Print the table; the JSON record. quick: three row counts only."""
    copy, device = measure_copy(rounds), torch.cuda.get_device_name()
    print(f"{device}: copy {copy / 1e12:.3f} TB/s (read + written)")
    print("shape operator              rows       us     TB/s  share")
    records = []
    for (name, shape), rows in itertools.product(SHAPES.items(), ROWS[::2] if quick else ROWS):
        copies = max(1, min(8, ROTATION_BYTES // (rows * shape[0] * 2)))
        for operator, num_bytes, call in cases(shape, rows, copies):
            turn = itertools.cycle(range(copies))
            time = seconds(lambda: call(next(turn)), rounds, 8)  # noqa: B023
            rate = num_bytes / time
            print(
                f"{name:>5} {operator:<18} {rows:>6} {time * 1e6:>9.2f} {rate / 1e12:>7.3f} {rate / copy:>6.1%}",
                flush=True,
            )
            records.append(
                {
                    "shape": name,
                    "operator": operator,
                    "rows": rows,
                    "us": time * 1e6,
                    "bytes": num_bytes,
                    "share": rate / copy,
                }
            )
    return {"bench": "elementwise", "device": device, "copy_tb_s": copy / 1e12, "rows": records}
