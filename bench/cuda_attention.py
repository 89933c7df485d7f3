"""Benchmark of attention on a CUDA device: `python bench/kernel.py attention`.

Decode counts the bytes of K and V that must be read, against a copy's bytes read and written per second; prefill the
multiply-adds of the visible scores, against a large matrix product. Both limits are measured in the same run. Layers
are timed in a CUDA graph, without the step's plan. Every case is checked against the reference implementation, and
split rows against whole ones bit by bit. Kernels are compiled before, by a process for each kind of layer. With
--flashinfer, which may compile for minutes, FlashInfer's figures stand beside where it takes the case (in prefill its
faster kernels count); where it takes no blocks of that size, it gets the same tokens in kernel blocks of 64.
"""

from __future__ import annotations

import itertools
import multiprocessing
import statistics
from collections.abc import Callable, Sequence
from time import perf_counter

import torch
from torch import Tensor

from octavo.attention.base import BACKENDS, AttentionInputs, Setup
from octavo.cache.specs import AttentionSpec
from octavo.ops.attention import paged_attention_eager
from octavo.ops.attention.mask_spec import MaskSpec
from octavo.ops.attention.paged import paged_attention
from octavo.ops.attention.paged_plan import Heads, Planner, Scratch, num_processors

HEAD = 128
HEADS = ((32, 8), (16, 8))
BLOCKS = (16, 64, 128)
DECODE = (  # rows, tokens of each
    (1, 131072),
    (8, 32768),
    (64, 4096),
    (256, 1024),
    (256, 548),
    (64, 540),
    (512, 300),
    (512, 144),
    (1, 400),
)
PREFILL = ((1, 8192, 8192), (32, 1024, 1024), (8, 8192, 1024))  # rows, tokens of each, queries of each
DTYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
CUDA = torch.device("cuda")
_WARM_SECONDS = 0.03  # of work before anything is timed: a device that rested is slow at first
Call = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
Kind = tuple[tuple[int, int], int, str]  # heads, block, cache
CASES = [(rows, length, 1) for rows, length in DECODE] + list(PREFILL)


def seconds(call: Callable[[], object], rounds: int, repeats: int = 5) -> float:
    """The median time of `call`, of `repeats` in a graph."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            call()
    started = perf_counter()
    while perf_counter() - started < _WARM_SECONDS:
        graph.replay()
        torch.cuda.synchronize()
    times = []
    for _ in range(rounds):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / repeats)
    return statistics.median(times)


def measure_copy(rounds: int) -> float:
    """Bytes read and written per second by the better of two copies."""
    source = torch.randn(1 << 29, device="cuda").bfloat16()
    target = torch.empty_like(source)
    copies = (lambda: target.copy_(source), lambda: torch.neg(source, out=target))
    return max(2 * source.nbytes / seconds(one, rounds) for one in copies)


def measure_limits(rounds: int) -> tuple[float, float]:
    """(bytes per second of a copy, operations per second of a bf16 matrix product)."""
    a, b = (torch.randn(8192, 8192, device="cuda").bfloat16() for _ in range(2))
    return measure_copy(rounds), 2 * 8192**3 / seconds(lambda: a @ b, rounds)


def make_call(rows: int, length: int, new: int, heads: tuple[int, int], block: int, dtype: torch.dtype) -> Call:
    """Random arguments, with blocks in random order."""
    width = -(-length // block)
    kv = torch.randn(rows * width + 1, heads[1], block, 2 * HEAD, device="cuda", dtype=torch.bfloat16).to(dtype)
    table = (torch.randperm(rows * width, device="cuda") + 1).view(rows, width).int()
    q = torch.randn(rows * new, heads[0], HEAD, device="cuda", dtype=torch.bfloat16)
    query_start = (torch.arange(rows + 1, device="cuda") * new).int()
    return q, kv, query_start, torch.full((rows,), length, device="cuda").int(), table


def error(call: Call, out: Tensor, rows: int, new: int) -> float:
    """The relative error of the first `rows` rows."""
    q, kv, query_start, seq_lens, table = call
    expected = torch.empty(rows * new, *q.shape[1:], device="cuda")
    kv = kv if kv.dtype == q.dtype else kv.to(q.dtype)
    paged_attention_eager(
        q[: rows * new],
        kv,
        query_start[: rows + 1],
        seq_lens[:rows],
        table[:rows],
        expected,
        mask_spec=MaskSpec(HEAD**-0.5),
    )
    return ((out[: rows * new] - expected).norm() / expected.norm()).item()


def plan_paged(call: Call, new: int, length: int, processors: int = 0) -> Callable[[Tensor], None]:
    """Octavo's own operator on `call`, planned; it writes what it is called with."""
    q, kv, query_start, seq_lens, _ = call
    heads, mask_spec, scratch = Heads(q.shape[1], kv.shape[1], HEAD), MaskSpec(scale=HEAD**-0.5), Scratch(CUDA)
    plan = Planner(
        heads, mask_spec, q.dtype, CUDA, scratch, processors or num_processors(CUDA), cache_dtype=kv.dtype
    ).plan(query_start, seq_lens, num_tokens=len(q), max_query_len=new, max_seq_len=length)
    return lambda out: paged_attention(*call, out, mask_spec=mask_spec, plan=plan, scratch=scratch)


