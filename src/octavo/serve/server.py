"""`octavo serve`: the process that listens.

Owns the socket, the signals, the order of start and stop, and the log's format. Knows no route. Invariants: the address
is printed when connections are taken, and again when the engine is ready; after SIGTERM no request is begun and every
open one ends, by itself or with an error; an engine that is down for good ends the process with its exit code.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import faulthandler
import json
import logging
import os
import resource
import signal
import socket
import ssl
import stat
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import uvicorn

from octavo.cli import flags
from octavo.config.engine_config import EngineConfig
from octavo.config.settings import ConfigError
from octavo.observe import LOGGER, setup_logging
from octavo.serve.app import App, create_app
from octavo.serve.engine.async_engine import AsyncEngine
from octavo.serve.engine.refusals import EngineDeadError
from octavo.serve.http.protocol import GuardedProtocol, guarded
from octavo.serve.settings import SERVE_SETTINGS, ServeConfig, load_both
from octavo.startup import gc_control
from octavo.startup.listen import listen_tcp

_LOG = logging.getLogger(__name__)
_BACKLOG = 4096
_LAST_SECONDS = 2.0  # once all requests have ended: for replies on their way, and bodies that still come
_HURRY_SECONDS = 1.0  # for the last events of open streams, after a second signal
_SURELY_SECONDS = 20.0  # beyond the grace time, for an end in order
_OWN_FILES = 64  # of the process beside connections: libraries, pipes and sockets of its children
_SEND_BUFFER_BYTES = 256 << 10  # of the kernel, per connection: a slow reader is noticed in time


def main(argv: Sequence[str], *, engine_module: str = "") -> int:
    """The command. `engine_module`: another engine process than Octavo's, run with `python -m`."""
    parser = flags.Parser(
        prog="octavo serve",
        usage="octavo serve [MODEL] [option ...]",
        description="Serve a model over HTTP with OpenAI's API.",
    )
    parser.add_argument("models", nargs="*", metavar="MODEL", help="as --model (default: octavo-tiny)")
    flags.add_config_flags(parser)
    flags.add_server_flags(parser, SERVE_SETTINGS)
    namespace, dotted = parser.parse(argv)
    given = flags.given_config(namespace, dotted)
    if not namespace.models and not {"model", "model_path"} & given.keys() and not hasattr(namespace, "config"):
        model = flags.take_model(namespace, argv)
        namespace.models += [model] if model is not None else []
        given = flags.given_config(namespace, dotted)
    if len(namespace.models) > 1 or (namespace.models and "model" in given):
        raise flags.UsageError("one model is served; give its name once")
    if namespace.models:
        given["model"] = namespace.models[0]
    config, serve = load_both(given, flags.given_server(namespace), getattr(namespace, "config", None))
    command = [sys.executable, "-m", engine_module] if engine_module else None
    return run(config, serve, command=command)


def run(config: EngineConfig, serve: ServeConfig, *, command: Sequence[str] | None = None) -> int:
    """Serve until a signal or the engine's end. Returns the exit code. Raises ValueError for what cannot be served."""
    set_up_logging(config.log_level, serve)
    serve = with_open_files(serve)
    check_tls(serve)
    sock = listen(serve)
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            return runner.run(_serve(config, serve, sock, command))
    finally:
        faulthandler.cancel_dump_traceback_later()
        sock.close()
        if serve.uds is not None:
            with contextlib.suppress(OSError):
                os.unlink(serve.uds)


def check_tls(serve: ServeConfig) -> None:
    """Read the certificate and its key once, before anything is made. Raises ConfigError."""
    if serve.ssl_certfile is None:
        return
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(serve.ssl_certfile, serve.ssl_keyfile)
    except OSError as error:  # SSLError is one
        reason = error.strerror or getattr(error, "reason", None) or "it is no such file"
        raise ConfigError("ssl_certfile", serve.ssl_certfile, f"cannot be used with ssl_keyfile ({reason})") from None
    if serve.ssl_ca_certs is not None:
        try:
            context.load_verify_locations(serve.ssl_ca_certs)
        except OSError as error:
            reason = error.strerror or getattr(error, "reason", None) or "it is no such file"
            raise ConfigError("ssl_ca_certs", serve.ssl_ca_certs, f"cannot be used ({reason})") from None


