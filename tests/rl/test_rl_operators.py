"""RL.N1: the operators have the sampler's bits in every packing; what they refuse."""

from __future__ import annotations

import dataclasses
from unittest import mock

import pytest
import torch

from octavo import rl
from octavo.attention import AttentionMods, request_field
from octavo.attention.mods.choice import with_mods
from octavo.cache.specs import AttentionSpec
from octavo.checkpoint.arch import Moe
from octavo.ops import native
from octavo.ops.gemm import linear, pack_linear
from octavo.ops.rope import rope_table
from octavo.rl.autograd import packed_weights
from rl_rig import DTYPES, flip_lowest_bit

SPEC = AttentionSpec(num_heads=4, num_kv_heads=2, head_size=16, scale=0.25)
LENGTHS = [1, 31, 32, 33, 511, 512, 513, 2047, 2048, 2049]


def _attend(
    qkv: torch.Tensor,
    pack: rl.Pack,
    spec: AttentionSpec = SPEC,
    backend: str | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    cos_sin = rope_table(spec.head_size, max(pack.lengths))
    weight = torch.linspace(0.5, 2, spec.head_size)
    q, states = rl.qk_norm_rope(qkv, pack, cos_sin, spec, weight, weight, 1e-6)
    return rl.attention(q, states, pack, spec, backend, sinks)


@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_RL_N1_a_packs_order_and_cut_change_no_bit(dtype: torch.dtype, window: int) -> None:
    spec = AttentionSpec(num_heads=4, num_kv_heads=2, head_size=16, scale=0.25, window=window)
    torch.manual_seed(0)
    parts = [torch.randn(length, 8 * 16).to(dtype) for length in LENGTHS]
    alone = [_attend(part, rl.Pack([len(part)]), spec) for part in parts]
    order = torch.randperm(len(parts)).tolist()
    pack = rl.Pack([LENGTHS[i] for i in order])
    together = pack.split(_attend(torch.cat([parts[i] for i in order]), pack, spec))
    assert all(torch.equal(together[place], alone[i]) for place, i in enumerate(order))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_RL_N1_sinks_are_the_samplers(dtype: torch.dtype) -> None:
    """In any packing; and they count, as in the reference implementation."""
    spec, sinks = dataclasses.replace(SPEC, sinks=True), torch.tensor([2.0, -1.0, 0.5, 9.0])
    torch.manual_seed(0)
    parts = [torch.randn(length, 8 * 16).to(dtype) for length in (600, 1, 33)]
    pack = rl.Pack([600, 1, 33])
    together = _attend(torch.cat(parts), pack, spec, None, sinks)
    alone = [_attend(part, rl.Pack([len(part)]), spec, None, sinks) for part in parts]
    assert torch.equal(together, torch.cat(alone))
    reference, without = _attend(torch.cat(parts), pack, spec, "reference", sinks), _attend(torch.cat(parts), pack)
    assert float((together - reference).abs().max()) < 0.01 < 1 < float((together - without).abs().max())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_RL_N1_every_row_count_and_joined_weights(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weights = torch.randn(257, 48).to(dtype), [torch.randn(n, 48).to(dtype) for n in (40, 24, 24)]
    biases = [torch.randn(40).to(dtype), None, torch.randn(24)]
    joined = torch.cat([torch.zeros(24) if each is None else each.float() for each in biases[1:]])
    fused = linear(x, pack_linear(torch.cat(weights)), torch.cat((biases[0].float(), joined)))  # type: ignore[union-attr]
    for count in range(1, 258):
        assert torch.equal(rl.linear(x[:count], weights, biases), fused[:count])


@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
def test_RL_N1_the_reference_implementations_are_rounded_once(out_dtype: torch.dtype) -> None:
    """Where no compiled operators serve, a product of another dtype than its rows' is the sampler's as well."""
    x, weight = torch.randn(9, 48).bfloat16(), torch.randn(40, 48).bfloat16()
    with native.disabled():
        expected = linear(x, pack_linear(weight), None, out_dtype)
        assert torch.equal(rl.linear(x, weight, out_dtype=out_dtype), expected)


def test_a_weight_is_packed_when_its_bits_changed_and_never_else() -> None:
    weight, x = torch.nn.Parameter(torch.randn(40, 48)), torch.eye(48)  # the product is the weight, bit for bit
    with mock.patch.object(packed_weights, "pack_linear", wraps=pack_linear) as packs:
        _compute_while_it_changes(weight, x, packs)


def _compute_while_it_changes(weight: torch.nn.Parameter, x: torch.Tensor, packs: mock.Mock) -> None:
    first = rl.linear(x, weight)
    rl.linear(x, weight).sum().backward()
    assert packs.call_count == 1
    optimizer = torch.optim.SGD([weight], 0.0)
    optimizer.step()
    assert torch.equal(rl.linear(x, weight), first) and packs.call_count == 1
    flip_lowest_bit(weight.data, 7)
    assert not torch.equal(rl.linear(x, weight), first) and packs.call_count == 2
    flip_lowest_bit(weight.data, 7)
    flipped = weight.data.clone()
    flipped[:, 1::2].neg_()
    for changed in (flipped, weight.data[[1, 0, *range(2, 40)]], weight.data[:, [2, 3, 0, 1, *range(4, 48)]]):
        weight.data.copy_(changed)
        assert torch.equal(rl.linear(x, weight), rl.linear(x, torch.nn.Parameter(changed.clone())))


def test_a_weights_memory_may_be_let_go_between_two_forwards() -> None:
    """FSDP resizes the storage of a weight that it had gathered: an array of NumPy over it would forbid that."""
    weights = [torch.nn.Parameter(torch.randn(40, 48)), torch.nn.Parameter(torch.randn(2, 40, 48))]
    rl.linear(torch.eye(48), weights[0]).sum().backward()
    rl.head_linear(torch.randn(3, 4, 48), weights[0], slice(0, 5))
    packed_weights.packed(weights[1], torch.float32, 1)
    assert all(weight.untyped_storage().resizable() for weight in weights)


def test_packed_forms_go_with_their_weight() -> None:
    before = len(packed_weights._PACKED)
    weight = torch.randn(4, 8)
    rl.linear(torch.randn(2, 8), weight)
    assert len(packed_weights._PACKED) == before + 1
    del weight
    assert len(packed_weights._PACKED) == before


def test_mods_and_their_fields_are_the_packs() -> None:
    group = request_field("group")
    mods = AttentionMods(mask_mod=lambda b, h, q, kv: (q - kv) % group[b] == 0, fields=(group,))
    spec = AttentionSpec(num_heads=4, num_kv_heads=2, head_size=16, scale=0.25, mods=mods)
    parts = [torch.randn(length, 8 * 16) for length in (20, 9)]
    alone = [
        _attend(part, rl.Pack([len(part)], fields={"group": torch.tensor([own])}), spec)
        for part, own in zip(parts, (2, 3), strict=True)
    ]
    pack = rl.Pack([20, 9], fields={"group": torch.tensor([2, 3])})
    assert torch.equal(_attend(torch.cat(parts), pack, spec), torch.cat(alone))
    with pytest.raises(ValueError, match="fields group"):
        _attend(torch.cat(parts), rl.Pack([20, 9]), spec)


def test_mods_that_look_ahead_need_the_prompts() -> None:
    spec = with_mods(SPEC, AttentionMods(mask_mod=lambda b, h, q, kv: kv >= 0, causal=False, name="both ways"))
    with pytest.raises(ValueError, match="prompt_lengths"):
        _attend(torch.randn(9, 8 * 16), rl.Pack([9]), spec)
    assert _attend(torch.randn(9, 8 * 16), rl.Pack([9], prompt_lengths=[6]), spec).isfinite().all()


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        rl.Pack([3, 0])
    with pytest.raises(ValueError, match=r"ids must be \[4\]"):
        rl.Pack([4], torch.tensor([1]))
    with pytest.raises(ValueError, match="lengths alone"):
        rl.Pack([4]).next_tokens()
    with pytest.raises(ValueError, match="temperature must be above 0"):
        rl.token_logprob(torch.zeros(1, 5), torch.zeros(1, dtype=torch.int64), 0.0)
    with pytest.raises(ValueError, match=r"logits must be float32, .* got torch\.float64"):
        rl.token_logprob(torch.zeros(1, 5, dtype=torch.float64), torch.zeros(1, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"^octavo\.rl's linear: CPU operators take float32 and bfloat16, "):
        rl.linear(torch.zeros(1, 4), torch.zeros(2, 4), out_dtype=torch.float64)
    with pytest.raises(ValueError, match="unknown activation"):
        rl.gated(torch.zeros(1, 4), "relu")
    with pytest.raises(ValueError, match="longer than the 4 rotary positions"):
        rl.qk_norm_rope(torch.zeros(5, 8 * 16), rl.Pack([5]), rope_table(16, 4), SPEC)
    sinking = dataclasses.replace(SPEC, sinks=True)
    for spec, sinks in ((sinking, None), (SPEC, torch.zeros(4)), (sinking, torch.zeros(3))):
        with pytest.raises(ValueError, match="sinks must be"):
            rl.attention(torch.zeros(5, 4, 16), torch.zeros(32, 2, 32), rl.Pack([5]), spec, sinks=sinks)
    x, facts = torch.zeros(3, 8), Moe(num_experts=2, experts_per_token=1, expert_size=4, num_shared=1)
    weights = torch.zeros(2, 8), torch.zeros(2, 8, 8), torch.zeros(2, 8, 4)
    with pytest.raises(ValueError, match="needs shared under Moe"):
        rl.moe(x, *weights, facts)
    with pytest.raises(ValueError, match="has no use for correction"):
        rl.moe(x, *weights, facts, shared=x, correction=torch.zeros(2))
    with pytest.raises(ValueError, match="a multiple of 3 rows, got 8"):
        rl.head_linear(torch.zeros(5, 3, 4), torch.zeros(8, 4), slice(0, 2))
    with pytest.raises(ValueError, match=r"\[N, 5\] for rows of 5, got \[N, 4\]"):
        rl.head_linear(torch.zeros(5, 2, 5), torch.zeros(8, 4), slice(0, 2))
    with pytest.raises(ValueError, match="longer than the 4 rotary positions"):
        rl.latent_rope(
            torch.zeros(5, 2, 8),
            torch.zeros(5, 24),
            torch.ones(16),
            rl.Pack([5]),
            rope_table(8, 4),
            1e-6,
            interleaved=True,
        )


@pytest.mark.skipif(not native.available(), reason="chains are of compiled operators")
def test_a_pack_follows_the_chain_that_is_set_as_weights_do() -> None:
    """One that was computed before in another chain gives what a new one does."""
    spec = AttentionSpec(num_heads=2, num_kv_heads=1, head_size=32, scale=0.2)
    q = torch.randn(40, 2, 32, dtype=torch.bfloat16)
    old, results = rl.Pack([40]), {}
    states = torch.randn(old.num_slots, 1, 64, dtype=torch.bfloat16)
    try:
        for chain in ("pairs", "single"):
            native.set_bfloat16_chain(chain)
            results[chain] = old.attend(q, states, spec)
            assert torch.equal(results[chain], rl.Pack([40]).attend(q, states, spec))
    finally:
        native.set_bfloat16_chain("auto")
    assert not torch.equal(results["pairs"], results["single"])