def run_paged(call: Call, new: int, length: int, rounds: int) -> tuple[float, float]:
    """(seconds, relative error) of Octavo's own operator."""
    outs = [torch.full_like(call[0], float("nan")) for _ in range(2)]
    plan_paged(call, new, length, 1)(outs[0])  # for one processor rows are hardly split
    attend = plan_paged(call, new, length)
    attend(outs[1])
    assert torch.equal(*outs), "a split moved bits"
    relative = error(call, outs[1], min(len(call[3]), 2 if new == 1 else 1), new)
    assert relative < 1e-2, f"the relative error is {relative}"
    return seconds(lambda: attend(outs[1]), rounds), relative


def compile_kind(kind: Kind) -> None:
    """Launch every case of a kind once, so that its kernels are in Triton's cache. In a process of its own."""
    heads, block, dtype = kind
    for rows, length, new in CASES:
        call = make_call(rows, length, new, heads, block, DTYPES[dtype])
        for processors in (1, 0):
            plan_paged(call, new, length, processors)(torch.empty_like(call[0]))
    torch.cuda.synchronize()


def compile_kinds(kinds: Sequence[Kind]) -> None:
    """Fill Triton's cache, one process for each kind."""
    with multiprocessing.get_context("spawn").Pool(min(len(kinds), 12)) as pool:
        pool.map(compile_kind, kinds, chunksize=1)


def run_flashinfer(call: Call, new: int, length: int, rounds: int) -> float:
    """Seconds of FlashInfer, 0 where it does not take the case."""
    q, kv, query_start, seq_lens, table = call
    spec = AttentionSpec(num_heads=q.shape[1], num_kv_heads=kv.shape[1], head_size=HEAD, scale=HEAD**-0.5)
    if kv.dtype != q.dtype:
        return 0.0
    inputs = AttentionInputs(
        num_rows=len(seq_lens),
        num_tokens=len(q),
        max_query_len=new,
        max_seq_len=length,
        block_size=kv.shape[2],
        query_start=query_start,
        seq_lens=seq_lens,
        block_table=table,
        slot_mapping=torch.full((len(q),), -1, device=CUDA),
    )
    times = []
    for kernels in ("fa2",) if new == 1 else ("fa2", "fa3"):
        setup = Setup(options={"flashinfer_kernels": kernels})
        backend = BACKENDS.resolve("flashinfer")((spec,), q.dtype, CUDA, setup)
        backend.prepare(inputs)
        out = torch.empty_like(q)
        backend.run(q, kv, spec, out)
        assert error(call, out, 1, new) < 1e-2, "FlashInfer differs from the reference implementation"
        times.append(seconds(lambda: backend.run(q, kv, spec, out), rounds))  # noqa: B023
    return min(times)


def run(rounds: int, quick: bool, flashinfer: bool) -> dict[str, object]:
    """Print the tables; the JSON record. quick: 32/8 heads and blocks of 64 only, without fp8.

    flashinfer: measure that too.
    """
    kinds: list[Kind] = [(HEADS[0], 64, "bf16")] if quick else list(itertools.product(HEADS, BLOCKS, DTYPES))
    compile_kinds(kinds)
    copy, matrix = measure_limits(rounds)
    device = torch.cuda.get_device_name()
    print(f"{device}: copy {copy / 1e12:.3f} TB/s (read + written), bf16 product {matrix / 1e12:.0f} TFLOP/s")
    print("   case   rows x tokens heads block cache       us      rate  share    error  FlashInfer us  share")
    records = []
    for (heads, block, dtype), (rows, length, new) in itertools.product(kinds, CASES):
        call = make_call(rows, length, new, heads, block, DTYPES[dtype])
        time, relative = run_paged(call, new, length, rounds)
        other = call if block <= 64 else make_call(rows, length, new, heads, 64, DTYPES[dtype])
        theirs = run_flashinfer(other, new, length, rounds) if flashinfer else 0.0
        visible = rows * sum(range(length - new + 1, length + 1))
        if new == 1:
            name, work, limit, unit = "decode", visible * heads[1] * 2 * HEAD * DTYPES[dtype].itemsize, copy, "TB/s"
        else:
            name, work, limit, unit = "prefill", 4 * HEAD * heads[0] * visible, matrix, "TF/s"
        share = work / time / limit
        beside = f"{theirs * 1e6:>13.1f} {work / theirs / limit:>6.1%}" if theirs else ""
        print(
            f"{name:>7} {rows:>4}x{new}/{length:<6} {heads[0]:>2}/{heads[1]} {block:>5} {dtype:>5} "
            f"{time * 1e6:>8.1f} {work / time / 1e12:>6.2f} {unit} {share:>6.1%} {relative:>8.1e} {beside}",
            flush=True,
        )
        records.append(
            {
                "case": name,
                "rows": rows,
                "tokens": length,
                "new": new,
                "heads": heads,
                "block": block,
                "cache": dtype,
                "us": time * 1e6,
                "share": share,
                "error": relative,
                "flashinfer_us": theirs * 1e6,
            }
        )
    return {
        "bench": "attention",
        "device": device,
        "copy_tb_s": copy / 1e12,
        "matrix_tflop_s": matrix / 1e12,
        "rows": records,
    }
