"""Temporary: the advance of states alone, by variants."""
import sys, traceback
import torch
import states
from states import DEVICE, DRY
from octavo.states import gpu
from octavo.states import mamba2_advance as choice
from octavo.ops.scan import mamba2_advance as kernel

macros = kernel.macros
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
            choice._COPIED = "copied" in setup
            if choice._COPIED:
                kernel.macros = lambda *given, setup=setup: macros(*given) | setup["copied"]
            else:
                gpu._MAMBA2_TILES["advance"] = setup["tile"]
                choice._PROGRAMS, choice._STAGES, choice._REGISTERS, choice._HEADS = setup["rest"]
            go = lambda: rows.backend._advance_mamba2(own, scan, num_rows, [told.firsts])
            note = ""
            if choice._COPIED and not DRY:
                x = told.kept[1]
                shape = gpu._mamba2_shape(own, scan, told, x, 64)
                assert kernel.serves((128, 8), (64, 128), 64, num_rows, told.kept), "serves"
                assert kernel.is_loaded(choice._macros(own, told, scan), x.device), "loaded"
                if num_rows == 64:
                    note = f" agrees {choice._agrees(choice._macros(own, told, scan), own, told, scan, shape, 8)}"
                go = lambda: choice._copied(own, told, scan, num_rows, [told.firsts])
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
            print(f"{num_rows:4} rows {name:<44} {us:8.1f} us, {bytes_ / us / 1e6:5.2f} TB/s{same}{note}", flush=True)
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
    variants = [("Triton (64, 4) 264, 2 stages, 255", {"tile": (64, 4), "rest": (264, 2, 255, 16)})]
    if "cuda" in sys.argv:
        variants += [(f"CUDA {own}", {"copied": own}) for own in CUDAS]
    for tile, *rest in () if "cuda" in sys.argv else (
        ((64, 4), 264, 2, 255, 8), ((64, 8), 264, 2, 128, 16), ((64, 4), 264, 1, 255, 16), ((64, 4), 264, 2, 232, 16),
    ):
        variants.append((f"Triton {tile} {rest}", {"tile": tile, "rest": rest}))
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
        choice._COPIED, kernel.macros = True, macros
        print("CUDA, over cuts:", states.bits("mamba2", torch.bfloat16), flush=True)
