"""`octavo bench reproducibility`: one set of requests under every circumstance that must change no bit.

Owns the engines in which circumstances are met (axes) and the comparison: tokens, the bits of their log-probabilities,
and a 64-bit fold of the logits that chose each of them. The reference is all requests at once. Does not judge a model,
and measures no speed. Invariant: the requests and what is drawn at random follow from --seed; the last line of output
is one JSON document; the exit code is 0 only if nothing differs, every axis met what it is for, and the control
differs.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from octavo.bench.circumstances import (
    HOST_BYTES,
    MAX_LEN,
    NUM_OUTPUT,
    Answer,
    Circumstance,
    Job,
    NotMetError,
    Run,
    all_at_once,
    as_siblings,
    at_borders,
    behind_another,
    beside_others,
    bytes_left,
    crowded,
    from_elsewhere,
    from_elsewhere_alone,
    in_another_order,
    in_groups,
    make_jobs,
    one_by_one,
    twice,
    whatever,
    with_drafts,
    with_other_logprobs,
    with_right_drafts,
)
from octavo.bench.engine import dummy_model
from octavo.bench.shapes import SHAPES
from octavo.bench.speculation import Drafts
from octavo.cli.flags import Parser, UsageError
from octavo.config.engine_config import DEFAULT_BLOCK_SIZE, SETTINGS
from octavo.config.quoted import quoted
from octavo.config.settings import ConfigError, did_you_mean
from octavo.llm import LLM

NUM_TOKENS = 20_000  # of each axis
_TOKENS_HELP = (
    f"output tokens compared per axis, at least (default: {NUM_TOKENS}, which take a CPU minutes; 500 show what runs)"
)
_TIMES_HELP = "of the axis `A, B, A`, at least (default: each request)"
_MOST_TOKENS, _MOST_TIMES = 10_000_000, 1_000_000  # all requests are made at once
_TOLD_SECONDS = 5.0  # between lines about what runs
NUM_CONTROL = 64  # requests that suffice to show a difference
_HOST_REQUESTS = 4  # of MAX_LEN tokens, that host memory holds at least
MAX_ROWS = 512  # requests that run at once, unless an axis says otherwise
# around the sizes of blocks, tiles and leaves, where kernels have their edges
_STATE_BLOCK_SIZES = (16, 32, 64, 128)
_BLOCK_SIZES = (16, 48, 64, 528)  # a tile's keys, fewer, and sizes whose borders seldom are a tile's
_HOST = {"kv_connector": "host", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
_DRAFTS = {"method": "ngram", "num_speculative_tokens": 4, "adaptive_depth": False}
_ORACLE = Drafts(num_drafts=4, probability=0.8, config={}, adapts=False)
_CACHE_DTYPE = SETTINGS["kv_cache_dtype"]
_CHUNK_SIZES = (7, 64, 100, 512)  # of a step, where layers keep states: of no block's size, and of a state's


@dataclasses.dataclass(slots=True)
class Difference:
    """What a run and the reference have in common, and not. A run that says other tokens is compared no further."""

    tokens: int = 0
    different_tokens: int = 0
    different_logprobs: int = 0
    different_folds: int = 0

    def add(self, expected: Answer, found: Answer) -> None:
        """Compare two answers to one request."""
        for place, token in enumerate(expected.tokens):
            self.tokens += 1
            if found.logprobs:
                pair = np.array([expected.logprobs[place], found.logprobs[place]], np.float32).view(np.uint32)
                self.different_logprobs += bool(pair[0] != pair[1])
            self.different_folds += expected.folds[place] != found.folds[place]
            if token != found.tokens[place]:
                self.different_tokens += 1
                return

    @property
    def any(self) -> bool:
        """Whether anything differs."""
        return bool(self.different_tokens or self.different_logprobs or self.different_folds)


@dataclasses.dataclass(frozen=True, slots=True)
class Axis:
    """A circumstance, and the engine's settings for it beside the common ones."""

    name: str
    circumstance: Circumstance
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)


