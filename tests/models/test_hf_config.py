"""config.json to Arch: both generations of field names, defaults, and one-line refusals."""

from __future__ import annotations

import json
import logging
import math
import os
from pathlib import Path
from typing import Any

import pytest

from octavo.checkpoint.arch import Arch, LayerKind, Moe, Rope
from octavo.checkpoint.config_reader.checkpoint import arch_from_config, read_arch
from octavo.models import ARCHITECTURES

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
    "eos_token_id": [2, 3],
}
GEMMA = {**LLAMA, "architectures": ["Gemma3ForCausalLM"], "sliding_window": 512}


def arch(base: dict[str, Any] = LLAMA, **changes: Any) -> Arch:
    return arch_from_config({**base, **changes})


def family(name: str, **changes: Any) -> Arch:
    return arch(architectures=[name], **changes)


def test_llama() -> None:
    found = arch()
    assert (found.head_size, found.num_layers, found.dtype, found.tied) == (8, 4, "bfloat16", False)
    assert found.eos_token_ids == (2, 3)
    assert found.attention_scale == 8**-0.5
    assert found.layers[0].rope == Rope(theta=10000.0)


def test_every_known_architecture_has_a_model() -> None:
    for name in ARCHITECTURES:
        more = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32} if "Moe" in name else {}
        more |= {"layer_types": ["conv"] * 4} if "Lfm2Moe" in name else {}
        more |= {"head_dim": 16, "num_heads": 8} if name == "Mamba2ForCausalLM" else {}
        assert ARCHITECTURES.resolve(name) is not None
        assert family(name, **more).name == name


@pytest.mark.parametrize("field", ["dtype", "torch_dtype"])
def test_dtype_names_of_both_generations(field: str) -> None:
    config = {name: value for name, value in LLAMA.items() if name != "torch_dtype"}
    assert arch(config, **{field: "float16"}).dtype == "float16"
    assert arch(config).dtype == "float32"


def test_rope_forms_of_both_generations_mean_the_same() -> None:
    scaling = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    }
    old = arch(rope_theta=5e5, rope_scaling={"type": "llama3", **scaling})
    new = arch(rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **scaling})
    assert old == new
    assert new.layers[0].rope == Rope(
        theta=5e5,
        kind="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position=512,
    )


def test_scaled_ropes_cover_more_positions() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
    assert arch(rope_scaling=yarn).max_position == 16384
    assert arch(rope_scaling={"type": "linear", "factor": 2.0}).max_position == 8192


def test_other_yarns() -> None:
    scaling = {"type": "yarn", "factor": 4.0, "beta_fast": 16, "beta_slow": None, "truncate": False}
    found = arch(rope_scaling={**scaling, "attention_factor": 1.2, "mscale": 0.7}).layers[0].rope
    assert (found.beta_fast, found.beta_slow, found.truncate, found.amplitude) == (16.0, 1.0, False, 1.2)
    both = arch(rope_scaling={**scaling, "mscale": 0.7, "mscale_all_dim": 0.5}).layers[0].rope
    assert both.amplitude == pytest.approx((0.07 * math.log(4) + 1) / (0.05 * math.log(4) + 1))


def test_dynamic_rope_serves_what_was_trained_unless_more_is_asked_for() -> None:
    found = arch(rope_scaling={"type": "dynamic", "factor": 2.0})
    assert (found.default_length, found.max_position) == (4096, 8192)
    assert found.layers[0].rope == Rope(kind="dynamic", factor=2.0, original_max_position=4096)


def test_longrope_in_both_forms() -> None:
    """Phi-3 writes the length that was trained for beside rope_scaling, and no factor."""
    scaling = {"short_factor": [1.0, 1, 1.5, 2], "long_factor": [1, 2, 4, 8]}
    old = arch(rope_scaling={"type": "su", **scaling}, original_max_position_embeddings=1024)
    new = arch(rope_parameters={"rope_type": "longrope", **scaling, "original_max_position_embeddings": 1024})
    assert old == new and (new.max_position, new.default_length) == (4096, 0)
    rope = new.layers[0].rope
    assert (rope.short_factors, rope.long_factors) == ((1.0, 1.0, 1.5, 2.0), (1.0, 2.0, 4.0, 8.0))
    assert rope.amplitude == pytest.approx(math.sqrt(1 + math.log(4) / math.log(1024)))


