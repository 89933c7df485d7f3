"""Engine workloads on a GPU: each figure beside its physical limit.

Owns the workloads, their limits, and which steps `gpu_profile` looks into. Knows shapes by their numbers only; the
engine comes from its caller. Limits are counted from bytes and operations that the work cannot do without, at the rates
that this device shows in the same process. Invariant: the last line of output is one JSON document with everything
above it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from octavo.bench import gpu_profile
from octavo.bench.shapes import layers_of
from octavo.llm import LLM
from octavo.observe import Phases
from octavo.request.sampling_params import RequestOutputKind, SamplingParams

MAX_MODEL_LEN, MAX_NUM_SEQS = 4096, 512
_PROFILED_STEPS, _TIMED_STEPS = 20, 192  # timed: whole rounds of what a row does every so many tokens
_TIMELINE_ROWS, _TIMELINE_STEPS = 64, 4


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """A shape by its config.json, the engine's settings, and what makes an engine of random weights.

    Or a model: its name, how many tokens it has, and what makes an engine of it.
    """

    shape: str
    facts: dict[str, Any]
    fields: dict[str, Any]
    make_llm: Callable[..., AbstractContextManager[LLM]]

    def engine(self, **fields: Any) -> AbstractContextManager[LLM]:
        """The engine that every workload runs on."""
        settings = {"max_model_len": MAX_MODEL_LEN, "max_num_seqs": MAX_NUM_SEQS, "enable_prefix_caching": False}
        return self.make_llm(self.shape, **settings, **self.fields, **fields)


@dataclasses.dataclass(frozen=True, slots=True)
class Workload:
    """Prompts and output lengths of a workload, and what is counted of it."""

    prompts: list[list[int]]
    num_outputs: list[int]
    temperature: float
    counts_prompts: bool = False


def workload(name: str, vocab: int) -> Workload:
    """By its name, of a model with so many tokens."""
    rng = random.Random(1)

    def prompts(count: int, low: int, high: int) -> list[list[int]]:
        return [[rng.randrange(vocab) for _ in range(rng.randint(low, high))] for _ in range(count)]

    if name == "offline256":
        return Workload(prompts(256, 100, 1024), [rng.randint(100, 1024) for _ in range(256)], 0.6)
    if name == "single":
        return Workload(prompts(1, 128, 128), [256], 0.0)
    if name == "prefill":
        return Workload(prompts(32, 4000, 4000), [1] * 32, 0.0, counts_prompts=True)
    if name == "quotes":  # a prompt that says everything twice, so that n-grams find something
        line = prompts(1, 96, 96)[0]
        return Workload([line + line[:32]], [256], 0.0)
    count = int(name.removeprefix("decode"))
    return Workload(prompts(count, 16, 16), [256] * count, 0.6)


WORKLOADS = ("start", "single", "offline256", "prefill", "decode64", "decode512")
DRAFTED = ("single", "decode64", "offline256", "decode512", "quotes")  # that are compared with drafts and without
SWEEP = "rows"  # of drafts as well: decoding of so many rows, one number after the other
ROWS = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, MAX_NUM_SEQS)


def sweep(vocab: int, counts: Sequence[int] = ROWS) -> dict[str, Workload]:
    """Decoding of each of so many rows. The requests of a smaller number are the first ones of a larger."""
    prompts = workload(f"decode{max(counts)}", vocab).prompts
    return {f"{SWEEP}{count}": Workload(prompts[:count], [128] * count, 0.6) for count in counts}


def _generate(llm: LLM, work: Workload) -> float:
    """Seconds."""
    params = [
        SamplingParams(max_tokens=count, ignore_eos=True, detokenize=False, temperature=work.temperature, seed=index)
        for index, count in enumerate(work.num_outputs)
    ]
    started = time.perf_counter()
    llm.generate(work.prompts, params, use_tqdm=False)
    return time.perf_counter() - started


def _least_seconds(facts: dict[str, Any], work: Workload, copy: float, product: float, kv_bytes: int) -> float:
    """The time that bytes and operations alone take. kv_bytes: of a number of K or V.

    Weights count once per decode step, of experts those that its rows choose at random; K and V once per token that
    sees them, states once per row, products for every prompt token, of a last layer that attends K's and V's alone but
    for the prompt's last token; the longest output says how many decode steps there are.
    """
    layers, output_head = layers_of(facts), facts["hidden_size"] * facts["vocab_size"]
    active, last = sum(layer.active for layer in layers), layers[-1]
    kv_token, state_bytes = kv_bytes * sum(layer.kv for layer in layers), sum(layer.state_bytes for layer in layers)
    heads = sum(layer.heads for layer in layers)
    lengths = [len(prompt) for prompt in work.prompts]
    prompt_operations = sum(
        2 * (active * n - last.spared * (n - 1)) + 2 * n * (heads * n - (n - 2) * last.heads * bool(last.spared))
        for n in lengths
    )
    seconds = prompt_operations / product
    for step in range(1, max(work.num_outputs)):
        live = [n + step for n, count in zip(lengths, work.num_outputs, strict=True) if step < count]
        read = sum(layer.read(len(live)) for layer in layers) + output_head
        moved = 2 * read + kv_token * sum(live) + state_bytes * len(live)
        seconds += max(moved / copy, 2 * (active + output_head) * len(live) / product)
    return seconds


def _kv_bytes(llm: LLM) -> int:
    """Of a number of K or V in the engine's cache."""
    return 1 if llm.engine.resolved.kv_cache_dtype in ("fp8", "int8") else 2


