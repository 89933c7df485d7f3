"""`octavo bench reproducibility`: one set of requests under every circumstance that must change no bit.

Owns the requests, the circumstances (axes) and the comparison: tokens, the bits of their log-probabilities, and a
64-bit fold of the logits that chose each of them. The reference is all requests at once. Does not judge a model, and
measures no speed. Invariant: the requests and what is drawn at random follow from --seed; the last line of output is
one JSON document; the exit code is 0 only if nothing differs, every axis met what it is for, and the control differs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from octavo.bench.engine import dummy_model
from octavo.bench.shapes import SHAPES
from octavo.cli.flags import Parser
from octavo.config.engine_config import DEFAULT_BLOCK_SIZE
from octavo.frontend.engine import Engine
from octavo.llm import LLM
from octavo.request.outputs import RequestOutput
from octavo.request.sampling_params import SamplingParams
from octavo.request.seeds import sample_seed

MAX_LEN = 640
NUM_OUTPUT = 64
NUM_SIBLINGS = 4
NUM_CONTROL = 64  # requests that suffice to show a difference
MAX_ROWS = 512  # requests that run at once, unless an axis says otherwise
# around the sizes of blocks, tiles and leaves, where kernels have their edges
_LENGTHS = (1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129, 200, 255, 256, 257, 400, 511, 512, 513)
_GROUPS = (1, 2, 3, 4, 5, 7, 8, 9, 13, 16, 17, 24, 31, 33, 48, 64, 65, 96, 127, 129, 160)
_BLOCK_SIZES = (16, 48, 64, 528)  # a tile's keys, fewer, and sizes whose borders seldom are a tile's
_HOST = {
    "kv_connector": "host",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"cpu_bytes_to_use": "1G"},
    "kv_load_failure_policy": "recompute",
}
_DRAFTS = {"method": "ngram", "num_speculative_tokens": 4, "adaptive_depth": False}
_ANY_GROUPS = 6  # batches of any of these sizes; the rest are of the larger half


class Answer(msgspec.Struct, frozen=True):
    """What one request was given."""

    tokens: list[int]
    logprobs: list[float]  # of each token; empty if nobody asked
    folds: list[int]  # of the logits that chose each token


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """One request. Those of a family differ in nothing but their seeds, which are those of one request's samples."""

    prompt: list[int]
    params: SamplingParams


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


