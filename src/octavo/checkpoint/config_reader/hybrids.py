"""config.json of families whose layers differ in what mixes their tokens: attention, a state, or nothing.

Owns which layer is which, and the facts of gated delta nets, state spaces and short convolutions. What such a family
has in common with others, `checkpoint.read_fields` reads, of fields that are called as Llama's. Invariant: a layer that
does not attend has no rotation and no window.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec

from octavo.checkpoint.arch import Arch, DeltaNet, LayerKind, Mamba, Moe, Rope, Scales, ShortConv
from octavo.checkpoint.config_reader.checkpoint import read_fields
from octavo.checkpoint.config_reader.families import Family
from octavo.checkpoint.config_reader.fields import Fields
from octavo.checkpoint.config_reader.granite import read_granite

_MAX_SIZE = 1 << 22
_STILL = Rope(kind="none")
# What files of a family call its kinds of layers.
_ATTENDING = {"full_attention": "attention", "attention": "attention"}
_DELTA_MIXERS = {**_ATTENDING, "linear_attention": "delta"}
_CONV_MIXERS = {**_ATTENDING, "conv": "conv"}
_LFM3_MIXERS = {"full_attention": "attention", "sliding_attention": "attention", "conv": "conv"}
_LFM3_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
}
_MAMBA_MIXERS = {**_ATTENDING, "linear_attention": "mamba", "mamba": "mamba"}
_NEMOTRON_MIXERS = {**_MAMBA_MIXERS, "moe": "none", "mlp": "none"}
_NEMOTRON_LETTERS = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}
# What Nemotron-H calls the fields of Mamba-2; of the last three the other name, if it is there, wins.
_NEMOTRON_NAMES = {
    "mamba_n_heads": "mamba_num_heads",
    "mamba_d_state": "ssm_state_size",
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
    "mamba_conv_bias": "use_conv_bias",
}
_MAMBA2_NAMES = {**_NEMOTRON_NAMES, "mamba_n_heads": "num_heads", "mamba_d_state": "state_size"}
_USUAL_LENGTH, _LONGEST = 8192, 1 << 20  # tokens, of a model whose files name no greatest length
_OLD_NEMOTRON_NAMES = ("mamba_n_groups", "mamba_d_conv", "mamba_conv_bias")


def read_qwen3_next(fields: Fields, family: Family) -> Arch:
    """The facts of a Qwen3-Next or a Qwen3.5. Raises ValueError, one line, for what Octavo does not run."""
    values = {"partial_rotary_factor": 0.25, **family.usual, **fields.values}
    fields = Fields(values, fields.where)
    _only_silu(fields)
    num_layers = fields.integer("num_hidden_layers", 1, 1024)
    period = fields.integer("full_attention_interval", 1, 1 << 20, 4)
    usual = ["linear_attention" if (i + 1) % period else "full_attention" for i in range(num_layers)]
    mixers = _mixers(fields, "layer_types", usual, _DELTA_MIXERS)
    rope = {name: value for name, value in fields.mapping("rope_parameters").items() if not name.startswith("mrope_")}
    if fields.get("num_experts") == 0:
        family = msgspec.structs.replace(family, moe="none")
    arch = read_fields(_plain(fields, rope_parameters=rope or None), family)
    delta = DeltaNet(
        num_key_heads=fields.integer("linear_num_key_heads", 1, 4096, 16),
        num_value_heads=fields.integer("linear_num_value_heads", 1, 4096, 32),
        key_size=fields.integer("linear_key_head_dim", 1, 1024, 128),
        value_size=fields.integer("linear_value_head_dim", 1, 1024, 128),
        conv_size=fields.integer("linear_conv_kernel_dim", 2, 32, 4),
    )
    if delta.num_value_heads % delta.num_key_heads:
        why = f"linear_num_key_heads={delta.num_key_heads} must divide it"
        fields.refuse("linear_num_value_heads", delta.num_value_heads, why)
    moe = arch.moe
    if moe is not None:
        size = fields.integer("shared_expert_intermediate_size", 1, _MAX_SIZE, 512)
        moe = dataclasses.replace(moe, num_shared=1, shared_size=size, shared_gate=True)
    return dataclasses.replace(arch, delta=delta, moe=moe, layers=_layers(arch, mixers))


def read_lfm2(fields: Fields, family: Family) -> Arch:
    """The facts of an LFM2."""
    fields = Fields({**family.usual, **fields.values}, fields.where)
    inner = fields.integer("block_ff_dim" if "block_ff_dim" in fields.values else "intermediate_size", 1, _MAX_SIZE)
    if fields.flag("block_auto_adjust_ff_dim", True):
        unit = fields.integer("block_multiple_of", 1, _MAX_SIZE, 256)
        inner = int(fields.number("block_ffn_dim_multiplier", 1e-3, 1e3, 1.0) * int(2 * inner / 3))
        inner = unit * math.ceil(inner / unit)
    return _lfm2(fields, family, inner)


def read_lfm2_moe(fields: Fields, family: Family) -> Arch:
    """The facts of an LFM2-MoE: an LFM2 whose MLPs have the size that is said, with experts in later layers."""
    fields = Fields({**family.usual, **fields.values}, fields.where)
    num_layers = fields.integer("num_hidden_layers", 1, 1024)
    if fields.get("layer_types") is None and fields.get("full_attn_idxs") is None:
        fields.refuse("layer_types", None, f"{num_layers} of {', '.join(_CONV_MIXERS)} are needed")
    arch = _lfm2(fields, family, fields.integer("intermediate_size", 1, _MAX_SIZE))
    num_experts = fields.integer("num_experts", 1, 4096, 32)
    moe = Moe(
        num_experts=num_experts,
        experts_per_token=fields.integer("num_experts_per_tok", 1, num_experts, 4),
        expert_size=fields.integer("moe_intermediate_size", 1, _MAX_SIZE, 1792),
        norm_topk_prob=fields.flag("norm_topk_prob", True),
        scoring="sigmoid",
        corrected=fields.flag("use_expert_bias", True),
        scale=fields.number("routed_scaling_factor", 0, 1e6, 1.0),
        added_to_sum=1e-6,
    )
    routed = frozenset(range(fields.integer("num_dense_layers", 0, 1 << 20, 2), num_layers))
    return dataclasses.replace(arch, moe=moe if routed else None, moe_layers=routed)


def _lfm2(fields: Fields, family: Family, inner: int) -> Arch:
    """What both have. inner: the size of an MLP."""
    num_layers = fields.integer("num_hidden_layers", 1, 1024)
    attending = fields.layers("full_attn_idxs", num_layers, range(num_layers))
    usual = ["full_attention" if layer in attending else "conv" for layer in range(num_layers)]
    mixers = _mixers(fields, "layer_types", usual, _CONV_MIXERS)
    tied = fields.flag("tie_embedding", fields.flag("tie_word_embeddings", True))
    eps = fields.number("norm_eps", 1e-12, 1.0, 1e-5)
    arch = read_fields(
        _plain(fields, intermediate_size=inner, tie_word_embeddings=tied, rms_norm_eps=eps, hidden_act="silu"), family
    )
    conv = ShortConv(size=fields.integer("conv_L_cache", 2, 32, 3), bias=fields.flag("conv_bias", False))
    return dataclasses.replace(arch, conv=conv, layers=_layers(arch, mixers))


def read_lfm3(fields: Fields, family: Family) -> Arch:
    """The facts of an LFM3: of its layers some attend to a window, some to all, each with its own rotation."""
    fields = Fields({**family.usual, **fields.values}, fields.where)
    num_layers = fields.integer("num_hidden_layers", 1, 1024)
    of_four = ("sliding_attention", "conv", "full_attention", "conv")
    usual = ["conv", *(of_four[layer % 4] for layer in range(1, num_layers))]
    mixers = _mixers(fields, "layer_types", usual, _LFM3_MIXERS)
    seen = ["full_attention" if kind == "conv" else kind for kind in fields.get("layer_types", usual)]
    eps = fields.number("norm_eps", 1e-12, 1.0, 1e-5)
    if fields.mapping("rope_scaling"):
        fields.refuse("rope_scaling", fields.get("rope_scaling"), "each kind of layer has its own, in rope_parameters")
    own: dict[str, Any] = {"layer_types": seen, "rope_parameters": fields.mapping("rope_parameters") or _LFM3_ROPES}
    own |= {"rms_norm_eps": eps, "tie_word_embeddings": fields.flag("tie_word_embeddings", True), "hidden_act": "silu"}
    arch = read_fields(_plain(fields, **own), family)
    return dataclasses.replace(
        arch,
        conv=ShortConv(size=fields.integer("conv_L_cache", 2, 32, 7), bias=fields.flag("conv_bias", False)),
        head_gates=fields.flag("use_attention_gate", True),
        norms_behind=fields.flag("use_sandwich_norm", True),
        layers=_layers(arch, mixers),
    )


def read_granite_hybrid(fields: Fields, family: Family) -> Arch:
    """The facts of a Granite 4: a Granite whose layers are mostly Mamba-2's, with experts beside a shared MLP."""
    fields = Fields({**family.usual, **fields.values}, fields.where)
    num_layers = fields.integer("num_hidden_layers", 1, 1024)
    mixers = _mixers(fields, "layer_types", ["mamba"] * num_layers, _MAMBA_MIXERS)
    _only_silu(fields)
    if fields.get("position_embedding_type") not in (None, "rope", "nope"):
        fields.refuse("position_embedding_type", fields.get("position_embedding_type"), "only rope and nope are known")
    family = msgspec.structs.replace(family, still=fields.get("position_embedding_type") != "rope")
    experts, moe = fields.integer("num_local_experts", 0, 4096, 8), None
    shared = fields.integer("shared_intermediate_size", 0, _MAX_SIZE, 1024)
    if not shared and not experts:
        fields.refuse("shared_intermediate_size", shared, "layers without experts (num_local_experts=0) need an MLP")
    size = shared or fields.get("intermediate_size", 11008)  # of no layer where nothing is shared
    arch = read_granite(_plain(fields, intermediate_size=size), family, null_scale=True)
    if experts:
        moe = Moe(
            num_experts=experts,
            experts_per_token=fields.integer("num_experts_per_tok", 1, experts, 2),
            expert_size=fields.integer("intermediate_size", 1, _MAX_SIZE, 11008),
            num_shared=1 if shared else 0,
            shared_size=shared,
        )
    mamba = _mamba2(fields, "mamba_proj_bias")
    moe_layers = frozenset(range(num_layers)) if moe else frozenset[int]()
    layers = _layers(arch, mixers, still=family.still)
    return dataclasses.replace(arch, mamba=mamba, moe=moe, moe_layers=moe_layers, layers=layers)


