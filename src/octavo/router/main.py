"""`octavo router`: one address for prefill and decode servers, which are there already or are started with it.

Owns the command line, the signals, and the order of start and stop. Invariants: the address is printed when connections
are taken, and `ready` when each kind has a server that is well; after SIGTERM no request is begun, and every open one
has some time to end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Iterator, Sequence

import uvicorn

from octavo.cli.flags import Parser, UsageError, add_own_flags, given_server
from octavo.config.kv_transfer import DEFAULT_TIMEOUT
from octavo.config.settings import ConfigError
from octavo.observe import LOGGER, setup_logging
from octavo.router.app import Router
from octavo.router.http import Address
from octavo.router.pair import NoServers, Pair, Servers, check_arguments
from octavo.router.settings import ROUTER_SETTINGS, RouterConfig
from octavo.startup.listen import listen_tcp

_LOG = logging.getLogger(__name__)


def main(argv: Sequence[str]) -> int:
    """Run the router until it is told to stop; the exit code."""
    arguments = list(argv)
    rest: list[str] = []
    if "--" in arguments:
        place = arguments.index("--")
        arguments, rest = arguments[:place], arguments[place + 1 :]
    parser = Parser(
        prog="octavo router",
        usage="octavo router --prefill URL ... --decode URL ... | octavo router --start-pair [option ...] -- [serve's]",
        description="One address for servers that compute prompts and servers that go on with them.",
    )
    parser.add_argument("--prefill", action="append", default=[], help="http://host:port of a prefill server; repeated")
    parser.add_argument("--decode", action="append", default=[], help="http://host:port of a decode server; repeated")
    parser.add_argument(
        "--start-pair", action="store_true", help="start one of each here; what stands behind -- is for `octavo serve`"
    )
    add_own_flags(parser, "settings", ROUTER_SETTINGS)
    options, _ = parser.parse(arguments)
    if options.start_pair == bool(options.prefill or options.decode):
        raise UsageError("octavo router: name servers with --prefill and --decode, or give --start-pair")
    if rest and not options.start_pair:
        raise UsageError("octavo router: what stands behind -- is for the servers of --start-pair")
    if not options.start_pair and not options.decode:
        raise UsageError("octavo router: a prompt is continued by a decode server: give --decode")
    check_arguments(rest)
    config = RouterConfig(**given_server(options))
    prefill, decode = _addresses("prefill", options.prefill), _addresses("decode", options.decode)
    sock = listen_tcp(config.host, config.port)
    setup_logging("warning")
    _take_in_logs()
    if config.timeout <= DEFAULT_TIMEOUT:
        _LOG.warning(
            "timeout=%g: a decode server may wait for blocks, and say nothing, for its kv_transfer_timeout (%g s, "
            "unless it is set): such a request goes to another one",
            config.timeout,
            DEFAULT_TIMEOUT,
        )
    with contextlib.closing(sock):
        if not options.start_pair:
            return asyncio.run(_serve(Router(config, prefill, decode), NoServers(), sock))
        pair = Pair(rest, config.max_restarts)
        router = Router(config, [pair.address("prefill")], [pair.address("decode")])
        pools = {pool.name: pool for pool in (router.prefill, router.decode)}
        pair.has_been_well = lambda name: pools[name].servers[0].was_well
        pair.restarted = router.metrics.restarted
        return asyncio.run(_serve(router, pair, sock))


def _addresses(field: str, urls: Sequence[str]) -> list[Address]:
    """Raises ConfigError, also for one that is named twice."""
    found: list[Address] = []
    for url in urls:
        address = Address.of(field, url)
        if address in found:
            raise ConfigError(field, url, "is named twice", f"drop one --{field}")
        found.append(address)
    return found


def _take_in_logs() -> None:
    """What libraries say looks like what the router says."""
    for name, level in (("uvicorn", logging.ERROR), ("asyncio", logging.WARNING)):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = LOGGER.handlers, False
        logger.setLevel(level)


class _Server(uvicorn.Server):
    """uvicorn's server; the signals are ours."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave them alone."""
        yield


async def _serve(router: Router, servers: Servers, sock: socket.socket) -> int:
    """Serve until a signal, or until a server that was started here cannot run: the exit code."""
    settings = uvicorn.Config(
        router,
        log_config=None,
        lifespan="off",
        ws="none",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=router.config.drain_seconds,  # type: ignore[arg-type]
    )
    server, stopping, loop = _Server(settings), asyncio.Event(), asyncio.get_running_loop()

    def on_signal() -> None:
        server.force_exit = stopping.is_set()  # the second one hurries
        stopping.set()

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(number, on_signal)
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    lives = asyncio.create_task(servers.watch())
    others = [asyncio.create_task(work) for work in (router.watch(), _tell(server, router, sock))]
    stopped = asyncio.create_task(stopping.wait())
    try:
        await asyncio.wait([serving, lives, stopped], return_when=asyncio.FIRST_COMPLETED)
        server.should_exit = True
        if lives.done() and not stopped.done():
            server.force_exit = True
        await serving
        return lives.result() if lives.done() and not stopped.done() else 0
    finally:
        for task in (lives, stopped, *others):
            task.cancel()
        await asyncio.gather(lives, stopped, *others, return_exceptions=True)
        await servers.stop()


async def _tell(server: uvicorn.Server, router: Router, sock: socket.socket) -> None:
    """Say where the router listens, and when a request can be served."""
    while not server.started:
        await asyncio.sleep(0.05)
    host, port = sock.getsockname()[:2]
    print(f"octavo router: http://{Address(host, port)}", flush=True)
    while not router.is_ready:
        await asyncio.sleep(0.1)
    print("octavo router: ready", flush=True)
