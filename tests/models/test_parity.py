"""Every family against transformers, on tiny random checkpoints: float32 logits within 1e-4, however they are run."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from loading import load_model
from model_rig import FAMILIES, STRETCHED, Case, Rig, make_reference, narrowest_choice
from octavo.attention.cpu import CpuBackend
from octavo.checkpoint.config_reader.checkpoint import read_arch
from octavo.ops import native
from survivors import with_survivors

TOLERANCE = 1e-4
PROMPT = random.Random(0).choices(range(199), k=300)
NEEDS_NATIVE = pytest.mark.skipif(not native.available(), reason="the native library is not built")
BACKENDS = ["reference", pytest.param("cpu", marks=NEEDS_NATIVE)]

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("length", "sizes"),
    [
        pytest.param(1, [1], id="1"),
        pytest.param(17, [17], id="17"),
        pytest.param(300, [300], id="300"),
        pytest.param(17, [1] * 17, id="17-token-by-token"),
        pytest.param(300, [64, 7, 100, 109] + [1] * 20, id="300-chunked-then-decoded"),
    ],
)
def test_logits_equal_transformers(
    tiny_case: Callable[[str], Case], family: str, length: int, sizes: list[int], backend: str, record_property: Any
) -> None:
    case = tiny_case(family)
    expected = case.expected(PROMPT[:length])
    found = Rig(case.model, backend).run(PROMPT[:length], sizes)
    error = (found - expected).abs().max().item()
    record_property("max_abs_error", error)
    assert expected.abs().max() > 0.5, "logits too small to tell right from wrong"
    assert error <= TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
def test_no_two_experts_nearly_tie(tiny_case: Callable[[str], Case], family: str) -> None:
    """What the comparison above stands on: float32 moves a router's scores by some 1e-7, and no choice hangs on that.

    With other weights one did: on one kind of processor transformers took another expert than float64 and Octavo do.
    """
    assert narrowest_choice(tiny_case(family).reference, PROMPT) >= 1e-5


@NEEDS_NATIVE
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_bits_do_not_depend_on_the_batch(tiny_case: Callable[[str], Case], family: str, dtype: torch.dtype) -> None:
    """A row alone in one chunk, and the same row chunked beside others, give equal bits."""
    case = tiny_case(family)
    model = case.model if dtype == torch.float32 else load_model(read_arch(case.folder), case.folder, dtype)
    alone = Rig(model, "cpu", dtype).run(PROMPT[:90], [90])
    rig, parts = Rig(model, "cpu", dtype), []
    for start, size in ((0, 40), (40, 1), (41, 30), (71, 19)):
        own, other = PROMPT[start : start + size], PROMPT[200 : 200 + size]
        parts.append(rig.step({"a": own[:1], "row": own, "z": other})["row"])
    assert torch.equal(torch.cat(parts), alone)


@NEEDS_NATIVE
@pytest.mark.parametrize("family", FAMILIES)
def test_layer_by_layer_and_in_one_operator_are_equal(
    tiny_case: Callable[[str], Case], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A backend that is more than the paged operator gets a call per layer, with the same bits."""
    case = tiny_case(family)
    found = Rig(case.model, "cpu").run(PROMPT[:60], [40, 1, 19])
    monkeypatch.setattr(CpuBackend, "capability", dataclasses.replace(CpuBackend.capability, paged_operator=False))
    assert torch.equal(Rig(case.model, "cpu").run(PROMPT[:60], [40, 1, 19]), found)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_last_layer_computes_only_last_tokens_with_the_same_bits(
    tiny_case: Callable[[str], Case], family: str, backend: str
) -> None:
    """And the next step finds K and V of all tokens; its lengths are not those of the first."""
    rigs = [Rig(tiny_case(family).model, backend) for _ in range(2)]
    for chunks, at in (
        ({"a": PROMPT[:1], "b": PROMPT[7:50], "c": PROMPT[100:117]}, [0, 43, 60]),
        ({"d": PROMPT[60:62], "c": PROMPT[117:150], "b": PROMPT[50:90]}, [1, 34, 74]),
    ):
        every, found = rigs[0].compute(chunks), rigs[1].compute(chunks, last=True)
        if backend == "cpu":
            assert torch.equal(found, every[at])
        torch.testing.assert_close(found, every[at], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_first_step_leaves_no_tensor_behind(tiny_case: Callable[[str], Case], family: str) -> None:
    """The first one may be a graph's capture: what it made would not be filled yet, a copy from the host never be."""
    case = tiny_case(family)
    rig = Rig(load_model(read_arch(case.folder), None, torch.float32, load_format="dummy"))
    forward, left = rig.model.forward, ["nothing was watched"]

    def watched(*args: torch.Tensor) -> torch.Tensor:
        nonlocal left
        hidden, left = with_survivors(lambda: forward(*args))
        return hidden

    rig.model.forward = watched
    rig.compute({"row": PROMPT[:20]}, last=True)
    assert left == []


@pytest.mark.parametrize(
    ("family", "kind", "longest", "lengths"),
    [
        ("llama", "dynamic", 64, (1, 64)),  # as trained
        ("llama", "dynamic", 192, (192,)),  # stretched, as transformers does at this length
        ("llama", "longrope", 64, (1, 64)),
        ("llama", "longrope", 192, (65, 192)),
        ("phi4", "longrope, in part", 64, (1, 64)),
        ("phi4", "longrope, in part", 192, (65, 192)),
    ],
)
def test_rotations_that_depend_on_the_longest_request(
    tmp_path: Path, family: str, kind: str, longest: int, lengths: tuple[int, ...]
) -> None:
    """In an engine they depend on its max_model_len alone: not on the request's length, nor on its chunks."""
    reference = make_reference(family, **STRETCHED[kind])
    reference.save_pretrained(tmp_path)
    arch = read_arch(tmp_path)
    assert (arch.max_position, arch.default_length) == (192, 64 if kind == "dynamic" else 0)
    model = load_model(dataclasses.replace(arch, max_position=longest), tmp_path, torch.float32)
    case = Case(tmp_path, reference, model)
    for length in lengths:
        expected = case.expected(PROMPT[:length])
        for sizes in ([length], [1, length // 2, length - 1 - length // 2] if length > 3 else [length]):
            error = (Rig(model).run(PROMPT[:length], sizes) - expected).abs().max().item()
            assert error <= TOLERANCE