def read_nemotron_h(fields: Fields, family: Family) -> Arch:
    """The facts of a Nemotron-H: each layer is one of Mamba-2, attention, an MLP, or experts."""
    fields = Fields({**family.usual, **fields.values}, fields.where)
    kinds = _nemotron_kinds(fields)
    mixers = [_NEMOTRON_MIXERS[kind] for kind in kinds]
    fields.only("mlp_hidden_act", "relu2")
    _only_silu(fields, "mamba_hidden_act")
    for name in ("attention_bias", "residual_in_fp32", "tie_word_embeddings"):
        fields.only(name, False)
    eps = fields.number("layer_norm_epsilon", 1e-12, 1.0, 1e-5)
    still = {"rope_theta": fields.get("rope_theta", 1e4), "hidden_act": "silu"}  # of no layer
    arch = read_fields(_plain(fields, rms_norm_eps=eps, num_hidden_layers=len(kinds), **still), family)
    inner = fields.integer("mamba_num_heads", 1, 4096, 128) * fields.integer("mamba_head_dim", 1, 1024, 64)
    limit = [fields.number("mamba_dt_min", 0, 1e3, fields.number("time_step_min", 0, 1e3, 0.001)), float("inf")]
    values = {"ssm_state_size": 128, "n_groups": 8, **fields.values, "mamba_d_ssm": inner, "mamba_d_head": "auto"}
    values |= {"mamba_expand": 2, "time_step_limit": limit, "rms_norm_eps": eps}
    called = _NEMOTRON_NAMES | {name: name for name in _OLD_NEMOTRON_NAMES if name in fields.values}
    mamba = _mamba2(Fields(values, fields.where), "use_bias", called)
    moe_layers = frozenset(layer for layer, kind in enumerate(kinds) if kind == "moe")
    return dataclasses.replace(
        arch,
        activation="relu2",
        mamba=mamba,
        moe=_nemotron_moe(fields) if moe_layers else None,
        moe_layers=moe_layers,
        layers=_layers(arch, mixers, still=family.still),
    )


