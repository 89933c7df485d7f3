"""vLLM's helpers that trainers import."""

from __future__ import annotations

import uuid


def random_uuid() -> str:
    """A name that no other request has."""
    return uuid.uuid4().hex
