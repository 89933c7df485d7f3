"""Tiny configurations of families of which some layers keep states, at least three of each: a name, and its fields."""

from __future__ import annotations

from typing import Any

# Families of which some layers keep states. Head sizes and groups are such that none is the other by chance.
DELTA = {
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
}
SHARED_MOE = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 24, "mamba_n_groups": 2}
MIXED_LAYERS = ["linear_attention", "full_attention", "linear_attention", "linear_attention"]
NEMOTRON = {
    "num_hidden_layers": None,
    "mamba_num_heads": 6,
    "mamba_head_dim": 16,
    "ssm_state_size": 24,
    "n_groups": 2,
    "head_dim": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 40,
}
PURE_MAMBA2 = {
    "max_position_embeddings": None,
    "intermediate_size": None,
    "num_attention_heads": None,
    "num_key_value_heads": None,
    "num_heads": 8,
    "head_dim": 16,
    "state_size": 24,
    "n_groups": 2,
}
FALCON = {**MAMBA2, "mamba_d_ssm": 128, "num_hidden_layers": 3}
JAMBA = {"attn_layer_period": 3, "attn_layer_offset": 1, "num_experts": 4, "mamba_dt_rank": 5, "mamba_d_state": 8}
HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-next": ("Qwen3Next", {**DELTA, **SHARED_MOE, "shared_expert_intermediate_size": 48}),
    "qwen3-next-tied": (
        "Qwen3Next",
        {
            **DELTA, **SHARED_MOE, "shared_expert_intermediate_size": 32, "linear_num_value_heads": 2,
            "tie_word_embeddings": True, "mlp_only_layers": [1], "norm_topk_prob": False, "attention_bias": True,
        },
    ),
    "qwen3-next-every-other": (
        "Qwen3Next",
        {
            **DELTA, "num_experts": 0, "linear_conv_kernel_dim": 3,
            "layer_types": ["linear_attention", "full_attention"] * 2,
        },
    ),
    "qwen3.5": ("Qwen3_5", {**DELTA, "tie_word_embeddings": True}),
    "qwen3.5-partial": (
        "Qwen3_5",
        {
            **DELTA, "linear_num_value_heads": 6, "linear_value_head_dim": 16, "head_dim": 24,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
        },
    ),
    "qwen3.5-starts": ("Qwen3_5", {**DELTA, "num_hidden_layers": 5, "layer_types": ["full_attention", *MIXED_LAYERS]}),
    "qwen3.5-moe": ("Qwen3_5Moe", {**DELTA, **SHARED_MOE, "shared_expert_intermediate_size": 32}),
    "qwen3.5-moe-tied": (
        "Qwen3_5Moe",
        {**DELTA, **SHARED_MOE, "num_experts_per_tok": 1, "tie_word_embeddings": True, "hidden_size": 48},
    ),
    "qwen3.5-moe-wide": (
        "Qwen3_5Moe", {**DELTA, **SHARED_MOE, "linear_num_key_heads": 4, "shared_expert_intermediate_size": 64},
    ),
    "lfm2": ("Lfm2", {"layer_types": ["conv", "conv", "full_attention", "conv"], "block_multiple_of": 32}),
    "lfm2-biased": (
        "Lfm2",
        {
            "conv_bias": True, "full_attn_idxs": [0, 2], "block_auto_adjust_ff_dim": False, "conv_L_cache": 4,
            "tie_word_embeddings": False,
        },
    ),
    "lfm2-ends": ("Lfm2", {"layer_types": ["full_attention", "conv", "conv", "full_attention"]}),
    "lfm2-moe": (
        "Lfm2Moe", {**SHARED_MOE, "layer_types": ["conv", "full_attention", "conv", "conv"], "num_dense_layers": 1},
    ),
    "lfm2-moe-biased": (
        "Lfm2Moe",
        {
            **SHARED_MOE, "layer_types": ["full_attention", "conv", "full_attention", "conv"], "num_dense_layers": 0,
            "conv_bias": True, "conv_L_cache": 4, "norm_topk_prob": False, "routed_scaling_factor": 1.7,
            "tie_word_embeddings": False,
        },
    ),
    "lfm2-moe-unbiased": (
        "Lfm2Moe",
        {**SHARED_MOE, "layer_types": ["conv"] * 3 + ["full_attention"], "use_expert_bias": False, "num_experts": 6},
    ),
    "lfm3": ("Lfm3", {"head_dim": 32, "num_hidden_layers": 5, "sliding_window": 24}),
    "lfm3-biased": (
        "Lfm3",
        {
            "head_dim": 24, "layer_types": ["sliding_attention", "conv", "full_attention", "conv"], "conv_bias": True,
            "attention_bias": True, "sliding_window": 70, "tie_word_embeddings": False, "conv_L_cache": 3,
            "rope_parameters": {
                "full_attention": {"rope_type": "proportional", "rope_theta": 1e5, "partial_rotary_factor": 0.3},
                "sliding_attention": {"rope_type": "linear", "factor": 3.0, "rope_theta": 2e4},
            },
        },
    ),
    "lfm3-plain": (
        "Lfm3",
        {
            "head_dim": 16, "layer_types": ["conv", "full_attention", "conv", "full_attention"],
            "use_sandwich_norm": False, "use_attention_gate": False,
        },
    ),
    "granite4": (
        "GraniteMoeHybrid",
        {
            **MAMBA2, "layer_types": MIXED_LAYERS, "num_local_experts": 6, "num_experts_per_tok": 2,
            "shared_intermediate_size": 48, "embedding_multiplier": 3.0, "residual_multiplier": 0.22,
            "attention_multiplier": 0.1, "logits_scaling": 2.0,
        },
    ),
    "granite4-dense": (
        "GraniteMoeHybrid",
        {
            **MAMBA2, "layer_types": MIXED_LAYERS, "num_local_experts": 0, "mamba_n_groups": 1,
            "shared_intermediate_size": 80, "tie_word_embeddings": True, "residual_multiplier": 0.5,
            "position_embedding_type": "rope",
        },
    ),
    "granite4-unshared": (
        "GraniteMoeHybrid",
        {**MAMBA2, "layer_types": MIXED_LAYERS, "num_local_experts": 4, "shared_intermediate_size": 0},
    ),
    "granite4-biased": (
        "GraniteMoeHybrid",
        {
            **MAMBA2, "layer_types": MIXED_LAYERS[::-1], "num_local_experts": 4, "num_experts_per_tok": 3,
            "mamba_proj_bias": True, "mamba_conv_bias": False, "attention_bias": True, "mamba_d_conv": 3,
        },
    ),
    "nemotron-h": ("NemotronH", {**NEMOTRON, "hybrid_override_pattern": "M-M*-ME"}),
    "nemotron-h-groups": (
        "NemotronH",
        {
            **NEMOTRON, "layers_block_type": ["linear_attention", "moe", "full_attention", "moe", "linear_attention"],
            "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "n_groups": 3, "use_conv_bias": False,
        },
    ),
    "nemotron-h-latent": (
        "NemotronH",
        {
            **NEMOTRON, "hybrid_override_pattern": "*EMM-", "moe_latent_size": 32, "norm_topk_prob": False,
            "use_bias": True, "mlp_bias": True, "n_groups": 1,
        },
    ),
    "mamba2": ("Mamba2", PURE_MAMBA2),
    "mamba2-biased": (
        "Mamba2",
        {
            **PURE_MAMBA2, "use_bias": True, "n_groups": 4, "conv_kernel": 3, "time_step_limit": [0.01, 2.0],
            "expand": 3, "head_dim": 24, "tie_word_embeddings": True,
        },
    ),
    "mamba2-one-group": ("Mamba2", {**PURE_MAMBA2, "use_conv_bias": False, "n_groups": 1, "num_hidden_layers": 2}),
    "falcon-h1": (
        "FalconH1",
        {
            **FALCON, "mlp_multipliers": [0.7, 1.3], "ssm_multipliers": [0.9, 1.1, 0.8, 1.2, 0.7],
            "key_multiplier": 0.6, "attention_in_multiplier": 1.2, "attention_out_multiplier": 0.8,
            "ssm_in_multiplier": 1.1, "ssm_out_multiplier": 0.6, "lm_head_multiplier": 0.5, "embedding_multiplier": 2.0,
        },
    ),
    "falcon-h1-normed": (
        "FalconH1", {**FALCON, "mamba_rms_norm": True, "mamba_norm_before_gate": False, "head_dim": 24},
    ),
    "falcon-h1-before": (
        "FalconH1",
        {
            **FALCON, "mamba_rms_norm": True, "mamba_proj_bias": True, "attention_bias": True, "projectors_bias": True,
            "mlp_bias": True, "mlp_multipliers": [0.7, 1.3], "tie_word_embeddings": True, "ssm_in_multiplier": 0.7,
        },
    ),
    "jamba": ("Jamba", JAMBA),
    "jamba-dense": ("Jamba", {**JAMBA, "num_experts": 1, "num_experts_per_tok": 1, "mamba_conv_bias": False}),
    "jamba-biased": (
        "Jamba",
        {
            **JAMBA, "mamba_proj_bias": True, "tie_word_embeddings": True, "expert_layer_period": 3,
            "expert_layer_offset": 0, "mamba_dt_rank": "auto", "mamba_d_conv": 3,
        },
    ),
    "bamba": ("Bamba", {**MAMBA2, "attn_layer_indices": [2]}),
    "bamba-biased": (
        "Bamba",
        {
            **MAMBA2, "attn_layer_indices": [1, 3], "mamba_proj_bias": True, "attention_bias": True, "mlp_bias": True,
        },
    ),
    "bamba-tied": ("Bamba", {**MAMBA2, "attn_layer_indices": [0], "tie_word_embeddings": True, "mamba_n_groups": 4}),
}  # fmt: skip