def with_open_files(serve: ServeConfig) -> ServeConfig:
    """Raise this process's limit of open files to what the settings need, or lower the settings to what there is.

    Raises ConfigError if not even a few connections can be had.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, most = (sys.maxsize if limit == resource.RLIM_INFINITY else limit for limit in (soft, hard))
    wanted = serve.max_connections + _OWN_FILES
    if soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(wanted, most), hard))
            soft = min(wanted, most)
    if soft <= _OWN_FILES:
        limit = f"a process may have {soft} open files here (ulimit -n), and a server needs {_OWN_FILES} of its own"
        raise ConfigError("max_connections", serve.max_connections, limit, "raise that limit: ulimit -n 4096")
    if soft < wanted:
        _LOG.warning(
            "at most %d connections: a process may have %d open files here (ulimit -n)", soft - _OWN_FILES, soft
        )
        serve = dataclasses.replace(serve, max_connections=soft - _OWN_FILES)
    return serve


def listen(serve: ServeConfig) -> socket.socket:
    """A bound socket. Raises ConfigError."""
    if serve.uds is not None:
        sock = socket.socket(socket.AF_UNIX)
        _remove_stale(serve.uds)
        old_mask = os.umask(0o177)
        try:
            sock.bind(serve.uds)
            sock.listen(_BACKLOG)  # from now on nobody takes it for one that was left
        except OSError as error:
            raise ConfigError("uds", serve.uds, f"cannot be bound ({error.strerror})") from None
        finally:
            os.umask(old_mask)
    else:
        return listen_tcp(serve.host, serve.port, send_buffer=_SEND_BUFFER_BYTES)
    sock.setblocking(False)
    return sock


def _remove_stale(path: str) -> None:
    """Remove a socket that nobody listens on: a server that was killed leaves it."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as visitor:
        if stat.S_ISSOCK(os.lstat(path).st_mode):
            try:
                visitor.connect(path)
            except ConnectionRefusedError:
                os.unlink(path)


async def _serve(config: EngineConfig, serve: ServeConfig, sock: socket.socket, command: Sequence[str] | None) -> int:
    engine = await AsyncEngine.start(
        config,
        command=command,
        max_num_queued_reqs=serve.max_num_queued_reqs,
        max_num_queued_tokens=serve.max_num_queued_tokens,
    )
    try:
        app = create_app(engine, serve)
        settings = uvicorn.Config(
            app,
            http=guarded(serve),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            backlog=_BACKLOG,
            timeout_graceful_shutdown=_LAST_SECONDS + 1,  # type: ignore[arg-type]
            timeout_keep_alive=serve.idle_timeout,  # type: ignore[arg-type]
            ssl_keyfile=serve.ssl_keyfile,
            ssl_certfile=serve.ssl_certfile,
            ssl_ca_certs=serve.ssl_ca_certs,
            ssl_cert_reqs=serve.ssl_cert_reqs,
        )
        app.state.texts.warm()
        server = _Server(settings)
        gc_control.settle()
        try:
            return await _until_the_end(server, app, engine, serve, sock)
        finally:
            await app.close()
    finally:
        await engine.close()


