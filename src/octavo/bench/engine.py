"""Engine benchmarks: named workloads on named shapes, each figure beside its physical limit.

Owns the workloads, on dummy weights (good for speed, never for correctness). Measures the machine's limits
in the same run. Does not judge. Invariant: the last line of output is one JSON document with everything above it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from octavo.bench import gpu_engine, speculation
from octavo.bench.shapes import SHAPES, layers_of
from octavo.cli.flags import Parser
from octavo.config.engine_config import SETTINGS
from octavo.config.quoted import quoted
from octavo.config.speculative import MAX_DRAFTS
from octavo.llm import LLM
from octavo.request.sampling_params import SamplingParams
from octavo.startup import probe

_NUM_DRAFTS = 4
_CACHE_DTYPE = SETTINGS["kv_cache_dtype"]


@contextlib.contextmanager
def dummy_model(shape: str, **fields: Any) -> Iterator[LLM]:
    """An engine on random weights of a named shape."""
    with tempfile.TemporaryDirectory(prefix="octavo-bench-") as folder:
        Path(folder, "config.json").write_text(json.dumps(SHAPES[shape]))
        with LLM(folder, load_format="dummy", **fields) as llm:
            yield llm


def _prompts(count: int, low: int, high: int, vocab: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(vocab) for _ in range(rng.randint(low, high))] for _ in range(count)]


def _fixed(num_output: int, **fields: Any) -> SamplingParams:
    return SamplingParams(max_tokens=num_output, ignore_eos=True, detokenize=False, temperature=0.0, **fields)


def throughput(shape: str, fields: dict[str, Any]) -> dict[str, float]:
    """32 prompts of 64 to 256 tokens, 64 out, all at once."""
    prompts = _prompts(32, 64, 256, SHAPES[shape]["vocab_size"], 1)
    with dummy_model(shape, enable_prefix_caching=False, **fields) as llm:
        llm.generate(prompts[:2], _fixed(2), use_tqdm=False)
        before, started = llm.engine.times.copy(), time.perf_counter()
        llm.generate(prompts, _fixed(64), use_tqdm=False)
        seconds = time.perf_counter() - started
        host = llm.engine.times.since(before).per_step()
    num_input = sum(map(len, prompts))
    return {
        "output_tok_s": 32 * 64 / seconds,
        "all_tok_s": (num_input + 32 * 64) / seconds,
        "seconds": seconds,
        "gflop_s": _flops(shape, num_input + 32 * 64, 32 * 64) / seconds / 1e9,
        **_host(host),
    }


def latency(shape: str, fields: dict[str, Any]) -> dict[str, float]:
    """One prompt of 128, 64 out: time to the first token, then the rate of the rest; medians of three."""
    first_times, rates = [], []
    with dummy_model(shape, enable_prefix_caching=False, **fields) as llm:
        prompts = _prompts(4, 128, 128, SHAPES[shape]["vocab_size"], 2)
        llm.generate(prompts[:1], _fixed(4), use_tqdm=False)
        before = llm.engine.times.copy()
        for prompt in prompts[1:]:
            started = time.perf_counter()
            stream = llm.stream(prompt, _fixed(64))
            next(stream)
            first = time.perf_counter()
            for _ in stream:
                pass
            first_times.append(first - started)
            rates.append(63 / (time.perf_counter() - first))
        host = llm.engine.times.since(before).per_step()
        step_bytes = llm.engine.memory.weight_bytes
    rate = statistics.median(rates)
    return {
        "first_token_s": statistics.median(first_times),
        "decode_tok_s": rate,
        "weight_gb_s": rate * step_bytes / 1e9,
        **_host(host),
    }


def prefix(shape: str, fields: dict[str, Any]) -> dict[str, float]:
    """16 prompts that share 512 of 544 tokens, 16 out: with an empty prefix cache at first, and without one."""
    shared = _prompts(1, 512, 512, SHAPES[shape]["vocab_size"], 3)[0]
    prompts = [shared + tail for tail in _prompts(16, 32, 32, SHAPES[shape]["vocab_size"], 4)]
    seconds = {}
    for name, caching in (("cold_with_cache_s", True), ("without_cache_s", False)):
        with dummy_model(shape, enable_prefix_caching=caching, **fields) as llm:
            llm.generate(_prompts(1, 16, 16, 1000, 5), _fixed(2), use_tqdm=False)
            started = time.perf_counter()
            llm.generate(prompts, _fixed(16), use_tqdm=False)
            seconds[name] = time.perf_counter() - started
    return seconds


def start(shape: str, fields: dict[str, Any]) -> dict[str, float]:
    """Process start to the first byte of text from the bundled model, a new process each time; median of five."""
    del shape, fields  # the bundled model as a user meets it
    command = [sys.executable, "-m", "octavo", "generate", "def fib(n):", "--max-tokens", "8", "--temperature", "0"]
    times = []
    for _ in range(5):
        started = time.perf_counter()
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
            assert process.stdout is not None, "the pipe was asked for"
            process.stdout.read(1)
            times.append(time.perf_counter() - started)
            process.stdout.read()
    return {"first_byte_s": statistics.median(times)}


WORKLOADS = {"throughput": throughput, "latency": latency, "prefix": prefix, "start": start}


def _flops(shape: str, num_tokens: int, num_logits: int) -> float:
    """Operations of the matrix products: 2 per weight and token, the output projection where tokens are sampled."""
    facts = SHAPES[shape]
    weights = sum(layer.active for layer in layers_of(facts))
    return 2.0 * (num_tokens * weights + num_logits * facts["hidden_size"] * facts["vocab_size"])


def _host(per_step: dict[str, float]) -> dict[str, float]:
    """Microseconds of host work per step outside the worker."""
    return {f"host_{name}_us": value for name, value in per_step.items() if name not in ("issue", "wait")}


def machine_limits() -> dict[str, float]:
    """What this machine can do at most, now, with the engine's threads: GB/s of streaming reads, GFLOP/s.

    GFLOP/s are of float32, and of bfloat16 in pairs where the processor multiplies those.
    """
    from octavo.ops import native
    from octavo.ops.native.limits import measure_limits, measure_pairs

    if not native.available():
        return {}
    read, fma = measure_limits()
    pairs = {"pairs_gflop_s": measure_pairs()} if native.isa() == native.MULTIPLIES_PAIRS else {}
    return {"read_gb_s": read, "fma_gflop_s": fma, **pairs}


def _limit(name: str, row: dict[str, float], limits: dict[str, float], *, in_pairs: bool) -> str:
    """The row's distance to the limit, in words; empty where none applies."""
    products = limits.get("pairs_gflop_s" if in_pairs else "fma_gflop_s") or limits.get("fma_gflop_s")
    if name == "throughput" and products:
        return f"{row['gflop_s'] / products:.0%} of {products:.0f} GFLOP/s"
    if name == "latency" and "read_gb_s" in limits:
        return f"{row['weight_gb_s'] / limits['read_gb_s']:.0%} of {limits['read_gb_s']:.1f} GB/s"
    return ""