def read_mamba2(fields: Fields, family: Family) -> Arch:
    """The facts of a model of Mamba-2's layers alone, which has no greatest length: states are of one size."""
    fields = Fields({**family.usual, **fields.values}, fields.where)
    _only_silu(fields)
    eps = fields.number("layer_norm_epsilon", 1e-12, 1.0, 1e-5)
    inner = fields.integer("expand", 1, 64, 2) * fields.integer("hidden_size", 1, 1 << 20)
    num_heads, head_size = fields.integer("num_heads", 1, 4096), fields.integer("head_dim", 1, 1024)
    if num_heads * head_size != inner:
        fields.refuse("head_dim", head_size, f"num_heads={num_heads} of {inner} channels need {inner / num_heads:g}")
    of_no_layer = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 2, "intermediate_size": 1}
    own: dict[str, Any] = {"rms_norm_eps": eps, "max_position_embeddings": _LONGEST, "rope_theta": 1e4, **of_no_layer}
    arch = read_fields(_plain(fields, **own), family)
    of_scan = {**fields.values, "mamba_d_ssm": inner, "mamba_d_head": "auto", "mamba_expand": 2, "rms_norm_eps": eps}
    mamba = _mamba2(Fields(of_scan, fields.where), "use_bias", _MAMBA2_NAMES)
    layers = _layers(arch, ["mamba"] * arch.num_layers)
    return dataclasses.replace(arch, mamba=mamba, layers=layers, default_length=_USUAL_LENGTH)


