"""Requests made at random from the shapes of the routes: none may be answered with 500, or cost the engine its life."""

from __future__ import annotations

import collections
import http.client
import json
import random
from typing import Any

import pytest

from octavo.serve.api.protocol import (
    IGNORED,
    REFUSED,
    SAMPLING,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    ResponsesRequest,
    TokenizeRequest,
)
from octavo.serve.app import ROUTES
from octavo.serve.routes.rl import RL_ROUTES
from patience import patient
from server_rig import RunningServer

SHAPES = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/v1/responses": ResponsesRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
TEXTS = ["", "hi", "a" * 300, "\0", "é🙂", "<|im_start|>", "\u202e", "null", "{{ 7 * 7 }}", "%s", "../../etc/passwd",
         "json_object", "text", "auto", "none", "required",
         "a|b", "(a+)+$", "[a-z]{2,4}", "root ::= \"a\""]  # fmt: skip
NUMBERS = [0, 1, 2, 3, 5, -1, -2, 20, 21, 64, 65, 128, 2047, 2048, 4095, 4096, 2**31 - 1, 2**31, 2**53, 2**63,
           2**64, -(2**63) - 1, 0.0, 0.5, 1.0, 1.5, 2.0, 2.1, -0.5, 1e-320, 1e308, 100.0, 101.0]  # fmt: skip
# values that make sense for a field, so that many requests get past the checks
FITTING: dict[str, list[Any]] = {
    "model": ["octavo-tiny"] * 8 + ["gpt-4"],
    "prompt": ["hi", "a b c", [1, 2, 3], [[1], [2, 3]], ["a", "b"], [5] * 100, [[4096]]],
    "messages": [
        [{"role": "user", "content": "hi"}],
        [{"role": "system", "content": "be"}, {"role": "user", "content": [{"type": "text", "text": "x"}]}],
        [{"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": {}}]}],
        [{"role": "user", "content": "x"}, {"role": "tool", "content": "y", "tool_call_id": "1"}],
    ],
    "input": ["hi", [{"role": "user", "content": "hi"}], [{"type": "reasoning"}]],
    "tokens": [[1, 2, 3], [0], []],
    "max_tokens": [1, 2, 5, 8], "max_completion_tokens": [1, 4], "max_output_tokens": [1, 4], "n": [1, 2, 3],
    "stream": [True, False], "echo": [True, False], "logprobs": [True, 0, 1, 5], "top_logprobs": [0, 2, 20],
    "stop": ["a", ["b", "c"]], "stop_token_ids": [[1, 2]], "logit_bias": [{"5": 10}], "bad_words": [["a"]],
    "allowed_token_ids": [[5, 6, 7]], "temperature": [0, 0.7, 1], "top_p": [0.5, 1], "top_k": [0, 5], "seed": [1, -1],
    "stream_options": [{"include_usage": True}, {"continuous_usage_stats": True}, {}],
    "response_format": [{"type": "text"}, {"type": "json_object"},
                        {"type": "json_schema", "json_schema": {"schema": {}}},
                        {"type": "structural_tag", "format": {"type": "any_text", "excludes": ["a"]}}],
    "structured_outputs": [{"choice": ["a", "b"]}, {"regex": "[ab]{3}"}, {"grammar": "x"},
                           {"json": {"type": "object"}}],
    "tools": [[{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}], []],
    "tool_choice": ["auto", "none", "required", {"type": "function", "function": {"name": "f"}}],
    "text": [{"format": {"type": "text"}}, {"format": {"type": "json_object"}}],
    "repetition_detection": [{"max_pattern_size": 3, "min_count": 2}],
    "chat_template_kwargs": [{"enable_thinking": True}],
}  # fmt: skip
NEEDED = {
    "/v1/completions": ["model", "prompt", "max_tokens"],
    "/v1/chat/completions": ["model", "messages", "max_tokens"],
    "/v1/responses": ["model", "input", "max_output_tokens"],
    "/tokenize": ["prompt"],
    "/detokenize": ["tokens"],
}
ALLOWED = {200, 400, 404, 405, 408, 409, 413, 415, 431, 503}


