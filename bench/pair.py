"""Benchmark of a pair of engines: `python bench/pair.py --shape 8b --length 4000 p2p:ipc p2p:nccl p2p nixl mooncake`.

An engine in a process of its own, on the next GPU if there are two, computes prompts of random tokens; this one fetches
their blocks and computes one token. What is told of each way: seconds to the first token here, alone and of the pair
(the other engine's included), and the rate of the fetches beside one plain copy between the two GPUs. Tokens and
log-probabilities are one engine's, or the way has failed. What fails is left out, by name. With --marks it says on
stderr when what happened of each load, on both sides, and with --hits how long the first token of a hit takes, at once
and after a pause as long as the other engine computes.
"""

from __future__ import annotations

import argparse
import collections
import json
import logging
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch

from octavo import LLM, SamplingParams
from octavo.bench.shapes import SHAPES

_REPEATS = 4
_MARK = "octavo: "


def fields_of(folder: str, length: int, way: str, role: str) -> dict[str, Any]:
    """Settings of one side. way: a connector, :its backend, and @a layout of the cache."""
    way, _, layout = way.partition("@")
    name, _, backend = way.partition(":")
    on_gpu = torch.cuda.is_available()
    fields: dict[str, Any] = {
        "model": folder,
        "load_format": "dummy",
        "dtype": "bfloat16" if on_gpu else "float32",
        "device": "cuda" if on_gpu else "cpu",
        "max_model_len": length + 64,
        "enable_prefix_caching": False,
        "skip_tokenizer_init": True,
        "kv_cache_layout": layout or None,
    }
    if role:
        fields["kv_transfer_config"] = {
            "kv_connector": name,
            "kv_role": role,
            "kv_port": 0,
            "kv_transfer_timeout": 30,
            "kv_connector_extra_config": {"backend": backend} if backend else {},
        }
    return fields


class First(NamedTuple):
    """A first token."""

    seconds: float
    told: dict[str, Any] | None  # what the answer says of its blocks
    answer: list[Any]  # the token, and its log-probability


