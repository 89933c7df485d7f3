"""Every family at a tiny size, and the steps that each is tried in: what the matrix of families on a GPU is made of.

Models are checkpoints that transformers makes, of random weights which make logits of order one.
"""

from __future__ import annotations

import dataclasses
import random
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "models"))

from hybrid_configs import HYBRIDS
from insides import runner_of
from model_rig import make_reference
from octavo import LLM, SamplingParams
from octavo.device.batch import BatchOrder, StepShape
from octavo.plan import StepPlan

DELTA: dict[str, Any] = {"linear_key_head_dim": 64, "linear_value_head_dim": 64}
MAMBA2: dict[str, Any] = {"hidden_size": 128, "mamba_n_heads": 4, "mamba_d_head": 64, "mamba_d_state": 64}
# Name -> (a family of model_rig, its changes). Heads of 64 and of 128 take other kernels, as do experts and windows.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("llama3-rope", {"head_dim": 64}),
    "Llama, MLPs with biases": ("llama-mlp-bias", {"head_dim": 64}),
    "Llama, heads that turn in part": ("llama-partial", {"head_dim": 64}),
    "Mistral": ("mistral-window", {"head_dim": 64, "sliding_window": 100}),
    "Qwen2": ("qwen2", {}),
    "Qwen3": ("qwen3", {"head_dim": 64}),
    "Qwen3 of Hopper's shapes": (
        "qwen3",
        {"head_dim": 128, "hidden_size": 256, "intermediate_size": 384, "tie_word_embeddings": False},
    ),
    "Qwen3-MoE": ("qwen3-moe-tied", {"num_experts": 16, "head_dim": 64}),
    "Qwen3-MoE, one layer dense": ("qwen3-moe", {"num_hidden_layers": 5}),
    "Gemma 3": ("gemma3-16", {"sliding_window": 40, "head_dim": 64}),
    "OLMo 2": ("olmo2", {"hidden_size": 256}),
    "OLMo 3": ("olmo3", {"head_dim": 64, "sliding_window": 100, "rope_parameters": None}),
    "Phi-4": (
        "phi4",
        {
            "hidden_size": 256,
            "max_position_embeddings": 2048,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.75,
                "original_max_position_embeddings": 512,
                "short_factor": [1.0] * 24,
                "long_factor": [1.0 + 0.1 * pair for pair in range(24)],
            },
        },
    ),
    "GLM-4": ("glm", {"head_dim": 64}),
    "GLM-4-0414": ("glm4-biased", {"head_dim": 128}),
    "Granite": ("granite", {"head_dim": 64}),
    "SmolLM3": ("smollm3", {"head_dim": 64}),
    "SmolLM3, windows where heads do not turn": ("smollm3-window", {"head_dim": 128, "sliding_window": 100}),
    "Seed-OSS": ("seed-oss", {"head_dim": 128}),
    "Seed-OSS, other biases": ("seed-oss-biased", {"head_dim": 64}),
    "EXAONE 4": ("exaone4", {"head_dim": 64, "sliding_window": 100}),
    "EXAONE 4 without windows": ("exaone4-full", {"head_dim": 128}),
    "Command R": ("cohere", {"hidden_size": 256}),
    "Command R, biases": ("cohere-biased", {"hidden_size": 384, "num_attention_heads": 3, "num_key_value_heads": 1}),
    "Command A": ("cohere2", {"hidden_size": 256, "sliding_window": 100}),
    "Mixtral": ("mixtral", {"head_dim": 64}),
    "DeepSeek-V2": ("deepseek2", {}),
    "DeepSeek-V3": ("deepseek3", {}),
    "Qwen3-Next": ("qwen3-next", {**DELTA, "head_dim": 128}),
    "Qwen3.5": ("qwen3.5", {**DELTA, "head_dim": 64}),
    "Qwen3.5-MoE": ("qwen3.5-moe", {**DELTA, "head_dim": 64}),
    "LFM2": ("lfm2", {"head_dim": 64, "hidden_size": 256}),
    "LFM2-MoE": ("lfm2-moe", {"head_dim": 64, "hidden_size": 256, "moe_intermediate_size": 64}),
    "LFM3": ("lfm3", {"head_dim": 64, "hidden_size": 256, "sliding_window": 100}),
    "Granite 4": ("granite4", {**MAMBA2, "num_attention_heads": 2}),
    "Bamba": ("bamba", {**MAMBA2, "num_attention_heads": 2}),
    "Nemotron-H": ("nemotron-h", {"head_dim": 64, "mamba_head_dim": 64, "ssm_state_size": 64}),
    "Nemotron-H, heads of an odd size": (
        "nemotron-h",
        {"head_dim": 15, "num_attention_heads": 16, "mamba_head_dim": 64, "ssm_state_size": 64},
    ),
    "Mamba-2": (
        "mamba2",
        {"hidden_size": 128, "num_heads": 4, "head_dim": 64, "state_size": 64, "max_position_embeddings": None},
    ),
    "Falcon-H1": ("falcon-h1", {**MAMBA2, "head_dim": 64, "mamba_d_ssm": 256, "num_hidden_layers": 4}),
    "Jamba": ("jamba", {"hidden_size": 128, "num_attention_heads": 2}),
}
ARCHITECTURES = {
    "LlamaForCausalLM": "Llama",
    "MistralForCausalLM": "Mistral",
    "Qwen2ForCausalLM": "Qwen2",
    "Qwen3ForCausalLM": "Qwen3",
    "Qwen3MoeForCausalLM": "Qwen3-MoE",
    "Olmo2ForCausalLM": "OLMo 2",
    "Olmo3ForCausalLM": "OLMo 3",
    "Phi3ForCausalLM": "Phi-4",
    "GlmForCausalLM": "GLM-4",
    "Glm4ForCausalLM": "GLM-4-0414",
    "GraniteForCausalLM": "Granite",
    "SmolLM3ForCausalLM": "SmolLM3",
    "SeedOssForCausalLM": "Seed-OSS",
    "Exaone4ForCausalLM": "EXAONE 4",
    "CohereForCausalLM": "Command R",
    "Cohere2ForCausalLM": "Command A",
    "MixtralForCausalLM": "Mixtral",
    "DeepseekV2ForCausalLM": "DeepSeek-V2",
    "DeepseekV3ForCausalLM": "DeepSeek-V3",
    "Qwen3NextForCausalLM": "Qwen3-Next",
    "Qwen3_5ForCausalLM": "Qwen3.5",
    "Qwen3_5ForConditionalGeneration": "Qwen3.5",  # the same class, of another config
    "Qwen3_5MoeForCausalLM": "Qwen3.5-MoE",
    "Qwen3_5MoeForConditionalGeneration": "Qwen3.5-MoE",
    "Lfm2ForCausalLM": "LFM2",
    "Lfm2MoeForCausalLM": "LFM2-MoE",
    "Lfm3ForCausalLM": "LFM3",
    "GraniteMoeHybridForCausalLM": "Granite 4",
    "BambaForCausalLM": "Bamba",
    "NemotronHForCausalLM": "Nemotron-H",
    "Mamba2ForCausalLM": "Mamba-2",
    "FalconH1ForCausalLM": "Falcon-H1",
    "JambaForCausalLM": "Jamba",
    "Gemma3ForCausalLM": "Gemma 3",
    "Gemma3ForConditionalGeneration": "Gemma 3",  # the same class, of another config
}
VOCAB_SIZE, MAX_MODEL_LEN, STEP_TOKENS = 4096, 1280, 8192
SHARED: dict[str, Any] = {
    "tokenizer": "octavo-tiny",
    "max_model_len": MAX_MODEL_LEN,
    "max_num_batched_tokens": STEP_TOKENS,
}