class Generator:
    """Requests from a seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def value(self, depth: int = 0) -> Any:
        """Any JSON value."""
        kind = self.random.randrange(7 if depth < 3 else 5)
        if kind == 0:
            return self.random.choice([None, True, False])
        if kind in (1, 2):
            return self.random.choice(NUMBERS)
        if kind in (3, 4):
            return self.random.choice(TEXTS)
        size = self.random.choice([0, 1, 2, 5])
        if kind == 5:
            return [self.value(depth + 1) for _ in range(size)]
        return {self.random.choice(TEXTS): self.value(depth + 1) for _ in range(size)}

    def field(self, name: str) -> Any:
        """A value for a field, mostly fitting."""
        if name in FITTING and self.random.random() < 0.95:
            return self.random.choice(FITTING[name])
        if name in ("max_tokens", "max_completion_tokens", "max_output_tokens", "n"):
            return self.random.choice([0, -1, 3, "2", 1.5, [], True])  # nothing that takes long
        return self.value()

    def request(self) -> tuple[str, str, bytes, dict[str, str]]:
        """Method, path, body and headers."""
        pick = self.random
        if pick.random() < 0.06:
            route = pick.choice([r for r in ROUTES if r.path != "/metrics" and r not in RL_ROUTES])  # these stop all
            method = pick.choice(["GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS"])
            path = pick.choice(
                [route.path, route.path + "/", route.path + "?a=b&a=%ff", "/" + pick.choice(["x", "%00", "v1"])]
            )
            return method, path.replace("{id}", "octavo-tiny"), b"{}", {"Content-Type": "application/json"}
        path = pick.choice([*SHAPES][:3] * 3 + [*SHAPES])
        own = list(SHAPES[path].__struct_fields__)
        known = own + sorted(SAMPLING)
        fitting = [name for name in known if name in FITTING]
        names = (
            NEEDED[path]
            + pick.choices(fitting, k=pick.choice([0, 1, 3, 6]))
            + pick.choices(known, k=pick.choice([0, 0, 1]))
        )
        if pick.random() < 0.1:
            names.append(pick.choice(sorted(IGNORED | set(REFUSED)) + TEXTS[1:4]))
        body = json.dumps({name: self.field(name) for name in names}).encode()
        if pick.random() < 0.08:  # break the bytes
            place = pick.randrange(len(body))
            body = (
                body[:place] + pick.choice([b"", b"\xff", b'"', b"[", b"NaN", b"1e999", b"\\ud800"]) + body[place + 1 :]
            )
        headers = {"Content-Type": "application/json"}
        if pick.random() < 0.03:
            headers["Content-Type"] = pick.choice(["text/plain", "application/json; charset=latin-1", ""])
        return pick.choice(["POST"] * 30 + ["GET"]), path, body, headers


def run(server: RunningServer, count: int, seed: int) -> collections.Counter[int]:
    """Send `count` requests on one connection after the other. Returns how often each status came."""
    made = Generator(seed)
    seen: collections.Counter[int] = collections.Counter()
    connection = http.client.HTTPConnection(server.host, server.port, timeout=patient(60))
    for number in range(count):
        method, path, body, headers = made.request()
        try:
            connection.request(method, path, body, headers)
            response = connection.getresponse()
        except (http.client.RemoteDisconnected, BrokenPipeError, ConnectionResetError):
            connection.close()  # the server may end a connection between two requests
            connection.request(method, path, body, headers)
            response = connection.getresponse()
        data = response.read()
        said = f"seed {seed}, request {number}: {method} {path} {body[:500]!r} -> {response.status} {data[:500]!r}"
        assert response.status in ALLOWED, said
        assert b"internal" not in data and b"engine_" not in data, said
        if response.status >= 400 and method != "HEAD":
            assert len(data) <= 4096 and json.loads(data)["error"]["code"], said
        seen[response.status] += 1
    connection.close()
    return seen


def check(server: RunningServer, count: int, seed: int) -> None:
    before = restarts(server)
    seen = run(server, count, seed)
    print(f"{count} requests, seed {seed}: {dict(seen)}")
    assert seen[200] > count / 10 and seen[400] > count / 10
    assert restarts(server.wait_ready()) == before
    assert "Traceback" not in server.stderr()


def restarts(server: RunningServer) -> str:
    """Something that a restart of the engine changes: its process."""
    children = f"/proc/{server.process.pid}/task/{server.process.pid}/children"
    with open(children, encoding="ascii") as file:
        engine = file.read().split()[:1]
    assert engine
    return engine[0]


def test_2000_random_requests(mock_server: RunningServer) -> None:
    check(mock_server, 2000, 1)


def test_some_random_requests_to_the_real_engine(server: RunningServer) -> None:
    check(server, 200, 2)


@pytest.mark.slow
def test_20000_random_requests(mock_server: RunningServer) -> None:
    for seed in range(10, 30):
        check(mock_server, 1000, seed)
