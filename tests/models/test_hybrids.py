"""Families of which some layers keep states, against transformers: float32 logits within 1e-5 of the largest.

At least three tiny random checkpoints of each. A prompt in one piece, in pieces and token by token gives the same bits.
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hybrid_configs import HYBRIDS
from hybrid_rig import HybridRig
from loading import load_model
from model_rig import Case, make_reference, narrowest_choice
from octavo.attention.cpu import CpuBackend
from octavo.attention.mods import NO_MODS
from octavo.attention.mods.loading import mods_of_layers
from octavo.checkpoint.config_reader.checkpoint import read_arch
from octavo.checkpoint.config_reader.families import FAMILIES
from octavo.layers import fusions
from octavo.ops import native
from octavo.ops.decoder import BoundDecoder
from octavo.worker.facts import backend_of_layers

TOLERANCE = 1e-5
PROMPT = random.Random(0).choices(range(199), k=1100)

pytestmark = pytest.mark.usefixtures("one_thread")


def _error(case: Case, found: torch.Tensor) -> float:
    """The largest difference, of the largest logit."""
    expected = case.expected(PROMPT[: len(found)])
    assert expected.abs().max() > 0.5, "logits too small to tell right from wrong"
    return ((found - expected).abs().max() / expected.abs().max()).item()


@pytest.mark.parametrize("family", HYBRIDS)
def test_H_6_logits_equal_transformers(tiny_case: Callable[[str], Case], family: str) -> None:
    """H.6: a prompt, then the same in pieces whose borders are no chunk's, and decoded."""
    case = tiny_case(family)
    whole = HybridRig(case.model).run(PROMPT[:150], [150])
    assert _error(case, whole) <= TOLERANCE
    assert torch.equal(HybridRig(case.model).run(PROMPT[:150], [1, 62, 1, 7, 64, *[1] * 15]), whole)


@pytest.mark.parametrize("family", HYBRIDS)
def test_no_two_experts_tie(tiny_case: Callable[[str], Case], family: str) -> None:
    """In none of the comparisons with transformers: else rounding would decide, see `narrowest_choice`."""
    assert narrowest_choice(tiny_case(family).reference, PROMPT) >= 1e-6


def test_a_multiplier_of_null_is_the_scale_of_plain_attention(tmp_path: Path) -> None:
    """As transformers' default attention takes it; its `eager` cannot."""
    reference = make_reference("granite4-dense")
    reference.config.attention_multiplier = None
    reference.set_attn_implementation("sdpa")
    for layer in reference.model.layers:
        if layer.self_attn is not None:
            layer.self_attn.scaling = None
    reference.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["attention_multiplier"] is None
    case = Case(tmp_path, reference, load_model(read_arch(tmp_path), tmp_path, torch.float32))
    assert _error(case, HybridRig(case.model).run(PROMPT[:150], [150])) <= TOLERANCE


@torch.inference_mode()
def test_weights_of_experts_that_all_are_near_nought(tiny_case: Callable[[str], Case]) -> None:
    """LFM2-MoE divides by a sum that a millionth is added to, which then decides."""
    case = tiny_case("lfm2-moe")
    block, own = case.reference.model.layers[1].feed_forward, case.model.layers[1].mlp
    x = (torch.randn(7, 8) - 15) @ torch.linalg.pinv(block.gate.weight.detach()).t()
    _, expected, chosen = block.gate(x, block.expert_bias)
    weights, experts = own.route(x)
    assert expected.sum(1).min() < 0.5 and torch.equal(experts, chosen)
    torch.testing.assert_close(weights, expected)


@pytest.mark.slow
@pytest.mark.parametrize("length", [1, 63, 64, 65, 300, 1100])
@pytest.mark.parametrize("family", HYBRIDS)
def test_H_6_logits_of_prompts_and_token_by_token(tiny_case: Callable[[str], Case], family: str, length: int) -> None:
    case = tiny_case(family)
    whole = HybridRig(case.model).run(PROMPT[:length], [length])
    assert _error(case, whole) <= TOLERANCE
    found = HybridRig(case.model).run(PROMPT[:length], [1] * length)
    assert torch.equal(found, whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    "family",
    ["qwen3-next", "qwen3.5", "lfm2", "lfm2-moe", "lfm3", "mamba2", "granite4", "nemotron-h", "falcon-h1", "jamba"],
)
def test_H_8_bits_do_not_depend_on_the_batch(tiny_case: Callable[[str], Case], family: str, dtype: torch.dtype) -> None:
    """A row alone in one piece, and the same row in pieces beside others, give equal bits."""
    case = tiny_case(family)
    model = case.model if dtype == torch.float32 else load_model(read_arch(case.folder), case.folder, dtype)
    alone = HybridRig(model, "cpu", dtype).run(PROMPT[:90], [90])
    rig, parts = HybridRig(model, "cpu", dtype), []
    for start, size in ((0, 40), (40, 1), (41, 30), (71, 19)):
        own, other = PROMPT[start : start + size], PROMPT[200 : 200 + size]
        parts.append(rig.step_of({"a": own[:1], "row": own, "z": other})["row"])
    assert torch.equal(torch.cat(parts), alone)


