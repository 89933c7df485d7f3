"""Shapes that benchmarks run, as config.json has them, and the least work that tokens of each are.

Owns the shapes and how their weights, caches and states are counted. Runs nothing. Invariant: what is counted is what
any implementation has to read or multiply.
"""

from __future__ import annotations

import dataclasses
from typing import Any

_QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "hidden_act": "silu",
    "attention_bias": False,
}


def _shape(
    hidden: int, layers: int, heads: int, kv_heads: int, head: int, ff: int, vocab: int, *, tied: bool
) -> dict[str, Any]:
    return _QWEN3 | {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head,
        "intermediate_size": ff,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
    }


_TINY_HYBRID = _shape(256, 8, 4, 2, 64, 512, 4096, tied=True) | {  # octavo-tiny-hybrid's
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
_GDN = _shape(2048, 16, 16, 2, 256, 5120, 151936, tied=False) | {  # Qwen3-Next's, of a third of its layers
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "norm_topk_prob": True,
}
_MAMBA2 = {  # Nemotron-H-8B's
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
    "max_position_embeddings": 8192,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 21504,
    "vocab_size": 131072,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "ssm_state_size": 128,
    "n_groups": 8,
    "conv_kernel": 4,
}
SHAPES = {
    "tiny": _shape(256, 4, 4, 2, 64, 768, 4096, tied=True),
    "tiny-hybrid": _TINY_HYBRID,
    "0.6b-cpu": _shape(1024, 28, 16, 8, 128, 3072, 32000, tied=True),
    "0.6b": _shape(1024, 28, 16, 8, 128, 3072, 151936, tied=True),
    "8b": _shape(4096, 36, 32, 8, 128, 12288, 151936, tied=False),
    "gdn": _GDN,
    "mamba2": _MAMBA2,
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LayerWork:
    """What one layer makes of a token, counted in weights, elements and bytes."""

    weights: int = 0  # that each token is multiplied by, experts aside
    spared: int = 0  # of them, where the layer is the last, for tokens that nobody wants logits of
    heads: int = 0  # query channels that attend
    kv: int = 0  # channels of K and V that a token leaves
    state_bytes: int = 0  # that a row's step reads
    kept_bytes: int = 0  # that it reads of each token of the open chunk
    scanned: int = 0  # elements of a token that convolution and scan take and give
    scan: int = 0  # operations of a token's scan
    expert: int = 0  # weights of one expert
    num_experts: int = 0
    experts_per_token: int = 0

    @property
    def active(self) -> int:
        """Weights that a token is multiplied by."""
        return self.weights + self.expert * self.experts_per_token

    def read(self, rows: int) -> float:
        """Weights that a step of so many rows reads, where rows choose experts at random."""
        missed = (1 - self.experts_per_token / self.num_experts) ** rows if self.num_experts else 1.0
        return self.weights + self.expert * self.num_experts * (1 - missed)


def layers_of(facts: dict[str, Any]) -> list[LayerWork]:
    """Of a shape of this module."""
    from octavo.ops.scan import CHUNK  # imports torch, which an engine's start does beside other things

    hidden, head = facts["hidden_size"], facts["head_dim"]
    q, kv = (facts[name] * head for name in ("num_attention_heads", "num_key_value_heads"))
    if facts["model_type"] == "nemotron_h":
        inner = facts["mamba_num_heads"] * facts["mamba_head_dim"]
        shared = 2 * facts["n_groups"] * facts["ssm_state_size"]
        kinds = {
            "M": LayerWork(
                weights=hidden * (3 * inner + shared + facts["mamba_num_heads"]),
                state_bytes=2 * inner * facts["ssm_state_size"],  # of float32 the halves that products take
                kept_bytes=2 * inner + shared + 8 * facts["mamba_num_heads"],
                scanned=3 * (inner + shared) + inner,
                scan=4 * inner * facts["ssm_state_size"] + CHUNK * (inner + shared // 2),
            ),
            "-": LayerWork(weights=2 * hidden * facts["intermediate_size"]),
            "*": LayerWork(weights=2 * hidden * (q + kv), heads=q, kv=2 * kv),
        }
        return [kinds[letter] for letter in facts["hybrid_override_pattern"]]
    network: dict[str, int] = {}
    mlp = 3 * hidden * facts["intermediate_size"]
    if "num_experts" in facts:
        mlp = hidden * (1 + facts["num_experts"]) + 3 * hidden * facts["shared_expert_intermediate_size"]
        network = {
            "expert": 3 * hidden * facts["moe_intermediate_size"],
            "num_experts": facts["num_experts"],
            "experts_per_token": facts["num_experts_per_tok"],
        }
    if facts["model_type"] == "qwen3":
        weights = 2 * hidden * (q + kv) + mlp
        return [LayerWork(weights=weights, spared=weights - 2 * hidden * kv, heads=q, kv=2 * kv)] * facts[
            "num_hidden_layers"
        ]
    keys = facts["linear_num_key_heads"] * facts["linear_key_head_dim"]
    value_heads, value_size = facts["linear_num_value_heads"], facts["linear_value_head_dim"]
    values = value_heads * value_size
    delta = LayerWork(
        weights=hidden * (2 * keys + 3 * values + 2 * value_heads) + mlp,
        state_bytes=4 * values * facts["linear_key_head_dim"],
        kept_bytes=2 * (keys + values) + 4 * value_heads,
        scanned=3 * (2 * keys + values) + values,
        scan=6 * values * facts["linear_key_head_dim"]
        + 2 * CHUNK * (values + value_heads * facts["linear_key_head_dim"]),
        **network,
    )
    attention = LayerWork(weights=hidden * (3 * q + 2 * kv) + mlp, heads=q, kv=2 * kv, **network)
    return [attention if (layer + 1) % 4 == 0 else delta for layer in range(facts["num_hidden_layers"])]
