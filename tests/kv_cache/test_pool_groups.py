"""Groups of every kind over one backing allocation: pages, views, bytes."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from octavo.arch import Arch, Latent, LayerKind
from octavo.groups import WHOLE, block_bytes, make_groups, pages_differ, table_of_each
from octavo.kv_cache.layout import LAYOUTS
from octavo.kv_cache.pool import KVCachePool
from octavo.ops.zero_blocks import zero_blocks

CPU = torch.device("cpu")
ARCH = Arch(
    name="Qwen3ForCausalLM", dtype="bfloat16", vocab_size=100, hidden_size=64, intermediate_size=64, num_heads=4,
    num_kv_heads=2, head_size=16, max_position=2048, norm_eps=1e-6, layers=(LayerKind(),) * 2,
)  # fmt: skip
LATENT = dataclasses.replace(
    ARCH, num_kv_heads=1, head_size=40,
    latent=Latent(latent_size=32, rope_size=8, nope_size=16, value_size=16),
)  # fmt: skip


def make_pool(arch: Arch, layout: str, *, num_blocks: int = 6, sizes: tuple[int | None, ...] = ()) -> KVCachePool:
    groups = make_groups(arch, 16, 2)
    return KVCachePool(
        groups, num_blocks=num_blocks, dtype=torch.bfloat16, device=CPU, layout=LAYOUTS[layout],
        tables=table_of_each(groups, sizes),
    )  # fmt: skip


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
