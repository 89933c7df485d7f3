"""New weights for every family: a session's model and one that loads the file hold the same bytes."""

from __future__ import annotations

import dataclasses
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "gpu"))

from families import ARCHITECTURES, write_model
from loading import load_model
from octavo.checkpoint.config_reader.checkpoint import read_arch
from octavo.rl.in_place import InPlace
from octavo.rl.plan import Staged, WeightPlan

CPU = torch.device("cpu")


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """All that a model's layers compute with, by name."""
    found: dict[str, Tensor] = {}

    def take(name: str, value: object) -> None:
        if isinstance(value, Tensor):
            found[name] = value
        elif isinstance(value, tuple | list):
            for index, part in enumerate(value):
                take(f"{name}[{index}]", part)
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            for field in dataclasses.fields(value):
                if field.name != "_keep":  # what owns the memory, in which others lie too
                    take(f"{name}.{field.name}", getattr(value, field.name))

    for path, layer in model.named_modules():
        for name, value in vars(layer).items():
            if not isinstance(value, nn.Module):
                take(f"{path}.{name}", value)
    return found


def _gated_name(name: str) -> str:
    """LFM2's names of an expert's projections, as others call them."""
    path, _, rest = name.rpartition(".experts.")
    for own, usual in (("w1", "gate_proj"), ("w3", "up_proj"), ("w2", "down_proj")):
        rest = rest.replace(f".{own}.", f".{usual}.")
    return f"{path}.experts.{rest}" if path else name


def _together(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The experts of each layer in two tensors, as transformers holds them; the rest as it is."""
    found = {name: each for name, each in weights.items() if ".experts." not in name}
    weights = {_gated_name(name): each for name, each in weights.items()}
    for first in [name for name in weights if ".experts.0.down_proj" in name]:
        path, of_layer = first.partition(".0.down_proj")[0], dict[str, list[Tensor]]()
        own = [name for name in weights if name.startswith(f"{path}.")]
        for name in sorted(own, key=lambda name: int(name.split(".")[-3])):
            of_layer.setdefault(name.split(".")[-2], []).append(weights[name])
        path = path.replace(".block_sparse_moe.", ".mlp.")  # Mixtral's in files alone
        inner = [torch.stack(of_layer[name]) for name in ("gate_proj", "up_proj") if name in of_layer]
        found[f"{path}.gate_up_proj" if len(inner) > 1 else f"{path}.up_proj"] = torch.cat(inner, 1)
        found[f"{path}.down_proj"] = torch.stack(of_layer["down_proj"])
    return found


def _update(model: Any, dtype: torch.dtype, quantization: str | None, weights: dict[str, Tensor], how: str) -> None:
    plan = WeightPlan(model, dtype)
    staged = Staged(plan, partial=False)
    if how == "in place":
        staged, weights = InPlace(plan, quantization, CPU, of=staged), _together(weights)
    lists = [list(part) for part in zip(*((n, str(t.dtype), list(t.shape)) for n, t in weights.items()), strict=True)]
    for incoming in plan.read(*lists):
        staged.put(incoming, weights[incoming.name])
    staged.check()
    staged.apply(quantization, CPU)


@pytest.mark.parametrize("architecture", [name for name in ARCHITECTURES if name != "Gemma3ForConditionalGeneration"])
def test_a_session_leaves_what_a_load_leaves(architecture: str, tmp_path: Path) -> None:
    """RL.W3, RL.W6: fused projections, experts, latent attention, norms with offsets, interleaved heads, tied ends.

    In the memory that the model had, twice over, of float32 masters; int8 is quantized anew.
    """
    old, new = tmp_path / "old", tmp_path / "new"
    write_model(ARCHITECTURES[architecture], old)
    generator = torch.Generator().manual_seed(5)
    weights = {
        name: each.float() * (1 + 0.1 * torch.rand(each.shape, generator=generator))
        for name, each in load_file(old / "model.safetensors").items()
    }
    shutil.copytree(old, new)
    save_file(weights, new / "model.safetensors")
    arch = dataclasses.replace(read_arch(old), max_position=256)
    for dtype, quantization, how in (
        (torch.float32, None, "staged"),
        (torch.bfloat16, None, "in place"),
        (torch.bfloat16, "int8", "staged"),
    ):
        model, wanted = (load_model(arch, folder, dtype, quantization) for folder in (old, new))
        before = {name: tensor.data_ptr() for name, tensor in _tensors(model).items()}
        for _ in range(2):
            _update(model, dtype, quantization, weights, how)
        found = _tensors(model)
        assert {name: tensor.data_ptr() for name, tensor in found.items()} == before, "addresses stay"
        expected = _tensors(wanted)
        assert found.keys() == expected.keys()
        differ = [n for n, t in found.items() if "addresses" not in n and not torch.equal(t, expected[n])]
        assert not differ, (dtype, quantization, differ[:5])
        assert len([n for n in found if "storage" in n or "stacked" in n]) > 8
