"""The router over servers that do what a test says: hang, break off, answer late (D); and its command line."""

from __future__ import annotations

import contextlib
import functools
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from octavo.router.main import main
from patience import patient
from ports import free_port
from router_rig import Process, until

EVENT = b'data: {"choices": [{"index": 0, "text": "a"}]}\n\n'
LOST = b'data: {"error": {"message": "lost", "type": "server_error", "param": null, "code": "kv_load_failed"}}\n\n'
BLOCKS = {"do_remote_prefill": True, "transfer_id": "x"}


class Fake(ThreadingHTTPServer):
    """A server: `answer` says what it does with a request; while it hangs it says nothing to anybody."""

    daemon_threads = True

    def __init__(self, answer: Callable[[_Handler, dict[str, Any]], None]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answer, self.asked = answer, list[dict[str, Any]]()
        self.released, self.keys = list[str](), list[str | None]()  # transfer ids, and who let them in
        self.standing = {"num_load_failures": 0, "refusal": ""}
        self.goes_on = threading.Event()
        self.goes_on.set()
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Fake
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.server.goes_on.wait()
        self.reply(200, self.server.standing if self.path == "/kv_transfer" else {})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path == "/kv_transfer/release":
            self.server.goes_on.wait()
            self.server.released += body["transfer_ids"]
            self.server.keys.append(self.headers.get("authorization"))
            self.reply(200, {"released": len(body["transfer_ids"])})
            return
        self.server.asked.append(body)
        self.server.goes_on.wait()
        with contextlib.suppress(OSError):
            self.server.answer(self, body)

    def reply(self, status: int, value: dict[str, Any]) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        with contextlib.suppress(OSError):
            self.wfile.write(data)

    def begin(self) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream; charset=utf-8")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()

    def say(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    def break_off(self) -> None:
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def prefills(handler: _Handler, body: dict[str, Any]) -> None:
    handler.reply(200, {"kv_transfer_params": {**BLOCKS, "transfer_id": body["kv_transfer_params"]["transfer_id"]}})


def decodes(handler: _Handler, body: dict[str, Any]) -> None:
    if not body.get("stream"):
        handler.reply(200, {"text": body["prompt"], "had": "kv_transfer_params" in body})
        return
    handler.begin()
    handler.say(b": keep-alive\n\n")
    handler.say(EVENT + b"data: [DONE]\n\n")
    handler.say(b"")


Routed = tuple[Process, list[Fake], list[Fake]]


@pytest.fixture
def routed(tmp_path: Path) -> Iterator[Callable[..., Routed]]:
    """A router before so many fake servers."""
    made: list[Any] = []

    def make(*flags: str, num_prefill: int = 1, num_decode: int = 2) -> Routed:
        first, second = [Fake(prefills) for _ in range(num_prefill)], [Fake(decodes) for _ in range(num_decode)]
        urls = [part for each in first for part in ("--prefill", each.url)]
        urls += [part for each in second for part in ("--decode", each.url)]
        looks = ["--health-interval", "0.1", "--health-timeout", "60"]  # on a busy machine one of these is slow, too
        router = Process(tmp_path / "router.log", free_port(), "router", *urls, *looks, *flags)
        made.extend([*first, *second, router])
        router.wait("/health")
        until(router, "octavo_router_server_up", num_prefill + num_decode)
        return router, first, second

    yield make
    for each in made:
        if isinstance(each, Fake):
            each.goes_on.set()
            each.shutdown()
            each.server_close()
        else:
            each.kill()


def ask(router: Process, prompt: str, **fields: Any) -> tuple[int, Any]:
    return router.ask("POST", "/v1/completions", {"prompt": prompt, **fields})


def together(router: Process, count: int) -> list[tuple[int, Any]]:
    """The answers to so many requests at once."""
    answers: list[tuple[int, Any]] = [(0, None)] * count

    def one(index: int) -> None:
        answers[index] = ask(router, f"{index} of many")

    threads = [threading.Thread(target=one, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


def soon() -> tuple[str, str]:
    """For routers that are to notice a server that hangs."""
    return "--health-timeout", str(patient(1.5))


def test_D_8_requests_that_wait_for_a_server_which_hangs_are_taken_from_it(routed):
    router, first, second = routed(*soon(), num_prefill=2)
    for hung in (first[0], second[0]):
        hung.goes_on.clear()
        began = time.monotonic()
        answers = together(router, 8)
        assert [status for status, _ in answers] == [200] * 8 and hung.asked
        assert [body["text"] for _, body in answers] == [f"{index} of many" for index in range(8)]
        assert time.monotonic() - began < patient(10), "not the 600 s of --timeout"
        until(router, "octavo_router_server_up", 3)
        hung.goes_on.set()
        until(router, "octavo_router_server_up", 4)


def test_D_8_all_prefill_servers_hang_and_the_decode_server_computes_alone(routed):
    router, first, second = routed(*soon(), num_decode=1)
    first[0].goes_on.clear()
    assert ask(router, "p") == (200, {"text": "p", "had": False})
    second[0].goes_on.clear()
    status, body = ask(router, "p")
    assert status == 503 and body["error"]["code"] == "no_server" and "is down" in body["error"]["message"]


def test_D_8_a_stream_that_has_begun_ends_with_an_error_when_its_server_hangs_or_dies(routed):
    router, _, second = routed(*soon(), num_decode=1)

    def hangs(handler: _Handler, body: dict[str, Any]) -> None:
        handler.begin()
        handler.say(EVENT)
        handler.server.goes_on.clear()
        handler.server.goes_on.wait()

    def dies(handler: _Handler, body: dict[str, Any]) -> None:
        handler.begin()
        handler.say(EVENT)
        handler.break_off()

    for ends in (hangs, dies):
        second[0].answer = ends
        status, text = ask(router, "p", stream=True)
        events = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
        assert status == 200 and json.loads(events[0])["choices"]
        assert len(events) == 2 and json.loads(events[1])["error"]["code"] == "upstream_failed"
        second[0].goes_on.set()
        until(router, "octavo_router_server_up", 2)
    assert "Traceback" not in router.log.read_text()


def test_D_8_half_an_event_of_a_server_that_dies_is_not_passed_on(routed):
    router, _, second = routed(num_decode=1)

    def dies(handler: _Handler, body: dict[str, Any]) -> None:
        handler.begin()
        handler.say(EVENT + EVENT[:9])
        handler.say(EVENT[9:] + EVENT[:20])
        handler.break_off()

    second[0].answer = dies
    status, text = ask(router, "p", stream=True)
    events = [json.loads(part.removeprefix("data: ")) for part in text.split("\n\n") if part]
    assert status == 200 and [list(event) for event in events] == [["choices"], ["choices"], ["error"]]
    assert events[-1]["error"]["code"] == "upstream_failed"


FAILED = b'event: response.failed\ndata: {"type": "response.failed", "sequence_number": 0, "response": {}}\n\n'
OPENED = b'event: response.created\ndata: {"type": "response.created", "sequence_number": 0}\n\n'


def test_C_7_a_response_that_fails_before_its_first_word_is_computed_also_as_a_stream(routed):
    router, (first,), (second,) = routed(num_decode=1)

    def loses(handler: _Handler, body: dict[str, Any]) -> None:
        handler.begin()
        if "kv_transfer_params" not in body:
            handler.say(OPENED)
        elif body["input"] == "slowly":
            handler.say(FAILED)
            handler.say(LOST)
        else:
            handler.say(FAILED + LOST)
        handler.say(b"")

    second.answer = loses
    for said in ("slowly", "at once"):
        status, text = router.ask("POST", "/v1/responses", {"input": said, "stream": True, "max_output_tokens": 9})
        assert status == 200 and text == OPENED.decode()
    told_of(first, 2)
    own = b'data: {"error": {"message": "no", "type": "invalid_request_error", "param": null, "code": "x"}}\n\n'
    second.answer = lambda handler, body: (handler.begin(), handler.say(FAILED + own), handler.say(b""))[0]
    status, text = router.ask("POST", "/v1/responses", {"input": "x", "stream": True})
    assert status == 200 and text == (FAILED + own).decode(), "what is the request's fault is the client's to hear"
    asked = [body for body in first.asked if body.get("input") == "at once"]
    assert asked[0]["max_output_tokens"] == 1 and asked[0]["stream"] is False


def test_D_4_who_takes_over_computes_what_another_may_have_fetched(routed):
    """And a server that is late with one request, and well, is not left alone for it."""
    router, _, second = routed("--timeout", "0.5")
    late = threading.Event()
    for fake in second:
        fake.answer = lambda handler, body: decodes(handler, body) if late.is_set() else late.wait()
    num_offered = 0
    while not num_offered:  # the prefill server may be late by itself: then nothing is offered
        late.clear()
        for fake in second:
            fake.asked.clear()
        answers = list[tuple[int, Any]]()
        thread = threading.Thread(target=lambda: answers.append(ask(router, "p")))  # noqa: B023 - it ends in this round
        thread.start()
        deadline = time.monotonic() + patient(20)
        while not (second[0].asked and second[1].asked):
            assert time.monotonic() < deadline
            late.wait(0.01)
        late.set()
        thread.join()
        num_offered = sum("kv_transfer_params" in body for body in [*second[0].asked, *second[1].asked])
    assert answers[0][0] in (200, 503) and num_offered == 1
    until(router, "octavo_router_server_up", 3)
    assert "is down" not in router.log.read_text()


def test_D_4_blocks_that_nobody_can_have_asked_for_go_to_the_next_server(routed):
    router, _, second = routed("--health-interval", "3600")  # so that the router finds out by a request
    second[0].shutdown()
    second[0].server_close()
    for _ in range(3):
        assert ask(router, "p") == (200, {"text": "p", "had": True})


def test_C_7_blocks_that_are_lost_before_the_first_word_are_computed_also_for_a_stream(routed):
    router, _, second = routed(num_decode=1)

    def loses(handler: _Handler, body: dict[str, Any]) -> None:
        if "kv_transfer_params" not in body:
            decodes(handler, body)
        elif body.get("stream"):
            handler.begin()
            handler.say(b": keep-alive\n\n" + LOST)
            handler.say(b"")
        else:
            handler.reply(500, {"error": {"code": "kv_load_failed"}})

    second[0].answer = loses
    assert ask(router, "p") == (200, {"text": "p", "had": False})
    status, text = ask(router, "p", stream=True)
    assert status == 200 and "error" not in text and text.endswith("data: [DONE]\n\n") and EVENT.decode() in text
    second[0].answer = lambda handler, body: handler.reply(500, {"error": {"code": "broken", "message": "for good"}})
    assert ask(router, "p") == (500, {"error": {"code": "broken", "message": "for good"}})  # its own words


def told_of(first: Fake, count: int) -> None:
    """The prefill server hears that none of its offers is fetched any more, of so many."""
    ids = {body["kv_transfer_params"]["transfer_id"] for body in first.asked}
    deadline = time.monotonic() + patient(20)
    while len(first.released) < count:
        assert time.monotonic() < deadline, first.released
        time.sleep(0.01)
    assert len(first.released) == count and set(first.released) <= ids


def test_P_C_5_offers_whose_decode_server_died_or_failed_are_released(routed):
    router, (first,), (second,) = routed(num_decode=1)

    def fails(handler: _Handler, body: dict[str, Any]) -> None:
        if "kv_transfer_params" in body:
            handler.reply(500, {"error": {"code": "kv_load_failed"}})
        else:
            decodes(handler, body)

    def refuses(handler: _Handler, body: dict[str, Any]) -> None:
        handler.reply(400, {"error": {"message": "no", "type": "invalid_request_error"}})

    assert ask(router, "p")[0] == 200  # it has fetched them
    second.answer = lambda handler, body: handler.break_off()
    assert ask(router, "p")[0] == 503
    told_of(first, 1)
    until(router, "octavo_router_server_up", 2)
    for answer, status in ((fails, 200), (refuses, 400)):
        second.answer = answer
        assert ask(router, "p")[0] == status
    told_of(first, 3)
    second.shutdown()
    second.server_close()
    until(router, "octavo_router_server_up", 1)
    num_asked = len(first.asked)
    assert ask(router, "p")[0] == 503 and len(first.asked) == num_asked, "nothing is computed for nobody"
    assert first.asked[0]["kv_transfer_params"]["transfer_id"] not in first.released


def test_P_D_6_offers_for_a_client_that_has_gone_are_released(routed):
    """While its prompt is computed, and while a decode server has not begun to answer."""
    router, (first,), (second,) = routed(num_decode=1)
    for count, server in ((1, first), (2, second)):
        reached, goes_on, answer = threading.Event(), threading.Event(), server.answer

        def waits(handler: _Handler, body: dict[str, Any], *events: threading.Event) -> None:
            events[0].set()
            events[1].wait()

        server.answer = functools.partial(lambda *args: waits(*args[2:], *args[:2]), reached, goes_on)
        with socket.create_connection(("127.0.0.1", router.port)) as sock:
            body = b'{"prompt": "p"}'
            sock.sendall(
                b"POST /completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer k\r\ncontent-length: %d\r\n\r\n"
                % len(body)
                + body
            )
            assert reached.wait(patient(20))
        told_of(first, count)
        assert set(first.keys) == {"Bearer k"}, "the one who asked is who releases"
        server.answer = answer
        goes_on.set()


def test_P_offers_of_a_prefill_server_that_hung_are_released_when_it_goes_on(routed):
    router, (first,), _ = routed(*soon(), num_decode=1)
    first.goes_on.clear()
    assert ask(router, "p") == (200, {"text": "p", "had": False})
    first.goes_on.set()
    told_of(first, 1)


def test_an_answer_has_one_date_and_metrics_have_no_gauges_of_when_they_were_made(routed):
    router, _, _ = routed()
    connection = http.client.HTTPConnection("127.0.0.1", router.port, timeout=patient(20))
    with contextlib.closing(connection):
        connection.request("POST", "/v1/completions", '{"prompt": "p"}', {"content-type": "application/json"})
        response = connection.getresponse()
        names = [name.lower() for name, _ in response.getheaders()]
        assert response.status == 200 and names.count("date") == 1 and names.count("content-length") == 1
    assert "_created" not in router.ask("GET", "/metrics")[1]
    assert router.metric("octavo_router_requests_total") >= 1


def test_clients_that_leave_make_no_noise(routed):
    router, _, second = routed(num_decode=1)

    def floods(handler: _Handler, body: dict[str, Any]) -> None:
        handler.begin()
        for _ in range(2000):
            handler.say(EVENT * 20)

    second[0].answer = floods
    for _ in range(5):
        with socket.create_connection(("127.0.0.1", router.port)) as sock:
            body = b'{"prompt": "p", "stream": true}'
            head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
            sock.sendall(head.encode() + body)
            sock.recv(1)
    until(router, "octavo_router_open_requests", 0)
    assert "socket.send()" not in router.log.read_text() and "Traceback" not in router.log.read_text()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--decode foo", r"decode='foo': must name a server .* http://host:port; change --decode"),
        ("--prefill 127.0.0.1:1 --decode http://a:2", r"prefill='127\.0\.0\.1:1': must name a server"),
        ("--decode http://a", r"decode='http://a': must name a server"),
        ("--decode http://a:99999", r"decode='http://a:99999': must name a server"),
        ("--decode http://a:0", r"decode='http://a:0': must name a server"),
        ("--decode https://a:1", r"decode='https://a:1': must name a server that speaks plain HTTP"),
        ("--decode http://a:1/v1", r"decode='http://a:1/v1': must name a server"),
        ("--decode http://a:1 --decode http://a:1", r"decode='http://a:1': is named twice; drop one --decode"),
        ("--decode http://a:1 --timeout -1", r"timeout=-1\.0: must be greater than 0, .*; change --timeout"),
        ("--decode http://a:1 --timeout inf", r"timeout=inf: must be greater than 0"),
        ("--decode http://a:1 --connect-timeout nan", r"connect_timeout=nan: must be greater than 0"),
        ("--decode http://a:1 --health-interval 0", r"health_interval=0\.0: must be greater than 0"),
        ("--decode http://a:1 --retries -4", r"retries=-4: must be from 0 to 100; change --retries"),
        ("--decode http://a:1 --port 99999", r"port=99999: must be from 0 to 65535; change --port"),
        ("--decode http://a:1 --host 192.0.2.1", r"host='192\.0\.2\.1': cannot be bound"),
        ("--decode http://a:1 --tiemout 1", r"unknown flag --tiemout; did you mean --timeout\?"),
        ("--decode http://a:1 -- --model x", r"what stands behind -- is for the servers of --start-pair"),
        ("--start-pair --max-restarts -1", r"max_restarts=-1: must be from 0 to 1000"),
        ("--start-pair -- --kv-transfer-config {}", r"--kv-transfer-config behind --: --start-pair sets it"),
        ("--start-pair -- --kv_transfer_config.kv_role x", r"--kv_transfer_config\.kv_role behind --"),
        ("--start-pair -- --port=1", r"--port behind --: --start-pair sets it"),
        ("--start-pair -- --uds x", r"--uds behind --"),
        ("--start-pair -- --ssl-keyfile x", r"--ssl-keyfile behind --"),
    ],
)
def test_a_wrong_argument_is_refused_in_one_line_that_names_it(line: str, said: str) -> None:
    with pytest.raises(ValueError, match=said) as caught:
        main(line.split())
    assert "\n" not in str(caught.value)
