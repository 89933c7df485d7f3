"""What a model says its weights will take is what they take, in every family and form."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from architectures import CPU
from loading import load_model
from model_rig import FAMILIES, Case
from octavo.checkpoint.loader import build_model, weight_bytes
from octavo.config.engine_config import EngineConfig, resolve
from octavo.layers.attention import RotaryTable
from octavo.ops import native
from octavo.ops.gemm import LinearWeight
from octavo.ops.gemm.head_linear import HeadWeights

NEEDS_NATIVE = pytest.mark.skipif(not native.available(), reason="the native library is not built")


def _held(model: torch.nn.Module) -> Iterator[int]:
    """Bytes of everything that the layers keep of their parameters."""
    for layer in model.modules():
        if isinstance(layer, RotaryTable):
            continue
        for name, value in vars(layer).items():
            if isinstance(value, torch.Tensor):
                yield value.numel() * value.element_size()
            elif isinstance(value, LinearWeight) and name != "rest":  # which lies in another's memory
                yield value.num_bytes
            elif isinstance(value, HeadWeights):
                yield sum(weight.num_bytes for weight in value.packed)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"dtype": "float32"}, marks=NEEDS_NATIVE, id="float32"),
        pytest.param({"dtype": "bfloat16"}, marks=NEEDS_NATIVE, id="bfloat16"),
        pytest.param({"dtype": "bfloat16", "quantization": "int8"}, marks=NEEDS_NATIVE, id="int8"),
        pytest.param({"dtype": "bfloat16", "native": "off"}, id="reference"),
    ],
)
def test_a_family_weighs_what_it_holds(
    tiny_case: Callable[[str], Case], family: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    arch = tiny_case(family).model.arch
    resolved, dtype = resolve(EngineConfig(**settings), arch, CPU), getattr(torch, settings["dtype"])
    if settings.get("native") == "off":
        monkeypatch.setattr(native, "lib", lambda: None)
    model: Any = load_model(arch, None, dtype, resolved.quantization, "dummy")
    assert weight_bytes(build_model(arch, dtype), resolved) == sum(_held(model))
