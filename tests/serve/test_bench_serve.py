"""`octavo bench serve` against a server whose every byte and pause is written here."""

from __future__ import annotations

import asyncio
import json
import random
import statistics
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from octavo.bench import serve as bench
from octavo.bench import serve_result
from octavo.bench.http_client import Client, EventSplitter, HttpError
from octavo.bench.serve_data import make_samples
from octavo.bench.serve_result import Outcome, percentile, summarize
from octavo.cli.main import main
from patience import patient

Handler = Callable[[str, bytes, asyncio.StreamWriter], Awaitable[None]]
PAUSE = 0.05


def _event(**fields: Any) -> bytes:
    data = b"data: " + json.dumps(fields).encode() + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(data), data)


_DONE = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def _json(status: int, body: Any) -> bytes:
    data = json.dumps(body).encode()
    return b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%s" % (status, len(data), data)


@asynccontextmanager
async def _serving(handler: Handler) -> AsyncIterator[str]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                length = next((int(line[15:]) for line in head.split("\r\n") if line.startswith("Content-Length")), 0)
                await handler(head.split()[1], await reader.readexactly(length), writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


_OF_A_REQUEST = {"num_drafts": 4, "num_draft_tokens": 8, "num_accepted_tokens": 6}


def _page(drafts: Mapping[str, int]) -> bytes:
    """/metrics: each of two engines has counted so much; of three accepted two lie at the first place."""
    lines = ["vllm:prompt_tokens_total 1.0"]
    for engine in "01":
        lines += [f'vllm:spec_decode_{name}_total{{engine="{engine}"}} {count}.0' for name, count in drafts.items()]
        for place, share in enumerate((2 / 3, 1 / 3) if drafts else ()):
            labels = f'engine="{engine}",position="{place}"'
            count = round(drafts["num_accepted_tokens"] * share)
            lines.append(f"vllm:spec_decode_num_accepted_tokens_per_pos_total{{{labels}}} {count}")
    data = "\n".join(lines).encode()
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(data), data)


