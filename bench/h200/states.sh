#!/usr/bin/env bash
# Layers with states on an H200: kernels against float64, bits over cuts, share of the bytes in decode, of the limit in
# prefill. From the repository root, with PYTHONPATH=$PWD/src. About a minute. The table is last; logs under $OUT.
set -u
OUT=${OUT:-/tmp/states_out}; mkdir -p "$OUT"
PY=${PY:-python3}; [ -x .venv/bin/python ] && PY=.venv/bin/python
export PYTHONPATH=$PWD/src:$PWD/tests:$PWD/tests/states
cat > "$OUT/states.py" <<'PYTHON'
import random, sys, time, traceback
import torch
import gpu_states_rig as gr
import state_rig as rig
from octavo.states.base import StateInputs
from octavo.states.gpu import GpuStates

BF, F32 = torch.bfloat16, torch.float32
BEGIN = time.time()
table = []

def note(name, text):
    table.append((name, text)); print(f"[{time.time() - BEGIN:5.1f}s] {name}: {text}", flush=True)

def attempt(name, function):
    try:
        note(name, function())
    except Exception as error:
        traceback.print_exc(); note(name, f"FAILED {type(error).__name__}: {str(error)[:120]}")

def accuracy():
    for name, sizes, dtype in (("conv", (300, 3), BF), ("delta", (2, 4, 128, 128), BF), ("mamba2", (4, 64, 2, 128), BF),
                               ("mamba1", (300, 16), BF), ("mamba2", (2, 16, 1, 32), F32), ("delta", (1, 2, 64, 64), F32)):
        start = time.time(); gr.check_results("cuda", name, dtype, (1, 17, 70, 200), 90, sizes)
        print("accuracy", name, dtype, sizes, f"{time.time() - start:.1f} s", flush=True)
    return "within 3e-5 (float32), 3e-2 (bfloat16) of float64"

SHAPES = {"delta": (16, 32, 128, 128), "mamba2": (128, 64, 8, 128), "conv": (8192, 4), "mamba1": (8192, 16)}

def bits(name, dtype):
    case = gr.MAKERS[name](dtype, *(SHAPES[name] if dtype is BF else (1, 2, 64, 64))); gr.move(case, "cuda")
    lengths = (130, 200, 64, 65, 15)
    drawn = rig.draw_all(case, lengths)
    backend = GpuStates()
    expected = []
    for each in drawn:
        rows = rig.Rows(case, backend, [each], device="cuda", block_size=64); rows.compute({0: len(each[0])}); expected += rows.results
    bad = 0
    for largest, spoilt, size in ((1, 0, 64), (7, 3, 64), (64, 0, 64), (100, 2, 16 if dtype is BF else 64)):
        rng = random.Random(largest)
        rows = rig.Rows(case, backend, drawn, device="cuda", block_size=size, seed=largest)
        while left := [row for row, count in enumerate(lengths) if rows.computed[row] < count]:
            chosen = rng.sample(left, rng.randint(1, len(left)))
            rows.compute({row: min(rng.randint(1, largest), lengths[row] - rows.computed[row]) for row in chosen}, spoilt)
        for found, own in zip(rows.results, expected):
            rows_bad = int((found != own).any(1).sum()); bad += rows_bad
            if rows_bad: print(name, dtype, largest, len(own), "rows differ:", (found != own).any(1).nonzero().flatten().tolist()[:20])
    return f"{bad} of {4 * sum(lengths)} rows differ over cuts of 1, 7, 64, 100 with rejected tokens, batches, blocks of 16 and 64"

