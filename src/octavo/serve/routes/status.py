"""The routes that generate nothing: models, health, version, figures, the page.

Owns their replies. Invariants: /health and /ready are about the engine's progress, not about this process; what anybody
may call tells nothing of users, models or the machine.
"""

from __future__ import annotations

import functools
from importlib import resources

import octavo
from octavo.serve.api.shapes import ModelCard, ModelList
from octavo.serve.errors import not_ready
from octavo.serve.http.exchange import Exchange
from octavo.serve.metrics import CONTENT_TYPE
from octavo.serve.state import ServeState

# The page is one file: its scripts and styles are inline, and it may talk to nobody but this server.
_PAGE_POLICY = (
    b"default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; connect-src 'self'; "
    b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


async def models(state: ServeState, exchange: Exchange) -> None:
    """GET /v1/models."""
    await exchange.reply_json(ModelList(data=[_card(state, name) for name in state.model_names]))


async def model(state: ServeState, exchange: Exchange) -> None:
    """GET /v1/models/{id}."""
    await exchange.reply_json(_card(state, state.check_model(exchange.path_value)))


def _card(state: ServeState, name: str) -> ModelCard:
    limits = state.engine.limits
    return ModelCard(id=name, created=state.created, root=state.engine.model_name, max_model_len=limits.max_model_len)


async def health(state: ServeState, exchange: Exchange) -> None:
    """GET /health: 200 while the engine is heard, its steps follow each other and its weights are not lost."""
    state.check_weights(whole=False)
    if not state.healthy:
        raise not_ready(state.engine.state)
    await exchange.reply(200, b"")


async def ready(state: ServeState, exchange: Exchange) -> None:
    """GET /ready: 200 while requests are taken."""
    state.check_weights(whole=True)
    if not state.engine.ready:
        raise not_ready(state.engine.state)
    await exchange.reply_json({"status": "ready"})


async def version(state: ServeState, exchange: Exchange) -> None:
    """GET /version."""
    await exchange.reply_json({"version": octavo.__version__})


async def metrics(state: ServeState, exchange: Exchange) -> None:
    """GET /metrics, for Prometheus."""
    await exchange.reply(200, await state.metrics.rendered(), CONTENT_TYPE.encode())


async def load(state: ServeState, exchange: Exchange) -> None:
    """GET /load: requests that are being answered."""
    await exchange.reply_json({"server_load": state.num_open})


async def page(state: ServeState, exchange: Exchange) -> None:
    """GET /: the chat page."""
    headers = [(b"content-security-policy", _PAGE_POLICY), (b"cache-control", b"no-cache")]
    await exchange.reply(200, _page(), b"text/html; charset=utf-8", headers)


@functools.cache
def _page() -> bytes:
    return resources.files("octavo").joinpath("serve/page/index.html").read_bytes()
