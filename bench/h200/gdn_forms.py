"""Forms of the delta rule's kernels by turns, one H200: `python bench/h200/gdn_forms.py`; 16 lines, some 20 s."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import statistics
import time
import traceback
from unittest import mock

import torch

import delta
import states
from octavo.ops.compile import nvrtc, side_by_side
from octavo.ops.scan.delta import delta_prepare, delta_prompts, delta_step, loading
from octavo.states import delta_gpu
from octavo.states.reference import DELTA_INPUTS

BEGAN = time.time()
STEPS = {"as it is": 0, "compared later": 1, "and tables ahead": 2}
PREPARES = {"as it is": 0, "joint squares": 1, "and rows by lanes": 2}
PROMPTS = ([4000] * 2, [512] * 16, [2048] * 4, [8192], [300] * 27)
STAMPED = [
    (
        "    wait_for_before();  // the rows ahead may be counted by the kernel before\n    let_next_begin();\n    Part part = part_of(told, lane);\n",
        "#define NOW ((u32)clock64())\n"
        "#define STAMP(i, t) if (lane == 0 && part.is_new(part.begin + warp * 8 + i)) ((u32*)told.rate)[part.fresh(part.begin + warp * 8 + i) * HEADS + part.key_head * PER] = t\n"
        "    wait_for_before();\n    let_next_begin();\n    u32 t0 = NOW, t2, t3;\n    Part part = part_of(told, lane);\n    u32 t1 = NOW;\n",
    ),
    (
        "        gate(told, part, base, keeps);\n        norm(told, part, given, base, warp, lane);\n    }\n    together();\n    if (thread() < PER) sum_up",
        "        gate(told, part, base, keeps);\n        t2 = NOW;\n        norm(told, part, given, base, warp, lane);\n        t3 = NOW;\n    }\n    together();\n    u32 t4 = NOW;\n    STAMP(0, t0); STAMP(1, t1); STAMP(2, t2); STAMP(3, t3); STAMP(4, t4);\n    if (thread() < PER) sum_up",
    ),
    ("        if (turn == 0) {\n            together();  // sums are there\n", "        if (turn == 0) {\n            STAMP(5, NOW);\n            together();\n"),
    ("        if (is_diagonal) {\n            if (!is_made) return;\n            warp_together();\n", "        if (turn == 0) { STAMP(6, NOW); }\n        if (is_diagonal) {\n            if (!is_made) return;\n            warp_together();\n"),
    ("        if (is_diagonal || own % 2 >= PER) return;\n", "        warp_together();\n        STAMP(7, NOW);\n        if (is_diagonal || own % 2 >= PER) return;\n"),
]  # fmt: skip


def say(text):
    """With the time."""
    print(f"[{time.time() - BEGAN:.0f}s] {text}", flush=True)


def stamped():
    """`delta_prepare` that writes clocks where rates go."""
    text = loading.KERNELS["delta_prepare"].source
    for old, new in STAMPED:
        assert text.count(old) == 1, (text.count(old), old)
        text = text.replace(old, new)
    kernel = dataclasses.replace(loading.KERNELS["delta_prepare"])
    kernel.__dict__["source"] = text
    object.__setattr__(kernel, "_functions", {})
    return kernel


@contextlib.contextmanager
def forming(step=0, joint=0, kernels=(delta_step, delta_prompts, delta_prepare)):
    """Within: these forms."""
    own = mock.patch.object(delta_step, "LATER", step), mock.patch.object(delta_prepare, "JOINT", joint)
    with own[0], own[1], delta.copying(*kernels), mock.patch.object(delta_gpu, "_agrees", lambda *_: True):
        yield


def by_turns(run, withins, turns=8):
    """Microseconds of `run` in a graph, by forms."""
    graphs, times = [], [[] for _ in withins]
    for within in withins:
        with within:
            run(), run()
            torch.cuda.synchronize()
            graphs.append(torch.cuda.CUDAGraph())
            with torch.cuda.graph(graphs[-1]):
                run()
    for _ in range(turns):
        for graph, own in zip(graphs, times):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(3):
                graph.replay()
            end.record()
            end.synchronize()
            own.append(begin.elapsed_time(end) * 1e3 / 3)
    return [statistics.median(own) for own in times]


def alone(run):
    """Microseconds of the two kernels of prompts."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(3):
            run()
        torch.cuda.synchronize()
    parts = {event.key: event.self_device_time_total / 3 for event in profiler.key_averages()}
    return "/".join(f"{parts.get(name, 0):.0f}" for name in ("delta_prepare", "delta_prompts"))


def compile_all():
    """In threads, ahead."""
    _, rows = states.operator("delta", [70], 0)
    sizes = states.sizes_of("delta")
    told = rows.backend._tell(rows.own, "delta", ("state",), DELTA_INPUTS, (sizes[3], sizes[2], sizes[3], sizes[3], 1, 1))
    shape = (sizes[1], sizes[0]), rows.own.block_size, told.forms, states.BF16
    asked = [(loading.KERNELS["delta_prompts"].source, {**delta_prompts.macros(*shape), "GROUPS": n}) for n in (1, 2)]
    for form in range(3):
        with forming(form, form):
            asked.append((loading.KERNELS["delta_step"].source, delta_step.macros(*shape)))
            asked.append((loading.KERNELS["delta_prepare"].source, delta_prepare.macros(*shape)))
            if form == 2:
                asked.append((stamped().source, delta_prepare.macros(*shape)))
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda each: nvrtc.machine_code(*each, "sm_90a"), asked))
    try:
        with side_by_side.compiling(lambda *_: None), forming(kernels=()):
            cut()
    except Exception as error:
        say(f"Triton's are not compiled side by side: {type(error).__name__} {str(error)[:200]}")
    say(f"compiled {len(asked)}, and Triton's")