def timed(name, counts, computed):
    """(us of the whole operator in a graph, kernels and their us)"""
    case = gr.MAKERS[name](BF, *SHAPES[name]); gr.move(case, "cuda")
    one = [t[:1] for t in case.draw(torch.Generator().manual_seed(0), 1)]
    drawn = [tuple(t.expand(computed + counts[0], *t.shape[1:]) for t in one)] * len(counts)
    rows = rig.Rows(case, GpuStates(), drawn, device="cuda", block_size=64)
    rows.pool.buffer.zero_()
    starts = [0]
    for count in counts: starts.append(starts[-1] + count)
    total = starts[-1]
    rows.step.prepare(StateInputs(
        max_query_len=max(counts), max_seq_len=computed + max(counts),
        rows=torch.arange(len(counts), device="cuda"),
        query_start=torch.tensor(starts, dtype=torch.int32, device="cuda"),
        seq_lens=torch.tensor([computed + count for count in counts], dtype=torch.int32, device="cuda"),
        positions=torch.cat([torch.arange(computed, computed + count) for count in counts]).cuda()))
    given = [torch.randn(total, *t.shape[1:], device="cuda").to(t.dtype) for t in one]
    run = lambda: case.run(rows.backend, rows.own, given)
    for _ in range(2): run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph): run()
    graph.replay(); torch.cuda.synchronize()
    a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    a.record()
    for _ in range(10): graph.replay()
    b.record(); torch.cuda.synchronize()
    us = a.elapsed_time(b) * 100
    from torch.profiler import ProfilerActivity, profile
    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        run(); torch.cuda.synchronize()
    parts = {e.key: e.self_device_time_total for e in prof.key_averages() if e.self_device_time_total > 0.5}
    del rows, graph; torch.cuda.empty_cache()
    return us, parts

def show(parts): return ", ".join(f"{name[:22]} {us:.0f}" for name, us in sorted(parts.items(), key=lambda item: -item[1])[:5])

def decode(name, rows, computed):
    us, parts = timed(name, [1] * rows, computed)
    place = computed % 64
    if name == "delta":
        kh, h, k, v = SHAPES[name]; state = 4 * h * k * v
        blocks = place // 16 * 16
        opened = place * (2 * kh * k + 4 * h) + blocks * 2 * h * v + (place - blocks) * 2 * h * v
        step = 2 * (2 * kh * k + h * v) + 6 * h * v + 2 * kh * k
    else:
        h, p, g, n = SHAPES[name]; state = 4 * h * n * p
        opened = place * (2 * h * p + 2 * g * n + 8 * h); step = 2 * (h * p + 2 * g * n) + 4 * h * p
    limit = rows * (state + opened + step) / 4.8e6
    return f"{us:7.1f} us; bytes need {limit:6.1f} us at 4.8 TB/s: {100 * limit / us:3.0f} %; scan alone {100 * limit / max(parts.values()):3.0f} %   [{show(parts)}]"

def prefill(name, rows, count):
    us, parts = timed(name, [count] * rows, 0)
    tokens = rows * count
    if name == "delta":
        kh, h, k, v = SHAPES[name]
        bytes_ = tokens * (2 * (2 * kh * k + h * v) + 2 * h * v); flops = tokens * h * (6 * k * v + 2 * 64 * (k + v))
    else:
        h, p, g, n = SHAPES[name]
        bytes_ = tokens * (2 * (h * p + 2 * g * n) + 2 * h * p); flops = tokens * (h * (4 * n * p + 64 * p) + g * 64 * n)
    by, fl = bytes_ / 4.8e6, flops / 800e6
    limit = max(by, fl)
    return f"{us:7.0f} us; limit {limit:5.0f} us ({'bytes' if by > fl else 'matrix units'}): {100 * limit / us:3.0f} %   [{show(parts)}]"

attempt("accuracy", accuracy)
for name in ("conv", "delta", "mamba2", "mamba1"):
    attempt(f"bits {name} bfloat16", lambda: bits(name, BF))
for name in ("delta", "mamba2"):
    for rows, computed in ((1, 1056), (64, 1056), (64, 1024 + 64 - 1), (256, 160)):
        attempt(f"decode {name} {rows} rows at {computed}", lambda: decode(name, rows, computed))
    for rows, count in ((1, 8192), (16, 512), (4, 2048)):
        attempt(f"prefill {name} {rows} x {count}", lambda: prefill(name, rows, count))
attempt("bits delta float32", lambda: bits("delta", F32))
print(torch.cuda.get_device_name(), f"{time.time() - BEGIN:.0f} s")
for name, text in table: print(f"{name:<34} {text}")
PYTHON
timeout 150 "$PY" "$OUT/states.py" > "$OUT/states.log" 2>&1; echo "rc $?"; tail -40 "$OUT/states.log"