def _start(run: Run) -> list[float]:
    """Seconds from process start until an engine can take a request: of two processes, the second with warm caches."""
    code = (
        "import json, sys\nfrom octavo.bench.engine import dummy_model\n"
        "with dummy_model(sys.argv[1], **json.loads(sys.argv[2])):\n    print('ready', flush=True)"
    )
    fields = {"max_model_len": MAX_MODEL_LEN, "max_num_seqs": MAX_NUM_SEQS, "enable_prefix_caching": False}
    command = [sys.executable, "-c", code, run.shape, json.dumps(fields | run.fields)]
    times = []
    for _ in range(2):
        started = time.perf_counter()
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None, "the pipe was asked for"
            answer = process.stdout.readline()
            times.append(time.perf_counter() - started)
        if answer != "ready\n" or process.returncode:
            raise RuntimeError(f"the engine did not start: exit status {process.returncode}")
    return times


def report(
    run: Run, names: Sequence[str], document: dict[str, Any], *, profile: bool, timeline: Path | None = None
) -> int:
    """Run workloads; print a row each, then a JSON line each, then the document.

    profile: also where a step's time goes. timeline: a file for what a few decode steps do.
    """
    records: list[dict[str, Any]] = []
    if "start" in names:
        first, warm = _start(run)
        print(f"{run.shape:>5} {'start':<10} {warm:10.2f} s (the process before it {first:.2f} s)", flush=True)
        records.append({"workload": "start", "value": warm, "unit": "s", "limit": None, "first": first})
    timed = [name for name in names if name != "start"]
    if timed or profile or timeline:
        phases = Phases()
        with run.engine(phases=phases) as llm:
            from octavo.ops.compile.gpu_limits import measure_limits

            print(phases.table(), flush=True)
            llm.engine.capture_rest()  # the first steps of a size are not what is measured
            copy, product = measure_limits()
            document |= {"copy_tb_s": copy / 1e12, "product_tflop_s": product / 1e12, "phases": phases.entries}
            print(f"      copy {copy / 1e12:.2f} TB/s, product {product / 1e12:.0f} TFLOP/s", flush=True)
            records += [_timed(run, llm, name, copy, product) for name in timed]
            if profile:
                limits = copy, product
                # times first: a profiler slows the calls that it watches, and those after it
                times = [_time_decode(llm, count) for count in (1, 64, 256, MAX_NUM_SEQS)]
                document["decode_profiles"] = [_profile_decode(run, llm, entry, *limits) for entry in times]
                document["prefill_profile"] = _profile_prefill(run, llm, *limits)
            if timeline:
                with _decoding(llm, _TIMELINE_ROWS):
                    facts = {"shape": run.shape, "rows": _TIMELINE_ROWS}
                    gpu_profile.record_timeline(llm, _TIMELINE_STEPS, timeline, **facts)
    for record in records:
        record |= {"shape": run.shape, "mode": run.fields["numerics"], "command": " ".join(sys.argv)}
        print(json.dumps(record))
    print(json.dumps(document | {"results": records}))
    return 0


def _timed(run: Run, llm: LLM, name: str, copy: float, product: float) -> dict[str, Any]:
    work = workload(name, run.facts["vocab_size"])
    warm = dataclasses.replace(work, num_outputs=[min(count, 4) for count in work.num_outputs])
    _generate(llm, warm)
    before = llm.engine.times.copy()
    seconds = _generate(llm, work)
    spent = llm.engine.times.since(before)
    tokens = sum(map(len, work.prompts)) if work.counts_prompts else sum(work.num_outputs)
    rate, limit = tokens / seconds, tokens / _least_seconds(run.facts, work, copy, product, _kv_bytes(llm))
    host = spent.per_step()
    busy = ", ".join(f"{part} {value:.0f}" for part, value in host.items())
    print(
        f"{run.shape:>5} {name:<10} {rate:10.0f} tok/s, {rate / limit:6.1%} of {limit:.0f}; {seconds:.3f} s, "
        f"{spent.num_steps} steps; host us a step: {busy}",
        flush=True,
    )
    return {
        "workload": name,
        "value": rate,
        "unit": "tok/s",
        "limit": limit,
        "seconds": seconds,
        "steps": spent.num_steps,
        "host_us": host,
    }