@pytest.mark.parametrize("place", ["partial_rotary_factor", "rope_parameters"])
def test_heads_that_turn_in_part(place: str) -> None:
    partly = 0.5 if place == "partial_rotary_factor" else {"partial_rotary_factor": 0.5, "rope_type": "default"}
    assert arch(**{place: partly}).layers[0].rope == Rope(rotary_size=4)
    assert arch(partial_rotary_factor=1.0).layers[0].rope == Rope()


def test_mistral_windows_every_layer() -> None:
    assert {kind.window for kind in family("MistralForCausalLM", sliding_window=128).layers} == {128}
    assert {kind.window for kind in family("MistralForCausalLM", sliding_window=None).layers} == {0}


def test_a_window_that_never_cuts_is_no_window() -> None:
    assert {kind.window for kind in family("MistralForCausalLM", sliding_window=4096).layers} == {0}


def test_qwen_windows_the_upper_layers_only_if_asked() -> None:
    given = {"sliding_window": 128, "max_window_layers": 3}
    assert [kind.window for kind in family("Qwen2ForCausalLM", **given).layers] == [0] * 4
    asked = family("Qwen2ForCausalLM", use_sliding_window=True, **given)
    assert [kind.window for kind in asked.layers] == [0, 0, 0, 128]
    assert asked.attention_bias
    assert not asked.output_bias


def test_gemma3_alternates_and_has_two_rotary_bases() -> None:
    found = arch(GEMMA, num_hidden_layers=7, query_pre_attn_scalar=64, rope_scaling={"type": "linear", "factor": 8.0})
    assert [kind.window for kind in found.layers] == [512] * 5 + [0, 512]
    assert found.layers[0].rope == Rope(theta=1e4)
    assert found.layers[5].rope == Rope(theta=1e6, kind="linear", factor=8.0)
    assert (found.attention_scale, found.embedding_scale, found.activation) == (0.125, 8.0, "gelu_tanh")
    assert (found.tied, found.qk_norm, found.head_size, found.max_position) == (True, True, 256, 4096)


def test_gemma3_in_a_vision_config() -> None:
    text = {name: value for name, value in GEMMA.items() if name != "architectures"}
    whole = {"architectures": ["Gemma3ForConditionalGeneration"], "vision_config": {}, "text_config": text}
    found, plain = arch_from_config(whole), arch(GEMMA)
    assert found.layers == plain.layers
    assert found.name == "Gemma3ForConditionalGeneration"


def test_layer_types_decide_where_they_are_given() -> None:
    types = ["full_attention", "sliding_attention"] * 2
    assert [kind.window for kind in arch(GEMMA, layer_types=types).layers] == [0, 512, 0, 512]


def test_moe_layers() -> None:
    found = family(
        "Qwen3MoeForCausalLM",
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        mlp_only_layers=[3],
        decoder_sparse_step=2,
    )
    assert found.moe_layers == {1}
    assert found.moe is not None
    assert not found.moe.norm_topk_prob


