"""Foreign text against a running server: it is worked on in children, and nobody else waits for it."""

from __future__ import annotations

import json
import re
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from octavo.serve.errors import ApiError
from octavo.serve.http.strict_json import parse
from octavo.serve.sandbox.texts import LONG_BODY, Texts
from octavo.text.no_tokenizer import NoTokenizer
from octavo.text.sandbox import LONG_TEXT
from server_rig import Reply, RunningServer, StartServer
from standstill import stop

HOSTILE = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}{% endfor %}",  # noqa: E501
    "percent": "{{ '%3000000000d' % 1 }}",
    "ljust": "{{ 'x'.ljust(3000000000) }}",
    "tilde": "{% set ns = namespace(s='xxxxxxxx') %}{% for a in range(40) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
}


def chat(server: RunningServer, content: str, **options: Any) -> Reply:
    body = {"model": "octavo-tiny", "messages": [{"role": "user", "content": content}], "max_tokens": 1}
    return server.post("/v1/chat/completions", body, **options)


def text_children(server: RunningServer) -> list[psutil.Process]:
    found = psutil.Process(server.process.pid).children()
    alive = [child for child in found if child.status() != psutil.STATUS_ZOMBIE]
    return [child for child in alive if "octavo.serve.sandbox.text_child" in child.cmdline()]


def template_file(folder: Path, template: str) -> str:
    path = folder / "chat_template.jinja"
    path.write_text(template)
    return str(path)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_fails_its_requests_and_nothing_else(
    start_server: StartServer, tmp_path: Path, name: str
) -> None:
    server = start_server("--chat-template", template_file(tmp_path, HOSTILE[name]))
    reply = chat(server, "secret")
    assert (reply.status, reply.json()["error"]["code"]) == (400, "template_failed")
    assert b"secret" not in reply.body
    assert server.post("/v1/completions", {"model": "octavo-tiny", "prompt": "a", "max_tokens": 1}).status == 200


def test_a_server_that_ends_while_it_starts_complains_of_nothing(caplog: pytest.LogCaptureFixture) -> None:
    texts = Texts(NoTokenizer())
    texts.close()
    texts._start()
    assert not caplog.records


def test_sigterm_ends_a_server_whose_template_does_not_end(start_server: StartServer, tmp_path: Path) -> None:
    server = start_server("--chat-template", template_file(tmp_path, HOSTILE["loops"]), "--drain-seconds", "1")
    children = text_children(server)
    for child in children:
        stop(child.pid)  # it would end at its limit
    body = b'{"model": "octavo-tiny", "messages": [{"role": "user", "content": "a"}]}'
    head = b"Host: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
    with socket.create_connection((server.host, server.port), timeout=20) as client:
        client.sendall(b"POST /v1/chat/completions HTTP/1.1\r\n" + head + body)
        for _ in range(3):  # what came before has been read by then
            server.wait_ready(path="/health")
        assert server.close() == 0
        assert b"draining" in client.recv(65536)
    assert not any(child.is_running() for child in children)


