"""Models with random weights whose layers are not all alike, as config.json has them, and prompts for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

# Two kinds of layers, as Gemma 3 has them: every third sees everything, the others a window.
GEMMA: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "vocab_size": 300, "hidden_size": 64,
    "intermediate_size": 96, "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "query_pre_attn_scalar": 24, "sliding_window": 40, "sliding_window_pattern": 3, "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6, "torch_dtype": "float32", "eos_token_id": 1, "bos_token_id": 2, "pad_token_id": 0,
    "hidden_activation": "gelu_pytorch_tanh", "rope_theta": 1e6, "rope_local_base_freq": 1e4,
}  # fmt: skip

# Latent attention, with experts from the second layer on.
DEEPSEEK: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "vocab_size": 300, "hidden_size": 64,
    "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 32,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12, "n_routed_experts": 8, "num_experts_per_tok": 3,
    "moe_intermediate_size": 32, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512, "torch_dtype": "float32", "eos_token_id": 1, "bos_token_id": 2,
}  # fmt: skip

_PLAIN: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "torch_dtype": "float32",
    "eos_token_id": 1,
    "bos_token_id": 2,
}
# Norms behind attention and MLP, q and k normed over all heads; every fourth layer sees everything, stretched by YaRN.
OLMO3: dict[str, Any] = {
    **_PLAIN,
    "architectures": ["Olmo3ForCausalLM"],
    "num_hidden_layers": 5,
    "sliding_window": 40,
    "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
}
# Fused weights; three quarters of a head turn, by LongRoPE.
PHI4: dict[str, Any] = {
    **_PLAIN,
    "architectures": ["Phi3ForCausalLM"],
    "tie_word_embeddings": True,
    "partial_rotary_factor": 0.75,
    "original_max_position_embeddings": 128,
    "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 6, "long_factor": [1.0, 1.2, 1.5, 2.0, 2.5, 3.0]},
}
# Half of each head turns, in neighbouring pairs; norms before and behind attention and MLP.
GLM4: dict[str, Any] = {**_PLAIN, "architectures": ["Glm4ForCausalLM"], "head_dim": 16}

# What a layer adds is multiplied, as are embeddings, scores and logits.
GRANITE: dict[str, Any] = {
    **_PLAIN,
    "architectures": ["GraniteForCausalLM"],
    "tie_word_embeddings": True,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.1,
    "logits_scaling": 0.25,
}

# Every third layer does not turn its heads, and sees a window.
SMOLLM3: dict[str, Any] = {
    **_PLAIN,
    "architectures": ["SmolLM3ForCausalLM"],
    "no_rope_layer_interval": 3,
    "use_sliding_window": True,
    "sliding_window": 40,
}

# Attention and MLP beside each other behind a layer norm; every fourth layer sees everything and does not turn.
COHERE2: dict[str, Any] = {**_PLAIN, "architectures": ["Cohere2ForCausalLM"], "sliding_window": 40}

# Biases on attention's products, each kind with a field of its own, and heads larger than the hidden size has room for.
SEED_OSS: dict[str, Any] = {
    **_PLAIN,
    "architectures": ["SeedOssForCausalLM"],
    "head_dim": 32,
    "attention_out_bias": True,
}

# Norms behind attention and MLP and on each head of q and k; every third layer sees everything and does not turn.
EXAONE4: dict[str, Any] = {
    **_PLAIN,
    "architectures": ["Exaone4ForCausalLM"],
    "sliding_window": 40,
    "sliding_window_pattern": 3,
}

# A router over a few experts in each layer, all of which see a window.
MIXTRAL: dict[str, Any] = {
    **_PLAIN,
    "architectures": ["MixtralForCausalLM"],
    "num_local_experts": 4,
    "sliding_window": 40,
}


def settings_of(shape: dict[str, Any], folder: Path) -> dict[str, Any]:
    """An engine's settings for a model of that shape, whose config is written to `folder`."""
    (folder / "config.json").write_text(json.dumps(shape))
    return {"model": str(folder), "load_format": "dummy"}


def token_prompts(*lengths: int) -> list[dict[str, list[int]]]:
    """One prompt of each length."""
    return [{"prompt_token_ids": [(7 * i * i + 3 * i + n) % 290 + 3 for i in range(n)]} for n in lengths]
