"""A server in a process of its own, as tests start, ask and stop it."""

from __future__ import annotations

import dataclasses
import http.client
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from patience import patient

SRC = Path(__file__).resolve().parents[2] / "src"
PATHS = os.pathsep.join((str(SRC), str(Path(__file__).resolve().parent)))  # of the package and of engines for tests
_WITH_ENGINE = (
    "import sys; from octavo.serve.server import main; sys.exit(main(sys.argv[2:], engine_module=sys.argv[1]))"
)


@dataclasses.dataclass
class Reply:
    """A whole response."""

    status: int
    headers: dict[str, str]  # names in lower case
    body: bytes

    def json(self) -> Any:
        """The body, decoded."""
        return json.loads(self.body)

    def events(self) -> list[Any]:
        """The data of a text/event-stream: decoded objects, and "[DONE]"."""
        lines = [line[6:] for line in self.body.decode().split("\n\n") if line.startswith("data: ")]
        return [line if line == "[DONE]" else json.loads(line) for line in lines]


class RunningServer:
    """`octavo serve` in a process of its own, on a port that the kernel chose. Closed like a file.

    `mock`: with an engine module instead of a model; True is mock_engine.
    """

    def __init__(self, *argv: str, mock: bool | str = False, env: dict[str, str] | None = None) -> None:
        module = mock if isinstance(mock, str) else "mock_engine"
        start = ["-c", _WITH_ENGINE, module] if mock else ["-m", "octavo", "serve"]
        self.log = tempfile.TemporaryFile("w+b")  # noqa: SIM115 - it lives as long as the server
        self.process = subprocess.Popen(
            [sys.executable, *start, "--port", "0", *argv],
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            env={"PYTHONPATH": PATHS, "PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1", **(env or {})},
        )
        assert self.process.stdout is not None
        self.first_line = line = self.process.stdout.readline()
        match = re.search(r"http://([^:/]+|\[[^\]]+\]):(\d+)", line)
        if match is None:
            self.close()
            raise AssertionError(f"no address in {line!r}; stderr: {self.stderr()}")
        self.host, self.port = match[1], int(match[2])

    @property
    def url(self) -> str:
        """http://host:port"""
        return f"http://{self.host}:{self.port}"

    def stderr(self) -> str:
        """What was logged so far. The server writes where this file stands, so it is read without moving there."""
        size = os.fstat(self.log.fileno()).st_size
        return os.pread(self.log.fileno(), size, 0).decode(errors="replace")

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: dict[str, str] | None = None,
        timeout: float = 60,
    ) -> Reply:
        """One request on a connection of its own. A body that is not bytes is sent as JSON."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=patient(timeout))
        try:
            sent = dict(headers or {})
            if body is not None and not isinstance(body, bytes):
                body = json.dumps(body).encode()
            if body is not None:
                sent.setdefault("Content-Type", "application/json")
            connection.request(method, path, body, sent)
            response = connection.getresponse()
            return Reply(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
        finally:
            connection.close()

    def get(self, path: str, **options: Any) -> Reply:
        """GET."""
        return self.request("GET", path, **options)

    def post(self, path: str, body: Any, **options: Any) -> Reply:
        """POST."""
        return self.request("POST", path, body, **options)

    def raw(self, data: bytes, timeout: float = 5) -> bytes:
        """Send bytes as they are; what comes back until the server closes, or nothing came for so long.

        timeout: seconds of a quiet machine.
        """
        with socket.create_connection((self.host, self.port), timeout=patient(timeout)) as connection:
            received = b""
            try:
                connection.sendall(data)
                while piece := connection.recv(65536):
                    received += piece
            except (TimeoutError, ConnectionError):
                pass
            return received

    def wait_ready(self, timeout: float = 60, path: str = "/ready") -> Self:
        """Until this says 200: it does not while the engine had no processor for a second or two."""
        began = time.monotonic()
        while time.monotonic() - began < patient(timeout):
            assert self.process.poll() is None, self.stderr()
            if self.get(path).status == 200:
                return self
            time.sleep(0.05)
        raise AssertionError(f"not ready after {timeout} s; stderr: {self.stderr()}")

    def close(self) -> int:
        """SIGTERM, and SIGKILL after 20 s of a quiet machine. The exit code."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(patient(20))
            except subprocess.TimeoutExpired:
                self.process.kill()
        if self.process.stdout:
            self.process.stdout.close()
        return self.process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


StartServer = Callable[..., RunningServer]
