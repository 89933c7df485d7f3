"""`octavo bench connectors`: what a hit from elsewhere saves, and what moving blocks costs those who decode beside it.

Owns three measurements on random weights: a prompt's time to its first token computed, found in host memory and found
in files; the rate at which `host` copies each way while rows decode, beside the bus's own; and the rate of decoding
alone, beside those copies, and beside the same requests without copies. Does not judge. Invariant: the last line of
output is one JSON document with everything above it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from octavo.bench.engine import dummy_model
from octavo.bench.shapes import SHAPES
from octavo.cli.flags import Parser
from octavo.config.engine_config import DEFAULT_BLOCK_SIZE
from octavo.kv_connector import ConnectorStats
from octavo.llm import LLM
from octavo.request.sampling_params import SamplingParams
from octavo.startup import probe

_REPEATS, _ROUNDS = 3, 5
_NUM_ARRIVALS = 16  # prompts that move beside decoding, as many at once as there are rows for
_NUM_SPARE = 8  # these rows
_WARM, _ALONE, _SAVING = 16, 100, 24  # steps: before a phase, of one that nobody joins, of one with saves


def _host(**extra: int) -> dict[str, Any]:
    return {"kv_connector": "host", "kv_role": "kv_both", "kv_connector_extra_config": extra}


def _storage(folder: str) -> dict[str, Any]:
    return {
        "kv_connector": "shared_storage",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": folder},
    }


def _params(num_output: int) -> SamplingParams:
    return SamplingParams(max_tokens=num_output, ignore_eos=True, detokenize=False, temperature=0.0)


def _prompts(count: int, length: int, vocab: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(vocab) for _ in range(length)] for _ in range(count)]


def _settle(llm: LLM) -> ConnectorStats:
    """Let all transfers end."""
    while llm.engine.has_unfinished:
        llm.engine.step()
    return llm.engine.scheduler.loads.connector.stats()


def _first_token(llm: LLM, prompt: list[int]) -> float:
    """Seconds to it, and not to the end of what is saved behind it, which is waited for."""
    started = time.perf_counter()
    llm.engine.add("first", prompt, _params(1))
    while not llm.engine.step():
        pass
    seconds = time.perf_counter() - started
    _settle(llm)
    return seconds


def first_tokens(
    shape: str, length: int, fields: dict[str, Any], ways: Sequence[str] = ("host", "files")
) -> dict[str, float]:
    """Seconds to the first token of a prompt: computed, from host memory, from files; medians."""
    vocab = SHAPES[shape]["vocab_size"]
    prompts = _prompts(_REPEATS + 1, length, vocab, 1)
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="octavo-bench-") as folder:
        configs = {"host": _host(cpu_bytes_to_use=2 << 30), "files": _storage(folder)}
        for name, config in ((way, configs[way]) for way in ways):
            with dummy_model(shape, max_model_len=length + 64, kv_transfer_config=config, **fields) as llm:
                computed = [_first_token(llm, prompt) for prompt in prompts][1:]
                hits, loads, owns = [], [], []
                for prompt in prompts:
                    llm.reset_prefix_cache()
                    before = _settle(llm)
                    hits.append(_first_token(llm, prompt))
                    owns.append(_first_token(llm, prompt))
                    loads.append(_settle(llm).load_seconds - before.load_seconds)
                stats = llm.engine.scheduler.stats()
            assert not stats.num_load_failures, "a load that fails ends no prompt early"
            assert stats.num_loaded_tokens >= len(prompts) * (length - 64), "what was measured as a hit is one"
            found[f"{name}_computed_s"] = statistics.median(computed)
            found[f"{name}_hit_s"] = statistics.median(hits[1:])
            found[f"{name}_load_s"] = statistics.median(loads[1:])  # of that, from the order to the end
            found[f"{name}_own_hit_s"] = statistics.median(owns[1:])  # from the cache: what is left without a load
            found[f"{name}_times_faster"] = found[f"{name}_computed_s"] / found[f"{name}_hit_s"]
    return found


def bus() -> dict[str, float]:
    """GB/s of one large copy from and to pinned memory; empty without a GPU."""
    import torch

    if not torch.cuda.is_available():
        return {}
    host = torch.empty(1 << 28, dtype=torch.uint8, pin_memory=True)
    device = torch.empty_like(host, device="cuda")

    def rate(copy: Callable[[], object]) -> float:
        copy()
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(8):
            copy()
        torch.cuda.synchronize()
        return 8 * len(host) / (time.perf_counter() - started) / 1e9

    return {
        "bus_to_device_gb_s": rate(lambda: device.copy_(host, non_blocking=True)),
        "bus_to_host_gb_s": rate(lambda: host.copy_(device, non_blocking=True)),
    }


class Phases:
    """Rows that decode in an engine, time and again the same, while other requests come and go.

    alone: nobody joins. loading: prompts come whose blocks are in host memory. hits: as many come at the same steps,
    whose blocks are in the cache: what others than copies cost. saving, hits_at_once: prompts come at once whose blocks
    are in the cache, and go to host memory, or are there.
    """

    def __init__(self, llm: LLM, rows: list[list[int]], others: list[list[int]]) -> None:
        """others: their blocks are in host memory already, and for all of them there is room on both sides."""
        self.llm, self._rows, self._others = llm, rows, others
        self._moved = ConnectorStats()
        self._at_once, self._alone = [len(others)], 0.0
        for arrivals in (self._at_once, [1] * len(others)):  # what steps of these shapes need is made
            self._run("warm", arrivals)

    def round(self) -> dict[str, float]:
        """Each phase once: tokens/s of those that decode, and GB/s of copies beside them.

        Shares: of alone; beside_loads and beside_saves of what has as many hits, which is what copies alone cost.
        """
        scheduler, num = self.llm.engine.scheduler, len(self._others)
        rates = {"alone": self._run("alone", [], _ALONE)[0]}
        assert self.llm.reset_prefix_cache(), "nobody runs"
        loaded = scheduler.stats().num_loaded_tokens
        rates["loading"], ended = self._run("loading", self._at_once)
        found = {"load_gb_s": self._rate("loaded_bytes", "load_seconds")}
        loaded = scheduler.stats().num_loaded_tokens - loaded
        assert loaded >= num * (len(self._others[0]) - 64), "what was measured as loads are some"
        hits = scheduler.stats().num_prefix_hits
        rates["hits"], _ = self._run("hits", ended)
        rates["hits_at_once"], _ = self._run("hits_at_once", self._at_once, _SAVING)
        assert scheduler.loads.connector.reset(), "nothing moves"
        rates["saving"], _ = self._run("saving", self._at_once, _SAVING)
        found |= {"save_gb_s": self._rate("saved_bytes", "save_seconds")}
        assert not scheduler.stats().num_load_failures, "what was measured has moved"
        hits = scheduler.stats().num_prefix_hits - hits
        assert hits >= 3 * num * (len(self._others[0]) - 64), "what was measured as hits of the cache are some"
        self._alone = max(self._alone, rates["alone"])
        found |= {f"decode_{name}_tok_s": rate for name, rate in rates.items()}
        found |= {f"decode_{name}_share": rate / self._alone for name, rate in rates.items()}
        return found | {
            "beside_loads_share": rates["loading"] / rates["hits"],
            "beside_saves_share": rates["saving"] / rates["hits_at_once"],
        }

    def _run(self, name: str, arrivals: Sequence[int], num_steps: int = 0) -> tuple[float, list[int]]:
        """Add so many of the others before each step, until all have ended: tokens/s, and how many ended in each."""
        engine, num_added, ended = self.llm.engine, 0, list[int]()
        ids = [f"{name} row {number}" for number in range(len(self._rows))]
        for request_id, prompt in zip(ids, self._rows, strict=True):
            engine.add(request_id, prompt, _params(_WARM + _ALONE + 20 * len(self._others)))
        for _ in range(_WARM):
            engine.step()
        before, started = engine.scheduler.loads.connector.stats(), time.perf_counter()
        while len(ended) < num_steps or sum(ended) < sum(arrivals):
            for _ in range(arrivals[len(ended)] if len(ended) < len(arrivals) else 0):
                engine.add(f"{name} {num_added}", self._others[num_added], _params(1))
                num_added += 1
            outputs = engine.step()
            ended.append(sum(output.finished for output in outputs))
        seconds = time.perf_counter() - started
        engine.abort(ids)
        after = _settle(self.llm)
        names = [field.name for field in dataclasses.fields(after)]
        self._moved = ConnectorStats(**{name: getattr(after, name) - getattr(before, name) for name in names})
        return len(self._rows) * len(ended) / seconds, ended

    def _rate(self, num_bytes: str, seconds: str) -> float:
        """GB/s of the last phase, over the time in which something moved."""
        return getattr(self._moved, num_bytes) / max(getattr(self._moved, seconds), 1e-9) / 1e9


@contextlib.contextmanager
def decoding(shape: str, length: int, fields: dict[str, Any], *, num_rows: int) -> Iterator[Phases]:
    """An engine with `num_rows` that decode, and prompts of `length` that come and go."""
    vocab, blocks = SHAPES[shape]["vocab_size"], DEFAULT_BLOCK_SIZE[fields["device"]]
    rows, others = _prompts(num_rows, 64, vocab, 2), _prompts(_NUM_ARRIVALS, length, vocab, 3)
    most = _WARM + _ALONE + 20 * _NUM_ARRIVALS
    slots = _NUM_ARRIVALS * (length // blocks + 1) + num_rows * ((64 + _WARM + _ALONE) // blocks + 2)
    with dummy_model(
        shape,
        max_model_len=max(length + 64, 64 + most),
        kv_transfer_config=_host(num_cpu_blocks=slots),
        max_num_seqs=num_rows + _NUM_SPARE,
        num_gpu_blocks_override=2 * slots,
        **fields,
    ) as llm:
        for prompt in others:
            _first_token(llm, prompt)
        yield Phases(llm, rows, others)


def beside_decode(shape: str, length: int, fields: dict[str, Any], *, num_rows: int) -> dict[str, float]:
    """What copies cost those who decode: medians of rounds, see Phases."""
    with decoding(shape, length, fields, num_rows=num_rows) as phases:
        rounds = [phases.round() for _ in range(_ROUNDS)]
    return {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the measurements and print a table, then one JSON line."""
    parser = Parser(prog="octavo bench connectors", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", choices=sorted(SHAPES), default="tiny")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--length", type=int, default=512, help="tokens of a prompt")
    parser.add_argument("--rows", type=int, default=0, help="that decode beside loads; 0: this is not measured")
    parser.add_argument("--kv-cache-layout", help="as the engine's setting of this name")
    options = parser.parse_args(argv)
    on_gpu = options.device != "cpu" and bool(probe.device_facts(options.device).cuda)
    fields: dict[str, Any] = {"device": "cuda" if on_gpu else "cpu", "dtype": "bfloat16" if on_gpu else "float32"}
    if options.kv_cache_layout:
        fields["kv_cache_layout"] = options.kv_cache_layout
    found = first_tokens(options.shape, options.length, fields)
    if on_gpu:
        found |= bus()
    if options.rows:
        found |= beside_decode(options.shape, options.length, fields, num_rows=options.rows)
        for way, bus_way in (("load", "to_device"), ("save", "to_host")) if on_gpu else ():
            found[f"{way}_share_of_bus"] = found[f"{way}_gb_s"] / found[f"bus_{bus_way}_gb_s"]
    print(f"{options.shape}, prompts of {options.length}, {fields}")
    for key, value in found.items():
        print(f"  {key:26} {value:12.4f}")
    print(json.dumps({"shape": options.shape, "length": options.length, **fields, "results": found}))
    return 0