def _counts(text: str) -> list[int]:
    """Numbers of rows, with commas, each once. Raises ArgumentTypeError."""
    parts, most = text.split(","), gpu_engine.MAX_NUM_SEQS
    if not all(re.fullmatch(r"[0-9]{1,9}", part) and 0 < int(part) <= most for part in parts):
        raise argparse.ArgumentTypeError(f"{quoted(text)}: numbers from 1 to {most} are needed, with commas")
    counts = [int(part) for part in parts]
    twice = next((count for count in counts if counts.count(count) > 1), None)
    if twice is not None:
        raise argparse.ArgumentTypeError(f"{quoted(text)}: {twice} is there more than once")
    return counts


def _config(text: str) -> dict[str, Any]:
    """A speculative_config in JSON. Raises ArgumentTypeError."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or not found:
        example = '{"method": "ngram"}'
        raise argparse.ArgumentTypeError(f"{quoted(text)}: a JSON object of its keys is needed, as {example}")
    return found


def _add_drafts(parser: Parser) -> None:
    parser.add_argument("--oracle", type=float, metavar="P", help="drafts beside none: each the true token in P of all")
    parser.add_argument("--drafts", type=_config, metavar="JSON", help="a speculative_config beside none, or its cost")
    parser.add_argument("--num-drafts", type=int, metavar="N", help="of an oracle, or of --drafts (default: 4)")
    parser.add_argument("--rows", type=_counts, metavar="N,N", help="that the workload of this name sweeps")
    parser.add_argument("--fixed-depth", action="store_true", help="as many drafts in every row of every step")


def _drafts(parser: Parser, arguments: argparse.Namespace) -> speculation.Drafts | None:
    """What is to be compared with plain decoding; None: nothing."""
    if arguments.oracle is None and not arguments.drafts:
        if arguments.num_drafts is not None or arguments.fixed_depth:
            option = "--fixed-depth" if arguments.num_drafts is None else f"--num-drafts {arguments.num_drafts}"
            parser.error(f"{option}: nothing drafts; add --oracle P or --drafts JSON")
        return None
    if arguments.oracle is not None and not 0 <= arguments.oracle <= 1:
        parser.error(f"--oracle {arguments.oracle}: a probability is from 0 to 1")
    if arguments.num_drafts is not None and not 1 <= arguments.num_drafts <= MAX_DRAFTS:
        parser.error(f"--num-drafts {arguments.num_drafts}: a number from 1 to {MAX_DRAFTS} is needed")
    config = dict(arguments.drafts or {})
    said = config.get("num_speculative_tokens")
    count = next((number for number in (arguments.num_drafts, said) if number is not None), _NUM_DRAFTS)
    if said not in (None, count):
        parser.error(f"--num-drafts {count}: --drafts says num_speculative_tokens={said}; leave one of them out")
    if config:
        config["num_speculative_tokens"] = count
    return speculation.Drafts(count, arguments.oracle, config, not arguments.fixed_depth)


def _subject(parser: Parser, arguments: argparse.Namespace, fields: dict[str, Any]) -> gpu_engine.Run:
    """What is run: a model with its weights, or a shape with random ones. The first is compared with drafts alone."""
    if arguments.model is None:
        shape = arguments.shape or "tiny"
        return gpu_engine.Run(shape, SHAPES[shape], fields, dummy_model)
    if arguments.shape:
        parser.error(f"--model {arguments.model}: --shape {arguments.shape} names another one, leave one of them out")
    if arguments.oracle is None and not arguments.drafts:
        parser.error(f"--model {arguments.model}: it is compared with --drafts or --oracle; without them take --shape")
    from octavo.checkpoint.config_reader.checkpoint import read_arch
    from octavo.checkpoint.hub import find_model

    arch = read_arch(find_model(arguments.model))

    def engine(name: str, *, max_model_len: int, **settings: Any) -> LLM:
        return LLM(name, max_model_len=min(max_model_len, arch.max_position), **settings)

    return gpu_engine.Run(arguments.model, {"vocab_size": arch.vocab_size}, fields, engine)


def _groups(names: Sequence[str], vocab: int, counts: Sequence[int]) -> list[dict[str, gpu_engine.Workload]]:
    """Workloads that are compared with drafts and without: those of a sweep share engines."""
    return [
        gpu_engine.sweep(vocab, counts) if name == gpu_engine.SWEEP else {name: gpu_engine.workload(name, vocab)}
        for name in names
    ]


def _names(parser: Parser, workload: str, device: str, *, with_drafts: bool) -> list[str]:
    """The workloads that are asked for, of those that run there. `all` has no sweep."""
    on_device = gpu_engine.WORKLOADS if device == "cuda" else tuple(WORKLOADS)
    known = gpu_engine.DRAFTED if with_drafts else on_device
    if workload in ("all", "none"):
        return list(known) if workload == "all" else []
    if workload not in known and not (with_drafts and workload == gpu_engine.SWEEP):
        where = "with --oracle or --drafts" if with_drafts else f"on {device} without --oracle or --drafts"
        those = ", ".join((*known, gpu_engine.SWEEP) if with_drafts else known)
        parser.error(f"--workload {workload} does not run {where}: known are {those}")
    return [workload]


def main(argv: Sequence[str] | None = None) -> int:
    """Run workloads and print a table, then JSON lines; the last one holds everything."""
    parser = Parser(prog="octavo bench engine", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--shape", choices=sorted(SHAPES), help="of a model of random weights (default: tiny)")
    parser.add_argument("--model", help="with --drafts or --oracle: a model with its weights, as the engine's setting")
    # some run on either device
    workloads = dict.fromkeys((*WORKLOADS, *gpu_engine.WORKLOADS, *gpu_engine.DRAFTED, gpu_engine.SWEEP, "all", "none"))
    parser.add_argument("--workload", choices=list(workloads), default="all")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--quantization", choices=["int8"])
    parser.add_argument("--numerics", choices=["reproducible", "fast"], default="reproducible")
    parser.add_argument("--attention-backend", help="as the engine's setting of this name; without it, its own choice")
    parser.add_argument("--kv-cache-dtype", choices=[*_CACHE_DTYPE.choices, *_CACHE_DTYPE.aliases])
    parser.add_argument("--state-dtype", choices=["float32", "bfloat16"], help="as the engine's setting of this name")
    parser.add_argument("--async-scheduling", action="store_true")
    parser.add_argument("--profile", action="store_true", help="on a GPU: where a decode step's time goes")
    parser.add_argument(
        "--timeline", type=Path, help="on a GPU: a file for what a few decode steps do (tools/draw_timeline.py)"
    )
    _add_drafts(parser)
    arguments = parser.parse_args(argv)
    on_gpu = arguments.device != "cpu" and bool(probe.device_facts(arguments.device).cuda)
    fields: dict[str, Any] = {
        "device": "cuda" if on_gpu else "cpu",
        "dtype": arguments.dtype or ("bfloat16" if on_gpu else "float32"),
        "quantization": arguments.quantization,
        "numerics": arguments.numerics,
    }
    if arguments.attention_backend:
        fields["attention_config"] = {"backend": arguments.attention_backend}
    given = ("kv_cache_dtype", "state_dtype", "async_scheduling")
    fields |= {name: getattr(arguments, name) for name in given if getattr(arguments, name)}
    drafts = _drafts(parser, arguments)
    names = _names(parser, arguments.workload, fields["device"], with_drafts=drafts is not None)
    if arguments.rows and names != [gpu_engine.SWEEP]:
        parser.error(f"--rows is of --workload {gpu_engine.SWEEP} alone, and this is {arguments.workload}")
    run = _subject(parser, arguments, fields)
    document = {"model" if arguments.model else "shape": run.shape, **fields}
    if drafts:
        groups = _groups(names, run.facts["vocab_size"], arguments.rows or gpu_engine.ROWS)
        return speculation.run(run.engine, run.shape, groups, drafts, document, profile=arguments.profile and on_gpu)
    if on_gpu:
        return gpu_engine.report(run, names, document, profile=arguments.profile, timeline=arguments.timeline)
    limits = machine_limits()
    results = {}
    for name in names:
        row = WORKLOADS[name](run.shape, fields)
        results[name] = row
        in_pairs = fields["dtype"] == "bfloat16" and not arguments.quantization
        limit = _limit(name, row, limits, in_pairs=in_pairs)
        print(f"{run.shape} {fields['dtype']} {arguments.quantization or ''} {name}: {limit}")
        for key, value in row.items():
            print(f"  {key:24} {value:12.3f}")
    document["machine"] = platform.processor() or platform.machine()
    print(json.dumps(document | {"limits": limits, "results": results}))
    return 0