def make_axes(
    device: str,
    jobs: Sequence[Job],
    rng: random.Random,
    *,
    state_blocks: int = 0,
    host_bytes: int = HOST_BYTES,
    times: float = 1.0,
    answers: Path = Path(),
    num_disturbed: int = 0,
) -> list[Axis]:
    """All axes of a device but the restart. Axes that share an engine are neighbours.

    host_bytes: of host memory from which prompts are loaded.
    times: what a request takes of the cache where layers are of several kinds, as a multiple of what it takes else.
    num_disturbed: how often at least a request is asked again behind a disturbing one (default: once each).
    answers: a file of prompts with their outputs, by which drafts are right that random weights would never accept.
    state_blocks: that a request of MAX_LEN tokens takes where layers keep states, so that the size of blocks is a power
    of two; 0: none does.
    """
    keeps_states, caching = state_blocks > 0, {"enable_prefix_caching": True}
    longest = int(times * (MAX_LEN // 16)) + 60  # blocks of the longest request, and a few
    needed = int(times * sum(-(-(len(job.prompt) + NUM_OUTPUT) // 16) for job in jobs))
    # as few as give preemptions, and not so few that hardly anybody runs
    if keeps_states:  # which take blocks, as does what tokens bring to them
        longest, needed = state_blocks + 20, needed * state_blocks * 16 // MAX_LEN // 2
    size = {} if keeps_states else {"block_size": 16}  # `state_blocks` are of the device's own size
    tight, tighter = ({"num_gpu_blocks_override": max(longest, needed // part), **size} for part in (4, 14))
    host = _HOST | {"kv_connector_extra_config": {"cpu_bytes_to_use": host_bytes}}
    from_host = functools.partial(from_elsewhere, num_bytes=host_bytes)
    odd = Axis("odd kernel block", all_at_once, {"block_size": 144, "attention_config": {"kernel_block_size": 48}})
    axes = [
        Axis("batch size", in_groups),
        Axis("order", in_another_order),
        Axis("neighbours", beside_others),
        Axis("mixed steps", one_by_one),
        Axis("siblings", as_siblings),
        Axis("logprobs", with_other_logprobs),
        Axis("chunk size", all_at_once, {"max_num_batched_tokens": rng.randint(64, 256), "max_num_seqs": 32}),
        Axis("prefix hit", twice, caching),
        *(_of_kept_states(caching, num_disturbed) if keeps_states else []),
        Axis("host memory", from_host, {"kv_transfer_config": host}),
        Axis("host memory, alone", from_elsewhere_alone, {"kv_transfer_config": host}),
        Axis("preemption", crowded, tight),
        Axis("speculation", with_drafts, {"speculative_config": _DRAFTS}),
        Axis("oracle's drafts", with_right_drafts, {"speculative_config": _ORACLE.settings(answers)}),
        *(
            Axis(f"blocks of {size}", all_at_once, {"block_size": size})
            for size in (_STATE_BLOCK_SIZES if keeps_states else _BLOCK_SIZES)
            if size != DEFAULT_BLOCK_SIZE[device]  # the reference's
        ),
        Axis("kernel block", all_at_once, {"block_size": 64, "attention_config": {"kernel_block_size": 16}}),
        *([] if keeps_states else [odd]),
        *(_of_cut_chunks() if keeps_states else []),
        Axis("step in flight", all_at_once, {"async_scheduling": device == "cpu"}),
    ]
    if device == "cuda":
        axes.append(Axis("graph or eager", all_at_once, {"enforce_eager": True}))
    everything = tighter | {**caching, "max_num_batched_tokens": rng.randint(128, 384)}
    return [*axes, Axis("everything", whatever, everything | {"max_num_seqs": 64})]


def _of_kept_states(caching: dict[str, Any], num_disturbed: int) -> list[Axis]:
    """Where layers keep states: hits at every border, and what others leave."""
    return [
        Axis("border hit", at_borders, caching),
        Axis("A, B, A", functools.partial(behind_another, times=num_disturbed), caching),
        Axis("last states", twice, {**caching, "snapshot_interval": 0}),
    ]


def _of_cut_chunks() -> list[Axis]:
    """Where layers keep states: steps that cut their chunks anywhere."""
    return [
        Axis(f"chunks of {size}", all_at_once, {"max_num_batched_tokens": size, "max_num_seqs": min(size, 32)})
        for size in _CHUNK_SIZES
    ]


class Narrator:
    """Tells on stderr what runs, as it begins, and every few seconds how far it is."""

    def __init__(self, started: float, clock: Callable[[], float] = time.perf_counter) -> None:
        """started: the clock's time that is called 0."""
        self._started, self._clock, self._what, self._told = started, clock, "", 0.0

    def begin(self, what: str) -> None:
        """Something else runs from now on."""
        self._what = what
        self._say("begins")

    def tell(self, num_done: int, num_all: int) -> None:
        """So many requests of it are answered."""
        if self._clock() - self._told >= _TOLD_SECONDS:
            self._say(f"{num_done} of {num_all} requests")

    def _say(self, text: str) -> None:
        self._told = self._clock()
        print(f"{self._told - self._started:6.1f} s {self._what:>15}: {text}", file=sys.stderr, flush=True)


class Bench:
    """The reference, and every axis beside it."""

    def __init__(
        self,
        shape: str | None,
        settings: dict[str, Any],
        num_tokens: int,
        seed: int,
        times: int = 0,
        started: float | None = None,
    ) -> None:
        """`shape`: random weights of that shape; None: the model that `settings` name, or the bundled one.

        times: how often a request is asked again behind a disturbing one, where layers keep states (0: once each).
        started: of time.perf_counter, from which stderr's lines count (default: now).
        """
        self._narrator = Narrator(time.perf_counter() if started is None else started)
        self._shape, self._seed, self._num_tokens = shape, seed, num_tokens
        self._settings = {
            "max_model_len": MAX_LEN,
            "enable_prefix_caching": False,
            "max_num_seqs": MAX_ROWS,
            "skip_tokenizer_init": True,  # requests and answers are token ids: a folder of weights is enough
            **settings,
        }
        self._jobs: list[Job] = []
        self.device = ""
        self._sizes: dict[str, Any] = {"num_disturbed": times}  # of axes, as `make_axes` takes them

    @contextlib.contextmanager
    def run(self, **settings: Any) -> Iterator[Run]:
        """An engine with `settings` beside the common ones."""
        fields = self._settings | settings
        try:
            context = LLM(**fields) if self._shape is None else dummy_model(self._shape, **fields)
        except ConfigError as error:
            if error.field != "max_model_len":
                raise
            raise UsageError(f"--model: requests of this benchmark have {MAX_LEN} tokens; {error.limit}") from None
        with context as llm:
            self.device = llm.engine.resolved.device
            if not self._jobs:  # of the reference: others have blocks of other sizes
                self._measure(llm)
            self._jobs = self._jobs or make_jobs(self._num_tokens, llm.engine.limits.vocab_size, self._seed)
            yield Run(llm, random.Random(self._seed), self._narrator.tell)

    def _measure(self, llm: LLM) -> None:
        """What the longest request takes of the cache."""
        plan = llm.engine.memory
        self._sizes["host_bytes"] = max(HOST_BYTES, _HOST_REQUESTS * bytes_left(plan, MAX_LEN))
        if any(kind.mixer not in ("attention", "none") for kind in llm.engine.arch.layers):
            self._sizes["state_blocks"] = plan.blocks_per_request
        elif len(plan.groups) > 1:
            self._sizes["times"] = max(1.0, plan.blocks_per_request * plan.block_size / MAX_LEN)

    def reference(self, chosen: Sequence[str] = ()) -> list[Answer]:
        """All requests at once. Raises UsageError for a chosen axis that the model does not have, before they run."""
        self._narrator.begin("reference")
        with self.run() as run:
            self._check_axes(chosen)
            return run.answers(self._jobs)

    def _check_axes(self, chosen: Sequence[str]) -> None:
        """Of the model that is loaded, on its device."""
        own = ["restart", *(axis.name for axis in make_axes(self.device, self._jobs, random.Random(), **self._sizes))]
        for name in chosen:
            if name not in own:
                kind = "with states" if "state_blocks" in self._sizes else "without states"
                limit = f"a model {kind} has no such axis on {self.device}; it has {'; '.join(own)}"
                raise UsageError(f"--axis {quoted(name)}: {limit}")

    def results(self, restarted: list[Answer], chosen: Sequence[str]) -> Iterator[tuple[str, Difference, str]]:
        """Per axis its name, what differs, and a remark. `restarted`: what another process was given.

        Raises UsageError for a chosen axis that the model does not have, before anything else runs.
        """
        with contextlib.ExitStack() as folders, contextlib.ExitStack() as stack:
            self._narrator.begin("reference")
            run = stack.enter_context(self.run())
            self._check_axes(chosen)
            expected = run.answers(self._jobs)
            if restarted:
                yield "restart", _compare(expected, restarted), "another process"
            settings: dict[str, Any] = {}
            rng = random.Random(self._seed)
            answers = Path(folders.enter_context(tempfile.TemporaryDirectory(prefix="octavo-bench-")), "answers")
            whole = [job.prompt + answer.tokens for job, answer in zip(self._jobs, expected, strict=True)]
            answers.write_text(json.dumps(whole))
            for axis in make_axes(self.device, self._jobs, rng, answers=answers, **self._sizes):
                if chosen and axis.name not in chosen:
                    continue
                self._narrator.begin(axis.name)
                if axis.settings != settings:
                    stack.close()
                    settings = axis.settings
                    run = stack.enter_context(self.run(**settings))
                try:
                    found, remark = axis.circumstance(run, self._jobs, random.Random(self._seed))
                except NotMetError as error:
                    yield axis.name, Difference(), f"NOT MET: {error}"
                    continue
                yield axis.name, _compare(expected, found), remark

    def control(self) -> tuple[Difference, str]:
        """What must differ: the fast mode over batch sizes, on a CPU the library's product over row counts.

        The library may have one kernel for all row counts where a model is small; in float32 it has several.
        """
        if self.device == "cpu":
            return _library_products(self._seed)
        self._narrator.begin("control")
        difference = self._batch_sizes(numerics="fast")
        if difference.any:
            return difference, "numerics=fast"
        difference = self._batch_sizes(numerics="fast", dtype="float32", attention_backend=None)
        return difference, "numerics=fast, and in float32: in the type above nothing differs"

    def _batch_sizes(self, **settings: Any) -> Difference:
        """Between the first requests at once and in groups, in an engine of these settings."""
        with self.run(**settings) as run:
            jobs = self._jobs[:NUM_CONTROL]
            return _compare(run.answers(jobs), in_groups(run, jobs, random.Random(self._seed))[0])


def _compare(expected: Sequence[Answer], found: Sequence[Answer]) -> Difference:
    """Of all answers, which may be several rounds."""
    assert found and len(found) % len(expected) == 0, "a circumstance answers each request as often as the others"
    difference = Difference()
    for index, answer in enumerate(found):
        difference.add(expected[index % len(expected)], answer)
    return difference


def _library_products(seed: int) -> tuple[Difference, str]:
    """Rows of a float32 product whose bits depend on how many rows there are."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(768, 256, generator=generator)
    x = torch.randn(64, 256, generator=generator) * torch.exp2(torch.randn(64, 256, generator=generator) * 4)
    whole = x @ weight.T
    different = sum(not torch.equal(x[:count] @ weight.T, whole[:count]) for count in range(1, 64))
    return Difference(tokens=63, different_folds=different), "the library's float32 product, by number of rows"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the axes and print a line for each, then one JSON line."""
    parser = Parser(prog="octavo bench reproducibility", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", help="a model's folder or name (default: the bundled one)")
    parser.add_argument("--model-packages", help="as `octavo serve` has it, for a model of your own package")
    parser.add_argument("--shape", choices=sorted(SHAPES), help="random weights of a shape instead of a model")
    parser.add_argument("--device", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--quantization", choices=["int8"])
    parser.add_argument("--attention-backend")
    parser.add_argument("--kv-cache-dtype", choices=[*_CACHE_DTYPE.choices, *_CACHE_DTYPE.aliases])
    parser.add_argument("--kv-cache-memory-bytes", help="as `octavo serve` has it, for several of these on one GPU")
    parser.add_argument("--tokens", type=_whole(_MOST_TOKENS), default=NUM_TOKENS, metavar="N", help=_TOKENS_HELP)
    parser.add_argument("--times", type=_whole(_MOST_TIMES), default=0, metavar="N", help=_TIMES_HELP)
    parser.add_argument("--seed", type=int, default=0, help="draws the requests and the circumstances")
    parser.add_argument("--axis", action="append", default=[], help="only this one; may be repeated")
    parser.add_argument("--write", metavar="PATH", help="write the answers of the reference, and do no more")
    given, started = list(sys.argv[1:] if argv is None else argv), time.perf_counter()
    options = vars(parser.parse_args(given))
    _check_axes(parser, options["axis"])
    names = (
        "model",
        "model_packages",
        "device",
        "dtype",
        "quantization",
        "attention_backend",
        "kv_cache_dtype",
        "kv_cache_memory_bytes",
    )
    settings = {name: options[name] for name in names if options[name] is not None}
    bench = Bench(options["shape"], settings, options["tokens"], options["seed"], options["times"], started)
    if options["write"]:
        Path(options["write"]).write_bytes(msgspec.msgpack.encode(bench.reference(options["axis"])))
        return 0
    chosen = options["axis"]
    restarted = _in_another_process(given) if not chosen or "restart" in chosen else []
    rows: dict[str, dict[str, Any]] = {}
    good = True
    for name, difference, remark in bench.results(restarted, chosen):
        rows[name] = _print(name, difference, remark, started)
        good &= not difference.any and bool(difference.tokens)
    good &= bool(rows)
    control, remark = bench.control()
    remark += ": must differ" + ("" if control.any else ", and does not")
    rows["control"] = _print("control", control, remark, started)
    document = {"shape": options["shape"], **settings, "device": bench.device, "seed": options["seed"], "axes": rows}
    print(json.dumps(document | {"good": good and control.any}))
    return 0 if good and control.any else 1


def _whole(most: int) -> Callable[[str], int]:
    """A flag's reader, which raises ArgumentTypeError."""

    def read(text: str) -> int:
        if not re.fullmatch(r"[0-9]{1,9}", text) or not 1 <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{quoted(text)}: a whole number from 1 to {most} is needed")
        return int(text)

    return read


def _check_axes(parser: Parser, chosen: Sequence[str]) -> None:
    known = ["restart"]
    for device, state_blocks in (("cpu", 0), ("cuda", 0), ("cpu", 1)):
        known += [axis.name for axis in make_axes(device, (), random.Random(), state_blocks=state_blocks)]
    for name in chosen:
        if name not in known:
            hint = did_you_mean(name, known) or f"known are {', '.join(dict.fromkeys(known))}"
            parser.error(f"--axis {name}: no such axis; {hint}")


def _in_another_process(argv: Sequence[str]) -> list[Answer]:
    with tempfile.TemporaryDirectory(prefix="octavo-bench-") as folder:
        path = Path(folder, "answers")
        command = [sys.executable, "-m", "octavo", "bench", "reproducibility", *argv, "--write", str(path)]
        if code := subprocess.run(command).returncode:
            raise UsageError(f"--axis restart: the engine of another process ended with exit code {code}, see above")
        return msgspec.msgpack.decode(path.read_bytes(), type=list[Answer])


def _print(name: str, difference: Difference, remark: str, started: float) -> dict[str, Any]:
    row = dataclasses.asdict(difference)
    print(
        f"{time.perf_counter() - started:6.1f} s {name:>15}: {difference.tokens:>7} compared, "
        f"different: {difference.different_folds} logits, {difference.different_logprobs} log-probabilities, "
        f"{difference.different_tokens} tokens" + (f"  ({remark})" if remark else ""),
        flush=True,
    )
    return row | {"remark": remark}
