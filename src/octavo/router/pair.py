"""A prefill and a decode server on this machine, for as long as the router runs.

Owns the two processes, their addresses, and when they are started again. Invariants: whatever ends the router ends
them; one that cannot start, or fails too often, ends the router with its exit code; addresses stay the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import signal
import socket
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from octavo.cli.flags import UsageError
from octavo.router.http import Address
from octavo.startup import child

_LOG = logging.getLogger(__name__)
_STOP_SECONDS = 20.0
_WINDOW = 600.0  # seconds in which failures are counted
_FIRST_DELAY, _MAX_DELAY = 1.0, 30.0  # seconds before a start after a failure; it doubles
_ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}
_OWN = ("host", "port", "uds", "root_path", "kv_transfer_config", "kv_offloading_size", "kv_offloading_backend")
_NONE = ("--uds", "none", "--root-path", "none", "--ssl-keyfile", "none", "--ssl-certfile", "none")


def check_arguments(arguments: Sequence[str]) -> None:
    """Refuse what the pair itself says to `octavo serve`. Raises UsageError."""
    for argument in arguments:
        if argument.startswith("--"):
            name = argument[2:].partition("=")[0].partition(".")[0].replace("-", "_").lower()
            if name in _OWN or name.startswith("ssl_"):
                raise UsageError(
                    f"octavo router: {argument.partition('=')[0]} behind --: --start-pair sets it; start the servers "
                    "yourself, with --prefill and --decode, to choose it"
                )


class Servers(Protocol):
    """Servers that live with the router."""

    async def watch(self) -> int:
        """Start them and keep them running, until one cannot run: its exit code."""

    async def stop(self) -> None:
        """End them."""


class NoServers:
    """All servers are somebody else's."""

    async def watch(self) -> int:
        """See Servers."""
        await asyncio.Event().wait()
        return 0

    async def stop(self) -> None:
        """See Servers."""


class Pair:
    """See Servers."""

    def __init__(self, arguments: Sequence[str], max_restarts: int) -> None:
        """arguments: of `octavo serve`, for both. Takes an address for each; nothing is started."""
        self._children = {name: _Child(name, arguments, max_restarts) for name in _ROLES}
        self.has_been_well: Callable[[str], bool] = lambda name: False  # whether the server has served
        self.restarted: Callable[[str], None] = lambda name: None  # it is started again

    def address(self, name: str) -> Address:
        """Where the server listens. `name`: prefill or decode."""
        return self._children[name].address

    async def watch(self) -> int:
        """See Servers."""
        lives = [asyncio.create_task(each.live(self.has_been_well, self.restarted)) for each in self._children.values()]
        try:
            done, _ = await asyncio.wait(lives, return_when=asyncio.FIRST_COMPLETED)
            return max(life.result() for life in done)
        finally:
            for life in lives:
                life.cancel()
            await asyncio.gather(*lives, return_exceptions=True)

    async def stop(self) -> None:
        """See Servers."""
        await asyncio.gather(*(each.stop() for each in self._children.values()))


class _Child:
    """One server: a process, and the next one if it fails."""

    def __init__(self, name: str, arguments: Sequence[str], max_restarts: int) -> None:
        self.name = name
        # Bound and not listening, it keeps the port for all processes that this server will be.
        self._place = socket.socket()
        self._place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._place.bind(("127.0.0.1", 0))
        self.address = Address("127.0.0.1", int(self._place.getsockname()[1]))
        transfer = {"kv_connector": "p2p", "kv_role": _ROLES[name], "kv_port": 0, "kv_load_failure_policy": "recompute"}
        own = ["--host", "127.0.0.1", "--port", str(self.address.port), "--kv-transfer-config", json.dumps(transfer)]
        self._command = child.command("-m", "octavo", "serve", *arguments, *_NONE, *own)
        self._max_restarts = max_restarts
        self._process: asyncio.subprocess.Process | None = None

    async def live(self, has_been_well: Callable[[str], bool], restarted: Callable[[str], None]) -> int:
        """Run until it cannot: its exit code, as of a process that failed."""
        failures: list[float] = []
        while True:
            self._process = await asyncio.create_subprocess_exec(*self._command)
            code = await self._process.wait()
            how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            now = time.monotonic()
            failures = [at for at in failures if now - at < _WINDOW] + [now]
            if not has_been_well(self.name):
                _LOG.error("the %s server could not start (%s)", self.name, how)
                return code if code > 0 else 1
            if len(failures) > self._max_restarts:
                limit = f"it failed {len(failures)} times within {_WINDOW:g} s (--max-restarts)"
                _LOG.error("the %s server ended (%s) and is not started again: %s", self.name, how, limit)
                return code if code > 0 else 1
            delay = min(_FIRST_DELAY * 2 ** (len(failures) - 1), _MAX_DELAY)
            _LOG.warning("the %s server ended (%s); it is started again in %g s", self.name, how, delay)
            await asyncio.sleep(delay)
            restarted(self.name)

    async def stop(self) -> None:
        """Let it end in order, and soon."""
        self._place.close()
        process = self._process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            async with asyncio.timeout(_STOP_SECONDS):
                await process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
