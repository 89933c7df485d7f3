"""Engines on octavo-tiny with a drafter, and a drafter of every method: some draft well, some know nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from octavo.config.engine_config import EngineConfig
from octavo.frontend.engine import Engine

K = 4
ITSELF = {"method": "draft_model", "model": "octavo-tiny", "draft_noise": 1}
SPEAKERS: dict[str, dict[str, Any]] = {
    "eagle3": {"method": "eagle3", "model": "octavo-tiny-eagle3"},
    "mtp": {"method": "mtp", "model": "octavo-tiny-mtp"},
    "mtp-greedy": {"method": "mtp", "model": "octavo-tiny-mtp", "draft_sample_method": "greedy"},
    "draft_model": ITSELF,
}


def make(speculative: dict[str, Any] | None, **fields: Any) -> Engine:
    given = {} if speculative is None else {"num_speculative_tokens": K, "adaptive_depth": False, **speculative}
    settings = {"dtype": "float32", "device": "cpu", "kv_cache_memory_bytes": 12 << 20, "speculative_config": given}
    return Engine(EngineConfig(**{**settings, **fields}))


def random_head(folder: Path, hidden: int = 256, vocab: int = 4096) -> Path:
    """An EAGLE-1 head that knows nothing."""
    generator = torch.Generator().manual_seed(2)
    shapes = {
        "fc.weight": (hidden, 2 * hidden),
        "fc.bias": (hidden,),
        "layers.0.self_attn.q_proj.weight": (256, hidden),
        "layers.0.self_attn.k_proj.weight": (128, hidden),
        "layers.0.self_attn.v_proj.weight": (128, hidden),
        "layers.0.self_attn.o_proj.weight": (hidden, 256),
        "layers.0.post_attention_layernorm.weight": (hidden,),
        "layers.0.mlp.gate_proj.weight": (64, hidden),
        "layers.0.mlp.up_proj.weight": (64, hidden),
        "layers.0.mlp.down_proj.weight": (hidden, 64),
    }
    save_file(
        {name: torch.randn(shape, generator=generator) * shape[-1] ** -0.5 for name, shape in shapes.items()},
        folder / "model.safetensors",
    )
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "num_hidden_layers": 1,
        "vocab_size": vocab,
        "max_position_embeddings": 2048,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def random_block_drafter(folder: Path) -> Path:
    """A drafter of method dflash that knows nothing, as transformers writes it."""
    from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel

    torch.manual_seed(5)
    config = MuseGlimmerAssistantConfig(
        hidden_size=256,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        max_position_embeddings=2048,
        sliding_window=24,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        block_size=1 + K,
        mask_token_id=7,
        target_layer_ids=[0, 1, 3],
    )
    model = MuseGlimmerAssistantModel(config).float()
    for name, weight in model.named_parameters():
        with torch.no_grad():
            weight.copy_(torch.randn(weight.shape) * weight.shape[-1] ** -0.5 if weight.ndim > 1 else weight + 0.2)
        assert weight.dtype == torch.float32, name
    model.save_pretrained(folder)
    return folder


def two_modules(folder: Path) -> Path:
    """octavo-tiny-mtp's module twice: the second one drafts worse."""
    with resources.as_file(resources.files("octavo").joinpath("assets/octavo-tiny-mtp")) as bundled:
        config = json.loads((bundled / "config.json").read_text())
        weights = load_file(bundled / "model.safetensors")
    first = config["num_hidden_layers"]
    (folder / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 2}))
    again = {name.replace(f"layers.{first}.", f"layers.{first + 1}."): each.clone() for name, each in weights.items()}
    save_file(weights | again, folder / "model.safetensors")
    return folder


METHODS: dict[str, Callable[[Path], dict[str, Any]]] = {  # of a folder that is empty
    "ngram": lambda _: {"method": "ngram", "prompt_lookup_max": 3},
    "draft_model": lambda _: ITSELF,
    "eagle": lambda folder: {"method": "eagle", "model": str(random_head(folder))},
    "eagle3": lambda _: SPEAKERS["eagle3"],
    "mtp": lambda _: SPEAKERS["mtp"],
    "mtp of two modules": lambda folder: {"method": "mtp", "model": str(two_modules(folder))},
    "dflash": lambda folder: {"method": "dflash", "model": str(random_block_drafter(folder))},
}