def _prompts(*lengths: int) -> list[list[int]]:
    return [random.Random(1000 * place + n).choices(range(VOCAB_SIZE), k=n) for place, n in enumerate(lengths)]


# 21 prompts are more tokens than a step has: the last ones are computed beside rows that decode.
CASES: dict[str, tuple[list[list[int]], int]] = {  # prompts, tokens of each answer
    "1 row": (_prompts(37), 24),
    "17 rows": (_prompts(*range(1, 120, 7)), 16),
    "64 rows": (_prompts(*(5 + 37 * row % 91 for row in range(64))), 12),
    "mixed step": (_prompts(*(400 + row for row in range(21))), 8),
    "1,000 tokens": (_prompts(1000), 12),
}


def keeps_states(family: str) -> bool:
    """Whether some of its layers do: what its requests take of a cache is not K and V alone."""
    return FAMILIES[family][0] in HYBRIDS


def write_model(family: str, folder: Path) -> None:
    """Write the checkpoint of a family."""
    name, changes = FAMILIES[family]
    shared = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": 2048}
    make_reference(name, **{**shared, **changes}).save_pretrained(folder)


def answers(llm: LLM, prompts: list[list[int]], count: int) -> list[list[int]]:
    """The greedy tokens behind each prompt."""
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
    return [list(output.outputs[0].token_ids) for output in outputs]


@dataclasses.dataclass
class Steps:
    """What a runner is given to do."""

    lay_out: BatchOrder
    seen: list[StepShape] = dataclasses.field(default_factory=list)

    @classmethod
    def of(cls, llm: LLM) -> Steps:
        """Of an engine, from now on."""
        runner: Any = runner_of(llm.engine)
        steps = cls(runner._lay_out)
        runner._lay_out = steps
        return steps

    def __call__(self, plan: StepPlan) -> StepShape:
        """As the runner's layout."""
        self.seen.append(self.lay_out(plan))
        return self.seen[-1]

    @property
    def num_mixed(self) -> int:
        """Steps with rows that decode beside parts of prompts."""
        return sum(work.num_long > 0 and work.num_tokens.min() == 1 for work in self.seen)
