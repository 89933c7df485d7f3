"""What checkpoints of families with states may say and hold: layers by name, text halves, experts in one tensor."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hybrid_configs import HYBRIDS
from hybrid_rig import HybridRig
from loading import load_model
from model_rig import SMALL, Case, make_reference
from octavo import LLM, SamplingParams
from octavo.cache.specs import StateSpec
from octavo.checkpoint.arch import Arch
from octavo.checkpoint.config_reader.checkpoint import arch_from_config, read_arch
from octavo.checkpoint.loader import build_model

PLAIN: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


def _read(name: str, **changes: Any) -> Arch:
    return arch_from_config({**PLAIN, "architectures": [name], **changes})


def _mixers(arch: Arch) -> str:
    return "".join(kind.mixer[0] for kind in arch.layers)


def test_layers_are_what_a_file_says_or_leaves_unsaid() -> None:
    assert _mixers(_read("Qwen3_5ForCausalLM")) == "ddda"
    assert _mixers(_read("Qwen3_5ForCausalLM", full_attention_interval=2)) == "dada"
    assert _mixers(_read("Lfm2ForCausalLM", full_attn_idxs=[2])) == "ccac"
    moe = _read("Lfm2MoeForCausalLM", full_attn_idxs=[1], num_dense_layers=3)
    assert _mixers(moe) == "cacc" and moe.moe_layers == {3} and moe.intermediate_size == 96
    assert _mixers(_read("NemotronHForCausalLM", hybrid_override_pattern="M-*E")) == "mnan"
    assert _mixers(_read("JambaForCausalLM", attn_layer_period=2, attn_layer_offset=1)) == "mama"
    assert _mixers(_read("FalconH1ForCausalLM", mamba_n_heads=16)) == "amamamam", "each layer counts as two"
    granite = _read("GraniteMoeHybridForCausalLM", mamba_n_heads=4, layer_types=["mamba", "attention"] * 2)
    assert _mixers(granite) == "mama" and granite.layers[1].rope.kind == "none"


def test_what_a_published_config_of_qwen3_next_says() -> None:
    arch = _read(
        "Qwen3NextForCausalLM", hidden_size=2048, num_attention_heads=16, head_dim=256, num_experts=512,
        num_experts_per_tok=10, moe_intermediate_size=512, shared_expert_intermediate_size=512, norm_topk_prob=True,
        partial_rotary_factor=0.25, rope_theta=1e7, rope_scaling=None, linear_num_value_heads=32, decoder_sparse_step=1,
        mlp_only_layers=[],
    )  # fmt: skip
    assert arch.moe is not None and arch.delta is not None
    assert (arch.moe.num_experts, arch.moe.shared_size, arch.moe.shared_gate) == (512, 512, True)
    assert (arch.layers[3].rope.rotary_size, arch.layers[3].rope.theta) == (64, 1e7)
    assert (arch.delta.num_key_heads, arch.delta.num_value_heads, arch.delta.key_size) == (16, 32, 128)


def test_nemotron_h_knows_two_names_of_a_field() -> None:
    """As transformers: an older `mamba_` name wins where both are there."""
    both = _read("NemotronHForCausalLM", mamba_n_groups=4, n_groups=2, mamba_d_conv=3, mamba_conv_bias=False).mamba
    assert both is not None and (both.num_groups, both.conv_size, both.conv_bias) == (4, 3, False)


def test_lfm2_knows_two_names_of_a_field() -> None:
    """As transformers: `block_ff_dim`, which published files have without the other, wins where both are there."""
    fields = {"full_attn_idxs": [1], "block_auto_adjust_ff_dim": False, "block_ff_dim": 80}
    alone = {name: value for name, value in PLAIN.items() if name != "intermediate_size"}
    found = arch_from_config({**alone, "architectures": ["Lfm2ForCausalLM"], **fields})
    assert found.intermediate_size == _read("Lfm2ForCausalLM", **fields).intermediate_size == 80
    with pytest.raises(ValueError, match="unsupported intermediate_size=null"):
        arch_from_config({**alone, "architectures": ["Lfm2ForCausalLM"]})


@pytest.mark.parametrize("family", ["jamba", "nemotron-h", "granite4"])
def test_heads_that_do_not_turn_have_any_size(family: str, tmp_path: Path) -> None:
    """Logits of the whole prompt, and of its last tokens one by one."""
    size: dict[str, Any] = {"head_dim": 15} if family == "nemotron-h" else {"hidden_size": 60}
    if family == "granite4":
        size["mamba_d_head"] = 15
    reference = make_reference(family, num_attention_heads=4, num_key_value_heads=2, **size)
    reference.save_pretrained(tmp_path)
    arch = read_arch(tmp_path)
    assert arch.head_size == 15 and {kind.rope.kind for kind in arch.layers} == {"none"}
    tokens = [(7 * place) % arch.vocab_size for place in range(40)]
    with torch.no_grad():
        expected = reference(torch.tensor([tokens])).logits[0]
    found = HybridRig(load_model(arch, tmp_path, torch.float32)).run(tokens, [36, 1, 1, 1, 1])
    assert torch.allclose(found, expected, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (
            "GraniteMoeHybridForCausalLM",
            {"head_dim": 15, "position_embedding_type": "rope", "mamba_n_heads": 4},
            r"head_dim=15 \(rotary embedding needs an even number",
        ),
        ("Qwen3_5ForCausalLM", {"layer_types": ["conv"] * 3}, "unsupported layer_types="),
        ("Qwen3_5ForCausalLM", {"linear_num_value_heads": 33}, r"linear_num_value_heads=33 \(linear_num_key_heads=16"),
        (
            "Qwen3NextForCausalLM",
            {"layer_types": ["linear_attention"] * 3 + ["conv"]},
            "layer_types=.*4 of full_attention",
        ),
        ("Lfm2ForCausalLM", {"layer_types": ["conv"] * 3 + ["linear_attention"]}, "layer_types="),
        ("Lfm2ForCausalLM", {"layer_types": ["conv"] * 3 + [["conv"]]}, "layer_types="),
        ("Lfm2MoeForCausalLM", {}, "unsupported layer_types=null .4 of full_attention, attention, conv are needed"),
        ("Lfm2MoeForCausalLM", {"layer_types": ["conv"] * 4, "num_experts_per_tok": 33}, "num_experts_per_tok=33 "),
        ("GraniteMoeHybridForCausalLM", {"layer_types": ["mamba"] * 3 + ["mlp"]}, "layer_types="),
        (
            "NemotronHForCausalLM",
            {"layers_block_type": ["mamba", "conv"]},
            r'layers_block_type=\["mamba", "conv"\] .each of',
        ),
        ("NemotronHForCausalLM", {"layer_types": ["mamba", "X"]}, r'layer_types=\["mamba", "X"\] .each of full_att'),
        ("NemotronHForCausalLM", {"layers_block_type": []}, r"layers_block_type=\[\] "),
        ("Lfm2ForCausalLM", {"full_attn_idxs": 2}, "full_attn_idxs=2 .a list of layer numbers"),
        (
            "Lfm2ForCausalLM",
            {"full_attn_idxs": [1, 4]},
            r"full_attn_idxs=\[1, 4\] .a list of layer numbers from 0 to 3 ",
        ),
        (
            "BambaForCausalLM",
            {"attn_layer_indices": [99]},
            r"attn_layer_indices=\[99\] .a list of layer numbers from 0 to",
        ),
        ("BambaForCausalLM", {"attn_layer_indices": [-1]}, r"attn_layer_indices=\[-1\] "),
        ("BambaForCausalLM", {"attn_layer_indices": [True]}, r"attn_layer_indices=\[true\] "),
        (
            "Qwen3NextForCausalLM",
            {"mlp_only_layers": [4]},
            r"mlp_only_layers=\[4\] .a list of layer numbers from 0 to 3 ",
        ),
        (
            "NemotronHForCausalLM",
            {"hybrid_override_pattern": "ME*X-"},
            r'hybrid_override_pattern="ME\*X-" .layer 3 is X: the letters are M \(Mamba-2\), E \(experts\), '
            r"\* \(attention\), - \(MLP\)",
        ),
        ("NemotronHForCausalLM", {"hybrid_override_pattern": ""}, 'hybrid_override_pattern="" '),
        ("NemotronHForCausalLM", {"hybrid_override_pattern": 7}, "hybrid_override_pattern=7 "),
        ("NemotronHForCausalLM", {"mamba_num_heads": 9, "n_groups": 4}, "n_groups=4 .it must divide mamba_num_heads=9"),
        ("NemotronHForCausalLM", {"n_groups": 0}, r" n_groups=0 \(an integer from 1 to 128 is needed"),
        ("NemotronHForCausalLM", {"mamba_n_groups": 0}, " mamba_n_groups=0 "),
        ("NemotronHForCausalLM", {"ssm_state_size": 0}, " ssm_state_size=0 "),
        ("NemotronHForCausalLM", {"conv_kernel": 99}, " conv_kernel=99 "),
        ("NemotronHForCausalLM", {"use_conv_bias": 3}, " use_conv_bias=3 "),
        (
            "BambaForCausalLM",
            {"mamba_n_heads": 8, "mamba_d_head": 13},
            "mamba_d_head=13 .mamba_n_heads=8 of 128 channels",
        ),
        ("NemotronHForCausalLM", {"mlp_hidden_act": "silu"}, 'mlp_hidden_act="silu" .only "relu2" is implemented'),
        ("GraniteMoeHybridForCausalLM", {"position_embedding_type": "alibi"}, "only rope and nope are known"),
        (
            "GraniteMoeHybridForCausalLM",
            {"num_local_experts": 0, "shared_intermediate_size": 0},
            r"shared_intermediate_size=0 .layers without experts \(num_local_experts=0\) need an MLP",
        ),
        ("GraniteMoeHybridForCausalLM", {"mamba_n_heads": 4, "time_step_limit": [2, 1]}, r"time_step_limit=\[2, 1\]"),
        ("BambaForCausalLM", {"mamba_n_heads": 7}, "mamba_n_heads=7 .heads of 128 channels in 1 groups must be equal"),
        ("JambaForCausalLM", {"attn_layer_offset": 9}, "attn_layer_offset=9"),
        ("Mamba2ForCausalLM", {}, r"head_dim=64 .num_heads=128 of 128 channels need 1\)"),
        ("Mamba2ForCausalLM", {"num_heads": 2, "n_groups": 3}, r"n_groups=3 .an integer from 1 to 2"),
        ("Mamba2ForCausalLM", {"num_heads": 2, "hidden_act": "relu"}, 'hidden_act="relu" .a state'),
    ],
)
def test_what_is_not_understood_is_refused_in_one_line(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as refusal:
        _read(name, **changes)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("family", {name: family for family, (name, _) in HYBRIDS.items()}.values())
def test_so_many_drafts_as_the_page_of_speculation_says(family: str) -> None:
    """Two steps' drafts are fewer than a chunk: `worker.model.check_drafts`."""
    page = (Path(__file__).parents[2] / "docs/speculation.md").read_text(encoding="utf-8")
    (few,) = re.findall(r"So (.*), whose chunks have 16 tokens", page)
    name, own = HYBRIDS[family]
    config = {key: value for key, value in {**SMALL, **own}.items() if value is not None}
    model = build_model(arch_from_config({**config, "architectures": [f"{name}ForCausalLM"]}), torch.float32)
    (chunk,) = {spec.chunk for spec in model.layer_specs if isinstance(spec, StateSpec)}
    names = [each.lower().replace("-", "") for each in re.split(", | and ", few)]
    assert chunk == (16 if name.lower() in names else 64)