def test_nobody_waits_while_a_long_text_is_worked_on(start_server: StartServer) -> None:
    """The children stand still: what is answered meanwhile was done without them, and what waits is answered then."""
    server = start_server()
    long_text, replies = "<|im_end|> a " * (LONG_TEXT // 8), list[Reply]()
    with ThreadPoolExecutor(
        2
    ) as pool:  # all that there will be: one for short texts, and two for two long ones at once
        while len(children := text_children(server)) < 3:
            assert {reply.status for reply in pool.map(lambda text: chat(server, text), [long_text] * 2)} == {400}
    for child in children:
        stop(child.pid)
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": long_text}]}),
        ("/v1/completions", {"prompt": long_text}),
        ("/tokenize", {"prompt": long_text}),
        ("/tokenize", {"messages": [{"role": "user", "content": long_text}]}),
        ("/v1/responses", {"input": long_text}),
        ("/detokenize", {"tokens": [65] * LONG_TEXT * 2}),
        ("/v1/completions", {"prompt": [[65]] * (LONG_BODY // 4)}),
    ]

    def ask(path: str, body: dict[str, Any]) -> None:
        replies.append(server.post(path, {**body, "model": "octavo-tiny"}))

    asks = [threading.Thread(target=ask, args=each) for each in bodies]
    for thread in asks:
        thread.start()
    for _ in range(20):
        server.wait_ready(path="/health")
        assert server.post("/v1/completions", {"model": "octavo-tiny", "prompt": "a", "max_tokens": 1}).status == 200
    assert not replies
    for child in children:
        child.send_signal(signal.SIGCONT)
    for thread in asks:
        thread.join(60)
    assert sorted(reply.status for reply in replies) == [200] * 2 + [400] * 5
    codes = {reply.json()["error"]["code"] for reply in replies if reply.status == 400}
    assert codes == {"context_length_exceeded", "too_many_prompts"}


def test_what_clients_who_left_have_asked_is_not_worked_on(start_server: StartServer) -> None:
    """Short and long, with children that stand still: who has left is noticed, and who stays gets an answer."""
    server = start_server()
    children = text_children(server)
    for child in children:
        stop(child.pid)
    bodies = [
        json.dumps({"model": "octavo-tiny", "messages": [{"role": "user", "content": text}]}).encode()
        for text in ("a", "a " * LONG_TEXT, "a " * LONG_BODY)
    ]
    clients = []
    for body in bodies * 4:
        clients.append(socket.create_connection((server.host, server.port), timeout=20))
        head = b"Host: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
        clients[-1].sendall(b"POST /v1/chat/completions HTTP/1.1\r\n" + head + body)
    server.wait_ready(path="/health")
    for client in clients:
        client.close()
    left = re.compile(rb'http_requests_total\{.*chat/completions".*"4xx"\S* (\d+)')
    while sum(int(count) for count in left.findall(server.get("/metrics").body)) < len(clients):
        server.wait_ready(path="/health")
    for child in children:
        child.send_signal(signal.SIGCONT)
    assert chat(server, "a").status == 200 and chat(server, "a " * LONG_TEXT).status == 400
    assert set(children) <= set(text_children(server)), "none was killed for it"


def test_a_childs_death_is_no_requests_trouble(start_server: StartServer) -> None:
    server = start_server()
    for _ in range(2):
        for child in text_children(server):
            stop(child.pid)
        with ThreadPoolExecutor(8) as clients:
            replies = [clients.submit(chat, server, "a") for _ in range(8)]
            for child in text_children(server):
                child.kill()
        assert [reply.result().status for reply in replies] == [200] * 8


def test_text_that_cannot_fit_is_refused_on_every_path(mock_server: RunningServer) -> None:
    """2048 tokens of at most 82 bytes: 400 KB are refused before they are tokenized, wherever they stand."""
    text = "word " * 80_000
    for path, body in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}),
        (
            "/v1/chat/completions",
            {
                "messages": [{"role": "user", "content": "a"}],
                "tools": [{"type": "function", "function": {"name": "f", "description": text}}],
            },
        ),
        ("/v1/responses", {"input": text}),
        ("/tokenize", {"messages": [{"role": "user", "content": text}]}),
        ("/tokenize", {"prompt": text}),
        ("/v1/completions", {"prompt": text}),
    ):
        reply = mock_server.post(path, {"model": "octavo-tiny", **body})
        if "tools" in body:
            assert reply.status == 200, "the bundled template writes no tools"
            continue
        error = reply.json()["error"]
        assert (reply.status, error["code"]) == (400, "context_length_exceeded"), (path, error)
        assert "cannot fit in" in error["message"]


LONG = "x" * LONG_BODY


def beside(members: str) -> str:
    """An object with these members, and a long one."""
    return "{" + members + ', "b": "' + LONG + '"}'


BODIES = {
    "good": json.dumps({"a": [1, 0.1, -0.0, 1e300, 10**19, -(10**19), True, None, "\u00e9\u2028\0"], "b": LONG}),
    "cut": beside('"a": 1')[:-1],
    "twice": beside('"b": 1'),
    "twice inside": beside('"a": [{"c": 1, "c": 2}]'),
    "surrogate": beside(r'"a": "\ud800"'),
    "pair": beside(r'"a": "\ud83d\ude42"'),
    "nan": beside('"a": NaN'),
    "infinite": beside('"a": 1e999'),
    "digits": beside('"a": ' + "9" * 21),
    "deep": beside('"a": ' + "[" * 70 + "]" * 70),
    "list": json.dumps([LONG]),
    "junk": beside('"a": 1') + "x",
    "no utf-8": beside('"a": 1').encode() + b"\xff",
    "control": beside('"a": "\n"'),
    "quotes": '{"a": [' + '"",' * 600_000 + '""]}',
    "nested": '{"a": [' + '{"a": {"a": {}}},' * 200_000 + "{}]}",
}


@pytest.mark.parametrize("name", BODIES)
def test_long_json_is_read_as_short_json_is(mock_server: RunningServer, name: str) -> None:
    given = BODIES[name]
    body = given if isinstance(given, bytes) else given.encode()
    reply = mock_server.post("/tokenize", body).json()["error"]
    try:
        parse(body, 500_000)
    except ApiError as error:
        assert (reply["code"], reply["message"], reply["param"]) == (error.code, error.message, error.param)
    else:
        assert reply["code"] == "missing_field"


def test_values_are_counted_wherever_they_stand() -> None:
    for body in (b'{"a":[' + b"1," * 3 + b"1]}", b'{"a":[[[[[]]]]]}', b'{"a":{"a":{"a":{"a":{}}}}}'):
        assert parse(body, 6)
        with pytest.raises(ApiError, match="more than 4 values"):
            parse(body, 4)
