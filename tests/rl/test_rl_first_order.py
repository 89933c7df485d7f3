"""RL.N2: octavo.rl has first derivatives; a loss that needs a second one is refused, and never loses it in silence."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import octavo.rl.autograd
from octavo import rl
from octavo.cache.specs import AttentionSpec
from octavo.checkpoint.arch import Moe
from octavo.layers.recurrent import GatedDeltaRule, Mamba2Scan, ShortConvolution, state_spec
from octavo.ops.rope import rope_table
from octavo.rl.autograd import outside
from octavo.rl.autograd.recurrent import (
    DeltaSizes,
    Mamba2Sizes,
    gated_delta,
    gated_norm,
    mamba2,
    short_conv,
    sigmoid,
    sigmoid_gated,
)
from rl_rig import random_ids, tiny

SPEC = AttentionSpec(num_heads=4, num_kv_heads=2, head_size=16, scale=0.25)
DELTA, MAMBA = DeltaSizes(2, 4, 16, 24), Mamba2Sizes(4, 16, 2, 8, 0.05, 3.0)
DELTA_SPEC = state_spec(ShortConvolution(0, 160, 4, torch.float32), GatedDeltaRule(0, *DELTA, torch.float32))
MAMBA_SPEC = state_spec(ShortConvolution(0, 96, 4, torch.float32), Mamba2Scan(0, *MAMBA[:4], torch.float32))
PACK, IDS, TABLE = rl.Pack([5, 2]), torch.arange(7), rope_table(16, 8)
EXPERTS = Moe(num_experts=2, experts_per_token=1, expert_size=4)
ROUTER, GATE_UP, DOWN = torch.randn(2, 16), torch.randn(2, 8, 16), torch.randn(2, 16, 4)
STATES = torch.randn(PACK.num_slots, 2, 32)
LATENT = {"interleaved": True}

OPERATORS: dict[str, tuple[int, Callable[[Tensor], Any]]] = {  # by name: the columns of its input, and a call
    "attention": (64, lambda x: rl.attention(x.view(7, 4, 16), STATES, PACK, SPEC)),
    "gated": (32, rl.gated),
    "gated_delta": (160, lambda x: gated_delta(x, x[:, :4], x[:, :4], x[0, :4], x[0, :4], PACK, DELTA_SPEC, DELTA)),
    "gated_norm": (32, lambda x: gated_norm(x, torch.ones(32), x, 1e-6, 2, gates_first=True)),
    "head_linear": (32, lambda x: rl.head_linear(x.view(7, 2, 16), torch.ones(8, 16), slice(0, 3))),
    "head_logprob": (16, lambda x: rl.head_logprob(x, torch.ones(9, 16), IDS).entropy),
    "latent_rope": (
        40,
        lambda x: rl.latent_rope(x[:, None, :8], x, x[0, 8:], PACK, rope_table(8, 8), 1e-6, **LATENT)[1],
    ),
    "linear": (16, lambda x: rl.linear(x, torch.ones(8, 16))),
    "mamba2": (96, lambda x: mamba2(x, x[:, :4], x[0, :4], x[0, :4], x[0, :4], PACK, MAMBA_SPEC, MAMBA)),
    "moe": (16, lambda x: rl.moe(x, ROUTER, GATE_UP, DOWN, EXPERTS)),
    "norm": (16, lambda x: rl.norm(x, torch.ones(16), 1e-6)),
    "qk_norm_rope": (128, lambda x: rl.qk_norm_rope(x, PACK, TABLE, SPEC)[0]),
    "short_conv": (160, lambda x: short_conv(x, torch.ones(160, 1, 4), PACK, DELTA_SPEC)),
    "sigmoid": (16, sigmoid),
    "sigmoid_gated": (16, lambda x: sigmoid_gated(x, x)),
    "token_logprob": (9, lambda x: rl.token_logprob(x, IDS).logprobs),
}


def _functions() -> Iterator[type]:
    """Every autograd function of octavo.rl, wherever it is written."""
    for module in pkgutil.walk_packages(octavo.rl.__path__, "octavo.rl."):
        importlib.import_module(module.name)
    waiting = [torch.autograd.Function]
    while waiting:
        for each in waiting.pop().__subclasses__():
            waiting.append(each)
            if each.__module__.startswith("octavo.rl") and each is not outside._Once:
                yield each


def test_every_function_says_that_it_is_of_first_order_and_is_tried_below() -> None:
    names = [getattr(each.backward, "operator", f"{each.__name__} lacks @first_order") for each in _functions()]
    assert sorted(names) == sorted(OPERATORS)


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_refuses_a_second_derivative_by_its_name(name: str) -> None:
    columns, call = OPERATORS[name]
    x = torch.randn(7, columns, requires_grad=True)
    result = call(x).square().sum() if name == "moe" else call(x).sum()
    (plain,) = torch.autograd.grad(result, x, retain_graph=True)
    (found,) = torch.autograd.grad(result, x, create_graph=True)
    assert torch.equal(plain, found.detach()) and not plain.requires_grad
    with pytest.raises(RuntimeError, match=rf"first derivatives only: .* went through (linear|{name}), whose"):
        (result + found.square().sum()).backward()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=str)
@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_names_the_types_that_it_takes(name: str, dtype: torch.dtype) -> None:
    columns, call = OPERATORS[name]
    taken = "logits must be float32" if name == "token_logprob" else f"octavo.rl's (linear|{name}): CPU operators take"
    with pytest.raises(ValueError, match=f"^{taken}.* got {dtype}$"):
        call(torch.randn(7, columns).to(dtype))


@pytest.fixture(scope="module")
def model() -> Any:
    return rl.convert(tiny(torch.float32))


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_model_refuses_a_penalty_of_its_gradients(model: Any, checkpointed: bool) -> None:
    """Of any of its parameters; its first gradients are as they were, and may be taken twice."""
    pack = rl.Pack.of(random_ids(5, 9))
    if checkpointed:
        model.activation_checkpointing_enable()
        model.train()
    try:
        for name in ("model.embed_tokens.weight", "model.norm.weight", "model.layers.3.mlp.up_proj.weight"):
            weight, loss = model.get_parameter(name), rl.logprobs(model, pack).logprobs.sum()
            (first,) = torch.autograd.grad(loss, weight, retain_graph=True)
            (again,) = torch.autograd.grad(loss, weight, create_graph=True)
            assert torch.equal(first, again.detach()) and again.requires_grad
            with pytest.raises(RuntimeError, match=r"octavo\.rl has first derivatives only"):
                (loss + again.square().sum()).backward()
    finally:
        model.activation_checkpointing_disable()
        model.zero_grad()
        model.eval()


def test_a_gradient_with_a_graph_is_an_optimizers_as_any_other(model: Any) -> None:
    """Who asks for a graph and does not use it trains as without."""
    rl.logprobs(model, rl.Pack.of(random_ids(5, 9))).logprobs.sum().backward(create_graph=True)
    before = model.model.norm.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()
    assert not torch.equal(model.model.norm.weight.detach(), before)