@pytest.mark.parametrize("family", ["qwen3.5", "lfm2-ends", "lfm3", "nemotron-h-groups", "falcon-h1", "jamba"])
def test_the_last_layer_computes_only_last_tokens_with_the_same_bits(
    tiny_case: Callable[[str], Case], family: str
) -> None:
    rigs = [HybridRig(tiny_case(family).model, "cpu") for _ in range(2)]
    for chunks, at in (
        ({"a": PROMPT[:1], "b": PROMPT[7:50], "c": PROMPT[100:117]}, [0, 43, 60]),
        ({"d": PROMPT[60:62], "c": PROMPT[117:150], "b": PROMPT[50:90]}, [1, 34, 74]),
    ):
        every, found = rigs[0].compute(chunks), rigs[1].compute(chunks, last=True)
        assert torch.equal(found, every[at])


def test_every_hybrid_family_has_three_configurations() -> None:
    names = [name.partition("For")[0] for name, family in FAMILIES.items() if ".hybrids." in family.model]
    given = [name for name, _ in HYBRIDS.values()]
    assert not [name for name in names if given.count(name) < 3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["qwen3.5", "qwen3.5-partial", "qwen3.5-starts", "qwen3-next-every-other"])
def test_a_model_of_delta_nets_is_one_native_call_with_the_bits_of_its_lines(
    tiny_case: Callable[[str], Case], family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts, decoding rows and both, of all tokens and of the last ones; also where no library is loaded."""
    case = tiny_case(family)
    model = load_model(read_arch(case.folder), case.folder, dtype)
    assert "one native call" in dict(model.describe_layers([CpuBackend] * len(model.layer_specs)))["all steps"]

    def run() -> list[torch.Tensor]:
        rig = HybridRig(model, "cpu", dtype)
        prompts = {"a": PROMPT[:1], "b": PROMPT[7:80], "c": PROMPT[100:117]}
        decoding = {"a": PROMPT[1:2], "b": PROMPT[80:81], "c": PROMPT[117:118]}
        both = {"a": PROMPT[2:3], "d": PROMPT[200:260], "c": PROMPT[118:190]}
        steps = [rig.compute(prompts), rig.compute(decoding), rig.compute(both, last=True)]
        return [*steps, rig.compute({"d": PROMPT[260:262], "b": PROMPT[81:82]}, last=True)]

    whole, called = native.lib().octavo_decode, [0]

    def count(*arguments: object) -> None:
        called[0] += 1
        whole(*arguments)

    monkeypatch.setattr(native.lib(), "octavo_decode", count)
    found = run()
    assert called == [4]
    by_lines = dataclasses.replace(CpuBackend.capability, paged_operator=False)
    with monkeypatch.context() as patch:
        patch.setattr(CpuBackend, "capability", by_lines)
        assert all(map(torch.equal, run(), found))
    assert called == [4]
    with monkeypatch.context() as patch:
        patch.setattr(BoundDecoder, "__call__", BoundDecoder.composed)
        assert all(map(torch.equal, run(), found))
    assert called == [4]


@pytest.mark.parametrize("family", ["qwen3.5", "qwen3-next", "lfm2-biased", "lfm2-moe", "lfm3", "granite4", "jamba"])
def test_what_stands_behind_a_mixer_is_one_operator_with_the_bits_of_its_lines(
    tiny_case: Callable[[str], Case], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = tiny_case(family)
    found = HybridRig(case.model, "cpu").run(PROMPT[:70], [64, 1, 5])
    # one native call runs all of qwen3.5 where it may
    monkeypatch.setattr(CpuBackend, "capability", dataclasses.replace(CpuBackend.capability, paged_operator=False))
    texts = [text for _, text in case.model.describe_layers([CpuBackend] * len(case.model.layer_specs))]
    end = "linear norm add norm mlp norm" if family == "lfm3" else "linear add norm"
    assert any(end in text and "-> post_attention" in text for text in texts)
    monkeypatch.setattr(fusions, "FUSIONS", ())
    model = load_model(read_arch(case.folder), case.folder, torch.float32)
    assert torch.equal(HybridRig(model, "cpu").run(PROMPT[:70], [64, 1, 5]), found)


def test_a_layer_with_two_mixers_is_one_wherever_people_count_layers(tiny_case: Callable[[str], Case]) -> None:
    """In the cache it has two places."""
    model = tiny_case("falcon-h1").model
    num, each = len(model.layer_specs), model.arch.layers_of_each
    assert each == 2
    for _, text in model.describe_layers([CpuBackend] * num):
        assert text.startswith((f"layers 0-{num // 2 - 1}: ", f"layer {num // 2 - 1}: "))
    resolved: Any = SimpleNamespace(attention_backend="cpu", layer_backends={"reference": [1]})
    assert backend_of_layers(resolved, num, each) == ["cpu", "cpu", "reference", "reference"] + ["cpu"] * (num - 4)
    resolved.layer_backends = {"reference": [num // 2]}
    with pytest.raises(ValueError, match=f"names layer {num // 2}: the model has layers 0 to {num // 2 - 1}"):
        backend_of_layers(resolved, num, each)
    asked: list[int] = []
    assert mods_of_layers(lambda layer: asked.append(layer), num, each) == [NO_MODS] * num
    assert asked == list(range(num // 2))