def read_falcon_h1(fields: Fields, family: Family) -> Arch:
    """The facts of a Falcon-H1. Each of its layers counts as two: the first attends and the second has a state.

    So that each of the two mixers has a place in the cache; the MLP runs in the second.
    """
    fields = Fields({**family.usual, **fields.values}, fields.where)
    _only_silu(fields)
    arch = read_fields(_plain(fields), family)
    gate, down = _numbers(fields, "mlp_multipliers", 2)
    inner = fields.get("mamba_d_ssm") or fields.integer("mamba_expand", 1, 64, 2) * arch.hidden_size
    norm = "none"
    if fields.flag("mamba_rms_norm", False):
        norm = "before_gate" if fields.flag("mamba_norm_before_gate", True) else "gated"
    mamba = _mamba2(Fields({**fields.values, "mamba_d_ssm": inner}, fields.where), "mamba_proj_bias")
    mamba = dataclasses.replace(
        mamba,
        norm=norm,
        out_bias=fields.flag("projectors_bias", False),
        in_scale=_factor(fields, "ssm_in_multiplier"),
        scales=_numbers(fields, "ssm_multipliers", 5),
    )
    pairs = [(kind, LayerKind(rope=_STILL, mixer="mamba")) for kind in arch.layers]
    return dataclasses.replace(
        arch,
        mamba=mamba,
        layers=tuple(each for pair in pairs for each in pair),
        layers_of_each=2,
        embedding_scale=_factor(fields, "embedding_multiplier"),
        logit_divisor=1 / _factor(fields, "lm_head_multiplier"),
        attention_scale=arch.attention_scale * _factor(fields, "key_multiplier"),
        scales=Scales(
            attention_in=_factor(fields, "attention_in_multiplier"),
            attention_out=_factor(fields, "attention_out_multiplier"),
            mixer_out=_factor(fields, "ssm_out_multiplier"),
            gate=gate,
            down=down,
        ),
    )


def read_jamba(fields: Fields, family: Family) -> Arch:
    """The facts of a Jamba: Mamba-1's layers, of which every eighth attends instead and every second has experts."""
    fields = Fields({**family.usual, **fields.values}, fields.where)
    num_layers = fields.integer("num_hidden_layers", 1, 1024)
    _only_silu(fields)
    attends, has_experts = (_periodic(fields, name, num_layers) for name in ("attn_layer", "expert_layer"))
    arch = read_fields(_plain(fields, rope_theta=fields.get("rope_theta", 1e4)), family)
    inner = fields.integer("mamba_expand", 1, 64, 2) * arch.hidden_size
    rank = fields.values.get("mamba_dt_rank", "auto")
    mamba = Mamba(
        inner_size=inner,
        state_size=fields.integer("mamba_d_state", 1, 1024, 16),
        conv_size=fields.integer("mamba_d_conv", 2, 32, 4),
        conv_bias=fields.flag("mamba_conv_bias", True),
        in_bias=fields.flag("mamba_proj_bias", False),
        out_bias=fields.flag("mamba_proj_bias", False),
        eps=arch.norm_eps,
        step_rank=math.ceil(arch.hidden_size / 16) if rank == "auto" else fields.integer("mamba_dt_rank", 1, _MAX_SIZE),
    )
    num_experts, moe = fields.integer("num_experts", 1, 4096, 16), None
    routed = frozenset(layer for layer in range(num_layers) if has_experts[layer] and num_experts > 1)
    if routed:
        moe = Moe(
            num_experts=num_experts,
            experts_per_token=fields.integer("num_experts_per_tok", 1, num_experts, 2),
            expert_size=arch.intermediate_size,
            norm_topk_prob=False,
        )
    mixers = ["attention" if own else "mamba" for own in attends]
    layers = _layers(arch, mixers, still=family.still)
    return dataclasses.replace(arch, mamba=mamba, moe=moe, moe_layers=routed, layers=layers)


