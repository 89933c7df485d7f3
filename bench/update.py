"""Benchmark of an update of octavo-tiny's weights on a CPU: `python bench/update.py [--updates 40] [--dtype bfloat16]`.

An update is timed from its start to the first token that the new weights drew, of an engine that idles: an LLM of this
process by each transport, and an `octavo serve` of its own process that is sent to over gloo, and asked over a
connection that is kept. Sent are masters of float32, the same rounded to bfloat16 on their way, and weights that a
trainer has in bfloat16. Milliseconds: median, least and worst. The last line is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import re
import statistics
import subprocess
import sys
import time
import urllib.parse
from collections.abc import Callable, Iterator
from typing import Any

import torch
from safetensors.torch import load_file

from octavo import LLM, SamplingParams
from octavo.checkpoint.hub import find_model
from octavo.rl import Sender, WeightSource

TINY = find_model("octavo-tiny", None, None)
LIMIT = 20.0  # milliseconds, of an update over gloo
FIELDS: dict[str, Any] = {"max_model_len": 256, "skip_tokenizer_init": True}
ASKED = [5, 6, 7]
Ask = Callable[[], object]


@contextlib.contextmanager
def in_process(dtype: str) -> Iterator[tuple[Any, Ask]]:
    """An LLM, and what draws one token."""
    with LLM(str(TINY), dtype=dtype, weight_transfer_config={"backend": "gloo"}, **FIELDS) as llm:
        one = SamplingParams(max_tokens=1, ignore_eos=True, detokenize=False)
        yield llm, lambda: llm.generate([ASKED], one, use_tqdm=False)


@contextlib.contextmanager
def server(dtype: str) -> Iterator[tuple[str, Ask]]:
    """The address of an `octavo serve`, and what draws one token of it."""
    command = [sys.executable, "-m", "octavo", "serve", "--port", "0", "--dtype", dtype, "--skip-tokenizer-init"]
    command += ["--max-model-len", "256", "--weight-transfer-config", '{"backend": "gloo"}']
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout is not None
        found = re.search(r"http://[^ ]+:\d+", process.stdout.readline())
        assert found is not None, "a server says its address"
        url = found[0]
        body = json.dumps({"token_ids": ASKED, "sampling_params": {"max_tokens": 1, "ignore_eos": True}}).encode()

        connection = http.client.HTTPConnection(urllib.parse.urlsplit(url).netloc, timeout=60)

        def ask() -> object:
            connection.request("POST", "/inference/v1/generate", body, {"Content-Type": "application/json"})
            with connection.getresponse() as reply:
                said = reply.read()
                assert reply.status == 200, said
                return said

        until = time.monotonic() + 60
        while True:
            try:
                ask()
                break
            except (OSError, AssertionError):
                connection.close()
                if time.monotonic() > until or process.poll() is not None:
                    raise
                time.sleep(0.1)
        yield url, ask
    finally:
        process.terminate()
        process.wait()


def measure(engine: Any, ask: Ask, backend: str, sources: list[WeightSource], num_updates: int) -> list[float]:
    """Milliseconds of each update; the first ones meet, and are not counted."""
    sender, found = Sender(engine, backend), []
    for turn in range(num_updates + 3):
        began = time.perf_counter()
        sender.send(sources[turn % 2], str(turn))
        ask()
        found.append(1e3 * (time.perf_counter() - began))
    sender.close()
    return found[3:]


def main() -> None:
    """Print a line for each way, and all as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=40, help="of each way")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"], help="the engine's")
    args = parser.parse_args()
    weights = load_file(TINY / "model.safetensors")
    masters = [{name: each.float() * factor for name, each in weights.items()} for factor in (1.0, 1.25)]
    rounded = [{name: each.bfloat16() for name, each in own.items()} for own in masters]
    sent = {
        "float32": [WeightSource(own) for own in masters],
        "rounded": [WeightSource(own, torch.bfloat16) for own in masters],
        "bfloat16": [WeightSource(own) for own in rounded],
    }
    results = {}
    for where, open_, backends in (
        ("in process", in_process, ("local", "shm", "gloo")),
        ("octavo serve", server, ("gloo",)),
    ):
        with open_(args.dtype) as (engine, ask):
            for backend in backends:
                for sends, sources in sent.items():
                    times = measure(engine, ask, backend, sources, args.updates)
                    told = {"median": statistics.median(times), "least": min(times), "worst": max(times)}
                    results[f"{where}, {backend}, {sends} sent"] = told
                    line = "  ".join(f"{name} {value:6.1f}" for name, value in told.items())
                    print(f"{where:13} {backend:6} {sends:9} {line} ms", flush=True)
    slow = [name for name, told in results.items() if "gloo" in name and told["median"] > LIMIT]
    print(json.dumps({"update_ms": results, "limit_ms": LIMIT, "over_limit": slow}))


if __name__ == "__main__":
    main()