def first_token(llm: LLM, prompt: list[int], said: dict[str, Any] | None) -> First:
    """Of a prompt, with what its blocks are asked for by."""
    extra = {"kv_transfer_params": said} if said else None
    params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False, logprobs=0, extra_args=extra)
    started = time.perf_counter()
    (output,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    seconds, own = time.perf_counter() - started, output.outputs[0]
    return First(seconds, output.kv_transfer_params, [list(own.token_ids), own.cumulative_logprob])


class Marks:
    """When what happened between a request's begin and its first token, in an engine of this process."""

    def __init__(self, llm: LLM) -> None:
        """Note it from now on."""
        self._found: list[tuple[str, float]] = []
        self.behind: list[dict[str, float]] = []  # of each load, ms behind its order
        core: Any = llm.engine.core
        connector = core.scheduler.loads.connector
        orders = getattr(connector, "_inner", connector)._orders  # Octavo's own may be called through a guard
        for owner, name in ((core.scheduler, "take_loads"), (core._executor, "submit"), (orders, "begin")):
            setattr(owner, name, self._noted(name, getattr(owner, name)))

    def _noted(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*args)
            finally:
                if name == "submit":
                    self._found += [(name, began), ("submitted", time.perf_counter())]
                else:
                    self._found.append((name, began))

        return noted

    def tell(self, seconds: float) -> None:
        """Of a request that has ended now, after so many seconds."""
        ended, found = time.perf_counter(), self._found
        self._found = []
        told = ", ".join(f"{name} {(at - ended + seconds) * 1e3:.2f}" for name, at in found)
        ordered = next((at for name, at in found if name == "begin"), ended)
        step = next((at for name, at in found if name == "submit" and at > ordered), ended)
        heard = max((at for name, at in found if name == "take_loads" and at < step), default=ended)
        self.behind.append({"scheduler told": (heard - ordered) * 1e3, "its step": (step - ordered) * 1e3})
        print(f"here, ms: {told}, ended {seconds * 1e3:.2f}", file=sys.stderr)


class Kept(logging.Handler):
    """What loads say of themselves, until it is told: they take longer to write it."""

    def __init__(self) -> None:
        """From now on."""
        super().__init__()
        self._found: list[str] = []
        log = logging.getLogger("octavo.kv_connector.worker")
        log.setLevel(logging.DEBUG)
        log.addHandler(self)
        log.propagate = False

    def emit(self, record: logging.LogRecord) -> None:
        """Of a load."""
        self._found.append(record.getMessage())

    def tell(self, side: str) -> str:
        """On stderr; the medians of what was marked, without the first load, which makes the connection."""
        found, self._found = self._found, []
        marked = collections.defaultdict[str, list[float]](list)
        for number, line in enumerate(found):
            print(f"{side}: {line}", file=sys.stderr, flush=True)
            for each in line.partition("ms: ")[2].split(", ") if number and "ms: " in line else ():
                what, at = each.rsplit(" ", 1)
                marked[what].append(float(at))
        return ", ".join(f"{what} {statistics.median(at):.2f}" for what, at in marked.items())


def hits(folder: str, length: int, prompts: Sequence[list[int]], pause: float) -> dict[str, float]:
    """How long the first token of a prompt takes that is in the cache, at once and after a pause."""
    with LLM(**{**fields_of(folder, length, "", ""), "enable_prefix_caching": True}) as llm:
        found: dict[float, list[float]] = {0.0: [], pause: []}
        for prompt in prompts:
            first_token(llm, prompt, None)
            for seconds, own in found.items():
                time.sleep(seconds)
                own.append(first_token(llm, prompt, None).seconds)
    return {"at_once_s": statistics.median(found[0.0][1:]), "after_pause_s": statistics.median(found[pause][1:])}


def serve(fields: dict[str, Any]) -> None:
    """The other side: a prompt a line, until input ends."""
    with LLM(**fields) as llm:
        print(_MARK, flush=True)
        for line in sys.stdin:
            print(_MARK + json.dumps(first_token(llm, json.loads(line), {"do_remote_decode": True})), flush=True)


def answer(lines: IO[str]) -> str:
    """The next one; libraries print lines of their own."""
    for line in lines:
        if line.startswith(_MARK):
            return line.removeprefix(_MARK)
    raise RuntimeError("the other engine has ended")


def measure(
    folder: str, length: int, way: str, prompts: Sequence[list[int]], alone: list[First], kept: Kept | None
) -> dict[str, Any]:
    """One way. The first prompt makes the connection. alone: by one engine. kept: marks are wanted."""
    marks = kept is not None
    own = fields_of(folder, length, way, "kv_producer")
    # both see both, as what passes memory from process to process may want
    more = {"CUDA_VISIBLE_DEVICES": "1,0"} if torch.cuda.device_count() > 1 else {}
    command = [sys.executable, __file__, "--serve", json.dumps(own), *["--marks"] * marks]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env={**os.environ, **more}) as other:
        assert other.stdin is not None and other.stdout is not None
        fetched, computed = [], []
        with LLM(**fields_of(folder, length, way, "kv_consumer")) as llm:
            connector = llm.engine.scheduler.loads.connector
            told = Marks(llm) if marks else None
            answer(other.stdout)
            for number, prompt in enumerate(prompts):
                other.stdin.write(json.dumps(prompt) + "\n")
                other.stdin.flush()
                there = First(*json.loads(answer(other.stdout)))
                if number == 1:
                    before = connector.stats()
                computed.append(there.seconds)
                here = first_token(llm, prompt, there.told)
                fetched.append(here.seconds)
                if told:
                    told.tell(here.seconds)
                assert here.answer == alone[number].answer, f"{here.answer} is not one engine's {alone[number].answer}"
            assert llm.engine.scheduler.stats().num_loaded_tokens >= len(prompts) * (length - 1), "all were fetched"
            after = connector.stats()
        other.stdin.close()
        other.wait()
    busy = after.load_seconds - before.load_seconds
    pair = statistics.median(computed[1:]) + statistics.median(fetched[1:])
    said = {}
    if kept and told:
        rest = {name: statistics.median(each[name] for each in told.behind[1:]) for name in told.behind[0]}
        behind = ", ".join(f"{name} {at:.2f}" for name, at in rest.items())
        said = {"marks, ms": f"{kept.tell('here')}; behind its order: {behind}"}
    return {
        "fetched_s": statistics.median(fetched[1:]),
        "pair_s": pair,
        "pair_to_alone": pair / middle(alone),
        "fetch_gb_s": (after.loaded_bytes - before.loaded_bytes) / busy / 1e9,
        **said,
    }


