"""Where a step's time goes on a GPU: kernels by family beside what each cannot do without, and a timeline.

Owns the families, their least bytes and operations, and what a profiler is asked. Knows shapes by their numbers, and
kernels by their names. Invariant: bytes and operations follow from the shape and the batch alone, so a share compares
a kernel with the machine and never with another kernel.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from octavo.bench.shapes import layers_of
from octavo.llm import LLM

# Family -> parts of kernel names, the first that fits; what fits none is "other".
FAMILIES = {
    "states": ("scan", "convolution", "convolve", "delta_", "mamba2_", "normalize_keys"),
    "attention": ("attend", "divide", "merge", "count_tiles"),
    "products": ("product", "streamed", "nvjet", "gemm", "gemv", "cutlass", "splitK"),
    "norms, rotation, activation": ("norm", "rope", "gated", "relu", "_keep"),
    "sampling": ("draw", "leaf", "leaves", "digit", "mask", "cut", "top", "order_keys", "_list"),
    "experts": ("_choose", "_group", "_sum"),  # but their products
    "inputs and results": ("gather", "commit", "write", "lay_out", "Memcpy", "Memset", "index", "pad"),
}
_SHOWN_KERNELS = 16
_NUM_SYNCHRONIZED = 2  # at the ends of a timeline, to put two clocks on one line


@dataclasses.dataclass(frozen=True, slots=True)
class Load:
    """What a step computes."""

    num_tokens: int
    num_logits: int  # tokens whose logits are wanted
    num_read: int  # tokens whose K and V a layer reads; all are seen by the last token of their request
    num_pairs: int  # of a query and a token that it sees


def decode_load(lengths: Sequence[int]) -> Load:
    """One query for each request of a length."""
    return Load(len(lengths), len(lengths), sum(lengths), sum(lengths))


def prefill_load(lengths: Sequence[int]) -> Load:
    """Whole prompts."""
    return Load(sum(lengths), len(lengths), sum(lengths), sum(n * (n + 1) // 2 for n in lengths))


def least_work(facts: dict[str, Any], load: Load, kv_bytes: int = 2) -> dict[str, tuple[float, float]]:
    """Family -> (bytes, operations) of a step over 16-bit weights: each operand once, fused or not.

    kv_bytes: of a number of K or V in the cache.
    """
    if facts.get("model_type", "qwen3") != "qwen3":
        return _work_of_layers(facts, load, kv_bytes)
    hidden, ff, layers = facts["hidden_size"], facts["intermediate_size"], facts["num_hidden_layers"]
    q_size = facts["num_attention_heads"] * facts["head_dim"]
    kv_size = 2 * facts["num_key_value_heads"] * facts["head_dim"]
    vocab, tokens = facts["vocab_size"], load.num_tokens
    every, most = hidden * kv_size, hidden * (2 * q_size + 3 * ff)  # weights of a layer, by tokens that they multiply
    num_most = (layers - 1) * tokens + load.num_logits  # in the last layer others give K and V alone
    ends = 2 * (hidden * vocab + hidden * load.num_logits) + 4 * vocab * load.num_logits
    products = (
        2 * (layers * (every + most + tokens * (hidden + kv_size)) + num_most * (3 * hidden + 2 * q_size + 3 * ff))
        + ends
    )
    attention = layers * kv_size * load.num_read * kv_bytes + 2 * 2 * q_size * num_most
    num_pairs = (layers - 1) * load.num_pairs + load.num_read
    small = 2 * (layers * tokens * (4 * hidden + kv_size) + num_most * (4 * hidden + 2 * q_size + 3 * ff))
    small += layers * tokens * kv_size * kv_bytes
    return {
        "attention": (attention, 4 * q_size * num_pairs),
        "products": (products, 2 * (layers * every * tokens + most * num_most + hidden * vocab * load.num_logits)),
        "norms, rotation, activation": (small, 0),
        "sampling": (4 * vocab * load.num_logits, 0),
        "inputs and results": (4 * hidden * tokens, 0),
    }


def _work_of_layers(facts: dict[str, Any], load: Load, kv_bytes: int) -> dict[str, tuple[float, float]]:
    """The same of a model whose layers differ; of a network's inner channels nothing is counted.

    A row that decodes stands in the middle of its chunk.
    """
    from octavo.ops.scan import CHUNK  # as in `layers_of`

    layers, tokens = layers_of(facts), load.num_tokens
    hidden, vocab = facts["hidden_size"], facts["vocab_size"]
    heads, stream = sum(layer.heads for layer in layers), 4 * hidden * len(layers) * tokens
    weights = sum(layer.read(tokens) for layer in layers) + hidden * vocab
    decodes = tokens == load.num_logits
    states = load.num_logits * sum(layer.state_bytes + decodes * layer.kept_bytes * (CHUNK // 2) for layer in layers)
    return {
        "states": (
            states + 2 * tokens * sum(each.scanned for each in layers),
            tokens * sum(each.scan for each in layers),
        ),
        "attention": (
            sum(layer.kv for layer in layers) * load.num_read * kv_bytes + 2 * 2 * heads * tokens,
            4 * heads * load.num_pairs,
        ),
        "products": (
            2 * weights + stream + 4 * vocab * load.num_logits,
            2 * (sum(layer.active for layer in layers) * tokens + hidden * vocab * load.num_logits),
        ),
        "norms, rotation, activation": (2 * stream, 0),
        "sampling": (4 * vocab * load.num_logits, 0),
        "inputs and results": (4 * hidden * tokens, 0),
    }


def family_of(kernel: str) -> str:
    """The family that a kernel's name belongs to."""
    return next((name for name, parts in FAMILIES.items() if any(part in kernel for part in parts)), "other")


