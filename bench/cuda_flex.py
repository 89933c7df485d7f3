"""Benchmark of the flex backend: `python bench/kernel.py flex`.

Decode counts the bytes of K and V that must be read, against a copy's bytes read and written per second of the same
run; prefill the multiply-adds of the visible scores. A step (mask rows, queries, attention, folding) is timed in a CUDA
graph; `attend` is a layer's part of it. Decode is checked against the reference. Kernels are compiled before, several
cases at a time.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import time

import torch
from torch import Tensor

import octavo.attention as A
from cuda_attention import measure_limits, seconds
from octavo.attention.base import AttentionInputs, Setup
from octavo.attention.flex.backend import FlexBackend
from octavo.attention.reference import ReferenceBackend
from octavo.cache.specs import AttentionSpec

HEADS, KV_HEADS, HEAD = 32, 8, 128
PLAIN = AttentionSpec(num_heads=HEADS, num_kv_heads=KV_HEADS, head_size=HEAD, scale=HEAD**-0.5)
DECODE = ((64, 4096), (8, 32768), (1, 131072), (256, 512))
Kind = tuple[int, int, int, int, str]  # block, rows, tokens of each, queries of each, spec
PREFILL = ((4, 2048, 2048), (1, 8192, 8192))
SPECS = {
    "plain": PLAIN,
    "cap + window": dataclasses.replace(PLAIN, soft_cap=30.0, window=1 << 20),  # as many bytes as plain
    "user's mask": dataclasses.replace(PLAIN, mods=A.or_(A.sinks(64), A.sliding_window(1 << 20))),
}


@dataclasses.dataclass
class Case:
    """One batch over a cache in random order."""

    q: Tensor
    kv: Tensor
    inputs: AttentionInputs

    def run(self, backend: FlexBackend | ReferenceBackend, spec: AttentionSpec, out: Tensor) -> None:
        """A step of one layer."""
        backend.prepare(self.inputs)
        backend.run(self.q, self.kv, spec, out)


def make_case(rows: int, length: int, new: int, block: int) -> Case:
    """`rows` requests of `length` tokens, the last `new` of which are queries."""
    width = -(-length // block)
    kv = torch.randn(rows * width + 1, KV_HEADS, block, 2 * HEAD, device="cuda", dtype=torch.bfloat16)
    inputs = AttentionInputs(
        num_rows=rows,
        num_tokens=rows * new,
        max_query_len=new,
        max_seq_len=length,
        block_size=block,
        query_start=(torch.arange(rows + 1, device="cuda") * new).int(),
        seq_lens=torch.full((rows,), length, device="cuda", dtype=torch.int32),
        block_table=(torch.randperm(rows * width, device="cuda") + 1).view(rows, width).int(),
        slot_mapping=torch.full((rows * new,), -1, device="cuda"),
        rows=torch.arange(rows, device="cuda"),
    )
    return Case(torch.randn(rows * new, HEADS, HEAD, device="cuda", dtype=torch.bfloat16), kv, inputs)


def make_backend(case: Case, spec: AttentionSpec) -> FlexBackend:
    """With an engine's limits."""
    inputs = case.inputs
    setup = Setup(
        max_num_rows=inputs.num_rows,
        max_num_tokens=max(inputs.num_tokens, 8192),
        max_model_len=inputs.max_seq_len,
        num_blocks=case.kv.shape[0],
        block_size=inputs.block_size,
    )
    return FlexBackend([spec], torch.bfloat16, torch.device("cuda"), setup)


def make_mixed(rows: int, length: int, prompt: int, block: int) -> Case:
    """`rows` requests of `length` tokens that decode beside a prompt of `prompt` tokens."""
    case = make_case(rows + 1, length, 1, block)
    inputs, num_tokens = case.inputs, rows + prompt
    inputs.num_tokens, inputs.max_query_len = num_tokens, prompt
    inputs.query_start[-1] = num_tokens
    inputs.seq_lens[-1] = prompt
    inputs.slot_mapping = torch.full((num_tokens,), -1, device="cuda")
    case.q = torch.randn(num_tokens, HEADS, HEAD, device="cuda", dtype=torch.bfloat16)
    return case


