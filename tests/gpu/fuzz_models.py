"""The tiny models and draft heads of `fuzz_engines.py`: bundled ones, and random ones made once a process.

All have the tokenizer of octavo-tiny, so that forms, stops and bad words mean the same for each.
"""

from __future__ import annotations

import functools
import json
import shutil
import sys
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "models"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "e2e"))

from drafter_rig import random_block_drafter, random_head
from model_rig import make_reference

MAMBA2 = {"hidden_size": 256, "mamba_n_heads": 8, "mamba_d_head": 64, "mamba_d_state": 128}
DELTA = {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "head_dim": 128, "hidden_size": 256}
# Name -> (a family of model_rig, its changes). Heads of 64 and of 128 take the kernels of an H200; deepseek3 is latent.
RANDOM: dict[str, tuple[str, dict[str, Any]]] = {
    "q3n-h": ("qwen3-next", DELTA),
    "mamba2-h": (
        "mamba2",
        {"hidden_size": 256, "num_heads": 8, "head_dim": 64, "state_size": 128, "max_position_embeddings": None},
    ),
    "granite-h": ("granite4", {**MAMBA2, "num_attention_heads": 4}),
    "lfm2-h": ("lfm2", {"head_dim": 64, "hidden_size": 256}),
    "jamba-h": ("jamba", {"hidden_size": 256, "num_attention_heads": 4}),
    "deepseek3": ("deepseek3", {}),
    "qwen3-h": (
        "qwen3",
        {"head_dim": 128, "hidden_size": 256, "intermediate_size": 384, "tie_word_embeddings": False},
    ),
}
BUNDLED = ("octavo-tiny", "octavo-tiny-hybrid")
MODELS = (*RANDOM, *BUNDLED)
HYBRIDS = ("q3n-h", "mamba2-h", "granite-h", "lfm2-h", "jamba-h", "octavo-tiny-hybrid")
MODULES = ("q3n-h", "deepseek3")  # with a module of multi-token prediction that is one more layer of theirs
VOCAB_SIZE = 4096
SHARED: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "eos_token_id": 0,
    "bos_token_id": None,
    "max_position_embeddings": 1280,
}


class Checkpoints:
    """Each is made when it is first asked for, in `folder`, which its owner removes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._heads: dict[str, Callable[[Path], Path]] = {
            "eagle": random_head,
            "dflash": random_block_drafter,
            **{f"mtp-{model}": functools.partial(_write_module, model) for model in MODULES},
        }

    def model(self, name: str) -> str:
        """What the setting `model` says for it."""
        return name if name in BUNDLED else str(self._made(name, functools.partial(_write_model, name)))

    def head(self, name: str) -> str:
        """What `model` of a speculative_config says: a bundled name, or "eagle", "dflash", "mtp-" and a model."""
        return str(self._made(f"head-{name}", self._heads[name])) if name in self._heads else name

    def weights(self, name: str) -> dict[str, torch.Tensor]:
        """A model's, by the names of its checkpoint."""
        if name in BUNDLED:
            with resources.as_file(resources.files("octavo").joinpath(f"assets/{name}")) as folder:
                return load_file(folder / "model.safetensors")
        return load_file(Path(self.model(name)) / "model.safetensors")

    def _made(self, name: str, write: Callable[[Path], object]) -> Path:
        path = self._folder / name
        if not path.exists():
            path.mkdir()
            write(path)
        return path


def _fields(name: str) -> dict[str, Any]:
    return {**SHARED, **RANDOM[name][1]}


def _write_model(name: str, path: Path) -> None:
    make_reference(RANDOM[name][0], **_fields(name)).to(torch.bfloat16).save_pretrained(path)
    with resources.as_file(resources.files("octavo").joinpath("assets/octavo-tiny")) as bundled:
        for each in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            shutil.copy(bundled / each, path / each)


def _write_module(name: str, path: Path) -> Path:
    """A module of multi-token prediction for a model: random weights of a layer behind its last one."""
    small = make_reference(RANDOM[name][0], **_fields(name))
    count, size, fields = small.config.num_hidden_layers, small.config.hidden_size, _fields(name)
    if name == "q3n-h":
        fields["layer_types"] = [*small.config.layer_types, "full_attention"]
    large = make_reference(RANDOM[name][0], seed=5, **fields, num_hidden_layers=count + 1)
    large.save_pretrained(path)
    own = {key: value for key, value in load_file(path / "model.safetensors").items() if f"layers.{count}." in key}
    generator, prefix = torch.Generator().manual_seed(5), f"model.layers.{count}."
    for norm in ("enorm", "hnorm", "shared_head.norm"):
        own[f"{prefix}{norm}.weight"] = 1 + 0.2 * torch.randn(size, generator=generator)
    own[f"{prefix}eh_proj.weight"] = torch.randn(size, 2 * size, generator=generator) * (2 * size) ** -0.5
    small.config.save_pretrained(path)
    config = json.loads((path / "config.json").read_text())
    architecture = {"architectures": [type(small).__name__], "num_nextn_predict_layers": 1}
    (path / "config.json").write_text(json.dumps({**config, **architecture}))
    save_file({key: value.contiguous() for key, value in own.items()}, path / "model.safetensors")
    return path