def launches(profiler: Any) -> list[tuple[str, float, float]]:
    """(kernel, start, end) of what the device did, in microseconds."""
    from torch.autograd import DeviceType  # type: ignore[attr-defined]

    events = (event for event in profiler.events() if event.device_type == DeviceType.CUDA)
    return [(event.name, event.time_range.start, event.time_range.end) for event in events]


def kernels(launched: Iterable[tuple[str, float, float]], steps: float) -> list[dict[str, Any]]:
    """Of (kernel, start, end), all kernels by name, the longest first: calls and microseconds a step.

    A kernel may be launched while the one ahead ends, and wait. Its time begins when all that started before it have
    ended, so that times sum to what the device was busy.
    """
    found: dict[str, list[float]] = {}
    latest = -math.inf
    for name, start, end in sorted(launched, key=lambda launch: launch[1]):
        found.setdefault(name[:90], []).append(max(end - max(start, latest), 0.0))
        latest = max(latest, end)
    rows = [{"kernel": name, "us": sum(us) / steps, "calls": len(us) / steps} for name, us in found.items()]
    return sorted(rows, key=lambda row: -row["us"])


def family_rows(
    rows: Sequence[dict[str, Any]], work: dict[str, tuple[float, float]], copy: float, product: float
) -> list[dict[str, Any]]:
    """Families of `kernels` beside their limits. copy: bytes per second; product: operations per second."""
    found = {name: {"family": name, "calls": 0.0, "us": 0.0} for name in [*FAMILIES, "other"]}
    for row in rows:
        family = found[family_of(row["kernel"])]
        family["calls"] += row["calls"]
        family["us"] += row["us"]
    for name, (num_bytes, operations) in work.items():
        limit = max(num_bytes / copy, operations / product) * 1e6
        found[name] |= {"mb": num_bytes / 1e6, "gflop": operations / 1e9, "limit_us": limit}
    return [row for row in found.values() if row["calls"]]


