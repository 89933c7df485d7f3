"""Tools for tests of models: tiny checkpoints made by transformers, and a rig that runs a model without an
engine."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from hybrid_configs import HYBRIDS
from octavo.attention.base import (
    BACKENDS,
    AttentionInputs,
    ForwardContext,
    LayerContext,
    TableContext,
    forward_context,
)
from octavo.cache.groups import make_groups
from octavo.cache.specs import distinct
from octavo.ops.inputs.tensors import LogitTokens

BLOCK_SIZE = 16
SMALL: dict[str, Any] = {
    "vocab_size": 199,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "eos_token_id": 7,
    "bos_token_id": 1,
    "pad_token_id": None,
}
MOE = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "head_dim": 32}
GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 24, "sliding_window_pattern": 3}
LLAMA3_ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}

LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
PHI4_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0 + 0.1 * pair for pair in range(6)],
    "long_factor": [1.0 + 0.4 * pair for pair in range(6)],
}
GLM_ROPE = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
# Rotations that depend on the longest request: max_position_embeddings, and the rest of a Llama's config.
STRETCHED: dict[str, dict[str, Any]] = {
    "dynamic": {
        "max_position_embeddings": 64,
        "rope_parameters": {"rope_type": "dynamic", "factor": 3.0, "rope_theta": 1e4},
    },
    "longrope": {
        "max_position_embeddings": 192,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "original_max_position_embeddings": 64,
            "short_factor": [1.0 + 0.1 * pair for pair in range(8)],
            "long_factor": [1.0 + 0.4 * pair for pair in range(8)],
        },
    },
    "longrope, in part": {
        "max_position_embeddings": 192,
        "original_max_position_embeddings": 64,
        "rope_parameters": {**PHI4_ROPE, "original_max_position_embeddings": 64},
    },
}
NO_DROPOUT = {"attention_dropout": 0.0, "residual_dropout": 0.0}  # a trainer refuses what drops
YARN_ROPE = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 128}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"num_key_value_heads": 4}),
    "llama-tied-biased": ("Llama", {"tie_word_embeddings": True, "attention_bias": True, "head_dim": 32}),
    "llama3-rope": (
        "Llama",
        {"rope_parameters": {**LLAMA3_ROPE, "rope_theta": 5e5, "original_max_position_embeddings": 64}},
    ),
    "llama-linear-rope": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}},
    ),
    "llama-yarn-rope": (
        "Llama",
        {"rope_parameters": YARN_ROPE},
    ),
    "llama-yarn-betas": (
        "Llama",
        {"rope_parameters": {**YARN_ROPE, "beta_fast": 16, "beta_slow": 2, "truncate": False, "attention_factor": 1.3}},
    ),
    "llama-mlp-bias": ("Llama", {"mlp_bias": True, "attention_bias": True}),
    "llama-partial": ("Llama", {"partial_rotary_factor": 0.5, "head_dim": 24}),
    "qwen3-partial": ("Qwen3", {"partial_rotary_factor": 0.25, "head_dim": 32}),
    "deepseek2-biased": (
        "DeepseekV2",
        {**LATENT, "q_lora_rank": None, "attention_bias": True, "mlp_bias": True, "topk_method": "greedy"},
    ),
    "mistral-window": ("Mistral", {"sliding_window": 40}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 2}),
    "qwen3": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3-biased": ("Qwen3", {"head_dim": 16, "attention_bias": True}),
    "gemma3-16": ("Gemma3", {**GEMMA, "sliding_window": 16}),
    "gemma3-32": (
        "Gemma3",
        {
            **GEMMA,
            "sliding_window": 32,
            "tie_word_embeddings": False,
            "final_logit_softcapping": 2.0,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "qwen3-moe": ("Qwen3Moe", {**MOE, "norm_topk_prob": True, "mlp_only_layers": [1]}),
    "deepseek2": ("DeepseekV2", {**LATENT, "q_lora_rank": None, "topk_method": "greedy"}),
    "deepseek2-groups": (
        "DeepseekV2",
        {**LATENT, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.0},
    ),
    "deepseek3": ("DeepseekV3", {**LATENT, "n_group": 4, "topk_group": 2}),
    "deepseek3-yarn": (
        "DeepseekV3",
        {
            **LATENT,
            "n_group": 2,
            "topk_group": 1,
            "attention_bias": True,
            "rope_interleave": False,
            "rope_parameters": {**YARN_ROPE, "mscale": 1.0, "mscale_all_dim": 0.7},
        },
    ),
    "olmo2": ("Olmo2", {"num_key_value_heads": 4, "attention_bias": True}),
    "olmo3": (
        "Olmo3",
        {
            "num_hidden_layers": 5,
            "sliding_window": 24,
            "attention_bias": True,
            "rope_parameters": {
                "full_attention": {**YARN_ROPE, "attention_factor": 1.2},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "phi3": ("Phi3", {"sliding_window": 40}),
    "phi4": (
        "Phi3",
        {"tie_word_embeddings": True, "rope_parameters": {**PHI4_ROPE, "original_max_position_embeddings": 512}},
    ),
    "glm": ("Glm", {"head_dim": 24, "rope_parameters": GLM_ROPE}),
    "glm4": ("Glm4", {"head_dim": 24, "attention_bias": False, "rope_parameters": GLM_ROPE}),
    "glm4-biased": ("Glm4", {"head_dim": 16, "rope_parameters": {**GLM_ROPE, "partial_rotary_factor": 1.0}}),
    "granite": (
        "Granite",
        {"embedding_multiplier": 3.0, "residual_multiplier": 0.22, "attention_multiplier": 0.1, "logits_scaling": 2.0},
    ),
    "granite-biased": (
        "Granite",
        {
            "embedding_multiplier": 12,
            "residual_multiplier": 0.7,
            "logits_scaling": 3,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 5}),
    "smollm3-window": (
        "SmolLM3",
        {
            "no_rope_layers": [0, 1, 1, 0],
            "use_sliding_window": True,
            "sliding_window": 24,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": False,
            "rope_parameters": YARN_ROPE,
        },
    ),
    "exaone4": ("Exaone4", {"num_hidden_layers": 5, "sliding_window": 24}),
    "exaone4-full": (
        "Exaone4",
        {
            "sliding_window": None,
            "sliding_window_pattern": None,
            "layer_types": ["full_attention"] * 4,
            "head_dim": 32,
            "tie_word_embeddings": True,
            "rope_parameters": {**LLAMA3_ROPE, "rope_theta": 1e6, "original_max_position_embeddings": 64},
        },
    ),
    "cohere": ("Cohere", {"logit_scale": 0.25}),
    "cohere-biased": (
        "Cohere",
        {"logit_scale": 1.0, "attention_bias": True, "tie_word_embeddings": False, "hidden_size": 96},
    ),
    "cohere2": ("Cohere2", {"num_hidden_layers": 5, "sliding_window": 24, "logit_scale": 0.25}),
    "mixtral": ("Mixtral", {"num_local_experts": 8, "num_experts_per_tok": 3}),
    "mixtral-window": (
        "Mixtral",
        {"num_local_experts": 4, "sliding_window": 24, "head_dim": 32, "tie_word_embeddings": True},
    ),
    "seed-oss": ("SeedOss", {"head_dim": 32, **NO_DROPOUT}),
    "seed-oss-biased": (
        "SeedOss",
        {
            **NO_DROPOUT,
            "attention_bias": False,
            "attention_out_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3-moe-tied": ("Qwen3Moe", {**MOE, "norm_topk_prob": False, "tie_word_embeddings": True}),
}

# The seed of a family's weights, where 1 makes two experts nearly tie for a place: see `narrowest_choice`.
SEEDS = {"deepseek2": 2, "qwen3-moe-tied": 2}

# What writes into the residual stream of a hybrid: small, since the norms behind its states make much of rounding.
_ADDED = ("o_proj.weight", "out_proj.weight", "down_proj.weight", "down_proj", "w2.weight", "output_linear.weight")


def _turn_partly(module: str) -> None:
    """Let a family rotate as Qwen3-Next does: the first channels of a head, as many as there are cosines."""
    from transformers.models.qwen3_next.modeling_qwen3_next import apply_rotary_pos_emb

    importlib.import_module(module).apply_rotary_pos_emb = apply_rotary_pos_emb


def make_reference(family: str, *, seed: int = 1, **changes: Any) -> Any:
    """A tiny transformers model with weights that make logits of order one, norms and biases that matter."""
    import transformers

    name, own = {**FAMILIES, **HYBRIDS}[family]
    if family in FAMILIES and "partial_rotary_factor" in own:
        _turn_partly(f"transformers.models.{family.split('-')[0]}.modeling_{family.split('-')[0]}")
    texts = {text: f"{text}TextConfig" for text in ("Gemma3", "Qwen3_5", "Qwen3_5Moe")}
    config_class = getattr(transformers, texts.get(name, f"{name}Config"))
    torch.manual_seed(seed)
    values = {**SMALL, **({"max_position_embeddings": 1280} if family in HYBRIDS else {}), **own, **changes}
    values = {key: value for key, value in values.items() if value is not None or key == "pad_token_id"}
    config = config_class(**values, attn_implementation="eager")
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    if (
        family in FAMILIES and "partial_rotary_factor" in own
    ):  # transformers' default rotation of these families turns whole heads
        size = int(config.head_dim * own["partial_rotary_factor"])
        model.model.rotary_emb.inv_freq = 1e4 ** -(torch.arange(0, size, 2) / size)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
            else:
                parameter.normal_(std=max(parameter.shape[-1], 1) ** -0.5)
        if family in HYBRIDS:
            _soften(model)
    return model


def _soften(model: Any) -> None:
    """Let a hybrid's layers add little to its stream, so that what rounding does is not multiplied by their norms."""
    for name, parameter in model.named_parameters():
        if name.endswith(_ADDED):
            parameter.mul_(0.3)
        elif "embed" in name:
            parameter.normal_()
    for name, buffer in model.named_buffers():
        if name.endswith(("e_score_correction_bias", "expert_bias")):
            buffer.normal_(std=0.1)


