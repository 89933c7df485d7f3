"""Bytes that are no request, or an unkind one, over raw sockets: each has its answer, and the server goes on."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from octavo.serve.http.protocol import MAX_LINGER_BYTES
from patience import patient
from server_rig import SRC, RunningServer, StartServer

BODY = b'{"model":"octavo-tiny","prompt":"hi","max_tokens":1}'
POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
GET = b"GET /version HTTP/1.1\r\nHost: localhost\r\n"
CLOSE = b"Connection: close\r\n"
PATH = os.pathsep.join([str(SRC), str(Path(__file__).parent)])
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"


def many_headers(count: int, size: int) -> bytes:
    return b"".join(b"a%d: %s\r\n" % (i, b"v" * size) for i in range(count))


# name -> (bytes, status, code)
CASES: dict[str, tuple[bytes, int, str]] = {
    "malformed": (b"HELLO\r\n\r\n", 400, "invalid_http"),
    "nul in the method": (b"GE\0T / HTTP/1.1\r\nHost: localhost\r\n\r\n", 400, "invalid_http"),
    "tls": (bytes.fromhex("16030100c8010000c40303") + b"x" * 40, 400, "invalid_http"),
    "http/0.9": (b"GET /\r\n", 400, "invalid_http"),
    "h2 preface": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505, "http_version"),
    "http/2.0": (b"GET /health HTTP/2.0\r\nHost: localhost\r\n\r\n", 505, "http_version"),
    "no host": (b"GET /health HTTP/1.1\r\n" + CLOSE + b"\r\n", 400, "invalid_host"),
    "two hosts": (GET + b"Host: y\r\n" + CLOSE + b"\r\n", 400, "invalid_host"),
    **{
        f"host with {char!r}": (b"GET /health HTTP/1.1\r\nHost: a%sb\r\n%s\r\n" % (char, CLOSE), 400, "invalid_host")
        for char in (b"/", b"?", b"@", b"\\", b" ")
    },
    "length and chunks": (
        POST + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        400,
        "invalid_http",
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
    "chunk extension without end": (CHUNKED + b"5;" + b"e" * 3000, 400, "invalid_http"),
    "second chunk's": (CHUNKED + b"2\r\nab\r\n5;" + b"e" * 3000, 400, "invalid_http"),
    "chunk line end": (CHUNKED + b"5\r\nabcdeXX0\r\n\r\n", 400, "invalid_http"),
    "head over 32 KB": (GET + many_headers(40, 1000) + b"\r\n", 431, "headers_too_large"),
    "head without end": (GET + b"a: " + b"v" * 70_000, 431, "headers_too_large"),
    "101 headers": (GET + many_headers(101, 1) + b"\r\n", 431, "headers_too_large"),
    "header over 16 KB": (GET + b"a: " + b"v" * 17_000 + b"\r\n\r\n", 431, "headers_too_large"),
    "target over 32 KB": (b"GET /" + b"a" * 40_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", 431, "headers_too_large"),
    "nul in a value": (GET + b"a: b\0c\r\n\r\n", 400, "invalid_http"),
    "cr in a value": (GET + b"a: b\rc\r\n\r\n", 400, "invalid_http"),
    "folded value": (GET + b"a: b\r\n c\r\n\r\n", 400, "invalid_http"),
    "long body": (POST + CLOSE + b"Content-Length: 9000000\r\n\r\n", 413, "body_too_large"),
    "long body, asked first": (
        POST + CLOSE + b"Content-Length: 9000000\r\nExpect: 100-continue\r\n\r\n",
        413,
        "body_too_large",
    ),
    "gzip": (POST + CLOSE + b"Content-Encoding: gzip\r\nContent-Length: 3\r\n\r\nabc", 415, "unsupported_encoding"),
    "unknown method": (b"FOO /health HTTP/1.1\r\nHost: localhost\r\n\r\n", 405, "method_not_allowed"),
    "connect": (b"CONNECT x:80 HTTP/1.1\r\nHost: localhost\r\n\r\n", 400, "invalid_http"),
    "double slash": (b"GET //v1/models HTTP/1.1\r\nHost: localhost\r\n" + CLOSE + b"\r\n", 404, "not_found"),
    "dots": (b"GET /v1/%2e%2e/admin HTTP/1.1\r\nHost: localhost\r\n" + CLOSE + b"\r\n", 404, "not_found"),
    "slashes at the end": (b"GET /v1/modelsx// HTTP/1.1\r\nHost: localhost\r\n" + CLOSE + b"\r\n", 404, "not_found"),
    "bytes in the target": (b"GET /\xff HTTP/1.1\r\nHost: localhost\r\n\r\n", 400, "invalid_http"),
}


def answer(server: RunningServer, data: bytes) -> tuple[int, dict[bytes, bytes], bytes]:
    """Status, headers and body of the only response."""
    head, _, body = server.raw(data).partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    match = re.fullmatch(rb"HTTP/1\.1 (\d{3}) .*", lines[0])
    assert match, head
    return int(match[1]), {k.lower(): v.strip() for k, _, v in (line.partition(b":") for line in lines[1:])}, body


@pytest.mark.parametrize("name", CASES)
def test_bad_bytes(mock_server: RunningServer, name: str) -> None:
    data, wanted, code = CASES[name]
    status, headers, body = answer(mock_server, data)
    error = json.loads(body)["error"]
    assert (status, error["code"]) == (wanted, code)
    assert set(error) == {"message", "type", "param", "code"} and len(error["message"]) <= 300
    if status == 405:
        assert headers[b"allow"]


@pytest.mark.parametrize("kind", ["", "text/plain", "application/json; charset=utf-16", "multipart/form-data"])
def test_media_types(mock_server: RunningServer, kind: str) -> None:
    reply = mock_server.post("/v1/completions", BODY, headers={"Content-Type": kind})
    assert (reply.status, reply.json()["error"]["code"]) == (415, "unsupported_media_type")


def test_a_body_that_was_announced_is_asked_for(mock_server: RunningServer) -> None:
    head = POST + CLOSE + b"Content-Length: %d\r\nExpect: 100-continue\r\n\r\n" % len(BODY)
    assert mock_server.raw(head + BODY).startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n")


def test_a_body_is_cut_off_by_count(start_server: StartServer) -> None:
    server = start_server("--max-body-bytes", "2048")
    chunk = b"400\r\n" + b" " * 1024 + b"\r\n"
    status, _, body = answer(server, CHUNKED + chunk * 3)
    assert (status, json.loads(body)["error"]["code"]) == (413, "body_too_large")


def test_wrong_methods(mock_server: RunningServer) -> None:
    for method in ("DELETE", "PUT", "PATCH", "OPTIONS", "TRACE"):
        reply = mock_server.request(method, "/v1/completions")
        assert (reply.status, reply.headers["allow"]) == (405, "POST")
    assert mock_server.get("/v1/completions").status == 405
    assert mock_server.request("HEAD", "/version").status == 200


def test_pipelined_requests_are_answered_in_order(mock_server: RunningServer) -> None:
    data = b"".join(b"GET /%d HTTP/1.1\r\nHost: localhost\r\nX-Request-Id: r%d\r\n\r\n" % (i, i) for i in range(2000))
    received = mock_server.raw(data[:-2] + CLOSE + b"\r\n", timeout=20)
    assert [int(number) for number in re.findall(rb"x-request-id: r(\d+)\r\n", received)] == list(range(2000))


def test_request_ids_are_echoed_if_they_are_plain(mock_server: RunningServer) -> None:
    assert mock_server.get("/ready", headers={"X-Request-Id": "a.b-c_1"}).headers["x-request-id"] == "a.b-c_1"
    for bad in ("a b", "a" * 129, "é".encode().decode("latin-1"), "a/b"):
        own = mock_server.get("/ready", headers={"X-Request-Id": bad}).headers["x-request-id"]
        assert re.fullmatch("[0-9a-f]{32}", own)


def test_two_requests_with_one_id_do_not_meet(mock_server: RunningServer) -> None:
    body = {"model": "octavo-tiny", "prompt": "hi", "max_tokens": 1, "request_id": "same"}
    replies = [mock_server.post("/v1/completions", body, headers={"X-Request-Id": "same"}) for _ in range(2)]
    assert [reply.status for reply in replies] == [200, 200]
    assert replies[0].json()["id"] != replies[1].json()["id"]


def test_clocks(start_server: StartServer) -> None:
    """A head and a body that do not arrive, and a connection that says nothing."""
    server = start_server("--header-timeout", "0.3", "--body-timeout", "0.3", "--idle-timeout", "0.3")
    for data, code in ((GET, b"header_timeout"), (POST + b"Content-Length: 5\r\n\r\nab", b"body_timeout")):
        received = b""
        while not received:  # who is late with the first byte was idle for too long
            began = time.monotonic()
            received = server.raw(data)
        assert received.startswith(b"HTTP/1.1 408") and code in received
        assert time.monotonic() - began > 0.25
    assert server.raw(b"") == b""
    received = b""
    while not received:
        began = time.monotonic()
        received = server.raw(GET + b"\r\n", timeout=60)
    assert received.startswith(b"HTTP/1.1 200")
    assert time.monotonic() - began < patient(30), "the idle connection was closed"


def test_too_many_connections(start_server: StartServer) -> None:
    server = start_server("--max-connections", "4")
    held = [socket.create_connection((server.host, server.port)) for _ in range(4)]
    try:
        received = server.raw(GET + b"\r\n")  # connections are accepted in the order of their coming
        assert received.startswith(b"HTTP/1.1 503") and b"retry-after: 1" in received
    finally:
        for connection in held:
            connection.close()
    began = time.monotonic()
    while server.get("/version").status != 200:  # the server has yet to see that they are closed
        assert time.monotonic() - began < patient(10)


def test_no_cors_headers_unless_asked_for(mock_server: RunningServer, start_server: StartServer) -> None:
    origin = {"Origin": "https://example.org"}
    reply = mock_server.get("/version", headers=origin)
    assert "access-control-allow-origin" not in reply.headers
    assert mock_server.post("/reset_prefix_cache", {}, headers=origin).status == 403
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
def still_alive(mock_server: RunningServer) -> object:
    """After all this, nothing was logged as ours and the server answers."""
    yield
    mock_server.wait_ready(path="/health")
    assert "Traceback" not in mock_server.stderr()


KEY = "k" * 20
KEYED = b"Authorization: Bearer " + KEY.encode() + b"\r\n"


@pytest.fixture(scope="module")
def keyed_server() -> Iterator[RunningServer]:
    with RunningServer("--api-key", KEY, mock=True) as running:
        yield running.wait_ready()


def in_chunks(body: bytes, trailers: bytes) -> bytes:
    return b"%x\r\n%s\r\n0\r\n%s\r\n" % (len(body), body, trailers)


def test_a_trailer_opens_no_door(keyed_server: RunningServer) -> None:
    head = POST + CLOSE + b"Transfer-Encoding: chunked\r\n"
    assert answer(keyed_server, head + b"\r\n" + in_chunks(BODY, KEYED))[0] == 401
    assert answer(keyed_server, head + KEYED + b"\r\n" + in_chunks(BODY, b"Host: y\r\nX-Any: 1\r\n"))[0] == 200
    without_host = head.replace(b"Host: localhost\r\n", b"") + KEYED + b"\r\n" + in_chunks(BODY, b"Host: localhost\r\n")
    status, _, body = answer(keyed_server, without_host)
    assert (status, json.loads(body)["error"]["code"]) == (400, "invalid_host")


@pytest.mark.parametrize("trailer", [b"a: %s\r\n" % (b"v" * 100), b"a: " + b"v" * 1000])
def test_trailers_have_a_bound(keyed_server: RunningServer, trailer: bytes) -> None:
    """Of lines, and of one line that does not end: the answer comes while they are sent, and then the end."""
    with socket.create_connection((keyed_server.host, keyed_server.port), timeout=20) as client:
        client.sendall(POST + KEYED + b"Transfer-Encoding: chunked\r\n\r\n0\r\n")
        num_bytes = 0
        with contextlib.suppress(OSError):
            while num_bytes < 2 * MAX_LINGER_BYTES:
                client.sendall(trailer * 1000)
                num_bytes += len(trailer) * 1000
        assert num_bytes < 2 * MAX_LINGER_BYTES
        with contextlib.suppress(ConnectionResetError):
            assert client.recv(65536).startswith(b"HTTP/1.1 400 ")
    short = b"Transfer-Encoding: chunked\r\n\r\n" + in_chunks(BODY, trailer[:50] + b"\r\n")
    assert answer(keyed_server, POST + CLOSE + KEYED + short)[0] == 200


@pytest.mark.parametrize(("status", "key"), [(413, KEYED), (401, b"")])
@pytest.mark.parametrize("close", [CLOSE, b""])
def test_an_early_answer_arrives_although_the_body_goes_on(
    keyed_server: RunningServer, status: int, key: bytes, close: bytes
) -> None:
    """A client that reads only when all is sent: unread bytes would reset the connection, and take the answer away."""
    head = POST + close + key + b"Content-Length: 12000000\r\n\r\n"
    with socket.create_connection((keyed_server.host, keyed_server.port), timeout=20) as client:
        client.sendall(head)
        for _ in range(12):
            client.sendall(b" " * 1_000_000)
        assert client.recv(65536).startswith(b"HTTP/1.1 %d " % status)
        if close:
            assert b"".join(iter(lambda: client.recv(65536), b"")).count(b"HTTP/1.1") == 0


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
@pytest.mark.parametrize("stream", [b"false", b"true"])
def test_a_client_that_says_no_more_gets_its_answers(mock_server: RunningServer, version: bytes, stream: bytes) -> None:
    body = b'{"model":"octavo-tiny","prompt":"hi","max_tokens":500,"ignore_eos":true,"stream":%s}' % stream
    post = POST.replace(b"1.1", version) + b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
    get = GET + b"\r\n" if version == b"1.1" else b""  # 1.0 has no second request
    with socket.create_connection((mock_server.host, mock_server.port), timeout=20) as client:
        client.sendall(post + get)
        client.shutdown(socket.SHUT_WR)
        received = b"".join(iter(lambda: client.recv(65536), b""))
    finals = re.findall(rb"HTTP/1\.1 ([2-5]\d\d) ", received)
    assert finals == [b"200"] * (2 if get else 1)
    assert b'"finish_reason":"length"' in received


def test_a_client_that_says_no_more_and_leaves_is_noticed(start_server: StartServer) -> None:
    server = start_server(mock="paced_engine", env={"PACE": "0.05", "PYTHONPATH": PATH})
    body = b'{"model":"octavo-tiny","prompt":"hi","max_tokens":2000,"ignore_eos":true}'
    with socket.create_connection((server.host, server.port), timeout=20) as client:
        client.sendall(POST + b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
        client.shutdown(socket.SHUT_WR)
        assert client.recv(65536).startswith(b"HTTP/1.1 100 Continue\r\n")
        assert server.get("/load").json() == {"server_load": 1}
    while server.get("/load").json() != {"server_load": 0}:
        pass


OWN_HOSTS = ["localhost", "LocalHost:8000", "127.0.0.1:1", "[::1]:8000", "a.localhost", "192.168.1.7", "localhost."]
OTHER_HOSTS = [
    "attacker.example",
    "localhost.attacker.example",
    "127.0.0.1.attacker.example:8000",
    "1.2.3.4.nip.io",
    "xlocalhost",
]


def host_status(server: RunningServer, host: str) -> int:
    return server.get("/v1/models", headers={"Host": host}).status


def test_without_a_key_the_loopback_answers_to_its_own_names_only(
    mock_server: RunningServer, keyed_server: RunningServer
) -> None:
    """A web page may let a name of its own point to 127.0.0.1: its Host gives it away."""
    assert [host_status(mock_server, host) for host in OWN_HOSTS] == [200] * len(OWN_HOSTS)
    assert [host_status(mock_server, host) for host in OTHER_HOSTS] == [403] * len(OTHER_HOSTS)
    error = mock_server.get("/", headers={"Host": "attacker.example"}).json()["error"]
    assert error["code"] == "host_not_allowed" and "--allowed-hosts" in error["message"]
    keyed = {"Host": "any.example", "Authorization": f"Bearer {KEY}"}
    assert keyed_server.get("/v1/models", headers=keyed).status == 200


def test_allowed_hosts(start_server: StartServer) -> None:
    server = start_server("--allowed-hosts", "Box.example,*.lan")
    hosts = ("box.example:80", "a.b.lan", "localhost", "lan", "attacker.example", "xlan")
    assert [host_status(server, host) for host in hosts] == [200, 200, 200, 403, 403, 403]
    assert host_status(start_server("--allowed-hosts", "*"), "any.example") == 200