def table(rows: Sequence[dict[str, Any]], families: Sequence[dict[str, Any]]) -> str:
    """The longest kernels, then the families as rows of a Markdown table."""
    lines = [f"  {row['us']:9.1f} us {row['calls']:7.1f} calls  {row['kernel']}" for row in rows[:_SHOWN_KERNELS]]
    lines += ["  | family | kernels | us | MB | GFLOP | limit, us | share |", "  |---|---|---|---|---|---|---|"]
    total = {key: sum(row.get(key, 0.0) for row in families) for key in ("calls", "us", "mb", "gflop", "limit_us")}
    for row in (*families, {"family": "all", **total}):
        limit = row.get("limit_us", 0.0)
        lines.append(
            f"  | {row['family']} | {row['calls']:.0f} | {row['us']:.0f} | {row.get('mb', 0.0):.1f} | "
            f"{row.get('gflop', 0.0):.1f} | {limit:.0f} | {limit / max(row['us'], 1e-9):.0%} |"
        )
    return "\n".join(lines)


@dataclasses.dataclass(frozen=True, slots=True)
class _Waited:
    """A pending result whose waiting is timed."""

    result: Callable[[], Any]


@contextlib.contextmanager
def _host_parts(llm: LLM) -> Iterator[list[tuple[str, int, int]]]:
    """(part, start, end) of the engine's thread, in nanoseconds of perf_counter."""
    found: list[tuple[str, int, int]] = []
    engine = llm.engine
    core = engine.core
    executor, frontend = core._executor, engine.frontend

    def timed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            started = time.perf_counter_ns()
            result = call(*args)
            found.append((name, started, time.perf_counter_ns()))
            return result

        return run

    submit = timed("issue", executor.submit)
    wrapped: list[tuple[Any, str, Callable[..., Any]]] = [
        (core.scheduler, "schedule", timed("schedule", core.scheduler.schedule)),
        (core.scheduler, "update", timed("update", core.scheduler.update)),
        (executor, "submit", lambda plan: _Waited(timed("wait", submit(plan).result))),
        (frontend, "take", timed("outputs", frontend.take)),
    ]
    core.ask_workers("time_issue", type(None), True)
    for owner, name, call in wrapped:
        setattr(owner, name, call)
    try:
        yield found
    finally:
        core.ask_workers("time_issue", type(None), False)
        found += core.ask_workers("take_spans", list[tuple[str, int, int]])[0]
        for owner, name, _ in wrapped:
            delattr(owner, name)


def record_timeline(llm: LLM, num_steps: int, path: Path, **facts: Any) -> None:
    """Write what the host's thread and the device do during `num_steps` steps of a running engine, as JSON.

    The document has `facts` and `events` [lane, name, start, length] in microseconds; lanes are "engine" and "issue"
    (the engine's thread), "CUDA" (its calls into the driver's library) and "stream N". The profiler slows what it
    watches: lengths are for the eye.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile

    marks: list[int] = []
    with _host_parts(llm) as parts, profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(_NUM_SYNCHRONIZED):
            torch.cuda.synchronize()
            marks.append(time.perf_counter_ns())
        for _ in range(num_steps):
            llm.engine.step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory(prefix="octavo-bench-") as folder:
        trace = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(trace))
        device = [entry for entry in json.loads(trace.read_text())["traceEvents"] if entry.get("ph") == "X"]
    synchronized = sorted(entry["ts"] + entry["dur"] for entry in device if entry["name"] == "cudaDeviceSynchronize")
    offset = synchronized[_NUM_SYNCHRONIZED - 1] - marks[-1] / 1e3
    events: list[tuple[str, str, float, float]] = []
    for name, started, ended in parts:
        lane = "issue" if name in ("apply", "stage") else "engine"
        events.append((lane, name, started / 1e3 + offset, (ended - started) / 1e3))
    for entry in device:
        if entry.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            events.append((f"stream {entry['args']['stream']}", entry["name"][:60], entry["ts"], entry["dur"]))
        elif str(entry.get("cat")).startswith("cuda_"):
            events.append(("CUDA", entry["name"], entry["ts"], entry["dur"]))
    begin = min(start for lane, _, start, _ in events if lane == "engine")
    document: list[tuple[str, str, float, float]] = [
        (lane, name, round(start - begin, 3), round(length, 3)) for lane, name, start, length in events
    ]
    path.write_text(json.dumps(facts | {"events": sorted(document, key=lambda event: event[2])}))
