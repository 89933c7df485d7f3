"""A server for third-party clients, and the environments in which they live (made by tools/client_envs.py)."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / "tests" / name) for name in ("serve", "e2e")]


@pytest.fixture(scope="session")
def url() -> Iterator[str]:
    """The address of a server with octavo-tiny."""
    from server_rig import RunningServer

    with RunningServer("--dtype", "float32") as running:
        yield running.wait_ready().url
