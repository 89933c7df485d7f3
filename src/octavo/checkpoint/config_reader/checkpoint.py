"""Hugging Face's config.json, translated to Arch.

Owns the whole of the translation and the fields that belong to no part of a layer; `layers`, `rope` and `experts` read
theirs, `families` says what a file leaves unsaid. Does not load weights and does not know torch. Nothing that a file
names is imported or run, but for a model of a package that the user listed. Invariant: what changes the computation is
translated or refused by name.
"""

from __future__ import annotations

import dataclasses
import importlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octavo.checkpoint.arch import Arch, Latent
from octavo.checkpoint.config_reader.experts import read_experts
from octavo.checkpoint.config_reader.families import FAMILIES, HEADS, Family
from octavo.checkpoint.config_reader.fields import Fields, read_json
from octavo.checkpoint.config_reader.layers import read_layers
from octavo.checkpoint.config_reader.outside import read_outside
from octavo.checkpoint.config_reader.rope import yarn_mscale

_LOG = logging.getLogger(__name__)
_OLD_ROPE = ("rope_theta", "rope_scaling")  # what `rope_parameters` hold
_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


def read_arch(folder: Path, packages: str | None = None, overrides: Mapping[str, Any] | None = None) -> Arch:
    """The facts of the checkpoint in `folder`, from its config.json and generation_config.json (if any).

    packages: those, with commas, in which a config.json may name the class of its model, which is then imported.
    overrides: fields that win over the file's; in an object of the file, such as text_config, field by field.
    """
    generation_path = folder / "generation_config.json"
    generation = read_json(generation_path) if generation_path.exists() else {}
    config = _overridden(read_json(folder / "config.json"), overrides or {})
    return arch_from_config(config, str(folder / "config.json"), generation, packages)


