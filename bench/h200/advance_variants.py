"""Temporary: the advance of states alone, by variants."""
import sys, traceback
import torch
import states
from states import DEVICE, DRY
from octavo.states import gpu
import mamba2 as bench

CUDAS = [
    {"EACH": 16}, {"EACH": 8}, {"EACH": 4}, {"EACH": 16, "FETCH": 2}, {"EACH": 16, "FETCH": 4}, {"EACH": 16, "FETCH": 8}, {"EACH": 8, "FETCH": 8},
    {"EACH": 16, "HINT": 1}, {"EACH": 16, "HINT": 2}, {"EACH": 16, "HINT": 3}, {"EACH": 16, "HINT": 4}, {"EACH": 16, "FETCH": 4, "HINT": 3}, {"EACH": 16, "FETCH": 16, "HINT": 3},
]


def measure(num_rows, variants):
    run, rows = states.operator("mamba2", [1] * num_rows, 127)
    for store in (*rows.own.states, *rows.own.kept_inputs):
        store.data.normal_()
    for name, store in zip(rows.own.input_names, rows.own.kept_inputs, strict=True):
        if name in ("decay", "dt"):
            store.data.abs_().mul_(-0.1 if name == "decay" else 0.1)
    rows.case.run(rows.backend, rows.own, [torch.randn(num_rows, *each.shape[1:], device=DEVICE).to(each.dtype) for each in rows.drawn[0]])
    own, scan = rows.own, rows.case.part.operands
    told = rows.backend._tell_mamba2(own, scan)
    buffer = rows.pool.buffer
    expected = None
    for name, (setup) in variants:
        try:
            for key, value in setup.items():
                if key == "tile": gpu._MAMBA2_TILES["advance"] = value
                else: setattr(gpu, key, value)
            go = lambda: rows.backend._advance_mamba2(own, scan, num_rows, [told.firsts])
            # the states behind are spoilt first
            spoil(own)
            go()
            torch.cuda.synchronize() if not DRY else None
            found = digest(buffer)
            if expected is None: expected = found
            same = "" if found == expected else " OTHER BITS"
            spoil(own)
            if digest(buffer) == expected: same += " NOT SPOILT"
            us = bench.graph_us(go)
            bytes_ = num_rows * (2 * 4 * 128 * 64 * 128 + 64 * (2 * 128 * 64 + 2 * 8 * 128 + 8 * 128))
            print(f"{num_rows:4} rows {name:<44} {us:8.1f} us, {bytes_ / us / 1e6:5.2f} TB/s{same}", flush=True)
        except Exception as error:
            if DRY: traceback.print_exc()
            print(f"{num_rows:4} rows {name:<44} FAILED {type(error).__name__} {str(error)[:150]}", flush=True)

def digest(buffer):
    flat = buffer.view(-1).view(torch.int32)
    return [int(part.to(torch.int64).mul(torch.arange(1, part.numel() + 1, device=part.device)).sum()) for part in flat.split(1 << 26)]

def spoil(own):
    """States behind 128 tokens: entry 1 of the table."""
    store, table = own.states[0], own.state_table
    blocks = store.blocks
    ids = table[:, blocks : 2 * blocks].flatten().long()
    store.data[ids] = 7.25

if __name__ == "__main__":
    old = {"OLD": True, "tile": (64, 8), "_ADVANCE_PROGRAMS": 264, "_ADVANCE_STAGES": 3, "_ADVANCE_REGISTERS": 128, "CUDA": {}}
    variants = [("old", old)]
    if "cuda" in sys.argv:
        variants += [(f"CUDA {own}", old | {"CUDA": own}) for own in CUDAS]
    for tile, programs, stages, registers, heads in () if "cuda" in sys.argv else (
        ((64, 4), 264, 2, 255, 16), ((64, 4), 264, 2, 255, 8), ((64, 4), 264, 1, 255, 16), ((64, 4), 264, 2, 232, 16),
    ):
        variants.append((f"{tile} {programs} programs {stages} stages {registers} regs {heads} heads", {"OLD": False, "CUDA": {}, "tile": tile, "_ADVANCE_PROGRAMS": programs, "_ADVANCE_STAGES": stages, "_ADVANCE_REGISTERS": registers, "_ADVANCE_HEADS": heads}))
    if not DRY:
        one, other = torch.zeros(2, 1 << 28, device=DEVICE)
        us = bench.graph_us(lambda: one.copy_(other))
        print(f"a copy {(2 << 30) / us / 1e6:.2f} TB/s", flush=True)
        del one, other
    for rows in (2,) if DRY else (64, 512):
        measure(rows, variants)
        if not DRY:
            torch.cuda.empty_cache()
    if "cuda" in sys.argv and not DRY:
        gpu.CUDA = {"EACH": 16}
        print("CUDA, over cuts:", states.bits("mamba2", torch.bfloat16), flush=True)
