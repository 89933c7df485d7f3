"""A checkpoint's model, built and filled at once."""

from __future__ import annotations

from pathlib import Path

import torch

from octavo.checkpoint.arch import Arch
from octavo.checkpoint.loader import build_model, fill_model
from octavo.models.base import Model


def load_model(
    arch: Arch,
    folder: Path | None,
    dtype: torch.dtype,
    quantization: str | None = None,
    load_format: str = "auto",
    seed: int = 0,
) -> Model:
    """As `build_model` and `fill_model` do, on the CPU."""
    model = build_model(arch, dtype)
    fill_model(model, folder, quantization, load_format, seed=seed)
    return model
