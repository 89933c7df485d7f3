"""Mamba-2's prompts by Triton's walk and in CUDA C++, forms of it: bits, microseconds, clocks that roles wait.

`python bench/h200/walks.py [bits] [times] [waits]`; all without a word. A table of lines that begin with = is last.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import states  # which finds the tests' rigs
import torch

from octavo.ops.scan.cuda_kernel import CudaKernel
from octavo.ops.scan.mamba2 import mamba2_prompts as ops
from octavo.states.mamba2 import mamba2_prompts

BEGAN, lines = time.time(), list[str]()
WORDS = [word for word in sys.argv[1:] if not word.startswith("-")] or ["bits", "times", "waits"]
Edits = tuple[tuple[str, str], ...]
NO_SEND: Edits = (
    (
        "if (lane == 0 && goal >= 0) {\n                int line",
        "if (lane == 0 && goal >= 0 && told.num_rows < 0) {\n                int line",
    ),
)
KINDS = (
    "states: chunk",
    "states: place",
    "results: chunk",
    "results: state",
    "asker: stage",
    "sender: state",
    "sender: read",
    "results, all",
    "states, all",
)


def timed(source: str) -> str:
    """The text, with clocks."""
    source = source.replace(
        "num_rows;\n};\n\n#define SIZE",
        "num_rows;\n    u64* waits;\n};\n"
        "__device__ inline void count_clocks(const Told& told, int kind, long long from) { if (thread() % 128 == 0 || thread() == 416 + (RESULT_GROUPS - 1) * 128) atomicAdd(told.waits + kind, (u64)(clock64() - from)); }\n"
        "#define CLOCKS(kind, x) { long long from = clock64(); x; count_clocks(told, kind, from); }\n\n#define SIZE",
    )
    for kind, where, text in (
        (0, "walk_states(", "wait_for(base + FULL + other.place * 8, other.turn)"),
        (2, "make_results(", "wait_for(base + FULL + stage.place * 8, stage.turn)"),
        (3, "make_results(", "wait_for(base + STAGED + slot.place * 8, slot.turn)"),
        (4, "ask_all(", "wait_for(base + EMPTY + stage.place * 8, stage.turn ^ 1)"),
        (5, "send_all(", "wait_for(base + STAGED + slot.place * 8, slot.turn)"),
        (6, "send_all(", "was_read<0>()"),
    ):
        at = source.index("__device__ inline void " + where)
        assert text in source[at:], text
        source = source[:at] + source[at:].replace(text, f"CLOCKS({kind}, {text})", 1)
    source = source.replace("void stage_state(u32 base", "void stage_state(const Told& told, u32 base").replace(
        "stage_state(base, slot", "stage_state(told, base, slot"
    )
    at = source.index("void stage_state(")
    text = "wait_for(base + FREE + slot.place * 8, slot.turn ^ 1)"
    source = source[:at] + source[at:].replace(text, f"CLOCKS(1, {text})", 1)
    source = source.replace("        walk_states(told,", "        CLOCKS(8, walk_states(told,").replace(
        "base, warp, lane);\n    } else if", "base, warp, lane));\n    } else if"
    )
    return source.replace("        make_results(told,", "        CLOCKS(7, make_results(told,").replace(
        "RESULT_WARPS, lane);\n    }", "RESULT_WARPS, lane));\n    }"
    )


@dataclasses.dataclass(frozen=True)
class Form:
    """A form of the kernel; numbers: macros that are others."""

    name: str
    numbers: tuple[tuple[str, int], ...] = ()
    edits: Edits = ()
    is_timed: bool = False
    is_first: bool = False
    groups: int = 2


@functools.cache
def kernel_of(edits: Edits, is_timed: bool, is_first: bool) -> CudaKernel:
    source = ops.KERNEL.source
    if is_first:
        source = source[: source.index("// Mamba-2 over prompts: chunks")] + Path(__file__).with_name("walks_first.cu").read_text()
    for old, new in edits:
        assert old in source, old
        source = source.replace(old, new)
    source = timed(source) if is_timed else source
    path = Path(tempfile.mkdtemp()) / "form.cu"
    path.write_text(source)
    made = CudaKernel("mamba2_prompts", (path,), "no form")
    made.__dict__["source"] = source
    return made


class Running:
    """Launches of a form."""

    def __init__(self, form: Form) -> None:
        self.form, self.waits = form, torch.zeros(len(KINDS), dtype=torch.int64, device="cuda")

    def launch(self, told: Any, num_rows: int, own: Any, device: torch.device) -> None:
        form, count = self.form, ops.processors(device)
        own = own | dict(form.numbers) | ({"EACH": 1} if form.is_first else {})
        tasks, kernel = num_rows * own["HEADS"], kernel_of(form.edits, form.is_timed, form.is_first)
        threads = 384 + 128 * own["RESULT_GROUPS"]
        if form.is_timed:
            address = self.waits.data_ptr()
            told.rest[1], told.rest[2] = (
                address & 0xFFFFFFFF if address & 0xFFFFFFFF < 1 << 31 else (address & 0xFFFFFFFF) - (1 << 32),
                address >> 32,
            )
        assert kernel.is_loaded(own, ops.shared_bytes(own), device), form.name
        kernel.launch(told, min(tasks, count), threads, ops.shared_bytes(own), own, device)

    def within(self) -> contextlib.ExitStack:
        stack = contextlib.ExitStack()
        stack.enter_context(mock.patch.object(mamba2_prompts, "_COPIED", self.form is not TRITON))
        if self.form is not TRITON:
            stack.enter_context(mock.patch.object(ops, "launch", self.launch))
            stack.enter_context(mock.patch.object(ops, "is_loaded", lambda *_: True))
            stack.enter_context(mock.patch.object(mamba2_prompts, "agrees", lambda *_: True))
        return stack


TRITON, NEW = Form("Triton"), Form("new")
ONE = (("RESULT_GROUPS", 1),)
FIRST = Form("first", ONE, is_first=True)
FORMS = (
    TRITON,
    FIRST,
    NEW,
    Form("1 group", ONE),
    Form("states not ahead", (("STATES_AHEAD", 0),)),
    Form("results not ahead", (("AHEAD", 0),)),
    Form("neither", (("AHEAD", 0), ("STATES_AHEAD", 0))),
    Form("no send", (), NO_SEND),
)


def report(text: str) -> None:
    lines.append("= " + text)
    print(f"[{time.time() - BEGAN:5.1f}s] {text}", flush=True)


def operator(counts: list[int], computed: list[int], keeps: bool = True) -> tuple[Any, Any]:
    """A step of rows that have computed so many tokens, with random states and inputs kept."""
    run, rows = states.operator("mamba2", [max(counts) + max(computed), *counts[1:]], 0, keeps=keeps)
    starts = torch.tensor([0, *counts]).cumsum(0)
    ends = [own + count for own, count in zip(computed, counts, strict=True)]
    rows.step.prepare(
        dataclasses.replace(
            rows.own.inputs,
            max_query_len=max(counts),
            max_seq_len=max(ends),
            query_start=starts.int().cuda(),
            seq_lens=torch.tensor(ends, dtype=torch.int32, device="cuda"),
            positions=torch.cat([torch.arange(own, end) for own, end in zip(computed, ends, strict=True)]).cuda(),
        )
    )
    one = rows.case.draw(torch.Generator().manual_seed(0), 1)
    torch.manual_seed(3)
    given = [torch.randn(sum(counts), *each.shape[1:], device="cuda").to(each.dtype) for each in one]
    if any(computed):
        for store in (*rows.own.states, *rows.own.kept_inputs):
            kept = (store.data.view(states.BF16) if store is rows.own.states[0] else store.data).normal_()
        for name, store in zip(rows.own.input_names, rows.own.kept_inputs, strict=True):
            if name in ("decay", "dt"):
                store.data.normal_().abs_().mul_(-0.1 if name == "decay" else 0.1)
    return lambda: states.run_whole(rows, given), rows


def bits(name: str, counts: list[int], computed: list[int] | None = None, keeps: bool = True) -> None:
    try:
        run, rows = operator(counts, computed or [0] * len(counts), keeps)
        saved, found = rows.pool.buffer.clone(), []
        for form in FORMS[:-1]:
            rows.pool.buffer.copy_(saved)
            with Running(form).within():
                result = run()
                torch.cuda.synchronize()
            found.append([result.view(torch.int16).clone(), rows.pool.buffer.view(torch.int32).clone()])
        texts = []
        for form, made in zip(FORMS[1:-1], found[1:], strict=True):
            wrong = [int((one != other).sum()) for one, other in zip(made, found[0], strict=True)]
            bad = (made[0] != found[0][0]).any(1).nonzero().flatten().tolist()
            texts.append("same" if not any(wrong) else f"{form.name}: OTHER BITS {wrong}, tokens {bad[:4]}..{bad[-2:]}")
        changed = int((found[0][1] != saved.view(torch.int32)).sum())
        report(
            f"bits {name:<26} {len(texts)} forms: {'; '.join(dict.fromkeys(texts))} (max {found[0][0].view(states.BF16).float().abs().max():.0f}, {changed} words kept)"
        )
    except Exception as error:
        report(f"bits {name:<26} FAILED {type(error).__name__} {str(error)[:200]}")


def times(name: str, counts: list[int], forms: tuple[Form, ...]) -> None:
    """us of the operator in a graph and of the walk alone, by turns."""
    run, rows = operator(counts, [0] * len(counts))
    graphs, made = [], []
    for form in forms:
        try:
            running = Running(form)
            with running.within():
                run()
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    run()
            graphs.append((form, graph)), made.append(running)
        except Exception as error:
            report(f"{name} {form.name} FAILED {type(error).__name__} {str(error)[:200]}")
    taken: dict[str, list[float]] = {form.name: [] for form, _ in graphs}
    for _ in range(4):
        for form, graph in graphs:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(3):
                graph.replay()
            end.record()
            end.synchronize()
            taken[form.name].append(begin.elapsed_time(end) * 1e3 / 3)
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _, graph in graphs:
            graph.replay()
            graph.replay()
            torch.cuda.synchronize()
    events = [event for event in profiler.events() if event.name in ("mamba2_walk", "mamba2_prompts")]
    events.sort(key=lambda event: event.time_range.start)
    took = [event.device_time for event in events]
    assert len(took) == 2 * len(graphs), len(took)
    alone = {form.name: min(took[2 * place : 2 * place + 2]) for place, (form, _) in enumerate(graphs)}
    report(
        f"us {name:<10} "
        + ", ".join(f"{own} {statistics.median(us):.0f} ({alone[own]:.0f})" for own, us in taken.items())
    )


def waits(name: str, counts: list[int], groups: int = 2) -> None:
    run, _ = operator(counts, [0] * len(counts))
    running = Running(Form("timed", (("RESULT_GROUPS", groups),), is_timed=True))
    with running.within():
        run()
        torch.cuda.synchronize()
        running.waits.zero_()
        run()
        torch.cuda.synchronize()
    items = sum(-(-count // 64) for count in counts) * 128
    # of the roles' lanes that count: one of each warp group, the sender's only one
    per = [value / items for value in running.waits.tolist()]
    per[0], per[1], per[8] = per[0] / 2, per[1] / 2, per[8] / 2
    per[7] /= groups
    report(
        f"clocks a chunk {name}, {groups} groups: "
        + ", ".join(f"{kind} {value:.0f}" for kind, value in zip(KINDS, per, strict=True))
    )


def main() -> None:
    if "bits" in WORDS:
        bits("1 x 8192", [8192])
        bits("1 x 8192, no states", [8192], keeps=False)
        bits("2 x 4000", [4000] * 2)
        bits("16 x 512", [512] * 16)
        bits("7 x 512", [512] * 7)
        bits("27 x 300", [300] * 27)
        bits("130 .. 1", list(range(130, 0, -1)))
        bits("10 x 200 from 0, 64, 128, 37", [200] * 10, [0, 64, 128, 37, 192, 0, 64, 5, 128, 64])
    if "times" in WORDS:
        for name, counts in (
            ("1 x 8192", [8192]),
            ("2 x 4000", [4000] * 2),
            ("16 x 512", [512] * 16),
            ("7 x 512", [512] * 7),
            ("27 x 300", [300] * 27),
        ):
            times(name, counts, FORMS)
    if "waits" in WORDS:
        waits("1 x 8192", [8192])
        waits("1 x 8192", [8192], 1)
        waits("16 x 512", [512] * 16)
    print(f"{torch.cuda.get_device_name()}, {time.time() - BEGAN:.0f} s")


if __name__ == "__main__":
    main()
