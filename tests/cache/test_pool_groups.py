"""Groups of every kind over one backing allocation: pages, views, bytes."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.cache.groups import WHOLE, block_bytes, make_groups, pages_differ, table_of_each
from octavo.cache.layout import LAYOUTS
from octavo.cache.pool import KVCachePool
from octavo.checkpoint.arch import Arch, Latent, LayerKind
from octavo.ops.cache_write.zero_blocks import zero_blocks

CPU = torch.device("cpu")
ARCH = Arch(
    name="Qwen3ForCausalLM",
    dtype="bfloat16",
    vocab_size=100,
    hidden_size=64,
    intermediate_size=64,
    num_heads=4,
    num_kv_heads=2,
    head_size=16,
    max_position=2048,
    norm_eps=1e-6,
    layers=(LayerKind(),) * 2,
)
LATENT = dataclasses.replace(
    ARCH,
    num_kv_heads=1,
    head_size=40,
    latent=Latent(latent_size=32, rope_size=8, nope_size=16, value_size=16),
)


def make_pool(arch: Arch, layout: str, *, num_blocks: int = 6, sizes: tuple[int | None, ...] = ()) -> KVCachePool:
    groups = make_groups(arch, 16, 2)
    return KVCachePool(
        groups,
        num_blocks=num_blocks,
        dtype=torch.bfloat16,
        device=CPU,
        layout=LAYOUTS[layout],
        tables=table_of_each(groups, sizes),
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_latent_layer_keeps_one_head_of_latent_and_key(layout: str) -> None:
    (group,) = make_groups(LATENT, 16)
    assert (group.kind, group.num_heads, group.num_channels, group.tokens_per_state) == ("mla", 1, 40, 1)
    assert block_bytes([group], 2) == 2 * 16 * 40 * 2
    whole, split = make_pool(LATENT, layout), make_pool(LATENT, layout, sizes=(4,))
    assert whole.views[1].shape == (6, 1, 16, 40) and whole.views[1].stride(3) == 1
    assert split.views[1].shape[1:] == (1, 4, 40)
    assert split.block_view(1).shape == (6, 4, 1, 4, 40)


def test_compressed_states_are_fewer_than_tokens() -> None:
    arch = dataclasses.replace(LATENT, layers=(LayerKind(tokens_per_state=4),) * 2)
    pool = make_pool(arch, "LBHNC")
    assert pool.views[0].shape == (6, 1, 4, 40)
    assert make_pool(arch, "LBHNC", sizes=(8,)).views[0].shape == (12, 1, 2, 40)
    with pytest.raises(ValueError, match="Kernel block size 2 must be a multiple of tokens_per_state=4"):
        make_pool(arch, "LBHNC", sizes=(2,))
    with pytest.raises(ValueError, match="block_size=16 must be a multiple of tokens_per_state=3 of layer 1"):
        make_groups(dataclasses.replace(arch, layers=(LayerKind(), LayerKind(tokens_per_state=3))), 16)


def test_a_recurrent_layer_keeps_one_state_of_a_request() -> None:
    """Blocks of small pages grow; pages that still differ need a layout with a block's layers together (L3.11)."""
    arch = dataclasses.replace(ARCH, layers=(LayerKind(), LayerKind(state_bytes=5000)))
    attention, state = groups = make_groups(arch, 16, 2)
    assert (attention.kind, attention.block_size) == ("full", 32), "twice 2048 bytes a page, of at most 5120"
    assert (state.kind, state.block_size, state.zero_fresh_blocks) == ("mamba", WHOLE, True)
    assert [group.num_blocks(100) for group in groups] == [4, 1]
    assert pages_differ(groups, 2) and block_bytes(groups, 2) == 5120
    with pytest.raises(ValueError, match="KV cache layout LBHNC cannot express this model's mixed page sizes"):
        make_pool(arch, "LBHNC")
    pool = make_pool(arch, "BLNHC")
    assert pool.views[1].shape == (6, 5000) and pool.views[1].dtype == torch.uint8
    assert pool.views[0].shape == (6, 2, 32, 32)
    pool.buffer.view(torch.uint8).fill_(1)
    zero_blocks(pool.data, [2])
    for view in pool.views:
        assert not view[2].any() and view[1].all() and view[3].all()


def test_an_encoder_layer_keeps_nothing() -> None:
    arch = dataclasses.replace(ARCH, layers=(LayerKind(), LayerKind(causal=False), LayerKind()))
    groups = make_groups(arch, 16, 2)
    assert [group.kind for group in groups] == ["full", "encoder_only"]
    assert groups[1].num_blocks(1000) == 0 and groups[1].page_bytes(2) == 0
    pool = make_pool(arch, "LBHNC", sizes=(16, None))
    assert pool.views[1].numel() == 0 and pool.views[2].shape == (6, 2, 16, 32)
    assert block_bytes(groups, 2) == block_bytes(groups[:1], 2)


KINDS = [
    LayerKind(), LayerKind(window=40), LayerKind(chunk=64), LayerKind(state_bytes=700), LayerKind(state_bytes=9000),
    LayerKind(tokens_per_state=4), LayerKind(causal=False),
]  # fmt: skip


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.sampled_from(KINDS), min_size=1, max_size=7),
    st.sampled_from(list(LAYOUTS)),
    st.sampled_from([1, 2, 4]),
    st.integers(0, 2**32),
)
def test_L3_6_groups_share_blocks_and_no_bytes(layers: list[LayerKind], layout: str, ratio: int, seed: int) -> None:
    """Each block is written by the layers of one group: all is there afterwards, and nothing else has changed."""
    arch = dataclasses.replace(ARCH, layers=tuple(layers))
    groups = make_groups(arch, 16, 2)
    if pages_differ(groups, 2) and not LAYOUTS[layout].block_outermost:
        return
    sizes = [None if group.kind == "encoder_only" else group.block_size // ratio for group in groups]
    try:
        pool = make_pool(arch, layout, num_blocks=12, sizes=tuple(sizes))
    except ValueError as error:
        assert "do not store pages" in str(error) and ratio > 1
        return
    assert pool.data.shape[1] == 12 and pool.data[:, 0].numel() == pool.block_bytes
    pool.buffer.view(torch.uint8).fill_(0xAB)
    rng = random.Random(seed)
    owner = [rng.randrange(-1, len(groups)) for _ in range(12)]  # -1: nobody
    written = {}
    for layer in range(len(layers)):
        if not pool.views[layer].numel():
            continue
        view = pool.block_view(layer).view(torch.uint8)
        for block, group in enumerate(owner):
            if group < 0 or layer not in groups[group].layers:
                continue
            written[layer, block] = torch.randint(0, 256, view[block].shape, dtype=torch.uint8)
            view[block] = written[layer, block]
    for (layer, block), expected in written.items():
        assert torch.equal(pool.block_view(layer).view(torch.uint8)[block], expected)
    for block, group in enumerate(owner):
        if group < 0:
            assert (pool.data[:, block] == 0xAB).all()
