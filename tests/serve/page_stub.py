"""A server with the chat page and just enough of the API: its tokens, rate and errors are the test's to set."""

from __future__ import annotations

import http.server
import json
import threading
import time
from importlib import resources
from typing import Any, Self

PAGE = resources.files("octavo").joinpath("serve/page/index.html").read_bytes()
_WORDS = ["The", "quick", "brown", "fox", "jumps", "over", "the", "lazy", "dog", "again;"]


class PageStub:
    """Runs on a thread, on a port that the kernel chose. Close it like a file."""

    def __init__(self) -> None:
        """Ten tokens, as fast as may be."""
        self.tokens = [word + " " for word in _WORDS]
        self.pause = 0.0
        self.reasoning = ""
        self.error = ""  # at the end of the stream
        self.key = ""
        self.requests: list[dict[str, Any]] = []
        self.left = threading.Event()  # a client left in the middle of a stream
        stub = self

        class Handler(_Handler):
            owner = stub

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Handler(http.server.BaseHTTPRequestHandler):
    owner: PageStub

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        if self.path == "/":
            self._reply(200, "text/html; charset=utf-8", PAGE)
        elif self._may() and self.path == "/v1/models":
            models = [{"id": name, "object": "model", "max_model_len": 2048} for name in ("octavo-tiny", "other")]
            self._reply(200, "application/json", json.dumps({"data": models}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if not self._may():
            return
        self.owner.requests.append(body)
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        try:
            self._stream(body)
        except OSError:
            self.owner.left.set()

    def _stream(self, body: dict[str, Any]) -> None:
        self._event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        if self.owner.reasoning:
            self._event({"choices": [{"index": 0, "delta": {"reasoning": self.owner.reasoning}}]})
        for index, token in enumerate(self.owner.tokens):
            time.sleep(self.owner.pause)
            others = [{"token": f" word{k}", "logprob": -2.0 - k, "bytes": []} for k in range(4)]
            entry = {"token": token, "logprob": -0.4 * (index % 8) ** 1.3, "bytes": [], "top_logprobs": others}
            logprobs = {"content": [entry]} if body.get("logprobs") else None
            self._event({"choices": [{"index": 0, "delta": {"content": token}, "logprobs": logprobs}]})
        if self.owner.error:
            self._event({"error": {"message": self.owner.error, "type": "server_error", "param": None, "code": "x"}})
            return
        self._event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        self._event({"choices": [], "usage": {"completion_tokens": len(self.owner.tokens)}})
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, event: dict[str, Any]) -> None:
        self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")

    def _may(self) -> bool:
        if not self.owner.key or self.headers["authorization"] == f"Bearer {self.owner.key}":
            return True
        error = {"error": {"message": "invalid API key", "type": "authentication_error", "param": None, "code": "x"}}
        self._reply(401, "application/json", json.dumps(error).encode())
        return False

    def _reply(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
