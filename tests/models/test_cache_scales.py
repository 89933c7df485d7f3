"""Scales of a quantized cache that a checkpoint brings: found under every tool's name, used, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from loading import load_model
from model_rig import Case
from octavo.checkpoint.cache_scales import scale_names
from octavo.checkpoint.config_reader.checkpoint import read_arch
from octavo.layers.attention import Attention
from octavo.layers.latent_attention import LatentAttention

Tensors = dict[str, torch.Tensor]


def load(case: Case, folder: Path, extra: Tensors) -> list[Attention | LatentAttention]:
    """The attention layers of the case's checkpoint with more tensors in it."""
    tensors: Tensors = {}
    for file in case.folder.glob("*.safetensors"):
        tensors.update(load_file(file))
    save_file({**tensors, **extra}, folder / "model.safetensors")
    model = load_model(read_arch(case.folder), folder, torch.float32)
    assert isinstance(model, torch.nn.Module)
    return [layer for layer in model.modules() if isinstance(layer, Attention | LatentAttention)]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("self_attn.k_scale", "self_attn.v_scale"),
        ("self_attn.attn.k_scale", "self_attn.attn.v_scale"),
        ("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale"),
    ],
)
def test_names_of_several_tools(tiny_case: Callable[[str], Case], tmp_path: Path, key: str, value: str) -> None:
    extra: Tensors = {"model.layers.1.self_attn.q_scale": torch.tensor(0.5)}  # read by nobody
    for index in (0, 1):
        extra[f"model.layers.{index}.{key}"] = torch.tensor([0.25], dtype=torch.bfloat16)  # for a layer
        extra[f"model.layers.{index}.{value}"] = torch.tensor([0.5, 0.125])  # for each head
    layers = load(tiny_case("qwen3"), tmp_path, extra)
    assert layers[2].stored_scales is None
    for layer in layers[:2]:
        assert layer.stored_scales is not None
        assert [scale.tolist() for scale in layer.stored_scales] == [[0.25, 0.25], [0.5, 0.125]]


def test_a_latent_layer_has_one_scale(tiny_case: Callable[[str], Case], tmp_path: Path) -> None:
    layers = load(tiny_case("deepseek3"), tmp_path, {"model.layers.0.self_attn.k_scale": torch.tensor(0.25)})
    assert layers[0].stored_scales is not None
    assert [scale.tolist() for scale in layers[0].stored_scales] == [[0.25], [0.25]]


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        (torch.ones(3), torch.ones(2), "k_scale: expected one scale or one for each of 2 KV heads"),
        (torch.zeros(1), torch.ones(1), r"k_scale: scales are positive numbers, found \[0.0\]"),
        (torch.ones(1), torch.tensor([torch.nan]), "v_scale: scales are positive numbers"),
        (torch.ones(1, dtype=torch.int32), torch.ones(1), "k_scale: expected one of F32, F16, BF16, F64, found I32"),
        (torch.ones(1), None, "layer 0 of the checkpoint has a k_scale, but not its v_scale"),
    ],
)
def test_bad_scales_are_refused(
    tiny_case: Callable[[str], Case], tmp_path: Path, key: torch.Tensor, value: torch.Tensor | None, named: str
) -> None:
    extra = {"model.layers.0.self_attn.k_scale": key}
    if value is not None:
        extra["model.layers.0.self_attn.v_scale"] = value
    with pytest.raises(ValueError, match=named):
        load(tiny_case("qwen3"), tmp_path, extra)


def test_other_tensors_are_not_taken_for_scales() -> None:
    names = ["model.layers.0.self_attn.k_proj.weight_scale", "model.layers.x.self_attn.k_scale", "k_scale"]
    names.append(f"model.layers.{'1' * 5000}.self_attn.k_scale")  # whose number Python does not read
    assert scale_names(names) == {}
