"""`octavo bench serve`: load a running server and measure what its clients feel, with vLLM's options and JSON keys.

Owns the command line, the times at which requests start, and the reading of streams. Knows HTTP and the OpenAI shapes
only, so it measures any such server. Invariant: the first token's time is that of the first chunk that holds something
generated, so a server that sends an empty chunk at once gains nothing by it.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import math
import os
import random
import time
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from octavo.bench.http_client import Client, EventSplitter, HttpError, Response
from octavo.bench.serve_data import Sample, add_options, make_samples
from octavo.bench.serve_result import (
    DETAILS,
    GOODPUT_METRICS,
    METRICS,
    Outcome,
    drafts_between,
    read_drafts,
    summarize,
    table,
)
from octavo.cli.flags import Parser, UsageError

BACKENDS = {
    "openai": "/v1/completions",
    "vllm": "/v1/completions",
    "openai-chat": "/v1/chat/completions",
}
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")
_SETTLED_SECONDS, _MAX_READINGS = 0.5, 8  # between two equal readings of /metrics: engines tell it now and then
_MAX_ERROR = 300  # characters kept of what a server says


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[Any] | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Chunk).decode


class Stream:
    """Reads one streamed answer into an Outcome."""

    def __init__(self, sample: Sample) -> None:
        """The clock starts here."""
        self.outcome = Outcome(start=time.perf_counter(), prompt_len=sample.prompt_len)
        self.done = False
        self._events = EventSplitter()
        self._texts: list[str] = []
        self._num_reported: int | None = None
        self._last = 0.0

    def feed(self, data: bytes, now: float) -> bool:
        """Take bytes of the body; always goes on."""
        for event in self._events.feed(data):
            if event.startswith(b"[DONE]"):
                self.done = True
                continue
            self._take(_decode(event), now - self.outcome.start)
        return True

    def _take(self, chunk: _Chunk, now: float) -> None:
        if chunk.error:
            self.outcome.error = json.dumps(chunk.error)[:_MAX_ERROR]
        for choice in chunk.choices or ():
            text, generated = _generated(choice)
            if generated:
                self._mark(now)
                self._texts.append(text)
        if chunk.usage is not None:
            self._num_reported = chunk.usage.completion_tokens
            if self._num_reported and not self._texts:  # tokens without text: they are all there now
                self._mark(now)
                self._texts.append("")
            self.outcome.prompt_len = chunk.usage.prompt_tokens or self.outcome.prompt_len

    def _mark(self, now: float) -> None:
        outcome = self.outcome
        if self._texts:
            outcome.itl.append(now - self._last)
        else:
            outcome.ttft = now
        outcome.latency = self._last = now

    def finish(self, status: int) -> Outcome:
        """The outcome, once the response is over."""
        outcome = self.outcome
        outcome.text = "".join(self._texts)
        outcome.output_len = self._num_reported or len(self._texts)
        if not outcome.error and not self.done:
            outcome.error = "the stream ended without [DONE]"
        if not outcome.error and not self._texts:
            outcome.error = f"status {status}, and not one token"
        return outcome


def _generated(choice: _Choice) -> tuple[str, bool]:
    """The text of a chunk, and whether it holds anything that the model generated."""
    if choice.delta is None:
        text = choice.text or ""  # empty for a token without text; the last chunk may be empty of tokens too
        return text, bool(text or choice.token_ids or choice.finish_reason is None)
    delta = choice.delta
    text = delta.content or delta.reasoning or delta.reasoning_content or ""
    return text, bool(text or delta.tool_calls)


class Target:
    """The server under test: where requests go and what they all say."""

    def __init__(self, client: Client, backend: str, endpoint: str, model: str, body: Mapping[str, Any]) -> None:
        """`body` is merged into every request."""
        self._client, self._endpoint, self._model, self._body = client, endpoint, model, dict(body)
        self._chat = backend == "openai-chat"

    def body(self, sample: Sample) -> bytes:
        """The request of one sample."""
        fields: dict[str, Any] = {"model": self._model, "stream": True, "stream_options": {"include_usage": True}}
        if self._chat:
            fields |= {"messages": [{"role": "user", "content": sample.prompt}]}
            fields["max_completion_tokens"] = sample.output_len
        else:
            fields |= {"prompt": sample.prompt, "max_tokens": sample.output_len}
        return msgspec.json.encode(fields | self._body)

    async def ask(self, sample: Sample, request_id: str) -> Outcome:
        """Send one request and read its stream."""
        body = self.body(sample)
        stream = Stream(sample)
        try:
            response = await self._client.request(
                "POST", self._endpoint, body, headers={"x-request-id": request_id}, on_body=stream.feed
            )
        except (HttpError, msgspec.DecodeError) as error:
            stream.outcome.error = str(error)[:_MAX_ERROR]
            return stream.outcome
        if response.status != 200:
            stream.outcome.error = _said(response)
        return stream.finish(response.status)


def _said(response: Response) -> str:
    return f"HTTP {response.status}: {response.body.decode(errors='replace')[:_MAX_ERROR]}"


def start_times(count: int, rate: float, burstiness: float, rng: random.Random) -> list[float]:
    """When requests leave, in seconds: gamma gaps (burstiness 1: Poisson) that add up to count / rate."""
    if math.isinf(rate):
        return [0.0] * count
    moments, moment = [], 0.0
    for _ in range(count):
        moment += 1.0 if math.isinf(burstiness) else rng.gammavariate(burstiness, 1.0)
        moments.append(moment)
    return [each * count / rate / moment for each in moments]


async def run(
    target: Target,
    samples: Sequence[Sample],
    moments: Sequence[float],
    max_concurrency: int | None,
    id_prefix: str = "",
) -> tuple[list[Outcome], float]:
    """Send sample i at moment i, at most `max_concurrency` at once. Returns the outcomes in order, and the seconds."""
    gate = asyncio.Semaphore(max_concurrency or len(samples))
    began = time.perf_counter()

    async def one(index: int) -> Outcome:
        delay = began + moments[index] - time.perf_counter()
        if delay > 0:
            await asyncio.sleep(delay)
        async with gate:
            return await target.ask(samples[index], f"{id_prefix}{index}")

    outcomes = await asyncio.gather(*(one(index) for index in range(len(samples))))
    return outcomes, time.perf_counter() - began


async def wait_ready(target: Target, sample: Sample, seconds: float) -> None:
    """Send `sample` until it succeeds. Raises ValueError with the last error after `seconds`, or for a refusal."""
    deadline = time.monotonic() + seconds
    while True:
        outcome = await target.ask(sample, "ready")
        if not outcome.error:
            return
        if time.monotonic() > deadline or outcome.error.startswith("HTTP 4"):
            raise ValueError(f"the first request failed: {outcome.error}")
        await asyncio.sleep(0.2)


async def drafts_of(client: Client) -> Counter[str]:
    """What the server counts of drafts, once that grows no more; empty where it has none, or does not tell."""
    counts: Counter[str] = Counter()
    for _ in range(_MAX_READINGS):
        try:
            response = await client.request("GET", "/metrics")
        except HttpError:
            return Counter()
        earlier, counts = counts, read_drafts(response.body.decode(errors="replace") if response.status == 200 else "")
        if counts == earlier:
            break
        await asyncio.sleep(_SETTLED_SECONDS)
    return counts


async def first_model(client: Client) -> str:
    """The first name that /v1/models lists. Raises ValueError."""
    try:
        response = await client.request("GET", "/v1/models")
    except HttpError as error:
        raise ValueError(f"{error}; --base-url, or --host and --port, say where the server is") from None
    try:
        return str(json.loads(response.body)["data"][0]["id"])
    except (ValueError, KeyError, IndexError, TypeError):
        raise ValueError(f"/v1/models: {_said(response)}") from None


async def as_texts(client: Client, model: str, samples: Sequence[Sample]) -> list[Sample]:
    """Samples of ids as texts, for endpoints that take no ids: the server's /detokenize, else numbers as words."""
    texts = []
    for sample in samples:
        if isinstance(sample.prompt, str):
            texts.append(sample)
            continue
        body = msgspec.json.encode({"model": model, "tokens": sample.prompt})
        response = await client.request("POST", "/detokenize", body)
        text = json.loads(response.body)["prompt"] if response.status == 200 else " ".join(map(str, sample.prompt))
        texts.append(Sample(text, sample.prompt_len, sample.output_len))
    return texts


