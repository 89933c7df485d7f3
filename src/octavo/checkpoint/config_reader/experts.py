"""The experts of a mixture: how many, how they are chosen, and in which layers.

Owns the fields of Qwen3's, Mixtral's and DeepSeek's routers. Knows no other part of a layer. Invariant: what is let
through, the layers of `octavo.layers.moe` compute as transformers does.
"""

from __future__ import annotations

from octavo.checkpoint.arch import Moe
from octavo.checkpoint.config_reader.families import Family
from octavo.checkpoint.config_reader.fields import Fields


def read_experts(fields: Fields, family: Family, num_layers: int) -> tuple[Moe | None, frozenset[int]]:
    """(expert facts, the layers that have experts)."""
    if family.moe == "none":
        return None, frozenset()
    if family.moe == "mixtral":
        return _mixtral_moe(fields), frozenset(range(num_layers))
    return _qwen_moe(fields, num_layers) if family.moe == "qwen" else _deepseek_moe(fields, family, num_layers)


def _mixtral_moe(fields: Fields) -> Moe:
    """Softmax, the best few normed: every MLP is one of its experts."""
    num_experts = fields.integer("num_local_experts", 1, 4096, 8)
    return Moe(
        num_experts=num_experts,
        experts_per_token=fields.integer("num_experts_per_tok", 1, num_experts, 2),
        expert_size=fields.integer("intermediate_size", 1, 1 << 22),
    )


def _deepseek_moe(fields: Fields, family: Family, num_layers: int) -> tuple[Moe | None, frozenset[int]]:
    """DeepSeek-V2: softmax, greedy or by groups; V3: sigmoid, corrected, by groups (arXiv 2412.19437)."""
    third = family.moe == "deepseek3"
    num_experts = fields.integer("n_routed_experts", 1, 4096, 256 if third else 64)
    method = fields.get("topk_method", "noaux_tc" if third else "greedy")
    if method not in (("noaux_tc",) if third else ("greedy", "group_limited_greedy")):
        fields.refuse("topk_method", method, "only noaux_tc (V3), greedy and group_limited_greedy (V2) are implemented")
    grouped = method != "greedy"
    num_groups = fields.integer("n_group", 1, num_experts, 8 if third else 6) if grouped else 1
    if num_experts % num_groups or (third and num_experts < 2 * num_groups):
        fields.refuse("n_group", num_groups, f"groups of n_routed_experts={num_experts} experts must be equal")
    normalize = fields.flag("norm_topk_prob", third)
    if normalize and not third:
        fields.refuse("norm_topk_prob", normalize, "only false is implemented for DeepSeek-V2")
    moe = Moe(
        num_experts=num_experts,
        experts_per_token=fields.integer("num_experts_per_tok", 1, num_experts, 8 if third else 6),
        expert_size=fields.integer("moe_intermediate_size", 1, 1 << 22, 2048 if third else 1407),
        norm_topk_prob=normalize,
        num_shared=fields.integer("n_shared_experts", 0, 64, 1 if third else 2),
        scoring="sigmoid" if third else "softmax",
        corrected=third,
        num_groups=num_groups,
        groups_kept=fields.integer("topk_group", 1, num_groups, 4 if third else None) if grouped else 1,
        group_score=2 if third else 1,
        scale=fields.number("routed_scaling_factor", 0, 1e6, 2.5 if third else 1.0),
    )
    first = fields.integer("first_k_dense_replace", 0, num_layers, 3 if third else 0)
    fields.only("moe_layer_freq", 1)
    return moe, frozenset(range(first, num_layers))


def _qwen_moe(fields: Fields, num_layers: int) -> tuple[Moe, frozenset[int]]:
    """(expert facts, the layers that have experts)."""
    num_experts = fields.integer("num_experts", 1, 4096)
    moe = Moe(
        num_experts=num_experts,
        experts_per_token=fields.integer("num_experts_per_tok", 1, num_experts, 8),
        expert_size=fields.integer("moe_intermediate_size", 1, 1 << 22),
        norm_topk_prob=fields.flag("norm_topk_prob", False),
    )
    step = fields.integer("decoder_sparse_step", 1, 1 << 20, 1)
    dense = fields.layers("mlp_only_layers", num_layers, [])
    return moe, frozenset(layer for layer in range(num_layers) if layer not in dense and (layer + 1) % step == 0)
