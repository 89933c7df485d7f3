"""What a module of multi-token prediction stores where it does not attend: a pass's bits, and no more work."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from model_rig import Case
from octavo.cache.specs import AttentionSpec
from octavo.checkpoint.config_reader.drafters import read_modules
from octavo.checkpoint.loader import fill_model
from octavo.layers.mixers import gated_attention
from octavo.layers.mixers.gated_attention import GatedAttention
from octavo.models.drafters.mtp import MtpModule, _lines_to_store
from octavo.ops import native
from octavo.ops.gemm import LinearWeight
from test_draft_heads import LENGTH, DraftRig, agrees

pytestmark = pytest.mark.usefixtures("one_thread")


def module_of(target: Any) -> MtpModule:
    """A module of random weights for a target."""
    arch = target.arch
    config = {"num_nextn_predict_layers": 1, "num_hidden_layers": arch.num_published}
    config |= {"hidden_size": arch.hidden_size, "vocab_size": arch.vocab_size}
    module = MtpModule(read_modules(config, "config.json", arch, ()), target, torch.float32)
    fill_model(module, None, load_format="dummy")
    return module


def entries_of(target: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(target.arch.vocab_size, (LENGTH,)), torch.randn(LENGTH, target.arch.hidden_size)


def test_a_module_whose_lines_are_not_known_stores_as_it_attends(tiny_case: Callable[[str], Case]) -> None:
    """A layer that adds attention and MLP at once, as Cohere's, has no chain; another family's may have none either."""
    target = tiny_case("cohere").model
    module, (tokens, states) = module_of(target), entries_of(target)
    assert module.attends_to_store
    agrees(module, tokens, states, DraftRig(module).enter(tokens, states))


def test_a_mixer_that_runs_otherwise_is_not_asked_to_store_as_its_base(tiny_case: Callable[[str], Case]) -> None:
    """Of another forward nobody knows which K and V it stores, unless whoever wrote it says how to store them alone."""

    class Doubled(GatedAttention):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(2 * x)

    class Knows(Doubled):
        def store(self, x: torch.Tensor) -> None:
            super().store(2 * x)

    module = module_of(tiny_case("qwen3-next").model)
    assert not module.attends_to_store
    for kind, attends in ((Doubled, True), (Knows, False)):
        module.layer.mixer.__class__ = kind
        assert (_lines_to_store(module.layer)[1] is None) == attends
    module.layer.mixer.forward = module.layer.mixer.forward  # this very mixer was given another one
    assert _lines_to_store(module.layer)[1] is None


@pytest.mark.parametrize("family", ["qwen3", "deepseek3", "glm4", "qwen3-next", "qwen3-next-tied", "qwen3.5-partial"])
@pytest.mark.parametrize("is_native", [True, False], ids=["native", "reference"])
def test_a_store_leaves_the_bits_that_a_pass_leaves(
    tiny_case: Callable[[str], Case], family: str, is_native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of gated attention by the rows of keys and values alone: neither queries nor gates are computed for nobody."""
    products, product = list[int](), gated_attention.linear_of_few

    def counted(x: torch.Tensor, weight: LinearWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
        products.append(weight.n)
        return product(x, weight, bias)

    monkeypatch.setattr(gated_attention, "linear_of_few", counted)
    with contextlib.nullcontext() if is_native else native.disabled():
        target = tiny_case(family).model
        module, entries = module_of(target), entries_of(target)
        rigs = [DraftRig(module) for _ in range(2)]
        for rig, attend in zip(rigs, (False, True), strict=True):
            rig.enter(*entries, attend=attend)
    stored, attended = (rig.kv[0] for rig in rigs)
    assert torch.equal(stored.isnan(), attended.isnan()) and torch.equal(stored.nan_to_num(), attended.nan_to_num())
    assert not stored.isnan().all() and stored.nan_to_num().abs().max() > 0.01
    spec = module.layer_specs[0]
    assert isinstance(spec, AttentionSpec)
    gated = isinstance(getattr(module.layer, "mixer", None), GatedAttention)
    assert products == ([2 * spec.num_kv_heads * spec.head_size] if gated else [])