@contextlib.contextmanager
def _decoding(llm: LLM, num_rows: int, length: int = 400) -> Iterator[list[int]]:
    """Requests that decode, some 100 tokens behind prompts of about `length`; gives their lengths."""
    engine = llm.engine
    params = SamplingParams(
        max_tokens=400,
        ignore_eos=True,
        detokenize=False,
        temperature=0.6,
        seed=1,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    ids = [f"profile-{index}" for index in range(num_rows)]
    for index, request_id in enumerate(ids):
        engine.add(request_id, [7 + index % 100] * (length + index % 16), params)
    for _ in range(100 + num_rows // 16):
        engine.step()
    try:
        yield [request.num_tokens for request in engine.scheduler.running]
    finally:
        engine.abort(ids)
        engine.run_until_idle()


def _time_decode(llm: LLM, num_rows: int) -> dict[str, Any]:
    """Microseconds of the steps that `_profile_decode` watches, and the host's in these and more: means.

    Beside the latter a fixed loop of Python is timed: a virtual processor's speed doubles and halves within seconds.
    """
    engine, loop_ns = llm.engine, 0
    with _decoding(llm, num_rows):
        before, started = engine.times.copy(), time.perf_counter()
        for _ in range(_PROFILED_STEPS):
            engine.step()
        wall = (time.perf_counter() - started) / _PROFILED_STEPS * 1e6
        num_more = _TIMED_STEPS - _PROFILED_STEPS
        for _ in range(num_more):
            engine.step()
            loop_ns += _fixed_loop()
        host = engine.times.since(before).per_step()
        return {"rows": num_rows, "wall_us": wall, "host_us": host, "loop_us": loop_ns / num_more / 1e3}


def _fixed_loop() -> int:
    """The nanoseconds that 400 turns of a loop take."""
    started, total = time.perf_counter_ns(), 0
    for turn in range(400):
        total += turn
    return time.perf_counter_ns() - started


def _profile_decode(run: Run, llm: LLM, timed: dict[str, Any], copy: float, product: float) -> dict[str, Any]:
    """Kernels of a decode step of requests of about 500 tokens, as many as `_time_decode` had."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    engine, host = llm.engine, timed["host_us"]
    with _decoding(llm, timed["rows"]) as lengths:
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            for _ in range(_PROFILED_STEPS):
                engine.step()
            torch.cuda.synchronize()
    parts = ", ".join(f"{part} {value:.0f}" for part, value in host.items())
    own = host["schedule"] + host["issue"] + host["update"]
    print(
        f"decode of {timed['rows']} rows: {timed['wall_us']:.0f} us a step; host us: {parts}; {own:.0f} its own, where "
        f"a fixed loop takes {timed['loop_us']:.1f}"
    )
    load = gpu_profile.decode_load([n + _PROFILED_STEPS // 2 for n in lengths])
    work = gpu_profile.least_work(run.facts, load, _kv_bytes(llm))
    return timed | _families(profiler, _PROFILED_STEPS, work, copy, product)


def _profile_prefill(run: Run, llm: LLM, copy: float, product: float) -> dict[str, Any]:
    """Kernels per 8,192 prompt tokens, in prompts of 4,000."""
    from torch.profiler import ProfilerActivity, profile

    prompts = workload("prefill", run.facts["vocab_size"])
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        seconds = _generate(llm, prompts)
    lengths = [len(prompt) for prompt in prompts.prompts]
    steps = sum(lengths) / 8192
    print(f"prefill: {seconds / steps * 1e6:.0f} us per 8,192 tokens")
    work = gpu_profile.least_work(run.facts, gpu_profile.prefill_load(lengths), _kv_bytes(llm))
    each = {name: (num_bytes / steps, operations / steps) for name, (num_bytes, operations) in work.items()}
    return {"wall_us": seconds / steps * 1e6} | _families(profiler, steps, each, copy, product)


def _families(
    profiler: Any, steps: float, work: dict[str, tuple[float, float]], copy: float, product: float
) -> dict[str, Any]:
    rows = gpu_profile.kernels(gpu_profile.launches(profiler), steps)
    families = gpu_profile.family_rows(rows, work, copy, product)
    print(gpu_profile.table(rows, families), flush=True)
    return {"kernels": rows[:16], "families": families}
