"""The server workload from a checkout: 64 streamed requests, 16 at a time, 64 tokens each, on random weights.

Starts `octavo serve` on a shape, waits for /ready, runs the workload with the client of `octavo bench serve`, and asks
/health all the while from a process of its own. With --base-url it measures a server that runs already, of any kind.
`python bench/serve.py --shape tiny`; the last line is one JSON document.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import json
import os
import random
import re
import select
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.parse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from octavo.bench.http_client import Client
from octavo.bench.serve import BACKENDS, Target, first_model, run, wait_ready
from octavo.bench.serve_data import Sample
from octavo.bench.serve_result import percentile, summarize
from octavo.bench.shapes import SHAPES

NUM_REQUESTS, CONCURRENCY, NUM_OUTPUT = 64, 16, 64
_TINY = Path(__file__).resolve().parents[1] / "src/octavo/assets/octavo-tiny"
_PROBE_SECONDS = 0.01  # between two questions to /health


@contextlib.contextmanager
def serving(shape: str, more: Sequence[str]) -> Iterator[tuple[str, float]]:
    """A server on random weights, with octavo-tiny's tokenizer: its URL, and the seconds until it was ready."""
    with tempfile.TemporaryDirectory(prefix="octavo-bench-") as folder:
        Path(folder, "config.json").write_text(json.dumps(SHAPES[shape]))
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            shutil.copy(_TINY / name, folder)
        command = [sys.executable, "-m", "octavo", "serve", folder, "--load-format", "dummy", "--port", "0", *more]
        began = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None, "the pipe was asked for"
            match = re.search(r"http://\S+:\d+", process.stdout.readline())
            if match is None:
                raise SystemExit("the server did not say where it listens")
            while process.poll() is None and _status(match[0], "/ready") != 200:
                time.sleep(0.01)
            yield match[0], time.perf_counter() - began
        finally:
            process.terminate()
            process.wait()


def _status(url: str, path: str) -> int:
    connection = http.client.HTTPConnection(urllib.parse.urlsplit(url).netloc, timeout=10)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    except OSError:
        return 0
    finally:
        connection.close()


def probe(url: str) -> None:
    """Ask /health over one connection until stdin ends; print the milliseconds of each answer as JSON."""
    connection = http.client.HTTPConnection(urllib.parse.urlsplit(url).netloc, timeout=30)
    times = []
    while not select.select([sys.stdin], [], [], _PROBE_SECONDS)[0]:
        began = time.perf_counter()
        connection.request("GET", "/health")
        answer = connection.getresponse()
        answer.read()
        times.append((time.perf_counter() - began) * 1000 if answer.status == 200 else 1e9)
    print(json.dumps(times))


@contextlib.contextmanager
def probed(url: str) -> Iterator[list[float]]:
    """Ask /health while the block runs; the list is filled at its end, in milliseconds."""
    command = [sys.executable, __file__, "--probe", url]
    times: list[float] = []
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ) as process:
        try:
            yield times
        finally:
            times += json.loads(process.communicate("")[0] or "[]")


async def measure(url: str, options: argparse.Namespace) -> dict[str, Any]:
    """One pass of the workload. Raises SystemExit if a request fails: a figure with failures means nothing."""
    client = Client(url)
    model = await first_model(client)
    body = {"temperature": 0.0, "ignore_eos": True}
    target = Target(client, "openai", BACKENDS["openai"], model, body)
    vocab = SHAPES[options.shape]["vocab_size"]
    rng = random.Random(options.seed)
    samples = [
        Sample([rng.randrange(vocab) for _ in range(options.input_len)], options.input_len, NUM_OUTPUT)
        for _ in range(NUM_REQUESTS)
    ]
    await wait_ready(target, Sample(samples[0].prompt, options.input_len, 2), 60)
    outcomes, seconds = await run(target, samples, [0.0] * NUM_REQUESTS, CONCURRENCY)
    await client.close()
    errors = [outcome.error for outcome in outcomes if outcome.error]
    if errors:
        raise SystemExit(f"{len(errors)} of {NUM_REQUESTS} requests failed: {errors[0]}")
    return summarize(outcomes, seconds, metrics=["ttft", "tpot", "itl", "e2el"], percentiles=[50, 99], goodput={})


def main() -> int:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="tiny")
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--repeat", type=int, default=3, help="passes; the median is told")
    parser.add_argument("--seed", type=int, default=1, help="of the first pass; each has prompts of its own")
    parser.add_argument("--base-url", help="measure this server instead of starting one")
    parser.add_argument("--no-health", action="store_true", help="leave /health alone")
    parser.add_argument("--probe", help=argparse.SUPPRESS)
    options, more = parser.parse_known_args()
    if options.probe:
        probe(options.probe)
        return 0
    started = contextlib.nullcontext((options.base_url, 0.0)) if options.base_url else serving(options.shape, more)
    rows, health = [], []
    with started as (url, ready_after):
        for _ in range(options.repeat):
            with contextlib.nullcontext(list[float]()) if options.no_health else probed(url) as times:
                rows.append(asyncio.run(measure(url, options)))
            health += times
            options.seed += 1
    names = ("output_throughput", "median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "p99_itl_ms", "p99_e2el_ms")
    figures = {name: statistics.median(row[name] for row in rows) for name in names}
    figures |= {
        "ready_after_s": ready_after,
        "health_p99_ms": percentile(health, 99),
        "health_max_ms": max(health or [0]),
    }
    for name, value in figures.items():
        print(f"{name:20} {value:10.3f}")
    facts = {"workload": "server", "shape": options.shape, "input_len": options.input_len, "options": more}
    print(json.dumps(facts | {"passes": [row["output_throughput"] for row in rows]} | figures))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
