"""Hugging Face's config.json, translated to Arch.

Owns their field names, old and new, what an architecture's file leaves unsaid, and the refusal of what Octavo
cannot run. Does not load weights and does not know torch. Nothing that a file names is imported or run.
Invariant: a refusal is one line that names the file, the field, the value and what would do.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from octavo.arch import Arch, Latent, LayerKind, Moe, Rope

_LOG = logging.getLogger(__name__)

MAX_JSON_BYTES = 64 << 20  # of config.json, generation_config.json or a weight index


def read_arch(folder: Path) -> Arch:
    """The facts of the checkpoint in `folder`, from its config.json and generation_config.json (if any)."""
    generation_path = folder / "generation_config.json"
    generation = read_json(generation_path) if generation_path.exists() else {}
    return arch_from_config(read_json(folder / "config.json"), str(folder / "config.json"), generation)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a regular file of sane size. Raises ValueError, one line, for anything else."""
    try:
        info = path.stat()
        text = path.read_text(encoding="utf-8") if _is_sane_file(info) else None
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file: a model folder holds config.json and *.safetensors") from None
    except OSError as error:
        raise ValueError(f"{path}: cannot read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text") from error
    if text is None:
        raise ValueError(f"{path}: a regular file of at most {MAX_JSON_BYTES} bytes is needed")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not valid JSON: {str(error)[:200]}") from error
    if isinstance(value, dict):
        return value
    raise ValueError(f"{path}: not a JSON object")


def _is_sane_file(info: os.stat_result) -> bool:
    return stat.S_ISREG(info.st_mode) and info.st_size <= MAX_JSON_BYTES


