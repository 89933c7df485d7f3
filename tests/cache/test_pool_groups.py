"""Groups of every kind over one backing allocation: pages, views, bytes."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.cache.groups import CacheGroup, block_bytes, make_groups, pages_differ, table_of_each
from octavo.cache.layout import LAYOUTS
from octavo.cache.parts import layer_bytes, waste
from octavo.cache.pool import KVCachePool
from octavo.cache.specs import AttentionSpec, LayerSpec, NoCache, StateSpec, StateTensor
from octavo.ops.cache_write.zero_blocks import zero_blocks

CPU = torch.device("cpu")
FULL = AttentionSpec(num_heads=4, num_kv_heads=2, head_size=16, scale=0.25)
LATENT = AttentionSpec(num_heads=4, num_kv_heads=1, head_size=40, scale=0.25, value_size=32)


def make_state(num_heads: int, size: int, *, chunk: int = 64, width: int = 24) -> StateSpec:
    """States of `num_heads` squares in float32, and inputs of `width` channels and two gates."""
    return StateSpec(
        states=(StateTensor("s", (num_heads, size, size), "float32"), StateTensor("last", (width, 3), "bfloat16")),
        inputs=(StateTensor("x", (width,), "bfloat16"), StateTensor("gates", (num_heads, 2), "float32")),
        chunk=chunk,
    )


def make_pool(
    specs: Sequence[LayerSpec], layout: str, *, num_blocks: int = 6, sizes: tuple[int | None, ...] = ()
) -> KVCachePool:
    groups = make_groups(specs, 16, 2)
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
    (group,) = make_groups([LATENT] * 2, 16)
    assert (group.kind, group.num_heads, group.num_channels, group.tokens_per_state) == ("mla", 1, 40, 1)
    assert block_bytes([group], 2) == 2 * 16 * 40 * 2
    whole, split = make_pool([LATENT] * 2, layout), make_pool([LATENT] * 2, layout, sizes=(4,))
    assert whole.views[1].shape == (6, 1, 16, 40) and whole.views[1].stride(3) == 1
    assert split.views[1].shape[1:] == (1, 4, 40)
    assert split.block_view(1).shape == (6, 4, 1, 4, 40)


def test_compressed_states_are_fewer_than_tokens() -> None:
    specs = [dataclasses.replace(LATENT, tokens_per_state=4)] * 2
    pool = make_pool(specs, "LBHNC")
    assert pool.views[0].shape == (6, 1, 4, 40)
    assert make_pool(specs, "LBHNC", sizes=(8,)).views[0].shape == (12, 1, 2, 40)
    with pytest.raises(ValueError, match="Kernel block size 2 must be a multiple of tokens_per_state=4"):
        make_pool(specs, "LBHNC", sizes=(2,))
    with pytest.raises(ValueError, match="block_size=16 must be a multiple of tokens_per_state=3 of layer 1"):
        make_groups([LATENT, dataclasses.replace(LATENT, tokens_per_state=3)], 16)


def test_a_layer_with_states_is_in_two_groups_and_no_block_grows() -> None:
    """Blocks keep their 16 tokens; a state of 1 MiB takes several (H.7). All bytes of a block lie together (L3.11)."""
    attention, inputs, state = groups = make_groups([FULL, make_state(16, 128), NoCache()], 16, 2)
    assert [group.kind for group in groups] == ["full", "inputs", "state"]
    assert [group.block_size for group in groups] == [16, 16, 64] and block_bytes(groups, 2) == 16 * 2 * 64
    assert (attention.layers, inputs.layers, state.layers) == ((0,), (1,), (1,))
    assert [group.num_entries(n) for n in (1, 48, 49, 64, 112, 113) for group in (state,)] == [0, 0, 1, 1, 1, 2]
    assert state.num_blocks(64) == state.parts.blocks >= (1 << 20) // 2048
    late = make_groups([FULL, make_state(16, 128), NoCache()], 16, 2, drafts=True)[-1]
    assert late == dataclasses.replace(state, unit=1)
    assert [late.num_entries(n) for n in (1, 49, 63, 64, 112, 127, 128)] == [0, 0, 0, 1, 1, 1, 2]
    for group in (state, late):  # what is written is no other for having blocks
        assert [group.num_written(n) // group.parts.blocks for n in (1, 49, 63, 64, 127, 128)] == [0, 0, 0, 1, 1, 2]
    assert [inputs.num_written(n) for n in (1, 16, 17)] == [inputs.num_blocks(n) for n in (1, 16, 17)]
    with pytest.raises(ValueError, match="KV cache layout LBHNC cannot express this model's mixed page sizes"):
        make_pool([FULL, make_state(16, 128)], "LBHNC")
    with pytest.raises(ValueError, match=r"blocks of 48 tokens do not divide blocks of 64.*set block_size to a power"):
        make_groups([FULL, make_state(16, 128)], 48)
    with pytest.raises(ValueError, match="no layer of the model keeps anything"):
        make_groups([NoCache()], 16)
    with pytest.raises(ValueError, match="a StateSpec has states, inputs and a chunk"):
        make_state(1, 8, chunk=1)


def qwen3_next() -> list[LayerSpec]:
    """Of its 48 layers three in four are gated delta nets."""
    attention = AttentionSpec(num_heads=16, num_kv_heads=2, head_size=256, scale=0.0625)
    delta = StateSpec(
        states=(StateTensor("s", (32, 128, 128), "float32"), StateTensor("conv", (8192, 3), "bfloat16")),
        inputs=(StateTensor("conv", (8192,), "bfloat16"), StateTensor("gates", (32, 2), "float32")),
        chunk=64,
    )
    return [delta, delta, delta, attention] * 12


def nemotron_h() -> list[LayerSpec]:
    """52 layers: Mamba-2, MLPs that keep nothing, and six with attention."""
    attention = AttentionSpec(num_heads=32, num_kv_heads=8, head_size=128, scale=0.09)
    mamba = StateSpec(
        states=(StateTensor("s", (128, 64, 128), "float32"), StateTensor("conv", (10240, 3), "bfloat16")),
        inputs=(StateTensor("conv", (10240,), "bfloat16"), StateTensor("dt", (128,), "float32")),
        chunk=64,
    )
    return [mamba, NoCache()] * 22 + [attention] * 6 + [mamba, mamba]


@pytest.mark.parametrize("itemsize", [1, 2])
@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize(
    "specs",
    [qwen3_next(), nemotron_h(), [FULL] * 4 + [make_state(16, 128, width=2048)] * 12],
    ids=["qwen3-next", "nemotron-h", "1 MiB"],
)
def test_H_7_pages_of_states_waste_little_and_no_block_grows(
    specs: list[LayerSpec], block_size: int, itemsize: int
) -> None:
    """At most a quarter of the bytes, with blocks of a power of two tokens, whatever the size of a state."""
    groups = make_groups(specs, block_size, itemsize)
    size = block_bytes(groups, itemsize)
    for group in groups:
        assert group.block_size == (64 if group.kind == "state" else block_size)
        if group.is_attention:
            assert group.used_bytes(itemsize) >= 0.95 * size
        else:
            used = len(group.layers) * layer_bytes(group.parts.tensors)
            assert waste(group.parts, len(group.layers), size) == 1 - used / (group.parts.blocks * size) <= 0.25
            assert group.used_bytes(itemsize) <= size
    _, inputs, state = groups
    assert state.layers == inputs.layers == tuple(i for i, spec in enumerate(specs) if isinstance(spec, StateSpec))


def test_an_encoder_layer_keeps_nothing() -> None:
    specs = [FULL, dataclasses.replace(FULL, causal=False), FULL]
    groups = make_groups(specs, 16, 2)
    assert [group.kind for group in groups] == ["full", "encoder_only"]
    assert groups[1].num_blocks(1000) == 0 and groups[1].page_bytes(2) == 0
    pool = make_pool(specs, "LBHNC", sizes=(16, None))
    assert pool.views[1].numel() == 0 and pool.views[2].shape == (6, 2, 16, 32)
    assert block_bytes(groups, 2) == block_bytes(groups[:1], 2)


KINDS = [
    FULL,
    dataclasses.replace(FULL, window=40),
    dataclasses.replace(FULL, chunk=64),
    make_state(3, 8),
    make_state(8, 16, chunk=32, width=100),
    dataclasses.replace(LATENT, tokens_per_state=4),
    dataclasses.replace(FULL, causal=False),
    NoCache(),
]


def views_of(pool: KVCachePool, group: CacheGroup, layer: int, entry: Sequence[int]) -> Iterator[torch.Tensor]:
    """All that a layer has in the blocks of one entry of its group."""
    if group.is_attention:
        if pool.views[layer].numel():
            yield from (pool.block_view(layer)[block] for block in entry)
        return
    view = (pool.states if group.kind == "state" else pool.inputs)[layer]
    for tensor in view.tensors:
        yield from (tensor[entry[block], place] for block, place in view.places())


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.sampled_from(KINDS), min_size=1, max_size=7),
    st.sampled_from(list(LAYOUTS)),
    st.sampled_from([1, 2, 4]),
    st.integers(0, 2**32),
)
def test_L3_6_groups_share_blocks_and_no_bytes(specs: list[LayerSpec], layout: str, ratio: int, seed: int) -> None:
    """Each entry is written by the layers of one group: all is there afterwards, and nothing else has changed."""
    if all(isinstance(spec, NoCache) for spec in specs):
        return
    groups = make_groups(specs, 16, 2)
    if pages_differ(groups, 2) and not LAYOUTS[layout].block_outermost:
        return
    if not block_bytes(groups, 2):
        return
    rng = random.Random(seed)
    ids = list(range(1, 2 + 3 * sum(group.parts.blocks for group in groups)))
    rng.shuffle(ids)
    sizes = [None if group.kind == "encoder_only" else group.block_size // ratio for group in groups]
    try:
        pool = make_pool(specs, layout, num_blocks=len(ids) + 1, sizes=tuple(sizes))
    except ValueError as error:
        assert "do not store pages" in str(error) and ratio > 1
        return
    assert pool.data.shape[1] == len(ids) + 1 and pool.data[:, 0].numel() == pool.block_bytes
    data = pool.buffer.view(torch.uint8).fill_(0xFF)  # a NaN in every type
    untouched, written = set(range(len(ids) + 1)), []
    for group in groups:
        for _ in range(rng.randrange(3)):
            entry = [ids.pop() for _ in range(group.parts.blocks)]
            untouched -= set(entry)
            for layer in group.layers:
                for view in views_of(pool, group, layer, entry):
                    assert bool(view.isnan().all()), "nobody else has written there"
                    written.append((view, torch.randn(view.shape).to(view.dtype)))
                    view.copy_(written[-1][1])
    assert all(torch.equal(view, expected) for view, expected in written)
    assert (pool.data[:, sorted(untouched)] == 0xFF).all()
    zero_blocks(pool.data, sorted(set(range(len(ids))) - untouched)[:1])
    assert (pool.data[:, sorted(untouched)] == 0xFF).all() and data.data_ptr() == pool.buffer.data_ptr()