class _Gaps(TorchFunctionMode):
    """Watches `topk`: the least distance between the last value that was chosen and the first that was not."""

    def __init__(self) -> None:
        super().__init__()
        self.least = math.inf

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func in (torch.topk, torch.Tensor.topk):
            ordered, count = args[0].double().sort(dim=-1, descending=True).values, found.values.shape[-1]
            if count < ordered.shape[-1]:
                self.least = min(self.least, (ordered[..., count - 1] - ordered[..., count]).min().item())
        return found


@torch.inference_mode()
def narrowest_choice(reference: Any, tokens: Sequence[int]) -> float:
    """How near to a tie any router comes, of experts or of their groups, in float64; inf without a router.

    Where it is below the rounding of a float32 forward, a library's order of sums decides who serves a token, and two
    right forwards have logits that are far apart.
    """
    exact = copy.deepcopy(reference).double()
    exact.set_experts_implementation("eager")  # the other ones know no float64
    with _Gaps() as gaps:
        exact(torch.tensor([tokens]))
    return gaps.least


def _last_tokens(inputs: AttentionInputs) -> LogitTokens:
    tokens = inputs.query_start[1:].long() - 1
    rows, start = torch.arange(inputs.num_rows), torch.arange(inputs.num_rows + 1, dtype=torch.int32)
    return LogitTokens(tokens, rows, inputs.seq_lens.long(), start)