def _parser() -> Parser:
    parser = Parser(prog="octavo bench serve", description=__doc__.splitlines()[0] if __doc__ else "")
    server = parser.add_argument_group("server")
    server.add_argument("--backend", choices=sorted(BACKENDS), default="openai")
    server.add_argument("--base-url")
    server.add_argument("--host", default="127.0.0.1")
    server.add_argument("--port", type=int, default=8000)
    server.add_argument("--endpoint", help="default: the backend's")
    server.add_argument("--model", help="default: the first of /v1/models")
    server.add_argument("--served-model-name", help="the name to send, if it is not --model")
    server.add_argument("--tokenizer", help="taken, and without effect: the server counts its tokens")
    server.add_argument("--trust-remote-code", action="store_true", help="taken, and without effect")
    server.add_argument("--header", nargs="*", default=[], metavar="KEY=VALUE")
    server.add_argument("--ready-check-timeout-sec", type=float, default=600.0, help="0: no first request")
    load = parser.add_argument_group("load")
    load.add_argument("--request-rate", type=float, default=math.inf, help="requests per second; inf: all at once")
    load.add_argument("--burstiness", type=float, default=1.0, help="1: Poisson; below: in bursts; inf: even")
    load.add_argument("--max-concurrency", type=int)
    load.add_argument("--num-warmups", type=int, default=0)
    load.add_argument("--seed", type=int, default=0)
    load.add_argument("--ignore-eos", action="store_true", help="random and prefix_repetition always do")
    load.add_argument("--logprobs", type=int)
    load.add_argument("--extra-body", type=json.loads, default={}, metavar="JSON")
    load.add_argument("--request-id-prefix", default=f"bench-{uuid.uuid4().hex[:8]}-")
    for name in _SAMPLING:
        kind = int if name == "top_k" else float
        load.add_argument("--" + name.replace("_", "-"), type=kind, default=0.0 if name == "temperature" else None)
    add_options(parser)
    result = parser.add_argument_group("result")
    result.add_argument("--percentile-metrics", default="ttft,tpot,itl", help=f"of {','.join(METRICS)}")
    result.add_argument("--metric-percentiles", default="99", help="25,50,99.9")
    result.add_argument("--goodput", nargs="+", default=[], metavar="NAME:MS", help="limits that a good request keeps")
    result.add_argument("--save-result", action="store_true")
    result.add_argument("--save-detailed", action="store_true", help="with what each request saw")
    result.add_argument("--append-result", action="store_true")
    result.add_argument("--result-dir")
    result.add_argument("--result-filename")
    result.add_argument("--label")
    result.add_argument("--metadata", nargs="*", default=[], metavar="KEY=VALUE")
    result.add_argument("--disable-tqdm", action="store_true", help="taken, and without effect: there is no bar")
    return parser


