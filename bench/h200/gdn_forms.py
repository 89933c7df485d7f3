"""Forms of the delta rule's kernels by turns, one H200: `python bench/h200/gdn_forms.py decode prompts parts walks`."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import statistics
import sys
import time
import traceback
from unittest import mock

import torch

import delta
import states
from octavo.ops.compile import nvrtc
from octavo.ops.scan.delta import delta_prepare, delta_prompts, delta_step, loading
from octavo.states import delta_gpu
from octavo.states.reference import DELTA_INPUTS

BEGAN = time.time()
STEPS = {
    "as it was, 4": (0, 0, 4),
    "as it was, 3": (0, 0, 3),
    "kept ahead, 4": (1, 0, 4),
    "kept, states into L2, 4": (1, 1, 4),
    "kept, states, updates, 4": (1, 2, 4),
    "kept, states, updates, 3": (1, 2, 3),
}
PREPARES = {
    "as it was": (0, 4, 0),
    "compact, 4 blocks": (1, 4, 0),
    "compact, 5 blocks": (1, 5, 0),
    "compact, 5 blocks, products early": (1, 5, 3),
}
NEVER = "0x12345678"
PARTS = {
    "M, f not written": [("else write2(goal + half", f"else if (bits_of(scaled[0]) == {NEVER}) write2(goal + half")],
    "T not written": [("        goal[line * 16 + column] = row;", f"        if (bits_of(row) == {NEVER}) goal[line * 16 + column] = row;")],
    "q, k not written": [("            write(first + i", f"            if (given[i].x[0] == {NEVER}) write(first + i")],
    "q, k not read": [("            given[i] = read(from);", "            given[i] = Four{{(u32)from, lane, warp, 0x3f803f80}};")],
    "no inverse": [("        invert(base", f"        if (block == {NEVER}) invert(base")],
    "no products": [("        compare(alike, own_at, key_at);", "        alike[0][0] = alike[1][0] = number(own_at + lane);")],
    "nothing behind norms": [("    together();\n    if (thread() < PER) sum_up", "    return;\n    if (thread() < PER) sum_up")],
}
PARTS["instructions alone"] = [pair for key in list(PARTS)[:4] for pair in PARTS[key]]
STAMPED = [
    ("    Part part = part_of(told);\n    wait_for_before();\n    let_next_begin();\n    if (part.begin >=",
     "#define NOW ((u32)clock64())\n"
     "#define STAMP(i, t) if (lane == 0 && part.is_new(part.begin + warp * 8 + i)) ((u32*)told.rate)[part.fresh(part.begin + warp * 8 + i) * HEADS + part.key_head * PER] = t\n"
     "    u32 t0 = NOW;\n    Part part = part_of(told);\n    wait_for_before();\n    let_next_begin();\n    u32 t1 = NOW, t2, t3;\n    if (part.begin >="),
    ("        gate(told, part, base, keeps);\n        norm(told, part, given, base, warp, lane);\n    }\n    together();\n    if (thread() < PER) sum_up",
     "        gate(told, part, base, keeps);\n        t2 = NOW;\n        norm(told, part, given, base, warp, lane);\n        t3 = NOW;\n    }\n    together();\n    u32 t4 = NOW;\n    STAMP(0, t0); STAMP(1, t1); STAMP(2, t2); STAMP(3, t3); STAMP(4, t4);\n    if (thread() < PER) sum_up"),
    ("        if (other == 0) {\n            together();  // sums are there\n", "        if (other == 0) {\n            STAMP(5, NOW);\n            together();  // sums are there\n            STAMP(6, NOW);\n"),
    ("    if (is_factor) return;\n    warp_together();\n    for (int head = lane / 16; head < PER; head += 2)\n        invert(base + TRIANGLES + (head * 4 + block) * 1024, told.inverse + (made + head * 16) * 16);",
     "    if (is_factor) { STAMP(7, NOW); return; }\n    warp_together();\n    for (int head = lane / 16; head < PER; head += 2)\n        invert(base + TRIANGLES + (head * 4 + block) * 1024, told.inverse + (made + head * 16) * 16);\n    warp_together();\n    STAMP(7, NOW);"),
]  # fmt: skip
WALKS = {
    "results not written": [("if (at < walk.end && at >= walk.computed) write(", "if (at < walk.computed) write(")],
    "keys not weighed": [("        weigh(at, base", "        if (begin < walk.begin) weigh(at, base")],
    "nothing asked for": [("        if (begin < end) ask(", "        if (begin < walk.begin) ask(")],
}
WALKS["none of it"] = [pair for key in list(WALKS) for pair in WALKS[key]]
PROMPTS = ([4000] * 2, [512] * 16, [2048] * 4, [8192], [300] * 27)


def changed(pairs, name="delta_prepare"):
    """A kernel with other text."""
    text = loading.KERNELS[name].source
    if name == "delta_prepare":
        text = text[: text.index('#if !COMPACT\nextern')]
    for old, new in pairs:
        assert text.count(old) == 1, (text.count(old), old)
        text = text.replace(old, new)
    kernel = dataclasses.replace(loading.KERNELS[name])
    kernel.__dict__["source"] = text
    object.__setattr__(kernel, "_functions", {})
    return kernel


@contextlib.contextmanager
def stepping(name):
    ahead, fetch, depth = STEPS[name]
    others = delta_step, delta_prompts, delta_prepare
    with mock.patch.multiple(delta_step, AHEAD=ahead, FETCH=fetch, DEPTH=depth), delta.copying(*others):
        with mock.patch.object(delta_gpu, "_agrees", lambda *_: True):
            yield


@contextlib.contextmanager
def preparing(name):
    compact, resident, early = PREPARES[name]
    with (
        mock.patch.object(delta_prepare, "COMPACT", compact),
        mock.patch.object(delta_prompts, "EARLY", early),
        mock.patch.dict(delta_prepare.RESIDENT, {2: resident}),
        delta.copying(delta_step, delta_prompts, delta_prepare),
        mock.patch.object(delta_gpu, "_agrees", lambda *_: True),
    ):
        yield


def by_turns(run, forms, within, turns=8):
    """Microseconds of each form of `run` in a graph."""
    graphs, times = {}, {name: [] for name in forms}
    for name in forms:
        with within(name):
            run(), run()
            torch.cuda.synchronize()
            graphs[name] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graphs[name]):
                run()
    for _ in range(turns):
        for name, graph in graphs.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(3):
                graph.replay()
            end.record()
            end.synchronize()
            times[name].append(begin.elapsed_time(end) * 1e3 / 3)
    return {name: statistics.median(own) for name, own in times.items()}


def alone(run, names):
    """Microseconds of kernels."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(3):
            run()
        torch.cuda.synchronize()
    parts = {event.key: event.self_device_time_total / 3 for event in profiler.key_averages()}
    return "/".join(f"{parts.get(name, 0):.0f}" for name in names)