def cut():
    """Results of rows cut anyhow, within blocks and chunks, and of steps behind them, and all that is kept."""
    import gpu_states_rig
    import state_rig
    from octavo.states.gpu import GpuStates

    case = gpu_states_rig.MAKERS["delta"](states.BF16, *states.sizes_of("delta"))
    gpu_states_rig.move(case, states.DEVICE)
    begins = (1, 15, 30, 47, 62, 63, 64, 79, 126, 130, 190, 200)
    drawn = state_rig.draw_all(case, [each + 143 for each in begins])
    rows = state_rig.Rows(case, GpuStates(), drawn, device=states.DEVICE, block_size=64)
    rows.compute(dict(enumerate(begins)))
    rows.compute({row: 40 + row * 9 for row in range(0, len(begins), 2)})
    rows.padded = 1
    rows.compute({row: 17 + row for row in range(1, len(begins), 2)})
    for turn in range(5):
        rows.compute({(row + turn) % len(begins): 1 for row in range(len(begins))})
    return [*rows.results, rows.pool.buffer.clone()]


def same(found, expected):
    """Which rows have other bits; the last one is what is kept."""
    differ = [i for i, (one, other) in enumerate(zip(found, expected)) if not torch.equal(one.view(torch.uint8), other.view(torch.uint8))]
    return f"OTHER {differ}" if differ else "same"


def bits():
    """Of all forms beside today's, with one group and two; of today's beside Triton's."""
    found = []
    with forming():
        expected = cut()
    for step, joint in ((1, 1), (2, 2), (1, 0), (0, 1)):
        for groups in (1, 2):
            with mock.patch.object(delta_prompts, "groups_of", lambda *_: groups), forming(step, joint):
                found.append(f"{step}, {joint}, {groups} {same(cut(), expected)}")
    say(f"bits beside today's, by step's form, prepare's, groups: {'; '.join(found)}")
    with forming(kernels=()):
        say(f"today's beside Triton's: {same(cut(), expected)}")


def decode():
    """Rows that decode."""
    for num_rows, computed in ((64, 1056), (64, 1041), (64, 1086), (256, 160), (8, 1056)):
        said = []
        for layers in (1, 4):
            operators = [states.operator("delta", [1] * num_rows, computed) for _ in range(layers)]

            def run(operators=operators):
                for each, _ in operators:
                    each()

            found = by_turns(run, [forming(step) for step in STEPS.values()])
            said.append(", ".join(f"{us / layers:.1f}" for us in found))
            del operators, run
            torch.cuda.empty_cache()
        say(f"{num_rows} rows at {computed}, us of one layer in a graph: {said[0]}; as one of four: {said[1]}")


def prompts():
    """Whole ones."""
    for counts in PROMPTS:
        operators = [states.operator("delta", counts, 0) for _ in range(4)]

        def run(operators=operators):
            for each, _ in operators:
                each()

        withins = [lambda joint=joint: forming(joint=joint) for joint in PREPARES.values()]
        ones = by_turns(operators[0][0], [within() for within in withins])
        fours = by_turns(run, [within() for within in withins], turns=4)
        said = []
        for within, one, four in zip(withins, ones, fours):
            with within():
                said.append(f"{one:.0f}, {four / 4:.0f} ({alone(operators[0][0])})")
        say(f"{len(counts)} x {counts[0]}, us alone, as one of four (kernels): {'; '.join(said)}")
        del operators, run
        torch.cuda.empty_cache()


def clocks():
    """Of `delta_prepare`'s phases, by warps."""
    run, rows = states.operator("delta", [4000] * 2, 0)
    made, before = [], delta_gpu._prepare

    def keep(*given):
        made[:] = before(*given)
        return tuple(made)

    with forming(2, 2), mock.patch.dict(loading.KERNELS, {"delta_prepare": stamped()}), mock.patch.object(delta_gpu, "_prepare", keep):
        run(), run()
        torch.cuda.synchronize()
    stamps = made[3].view(torch.int32)[: 62 * 64, ::2].long().reshape(62, 8, 8, 16).permute(1, 0, 3, 2)  # warp, chunk, head, stamp
    apart = ((stamps[..., 1:] - stamps[..., :-1]) % (1 << 32)).float().mean((1, 2))
    names = "place", "asked, gates", "norms", "barrier", "products", "first square", "rest"
    said = (f"{name} {' '.join(f'{own:.0f}' for own in apart[:, i].tolist())}" for i, name in enumerate(names))
    say(f"clocks of warps 0 to 7: {'; '.join(said)}")


if __name__ == "__main__":
    for part in (compile_all, bits, decode, prompts, clocks):
        try:
            part()
        except Exception:
            traceback.print_exc()
    print(f"{torch.cuda.get_device_name()}; forms of steps: {', '.join(STEPS)}; of prompts: {', '.join(PREPARES)}")
