"""Running servers: `server` with octavo-tiny, `mock_server` with an engine that needs no model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from server_rig import RunningServer, StartServer


def _started(argv: Sequence[str], mock: bool) -> Iterator[RunningServer]:
    with RunningServer(*argv, mock=mock) as running:
        yield running.wait_ready()


@pytest.fixture(scope="session")
def server() -> Iterator[RunningServer]:
    """octavo-tiny in float32, shared by all tests: none may stop it or reset its cache."""
    yield from _started(["--dtype", "float32"], mock=False)


@pytest.fixture(scope="session")
def mock_server() -> Iterator[RunningServer]:
    """The mock engine behind the real front end."""
    yield from _started([], mock=True)


@pytest.fixture
def start_server() -> Iterator[StartServer]:
    """Servers with options of a test's own: start_server("--strict", mock=True); closed when the test ends."""
    running: list[RunningServer] = []

    def start(*argv: str, mock: bool | str = True, env: dict[str, str] | None = None) -> RunningServer:
        running.append(RunningServer(*argv, mock=mock, env=env))
        return running[-1].wait_ready()

    yield start
    for each in running:
        each.close()
