"""Bytes that are no request, or an unkind one, over raw sockets: each has its answer, and the server goes on."""

from __future__ import annotations

import json
import re
import socket
import time

import pytest

from patience import patient
from server_rig import RunningServer, StartServer

BODY = b'{"model":"octavo-tiny","prompt":"hi","max_tokens":1}'
POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
GET = b"GET /health HTTP/1.1\r\nHost: x\r\n"
CLOSE = b"Connection: close\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"


def many_headers(count: int, size: int) -> bytes:
    return b"".join(b"a%d: %s\r\n" % (i, b"v" * size) for i in range(count))


# name -> (bytes, status, code)
CASES: dict[str, tuple[bytes, int, str]] = {
    "malformed": (b"HELLO\r\n\r\n", 400, "invalid_http"),
    "nul in the method": (b"GE\0T / HTTP/1.1\r\nHost: x\r\n\r\n", 400, "invalid_http"),
    "tls": (bytes.fromhex("16030100c8010000c40303") + b"x" * 40, 400, "invalid_http"),
    "http/0.9": (b"GET /\r\n", 400, "invalid_http"),
    "h2 preface": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505, "http_version"),
    "http/2.0": (b"GET /health HTTP/2.0\r\nHost: x\r\n\r\n", 505, "http_version"),
    "no host": (b"GET /health HTTP/1.1\r\n" + CLOSE + b"\r\n", 400, "invalid_host"),
    "two hosts": (GET + b"Host: y\r\n" + CLOSE + b"\r\n", 400, "invalid_host"),
    **{
        f"host with {char!r}": (b"GET /health HTTP/1.1\r\nHost: a%sb\r\n%s\r\n" % (char, CLOSE), 400, "invalid_host")
        for char in (b"/", b"?", b"@", b"\\", b" ")
    },
    "length and chunks": (
        POST + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400, "invalid_http",
    ),
    "two lengths": (POST + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabcd", 400, "invalid_http"),
    "negative length": (POST + b"Content-Length: -1\r\n\r\n", 400, "invalid_http"),
    "length with plus": (POST + b"Content-Length: +5\r\n\r\nabcde", 400, "invalid_http"),
    "length of 20 digits": (POST + b"Content-Length: 99999999999999999999\r\n\r\n", 400, "invalid_http"),
    "coding gzip": (POST + b"Transfer-Encoding: gzip\r\n\r\n", 400, "invalid_http"),
    "coding xchunked": (POST + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n", 400, "invalid_http"),
    "coding after chunked": (POST + b"Transfer-Encoding: chunked, gzip\r\n\r\n0\r\n\r\n", 400, "invalid_http"),
    "coding with a space": (POST + b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n", 400, "invalid_http"),
    "huge chunk size": (CHUNKED + b"FFFFFFFFFFFFFFFFFF\r\n", 400, "invalid_http"),
    "chunk extension": (CHUNKED + b"5;" + b"e" * 3000 + b"\r\nabcde\r\n0\r\n\r\n", 400, "invalid_http"),
    "chunk line end": (CHUNKED + b"5\r\nabcdeXX0\r\n\r\n", 400, "invalid_http"),
    "head over 32 KB": (GET + many_headers(40, 1000) + b"\r\n", 431, "headers_too_large"),
    "head without end": (GET + b"a: " + b"v" * 70_000, 431, "headers_too_large"),
    "101 headers": (GET + many_headers(101, 1) + b"\r\n", 431, "headers_too_large"),
    "header over 16 KB": (GET + b"a: " + b"v" * 17_000 + b"\r\n\r\n", 431, "headers_too_large"),
    "target over 32 KB": (b"GET /" + b"a" * 40_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 431, "headers_too_large"),
    "nul in a value": (GET + b"a: b\0c\r\n\r\n", 400, "invalid_http"),
    "cr in a value": (GET + b"a: b\rc\r\n\r\n", 400, "invalid_http"),
    "folded value": (GET + b"a: b\r\n c\r\n\r\n", 400, "invalid_http"),
    "long body": (POST + CLOSE + b"Content-Length: 9000000\r\n\r\n", 413, "body_too_large"),
    "long body, asked first": (
        POST + CLOSE + b"Content-Length: 9000000\r\nExpect: 100-continue\r\n\r\n", 413, "body_too_large",
    ),
    "gzip": (POST + CLOSE + b"Content-Encoding: gzip\r\nContent-Length: 3\r\n\r\nabc", 415, "unsupported_encoding"),
    "unknown method": (b"FOO /health HTTP/1.1\r\nHost: x\r\n\r\n", 405, "method_not_allowed"),
    "connect": (b"CONNECT x:80 HTTP/1.1\r\nHost: x\r\n\r\n", 400, "invalid_http"),
    "double slash": (b"GET //v1/models HTTP/1.1\r\nHost: x\r\n" + CLOSE + b"\r\n", 404, "not_found"),
    "dots": (b"GET /v1/%2e%2e/admin HTTP/1.1\r\nHost: x\r\n" + CLOSE + b"\r\n", 404, "not_found"),
    "slash at the end": (b"GET /v1/models/ HTTP/1.1\r\nHost: x\r\n" + CLOSE + b"\r\n", 404, "not_found"),
    "bytes in the target": (b"GET /\xff HTTP/1.1\r\nHost: x\r\n\r\n", 400, "invalid_http"),
}  # fmt: skip


def answer(server: RunningServer, data: bytes) -> tuple[int, dict[bytes, bytes], bytes]:
    """Status, headers and body of the only response."""
    head, _, body = server.raw(data).partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    match = re.fullmatch(rb"HTTP/1\.1 (\d{3}) .*", lines[0])
    assert match, head
    return int(match[1]), {k.lower(): v.strip() for k, _, v in (line.partition(b":") for line in lines[1:])}, body


@pytest.mark.parametrize("name", CASES)
def test_bad_bytes(scripted_server: RunningServer, name: str) -> None:
    data, wanted, code = CASES[name]
    status, headers, body = answer(scripted_server, data)
    error = json.loads(body)["error"]
    assert (status, error["code"]) == (wanted, code)
    assert set(error) == {"message", "type", "param", "code"} and len(error["message"]) <= 300
    if status == 405:
        assert headers[b"allow"]


@pytest.mark.parametrize("kind", ["", "text/plain", "application/json; charset=utf-16", "multipart/form-data"])
def test_media_types(scripted_server: RunningServer, kind: str) -> None:
    reply = scripted_server.post("/v1/completions", BODY, headers={"Content-Type": kind})
    assert (reply.status, reply.json()["error"]["code"]) == (415, "unsupported_media_type")


def test_a_body_that_was_announced_is_asked_for(scripted_server: RunningServer) -> None:
    head = POST + CLOSE + b"Content-Length: %d\r\nExpect: 100-continue\r\n\r\n" % len(BODY)
    assert scripted_server.raw(head + BODY).startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n")


def test_a_body_is_cut_off_by_count(start_server: StartServer) -> None:
    server = start_server("--max-body-bytes", "2048")
    chunk = b"400\r\n" + b" " * 1024 + b"\r\n"
    status, _, body = answer(server, CHUNKED + chunk * 3)
    assert (status, json.loads(body)["error"]["code"]) == (413, "body_too_large")


def test_wrong_methods(scripted_server: RunningServer) -> None:
    for method in ("DELETE", "PUT", "PATCH", "OPTIONS", "TRACE"):
        reply = scripted_server.request(method, "/v1/completions")
        assert (reply.status, reply.headers["allow"]) == (405, "POST")
    assert scripted_server.get("/v1/completions").status == 405
    assert scripted_server.request("HEAD", "/health").status == 200


def test_pipelined_requests_are_answered_in_order_up_to_a_cap(scripted_server: RunningServer) -> None:
    data = scripted_server.raw(
        b"".join(b"GET /%d HTTP/1.1\r\nHost: x\r\nX-Request-Id: r%d\r\n\r\n" % (i, i) for i in range(10_000))
    )
    ids = [int(number) for number in re.findall(rb"x-request-id: r(\d+)\r\n", data)]
    assert ids[:101] == list(range(101)) and len(ids) <= 102


def test_request_ids_are_echoed_if_they_are_plain(scripted_server: RunningServer) -> None:
    assert scripted_server.get("/ready", headers={"X-Request-Id": "a.b-c_1"}).headers["x-request-id"] == "a.b-c_1"
    for bad in ("a b", "a" * 129, "é".encode().decode("latin-1"), "a/b"):
        own = scripted_server.get("/ready", headers={"X-Request-Id": bad}).headers["x-request-id"]
        assert re.fullmatch("[0-9a-f]{32}", own)


def test_two_requests_with_one_id_do_not_meet(scripted_server: RunningServer) -> None:
    body = {"model": "octavo-tiny", "prompt": "hi", "max_tokens": 1, "request_id": "same"}
    replies = [scripted_server.post("/v1/completions", body, headers={"X-Request-Id": "same"}) for _ in range(2)]
    assert [reply.status for reply in replies] == [200, 200]
    assert replies[0].json()["id"] != replies[1].json()["id"]


def test_clocks(start_server: StartServer) -> None:
    """A head and a body that do not arrive, and a connection that says nothing."""
    server = start_server("--header-timeout", "0.3", "--body-timeout", "0.3", "--idle-timeout", "0.3")
    for data, code in ((GET, b"header_timeout"), (POST + b"Content-Length: 5\r\n\r\nab", b"body_timeout")):
        began = time.monotonic()
        received = server.raw(data)
        assert received.startswith(b"HTTP/1.1 408") and code in received
        assert 0.25 < time.monotonic() - began < patient(3)
    assert server.raw(b"") == b""
    began = time.monotonic()
    assert server.raw(GET + b"\r\n").startswith(b"HTTP/1.1 200")
    assert time.monotonic() - began < patient(3)


def test_too_many_connections(start_server: StartServer) -> None:
    server = start_server("--max-connections", "4")
    held = [socket.create_connection((server.host, server.port)) for _ in range(4)]
    time.sleep(0.1)
    try:
        received = server.raw(GET + b"\r\n")
        assert received.startswith(b"HTTP/1.1 503") and b"retry-after: 1" in received
    finally:
        for connection in held:
            connection.close()
    time.sleep(0.1)
    assert server.get("/health").status == 200


def test_no_cors_headers_unless_asked_for(scripted_server: RunningServer, start_server: StartServer) -> None:
    origin = {"Origin": "https://example.org"}
    reply = scripted_server.get("/version", headers=origin)
    assert "access-control-allow-origin" not in reply.headers
    assert scripted_server.post("/reset_prefix_cache", {}, headers=origin).status == 403
    allowed = start_server("--cors-origins", "https://example.org")
    assert allowed.get("/version", headers=origin).headers["access-control-allow-origin"] == "https://example.org"
    assert "access-control-allow-origin" not in allowed.get("/version", headers={"Origin": "https://evil.org"}).headers


def test_a_browser_may_send_the_headers_of_openais_client(start_server: StartServer) -> None:
    allowed = start_server("--cors-origins", "https://example.org")
    headers = {
        "Origin": "https://example.org",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type,x-stainless-lang,x-stainless-os",
    }
    reply = allowed.request("OPTIONS", "/v1/chat/completions", headers=headers)
    assert reply.status == 200 and "x-stainless-os" in reply.headers["access-control-allow-headers"]
    shown = allowed.get("/version", headers={"Origin": "https://example.org"}).headers["access-control-expose-headers"]
    assert {"retry-after", "x-should-retry"} <= set(shown.replace(",", " ").split())
    assert allowed.request("OPTIONS", "/version", headers=headers | {"Origin": "https://evil.org"}).status == 400


@pytest.fixture(scope="module", autouse=True)
def still_alive(scripted_server: RunningServer) -> object:
    """After all this, nothing was logged as ours and the server answers."""
    yield
    assert scripted_server.get("/health").status == 200
    assert "Traceback" not in scripted_server.stderr()