class _Fields:
    """Typed reads of a parsed JSON object; every refusal is one line with file, field, value and reason."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values = values
        self.where = where

    def refuse(self, name: str, value: object, why: str) -> NoReturn:
        """Raise the ValueError."""
        raise ValueError(f"{self.where}: unsupported {name}={json.dumps(value, default=str)[:100]} ({why})")

    def get(self, name: str, default: Any = None) -> Any:
        """The raw value; null counts as absent."""
        value = self.values.get(name)
        return default if value is None else value

    def integer(self, name: str, low: int, high: int, default: int | None = None) -> int:
        """An int in low..high."""
        value = self.get(name, default)
        if type(value) is not int or not low <= value <= high:
            self.refuse(name, value, f"an integer from {low} to {high} is needed")
        return value

    def number(self, name: str, low: float, high: float, default: float | None = None) -> float:
        """A finite number in low..high."""
        value = self.get(name, default)
        if type(value) not in (int, float) or not low <= value <= high:
            self.refuse(name, value, f"a number from {low:g} to {high:g} is needed")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """A boolean."""
        value = self.get(name, default)
        if type(value) is not bool:
            self.refuse(name, value, "true or false is needed")
        return value

    def only(self, name: str, usual: object) -> None:
        """Absent, or the one value that is implemented."""
        if self.get(name, usual) != usual:
            self.refuse(name, self.get(name), f"only {json.dumps(usual)} is implemented")

    def mapping(self, name: str) -> Mapping[str, Any]:
        """An object; absent: empty."""
        value = self.get(name, {})
        if not isinstance(value, Mapping):
            self.refuse(name, value, "an object is needed")
        return value

    def token_ids(self, name: str, vocab_size: int) -> tuple[int, ...]:
        """An id or a non-empty list of ids below `vocab_size`; absent: ()."""
        value = self.get(name, ())
        ids = value if isinstance(value, (list, tuple)) else (value,)
        if (value != () and not ids) or any(type(i) is not int or not 0 <= i < vocab_size for i in ids):
            self.refuse(name, value, f"token ids from 0 to {vocab_size - 1} are needed")
        return tuple(ids)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Family:
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


_GEMMA3 = _Family(bias="field", qk_norm=True, sliding="pattern", head_size=256, gemma=True, theta=1e6)
_FAMILIES = {
    "LlamaForCausalLM": _Family(bias="field"),
    "MistralForCausalLM": _Family(sliding="all"),
    "Qwen2ForCausalLM": _Family(bias="qkv", sliding="upper", window_flag=True),
    "Qwen3ForCausalLM": _Family(bias="field", qk_norm=True, sliding="upper", window_flag=True, head_size=128),
    "Qwen3MoeForCausalLM": _Family(bias="field", qk_norm=True, sliding="all", window_flag=True, moe="qwen"),
    "DeepseekV2ForCausalLM": _Family(bias="field", latent=True, moe="deepseek2"),
    "DeepseekV3ForCausalLM": _Family(bias="field", latent=True, moe="deepseek3"),
    "Gemma3ForCausalLM": _GEMMA3,
    "Gemma3ForConditionalGeneration": _GEMMA3,  # its text half
}
_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_LAYER_TYPES = ("full_attention", "sliding_attention")
_ROPE_KINDS = ("default", "linear", "llama3", "yarn")
_MAX_POSITION = 1 << 24


def arch_from_config(
    config: Mapping[str, Any], where: str = "config.json", generation: Mapping[str, Any] | None = None
) -> Arch:
    """Translate a parsed config.json.

    `where` names it in errors; `generation`, a parsed generation_config.json, has the last word on the ids that end a
    text. Raises ValueError, one line, for what Octavo does not run.
    """
    name = _architecture(_Fields(config, where))
    family = _FAMILIES[name]
    text = config.get("text_config")
    fields = _Fields({**config, **text} if isinstance(text, Mapping) else config, where)
    _refuse_extras(fields)
    hidden_size = fields.integer("hidden_size", 1, 1 << 20)
    vocab_size = fields.integer("vocab_size", 1, 1 << 24)
    latent = _latent(fields) if family.latent else None
    num_heads, num_kv_heads, head_size = _heads(fields, family, hidden_size, latent)
    dtype = str(fields.get("dtype", fields.get("torch_dtype", "float32"))).removeprefix("torch.")
    if dtype not in ("float32", "bfloat16", "float16"):
        fields.refuse("dtype", dtype, "float32, bfloat16 or float16 is needed")
    layers, max_position = _layers(fields, family)
    moe, moe_layers = _moe(fields, family, len(layers))
    activation_field = "hidden_activation" if family.gemma else "hidden_act"
    activation = fields.get(activation_field, "gelu_pytorch_tanh" if family.gemma else "silu")
    if activation not in tuple(_ACTIVATIONS):
        fields.refuse(activation_field, activation, f"known are {', '.join(_ACTIVATIONS)}")
    bias = family.bias == "field" and fields.flag("attention_bias", False)
    eos = _Fields(generation or {}, where.removesuffix("config.json") + "generation_config.json").token_ids(
        "eos_token_id", vocab_size
    )
    bos = fields.token_ids("bos_token_id", vocab_size)
    return Arch(
        name=name,
        dtype=dtype,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size", 1, 1 << 22),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        max_position=max_position,
        norm_eps=fields.number("rms_norm_eps", 1e-12, 1.0, 1e-6),
        layers=layers,
        moe_layers=moe_layers,
        moe=moe,
        latent=latent,
        tied=fields.flag("tie_word_embeddings", family.gemma),
        activation=_ACTIVATIONS[activation],
        attention_bias=bias or family.bias == "qkv",
        output_bias=bias,
        qk_norm=family.qk_norm,
        attention_scale=_attention_scale(fields, family, head_size, latent),
        logit_soft_cap=fields.number("final_logit_softcapping", 0, 1e6, 0) if family.gemma else 0.0,
        embedding_scale=hidden_size**0.5 if family.gemma else 1.0,
        eos_token_ids=eos or fields.token_ids("eos_token_id", vocab_size),
        bos_token_id=bos[0] if bos else None,
    )


def _architecture(fields: _Fields) -> str:
    """The one architecture that the file names, if it is one of ours."""
    names = fields.get("architectures", [])
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str) or names[0] not in _FAMILIES:
        fields.refuse("architectures", names, f"known are {', '.join(sorted(_FAMILIES))}")
    if "auto_map" in fields.values:
        _LOG.warning("%s: auto_map is ignored: code that comes with a checkpoint is never run", fields.where)
    return str(names[0])


def _refuse_extras(fields: _Fields) -> None:
    """Refuse what changes the computation and is not implemented."""
    quantization = fields.mapping("quantization_config")
    if quantization and not _is_of_the_cache(quantization):
        fields.refuse("quantization_config", quantization.get("quant_method"), "only plain weights are loaded")
    if fields.get("attn_logit_softcapping") is not None:
        fields.refuse("attn_logit_softcapping", fields.get("attn_logit_softcapping"), "only null is implemented")
    for name in ("mlp_bias", "use_bidirectional_attention"):
        fields.only(name, False)
    fields.only("partial_rotary_factor", 1.0)


def _is_of_the_cache(quantization: Mapping[str, Any]) -> bool:
    """Whether it says no more than how K and V were scaled for a float8 cache, as compressed-tensors writes that."""
    scheme = quantization.get("kv_cache_scheme")
    if quantization.get("config_groups") or not isinstance(scheme, Mapping):
        return False
    return scheme.get("type") == "float" and scheme.get("num_bits") == 8 and not scheme.get("dynamic")


def _latent(fields: _Fields) -> Latent:
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


def _attention_scale(fields: _Fields, family: _Family, head_size: int, latent: Latent | None) -> float:
    """What scores are multiplied by. DeepSeek's YaRN adds the square of 0.1 mscale_all_dim ln(factor) + 1."""
    if latent is None:
        return (fields.number("query_pre_attn_scalar", 1e-3, 1e6, 256) if family.gemma else head_size) ** -0.5
    scale = (latent.nope_size + latent.rope_size) ** -0.5
    values = _Fields({**fields.mapping("rope_parameters"), **fields.mapping("rope_scaling")}, fields.where)
    if values.get("rope_type", values.get("type", "default")) == "default":
        return scale
    every = values.number("mscale_all_dim", 0, 1e3, 0.0)
    return scale * _yarn_mscale(values.number("factor", 1e-3, 1e6), every) ** 2