def _overridden(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """A config with other values, each where the file has its field."""
    found = dict(config)
    text = found.get("text_config")
    for name, value in overrides.items():
        if name == "text_config" and isinstance(text, Mapping) and isinstance(value, Mapping):
            found[name] = text = _overridden(text, value)
        elif isinstance(text, Mapping) and (name in text or (name in _OLD_ROPE and "rope_parameters" in text)):
            found["text_config"] = text = _overridden(text, {name: value})
        else:
            found[name] = value
        rope = found.get("rope_parameters")
        if name == "rope_theta" and isinstance(rope, Mapping) and name in rope:  # the newer place of it
            found["rope_parameters"] = {**rope, name: value}
        if name == "rope_scaling" and isinstance(rope, Mapping) and isinstance(value, Mapping) and _is_flat(rope):
            found |= {"rope_parameters": {**rope, **value}, "rope_scaling": None}
    return found


def _is_flat(rope: Mapping[str, Any]) -> bool:
    """Whether `rope_parameters` are of all layers, not of one kind each."""
    return not any(isinstance(each, Mapping) for each in rope.values())


def arch_from_config(
    config: Mapping[str, Any],
    where: str = "config.json",
    generation: Mapping[str, Any] | None = None,
    packages: str | None = None,
) -> Arch:
    """Translate a parsed config.json.

    `where` names it in errors; `generation`, a parsed generation_config.json, has the last word on the ids that end a
    text; packages: as `read_arch`'s. Raises ValueError, one line, for what Octavo does not run.
    """
    name = _architecture(Fields(config, where))
    text = config.get("text_config")
    fields = Fields({**config, **text} if isinstance(text, Mapping) else config, where)
    arch = _read_listed(fields, FAMILIES[name]) if name in FAMILIES else read_outside(fields, name, packages)
    eos = Fields(generation or {}, where.removesuffix("config.json") + "generation_config.json").token_ids(
        "eos_token_id", arch.vocab_size
    )
    return dataclasses.replace(arch, name=name, eos_token_ids=eos or arch.eos_token_ids)


def _read_listed(fields: Fields, family: Family) -> Arch:
    """The facts of a family of the table, by its own function where it has one."""
    fields = as_its_class_reads(fields, family)
    if not family.read:
        return read_fields(fields, family)
    module, _, function = family.read.partition(":")
    arch: Arch = getattr(importlib.import_module(module), function)(fields, family)
    return arch


def as_its_class_reads(fields: Fields, family: Family) -> Fields:
    """A file's fields by their one name each, as transformers' class of the family keeps them."""
    values = dict(fields.values)
    for other, name in family.renamed.items():
        if values.get(other) is not None:
            values[name] = values.pop(other)
    scaling = values.get("rope_scaling")
    if scaling and isinstance(scaling, Mapping) and not family.full_scaling:  # it replaces the newer field
        values |= {"rope_parameters": scaling, "rope_scaling": None}
    return Fields({**values, **family.fixed}, fields.where)


def read_fields(fields: Fields, family: Family) -> Arch:
    """The facts of a decoder that `family` describes. Raises ValueError, one line, for what Octavo does not run."""
    fields = Fields({**family.usual, **fields.values}, fields.where)
    _refuse_extras(fields, family)
    for name in (name for name, usual in family.usual.items() if usual is True and fields.is_null(name)):
        fields.refuse(name, None, "true or false is needed")
    hidden_size = fields.integer("hidden_size", 1, 1 << 20)
    vocab_size = fields.integer("vocab_size", 1, 1 << 24)
    latent = _latent(fields) if family.latent else None
    num_heads, num_kv_heads, head_size = _heads(fields, family, hidden_size, latent)
    dtype = str(fields.get("dtype", fields.get("torch_dtype", "float32"))).removeprefix("torch.")
    if dtype not in ("float32", "bfloat16", "float16"):
        fields.refuse("dtype", dtype, "float32, bfloat16 or float16 is needed")
    seen = read_layers(fields, family, latent.rope_size if latent else head_size)
    moe, moe_layers = read_experts(fields, family, len(seen.layers))
    activation_field = "hidden_activation" if family.gemma else "hidden_act"
    activation = fields.values.get(activation_field, "gelu_pytorch_tanh" if family.gemma else "silu")
    if activation not in tuple(_ACTIVATIONS):
        fields.refuse(activation_field, activation, f"known are {', '.join(_ACTIVATIONS)}")
    bias = family.bias in ("field", "field-qkv", "fields") and fields.flag("attention_bias", False)
    bos = fields.token_ids("bos_token_id", vocab_size)
    return Arch(
        name="",  # whoever knows the file says it
        dtype=dtype,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size", 1, 1 << 22),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        max_position=seen.max_position,
        default_length=seen.default_length,
        norm_eps=fields.number("rms_norm_eps", 1e-12, 1.0, 1e-6),
        layers=seen.layers,
        moe_layers=moe_layers,
        moe=moe,
        latent=latent,
        tied=fields.flag("tie_word_embeddings", family.gemma),
        activation=_ACTIVATIONS[activation],
        attention_bias=bias or family.bias == "qkv",
        output_bias=_output_bias(fields, family, bias),
        mlp_bias=family.mlp_bias and fields.flag("mlp_bias", False),
        qk_norm=family.qk_norm,
        attention_scale=_attention_scale(fields, family, head_size, latent),
        logit_soft_cap=fields.number("final_logit_softcapping", 0, 1e6, 0, null=0) if family.gemma else 0.0,
        embedding_scale=hidden_size**0.5 if family.gemma else 1.0,
        eos_token_ids=fields.token_ids("eos_token_id", vocab_size),
        bos_token_id=bos[0] if bos else None,
    )


def _architecture(fields: Fields) -> str:
    """The one architecture that the file names, if it is one of ours or the path of a class."""
    names = fields.get("architectures", [])
    name = names[0] if isinstance(names, list) and len(names) == 1 else None
    if name in HEADS["eagle3"]:
        fields.refuse(
            "architectures", names, "this is a head that drafts: name it in speculative_config, with its method"
        )
    if not isinstance(name, str) or (name not in FAMILIES and ":" not in name):
        fields.refuse(
            "architectures", names, f"known are {', '.join(sorted(FAMILIES))}, or a path 'package.module:Class'"
        )
    if "auto_map" in fields.values:
        _LOG.warning("%s: auto_map is ignored: code that comes with a checkpoint is never run", fields.where)
    return name


def _refuse_extras(fields: Fields, family: Family) -> None:
    """Refuse what changes the computation and is not implemented."""
    quantization = fields.mapping("quantization_config")
    if quantization and not _is_of_the_cache(quantization):
        fields.refuse("quantization_config", quantization.get("quant_method"), "only plain weights are loaded")
    if fields.get("attn_logit_softcapping") is not None:
        fields.refuse("attn_logit_softcapping", fields.get("attn_logit_softcapping"), "only null is implemented")
    for name in ("use_bidirectional_attention", *(() if family.mlp_bias else ("mlp_bias",))):
        fields.only(name, False)


def _is_of_the_cache(quantization: Mapping[str, Any]) -> bool:
    """Whether it says no more than how K and V were scaled for a float8 cache, as compressed-tensors writes that."""
    scheme = quantization.get("kv_cache_scheme")
    if quantization.get("config_groups") or not isinstance(scheme, Mapping):
        return False
    return scheme.get("type") == "float" and scheme.get("num_bits") == 8 and not scheme.get("dynamic")


def _latent(fields: Fields) -> Latent:
    """What latent attention keeps and makes."""
    rope_size = fields.integer("qk_rope_head_dim", 2, 1024, 64)
    if rope_size % 2:
        fields.refuse("qk_rope_head_dim", rope_size, "rotary embedding needs an even number")
    compressed = "q_lora_rank" not in fields.values or fields.get("q_lora_rank") is not None
    return Latent(
        latent_size=fields.integer("kv_lora_rank", 1, 1 << 16, 512),
        rope_size=rope_size,
        nope_size=fields.integer("qk_nope_head_dim", 1, 1024, 128),
        value_size=fields.integer("v_head_dim", 1, 1024, 128),
        query_size=fields.integer("q_lora_rank", 1, 1 << 16, 1536) if compressed else 0,
    )


def _attention_scale(fields: Fields, family: Family, head_size: int, latent: Latent | None) -> float:
    """What scores are multiplied by. DeepSeek's YaRN adds the square of 0.1 mscale_all_dim ln(factor) + 1."""
    if latent is None:
        return (fields.number("query_pre_attn_scalar", 1e-3, 1e6, 256) if family.gemma else head_size) ** -0.5
    scale = (latent.nope_size + latent.rope_size) ** -0.5
    values = Fields(fields.mapping("rope_parameters"), fields.where)
    if values.get("rope_type", values.get("type", "default")) == "default":
        return scale
    every = values.number("mscale_all_dim", 0, 1e3, 0.0, null=0.0)
    return scale * yarn_mscale(values.number("factor", 1e-3, 1e6), every) ** 2


def _output_bias(fields: Fields, family: Family, bias: bool) -> bool:
    """On the attention's output; `bias`: on q, k and v, by `attention_bias`."""
    return fields.flag("attention_out_bias", False) if family.bias == "fields" else bias and family.bias == "field"


def _heads(fields: Fields, family: Family, hidden_size: int, latent: Latent | None) -> tuple[int, int, int]:
    """(num_heads, num_kv_heads, head_size)."""
    num_heads = fields.integer("num_attention_heads", 1, 4096)
    if latent is not None:
        return num_heads, 1, latent.latent_size + latent.rope_size
    num_kv_heads = fields.integer("num_key_value_heads", 1, 4096, num_heads, null=num_heads)
    if num_heads % num_kv_heads:
        fields.refuse("num_key_value_heads", num_kv_heads, f"it must divide num_attention_heads={num_heads}")
    divided = fields.is_null("head_dim") or ("head_dim" not in fields.values and not family.head_size)
    if divided and hidden_size % num_heads:
        fields.refuse("num_attention_heads", num_heads, f"it must divide hidden_size={hidden_size}")
    shared = hidden_size // num_heads
    head_size = fields.integer("head_dim", 2, 1024, family.head_size or shared, null=shared)
    if head_size % 2 and not family.still:
        fields.refuse("head_dim", head_size, "rotary embedding needs an even number")
    return num_heads, num_kv_heads, head_size