def test_experts_of_lfm2_moe_in_one_tensor(tiny_case: Callable[[str], Case], tmp_path: Path) -> None:
    """As transformers holds them in memory."""
    case = tiny_case("lfm2-moe")
    save_file(
        {name: each.clone() for name, each in case.reference.state_dict().items() if name != "lm_head.weight"},
        tmp_path / "model.safetensors",
    )
    (tmp_path / "config.json").write_text((case.folder / "config.json").read_text())
    model = load_model(read_arch(tmp_path), tmp_path, torch.float32)
    prompt = list(range(30, 60))
    assert torch.equal(HybridRig(model).run(prompt, [30]), HybridRig(case.model).run(prompt, [30]))


def test_the_text_half_of_a_larger_checkpoint(tiny_case: Callable[[str], Case], tmp_path: Path) -> None:
    """Under names of its own, a layer's experts in one tensor; what is of images and further tokens is left alone."""
    case = tiny_case("qwen3.5-moe")
    weights: dict[str, torch.Tensor] = {}
    for file in case.folder.glob("*.safetensors"):
        weights |= load_file(file)
    held = {name.replace("model.", "model.language_model.", 1): each for name, each in weights.items()}
    for layer in range(4):
        experts = f"model.language_model.layers.{layer}.mlp.experts"
        parts = [
            torch.stack([held.pop(f"{experts}.{expert}.{name}_proj.weight") for expert in range(8)])
            for name in ("gate", "up", "down")
        ]
        held[f"{experts}.gate_up_proj"], held[f"{experts}.down_proj"] = torch.cat(parts[:2], 1), parts[2]
    held |= {name: torch.ones(3) for name in ("model.visual.patch.weight", "mtp.layers.0.norm.weight")}
    save_file(held, tmp_path / "model.safetensors")
    text = json.loads((case.folder / "config.json").read_text())
    config = {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = load_model(read_arch(tmp_path), tmp_path, torch.float32)
    prompt = list(range(30, 90))
    assert torch.equal(HybridRig(model).run(prompt, [60]), HybridRig(case.model).run(prompt, [60]))
    del held["model.language_model.layers.2.mlp.experts.down_proj"]
    save_file(held, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"model.layers.2.mlp.experts.0.down_proj.weight: expected"):
        load_model(read_arch(tmp_path), tmp_path, torch.float32)


def test_a_model_that_never_attends_tells_its_plan_and_answers(tmp_path: Path) -> None:
    """Mamba-2's config names no greatest length: a request has 8,192 tokens unless more are asked for."""
    make_reference("mamba2").save_pretrained(tmp_path)
    with LLM(str(tmp_path), dtype="float32", skip_tokenizer_init=True, max_num_seqs=2) as llm:
        assert "max_model_len=8192" in llm.engine.memory.table()
        assert "; of blocks of 16 tokens, no layer attends." in llm.engine.memory.table()
        params = SamplingParams(max_tokens=3, temperature=0.0, detokenize=False)
        (output,) = llm.generate([{"prompt_token_ids": [3, 5, 7] * 40}], params, use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 3
    with pytest.raises(ValueError, match="2000000"):
        LLM(str(tmp_path), dtype="float32", skip_tokenizer_init=True, max_model_len=2_000_000)
