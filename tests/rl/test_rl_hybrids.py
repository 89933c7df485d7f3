"""Layers with states in a trainer's hands: the sampler's bits, and gradients that are right (RL.N1, RL.N2, RL.N6)."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo import LLM, rl
from octavo.cache.specs import StateSpec
from octavo.layers.recurrent import GatedDeltaRule, Mamba2Scan, ShortConvolution, state_spec
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
from rl_rig import DTYPES, num_differing, random_ids, sampled
from test_rl_gradients import _compare

from model_rig import make_reference  # isort: skip, its folder is known through rl_rig

HYBRID = str(resources.files("octavo").joinpath("assets/octavo-tiny-hybrid"))
FAMILIES = [
    "qwen3-next",
    "qwen3.5",
    "qwen3.5-moe",
    "qwen3-next-every-other",
    "lfm2-biased",
    "lfm2-moe",
    "lfm3",
    "lfm3-biased",
    "lfm3-plain",
    "bamba-biased",
    "granite4-dense",
    "granite4",
    "granite4-biased",
    "granite4-unshared",
]
PROMPTS = random_ids(1, 33, 70, 2, 64, 130)
LENGTHS = [70, 1, 130, 64]
SIZES = DeltaSizes(2, 4, 16, 24)
CHANNELS = 2 * 2 * 16 + 4 * 24


def spec_of(dtype: torch.dtype) -> StateSpec:
    return state_spec(ShortConvolution(0, CHANNELS, 4, dtype), GatedDeltaRule(0, *SIZES, dtype))


def alone(compute: Callable[..., Tensor], tensors: list[Tensor], *rest: Tensor) -> Tensor:
    """Sequence by sequence."""
    return torch.cat([compute(*parts, *rest) for parts in zip(*(x.split(LENGTHS) for x in tensors), strict=True)])


def sum64(x: Tensor, weight: Tensor) -> Tensor:
    wide = torch.cat((x.new_zeros(3, CHANNELS), x)).t()[None]
    return torch.nn.functional.conv1d(wide, weight, groups=CHANNELS)[0].t()


def conv64(x: Tensor, weight: Tensor) -> Tensor:
    return torch.nn.functional.silu(sum64(x, weight))


def rule64(qkv: Tensor, a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> Tensor:
    """The recurrence itself, token by token."""
    q, k, v = qkv.split((32, 32, 96), 1)
    q, k = (x.view(-1, 2, 16) / (x.view(-1, 2, 16).square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    q, k, v = q.repeat_interleave(2, 1) / 4, k.repeat_interleave(2, 1), v.view(-1, 4, 24)
    left = (-a_log.exp() * torch.nn.functional.softplus(a + dt_bias)).exp()
    state, found = qkv.new_zeros(4, 16, 24), []
    for t in range(len(qkv)):
        state = state * left[t, :, None, None]
        update = b[t].sigmoid()[:, None] * (v[t] - torch.einsum("hk,hkv->hv", k[t], state))
        state = state + k[t, :, :, None] * update[:, None]
        found.append(torch.einsum("hk,hkv->hv", q[t], state))
    return torch.stack(found).flatten(1)


def scan64(xbc: Tensor, dt: Tensor, a_log: Tensor, dt_bias: Tensor, skip: Tensor) -> Tensor:
    """Mamba-2's recurrence, token by token: 4 heads of 16, two groups of 8 states, steps of 0.05 to 3."""
    x, b, c = xbc.split((64, 16, 16), 1)
    x, b, c = x.view(-1, 4, 16), *(each.view(-1, 2, 8).repeat_interleave(2, 1) for each in (b, c))
    step = torch.nn.functional.softplus(dt + dt_bias).clamp(0.05, 3.0)
    left = (-a_log.exp() * step).exp()
    state, found = xbc.new_zeros(4, 8, 16), []
    for t in range(len(x)):
        state = state * left[t, :, None, None] + step[t, :, None, None] * b[t, :, :, None] * x[t, :, None]
        found.append(torch.einsum("hs,hsp->hp", c[t], state) + skip[:, None] * x[t])
    return torch.stack(found).flatten(1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
class TestOperators:
    @pytest.mark.parametrize("silu", [True, False])
    def test_RL_N2_short_convolution(self, dtype: torch.dtype, silu: bool) -> None:
        pack, spec = rl.Pack(LENGTHS), spec_of(dtype)
        inputs = [torch.randn(sum(LENGTHS), CHANNELS), torch.randn(CHANNELS, 1, 4)]
        if silu:
            _compare(lambda x, w: short_conv(x, w, pack, spec), lambda x, w: alone(conv64, [x], w), inputs, dtype)
            return
        _compare(
            lambda x, w, b: short_conv(x, w, pack, spec, b, silu=False),
            lambda x, w, b: alone(sum64, [x], w) + b,
            [*inputs, torch.randn(CHANNELS)],
            dtype,
        )

    def test_RL_N2_gated_delta_rule(self, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        pack, spec, count = rl.Pack(LENGTHS), spec_of(dtype), sum(LENGTHS)
        inputs = [torch.randn(count, CHANNELS), torch.randn(count, 4), torch.randn(count, 4)]
        inputs += [torch.randn(4) / 2, torch.randn(4)]
        _compare(
            lambda *t: gated_delta(*t, pack, spec, SIZES),
            lambda qkv, a, b, *rest: alone(rule64, [qkv, a, b], *rest),
            inputs,
            dtype,
        )

    def test_RL_N2_mamba2(self, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        sizes, count = Mamba2Sizes(4, 16, 2, 8, 0.05, 3.0), sum(LENGTHS)
        spec = state_spec(ShortConvolution(0, 96, 4, dtype), Mamba2Scan(0, *sizes[:4], dtype))
        inputs = [torch.randn(count, 96), torch.randn(count, 4), torch.randn(4) / 2, torch.randn(4), torch.randn(4)]
        pack = rl.Pack(LENGTHS)
        _compare(
            lambda *t: mamba2(*t, pack, spec, sizes),
            lambda xbc, dt, *rest: alone(scan64, [xbc, dt], *rest),
            inputs,
            dtype,
        )

    @pytest.mark.parametrize("gates_first", [False, True])
    def test_RL_N2_gated_norm(self, dtype: torch.dtype, gates_first: bool) -> None:
        def right(x: Tensor, weight: Tensor, gate: Tensor) -> Tensor:
            by = torch.nn.functional.silu(gate)
            own = (by * x if gates_first else x).view(33, 3, 16)
            own = own / (own.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.view(-1, 16)
            return own.view(33, 48) if gates_first else own.view(33, 48) * by

        inputs = [torch.randn(33, 48), 1 + torch.rand(48 if gates_first else 16), torch.randn(33, 48)]
        _compare(lambda x, w, gate: gated_norm(x, w, gate, 1e-6, 3, gates_first=gates_first), right, inputs, dtype)

    def test_RL_N2_gates(self, dtype: torch.dtype) -> None:
        inputs = [torch.randn(33, 48), torch.randn(33, 48)]
        _compare(sigmoid_gated, lambda x, gate: x * gate.sigmoid(), inputs, dtype)
        _compare(sigmoid, torch.sigmoid, inputs[:1], torch.float32)


@pytest.mark.parametrize("gate", [torch.ones(3, 8, dtype=torch.float64), torch.ones(3, 8).half(), torch.ones(3, 4)])
def test_a_gate_of_another_kind_is_refused_by_name(gate: Tensor) -> None:
    """Its bytes would be read as x's."""
    x = torch.ones(3, 8)
    with pytest.raises(ValueError, match=r"gated_norm: a gate must be of x's dtype and shape, torch.float32 \[3, 8\]"):
        gated_norm(x, torch.ones(8), gate, 1e-6, 2, gates_first=True)
    with pytest.raises(ValueError, match="sigmoid_gated: a gate must be .* got " + re.escape(f"{gate.dtype}")):
        sigmoid_gated(x, gate)


def test_weights_without_elements_are_not_sent() -> None:
    """Of a model that has no MLP beside its experts: an engine has no place for them."""
    model = make_reference("granite4-unshared")
    empty = {name for name, parameter in model.named_parameters() if not parameter.numel()}
    assert len(empty) == 2 * len(model.model.layers)
    assert set(rl.WeightSource(model).tensors) == {name for name, _ in model.named_parameters()} - empty


@pytest.mark.parametrize("family", ["qwen3.5", "granite4"])
def test_RL_N2_the_way_back_through_a_whole_model_is_as_near_as_plain_torchs(family: str) -> None:
    """To transformers' gradients in float64, as transformers' own in float32 are."""
    model, pack = rl.convert(make_reference(family)), rl.Pack.of(PROMPTS[1:3])
    rl.logprobs(model, pack).logprobs.sum().backward()
    plain, right = make_reference(family), make_reference(family).double()
    right.set_experts_implementation("eager")  # the other ones know no float64
    for ids in PROMPTS[1:3]:
        for other in (plain, right):
            logits = other(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
            logits.gather(1, torch.tensor(ids)[1:, None]).sum().backward()
    named = zip(model.named_parameters(), plain.parameters(), right.parameters(), strict=True)
    for (name, own), other, exact in named:
        assert own.grad is not None and other.grad is not None and exact.grad is not None, name
        ours, theirs = ((each.grad.double() - exact.grad).norm() / exact.grad.norm() for each in (own, other))
        assert float(ours) < 3 * float(theirs) + 5e-5, (name, float(ours), float(theirs))


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("family", ["qwen3.5-moe", "lfm2-moe", "granite4", "deepseek3"])
def test_RL_N5_checkpointing_of_other_layers_keeps_bits_and_gradients(family: str, use_reentrant: bool) -> None:
    """Experts, latent attention, gated delta nets, short convolutions, Mamba-2: what is kept is computed once more."""
    model, pack, found = rl.convert(make_reference(family)), rl.Pack.of(PROMPTS[:4]), []
    model.train()
    for is_checkpointed in (False, True):
        if is_checkpointed:
            model.activation_checkpointing_enable({"use_reentrant": use_reentrant})
        logs = rl.logprobs(model, pack).logprobs
        logs.sum().backward()
        found.append([logs.detach(), *(parameter.grad for parameter in model.parameters())])
        model.zero_grad(set_to_none=True)
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_RL_N1_families_with_states(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = make_reference(family).to(dtype)
    model.save_pretrained(tmp_path)
    settings: dict[str, Any] = {"model": str(tmp_path), "dtype": str(dtype)[6:], "max_model_len": 256}
    with LLM(**settings, skip_tokenizer_init=True, max_num_batched_tokens=90) as llm:
        sequences, theirs = sampled(llm, PROMPTS)
    rl.convert(model, max_model_len=256)
    pack = rl.Pack.of(sequences)
    found = rl.logprobs(model, pack).logprobs
    assert num_differing(pack.split(found), theirs) == 0
    found.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters() if parameter.numel())
    packs = [rl.Pack.of([each]) for each in sequences]
    with torch.no_grad():
        each = [rl.logprobs(model, pack).logprobs for pack in packs]
    assert torch.equal(torch.cat(each), found), "however sequences are packed"


def test_RL_N1_float32_masters_of_a_sampler_in_bfloat16(tmp_path: Path) -> None:
    """What is no matrix stays float32 in both: gates, convolutions, norms."""
    make_reference("qwen3-next").save_pretrained(tmp_path)
    with LLM(str(tmp_path), dtype="bfloat16", max_model_len=256, skip_tokenizer_init=True) as llm:
        sequences, theirs = sampled(llm, PROMPTS[1:4])
    model = rl.convert(make_reference("qwen3-next"), dtype=torch.bfloat16, max_model_len=256)
    pack = rl.Pack.of(sequences)
    with torch.no_grad():
        assert num_differing(pack.split(rl.logprobs(model, pack).logprobs), theirs) == 0


def test_RL_N1_a_state_in_bfloat16_is_the_engines_too(tmp_path: Path) -> None:
    make_reference("qwen3.5").save_pretrained(tmp_path)
    own = {"dtype": "float32", "max_model_len": 256, "state_dtype": "bfloat16"}
    with LLM(str(tmp_path), **own, skip_tokenizer_init=True) as llm:
        sequences, theirs = sampled(llm, PROMPTS)
    pack = rl.Pack.of(sequences)
    for state_dtype, is_same in (("bfloat16", True), ("float32", False)):
        model = rl.convert(make_reference("qwen3.5"), max_model_len=256, state_dtype=state_dtype)
        with torch.no_grad():
            assert (num_differing(pack.split(rl.logprobs(model, pack).logprobs), theirs) == 0) is is_same
    with pytest.raises(ValueError, match="state_dtype must be float32 or bfloat16, got 'int8'"):
        rl.convert(make_reference("qwen3.5"), state_dtype="int8")


def test_RL_W3_a_model_in_memory_is_sent_by_the_names_that_it_has_there(tmp_path: Path) -> None:
    """Granite 4's router has another name there than in its files."""
    model = rl.convert(make_reference("granite4"), max_model_len=256)
    model.save_pretrained(tmp_path)
    own: dict[str, Any] = {"dtype": "float32", "max_model_len": 256, "weight_transfer_config": {"backend": "disk"}}
    with LLM(str(tmp_path), **own, skip_tokenizer_init=True) as llm:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter *= 1 + 0.1 * torch.rand_like(parameter)
        rl.Sender(llm, "local").send(rl.WeightSource(model))
        sequences, theirs = sampled(llm, PROMPTS[1:3])
    pack = rl.Pack.of(sequences)
    with torch.no_grad():
        assert num_differing(pack.split(rl.logprobs(model, pack).logprobs), theirs) == 0


def test_RL_N6_updates_of_the_bundled_hybrid_keep_its_bits() -> None:
    from transformers import AutoModelForCausalLM

    model = rl.convert(AutoModelForCausalLM.from_pretrained(HYBRID, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    prompts = random_ids(5, 70, 130, vocab_size=4096)
    with LLM(HYBRID, dtype="bfloat16", max_model_len=512, weight_transfer_config={"backend": "disk"}) as llm:
        for turn in range(3):
            sequences, theirs = sampled(llm, prompts)
            pack = rl.Pack.of(sequences)
            found = rl.logprobs(model, pack).logprobs
            assert num_differing(pack.split(found), theirs) == 0, turn
            (found.sum() / -100).backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                assert num_differing(pack.split(rl.logprobs(model, pack).logprobs), theirs) > 0
            rl.Sender(llm, "local").send(rl.WeightSource(model))