class MockServer:
    """Completions of `max_tokens` tokens, PAUSE apart; a chat begins with a chunk that only names the role."""

    def __init__(self, fault: str = "", *, has_drafts: bool = False) -> None:
        self.has_drafts, self.drafts = has_drafts, {"num_drafts": 7, "num_draft_tokens": 9, "num_accepted_tokens": 3}
        self.fault, self.bodies, self.open, self.most_open = fault, [], 0, 0

    async def __call__(self, path: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        if path == "/v1/models":
            writer.write(_json(200, {"data": [{"id": "served"}]}))
            return
        if path == "/metrics":
            writer.write(_page(self.drafts if self.has_drafts else {}))
            return
        if path == "/detokenize":
            writer.write(_json(200, {"prompt": "some text"}))
            return
        request = json.loads(body)
        self.bodies.append(request)
        if self.fault == "refuse":
            writer.write(_json(400, {"error": {"message": "no such model"}}))
            return
        self.drafts = {name: count + _OF_A_REQUEST[name] for name, count in self.drafts.items()}
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        await self._stream(request, writer)
        self.open -= 1

    async def _stream(self, request: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        chat = "messages" in request
        writer.write(_HEAD)
        if chat:
            writer.write(_event(choices=[{"delta": {"role": "assistant", "content": ""}}]))
        count = request["max_completion_tokens" if chat else "max_tokens"]
        for index in range(count):
            await asyncio.sleep(PAUSE)
            if self.fault == "drop" and index == 1:
                writer.transport.abort()
                return
            if self.fault == "event" and index == 1:
                writer.write(_event(error={"message": "engine restarted"}))
                break
            writer.write(_event(choices=[{"delta": {"content": "x"}} if chat else {"text": "x"}]))
        else:
            writer.write(_event(choices=[], usage={"prompt_tokens": 5, "completion_tokens": count}))
        writer.write(_DONE)


@pytest.fixture
def measured(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Iterator[Callable[..., dict[str, Any]]]:
    """Run the command against a handler; the saved details with "printed" (the last line) and "code" beside them."""

    def run(handler: MockServer, *options: str) -> dict[str, Any]:
        async def both() -> int:
            async with _serving(handler) as url:
                argv = ["bench", "serve", "--base-url", url, "--save-detailed", "--save-result", *options]
                files = ["--result-dir", str(tmp_path), "--result-filename", "result.json"]
                return await asyncio.to_thread(main, [*argv, *files])

        code = asyncio.run(both())
        printed = capsys.readouterr()
        path = tmp_path / "result.json"
        saved = json.loads(path.read_text()) if path.exists() else {"stderr": printed.err}
        last = printed.out.strip().split("\n")[-1]
        return saved | {"code": code, "printed": json.loads(last) if last else {}}

    yield run


LENGTHS = ("--random-input-len", "5", "--random-output-len", "4")


def test_keys_and_figures_of_a_run(measured: Callable[..., dict[str, Any]]) -> None:
    result = measured(
        MockServer(), *LENGTHS, "--num-prompts", "6", "--max-concurrency", "2", "--goodput", "ttft:1000", "e2el:10000",
        "--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", "50,99.9", "--metadata", "a=b",
    )  # fmt: skip
    assert result["code"] == 0 and result["completed"] == 6 and result["failed"] == 0
    assert result["total_output_tokens"] == 24 and result["total_input_tokens"] == 30
    assert result["model_id"] == "served" and result["request_rate"] == "inf" and result["a"] == "b"
    for name in ("ttft", "tpot", "itl", "e2el"):
        assert {f"{word}_{name}_ms" for word in ("mean", "median", "std", "p50", "p99.9")} <= set(result)
    assert result["request_goodput"] == result["request_throughput"] == pytest.approx(6 / result["duration"])
    gaps = [gap for each in result["itls"] for gap in each]
    whole = [ttft + sum(itls) for ttft, itls in zip(result["ttfts"], result["itls"], strict=True)]
    assert result["median_ttft_ms"] >= 50 and result["median_e2el_ms"] >= 200 and min(whole) >= 4 * PAUSE
    assert result["mean_itl_ms"] == pytest.approx(1000 * sum(gaps) / 18)
    assert result["mean_e2el_ms"] == pytest.approx(1000 * sum(whole) / 6, rel=0.2)
    assert result["mean_e2el_ms"] <= 1000 * result["duration"] * 2 / 6, "two at a time, one behind the other"
    assert result["output_throughput"] == pytest.approx(24 / result["duration"])
    assert len(result["ttfts"]) == 6 and [len(each) for each in result["itls"]] == [3] * 6
    assert result["printed"]["completed"] == 6 and "itls" not in result["printed"]


def test_what_drafts_gave_is_told_where_there_are_any(
    measured: Callable[..., dict[str, Any]],
) -> None:
    """vLLM's keys, of the run alone: what was counted before it, of the first request too, is none of it."""
    options = (*LENGTHS, "--num-prompts", "3")
    plain = measured(MockServer(), *options)
    assert not [name for name in plain if name.startswith("spec_decode")]
    result = measured(MockServer(has_drafts=True), *options)
    told = {
        name.removeprefix("spec_decode_"): value for name, value in result.items() if name.startswith("spec_decode")
    }
    rates = told.pop("per_position_acceptance_rates")
    assert rates == pytest.approx([1.0, 0.5])
    assert told == {
        "acceptance_rate": pytest.approx(75.0),
        "acceptance_length": pytest.approx(2.5),
        "num_drafts": 2 * 3 * 4,
        "draft_tokens": 2 * 3 * 8,
        "accepted_tokens": 2 * 3 * 6,
    }
    page = serve_result.table(result, ["ttft"], [99.0])
    assert "Speculative Decoding" in page and "Position 1 acceptance (%):" in page
    assert "Speculative" not in serve_result.table(plain, ["ttft"], [99.0])


def test_an_empty_first_chunk_is_no_first_token(measured: Callable[..., dict[str, Any]]) -> None:
    result = measured(MockServer(), *LENGTHS, "--num-prompts", "2", "--backend", "openai-chat")
    assert result["completed"] == 2
    assert min(result["ttfts"]) >= PAUSE
    assert result["generated_texts"] == ["xxxx", "xxxx"]


def test_what_is_sent(measured: Callable[..., dict[str, Any]]) -> None:
    handler = MockServer()
    measured(
        handler, *LENGTHS, "--num-prompts", "3", "--random-prefix-len", "7", "--served-model-name", "other",
        "--top-k", "3", "--logprobs", "2", "--extra-body", '{"min_tokens": 1}', "--num-warmups", "1",
    )  # fmt: skip
    assert len(handler.bodies) == 5  # the first request, the warm-up, three prompts
    body = handler.bodies[-1]
    assert body["model"] == "other" and body["stream"] and body["stream_options"] == {"include_usage": True}
    assert body["ignore_eos"] and body["max_tokens"] == 4 and body["temperature"] == 0 and body["top_k"] == 3
    assert body["logprobs"] == 2 and body["min_tokens"] == 1
    assert len(body["prompt"]) == 12 and all(isinstance(token, int) for token in body["prompt"])
    assert len({tuple(each["prompt"][:7]) for each in handler.bodies}) == 1


def test_max_concurrency_holds(measured: Callable[..., dict[str, Any]]) -> None:
    handler = MockServer()
    measured(handler, *LENGTHS, "--num-prompts", "7", "--max-concurrency", "3")
    assert handler.most_open == 3


@pytest.mark.parametrize(
    ("fault", "error"),
    [("drop", "closed the connection"), ("event", "engine restarted")],
)
def test_failures_are_counted_and_named(measured: Callable[..., dict[str, Any]], fault: str, error: str) -> None:
    options = (*LENGTHS, "--num-prompts", "2", "--ready-check-timeout-sec", "0")
    result = measured(MockServer(fault), *options)
    assert result["code"] == 1 and result["completed"] == 0 and result["failed"] == 2
    assert all(error in each for each in result["errors"]), result["errors"]


def test_a_refused_first_request_ends_the_command(measured: Callable[..., dict[str, Any]]) -> None:
    result = measured(MockServer("refuse"), *LENGTHS, "--num-prompts", "2")
    assert result["code"] == 2 and "HTTP 400" in result["stderr"] and "no such model" in result["stderr"]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--goodput", "ttft"], "--goodput"),
        (["--goodput", "speed:3"], "speed"),
        (["--percentile-metrics", "ttft,x"], "x"),
        (["--metric-percentiles", "101"], "--metric-percentiles"),
        (["--request-rate", "0"], "--request-rate"),
        (["--max-concurrency", "0"], "--max-concurrency"),
        (["--extra-body", "[]"], "--extra-body"),
        (["--model", "m", "--num-prompts", "0"], "--num-prompts"),
        (["--model", "m", "--dataset-name", "sharegpt"], "--dataset-path"),
        (["--model", "m", "--dataset-name", "custom", "--dataset-path", "/nowhere"], "/nowhere"),
        (["--base-url", "localhost:80"], "localhost:80"),
        (["--port", "1"], "--base-url"),
    ],
)
def test_mistakes_in_options_are_one_line(capsys: pytest.CaptureFixture[str], options: list[str], named: str) -> None:
    assert main(["bench", "serve", *options]) == 2
    error = capsys.readouterr().err
    assert named in error and error.count("\n") == 1


def test_request_times_are_poisson_and_add_up() -> None:
    moments = bench.start_times(2000, 10.0, 1.0, random.Random(1))
    gaps = [b - a for a, b in zip([0.0, *moments], moments)]
    assert moments[-1] == pytest.approx(200.0)
    assert statistics.stdev(gaps) / statistics.fmean(gaps) == pytest.approx(1.0, abs=0.1)
    even = bench.start_times(100, 10.0, float("inf"), random.Random(1))
    assert even == pytest.approx([(index + 1) / 10 for index in range(100)])
    assert set(bench.start_times(5, float("inf"), 1.0, random.Random(1))) == {0.0}


def _samples(*argv: str) -> list[Any]:
    return make_samples(bench._parser().parse(argv)[0])


def test_prefix_repetition_shares_whole_prefixes() -> None:
    argv = ("--dataset-name", "prefix_repetition", "--num-prompts", "12", "--prefix-repetition-num-prefixes", "3")
    samples = _samples(*argv, "--prefix-repetition-prefix-len", "32", "--prefix-repetition-suffix-len", "8")
    prefixes = [tuple(sample.prompt[:32]) for sample in samples]
    assert sorted(prefixes.count(each) for each in set(prefixes)) == [4, 4, 4]
    assert all(sample.prompt_len == 40 for sample in samples)
    assert samples == _samples(*argv, "--prefix-repetition-prefix-len", "32", "--prefix-repetition-suffix-len", "8")


def test_random_lengths_vary_within_the_ratio() -> None:
    samples = _samples("--num-prompts", "200", "--random-input-len", "100", "--random-range-ratio", "0.2")
    lengths = [sample.prompt_len for sample in samples]
    assert min(lengths) >= 80 and max(lengths) <= 120 and len(set(lengths)) > 20


def test_files_of_prompts(tmp_path: Path) -> None:
    turns = [{"from": "human", "value": "Hello?"}, {"from": "gpt", "value": "y" * 40}]
    shared = tmp_path / "shared.json"
    shared.write_text(json.dumps([{"conversations": turns}, {"conversations": turns[:1]}]))
    (sample,) = _samples("--dataset-name", "sharegpt", "--dataset-path", str(shared))
    assert sample.prompt == "Hello?" and sample.output_len == 10
    custom = tmp_path / "custom.jsonl"
    custom.write_text('{"prompt": "a", "output_tokens": 3}\n\n{"prompt": "b"}\n')
    samples = _samples("--dataset-name", "custom", "--dataset-path", str(custom))
    assert sorted((each.prompt, each.output_len) for each in samples) == [("a", 3), ("b", 128)]


def test_statistics_by_hand() -> None:
    outcomes = [
        Outcome(start=0.0, ttft=0.1, latency=0.4, itl=[0.1, 0.1, 0.1], prompt_len=10, output_len=4),
        Outcome(start=0.5, ttft=0.3, latency=0.3, prompt_len=20, output_len=1),
        Outcome(start=0.0, prompt_len=99, output_len=3, error="broke"),
    ]
    result = summarize(
        outcomes, 2.0, metrics=["ttft", "tpot", "itl", "e2el"], percentiles=[25, 50], goodput={"ttft": 200.0}
    )
    assert (result["completed"], result["failed"]) == (2, 1)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (30, 5)
    assert result["request_goodput"] == 0.5 and result["output_throughput"] == 2.5
    assert result["total_token_throughput"] == 17.5 and result["max_concurrent_requests"] == 2
    assert result["mean_ttft_ms"] == pytest.approx(200) and result["p25_ttft_ms"] == pytest.approx(150)
    assert result["mean_tpot_ms"] == pytest.approx(100) and result["std_tpot_ms"] == 0
    assert result["median_itl_ms"] == pytest.approx(100) and result["median_e2el_ms"] == pytest.approx(350)
    assert percentile([], 50) == 0.0 and percentile([3.0], 99) == 3.0 and percentile([1, 2, 3, 4, 5], 75) == 4


@pytest.mark.parametrize(("num_tokens", "peak"), [(4, 3.0), (12, 9.0)])
def test_the_peak_counts_tokens_and_not_chunks(num_tokens: int, peak: float) -> None:
    outcome = Outcome(ttft=0.1, latency=1.4, itl=[0.1, 0.1, 1.1], prompt_len=10, output_len=num_tokens)
    result = summarize([outcome], 1.4, metrics=[], percentiles=[], goodput={})
    assert result["max_output_tokens_per_s"] == peak


def test_events_survive_any_split() -> None:
    body = b': hi\n\ndata: {"a":1}\r\n\r\nevent: x\ndata: two\ndata: lines\n\ndata:[DONE]\n\nrest'
    for cut in range(len(body)):
        splitter = EventSplitter()
        assert splitter.feed(body[:cut]) + splitter.feed(body[cut:]) == [b'{"a":1}', b"two\nlines", b"[DONE]"]


RESPONSES = {
    "length": b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello",
    "chunks": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhe\r\n3;x=y\r\nllo\r\n0\r\nT: v\r\n\r\n",
    "continue": b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello",
}


@pytest.mark.parametrize("name", RESPONSES)
def test_responses_survive_any_split_and_the_connection_is_kept(name: str) -> None:
    data = RESPONSES[name]
    connections = set()

    async def handler(path: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        connections.add(writer.get_extra_info("peername"))
        cut = int(path[1:])
        writer.write(data[:cut])
        await writer.drain()
        await asyncio.sleep(0.001)
        writer.write(data[cut:])

    async def run() -> None:
        async with _serving(handler) as url:
            client = Client(url)
            for cut in range(1, len(data)):
                response = await asyncio.wait_for(client.request("GET", f"/{cut}"), patient(5))
                assert (response.status, response.body) == (200, b"hello")
            await client.close()

    asyncio.run(run())
    assert len(connections) == 1


@pytest.mark.parametrize(
    "data", [b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\nshort", b"nonsense\r\n\r\n", b"", b"HTTP/1.1 200"]
)
def test_broken_responses_raise(data: bytes) -> None:
    async def handler(path: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(data)
        writer.close()

    async def run() -> None:
        async with _serving(handler) as url:
            with pytest.raises(HttpError):
                await asyncio.wait_for(Client(url).request("GET", "/"), patient(5))

    asyncio.run(run())


def test_a_connection_that_the_server_closed_between_requests_is_no_failure() -> None:
    async def handler(path: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(RESPONSES["length"])
        writer.close()  # without having said so

    async def run() -> None:
        async with _serving(handler) as url:
            client = Client(url)
            for _ in range(20):
                assert (await client.request("GET", "/")).body == b"hello"

    asyncio.run(run())


def test_false_from_the_callback_drops_the_connection() -> None:
    gone = asyncio.Event()

    async def handler(path: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(_HEAD + _event(choices=[]))
        with pytest.raises(ConnectionError):
            while True:
                await asyncio.sleep(0.01)
                writer.write(_event(choices=[]))
                await writer.drain()
        gone.set()

    async def run() -> None:
        async with _serving(handler) as url:
            response = await Client(url).request("POST", "/", b"{}", on_body=lambda data, now: False)
            assert response.status == 200
            await asyncio.wait_for(gone.wait(), patient(5))

    asyncio.run(run())
