"""A tiny model of layers that keep states, out of tree: its checkpoint, its engines, and its oracle in plain torch."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

PACKAGES = Path(__file__).resolve().parents[1] / "packages"
SIZE, INNER, HEADS, KV_HEADS, HEAD_SIZE, VOCAB = 24, 40, 4, 2, 8, 300
MODULE = "far_away.models.recurrent"


CONFIG = {
    "vocab_size": VOCAB,
    "hidden_size": SIZE,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_SIZE,
    "torch_dtype": "float32",
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "eos_token_id": 1,
    "bos_token_id": 2,
}


def write_checkpoint(folder: Path, name: str) -> dict[str, Any]:
    """A checkpoint of class `name` with seeded weights; the settings of an engine for it."""
    from far_away.models import recurrent

    random = torch.Generator().manual_seed(7)

    def draw(*shape: int, scale: float = 0.0) -> torch.Tensor:
        return torch.randn(*shape, generator=random) * (scale or shape[-1] ** -0.5)

    weights = {
        "model.embed_tokens.weight": draw(VOCAB, SIZE, scale=1.0),
        "lm_head.weight": draw(VOCAB, SIZE, scale=0.6),
        "model.norm.weight": 1 + draw(SIZE, scale=0.1),
    }
    shapes = _shapes(recurrent.HEADS * recurrent.WIDTH)
    for index, kind in enumerate(getattr(recurrent, name).pattern):
        for key, shape in shapes[kind].items():
            weights[f"model.layers.{index}.{key}.weight"] = draw(*shape) if shape[1:] else 1 + draw(*shape, scale=0.1)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**CONFIG, "architectures": [f"{MODULE}:{name}"]}))
    return {
        "model": str(folder),
        "model_packages": "far_away",
        "skip_tokenizer_init": True,
        "max_model_len": 256,
        "kv_cache_memory_bytes": 4 << 20,
        "max_num_seqs": 32,
        "dtype": "float32",
        "device": "cpu",
    }


@contextlib.contextmanager
def packages() -> Iterator[None]:
    """Within: models out of tree can be imported."""
    sys.path.insert(0, str(PACKAGES))
    yield
    sys.path.remove(str(PACKAGES))
    for name in [name for name in sys.modules if name.partition(".")[0] == "far_away"]:
        del sys.modules[name]


def write_mixed(folder: Path) -> dict[str, Any]:
    """A checkpoint of a window, full attention and states of every kind; the settings of an engine for it."""
    from far_away.models import mixed as theirs

    random = torch.Generator().manual_seed(5)
    own = write_checkpoint(folder, "StatesAloneForCausalLM")
    weights = {
        "model.embed_tokens.weight": torch.randn(VOCAB, SIZE, generator=random),
        "lm_head.weight": torch.randn(VOCAB, SIZE, generator=random) * 0.3,
        "model.norm.weight": torch.ones(SIZE),
    }
    attention = {f"{name}.weight": shape for name, shape in _shapes(0)["a"].items()}
    for index, kind in enumerate(theirs.MixedForCausalLM.pattern):
        shapes = attention if kind in "wa" else theirs.weight_shapes(kind, SIZE)
        for name, shape in shapes.items():
            value = torch.randn(shape, generator=random) * (shape[-1] ** -0.5 if shape[1:] else 0.5)
            weights[f"model.layers.{index}.{name}"] = value + 1 if "norm" in name else value
    save_file(weights, folder / "model.safetensors")
    config = {**CONFIG, "architectures": ["far_away.models.mixed:MixedForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config))
    return {**own, "kv_cache_memory_bytes": 16 << 20, "block_size": 64}


def _shapes(width: int) -> dict[str, dict[str, tuple[int, ...]]]:
    """Of the weights of each kind of layer. width: channels of a recurrent one."""
    return {
        "a": {
            "input_layernorm": (SIZE,),
            "self_attn.q_proj": (HEADS * HEAD_SIZE, SIZE),
            "self_attn.k_proj": (KV_HEADS * HEAD_SIZE, SIZE),
            "self_attn.v_proj": (KV_HEADS * HEAD_SIZE, SIZE),
            "self_attn.o_proj": (SIZE, HEADS * HEAD_SIZE),
        },
        "r": {"norm": (SIZE,), "scan.project": (width, SIZE), "scan.output": (SIZE, width)},
        "m": {
            "post_attention_layernorm": (SIZE,),
            "mlp.gate_proj": (INNER, SIZE),
            "mlp.up_proj": (INNER, SIZE),
            "mlp.down_proj": (SIZE, INNER),
        },
    }


def oracle(weights: dict[str, torch.Tensor], pattern: str, tokens: list[int]) -> torch.Tensor:
    """Log-probabilities [tokens, VOCAB] in float64 of one pass over the whole sequence, without caches or chunks."""
    w = {name: value.double() for name, value in weights.items()}
    x = w["model.embed_tokens.weight"][tokens]
    for index, kind in enumerate(pattern):
        own = {
            name.removeprefix(f"model.layers.{index}."): value
            for name, value in w.items()
            if name.startswith(f"model.layers.{index}.")
        }
        x = x + {"a": _attend, "r": _scan, "m": _mlp}[kind](own, x)
    return (_norm(x, w["model.norm.weight"]) @ w["lm_head.weight"].T).log_softmax(-1)


def _norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight


def _mlp(w: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    h = _norm(x, w["post_attention_layernorm.weight"])
    gate = h @ w["mlp.gate_proj.weight"].T
    return (torch.nn.functional.silu(gate) * (h @ w["mlp.up_proj.weight"].T)) @ w["mlp.down_proj.weight"].T


def _attend(w: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    h, count = _norm(x, w["input_layernorm.weight"]), len(x)
    heads = [
        (h @ w[f"self_attn.{name}_proj.weight"].T).view(count, -1, HEAD_SIZE).transpose(0, 1)
        for name in ("q", "k", "v")
    ]
    angle = torch.arange(count)[:, None] * 10000.0 ** (-torch.arange(0, HEAD_SIZE, 2) / HEAD_SIZE).double()
    cos, sin = angle.cos().repeat(1, 2), angle.sin().repeat(1, 2)
    q, k = (
        each * cos + torch.cat((-each[..., HEAD_SIZE // 2 :], each[..., : HEAD_SIZE // 2]), -1) * sin
        for each in heads[:2]
    )
    k, v = (each.repeat_interleave(HEADS // KV_HEADS, 0) for each in (k, heads[2]))
    seen = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return seen.transpose(0, 1).flatten(1) @ w["self_attn.o_proj.weight"].T


def _scan(w: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """The recurrence itself, token by token."""
    from far_away.models.recurrent import DECAY, WIDTH
    from far_away.models.recurrent import HEADS as NUM

    value = (_norm(x, w["norm.weight"]) @ w["scan.project.weight"].T).view(-1, NUM, WIDTH)
    total, last, found = torch.zeros(NUM, WIDTH).double(), torch.zeros(WIDTH).double(), []
    for each in value:
        total = total * DECAY + each * (1 + each[:, 1:2].bfloat16().double())
        found.append(total + 0.25 * last)
        last = each[0].bfloat16().double()
    return torch.stack(found).flatten(1) @ w["scan.output.weight"].T