def measure_mixed(rows: int, length: int, prompt: int, block: int, rounds: int) -> dict[str, object]:
    """A layer of a step that decodes and computes a prompt: with one tile for both, and with a tile for each."""
    case, times, outs = make_mixed(rows, length, prompt, block), [], []
    backend = make_backend(case, PLAIN)
    for most in (None, 1):
        case.inputs.max_long = most
        outs.append(torch.empty_like(case.q))
        case.run(backend, PLAIN, outs[-1])
        times.append(seconds(lambda: backend.run(case.q, case.kv, PLAIN, outs[-1]), rounds))
    assert torch.equal(*outs), "a tile moved bits"
    print(
        f"  mixed {rows:>4}x{length} beside a prompt of {prompt}, blocks of {block}: {times[0] * 1e6:.1f} us with one "
        f"tile, {times[1] * 1e6:.1f} us with two",
        flush=True,
    )
    return {
        "rows": rows,
        "tokens": length,
        "prompt": prompt,
        "block": block,
        "one_tile_us": times[0] * 1e6,
        "two_tiles_us": times[1] * 1e6,
    }


def relative_error(case: Case, spec: AttentionSpec, out: Tensor) -> float:
    """Of the first row."""
    inputs = case.inputs
    new = inputs.num_tokens // inputs.num_rows
    one = dataclasses.replace(inputs, num_rows=1, num_tokens=new)
    expected = torch.empty_like(case.q[:new])
    Case(case.q[:new], case.kv, one).run(ReferenceBackend([spec], torch.bfloat16, case.q.device), spec, expected)
    return ((out[:new].float() - expected.float()).norm() / expected.float().norm()).item()


def measure(case: Case, name: str, rounds: int) -> tuple[float, float, float, float]:
    """(seconds of a step, of a layer's part of it, seconds of the first call, relative error)."""
    spec, out = SPECS[name], torch.empty_like(case.q)
    backend = make_backend(case, spec)
    began = time.perf_counter()
    case.run(backend, spec, out)
    torch.cuda.synchronize()
    first = time.perf_counter() - began
    error = relative_error(case, spec, out) if case.inputs.max_query_len == 1 else 0.0
    assert error < 1e-2, f"the relative error of {name} is {error}"
    layer = seconds(lambda: backend.run(case.q, case.kv, spec, out), rounds)
    return seconds(lambda: case.run(backend, spec, out), rounds), layer, first, error


def compile_case(kind: Kind) -> None:
    """Run a case once, so that torch's cache has its kernels. In a process of its own."""
    block, rows, length, new, name = kind
    case = make_case(rows, length, new, block)
    case.run(make_backend(case, SPECS[name]), SPECS[name], torch.empty_like(case.q))
    torch.cuda.synchronize()


def run(rounds: int, quick: bool) -> dict[str, object]:
    """Print the table; the JSON record. quick: blocks of 64 and plain attention only."""
    names = ("plain",) if quick else tuple(SPECS)
    shapes = [(*shape, 1) for shape in DECODE] + list(PREFILL)
    kinds = [(block, *shape, name) for block in ((64,) if quick else (64, 128)) for shape in shapes for name in names]
    with multiprocessing.get_context("spawn").Pool(min(len(kinds), 12)) as pool:
        pool.map(compile_case, kinds, chunksize=1)
    copy, matrix = measure_limits(rounds)
    device = torch.cuda.get_device_name()
    print(f"{device}: copy {copy / 1e12:.3f} TB/s (read + written), bf16 product {matrix / 1e12:.0f} TFLOP/s")
    print("   case rows x tokens block mods              attend us  share  step us  first s    error")
    records = []
    for block in dict.fromkeys(kind[0] for kind in kinds):
        for rows, length, new in shapes:
            case = make_case(rows, length, new, block)
            for name in names:
                step, layer, first, error = measure(case, name, rounds)
                visible = rows * sum(range(length - new + 1, length + 1))
                floor = visible * KV_HEADS * 4 * HEAD / copy if new == 1 else 4 * HEAD * HEADS * visible / matrix
                print(
                    f"{'decode' if new == 1 else 'prefill':>7} {rows:>4}x{length:<7} {block:>5} {name:<16} "
                    f"{layer * 1e6:>10.1f} {floor / layer:>6.1%} {step * 1e6:>8.1f} {first:>8.2f} {error:>8.1e}",
                    flush=True,
                )
                records.append(
                    {
                        "rows": rows,
                        "tokens": length,
                        "new": new,
                        "block": block,
                        "mods": name,
                        "attend_us": layer * 1e6,
                        "step_us": step * 1e6,
                        "share": floor / layer,
                        "first_s": first,
                        "error": error,
                    }
                )
            del case
        records.append(measure_mixed(64, 4096, 2048, block, rounds))
    return {"bench": "flex", "device": device, "copy_tb_s": copy / 1e12, "rows": records}
