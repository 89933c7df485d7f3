"""What of a model's experts steps record."""

from __future__ import annotations

from octavo.checkpoint.arch import Arch
from octavo.config.settings import ConfigError


def resolve_experts(enabled: bool, arch: Arch) -> tuple[int, int]:
    """Layers, and experts of a token in each, where they are recorded; else zeros. Raises ConfigError."""
    if not enabled:
        return 0, 0
    if arch.moe is None:
        raise ConfigError("enable_return_routed_experts", True, f"{arch.name} has no experts", "leave it out")
    return len(arch.layers), arch.moe.experts_per_token
