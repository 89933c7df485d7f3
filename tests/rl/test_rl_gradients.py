"""RL.N2: gradients of every operator against float64 torch of the same mathematics."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo import rl
from octavo.attention import AttentionMods
from octavo.cache.specs import AttentionSpec
from octavo.checkpoint.arch import Moe
from octavo.ops.rope import rope_table
from octavo.rl.autograd import attention as attention_of_trainers
from octavo.rl.autograd import logprob as logprob_of_trainers
from rl_rig import DTYPES

LIMIT = {torch.float32: 2e-6, torch.bfloat16: 1e-2}  # of the error, relative to the gradient's own size
LENGTHS = [40, 7, 130]
SPEC = AttentionSpec(num_heads=4, num_kv_heads=2, head_size=16, scale=0.25)


def _compare(
    ours: Callable[..., Any], theirs: Callable[..., Any], inputs: list[Tensor], dtype: torch.dtype, factor: float = 1.0
) -> None:
    """The gradients of a random weighting of the results, of all inputs."""
    own = [x.to(dtype).requires_grad_() for x in inputs]
    wide = [x.detach().double().requires_grad_() for x in own]
    first, second = ours(*own), theirs(*wide)
    weights = torch.randn(first.shape, generator=torch.Generator().manual_seed(1))
    found = torch.autograd.grad((first.float() * weights).sum(), own)
    expected = torch.autograd.grad((second * weights.double()).sum(), wide)
    for mine, right in zip(found, expected, strict=True):
        error = float((mine.double() - right).norm() / right.norm())
        assert error <= factor * LIMIT[dtype], error


def _norm64(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
class TestOperators:
    def test_RL_N2_linear(self, dtype: torch.dtype) -> None:
        inputs = [torch.randn(33, 48), torch.randn(40, 48), torch.randn(24, 48), torch.randn(40), torch.randn(24)]
        _compare(
            lambda x, a, b, c, d: rl.linear(x, (a, b), (c, d)),
            lambda x, a, b, c, d: torch.cat((x @ a.t() + c, x @ b.t() + d), 1),
            inputs,
            dtype,
        )

    def test_RL_N2_norm_and_add(self, dtype: torch.dtype) -> None:
        _compare(
            lambda x, y, w: rl.norm(rl.add(x, y), w, 1e-6, 1.0),
            lambda x, y, w: _norm64(x + y, w + 1, 1e-6),
            [torch.randn(33, 48), torch.randn(33, 48), torch.randn(48)],
            dtype,
        )

    @pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
    def test_RL_N2_gated(self, dtype: torch.dtype, kind: str) -> None:
        def right(x: Tensor) -> Tensor:
            gate, up = x.chunk(2, 1)
            act = torch.nn.functional.silu if kind == "silu" else _gelu
            return act(gate) * up

        _compare(lambda x: rl.gated(x, kind), right, [torch.randn(33, 96)], dtype)

    @pytest.mark.parametrize("temperature", [1.0, 0.6])
    @pytest.mark.parametrize("entropy", [False, True])
    def test_RL_N2_head(self, dtype: torch.dtype, temperature: float, entropy: bool) -> None:
        ids = torch.randint(199, (33,))

        def right(x: Tensor, w: Tensor) -> Tensor:
            logs = (3.0 * torch.tanh(x @ w.t() / 2.0 / 3.0) / temperature).log_softmax(-1)
            return -(logs.exp() * logs).sum(1) if entropy else logs.gather(1, ids[:, None])[:, 0]

        def ours(x: Tensor, w: Tensor) -> Tensor:
            return rl.head_logprob(x, w, ids, temperature, soft_cap=3.0, divisor=2.0)[1 if entropy else 0]

        _compare(ours, right, [torch.randn(33, 48), torch.randn(199, 48) / 7], dtype, factor=2.0 if entropy else 1.0)

    def test_RL_N2_moe(self, dtype: torch.dtype) -> None:
        facts = Moe(num_experts=6, experts_per_token=2, expert_size=24)
        inputs = [torch.randn(33, 48), torch.randn(6, 48), torch.randn(6, 48, 48) / 7, torch.randn(6, 48, 24) / 5]

        def right(x: Tensor, router: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
            scores = (x @ router.t()).softmax(-1)
            weights, experts = scores.topk(2)
            gate, up = torch.einsum("ts,teis->tei", x, gate_up[experts]).chunk(2, -1)
            each = torch.einsum("tei,tesi->tes", torch.nn.functional.silu(gate) * up, down[experts])
            return (each * (weights / weights.sum(1, keepdim=True))[..., None]).sum(1)

        _compare(lambda *t: rl.moe(*t, facts), right, inputs, dtype)

    def test_RL_N2_moe_with_shared_experts_and_a_corrected_choice_of_groups(self, dtype: torch.dtype) -> None:
        """DeepSeek-V3's rule: the correction chooses and has no weight; what all tokens meet is added."""
        facts = Moe(
            num_experts=6,
            experts_per_token=2,
            expert_size=24,
            num_shared=1,
            scoring="sigmoid",
            corrected=True,
            num_groups=3,
            groups_kept=2,
            group_score=2,
            scale=2.5,
        )
        correction = torch.tensor([0.4, -0.3, 0.2, 0.1, -0.2, 0.3])
        inputs = [torch.randn(33, 48), torch.randn(6, 48), torch.randn(6, 48, 48) / 7, torch.randn(6, 48, 24) / 5]
        inputs += [torch.randn(33, 48)]

        def right(x: Tensor, router: Tensor, gate_up: Tensor, down: Tensor, shared: Tensor) -> Tensor:
            scores = (x @ router.t()).sigmoid()
            choice = (scores + correction).unflatten(1, (3, 2))
            kept = torch.zeros(33, 3, dtype=torch.bool).scatter_(1, choice.sum(2).topk(2).indices, True)
            experts = choice.masked_fill(~kept[..., None], float("-inf")).flatten(1).topk(2).indices
            weights = scores.gather(1, experts)
            gate, up = torch.einsum("ts,teis->tei", x, gate_up[experts]).chunk(2, -1)
            each = torch.einsum("tei,tesi->tes", torch.nn.functional.silu(gate) * up, down[experts])
            return 2.5 * (each * (weights / weights.sum(1, keepdim=True))[..., None]).sum(1) + shared

        _compare(lambda *t: rl.moe(*t[:4], facts, correction=correction, shared=t[4]), right, inputs, dtype)

    @pytest.mark.parametrize("transposed", [False, True])
    def test_RL_N2_a_product_a_head(self, dtype: torch.dtype, transposed: bool) -> None:
        """Of a part of each head's rows, or of them transposed; the rest has no gradient."""

        def right(x: Tensor, weight: Tensor) -> Tensor:
            matrices = weight.unflatten(0, (3, 20))[:, 5:17]
            return torch.einsum("thk,hkn->thn" if transposed else "thk,hnk->thn", x, matrices)

        inputs = [torch.randn(33, 3, 12 if transposed else 16), torch.randn(60, 16)]
        _compare(lambda x, w: rl.head_linear(x, w, slice(5, 17), transposed=transposed), right, inputs, dtype)


