"""What a worker's cache follows from, as digests: of its model, and of the mods of its attention.

Owns which facts of a loaded model count. Knows no secret and no block. Invariant: two workers that give other bits for
the same tokens, under one numerics id, have other digests.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from octavo.checkpoint.digest import WeightsDigest
from octavo.config.engine_config import Resolved
from octavo.layers.attention import Attention
from octavo.layers.latent_attention import LatentAttention
from octavo.models.base import Model


def _code_digests(model: torch.nn.Module) -> dict[str, str]:
    """Of the modules of packages that the model's layers come from, Octavo's apart: the numerics id stands for those.

    One whose source cannot be read has a digest that no other process has.
    """
    packages = {type(layer).__module__.partition(".")[0] for layer in model.modules()} - {"octavo", "torch"}
    found = {}
    for name, module in sorted(sys.modules.items()):
        if name.partition(".")[0] in packages:
            try:
                source = Path(module.__file__ or "").read_bytes()
            except (AttributeError, OSError):
                source = b"" if hasattr(module, "__path__") else secrets.token_bytes(16)  # a folder without a file
            found[name] = hashlib.blake2b(source, digest_size=16).hexdigest()
    return found


def _drafter(resolved: Resolved) -> list[str | None]:
    """Who drafts with layers of its own, if anybody does."""
    config = resolved.speculative
    return [] if config.method in ("", "ngram") else [config.method, config.model, config.revision]


def model_digest(
    model: Model, overrides: Mapping[str, Any], resolved: Resolved, folder: Path | None, weights: WeightsDigest
) -> str:
    """Of the weights, the scales of a quantized cache, and what says how they are used: a model's own code, too.

    overrides: of config.json; folder: where that lies; weights: of all tensors that were read.
    """
    assert isinstance(model, torch.nn.Module), "models are trees of layers"
    for layer in model.modules():
        if isinstance(layer, Attention | LatentAttention):
            for name in ("key_scale", "value_scale"):
                scale = getattr(layer.tensors, name)
                if scale is not None:
                    weights.add(f"{name} of layer {layer.index}", scale.cpu().contiguous())
    file = folder / "config.json" if folder is not None else None
    facts = {
        "config": hashlib.blake2b(file.read_bytes() if file is not None and file.exists() else b"").hexdigest(),
        "overrides": overrides,
        "dummy": resolved.seed if resolved.load_format == "dummy" else None,
        # two rotations follow from the side of the trained length that their table was made for
        "long": [model.arch.max_position > kind.rope.original_max_position for kind in model.arch.layers],
        "weights": weights.hexdigest(),
        "drafter": _drafter(resolved),  # whose layers lie in the same blocks
        "code": _code_digests(model),
    }
    return hashlib.blake2b(json.dumps(facts, sort_keys=True, default=repr).encode(), digest_size=16).hexdigest()
