"""The table of architectures: the name in a config.json -> the class that runs it. Imports none of them."""

from octavo.registry import Registry

ARCHITECTURES = Registry(
    "architecture",
    {
        "LlamaForCausalLM": "octavo.models.llama:LlamaForCausalLM",
        "MistralForCausalLM": "octavo.models.llama:LlamaForCausalLM",
        "Qwen2ForCausalLM": "octavo.models.qwen2:Qwen2ForCausalLM",
        "Qwen3ForCausalLM": "octavo.models.qwen3:Qwen3ForCausalLM",
        "Qwen3MoeForCausalLM": "octavo.models.qwen3_moe:Qwen3MoeForCausalLM",
        "DeepseekV2ForCausalLM": "octavo.models.deepseek:DeepseekForCausalLM",
        "DeepseekV3ForCausalLM": "octavo.models.deepseek:DeepseekForCausalLM",
        "Gemma3ForCausalLM": "octavo.models.gemma3:Gemma3ForCausalLM",
        "Gemma3ForConditionalGeneration": "octavo.models.gemma3:Gemma3ForCausalLM",
    },
)