def read_bamba(fields: Fields, family: Family) -> Arch:
    """The facts of a Bamba: Mamba-2's layers, some of which attend instead with heads that turn by half."""
    fields = Fields({**family.usual, **fields.values}, fields.where)
    num_layers = fields.integer("num_hidden_layers", 1, 1024)
    attending = fields.layers("attn_layer_indices", num_layers, [])
    _only_silu(fields)
    mixers = ["attention" if layer in attending else "mamba" for layer in range(num_layers)]
    arch = read_fields(_plain(fields), family)
    return dataclasses.replace(arch, mamba=_mamba2(fields, "mamba_proj_bias"), layers=_layers(arch, mixers))


def _plain(fields: Fields, **changes: Any) -> Fields:
    """The fields without what says which layers attend, some changed."""
    values = {name: value for name, value in fields.values.items() if name not in ("layer_types", "layers_block_type")}
    return Fields({**values, **changes}, fields.where)


def _only_silu(fields: Fields, name: str = "hidden_act") -> None:
    """What stands behind a short convolution and in a gate, in all of these families by one field."""
    if fields.get(name, "silu") not in ("silu", "swish"):
        fields.refuse(name, fields.get(name), "a state's gates and convolution have silu")


def _mixers(fields: Fields, name: str, usual: Sequence[str], known: Mapping[str, str]) -> list[str]:
    """Of each layer, as the field says."""
    kinds = fields.get(name, list(usual))
    if not isinstance(kinds, list) or len(kinds) != len(usual) or any(kind not in tuple(known) for kind in kinds):
        fields.refuse(name, kinds, f"{len(usual)} of {', '.join(known)} are needed")
    return [known[kind] for kind in kinds]


def _layers(arch: Arch, mixers: Sequence[str], *, still: bool = False) -> tuple[LayerKind, ...]:
    """still: heads do not turn."""
    return tuple(
        dataclasses.replace(kind, rope=_STILL if still else kind.rope)
        if mixer == "attention"
        else LayerKind(rope=_STILL, mixer=mixer)
        for kind, mixer in zip(arch.layers, mixers, strict=True)
    )