class Rig:
    """A model with a cache, run by hand: rows of tokens in, logits of every token out.

    Blocks are handed out in a shuffled order and every unused byte of the cache is NaN.
    """

    def __init__(self, model: Any, backend: str = "reference", dtype: torch.dtype = torch.float32) -> None:
        self.model = model
        self.groups = make_groups(model.layer_specs, BLOCK_SIZE)
        num_blocks = 160
        self.kv = [
            torch.full((num_blocks, spec.num_kv_heads, BLOCK_SIZE, spec.channels), torch.nan, dtype=dtype)
            for spec in model.layer_specs
        ]
        self.free = [list(range(1, num_blocks)) for _ in self.groups]
        for group, blocks in enumerate(self.free):
            random.Random(group).shuffle(blocks)
        self.tables = [
            TableContext(
                BACKENDS.resolve(backend)(distinct(model.layer_specs, group.layers), dtype, torch.device("cpu"))
            )
            for group in self.groups
        ]
        group_of_layer = {layer: index for index, group in enumerate(self.groups) for layer in group.layers}
        self.layers = [
            LayerContext(spec, self.tables[group_of_layer[layer]], group_of_layer[layer], self.kv[layer])
            for layer, spec in enumerate(model.layer_specs)
        ]
        self.blocks: dict[tuple[int, str], list[int]] = {}
        self.lengths: dict[str, int] = {}

    def _inputs(self, group: int, chunks: Mapping[str, Sequence[int]]) -> AttentionInputs:
        tables, slots, starts, lengths = [], [], [0], []
        for row, tokens in chunks.items():
            known = self.lengths.get(row, 0)
            table = self.blocks.setdefault((group, row), [])
            while len(table) * BLOCK_SIZE < known + len(tokens):
                table.append(self.free[group].pop())
            slots += [table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(known, known + len(tokens))]
            tables.append(table)
            starts.append(starts[-1] + len(tokens))
            lengths.append(known + len(tokens))
        width = max(map(len, tables))
        return AttentionInputs(
            num_rows=len(chunks),
            num_tokens=starts[-1],
            max_query_len=max(map(len, chunks.values())),
            max_seq_len=max(lengths),
            block_size=BLOCK_SIZE,
            query_start=torch.tensor(starts, dtype=torch.int32),
            seq_lens=torch.tensor(lengths, dtype=torch.int32),
            block_table=torch.tensor([table + [0] * (width - len(table)) for table in tables], dtype=torch.int32),
            slot_mapping=torch.tensor(slots, dtype=torch.int64),
        )

    def step(self, chunks: Mapping[str, Sequence[int]]) -> dict[str, torch.Tensor]:
        """Run the next tokens of each row; returns [tokens, vocab] logits per row."""
        logits = self.compute(chunks)
        return dict(zip(chunks, logits.split([len(tokens) for tokens in chunks.values()]), strict=True))

    @torch.inference_mode()
    def compute(self, chunks: Mapping[str, Sequence[int]], *, last: bool = False) -> torch.Tensor:
        """Run the next tokens of each row; returns logits [tokens, vocab] of all, or of each row's `last`."""
        inputs = [self._inputs(group, chunks) for group in range(len(self.groups))]
        positions = [self.lengths.get(row, 0) + i for row, tokens in chunks.items() for i in range(len(tokens))]
        context = ForwardContext(
            layers=self.layers,
            tables=self.tables,
            positions=torch.tensor(positions),
            logit_tokens=_last_tokens(inputs[0]) if last else None,
        )
        for table, group_inputs in zip(self.tables, inputs, strict=True):
            table.prepare(group_inputs, for_capture=False)
        ids = torch.tensor([token for tokens in chunks.values() for token in tokens])
        with forward_context(context):
            hidden = self.model.forward(ids, context.positions)
        for row, tokens in chunks.items():
            self.lengths[row] = self.lengths.get(row, 0) + len(tokens)
        return self.model.logits(hidden)

    def run(self, tokens: Sequence[int], sizes: Sequence[int], row: str = "row") -> torch.Tensor:
        """All tokens of one row in chunks of the given sizes; returns the logits of all, [tokens, vocab]."""
        assert sum(sizes) == len(tokens)
        parts, done = [], 0
        for size in sizes:
            parts.append(self.step({row: tokens[done : done + size]})[row])
            done += size
        return torch.cat(parts)


@dataclasses.dataclass
class Case:
    """A tiny checkpoint: its folder, transformers' model of it, and ours."""

    folder: Path
    reference: Any
    model: Any

    @torch.inference_mode()
    def expected(self, tokens: Sequence[int]) -> torch.Tensor:
        """transformers' logits of every token, [tokens, vocab]."""
        return self.reference(torch.tensor([tokens])).logits[0]