def test_auto_map_is_ignored_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        arch(auto_map={"AutoModel": "evil--modeling.Evil"})
    assert "auto_map is ignored" in caplog.text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 0}, "vocab_size=0 "),
        ({"vocab_size": -1}, "vocab_size=-1 "),
        ({"vocab_size": 10**12}, "vocab_size=1000000000000 "),
        ({"vocab_size": "1000"}, 'vocab_size="1000" '),
        ({"vocab_size": True}, "vocab_size=true "),
        ({"vocab_size": None}, "vocab_size=null "),
        ({"num_attention_heads": 7}, "num_key_value_heads=2 (it must divide num_attention_heads=7)"),
        ({"num_attention_heads": 6}, "num_attention_heads=6 (it must divide hidden_size=64)"),
        ({"head_dim": 7}, "head_dim=7 "),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers=1000000 "),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0 "),
        ({"max_position_embeddings": 10**9}, "max_position_embeddings=1000000000 "),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps=NaN "),
        ({"torch_dtype": "float8_e4m3fn"}, 'dtype="float8_e4m3fn" '),
        ({"architectures": ["EvilForCausalLM"]}, 'architectures=["EvilForCausalLM"] (known are Bamba'),
        ({"architectures": ["os:system"]}, 'architectures=["os:system"] (it names code: '),
        ({"architectures": None}, "architectures=[] (known are "),
        (
            {"quantization_config": {"quant_method": "x", "kv_cache_scheme": {"type": "int", "num_bits": 8}}},
            'quantization_config="x" ',
        ),
        ({"quantization_config": {"quant_method": "gptq"}}, 'quantization_config="gptq" '),
        (
            {"rope_scaling": {"rope_type": "ntk", "factor": 2.0}},
            'rope_type="ntk" (known are default, linear',
        ),
        ({"rope_scaling": {"rope_type": ["x"]}}, 'rope_type=["x"] '),
        ({"rope_scaling": "linear"}, 'rope_scaling="linear" '),
        ({"rope_scaling": {"type": "linear"}}, "factor=null "),
        ({"rope_scaling": {"type": "dynamic"}}, "factor=null "),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "beta_fast": 1}}, "beta_fast=1.0 (it must be greater than"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "beta_slow": "x"}}, 'beta_slow="x" '),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "truncate": 1}}, "truncate=1 "),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "attention_factor": 0}}, "attention_factor=0 "),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 4}}, "long_factor=null (4 numbers from"),
        ({"rope_scaling": {"type": "su", "short_factor": [1.0] * 3}}, "short_factor=[1.0, 1.0, 1.0] (4 numbers from"),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1.0, 0, 1, 1]}}, "short_factor=[1.0, 0, 1, 1] "),
        ({"partial_rotary_factor": 0.4}, "partial_rotary_factor=0.4 (of a head's channels an even number"),
        ({"partial_rotary_factor": 2}, "partial_rotary_factor=2 "),
        ({"architectures": ["DeepseekV3ForCausalLM"], "partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 "),
        ({"architectures": ["MistralForCausalLM"], "mlp_bias": True}, "mlp_bias=true "),
        ({"rope_theta": -1}, "rope_theta=-1 "),
        ({"mlp_bias": "yes"}, 'mlp_bias="yes" '),
        ({"hidden_act": "relu"}, 'hidden_act="relu" '),
        ({"hidden_act": ["silu"]}, 'hidden_act=["silu"] '),
        ({"layer_types": ["full_attention"] * 3}, "layer_types="),
        ({"layer_types": ["mamba"] * 4}, "layer_types="),
        ({"eos_token_id": []}, "eos_token_id=[] "),
        ({"eos_token_id": 1000}, "eos_token_id=1000 "),
        ({"tie_word_embeddings": "yes"}, 'tie_word_embeddings="yes" '),
    ],
)
def test_refusals_are_one_line_with_field_and_value(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=r"^config\.json: unsupported ") as error:
        arch(**changes)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def write(folder: Path, **files: Any) -> None:
    for name, value in files.items():
        (folder / f"{name}.json").write_text(value if isinstance(value, str) else json.dumps(value))


def test_generation_config_has_the_last_word_on_eos(tmp_path: Path) -> None:
    write(tmp_path, config=LLAMA)
    assert read_arch(tmp_path).eos_token_ids == (2, 3)
    write(tmp_path, generation_config={"eos_token_id": 5})
    assert read_arch(tmp_path).eos_token_ids == (5,)


@pytest.mark.parametrize("eos", [[], [1000], "2", 2.0, -1, float("nan")])
def test_bad_ends_of_text_are_refused(tmp_path: Path, eos: Any) -> None:
    write(tmp_path, config=LLAMA, generation_config={"eos_token_id": eos})
    with pytest.raises(ValueError, match=r"/generation_config.json: unsupported eos_token_id="):
        read_arch(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not valid JSON"),
        ("[]", "not a JSON object"),
        ("[" * 100000, "not valid JSON"),
        ("1" * 5000, "not valid"),
    ],
)
def test_broken_config_files_are_refused(tmp_path: Path, content: str, message: str) -> None:
    write(tmp_path, config=content)
    with pytest.raises(ValueError, match=message):
        read_arch(tmp_path)


