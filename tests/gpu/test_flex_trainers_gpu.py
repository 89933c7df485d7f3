"""The flex backend on a CUDA device has the bits of a trainer's attention: torch's call, and Octavo's."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "attention"))

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import octavo.attention as A
from flex_gpu_rig import BF16, DEVICE, LIMITS, PLAIN, Step, history, odd_keys
from octavo.attention.base import Setup
from octavo.attention.flex.backend import FlexBackend
from octavo.attention.mods import AttentionMods

pytestmark = pytest.mark.gpu


TRAINER = {
    "causal": (PLAIN, lambda b, h, q, kv: q >= kv, None),
    "window": (dataclasses.replace(PLAIN, window=150), lambda b, h, q, kv: (q >= kv) & (q - kv < 150), None),
    "soft cap": (
        dataclasses.replace(PLAIN, soft_cap=20.0),
        lambda b, h, q, kv: q >= kv,
        lambda s, b, h, q, kv: 20.0 * torch.tanh(s / 20.0),
    ),
}


@pytest.mark.parametrize("size", [16, 64])
@pytest.mark.parametrize("name", TRAINER)
def test_K4_8_a_trainers_flex_attention_has_the_same_bits(name: str, size: int) -> None:
    """Plain K and V, torch's own create_block_mask and the same sizes: the bits of prefill, chunks and decode."""
    spec, mask, score = TRAINER[name]
    made, length = history(3, 1024), 1024  # torch takes every block of a ragged last query block as partial
    q, key, value = made.q[None].transpose(1, 2), *made.kv[None].transpose(1, 2).chunk(2, dim=-1)
    block_mask = create_block_mask(mask, 1, None, length, length, device="cuda", BLOCK_SIZE=(size, size))
    options = {"BLOCK_M": size, "BLOCK_N": size, "FORCE_USE_FLEX_ATTENTION": True, "IS_DIVISIBLE": False}
    trained = torch.compile(flex_attention, dynamic=False)(
        q.contiguous(),
        key.contiguous(),
        value.contiguous(),
        score_mod=score,
        block_mask=block_mask,
        scale=spec.scale,
        enable_gqa=True,
        kernel_options=options,
    )
    trained = trained[0].transpose(0, 1)
    options = dict.fromkeys(("flex_attn_block_m", "flex_attn_block_n", "flex_attn_q_block_size"), size)
    setup = Setup(**LIMITS, num_blocks=800, block_size=size, options=options)
    backend = FlexBackend([spec], BF16, DEVICE, setup)
    assert torch.equal(Step([(made, length, length)], size).run(backend, spec), trained)
    for end in (1, 15, 16, 17, 500, 640, 1024):
        out = Step([(made, end, 1), (history(4, 700), 700, 3)], size, seed=end).run(backend, spec)
        assert torch.equal(out[:1], trained[end - 1 : end]), end


MINE = {
    "a user's": AttentionMods(mask_mod=odd_keys),
    "window and cap": A.and_(A.sliding_window(150), A.soft_cap(20.0)),
}


@pytest.mark.parametrize("name", MINE)
def test_K4_8_the_call_for_trainers_has_the_same_bits(name: str) -> None:
    sizes = dict.fromkeys(("flex_attn_block_m", "flex_attn_block_n", "flex_attn_q_block_size"), 64)
    made, spec = history(3, 1024), dataclasses.replace(PLAIN, mods=MINE[name])
    q, key, value = made.q[None].transpose(1, 2), *made.kv[None].transpose(1, 2).chunk(2, dim=-1)
    q, key, value = (x.contiguous() for x in (q, key, value))
    trained = A.flex_attention(
        q, key, value, MINE[name], scale=PLAIN.scale, sizes=sizes | {"flex_attn_kv_block_size": 64}
    )
    setup = Setup(**LIMITS, num_blocks=800, block_size=64, options=sizes)
    backend = FlexBackend([spec], BF16, DEVICE, setup)
    expected = trained[0].transpose(0, 1)
    for end, count in ((1024, 1024), (700, 130), (1024, 1), (65, 1)):
        out = Step([(made, end, count), (history(4, 700), 700, 3)], 64, seed=end).run(backend, spec)
        assert torch.equal(out[:count], expected[end - count : end]), end
