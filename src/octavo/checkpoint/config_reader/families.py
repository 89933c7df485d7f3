"""The table of architectures: who runs each, what its config.json leaves unsaid, and which of its fields count.

Owns the words in which that is said; a family whose config these do not describe has a function that its line names.
Reads no file and imports no model: those import torch, which a front end does without. Invariant: a name's line is all
of a family that lies outside its own file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec


class Family(msgspec.Struct, frozen=True, kw_only=True):
    """What a config.json of an architecture leaves unsaid."""

    model: str = ""  # module:Class that runs it
    usual: Mapping[str, Any] = {}  # fields of config.json where a file has none
    fixed: Mapping[str, Any] = {}  # fields that transformers' class overwrites, whatever a file says
    renamed: Mapping[str, str] = {}  # other names of fields, whose values win: `attribute_map` of transformers' class
    # none | qkv: always on q, k and v | field: `attention_bias`, on all four | field-qkv: on three | fields: on three,
    # and `attention_out_bias` on the fourth
    bias: str = "none"
    qk_norm: bool = False  # an RMS norm on each head of q and k
    # none | all | upper: from max_window_layers on | pattern: all but every n-th | unturned: those without rotation
    sliding: str = "none"
    window_flag: bool = False  # sliding_window counts only with use_sliding_window
    head_size: int = 0  # when head_dim is absent; 0: hidden_size / num_attention_heads
    moe: str = "none"  # none | qwen | mixtral | deepseek2 | deepseek3
    latent: bool = False  # MLA
    gemma: bool = False  # scaled embeddings, query_pre_attn_scalar, two thetas, gelu
    theta: float = 1e4
    full_scaling: bool = False  # rope_scaling is for layers without a window
    local_theta: str = "rope_theta"  # the field of theta for layers with a window; empty: `theta` always
    old_ropes: Mapping[str, str] = {}  # what older files call a rope_type
    interleaved: bool = False  # channel 2i turns with 2i + 1
    still: bool = False  # heads turn in no layer, so they may have any size
    mlp_bias: bool = False  # reads the field of that name
    # layers whose heads do not turn: none | field: `no_rope_layers`, 0 where they do not, or no_rope_layer_interval
    # | full: those that see all, beside or instead of windows
    unturned: str = "none"
    read: str = ""  # module:function of Fields and Family that gives its Arch; empty: checkpoint.read_fields


_GEMMA3 = Family(
    model="octavo.models.gemma3:Gemma3ForCausalLM",
    bias="field",
    qk_norm=True,
    sliding="pattern",
    head_size=256,
    gemma=True,
    theta=1e6,
    full_scaling=True,
    local_theta="rope_local_base_freq",
    usual={"num_key_value_heads": 4},
)
_GLM = Family(
    model="octavo.models.glm4:GlmForCausalLM",
    bias="field-qkv",
    interleaved=True,
    usual={
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
        "head_dim": 128,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1.5625e-7,
    },
)
_QWEN3_NEXT = "octavo.models.hybrids.qwen3_next:Qwen3NextForCausalLM"
_QWEN3_5 = Family(
    model=_QWEN3_NEXT,
    bias="field",
    qk_norm=True,
    head_size=256,
    read="octavo.checkpoint.config_reader.hybrids:read_qwen3_next",
    usual={"num_key_value_heads": 4},
)
_QWEN3_5_MOE = msgspec.structs.replace(
    _QWEN3_5,
    moe="qwen",
    usual={
        "intermediate_size": 512,  # of no layer
        "num_key_value_heads": 2,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "norm_topk_prob": True,
    },
)
_COHERE = "octavo.models.cohere:CohereForCausalLM"
_DEEPSEEK = "octavo.models.deepseek:DeepseekForCausalLM"
FAMILIES = {
    "LlamaForCausalLM": Family(model="octavo.models.llama:LlamaForCausalLM", bias="field", mlp_bias=True),
    "MistralForCausalLM": Family(
        model="octavo.models.llama:LlamaForCausalLM", sliding="all", usual={"num_key_value_heads": 8},
    ),
    "Qwen2ForCausalLM": Family(
        model="octavo.models.qwen2:Qwen2ForCausalLM", bias="qkv", sliding="upper", window_flag=True,
        usual={"num_key_value_heads": 32},
    ),
    "Qwen3ForCausalLM": Family(
        model="octavo.models.qwen3:Qwen3ForCausalLM", bias="field", qk_norm=True, sliding="upper", window_flag=True,
        head_size=128, usual={"num_key_value_heads": 32},
    ),
    "Qwen3MoeForCausalLM": Family(
        model="octavo.models.qwen3_moe:Qwen3MoeForCausalLM", bias="field", qk_norm=True, sliding="all",
        window_flag=True, moe="qwen", usual={"num_key_value_heads": 4}, renamed={"num_local_experts": "num_experts"},
    ),
    "MixtralForCausalLM": Family(
        model="octavo.models.mixtral:MixtralForCausalLM", sliding="all", theta=1e6, moe="mixtral",
        usual={"num_key_value_heads": 8, "sliding_window": None, "rms_norm_eps": 1e-5},
        renamed={"num_experts": "num_local_experts"},
    ),
    "DeepseekV2ForCausalLM": Family(
        model=_DEEPSEEK, bias="field", latent=True, moe="deepseek2", mlp_bias=True,
        renamed={"num_experts": "n_routed_experts"},
    ),
    "DeepseekV3ForCausalLM": Family(
        model=_DEEPSEEK, bias="field", latent=True, moe="deepseek3", renamed={"num_local_experts": "n_routed_experts"},
    ),
    "Olmo2ForCausalLM": Family(
        model="octavo.models.olmo3:Olmo3ForCausalLM", bias="field", usual={"rms_norm_eps": 1e-5},
    ),
    "Olmo3ForCausalLM": Family(
        model="octavo.models.olmo3:Olmo3ForCausalLM", bias="field", sliding="pattern", theta=5e5, full_scaling=True,
        local_theta="", usual={"rms_norm_eps": 1e-5}, fixed={"sliding_window_pattern": 4},
    ),
    "Phi3ForCausalLM": Family(
        model="octavo.models.phi3:Phi3ForCausalLM", sliding="all", old_ropes={"yarn": "longrope"},
        usual={"sliding_window": None, "rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
    ),
    "GlmForCausalLM": _GLM,
    "Glm4ForCausalLM": _GLM,
    "GraniteForCausalLM": Family(
        model="octavo.models.llama:LlamaForCausalLM", bias="field", mlp_bias=True,
        read="octavo.checkpoint.config_reader.granite:read_granite",
    ),
    "SmolLM3ForCausalLM": Family(
        model="octavo.models.llama:LlamaForCausalLM", bias="field", mlp_bias=True, sliding="unturned",
        window_flag=True, unturned="field", theta=2e6,
        usual={"num_key_value_heads": 4, "sliding_window": None, "tie_word_embeddings": True},
    ),
    "Exaone4ForCausalLM": Family(
        model="octavo.models.exaone4:Exaone4ForCausalLM", qk_norm=True, sliding="pattern", unturned="full",
        usual={"num_key_value_heads": 32, "sliding_window_pattern": 4, "rms_norm_eps": 1e-5},
    ),
    "SeedOssForCausalLM": Family(
        model="octavo.models.llama:LlamaForCausalLM", bias="fields", mlp_bias=True, head_size=128,
        usual={"attention_bias": True, "num_key_value_heads": 8},
    ),
    "CohereForCausalLM": Family(
        model=_COHERE, bias="field", interleaved=True, theta=5e5,
        read="octavo.checkpoint.config_reader.cohere:read_cohere", usual={"tie_word_embeddings": True},
    ),
    "Cohere2ForCausalLM": Family(
        model=_COHERE, bias="field", interleaved=True, sliding="pattern", unturned="full",
        read="octavo.checkpoint.config_reader.cohere:read_cohere2",
        usual={"tie_word_embeddings": True, "sliding_window_pattern": 4},
    ),
    "Qwen3NextForCausalLM": Family(
        model=_QWEN3_NEXT, bias="field", qk_norm=True, head_size=256, moe="qwen",
        read="octavo.checkpoint.config_reader.hybrids:read_qwen3_next",
        usual={"num_key_value_heads": 2, "num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512,
               "norm_topk_prob": True},
    ),
    "Qwen3_5ForCausalLM": _QWEN3_5,
    "Qwen3_5ForConditionalGeneration": _QWEN3_5,  # its text half
    "Qwen3_5MoeForCausalLM": _QWEN3_5_MOE,
    "Qwen3_5MoeForConditionalGeneration": _QWEN3_5_MOE,
    "Lfm2ForCausalLM": Family(
        model="octavo.models.hybrids.lfm2:Lfm2ForCausalLM", qk_norm=True, theta=1e6,
        read="octavo.checkpoint.config_reader.hybrids:read_lfm2",
        usual={"num_key_value_heads": 8, "max_position_embeddings": 128_000},
    ),
    "Lfm2MoeForCausalLM": Family(
        model="octavo.models.hybrids.lfm2:Lfm2ForCausalLM", qk_norm=True, theta=1e6,
        read="octavo.checkpoint.config_reader.hybrids:read_lfm2_moe",
        usual={"num_key_value_heads": 8, "max_position_embeddings": 128_000},
    ),
    "Lfm3ForCausalLM": Family(
        model="octavo.models.hybrids.lfm3:Lfm3ForCausalLM", bias="field", qk_norm=True, sliding="pattern",
        head_size=128, theta=1e6, full_scaling=True, read="octavo.checkpoint.config_reader.hybrids:read_lfm3",
        usual={"num_key_value_heads": 4, "max_position_embeddings": 128_000, "sliding_window": 256},
        renamed={"rms_norm_eps": "norm_eps"},
    ),
    "GraniteMoeHybridForCausalLM": Family(
        model="octavo.models.hybrids.granite:GraniteHybridForCausalLM", bias="field",
        read="octavo.checkpoint.config_reader.hybrids:read_granite_hybrid",
        renamed={"layers_block_type": "layer_types"},
    ),
    "BambaForCausalLM": Family(
        model="octavo.models.hybrids.granite:GraniteHybridForCausalLM", bias="field", mlp_bias=True,
        read="octavo.checkpoint.config_reader.hybrids:read_bamba",
        usual={"num_key_value_heads": 8, "rms_norm_eps": 1e-5}, fixed={"partial_rotary_factor": 0.5},
    ),
    "NemotronHForCausalLM": Family(
        model="octavo.models.hybrids.nemotron_h:NemotronHForCausalLM", head_size=128, mlp_bias=True, still=True,
        read="octavo.checkpoint.config_reader.hybrids:read_nemotron_h", usual={"num_key_value_heads": 8},
        renamed={"num_local_experts": "n_routed_experts"},
    ),
    "Mamba2ForCausalLM": Family(  # a Nemotron-H all of whose layers are Mamba-2's
        model="octavo.models.hybrids.nemotron_h:NemotronHForCausalLM",
        read="octavo.checkpoint.config_reader.hybrids:read_mamba2",
        usual={"num_heads": 128, "head_dim": 64, "state_size": 128, "n_groups": 8},
    ),
    "FalconH1ForCausalLM": Family(
        model="octavo.models.hybrids.falcon_h1:FalconH1ForCausalLM", bias="field", mlp_bias=True,
        read="octavo.checkpoint.config_reader.hybrids:read_falcon_h1",
        usual={"num_key_value_heads": 8, "mamba_d_ssm": 1024, "rms_norm_eps": 1e-5},
    ),
    "JambaForCausalLM": Family(
        model="octavo.models.hybrids.jamba:JambaForCausalLM", still=True,
        read="octavo.checkpoint.config_reader.hybrids:read_jamba",
        usual={"num_key_value_heads": 8, "max_position_embeddings": 262144},
        renamed={"num_local_experts": "num_experts"},
    ),
    "Gemma3ForCausalLM": _GEMMA3,
    "Gemma3ForConditionalGeneration": _GEMMA3,  # its text half
}  # fmt: skip

HEADS = {  # method of drafting -> what published drafters call themselves: layers are Llama's, dflash's Qwen3's
    "eagle": ("LlamaForCausalLM", "EagleLlamaForCausalLM", "LlamaForCausalLMEagle"),
    "eagle3": ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM"),
    "dflash": ("DFlashDraftModel", "MuseGlimmerAssistantModel"),
}
HEAD_LAYERS = FAMILIES["LlamaForCausalLM"]
BLOCK_LAYERS = msgspec.structs.replace(FAMILIES["Qwen3ForCausalLM"], window_flag=False)
