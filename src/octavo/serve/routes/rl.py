"""The table of routes for a trainer's loop: vLLM's names, then SGLang's.

Owns the table, and what its routes have in common. Invariants: whatever changes the engine is for administrators; no
route depends on a mode of the server; a client that leaves is noticed while its move is made.
"""

from __future__ import annotations

import asyncio

from octavo.serve.http.auth import Access
from octavo.serve.http.exchange import ClientLeftError, Exchange
from octavo.serve.routes import control, facts, sglang, tokens, weight_checks, weights
from octavo.serve.routes.route import Handler, Route
from octavo.serve.state import ServeState


def _admin(path: str, handler: Handler, *methods: str) -> list[Route]:
    return [
        Route(method, path, _left_behind(handler) if method == "POST" else handler, Access.ADMIN)
        for method in methods or ("POST",)
    ]


def _left_behind(handler: Handler) -> Handler:
    """A route whose client may leave: see `octavo.serve.engine.leaving` for what becomes of its move."""

    async def answer(state: ServeState, exchange: Exchange) -> None:
        await exchange.read_ahead()
        move = asyncio.create_task(_quietly(handler, state, exchange))
        try:
            async with exchange.watching():
                await asyncio.shield(move)
        except ClientLeftError:
            state.engine.leaving.leave(move)
            raise

    return answer


async def _quietly(handler: Handler, state: ServeState, exchange: Exchange) -> None:
    try:
        await handler(state, exchange)
    except Exception:
        if not exchange.has_left:  # else there is nobody to tell
            raise


RL_ROUTES = (
    Route("POST", "/inference/v1/generate", tokens.create),
    Route("POST", "/generate", sglang.create),
    *_admin("/pause", control.pause),
    *_admin("/resume", control.resume),
    *_admin("/is_paused", control.is_paused, "GET"),
    *_admin("/abort_requests", control.abort_requests),
    *_admin("/sleep", control.sleep),
    *_admin("/wake_up", control.wake_up),
    *_admin("/is_sleeping", control.is_sleeping, "GET"),
    *_admin("/release_kv_cache_memory", control.release_kv_cache_memory),
    *_admin("/reset_prefix_cache", control.reset_prefix_cache),
    *_admin("/init_weight_transfer_engine", weights.init),
    *_admin("/shutdown_weight_transfer_engine", weights.shutdown),
    *_admin("/start_weight_update", weights.start),
    *_admin("/update_weights", weights.update),
    *_admin("/finish_weight_update", weights.finish),
    *_admin("/abort_weight_update", weights.abort),
    *_admin("/weight_info", weights.info, "GET"),
    *_admin("/get_weight_version", weights.version, "GET"),
    *_admin("/update_weight_version", weights.set_version),
    *_admin("/weight_checker", weight_checks.weight_checker),
    *_admin("/weights_checker", weight_checks.weights_checker, "GET", "POST"),
    *_admin("/get_weights_by_name", weight_checks.get_weights_by_name, "GET", "POST"),
    *_admin("/collective_rpc", weights.collective_rpc),
    *_admin("/init_weights_update_group", weights.init_group),
    *_admin("/destroy_weights_update_group", weights.shutdown),
    *_admin("/begin_weight_update", weights.start),
    *_admin("/update_weights_from_distributed", weights.from_distributed),
    *_admin("/update_weights_from_disk", weights.from_disk),
    *_admin("/update_weights_from_tensor", weights.from_tensor),
    *_admin("/end_weight_update", weights.finish),
    *_admin("/get_world_size", facts.get_world_size, "GET"),
    *_admin("/server_info", facts.server_info, "GET"),
    *_admin("/pause_generation", control.pause_generation),
    *_admin("/continue_generation", control.continue_generation),
    *_admin("/abort_request", control.abort_request),
    *_admin("/release_memory_occupation", control.release_memory_occupation),
    *_admin("/resume_memory_occupation", control.resume_memory_occupation),
    *_admin("/flush_cache", control.flush_cache, "GET", "POST"),
    *_admin("/get_server_info", facts.server_info, "GET"),
    *_admin("/model_info", facts.model_info, "GET"),
    *_admin("/get_model_info", facts.model_info, "GET"),
    *_admin("/v1/loads", facts.loads, "GET"),
    *_admin("/health_generate", facts.health_generate, "GET"),
    *_admin("/liveness", facts.liveness, "GET"),
)
