"""Ports of 127.0.0.1 for who is told a port's number before it listens there, or never does.

The kernel gives ports of its own to whoever asks for any, also to connections: a number that was free a moment ago may
be somebody else's by the time a server comes up. So these lie below the kernel's, and each process of the tests has its
own among them.
"""

from __future__ import annotations

import itertools
import os
import socket
from pathlib import Path

_FIRST, _RANGE = 10_000, Path("/proc/sys/net/ipv4/ip_local_port_range")
_MAX_PROCESSES = 64  # of xdist's: beyond, two share ports and meet only when both ask at once
_turns = itertools.count()


def free_port() -> int:
    """A number that nobody listens on, that was given to nobody before, and that the kernel gives to nobody."""
    try:
        end = int(_RANGE.read_text().split()[0])
    except (OSError, ValueError):
        end = 0
    size = (end - _FIRST) // _MAX_PROCESSES
    if size < 100:  # a machine whose connections have almost all ports
        return _ask(0)
    worker = os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")
    first = _FIRST + int(worker) % _MAX_PROCESSES * size
    begin = os.getpid() * 37  # another run beside this one has the same workers
    return next(filter(None, (_ask(first + (begin + next(_turns)) % size) for _ in range(size))))


def _ask(port: int) -> int:
    """The port if it is free, else 0. 0: any that is."""
    try:
        with socket.create_server(("127.0.0.1", port)) as listener:
            return int(listener.getsockname()[1])
    except OSError:
        return 0
