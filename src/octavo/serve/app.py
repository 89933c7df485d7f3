"""The ASGI application: the table of routes, and what happens to every request around them.

Owns the table, the order of the checks (host, key, path, method), errors as replies, and the log line of an exchange.
Knows no field of any request. Invariants: a route that is not in the table does not exist, and each entry says who may
call it; nothing that a handler raises leaves here but a cancellation.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from octavo.request.sampling_params import ParameterError
from octavo.serve.engine.async_engine import AsyncEngine
from octavo.serve.errors import ApiError, from_parameter_error, internal
from octavo.serve.http.auth import Access
from octavo.serve.http.exchange import CLIENT_LEFT, ClientLeftError, Exchange, Receive, Scope, Send, check_host
from octavo.serve.routes import chat, completions, responses, status, text, transfers
from octavo.serve.routes.rl import RL_ROUTES
from octavo.serve.routes.route import Route
from octavo.serve.settings import ServeConfig, split
from octavo.serve.state import ServeState

_LOG = logging.getLogger(__name__)

ROUTES = (
    Route("POST", "/v1/completions", completions.create),
    Route("POST", "/v1/chat/completions", chat.create),
    Route("POST", "/v1/responses", responses.create),
    Route("GET", "/v1/models", status.models),
    Route("GET", "/v1/models/{id}", status.model),
    Route("POST", "/tokenize", text.tokenize),
    Route("POST", "/detokenize", text.detokenize),
    Route("GET", "/tokenizer_info", text.tokenizer_info),
    Route("GET", "/health", status.health, Access.PUBLIC),
    Route("GET", "/ping", status.health, Access.PUBLIC),
    Route("POST", "/ping", status.health, Access.PUBLIC),
    Route("GET", "/ready", status.ready, Access.PUBLIC),
    Route("GET", "/version", status.version),
    Route("GET", "/metrics", status.metrics),
    Route("GET", "/load", status.load),
    Route("GET", "/kv_transfer", transfers.standing),
    Route("POST", "/kv_transfer/release", transfers.release),
    Route("GET", "/", status.page, Access.PUBLIC),
    *RL_ROUTES,
)


class App:
    """Answers every exchange by the table."""

    def __init__(self, state: ServeState, routes: tuple[Route, ...] = ROUTES) -> None:
        """`routes`: the table; the page is left out where it is off."""
        self.state = state
        self.routes = tuple(route for route in routes if route.path != "/" or not state.config.disable_page)
        self._exact: dict[str, dict[str, Route]] = {}
        self._prefixes: dict[str, dict[str, Route]] = {}
        for route in self.routes:
            prefix, brace, _ = route.path.partition("{")
            paths = self._prefixes if brace else self._exact
            paths.setdefault(prefix, {})[route.method] = route
        state.metrics.add_routes((route.method, route.path) for route in self.routes)
        self._unlogged = frozenset(split(state.config.disable_access_log_for_endpoints))
        origins = split(state.config.cors_origins)
        self._entry: Any = _with_cors(self._exchange, origins) if origins else self._exchange

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        await self._entry(scope, receive, send)

    async def close(self) -> None:
        """End what runs beside the exchanges."""
        await self.state.close()

    async def _exchange(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http", "the server speaks HTTP only"
        exchange = Exchange(scope, receive, send, self.state.config, self.state.texts.parse)
        root = self.state.config.root_path
        if root is not None and exchange.path.startswith(root + "/"):
            exchange.path = exchange.path[len(root) :]
        try:
            try:
                await self._answer(exchange)
            except ApiError as error:
                await exchange.fail(error)
            except ClientLeftError:
                raise
            except Exception:
                _LOG.exception("request %s: internal error", exchange.request_id)
                await exchange.fail(internal(exchange.request_id))
        except ClientLeftError:
            exchange.status = CLIENT_LEFT
        finally:
            self._log(exchange)

    async def _answer(self, exchange: Exchange) -> None:
        check_host(exchange, self.state.host_names)
        methods = self._methods(exchange)
        route = methods.get("GET" if exchange.method == "HEAD" else exchange.method)
        self.state.keys.check(exchange.raw_headers, route.access if route else Access.USER)
        if not methods:
            raise ApiError(404, "not_found", "there is no such path")
        if route is None:
            allow = ", ".join(sorted(methods)).encode()
            raise ApiError(405, "method_not_allowed", "the method is not allowed here", headers=[(b"allow", allow)])
        exchange.route = route.path
        try:
            await route.handler(self.state, exchange)
        except ParameterError as error:
            raise from_parameter_error(error) from None

    def _methods(self, exchange: Exchange) -> dict[str, Route]:
        """Method -> route of the path; empty if there is none. A slash at the end, or a missing /v1, is no matter."""
        path = exchange.path
        if len(path) > 2 and path.endswith("/"):
            path = path[:-1]
        for each in (path, f"/v1{path}"):
            found = self._exact.get(each)
            if found is not None:
                return found
            for prefix, methods in self._prefixes.items():
                if each.startswith(prefix) and len(each) > len(prefix):
                    exchange.path_value = each[len(prefix) :]
                    return methods
        return {}

    def _log(self, exchange: Exchange) -> None:
        seconds = time.monotonic() - exchange.started
        self.state.metrics.http(exchange.method, exchange.route, exchange.status or 500, seconds)
        is_logged = self.state.config.access_log and exchange.path not in self._unlogged
        if is_logged and _LOG.isEnabledFor(logging.INFO):
            fields = {
                "request_id": exchange.request_id,
                "client": exchange.client,
                "method": exchange.method,
                "route": exchange.route or "other",
                "status": exchange.status,
                "ms": round(seconds * 1000, 1),
                **exchange.notes,
            }
            _LOG.info("%s", " ".join(f"{k}={v}" for k, v in fields.items()), extra={"fields": fields})


def _with_cors(app: Any, origins: list[str]) -> Any:
    """`app` for browsers that show pages of these origins."""
    from starlette.middleware.cors import CORSMiddleware

    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=["GET", "POST"],
        allow_headers=["*"],  # OpenAI's client has a dozen of its own; none opens anything, and cookies are not taken
        expose_headers=["x-request-id", "retry-after", "x-should-retry"],
    )


def create_app(engine: AsyncEngine, config: ServeConfig) -> App:
    """The application for an engine. Raises ConfigError for keys or a template that cannot be read."""
    return App(ServeState(engine, config))
