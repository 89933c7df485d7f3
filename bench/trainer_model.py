"""A trainer's model, on a GPU where there is one: transformers' Qwen3 with random weights, which follow from a seed."""

from __future__ import annotations

from typing import Any

import torch

from octavo.bench.shapes import SHAPES


def make_model(name: str, seed: int = 0) -> Any:
    """Of a shape's name, bfloat16, on the current GPU or else the CPU."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(**{key: value for key, value in SHAPES[name].items() if key != "architectures"})
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            model = Qwen3ForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    model.to_empty(device="cuda" if torch.cuda.is_available() else "cpu")
    model.tie_weights()
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.02) if parameter.dim() > 1 else parameter.uniform_(0.5, 1.5)
    return model
