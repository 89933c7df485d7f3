"""What a config.json of an architecture leaves unsaid, and which of its fields count.

Owns the table of architectures. Reads no file. Invariant: each name has a model in `octavo.models.ARCHITECTURES`.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """What a config.json of an architecture leaves unsaid."""

    bias: str = "none"  # none | qkv: always on q, k and v | field: `attention_bias`, on all four projections
    qk_norm: bool = False
    sliding: str = "none"  # none | all | upper: from max_window_layers on | pattern: all but every n-th
    window_flag: bool = False  # sliding_window counts only with use_sliding_window
    head_size: int = 0  # when head_dim is absent; 0: hidden_size / num_attention_heads
    moe: str = "none"  # none | qwen | deepseek2 | deepseek3
    latent: bool = False  # MLA
    gemma: bool = False  # scaled embeddings, query_pre_attn_scalar, two thetas, gelu
    theta: float = 1e4
    mlp_bias: bool = False  # reads the field of that name


GEMMA3 = Family(bias="field", qk_norm=True, sliding="pattern", head_size=256, gemma=True, theta=1e6)
FAMILIES = {
    "LlamaForCausalLM": Family(bias="field", mlp_bias=True),
    "MistralForCausalLM": Family(sliding="all"),
    "Qwen2ForCausalLM": Family(bias="qkv", sliding="upper", window_flag=True),
    "Qwen3ForCausalLM": Family(bias="field", qk_norm=True, sliding="upper", window_flag=True, head_size=128),
    "Qwen3MoeForCausalLM": Family(bias="field", qk_norm=True, sliding="all", window_flag=True, moe="qwen"),
    "DeepseekV2ForCausalLM": Family(bias="field", latent=True, moe="deepseek2"),
    "DeepseekV3ForCausalLM": Family(bias="field", latent=True, moe="deepseek3"),
    "Gemma3ForCausalLM": GEMMA3,
    "Gemma3ForConditionalGeneration": GEMMA3,  # its text half
}
