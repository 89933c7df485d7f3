"""The table of routes for a trainer's loop: vLLM's names, then SGLang's.

Owns the table alone. Invariants: whatever changes the engine is for administrators; no route depends on a mode of the
server.
"""

from __future__ import annotations

from octavo.serve.http.auth import Access
from octavo.serve.routes import control, facts
from octavo.serve.routes.route import Handler, Route


def _admin(path: str, handler: Handler, *methods: str) -> list[Route]:
    return [Route(method, path, handler, Access.ADMIN) for method in methods or ("POST",)]


RL_ROUTES = (
    *_admin("/pause", control.pause),
    *_admin("/resume", control.resume),
    *_admin("/is_paused", control.is_paused, "GET"),
    *_admin("/abort_requests", control.abort_requests),
    *_admin("/sleep", control.sleep),
    *_admin("/wake_up", control.wake_up),
    *_admin("/is_sleeping", control.is_sleeping, "GET"),
    *_admin("/release_kv_cache_memory", control.release_kv_cache_memory),
    *_admin("/reset_prefix_cache", control.reset_prefix_cache),
    *_admin("/get_world_size", facts.get_world_size, "GET"),
    *_admin("/server_info", facts.server_info, "GET"),
    *_admin("/pause_generation", control.pause_generation),
    *_admin("/continue_generation", control.continue_generation),
    *_admin("/abort_request", control.abort_request),
    *_admin("/release_memory_occupation", control.release_memory_occupation),
    *_admin("/resume_memory_occupation", control.resume_memory_occupation),
    *_admin("/flush_cache", control.flush_cache, "GET", "POST"),
    *_admin("/model_info", facts.model_info, "GET"),
    *_admin("/get_model_info", facts.model_info, "GET"),
    *_admin("/v1/loads", facts.loads, "GET"),
    *_admin("/health_generate", facts.health_generate, "GET"),
    *_admin("/liveness", facts.health_generate, "GET"),
)