def _pairs(name: str, entries: Sequence[str], separator: str) -> dict[str, str]:
    pairs = {}
    for entry in entries:
        key, found, value = entry.partition(separator)
        if not found:
            raise UsageError(f"--{name} {entry!r}: expected KEY{separator}VALUE")
        pairs[key.strip()] = value.strip()
    return pairs


def _numbers(name: str, texts: Sequence[str], limit: float) -> list[float]:
    try:
        values = [float(text) for text in texts]
    except ValueError:
        values = [math.nan]
    if not all(0.0 <= value <= limit for value in values):
        raise UsageError(f"--{name} {','.join(texts)}: expected numbers from 0 to {limit:g}")
    return values


def _check(options: argparse.Namespace) -> None:
    if not options.request_rate > 0 or not options.burstiness > 0:
        raise UsageError("--request-rate and --burstiness must be above 0")
    if options.max_concurrency is not None and options.max_concurrency < 1:
        raise UsageError(f"--max-concurrency {options.max_concurrency}: must be at least 1")
    options.metrics = options.percentile_metrics.split(",")
    unknown = [name for name in options.metrics if name not in METRICS]
    if unknown:
        raise UsageError(f"--percentile-metrics {unknown[0]}: expected names of {', '.join(METRICS)}")
    options.percentiles = _numbers("metric-percentiles", options.metric_percentiles.split(","), 100.0)
    limits = _pairs("goodput", options.goodput, ":")
    wrong = [name for name in limits if name not in GOODPUT_METRICS]
    if wrong:
        raise UsageError(f"--goodput {wrong[0]}: expected names of {', '.join(GOODPUT_METRICS)}")
    options.limits = dict(zip(limits, _numbers("goodput", list(limits.values()), math.inf), strict=True))
    if not isinstance(options.extra_body, dict):
        raise UsageError("--extra-body: expected a JSON object")


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run what the options say. Raises ValueError if the server does not answer."""
    headers = _pairs("header", options.header, "=")
    key = os.environ.get("OPENAI_API_KEY")
    if key:
        headers = {"Authorization": f"Bearer {key}", **headers}
    client = Client(options.base_url or f"http://{options.host}:{options.port}", headers)
    model = options.model or await first_model(client)
    samples = make_samples(options)
    body = {name: getattr(options, name) for name in _SAMPLING if getattr(options, name) is not None}
    if options.ignore_eos or options.dataset_name in ("random", "prefix_repetition"):
        body["ignore_eos"] = True
    if options.logprobs is not None:
        chat = {"logprobs": True, "top_logprobs": options.logprobs}
        body |= chat if options.backend == "openai-chat" else {"logprobs": options.logprobs}
    name = options.served_model_name or model
    target = Target(
        client, options.backend, options.endpoint or BACKENDS[options.backend], name, body | options.extra_body
    )
    if options.backend == "openai-chat":
        samples = await as_texts(client, name, samples)
    if options.ready_check_timeout_sec > 0:
        await wait_ready(target, samples[0], options.ready_check_timeout_sec)
    for index in range(options.num_warmups):
        await target.ask(samples[index % len(samples)], f"warm-up-{index}")
    moments = start_times(len(samples), options.request_rate, options.burstiness, random.Random(options.seed))
    before = await drafts_of(client)
    gc.collect()
    gc.freeze()  # the prompts are not garbage: pauses would be measured as the server's
    outcomes, seconds = await run(target, samples, moments, options.max_concurrency, options.request_id_prefix)
    drafts = drafts_between(before, await drafts_of(client))
    await client.close()
    result = summarize(
        outcomes, seconds, metrics=options.metrics, percentiles=options.percentiles, goodput=options.limits
    )
    return _facts(options, model) | result | drafts


def _facts(options: argparse.Namespace, model: str) -> dict[str, Any]:
    return {
        "date": time.strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": options.backend,
        "backend": options.backend,
        "label": options.label,
        "model_id": model,
        "tokenizer_id": model,
        "num_prompts": options.num_prompts,
        **_pairs("metadata", options.metadata, "="),
        "request_rate": "inf" if math.isinf(options.request_rate) else options.request_rate,
        "burstiness": options.burstiness,
        "max_concurrency": options.max_concurrency,
    }


def _save(options: argparse.Namespace, result: Mapping[str, Any]) -> Path:
    limit = "" if options.max_concurrency is None else f"-concurrency{options.max_concurrency}"
    base = str(result["model_id"]).rpartition("/")[2]
    name = f"{options.label or options.backend}-{options.request_rate}qps{limit}-{base}-{result['date']}.json"
    path = Path(options.result_dir or ".", options.result_filename or name)
    path.parent.mkdir(parents=True, exist_ok=True)
    line = "\n" if options.append_result and path.is_file() and path.stat().st_size else ""
    with path.open("a" if options.append_result else "w", encoding="utf-8") as file:
        file.write(line + json.dumps(result))
    return path


def main(argv: Sequence[str]) -> int:
    """Measure, print the table, then one JSON line; 1 if a request failed."""
    options, _ = _parser().parse(argv)
    _check(options)
    result = asyncio.run(measure(options))
    errors = [error for error in result["errors"] if error]
    print(table(result, options.metrics, options.percentiles))
    if errors:
        print(f"first error: {errors[0]}")
    kept = result if options.save_detailed else {key: value for key, value in result.items() if key not in DETAILS}
    if options.save_result or options.append_result:
        print(f"saved: {_save(options, kept)}")
    print(json.dumps({key: value for key, value in result.items() if key not in DETAILS}))
    return 1 if errors else 0