def _mamba2(fields: Fields, bias: str, called: Mapping[str, str] = MappingProxyType({})) -> Mamba:
    """The facts of Mamba-2 as most families call them; bias: the field of both projections' biases.

    called: what this family calls fields otherwise.
    """
    expanded = fields.integer("mamba_expand", 1, 64, 2) * fields.integer("hidden_size", 1, 1 << 20)
    inner = fields.integer("mamba_d_ssm", 1, _MAX_SIZE, expanded, null=expanded)
    heads = called.get("mamba_n_heads", "mamba_n_heads")
    num_heads = fields.integer(heads, 1, 4096, 128)
    name = called.get("mamba_n_groups", "mamba_n_groups")
    groups = fields.integer(name, 1, num_heads, 1)
    if inner % num_heads:
        fields.refuse(heads, num_heads, f"heads of {inner} channels in {groups} groups must be equal")
    size = fields.values.get("mamba_d_head", "auto")
    if size not in ("auto", inner // num_heads):
        fields.refuse("mamba_d_head", size, f"{heads}={num_heads} of {inner} channels have {inner // num_heads} each")
    if num_heads % groups:
        fields.refuse(name, groups, f"it must divide {heads}={num_heads}")
    return Mamba(
        inner_size=inner,
        state_size=fields.integer(called.get("mamba_d_state", "mamba_d_state"), 1, 1024, 256),
        conv_size=fields.integer(called.get("mamba_d_conv", "mamba_d_conv"), 2, 32, 4),
        conv_bias=fields.flag(called.get("mamba_conv_bias", "mamba_conv_bias"), True),
        in_bias=fields.flag(bias, False),
        out_bias=fields.flag(bias, False),
        num_heads=num_heads,
        num_groups=groups,
        step_limit=_step_limit(fields),
        eps=fields.number("rms_norm_eps", 1e-12, 1.0, 1e-6),
    )


def _step_limit(fields: Fields) -> tuple[float, float]:
    """The least and the largest step of time. transformers writes infinity as an object."""
    limit = fields.get("time_step_limit", [0.0, math.inf])
    ends: Sequence[Any] = limit if isinstance(limit, list | tuple) else ()
    endless = ("Infinity", {"__float__": "Infinity"})
    known = [math.inf if end in endless else end for end in ends]
    if len(known) != 2 or any(type(end) not in (int, float) for end in known) or not 0 <= known[0] <= known[1]:
        fields.refuse("time_step_limit", limit, "two numbers from 0 on are needed, the lesser first")
    low, high = known
    return float(low), float(high)


def _nemotron_kinds(fields: Fields) -> list[str]:
    """Of each layer: linear_attention, full_attention, mlp or moe."""
    name = "layer_types" if fields.get("layer_types") is not None else "layers_block_type"
    kinds = fields.get(name)
    if kinds is None:
        return _kinds_of_letters(fields)
    if not isinstance(kinds, list) or not kinds or any(kind not in tuple(_NEMOTRON_MIXERS) for kind in kinds):
        fields.refuse(name, kinds, f"each of {', '.join(_NEMOTRON_MIXERS)} is needed, one for each layer")
    return kinds


def _kinds_of_letters(fields: Fields) -> list[str]:
    """Of `hybrid_override_pattern`, a letter for each layer."""
    name, meanings = "hybrid_override_pattern", "M (Mamba-2), E (experts), * (attention), - (MLP)"
    pattern = fields.get(name, "".join(_NEMOTRON_LETTERS))
    if not isinstance(pattern, str) or not pattern:
        fields.refuse(name, pattern, f"a letter for each layer is needed, of {meanings}")
    for layer, letter in enumerate(pattern):
        if letter not in _NEMOTRON_LETTERS:
            fields.refuse(name, pattern, f"layer {layer} is {letter}: the letters are {meanings}")
    return [_NEMOTRON_LETTERS[letter] for letter in pattern]


def _nemotron_moe(fields: Fields) -> Moe:
    num_experts = fields.integer("n_routed_experts", 1, 4096, 8)
    groups = fields.integer("n_group", 1, num_experts, 1)
    if num_experts % groups or num_experts < 2 * groups:
        fields.refuse("n_group", groups, f"groups of n_routed_experts={num_experts} experts must be equal")
    return Moe(
        num_experts=num_experts,
        experts_per_token=fields.integer("num_experts_per_tok", 1, num_experts, 2),
        expert_size=fields.integer("moe_intermediate_size", 1, _MAX_SIZE, 7688),
        norm_topk_prob=fields.flag("norm_topk_prob", True),
        num_shared=1,
        shared_size=fields.integer("moe_shared_expert_intermediate_size", 1, _MAX_SIZE, 7688),
        scoring="sigmoid",
        corrected=True,
        num_groups=groups,
        groups_kept=fields.integer("topk_group", 1, groups, 1),
        group_score=2,
        scale=fields.number("routed_scaling_factor", 0, 1e6, 1.0),
        latent_size=fields.integer("moe_latent_size", 0, _MAX_SIZE, 0, null=0),
    )


def _periodic(fields: Fields, name: str, num_layers: int) -> list[bool]:
    """Which layers a period and an offset name; Jamba's."""
    period, offset = {"attn_layer": (8, 4), "expert_layer": (2, 1)}[name]
    period = fields.integer(f"{name}_period", 1, 1 << 20, period)
    offset = fields.integer(f"{name}_offset", 0, period - 1, min(offset, period - 1))
    return [layer % period == offset for layer in range(num_layers)]


def _numbers(fields: Fields, name: str, count: int) -> tuple[float, ...]:
    """Of a list of factors; absent: ones."""
    return fields.numbers(name, count, 1e-6, 1e6) if fields.get(name) is not None else (1.0,) * count


def _factor(fields: Fields, name: str) -> float:
    return fields.number(name, 1e-6, 1e6, 1.0)