def test_missing_and_special_config_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such file"):
        read_arch(tmp_path)
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(ValueError, match="regular file"):
        read_arch(tmp_path)


def test_olmo3_stretches_the_layers_that_see_everything() -> None:
    """As OLMo 3 7B's file says it: one theta, YaRN beside it, and which layers slide."""
    yarn = {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 8192,
        "attention_factor": 1.2,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
    }
    found = family(
        "Olmo3ForCausalLM", rope_theta=5e5, rope_scaling=yarn, max_position_embeddings=65536, sliding_window=4096
    )
    assert [layer.window for layer in found.layers] == [4096, 4096, 4096, 0]
    assert found.layers[0].rope == Rope(theta=5e5)
    assert (found.layers[3].rope.kind, found.layers[3].rope.amplitude, found.max_position) == ("yarn", 1.2, 65536)
    assert not found.qk_norm, "its norms are not those of single heads"
    with pytest.raises(ValueError, match="full_attention and sliding_attention are needed"):
        family("Olmo3ForCausalLM", rope_parameters={"rope_type": "default", "rope_theta": 1e4})


def test_phi4_mini() -> None:
    rope = {"type": "longrope", "short_factor": [1.0] * 3, "long_factor": [2.0] * 3}
    facts = {
        "partial_rotary_factor": 0.75,
        "rope_scaling": rope,
        "original_max_position_embeddings": 4096,
        "max_position_embeddings": 131072,
        "sliding_window": 262144,
    }
    found = family("Phi3ForCausalLM", **facts)
    assert (found.layers[0].window, found.max_position, found.attention_bias) == (0, 131072, False)
    turned = found.layers[0].rope
    assert (turned.rotary_size, turned.factor, turned.original_max_position) == (6, 32.0, 4096)
    old = family("Phi3ForCausalLM", **{**facts, "rope_scaling": {**rope, "type": "yarn"}})
    assert old == found, "Phi-3's first files say yarn and mean longrope"


def test_phi3_sees_a_window_where_its_file_says_so() -> None:
    assert family("Phi3ForCausalLM", sliding_window=2047).layers[0].window == 2047
    assert family("Phi3ForCausalLM").layers[0].window == 0
    assert family("Phi3ForCausalLM", sliding_window=None).layers[0].window == 0


@pytest.mark.parametrize("name", ["GlmForCausalLM", "Glm4ForCausalLM"])
def test_glm4_turns_half_of_each_head_in_pairs(name: str) -> None:
    found = family(name, head_dim=128)
    assert found.layers[0].rope == Rope(rotary_size=64, interleaved=True)
    assert (found.attention_bias, found.output_bias) == (True, False)
    assert not family(name, attention_bias=False).attention_bias
    assert family(name, partial_rotary_factor=1.0).layers[0].rope.rotary_size == 0


def test_granite_multiplies() -> None:
    """As Granite 3.1 2B's file says it."""
    found = family(
        "GraniteForCausalLM",
        attention_bias=False,
        attention_multiplier=0.015625,
        embedding_multiplier=12.0,
        logits_scaling=8.0,
        mlp_bias=False,
        residual_multiplier=0.22,
        rope_scaling=None,
        rope_theta=5e6,
        tie_word_embeddings=True,
    )
    assert (found.attention_scale, found.logit_divisor) == (0.015625, 8.0)
    assert (found.embedding_scale, found.norm_eps) == pytest.approx((12 / 0.22, 1e-5 / 0.22**2))
    plain = family("GraniteForCausalLM")
    assert {plain.attention_scale, plain.embedding_scale, plain.logit_divisor} == {1.0} and plain.norm_eps == 1e-5
    others = arch(logits_scaling=8.0, embedding_multiplier=2.0, residual_multiplier=0.5)
    assert others == arch()
    for name in ("attention_multiplier", "embedding_multiplier", "logits_scaling", "residual_multiplier"):
        with pytest.raises(ValueError, match=rf"unsupported {name}=0 "):
            family("GraniteForCausalLM", **{name: 0})