def _gelu(x: Tensor) -> Tensor:
    return torch.nn.functional.gelu(x, approximate="tanh")


def _attention64(
    qkv: Tensor, q_norm: Tensor, k_norm: Tensor, spec: AttentionSpec, change: Any = None, sinks: Tensor | None = None
) -> Tensor:
    cos_sin, results = rope_table(16, max(LENGTHS)).double(), []
    for part in qkv.split(LENGTHS):
        q, k, v = part.unflatten(1, (-1, 16)).split((4, 2, 2), 1)
        rows = cos_sin[: len(part), None]
        q, k = (_turn(_norm64(x, w, 1e-6), rows).transpose(0, 1) for x, w in ((q, q_norm), (k, k_norm)))
        scores = q @ k.repeat_interleave(2, 0).transpose(1, 2) * spec.scale
        if spec.soft_cap:
            scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
        at = torch.arange(len(part))
        distance = at[:, None] - at
        if spec.alibi_slopes:
            scores = scores - torch.tensor(spec.alibi_slopes).double()[:, None, None] * distance
        if change is not None:
            scores = change(scores, at[:, None], at)
        hidden = distance < 0
        hidden = hidden | (distance >= spec.window) if spec.window else hidden
        hidden = hidden | (at[:, None] // spec.chunk != at // spec.chunk) if spec.chunk else hidden
        scores = scores.masked_fill(hidden, float("-inf"))
        if sinks is not None:
            scores = torch.cat((scores, sinks[:, None, None].expand(-1, len(part), 1)), 2)
        weights = scores.softmax(-1)[..., : len(part)]
        results.append((weights @ v.transpose(0, 1).repeat_interleave(2, 0)).transpose(0, 1))
    return torch.cat(results)


def _turn(x: Tensor, rows: Tensor) -> Tensor:
    (cos, sin), (first, second) = rows.chunk(2, -1), x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def _projected(
    spec: AttentionSpec, pack: rl.Pack, qkv: Tensor, q_norm: Tensor, k_norm: Tensor
) -> tuple[Tensor, Tensor]:
    return rl.qk_norm_rope(qkv, pack, rope_table(16, max(LENGTHS)), spec, q_norm, k_norm, 1e-6)


def _ours(spec: AttentionSpec, pack: rl.Pack) -> Callable[..., Tensor]:
    return lambda *t: rl.attention(*_projected(spec, pack, *t), pack, spec)


SPECS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 20},
    "chunk": {"chunk": 24},
    "cap": {"soft_cap": 1.5},
    "slopes": {"alibi_slopes": (0.5, 0.25, 0.125, 0.0625)},
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", SPECS)
def test_RL_N2_attention(kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(attention_of_trainers._AT_ONCE, "cpu", 4 * 130 * 17)  # tiles of 17 queries of the longest
    spec = dataclasses.replace(SPEC, **SPECS[kind])
    torch.manual_seed(0)
    inputs = [torch.randn(sum(LENGTHS), 8 * 16), 1 + torch.rand(16), 1 + torch.rand(16)]
    _compare(_ours(spec, rl.Pack(LENGTHS)), lambda *t: _attention64(*t, spec), inputs, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["plain", "window", "mods"])
def test_RL_N2_sinks(kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """A logit of each head that takes a share and has no value; it has a gradient, over tiles and sequences."""
    monkeypatch.setitem(attention_of_trainers._AT_ONCE, "cpu", 4 * 130 * 17)
    mods = {"mods": AttentionMods(score_mod=lambda score, b, h, q, kv: score * (1 + h))} if kind == "mods" else {}
    spec = dataclasses.replace(SPEC, sinks=True, **SPECS.get(kind, {}), **mods)
    change = (lambda scores, q, kv: scores * torch.arange(1, 5)[:, None, None]) if mods else None
    torch.manual_seed(0)
    inputs = [torch.randn(sum(LENGTHS), 8 * 16), 1 + torch.rand(16), 1 + torch.rand(16), torch.randn(4)]
    pack = rl.Pack(LENGTHS)
    _compare(
        lambda *t: rl.attention(*_projected(spec, pack, *t[:3]), pack, spec, sinks=t[3]),
        lambda *t: _attention64(*t[:3], spec, change, t[3]),
        inputs,
        dtype,
        factor=2.0 if mods else 1.0,  # the mod's scores are four times as large, and so is their rounding
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
def test_RL_N2_latent_attention(interleaved: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a query and a state to what each head sees: norm, turn, and values that are the keys' first channels."""
    monkeypatch.setitem(attention_of_trainers._AT_ONCE, "cpu", 4 * 130 * 17)
    spec = AttentionSpec(num_heads=4, num_kv_heads=1, head_size=40, scale=0.2, value_size=32)
    pack, table = rl.Pack(LENGTHS), rope_table(8, max(LENGTHS))
    torch.manual_seed(0)
    inputs = [torch.randn(sum(LENGTHS), 4, 40), torch.randn(sum(LENGTHS), 40), 1 + torch.rand(32)]

    def ours(query: Tensor, state: Tensor, weight: Tensor) -> Tensor:
        turned, states = rl.latent_rope(query[..., 32:], state, weight, pack, table, 1e-6, interleaved=interleaved)
        return rl.attention(torch.cat((query[..., :32], turned), 2), states, pack, spec)

    def right(query: Tensor, state: Tensor, weight: Tensor) -> Tensor:
        results = []
        for q, part in zip(query.split(LENGTHS), state.split(LENGTHS), strict=True):
            rows = table.double()[: len(part), None]
            halves = [x[..., -8:] for x in (q, part[:, None])]
            if interleaved:
                halves = [torch.cat((x[..., 0::2], x[..., 1::2]), -1) for x in halves]
            turned = [_turn(x, rows) for x in halves]
            keys = torch.cat((_norm64(part[:, :32], weight, 1e-6), turned[1][:, 0]), 1)
            scores = torch.cat((q[..., :32], turned[0]), 2).transpose(0, 1) @ keys.t() * spec.scale
            hidden = torch.ones(len(part), len(part), dtype=torch.bool).triu(1)
            results.append((scores.masked_fill(hidden, float("-inf")).softmax(-1) @ keys[:, :32]).transpose(0, 1))
        return torch.cat(results)

    _compare(ours, right, inputs, dtype)


def test_RL_N2_mods_that_change_scores() -> None:
    mods = AttentionMods(score_mod=lambda score, b, h, q, kv: score * (1 + h) - 0.01 * score * score + (q - kv) % 3)
    spec = dataclasses.replace(SPEC, mods=mods)

    def change(scores: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        heads = torch.arange(1, 5)[:, None, None]
        return scores * heads - 0.01 * scores * scores + (q - kv) % 3

    torch.manual_seed(0)
    inputs = [torch.randn(sum(LENGTHS), 8 * 16), 1 + torch.rand(16), 1 + torch.rand(16)]
    _compare(_ours(spec, rl.Pack(LENGTHS)), lambda *t: _attention64(*t, spec, change), inputs, torch.float32)


def test_a_mod_with_learned_parts_is_refused() -> None:
    slope = torch.nn.Parameter(torch.tensor(0.5))
    mods = AttentionMods(score_mod=lambda score, b, h, q, kv: score + slope * (kv - q), name="learned")
    pack, spec = rl.Pack(LENGTHS), dataclasses.replace(SPEC, mods=mods)
    qkv = torch.randn(sum(LENGTHS), 8 * 16, requires_grad=True)
    out = _ours(spec, pack)(qkv, torch.ones(16), torch.ones(16))
    with pytest.raises(ValueError, match="requires a gradient"):
        out.sum().backward()


@pytest.mark.parametrize("form", ["parameters", "ids", "mask"])
def test_RL_N2_a_support_has_the_same_gradient_in_every_form(form: str) -> None:
    torch.manual_seed(0)
    logits, ids = torch.randn(33, 50), torch.zeros(33, dtype=torch.int64)
    order = logits.topk(5).indices
    ids = order[:, 2].clone()
    mask = torch.zeros(33, 50, dtype=torch.bool).scatter_(1, order, True)
    padded = torch.cat((order, torch.full((33, 2), -1)), 1)
    support = {"parameters": rl.Truncation(top_k=5), "ids": padded, "mask": mask}[form]

    def right(x: Tensor) -> Tensor:
        kept = (x / 0.7).masked_fill(~mask, float("-inf"))
        return kept.log_softmax(-1).gather(1, ids[:, None])[:, 0]

    _compare(lambda x: rl.token_logprob(x, ids, 0.7, support).logprobs, right, [logits], torch.float32)


def test_a_row_whose_support_names_no_token_is_not_cut() -> None:
    logits, ids = torch.randn(2, 9, requires_grad=True), torch.tensor([3, 5])
    whole = rl.token_logprob(logits, ids)
    for support in (torch.tensor([[3, 4], [-1, -1]]), torch.tensor([[0, 0, 0, 1, 1, 0, 0, 0, 0], [0] * 9]).bool()):
        found = rl.token_logprob(logits, ids, 1.0, support)
        assert found.logprobs[1] == whole.logprobs[1] and found.logprobs[0] > whole.logprobs[0]


@pytest.mark.parametrize(
    "wrong", [{"top_p": 0.0}, {"top_p": 1.5}, {"top_p": float("nan")}, {"min_p": 2.0}, {"top_k": -7}]
)
def test_a_truncation_refuses_what_the_sampler_refuses(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        rl.Truncation(**wrong)


@pytest.mark.parametrize("scale", [0.01, 1.0, 30.0, 600.0])
def test_RL_N1_entropies_of_large_logits_are_as_exact_as_small_ones(scale: float) -> None:
    """They are no difference of sums as large as logits; and never below 0."""
    torch.manual_seed(0)
    logits = torch.randn(64, 500) * scale
    logs = logits.double().log_softmax(-1)
    found = rl.token_logprob(logits, logits.argmax(1)).entropy
    assert (found - -(logs.exp() * logs).sum(1)).abs().max() < 2e-6 * max(1.0, float(found.max()))
    assert found.min() >= 0.0


def test_a_token_outside_of_the_support_has_no_gradient() -> None:
    logits = torch.randn(2, 9, requires_grad=True)
    found = rl.token_logprob(logits, torch.tensor([3, 5]), 1.0, torch.tensor([[3, 4], [6, 7]])).logprobs
    assert found.isneginf().tolist() == [False, True]
    found.exp().sum().backward()
    assert (
        logits.grad is not None and logits.grad[0].any() and not logits.grad[1].any() and logits.grad.isfinite().all()
    )


def test_RL_N2_a_weight_that_is_used_twice_sums_its_gradients() -> None:
    ids = torch.randint(30, (9,))

    def ours(w: Tensor) -> Tensor:
        return rl.head_logprob(torch.nn.functional.embedding(ids, w), w, ids).logprobs

    def right(w: Tensor) -> Tensor:
        return (w[ids] @ w.t()).log_softmax(-1).gather(1, ids[:, None])[:, 0]

    _compare(ours, right, [torch.randn(30, 16) / 4], torch.float32)


def test_nothing_as_large_as_tokens_by_vocab_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the head, in either direction: the largest tensor is a block of rows."""
    monkeypatch.setitem(logprob_of_trainers._AT_ONCE, "cpu", 8 * 5000)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            result = function(*args, **(kwargs or {}))
            if isinstance(result, Tensor) and result.dim() == 2 and result.shape[1] == 5000:
                largest = max(largest, result.shape[0])
            return result

    hidden, weight = torch.randn(100, 16, requires_grad=True), torch.randn(5000, 16, requires_grad=True)
    with Watch():
        rl.head_logprob(hidden, weight, torch.zeros(100, dtype=torch.int64)).logprobs.sum().backward()
    assert 0 < largest <= 8
