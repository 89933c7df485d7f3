"""`octavo router`: one address for prefill and decode servers, which are there already or are started with it.

Owns the command line and the children. Invariant: whatever ends the router ends the servers that it has started.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence

import uvicorn

from octavo.cli.flags import Parser, UsageError
from octavo.observe import setup_logging
from octavo.router.app import Router, RouterSettings
from octavo.router.http import Address

_LOG = logging.getLogger(__name__)
_STOP_SECONDS = 20.0


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
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=8000, help="port to listen on; 0: the system chooses")
    parser.add_argument("--connect-timeout", type=float, default=5.0, help="seconds to reach a server")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds that a server may be silent")
    parser.add_argument("--health-interval", type=float, default=1.0, help="seconds between two looks at a server")
    parser.add_argument("--retries", type=int, default=2, help="tries after the first, on other servers, of each phase")
    options = parser.parse_args(arguments)
    if options.start_pair == bool(options.prefill or options.decode):
        raise UsageError("octavo router: name servers with --prefill and --decode, or give --start-pair")
    if rest and not options.start_pair:
        raise UsageError("octavo router: what stands behind -- is for the servers of --start-pair")
    if not options.start_pair and not options.decode:
        raise UsageError("octavo router: a prompt is continued by a decode server: give --decode")
    setup_logging("warning")
    with contextlib.ExitStack() as stack:
        prefill, decode = options.prefill, options.decode
        if options.start_pair:
            prefill, decode = ([url] for url in stack.enter_context(_pair(rest)))
        settings = RouterSettings(
            prefill=tuple(map(Address.of, prefill)),
            decode=tuple(map(Address.of, decode)),
            connect_timeout=options.connect_timeout,
            timeout=options.timeout,
            health_interval=options.health_interval,
            retries=options.retries,
        )
        asyncio.run(_serve(Router(settings), options.host, options.port))
    return 0


async def _serve(router: Router, host: str, port: int) -> None:
    config = uvicorn.Config(router, host=host, port=port, log_config=None, lifespan="off", ws="none", access_log=False)
    server = uvicorn.Server(config)
    watching = asyncio.create_task(router.watch())
    telling = asyncio.create_task(_tell(server, router))
    try:
        await server.serve()
    finally:
        watching.cancel()
        telling.cancel()


async def _tell(server: uvicorn.Server, router: Router) -> None:
    """Say where the router listens, and when a request can be served."""
    while not server.started:
        await asyncio.sleep(0.05)
    for listener in server.servers:
        for sock in listener.sockets:
            print("octavo router: http://{}:{}".format(*sock.getsockname()[:2]), flush=True)
    while not router.decode.is_well:
        await asyncio.sleep(0.1)
    print("octavo router: ready", flush=True)


@contextlib.contextmanager
def _pair(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """A prefill and a decode server on this machine, with these arguments of `octavo serve`."""
    children: list[subprocess.Popen[bytes]] = []
    urls = []
    try:
        for role in ("kv_producer", "kv_consumer"):
            port = _free_port()
            transfer = {"kv_connector": "p2p", "kv_role": role, "kv_port": 0, "kv_load_failure_policy": "recompute"}
            command = [sys.executable, "-m", "octavo", "serve", "--host", "127.0.0.1", "--port", str(port)]
            children.append(subprocess.Popen([*command, "--kv-transfer-config", json.dumps(transfer), *arguments]))
            urls.append(f"http://127.0.0.1:{port}")
        yield urls[0], urls[1]
    finally:
        for child in children:
            child.terminate()
        for child in children:
            try:
                child.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                child.kill()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