def test_smollm3_turns_three_layers_of_four() -> None:
    """As SmolLM3 3B's file says it, and as files that leave it unsaid."""
    said = {
        "layer_types": ["full_attention"] * 4,
        "no_rope_layer_interval": 4,
        "no_rope_layers": [1, 1, 1, 0],
        "rope_scaling": None,
        "rope_theta": 5e6,
        "sliding_window": None,
        "use_sliding_window": False,
    }
    found = family("SmolLM3ForCausalLM", **said)
    assert [layer.rope for layer in found.layers] == [Rope(theta=5e6)] * 3 + [Rope(kind="none")]
    assert {layer.window for layer in found.layers} == {0} and found.tied
    plain = family("SmolLM3ForCausalLM", rope_scaling={"rope_type": "linear", "factor": 2.0})
    assert plain.layers[0].rope == Rope(theta=2e6, kind="linear", factor=2.0)
    assert (plain.layers[3].rope, plain.max_position) == (Rope(kind="none"), 8192)


def test_smollm3_windows_what_does_not_turn() -> None:
    given = {"no_rope_layers": [0, 1, 1, 0, 1], "sliding_window": 128}
    assert {layer.window for layer in family("SmolLM3ForCausalLM", **given).layers} == {0}
    asked = family("SmolLM3ForCausalLM", use_sliding_window=True, **given)
    assert [layer.window for layer in asked.layers] == [128, 0, 0, 128]
    assert {layer.window for layer in family("SmolLM3ForCausalLM", use_sliding_window=True).layers} == {0}
    for wrong in ([1, 1, 0], [1, 1, 1, 2], [True] * 4, 4):
        with pytest.raises(ValueError, match="unsupported no_rope_layers="):
            family("SmolLM3ForCausalLM", no_rope_layers=wrong)


def test_seed_oss_has_two_fields_of_biases() -> None:
    """As Seed-OSS 36B's file says it, and as files that leave it unsaid."""
    said = {"attention_bias": True, "attention_out_bias": False, "head_dim": 128, "mlp_bias": False, "rope_theta": 1e7}
    found = family("SeedOssForCausalLM", rope_scaling={"rope_type": "default"}, **said)
    assert (found.attention_bias, found.output_bias, found.mlp_bias, found.head_size) == (True, False, False, 128)
    assert found.layers[0].rope == Rope(theta=1e7)
    assert family("SeedOssForCausalLM", rope_theta=1e7) == found
    other = family("SeedOssForCausalLM", attention_bias=False, attention_out_bias=True)
    assert (other.attention_bias, other.output_bias) == (False, True)
    with pytest.raises(ValueError, match='unsupported attention_out_bias="yes"'):
        family("SeedOssForCausalLM", attention_out_bias="yes")