def compile_all():
    """In threads, ahead: both kinds of operators have the same forms."""
    _, rows = states.operator("delta", [70], 0)
    sizes = states.sizes_of("delta")
    told = rows.backend._tell(rows.own, "delta", ("state",), DELTA_INPUTS, (sizes[3], sizes[2], sizes[3], sizes[3], 1, 1))
    shape = (sizes[1], sizes[0]), rows.own.block_size, told.forms, states.BF16
    asked = []
    for name in STEPS:
        with stepping(name):
            asked.append((loading.KERNELS["delta_step"].source, delta_step.macros(*shape)))
    for name in PREPARES:
        with preparing(name):
            asked.append((loading.KERNELS["delta_prepare"].source, delta_prepare.macros(*shape)))
    for pairs in (*PARTS.values(), STAMPED) if "parts" in sys.argv else ():
        with preparing("compact, 4 blocks"):
            asked.append((changed(pairs).source, delta_prepare.macros(*shape)))
    for pairs in WALKS.values() if "walks" in sys.argv else ():
        asked += [(changed(pairs, "delta_prompts").source, {**delta_prompts.macros(*shape), "GROUPS": n, "EARLY": 0}) for n in (1, 2)]
    for groups, early in ((1, 0), (2, 0), (1, 3), (2, 3)):
        asked.append((loading.KERNELS["delta_prompts"].source, {**delta_prompts.macros(*shape), "GROUPS": groups, "EARLY": early}))
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda each: nvrtc.machine_code(*each, "sm_90a"), asked))
    print(f"[{time.time() - BEGAN:.0f}s] compiled {len(asked)}", flush=True)


def cut(within):
    """Results of rows cut anyhow, within blocks and chunks, and of steps behind them, and all that is kept; no Triton."""
    import gpu_states_rig
    import state_rig
    from octavo.states.gpu import GpuStates

    case = gpu_states_rig.MAKERS["delta"](states.BF16, *states.sizes_of("delta"))
    gpu_states_rig.move(case, states.DEVICE)
    begins = (1, 15, 30, 47, 62, 63, 64, 79, 126, 130, 190, 200)
    drawn = state_rig.draw_all(case, [each + 143 for each in begins])
    rows = state_rig.Rows(case, GpuStates(), drawn, device=states.DEVICE, block_size=64)
    with within:
        rows.compute(dict(enumerate(begins)))
        rows.compute({row: 40 + row * 9 for row in range(0, len(begins), 2)})
        rows.padded = 1
        rows.compute({row: 17 + row for row in range(1, len(begins), 2)})
        for turn in range(5):
            rows.compute({(row + turn) % len(begins): 1 for row in range(len(begins))})
    return [*rows.results, rows.pool.buffer.clone()]