def make_jobs(num_tokens: int, vocab_size: int, seed: int) -> list[Job]:
    """Requests for at least `num_tokens` output tokens, family by family, of every kind of sampling."""
    rng = random.Random(seed)
    kinds: list[dict[str, Any]] = [
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 0.0},
        {"temperature": 1.2, "top_k": 40},
        {"temperature": 0.9, "min_p": 0.02, "frequency_penalty": 0.3, "repetition_penalty": 1.1},
    ]
    shared = [rng.randrange(vocab_size) for _ in range(MAX_LEN)]
    jobs = []
    for family in range(-(-num_tokens // (NUM_OUTPUT * NUM_SIBLINGS))):
        length = rng.choice(_LENGTHS) if family else 129  # at least one fills blocks
        num_shared = rng.randrange(length) if family % 3 == 0 else 0
        prompt = shared[:num_shared] + [rng.randrange(vocab_size) for _ in range(length - num_shared)]
        for sibling in range(NUM_SIBLINGS):
            params = SamplingParams(
                max_tokens=NUM_OUTPUT,
                ignore_eos=True,
                detokenize=False,
                logprobs=0,
                seed=sample_seed(family, sibling),
                **kinds[family % len(kinds)],
            )
            jobs.append(Job(prompt, params))
    return jobs


class Run:
    """One engine that answers jobs under circumstances."""

    def __init__(self, llm: LLM, rng: random.Random) -> None:
        """The engine's logits are observed from now on."""
        self.engine: Engine = llm.engine
        self._rng = rng
        self.engine.core.ask_workers("digest_logits", type(None))
        self._num_noise = 0

    def answers(
        self, jobs: Sequence[Job], *, arrivals: Sequence[int] = (), num_noise: int = 0, siblings: bool = False
    ) -> list[Answer]:
        """Answer `jobs` together, in their order.

        arrivals: the step at which each comes (default: all at once). num_noise: other requests beside them, some of
        which are aborted. siblings: each family is one request.
        """
        engine, steps = self.engine, list(arrivals) or [0] * len(jobs)
        count = NUM_SIBLINGS if siblings else 1
        due = sorted(range(0, len(jobs), count), key=lambda index: steps[index])
        finished: dict[str, RequestOutput] = {}
        step = 0
        self._take_digests()
        while due or engine.has_unfinished:
            while due and steps[due[0]] <= step:
                job = jobs[due[0]]
                engine.add(str(due.pop(0)), job.prompt, msgspec.structs.replace(job.params, n=count))
            if num_noise and step % 3 == 0:
                num_noise -= 1
                self._disturb()
            finished |= {output.request_id: output for output in engine.step() if output.finished}
            step += 1
        folds = self._take_digests()
        return [self._answer(jobs, index, count, finished, folds) for index in range(len(jobs))]

    def _take_digests(self) -> dict[str, dict[int, int]]:
        """Of the logits since the last call: sequence id -> position -> digest."""
        return self.engine.core.ask_workers("take_digests", dict[str, dict[int, int]])[0]

    def _answer(
        self,
        jobs: Sequence[Job],
        index: int,
        count: int,
        finished: dict[str, RequestOutput],
        folds: dict[str, dict[int, int]],
    ) -> Answer:
        request_id, sibling = str(index - index % count), index % count
        completion = finished[request_id].outputs[sibling]
        own = folds[request_id if count == 1 else f"{sibling}_{request_id}"]
        tokens, start = list(completion.token_ids), len(jobs[index].prompt)
        logprobs = completion.logprobs or []
        return Answer(
            tokens,
            [entry[token].logprob for entry, token in zip(logprobs, tokens, strict=bool(logprobs))],
            [own[start + place] for place in range(len(tokens))],
        )

    def _disturb(self) -> None:
        """Add a request that nobody asked for, or abort the one before it."""
        self._num_noise += 1
        if self._num_noise % 3 == 0:
            self.engine.abort([f"noise{self._num_noise - 1}"])
            return
        rng, vocab = self._rng, self.engine.limits.vocab_size
        params = SamplingParams(
            max_tokens=rng.randint(1, 40),
            detokenize=False,
            temperature=rng.choice([0.0, 1.0]),
            seed=rng.randrange(99),
            presence_penalty=rng.choice([0.0, 0.5]),
            logit_bias={rng.randrange(vocab): 5.0},
            top_k=rng.choice([0, 7]),
            logprobs=rng.choice([None, 3]),
            prompt_logprobs=rng.choice([None, None, 2]),
        )
        prompt = [rng.randrange(vocab) for _ in range(rng.choice(_LENGTHS))]
        self.engine.add(f"noise{self._num_noise}", prompt, params)


Circumstance = Callable[[Run, Sequence[Job], random.Random], "tuple[list[Answer], str]"]


def in_groups(run: Run, jobs: Sequence[Job], rng: random.Random) -> tuple[list[Answer], str]:
    """Batches of 1, 2 and random sizes, one after the other; once there were several, of large ones."""
    found: list[Answer] = []
    sizes = [1, 2]
    while sum(sizes) < len(jobs):
        some = _GROUPS if len(sizes) < _ANY_GROUPS else _GROUPS[len(_GROUPS) // 2 :]
        sizes.append(min(rng.choice(some), len(jobs) - sum(sizes)))
    for size in sizes:
        found += run.answers(jobs[len(found) : len(found) + size])
    return found, f"groups of {min(sizes)} to {max(sizes)}"


def in_another_order(run: Run, jobs: Sequence[Job], rng: random.Random) -> tuple[list[Answer], str]:
    """All at once, shuffled."""
    order = list(range(len(jobs)))
    rng.shuffle(order)
    found = dict(zip(order, run.answers([jobs[index] for index in order]), strict=True))
    return [found[index] for index in range(len(jobs))], ""


def beside_others(run: Run, jobs: Sequence[Job], rng: random.Random) -> tuple[list[Answer], str]:
    """With requests of other kinds, some aborted."""
    return run.answers(jobs, num_noise=len(jobs)), f"{len(jobs)} neighbours or aborts"


def one_by_one(run: Run, jobs: Sequence[Job], rng: random.Random) -> tuple[list[Answer], str]:
    """Arriving over time: prompts are computed beside decodes."""
    return run.answers(jobs, arrivals=[rng.randrange(3 * NUM_OUTPUT) for _ in jobs]), ""


def as_siblings(run: Run, jobs: Sequence[Job], rng: random.Random) -> tuple[list[Answer], str]:
    """Each family as one request."""
    return run.answers(jobs, siblings=True), f"n={NUM_SIBLINGS}"


def with_other_logprobs(run: Run, jobs: Sequence[Job], rng: random.Random) -> tuple[list[Answer], str]:
    """Without log-probabilities, with more of them, and with those of the prompt."""
    wishes: list[dict[str, Any]] = [{"logprobs": None}, {"logprobs": 5}, {"logprobs": 0, "prompt_logprobs": 1}]
    changed = [Job(job.prompt, msgspec.structs.replace(job.params, **rng.choice(wishes))) for job in jobs]
    return run.answers(changed), ""


def all_at_once(run: Run, jobs: Sequence[Job], rng: random.Random) -> tuple[list[Answer], str]:
    """As the reference, in an engine with other settings."""
    return run.answers(jobs), ""


def twice(run: Run, jobs: Sequence[Job], rng: random.Random) -> tuple[list[Answer], str]:
    """The second time prompts are found in the prefix cache."""
    run.answers(jobs)
    before = run.engine.scheduler.stats().num_prefix_hits
    found = run.answers(jobs)
    return found, _met(run.engine.scheduler.stats().num_prefix_hits - before, "tokens found in the cache")


def from_elsewhere(run: Run, jobs: Sequence[Job], rng: random.Random) -> tuple[list[Answer], str]:
    """The second time prompts are brought back by the connector."""
    run.answers(jobs)
    before = run.engine.scheduler.stats().num_loaded_tokens
    found = run.answers(jobs)
    return found, _met(run.engine.scheduler.stats().num_loaded_tokens - before, "tokens loaded")


def crowded(run: Run, jobs: Sequence[Job], rng: random.Random) -> tuple[list[Answer], str]:
    """In a pool that is too small: short prompts first, so that many start, and few requests several times."""
    order = sorted(list(range(len(jobs))) * -(-64 // len(jobs)), key=lambda index: len(jobs[index].prompt))
    found = dict(zip(order, run.answers([jobs[index] for index in order]), strict=True))
    return [found[index] for index in range(len(jobs))], _met(run.engine.scheduler.num_preemptions, "preemptions")


def whatever(run: Run, jobs: Sequence[Job], rng: random.Random) -> tuple[list[Answer], str]:
    """Order, arrivals and neighbours at random."""
    order = list(range(len(jobs)))
    rng.shuffle(order)
    arrivals = [rng.randrange(2 * NUM_OUTPUT) for _ in jobs]
    answers = run.answers([jobs[index] for index in order], arrivals=arrivals, num_noise=len(jobs) // 2)
    found = dict(zip(order, answers, strict=True))
    return [found[index] for index in range(len(jobs))], f"{run.engine.scheduler.num_preemptions} preemptions"


def with_drafts(run: Run, jobs: Sequence[Job], rng: random.Random) -> tuple[list[Answer], str]:
    """All at once, several tokens of a row in a step."""
    answers = run.answers(jobs)
    stats = run.engine.scheduler.stats()
    return answers, _met(stats.num_accepted_tokens, f"of {stats.num_draft_tokens} drafts accepted")


class NotMetError(RuntimeError):
    """A run did not meet the circumstance that it is for, so it proves nothing."""


def _met(count: int, what: str) -> str:
    if not count:
        raise NotMetError(f"no {what}")
    return f"{count} {what}"


@dataclasses.dataclass(frozen=True, slots=True)
class Axis:
    """A circumstance, and the engine's settings for it beside the common ones."""

    name: str
    circumstance: Circumstance
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)


def make_axes(device: str, jobs: Sequence[Job], rng: random.Random) -> list[Axis]:
    """All axes of a device but the restart. Axes that share an engine are neighbours."""
    longest = MAX_LEN // 16 + 60  # blocks of the longest request, and a few
    needed = sum(-(-(len(job.prompt) + NUM_OUTPUT) // 16) for job in jobs)
    # as few as give preemptions, and not so few that hardly anybody runs
    tight, tighter = ({"num_gpu_blocks_override": max(longest, needed // part), "block_size": 16} for part in (4, 14))
    axes = [
        Axis("batch size", in_groups),
        Axis("order", in_another_order),
        Axis("neighbours", beside_others),
        Axis("mixed steps", one_by_one),
        Axis("siblings", as_siblings),
        Axis("logprobs", with_other_logprobs),
        Axis("chunk size", all_at_once, {"max_num_batched_tokens": rng.randint(64, 256), "max_num_seqs": 32}),
        Axis("prefix hit", twice, {"enable_prefix_caching": True}),
        Axis("host memory", from_elsewhere, {"kv_transfer_config": _HOST}),
        Axis("preemption", crowded, tight),
        Axis("speculation", with_drafts, {"speculative_config": _DRAFTS}),
        *(
            Axis(f"blocks of {size}", all_at_once, {"block_size": size})
            for size in _BLOCK_SIZES
            if size != DEFAULT_BLOCK_SIZE[device]  # the reference's
        ),
        Axis("kernel block", all_at_once, {"block_size": 64, "attention_config": {"kernel_block_size": 16}}),
        Axis("odd kernel block", all_at_once, {"block_size": 144, "attention_config": {"kernel_block_size": 48}}),
        Axis("step in flight", all_at_once, {"async_scheduling": device == "cpu"}),
    ]
    if device == "cuda":
        axes.append(Axis("graph or eager", all_at_once, {"enforce_eager": True}))
    everything = tighter | {"enable_prefix_caching": True, "max_num_batched_tokens": rng.randint(128, 384)}
    return [*axes, Axis("everything", whatever, everything | {"max_num_seqs": 64})]


class Bench:
    """The reference, and every axis beside it."""

    def __init__(self, shape: str | None, settings: dict[str, Any], num_tokens: int, seed: int) -> None:
        """`shape`: random weights of that shape; None: the model that `settings` name, or the bundled one."""
        self._shape, self._seed, self._num_tokens = shape, seed, num_tokens
        self._settings = {
            "max_model_len": MAX_LEN,
            "enable_prefix_caching": False,
            "max_num_seqs": MAX_ROWS,
            **settings,
        }
        self._jobs: list[Job] = []
        self.device = ""

    @contextlib.contextmanager
    def run(self, **settings: Any) -> Iterator[Run]:
        """An engine with `settings` beside the common ones."""
        fields = self._settings | settings
        context = LLM(**fields) if self._shape is None else dummy_model(self._shape, **fields)
        with context as llm:
            self.device = llm.engine.resolved.device
            self._jobs = self._jobs or make_jobs(self._num_tokens, llm.engine.limits.vocab_size, self._seed)
            yield Run(llm, random.Random(self._seed))

    def reference(self) -> list[Answer]:
        """All requests at once."""
        with self.run() as run:
            return run.answers(self._jobs)

    def results(self, restarted: list[Answer], chosen: Sequence[str]) -> Iterator[tuple[str, Difference, str]]:
        """Per axis its name, what differs, and a remark. `restarted`: what another process was given."""
        with contextlib.ExitStack() as stack:
            run = stack.enter_context(self.run())
            expected = run.answers(self._jobs)
            if restarted:
                yield "restart", _compare(expected, restarted), "another process"
            settings: dict[str, Any] = {}
            for axis in make_axes(self.device, self._jobs, random.Random(self._seed)):
                if chosen and axis.name not in chosen:
                    continue
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
    difference = Difference()
    for one, other in zip(expected, found, strict=True):
        difference.add(one, other)
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
    parser.add_argument("--shape", choices=sorted(SHAPES), help="random weights of a shape instead of a model")
    parser.add_argument("--device", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--quantization", choices=["int8"])
    parser.add_argument("--attention-backend")
    parser.add_argument("--tokens", type=int, default=20_000, help="output tokens compared per axis, at least")
    parser.add_argument("--seed", type=int, default=0, help="draws the requests and the circumstances")
    parser.add_argument("--axis", action="append", default=[], help="only this one; may be repeated")
    parser.add_argument("--write", metavar="PATH", help="write the answers of the reference, and do no more")
    given, started = list(sys.argv[1:] if argv is None else argv), time.perf_counter()
    options = vars(parser.parse_args(given))
    names = ("model", "device", "dtype", "quantization", "attention_backend")
    settings = {name: options[name] for name in names if options[name] is not None}
    bench = Bench(options["shape"], settings, options["tokens"], options["seed"])
    if options["write"]:
        Path(options["write"]).write_bytes(msgspec.msgpack.encode(bench.reference()))
        return 0
    chosen = options["axis"]
    restarted = _in_another_process(given) if not chosen or "restart" in chosen else []
    rows: dict[str, dict[str, Any]] = {}
    good = True
    for name, difference, remark in bench.results(restarted, chosen):
        rows[name] = _print(name, difference, remark, started)
        good &= not difference.any and bool(difference.tokens)
    control, remark = bench.control()
    remark += ": must differ" + ("" if control.any else ", and does not")
    rows["control"] = _print("control", control, remark, started)
    document = {"shape": options["shape"], **settings, "device": bench.device, "seed": options["seed"], "axes": rows}
    print(json.dumps(document | {"good": good and control.any}))
    return 0 if good and control.any else 1


def _in_another_process(argv: Sequence[str]) -> list[Answer]:
    with tempfile.TemporaryDirectory(prefix="octavo-bench-") as folder:
        path = Path(folder, "answers")
        command = [sys.executable, "-m", "octavo", "bench", "reproducibility", *argv, "--write", str(path)]
        subprocess.run(command, check=True)
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