def test_exaone4_turns_what_has_a_window() -> None:
    """As EXAONE 4.0 32B's file says it, and 1.2B's, all of whose layers see everything and turn."""
    llama3 = {"rope_type": "llama3", "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    types = ["sliding_attention"] * 3 + ["full_attention"]
    scaling = {"rope_theta": 1e6, "rope_scaling": {**llama3, "original_max_position_embeddings": 512}}
    large = family(
        "Exaone4ForCausalLM", layer_types=types, sliding_window=1024, sliding_window_pattern="LLLG", **scaling
    )
    assert [layer.window for layer in large.layers] == [1024, 1024, 1024, 0]
    assert [layer.rope.kind for layer in large.layers] == ["llama3"] * 3 + ["none"] and large.qk_norm
    assert family("Exaone4ForCausalLM", sliding_window=1024, **scaling).layers == large.layers
    longer = family("Exaone4ForCausalLM", sliding_window=8192, **scaling)
    assert [(layer.window, layer.rope.kind) for layer in longer.layers] == [(0, "llama3")] * 3 + [(0, "none")]
    full = {"layer_types": ["full_attention"] * 4, "sliding_window_pattern": None}
    small = family("Exaone4ForCausalLM", sliding_window=None, **full, **scaling)
    assert {(layer.window, layer.rope.kind) for layer in small.layers} == {(0, "llama3")}
    with pytest.raises(ValueError, match="unsupported sliding_window=null"):
        family("Exaone4ForCausalLM", sliding_window=None)


def test_olmo2_sees_all() -> None:
    """As OLMo 2 7B's file says it."""
    said = {"rope_theta": 5e5, "rms_norm_eps": 1e-6, "attention_bias": False, "num_key_value_heads": 8}
    found = family("Olmo2ForCausalLM", rope_scaling=None, **said)
    assert found.layers == (LayerKind(rope=Rope(theta=5e5)),) * 4 and found.norm_eps == 1e-6
    with pytest.raises(ValueError, match="unsupported mlp_bias=true"):
        family("Olmo2ForCausalLM", mlp_bias=True)


def test_command_r_multiplies_its_logits() -> None:
    """As the files of Command R and of Command R7B say it, whose layers turn where they have a window."""
    said = {"logit_scale": 0.0625, "layer_norm_eps": 1e-5, "rope_theta": 8e6, "use_qk_norm": False}
    found = family("CohereForCausalLM", **said)
    assert (found.logit_divisor, found.norm_eps, found.tied) == (16.0, 1e-5, True)
    assert {layer.rope for layer in found.layers} == {Rope(theta=8e6, interleaved=True)}
    with pytest.raises(ValueError, match="unsupported use_qk_norm=true"):
        family("CohereForCausalLM", use_qk_norm=True)
    said = {"logit_scale": 0.25, "rope_theta": 5e4, "sliding_window": 64, "rotary_pct": 1.0}
    second = family("Cohere2ForCausalLM", sliding_window_pattern=4, position_embedding_type="rope_gptj", **said)
    assert [(layer.window, layer.rope.kind) for layer in second.layers] == [(64, "default")] * 3 + [(0, "none")]
    assert (second.layers[0].rope, second.logit_divisor) == (Rope(theta=5e4, interleaved=True), 4.0)
    types = ["sliding_attention"] * 3 + ["full_attention"]
    assert family("Cohere2ForCausalLM", layer_types=types, **said) == second
    full = family("Cohere2ForCausalLM", layer_types=["full_attention"] * 4, **said)
    assert {layer.rope.kind for layer in full.layers} == {"none"}
    with pytest.raises(ValueError, match="unsupported sliding_window=null"):
        family("Cohere2ForCausalLM", layer_types=["full_attention"] * 4, **{**said, "sliding_window": None})


def test_mixtral_has_experts_in_each_layer() -> None:
    """As Mixtral 8x7B's file says it, and as one that leaves it unsaid."""
    said = {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None, "rope_theta": 1e6}
    found = family("MixtralForCausalLM", **said)
    assert found == family("MixtralForCausalLM") and found.moe_layers == {0, 1, 2, 3}
    assert found.moe == Moe(num_experts=8, experts_per_token=2, expert_size=96)
    assert {layer.window for layer in family("MixtralForCausalLM", sliding_window=128).layers} == {128}
    with pytest.raises(ValueError, match="unsupported num_experts_per_tok=9"):
        family("MixtralForCausalLM", num_experts_per_tok=9)


@pytest.mark.parametrize("nested", [False, True], ids=["plain", "text_config"])
def test_an_override_of_a_rotation_keeps_the_rest_of_it(tmp_path: Path, nested: bool) -> None:
    """A file's rope_scaling replaces its rope_parameters, as with transformers; a user's says a part of them."""
    own = {"rope_parameters": {"rope_type": "default", "rope_theta": 7e5}, "num_hidden_layers": 4}
    config = {**LLAMA, "text_config": own} if nested else {**LLAMA, **own}
    (tmp_path / "config.json").write_text(json.dumps(config))
    linear = {"rope_type": "linear", "factor": 4.0}
    scaled = read_arch(tmp_path, overrides={"rope_scaling": linear}).layers[0].rope
    assert (scaled.kind, scaled.factor, scaled.theta) == ("linear", 4.0, 7e5)
    assert read_arch(tmp_path, overrides={"rope_theta": 3e5}).layers[0].rope.theta == 3e5
    assert arch(**own, rope_scaling=linear).layers[0].rope == Rope(kind="linear", factor=4.0)