def middle(tokens: Sequence[First]) -> float:
    """Seconds to a first token: the median, without the first one of all."""
    return statistics.median([each.seconds for each in tokens][1:])


def link() -> float:
    """GB/s of a plain copy from one GPU to the next; 0: there are not two."""
    if torch.cuda.device_count() < 2:
        return 0.0
    source = torch.empty(1 << 28, dtype=torch.uint8, device="cuda:1")
    target = torch.empty_like(source, device="cuda:0")
    for timed in (False, True):
        started = time.perf_counter()
        for _ in range(8):
            target.copy_(source)
        torch.cuda.synchronize(0)
        torch.cuda.synchronize(1)
        if timed:
            break
    return 8 * len(source) / (time.perf_counter() - started) / 1e9


def main() -> int:
    """Measure each way, and print a table, then one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "ways", nargs="*", default=["p2p"], help="kv_connector, p2p:ipc, p2p:nccl, or nixl@BLHNC; default: p2p"
    )
    parser.add_argument("--shape", choices=sorted(SHAPES), default="tiny")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--marks", action="store_true", help="say what takes how long, on stderr")
    parser.add_argument("--hits", action="store_true", help="measure hits of the engine's own cache, too")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    kept = Kept() if options.marks else None
    if options.serve:
        serve(json.loads(options.serve))
        if kept:
            kept.tell("there")
        return 0
    rng, vocab = random.Random(1), SHAPES[options.shape]["vocab_size"]
    prompts = [[rng.randrange(vocab) for _ in range(options.length)] for _ in range(_REPEATS + 1)]
    found: dict[str, Any] = {"link_gb_s": link()}
    with tempfile.TemporaryDirectory(prefix="octavo-bench-") as folder:
        Path(folder, "config.json").write_text(json.dumps(SHAPES[options.shape]))
        with LLM(**fields_of(folder, options.length, "", "")) as llm:
            alone = [first_token(llm, prompt, None) for prompt in prompts]
            found["alone_s"] = middle(alone)
        if options.hits:
            found["a hit"] = hits(folder, options.length, prompts, found["alone_s"])
        for way in options.ways:
            try:
                found[way] = measure(folder, options.length, way, prompts, alone, kept)
            except (ValueError, RuntimeError, AssertionError, OSError) as error:  # the others are measured, and told
                print(f"{way}: {type(error).__name__}: {error}", file=sys.stderr)
    print(
        f"{options.shape}, prompts of {options.length}: alone {found['alone_s']:.4f} s, link {found['link_gb_s']:.1f}"
    )
    for way in ("a hit", *options.ways):
        for key, value in found.get(way, {}).items():
            print(f"  {way:12} {key:16} " + (value if isinstance(value, str) else f"{value:12.4f}"))
    print(json.dumps({"shape": options.shape, "length": options.length, "results": found}))
    return int(any(way not in found for way in options.ways))


if __name__ == "__main__":
    sys.exit(main())
