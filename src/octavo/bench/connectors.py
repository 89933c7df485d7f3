"""`octavo bench connectors`: what a hit from elsewhere saves, and what moving blocks costs those who decode beside it.

Owns three measurements on random weights: a prompt's time to its first token computed, found in host memory and found
in files; the rate at which `host` copies each way, beside the bus's own; and the rate of decoding alone and beside
those copies. Does not judge. Invariant: the last line of output is one JSON document with everything above it.
"""

from __future__ import annotations

import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

from octavo.bench.engine import dummy_model
from octavo.bench.shapes import SHAPES
from octavo.cli.flags import Parser
from octavo.kv_connector import ConnectorStats
from octavo.llm import LLM
from octavo.request.sampling_params import SamplingParams
from octavo.startup import probe

_REPEATS = 3


def _host(size: int) -> dict[str, Any]:
    return {
        "kv_connector": "host",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"cpu_bytes_to_use": size},
    }


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
    started = time.perf_counter()
    llm.generate([prompt], _params(1), use_tqdm=False)
    return time.perf_counter() - started


def first_tokens(shape: str, length: int, fields: dict[str, Any]) -> dict[str, float]:
    """Seconds to the first token of a prompt: computed, from host memory, from files; medians."""
    vocab = SHAPES[shape]["vocab_size"]
    prompts = _prompts(_REPEATS + 1, length, vocab, 1)
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="octavo-bench-") as folder:
        for name, config in (("host", _host(2 << 30)), ("files", _storage(folder))):
            with dummy_model(shape, max_model_len=length + 64, kv_transfer_config=config, **fields) as llm:
                computed = [_first_token(llm, prompt) for prompt in prompts][1:]
                _settle(llm)
                hits = []
                for prompt in prompts:
                    llm.reset_prefix_cache()
                    hits.append(_first_token(llm, prompt))
                    _settle(llm)
                loaded = llm.engine.scheduler.stats().num_loaded_tokens
            assert loaded >= len(prompts) * (length - 64), "what was measured as a hit is one"
            found[f"{name}_computed_s"] = statistics.median(computed)
            found[f"{name}_hit_s"] = statistics.median(hits[1:])
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


def beside_decode(shape: str, length: int, fields: dict[str, Any], *, num_rows: int) -> dict[str, float]:
    """Tokens/s of `num_rows` that decode: alone, beside saves, beside loads; and GB/s of these while they move."""
    vocab, num_steps = SHAPES[shape]["vocab_size"], 150
    rows, others = _prompts(num_rows, 64, vocab, 2), _prompts(12, length, vocab, 3)
    with dummy_model(
        shape, max_model_len=length + 512, kv_transfer_config=_host(5 << 30), max_num_seqs=num_rows + 2, **fields
    ) as llm:
        for prompt in others:
            _first_token(llm, prompt)
        _settle(llm)
        llm.reset_prefix_cache()
        rates: dict[str, float] = {}
        for name in ("alone", "loading", "alone_again"):
            for number, prompt in enumerate(rows):
                llm.engine.add(f"{name}{number}", prompt, _params(num_steps + 100))
            for _ in range(40):
                llm.engine.step()
            before, started, num_added = llm.engine.scheduler.loads.connector.stats(), time.perf_counter(), 0
            for step in range(num_steps):
                if name == "loading" and step % (num_steps // len(others)) == 0 and num_added < len(others):
                    llm.engine.add(f"load{num_added}", others[num_added], _params(1))
                    num_added += 1
                llm.engine.step()
            seconds = time.perf_counter() - started
            rates[f"decode_{name}_tok_s"] = num_rows * num_steps / seconds
            moved = llm.engine.scheduler.loads.connector.stats()
            if name == "loading":
                busy = moved.load_seconds - before.load_seconds
                rates["load_gb_s"] = (moved.loaded_bytes - before.loaded_bytes) / max(busy, 1e-9) / 1e9
            llm.engine.abort([f"{name}{number}" for number in range(num_rows)])
            _settle(llm)
        stats = llm.engine.scheduler.loads.connector.stats()
        rates["save_gb_s"] = stats.saved_bytes / max(stats.save_seconds, 1e-9) / 1e9
    alone = max(rates["decode_alone_tok_s"], rates["decode_alone_again_tok_s"])
    return rates | {"decode_share": rates["decode_loading_tok_s"] / alone}


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
    print(f"{options.shape}, prompts of {options.length}, {fields}")
    for key, value in found.items():
        print(f"  {key:26} {value:12.4f}")
    print(json.dumps({"shape": options.shape, "length": options.length, **fields, "results": found}))
    return 0