def same(found, expected):
    differ = [i for i, (one, other) in enumerate(zip(found, expected)) if not torch.equal(one.view(torch.uint8), other.view(torch.uint8))]
    return f"OTHER BITS, rows {differ}" if differ else "same bits"


def decode():
    expected = None
    for name in STEPS:
        found = cut(stepping(name))
        expected = expected or found
        print(f"{name}: {same(found, expected)}", flush=True)
    for num_rows, computed in ((64, 1056), (256, 160), (8, 1056)):
        for layers in (1, 4):
            operators = [states.operator("delta", [1] * num_rows, computed) for _ in range(layers)]

            def run(operators=operators):
                for each, _ in operators:
                    each()

            found = by_turns(run, STEPS, stepping)
            shown = ", ".join(f"{us / layers:.1f}" for us in found.values())
            print(f"[{time.time() - BEGAN:.0f}s] {num_rows} rows, {layers} layers, us by forms: {shown}", flush=True)
            del operators, run
            torch.cuda.empty_cache()


def prompts():
    expected = {}
    for name in PREPARES:
        said = []
        for groups in (1, 2):
            with mock.patch.object(delta_prompts, "groups_of", lambda *_: groups):
                found = cut(preparing(name))
            said.append(same(found, expected.setdefault(0, found)))
        print(f"{name}, one group and two: {', '.join(said)}", flush=True)
    for counts in PROMPTS:
        run, rows = states.operator("delta", counts, 0)
        found = by_turns(run, PREPARES, preparing)
        said = []
        for name, us in found.items():
            with preparing(name):
                said.append(f"{us:.0f} ({alone(run, ('delta_prepare', 'delta_prompts'))})")
        print(f"[{time.time() - BEGAN:.0f}s] {len(counts)} x {counts[0]}, us by forms: {', '.join(said)}", flush=True)


def parts():
    """Of `delta_prepare`, compact: what it takes without some of it, and clocks of its phases."""
    run, rows = states.operator("delta", [4000] * 2, 0)
    said = []
    with preparing("compact, 4 blocks"):
        for name, pairs in PARTS.items():
            with mock.patch.dict(loading.KERNELS, {"delta_prepare": changed(pairs)}):
                run()
                said.append(f"{name} {alone(run, ('delta_prepare',))}")
        print(f"delta_prepare, compact, us: {', '.join(said)}", flush=True)
        made, before = [], delta_gpu._prepare

        def keep(*given):
            made[:] = before(*given)
            return tuple(made)

        with mock.patch.dict(loading.KERNELS, {"delta_prepare": changed(STAMPED)}), mock.patch.object(delta_gpu, "_prepare", keep):
            run(), run()
            torch.cuda.synchronize()
        stamps = made[3].view(torch.int32)[: 62 * 64, ::2].long().reshape(62, 8, 8, 16).permute(1, 0, 3, 2)  # warp, chunk, head, stamp
        apart = (stamps[..., 1:] - stamps[..., :-1]) % (1 << 32)
        names = "wait", "asked, gates", "norms", "barrier", "products of 16", "barrier", "rest"
        for warp in range(8):
            mean = apart[warp].float().mean((0, 1)).tolist()
            print(f"clocks of warp {warp}: " + ", ".join(f"{name} {own:.0f}" for name, own in zip(names, mean)), flush=True)


def walks():
    """Of `delta_prompts`: what it takes without some of it."""
    for counts in ([4000] * 2, [2048] * 4):
        said = []
        for keeps in (True, False):
            run, rows = states.operator("delta", counts, 0, keeps=keeps)
            with preparing("as it was"):
                run()
                said.append(f"{'as it is' if keeps else 'no states'} {alone(run, ('delta_prompts',))}")
                for name, pairs in WALKS.items():
                    with mock.patch.dict(loading.KERNELS, {"delta_prompts": changed(pairs, "delta_prompts")}):
                        run()
                        said.append(f"{name} {alone(run, ('delta_prompts',))}")
            del run, rows
        print(f"[{time.time() - BEGAN:.0f}s] walk of {len(counts)} x {counts[0]}, us: {', '.join(said)}", flush=True)


if __name__ == "__main__":
    compile_all()
    for part in (decode, prompts, parts, walks):
        if part.__name__ in sys.argv:
            try:
                part()
            except Exception:
                traceback.print_exc()
    print(f"{torch.cuda.get_device_name()}, {time.time() - BEGAN:.0f} s")