def _heads(fields: _Fields, family: _Family, hidden_size: int, latent: Latent | None) -> tuple[int, int, int]:
    """(num_heads, num_kv_heads, head_size)."""
    num_heads = fields.integer("num_attention_heads", 1, 4096)
    if latent is not None:
        return num_heads, 1, latent.latent_size + latent.rope_size
    num_kv_heads = fields.integer("num_key_value_heads", 1, 4096, num_heads)
    if num_heads % num_kv_heads:
        fields.refuse("num_key_value_heads", num_kv_heads, f"it must divide num_attention_heads={num_heads}")
    if not family.head_size and fields.get("head_dim") is None and hidden_size % num_heads:
        fields.refuse("num_attention_heads", num_heads, f"it must divide hidden_size={hidden_size}")
    head_size = fields.integer("head_dim", 2, 1024, family.head_size or hidden_size // num_heads)
    if head_size % 2:
        fields.refuse("head_dim", head_size, "rotary embedding needs an even number")
    return num_heads, num_kv_heads, head_size


def _layers(fields: _Fields, family: _Family) -> tuple[tuple[LayerKind, ...], int]:
    """(what each layer sees, positions that the rotary embedding covers)."""
    num_layers = fields.integer("num_hidden_layers", 1, 1024)
    trained = max_position = fields.integer("max_position_embeddings", 1, _MAX_POSITION)
    sliding = _sliding(fields, family, num_layers)
    window = fields.integer("sliding_window", 1, 1 << 31, 4096) if any(sliding) else 0
    ropes = {is_sliding: _rope(fields, family, is_sliding, trained) for is_sliding in set(sliding)}
    for rope in ropes.values():
        if rope.kind == "yarn":
            max_position = max(max_position, int(rope.original_max_position * rope.factor))
        elif rope.kind == "linear" and not family.gemma:  # Gemma's config counts the factor in
            max_position = max(max_position, int(trained * rope.factor))
    if max_position > _MAX_POSITION:
        fields.refuse("max_position_embeddings", trained, f"{max_position} when scaled, over {_MAX_POSITION}")
    window = 0 if window >= max_position else window  # a window that never cuts is no window
    kinds = {is_sliding: LayerKind(window=window * is_sliding, rope=rope) for is_sliding, rope in ropes.items()}
    return tuple(kinds[is_sliding] for is_sliding in sliding), max_position


def _sliding(fields: _Fields, family: _Family, num_layers: int) -> list[bool]:
    """Per layer, whether its attention is windowed."""
    windowed = family.sliding != "none" and (not family.window_flag or fields.flag("use_sliding_window", False))
    if "sliding_window" in fields.values and fields.values["sliding_window"] is None:
        windowed = False
    types = fields.get("layer_types")
    if types is not None:
        known = _LAYER_TYPES if windowed else _LAYER_TYPES[:1]
        if not isinstance(types, list) or len(types) != num_layers or any(kind not in known for kind in types):
            fields.refuse("layer_types", types, f"{num_layers} of {', '.join(known)} are needed")
        return [kind == _LAYER_TYPES[1] for kind in types]
    if not windowed:
        return [False] * num_layers
    if family.sliding == "upper":
        first = fields.integer("max_window_layers", 0, 1 << 20, 28)
        return [layer >= first for layer in range(num_layers)]
    if family.sliding == "pattern":
        period = fields.get("sliding_window_pattern", fields.get("_sliding_window_pattern", 6))
        if type(period) is not int or period < 1:
            fields.refuse("sliding_window_pattern", period, "a positive integer is needed")
        return [(layer + 1) % period != 0 for layer in range(num_layers)]
    return [True] * num_layers


def _rope(fields: _Fields, family: _Family, is_sliding: bool, trained: int) -> Rope:
    """The rotary embedding of the full or of the sliding layers, from either of Hugging Face's two forms."""
    given = fields.mapping("rope_parameters")
    nested = any(isinstance(value, Mapping) for value in given.values())
    if family.gemma and given and not nested:
        fields.refuse("rope_parameters", given, "full_attention and sliding_attention are needed, an object each")
    values = dict(_Fields(given, fields.where).mapping(_LAYER_TYPES[is_sliding]) if nested else given)
    local = family.gemma and is_sliding
    if not local:
        values.update(fields.mapping("rope_scaling"))
    if fields.get("original_max_position_embeddings") is not None:
        values["original_max_position_embeddings"] = fields.get("original_max_position_embeddings")
    inner = _Fields(values, fields.where)
    kind = inner.get("rope_type", inner.get("type", "default"))
    if kind not in _ROPE_KINDS:
        fields.refuse("rope_type", kind, f"known are {', '.join(_ROPE_KINDS)}")
    default_theta = fields.get("rope_local_base_freq", 1e4) if local else fields.get("rope_theta", family.theta)
    theta = inner.number("rope_theta", 1.0, 1e15, default_theta)
    inner.only("partial_rotary_factor", 1.0)
    interleaved = family.latent and fields.flag("rope_interleave", True)
    if kind == "default":
        return Rope(theta=theta, kind=kind, interleaved=interleaved)
    original = inner.integer("original_max_position_embeddings", 1, _MAX_POSITION, trained)
    factor = inner.number("factor", 1e-3, 1e6, trained / original if kind == "yarn" else None)
    if kind == "linear":
        return Rope(theta=theta, kind=kind, factor=factor, interleaved=interleaved)
    if kind == "yarn":
        amplitude = _yarn_amplitude(inner, factor, family.latent)
        return Rope(
            theta=theta, kind=kind, factor=factor, original_max_position=original, interleaved=interleaved,
            amplitude=amplitude,
        )  # fmt: skip
    low, high = (inner.number(name, 1e-6, 1e6) for name in ("low_freq_factor", "high_freq_factor"))
    if low >= high:
        fields.refuse("high_freq_factor", high, f"it must be greater than low_freq_factor={low:g}")
    return Rope(
        theta=theta,
        kind=kind,
        factor=factor,
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position=original,
    )


def _yarn_mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _yarn_amplitude(fields: _Fields, factor: float, latent: bool) -> float:
    """What YaRN multiplies cos and sin by: as its paper has it, or the quotient of DeepSeek's two mscales.

    Refuses other ramps than the paper's, from 32 to 1 rotations, and another factor beside it.
    """
    for name, usual in (("beta_fast", 32), ("beta_slow", 1), ("truncate", True)):
        fields.only(name, usual)
    amplitude = _yarn_mscale(factor, 1.0)
    mscale, every = fields.get("mscale"), fields.get("mscale_all_dim")
    if latent and mscale and every:
        own, shared = (fields.number(name, 0, 1e3) for name in ("mscale", "mscale_all_dim"))
        amplitude = _yarn_mscale(factor, own) / _yarn_mscale(factor, shared)
    elif not latent and (mscale not in (None, 1.0) or every):
        fields.refuse("mscale", mscale, "only mscale=1 without mscale_all_dim is implemented")
    given = fields.number("attention_factor", 0, 1e3, amplitude)
    if abs(given - amplitude) > 1e-6:
        fields.refuse("attention_factor", given, f"only {amplitude:.6g} is implemented here")
    return amplitude


def _moe(fields: _Fields, family: _Family, num_layers: int) -> tuple[Moe | None, frozenset[int]]:
    """(expert facts, the layers that have experts)."""
    if family.moe == "none":
        return None, frozenset()
    return _qwen_moe(fields, num_layers) if family.moe == "qwen" else _deepseek_moe(fields, family, num_layers)


def _deepseek_moe(fields: _Fields, family: _Family, num_layers: int) -> tuple[Moe | None, frozenset[int]]:
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


def _qwen_moe(fields: _Fields, num_layers: int) -> tuple[Moe, frozenset[int]]:
    """(expert facts, the layers that have experts)."""
    num_experts = fields.integer("num_experts", 1, 4096, fields.get("num_local_experts"))
    moe = Moe(
        num_experts=num_experts,
        experts_per_token=fields.integer("num_experts_per_tok", 1, num_experts, 8),
        expert_size=fields.integer("moe_intermediate_size", 1, 1 << 22),
        norm_topk_prob=fields.flag("norm_topk_prob", False),
    )
    step = fields.integer("decoder_sparse_step", 1, 1 << 20, 1)
    dense = fields.get("mlp_only_layers", [])
    if not isinstance(dense, list) or any(type(layer) is not int for layer in dense):
        fields.refuse("mlp_only_layers", dense, "a list of layer numbers is needed")
    return moe, frozenset(layer for layer in range(num_layers) if layer not in dense and (layer + 1) % step == 0)