async def _until_the_end(
    server: _Server, app: App, engine: AsyncEngine, serve: ServeConfig, sock: socket.socket
) -> int:
    """Serve; on a signal drain; on a second one, or when the engine is gone for good, stop at once."""
    stopping, hurrying = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def stop_now() -> None:
        server.force_exit = server.should_exit = True
        server.cut()

    def on_signal() -> None:
        if hurrying.is_set():
            stop_now()
        elif stopping.is_set():
            _LOG.warning("stopping at once")
            hurrying.set()
            loop.call_later(_HURRY_SECONDS, stop_now)
        stopping.set()
        _end_surely(_HURRY_SECONDS if hurrying.is_set() else serve.drain_seconds)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    dead = asyncio.create_task(engine.wait_dead())
    asked = asyncio.create_task(stopping.wait())
    drain = asyncio.create_task(_drain_when(stopping, hurrying, engine, serve.drain_seconds))
    while not server.started and not serving.done():
        await asyncio.sleep(0.005)
    name, where = app.state.model_names[0], address_of(sock, serve)
    say(f"starting {name}; it will answer on {where}")
    telling = asyncio.create_task(_tell_when_ready(engine, f"serving {name} on {where}"))
    await asyncio.wait([serving, dead, drain], return_when=asyncio.FIRST_COMPLETED)
    code = 0
    if dead.done() and not asked.done():
        print(f"octavo: error: {' '.join(dead.result().split())}", file=sys.stderr, flush=True)
        code = engine.exit_code
    server.should_exit = True
    for task in (dead, asked, drain, telling):
        task.cancel()
    cut = loop.call_later(_LAST_SECONDS, server.cut)
    await serving
    cut.cancel()
    return code


async def _tell_when_ready(engine: AsyncEngine, line: str) -> None:
    """Print a line once the engine takes requests; never, if it does not come to that."""
    with contextlib.suppress(EngineDeadError):
        await engine.wait_ready()
        say(line)


async def _drain_when(stopping: asyncio.Event, hurrying: asyncio.Event, engine: AsyncEngine, seconds: float) -> None:
    """Let requests end; when that has taken `seconds`, or shall be quick, they end with an error."""
    await stopping.wait()
    if count := engine.num_requests:
        line = "shutting down: %d open requests have %g s to end; a second Ctrl-C or SIGTERM ends them at once"
        _LOG.warning(line, count, seconds)
    drain, hurry = asyncio.create_task(engine.drain(seconds)), asyncio.create_task(hurrying.wait())
    await asyncio.wait([drain, hurry], return_when=asyncio.FIRST_COMPLETED)
    if not drain.done():
        drain.cancel()
        await engine.drain(0.0)
    hurry.cancel()


def _end_surely(seconds: float) -> None:
    """End this process if it has not ended some time after `seconds`, whatever holds it up, and say where it stood."""
    with contextlib.suppress(OSError, AttributeError, ValueError, RuntimeError):  # without a stderr
        faulthandler.dump_traceback_later(seconds + _SURELY_SECONDS, exit=True)


class _Server(uvicorn.Server):
    """uvicorn's server; the signals are ours."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave them alone."""
        yield

    def cut(self) -> None:
        """End what is open."""
        for connection in list(self.server_state.connections):
            cast(GuardedProtocol, connection).cut()


def address_of(sock: socket.socket, serve: ServeConfig) -> str:
    """Where the server listens, for people and for programs that chose port 0."""
    if serve.uds is not None:
        return f"unix:{serve.uds}"
    host, port = sock.getsockname()[:2]
    scheme = "http" if serve.ssl_certfile is None else "https"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def say(line: str) -> None:
    """Print a line at once. Whoever read the first one may have closed the pipe: that ends no server."""
    try:
        print(f"octavo: {line}", flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the flush at exit must not fail again


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def set_up_logging(level: str, serve: ServeConfig) -> None:
    """Octavo's log and uvicorn's on stderr, in the format of the settings."""
    setup_logging(level)
    if serve.log_format == "json":
        for handler in LOGGER.handlers:
            handler.setFormatter(JsonFormatter())
    uvicorn_log = logging.getLogger("uvicorn")
    uvicorn_log.handlers = LOGGER.handlers
    uvicorn_log.propagate = False
    uvicorn_log.setLevel(logging.ERROR)


class JsonFormatter(logging.Formatter):
    """One JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        """A record with its fields, if it has some."""
        entry: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        fields = getattr(record, "fields", None)
        entry |= fields if fields is not None else {"message": record.getMessage()}
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False, default=str)
