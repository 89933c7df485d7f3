"""Layouts: addresses, views, pages, whole blocks, and the choice of one."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence

import pytest
import torch

from octavo.cache.groups import CacheGroup, table_of_each
from octavo.cache.layout import (
    ALIASES,
    LAYOUTS,
    CacheShape,
    Layout,
    block_rows,
    extract_blocks,
    inject_blocks,
    layout_by_name,
    resolve_layout,
    split_kv,
)
from octavo.cache.pool import KVCachePool
from octavo.config.engine_config import KV_CACHE_LAYOUTS, EngineConfig
from octavo.ops.cache_write.zero_blocks import zero_blocks

SHAPE = CacheShape(num_layers=3, num_blocks=5, num_heads=2, block_size=8, num_channels=4)
NUMEL = 3 * 5 * 2 * 8 * 4
ALL = tuple(LAYOUTS)


def numbered(dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """Element i holds i."""
    return torch.arange(NUMEL, dtype=dtype)


def byte_address(layout: Layout, shape: Sequence[int], itemsize: int, index: Sequence[int]) -> int:
    """Bytes from the start of the cache to the element at `index` = (layer, block, head, token, channel)."""
    return itemsize * sum(i * stride for i, stride in zip(index, layout.strides(shape), strict=True))


def layer_view(layout: Layout, buffer: torch.Tensor, shape: CacheShape, layer: int) -> torch.Tensor:
    """[blocks, H, N, C] of one layer."""
    layer_stride, block_stride, *_ = layout.strides(shape)
    return layout.page_view(buffer, layer * layer_stride, block_stride, shape)


class NhdCase:
    """The cache as (num_blocks, 2, block_size, heads, size), for those who think in it.

    K and V are halves of a token here, not of a head: these are other bytes than those of Octavo's layouts. `split_kv`
    is the same view of the layouts' own bytes.
    """

    @staticmethod
    def shape(num_blocks: int, block_size: int, num_heads: int, size: int) -> tuple[int, int, int, int, int]:
        """Blocks come first."""
        return num_blocks, 2, block_size, num_heads, size

    @staticmethod
    def stride_order(*, with_layers: bool = False) -> tuple[int, ...]:
        """The axes from outermost to innermost. With a layer axis before the others, layers lie inside blocks."""
        return (1, 0, 3, 2, 4, 5) if with_layers else (0, 2, 1, 3, 4)

    @staticmethod
    def view(buffer: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """`buffer`, flat, as `shape` (five axes, or six with the layers first)."""
        order = NhdCase.stride_order(with_layers=len(shape) == 6)
        physical = buffer.view([shape[axis] for axis in order])
        return physical.permute([order.index(axis) for axis in range(len(order))])


def test_the_setting_knows_the_layouts_and_their_aliases() -> None:
    assert tuple(LAYOUTS) == KV_CACHE_LAYOUTS
    assert layout_by_name("NHD") is LAYOUTS["LBNHC"] and layout_by_name("HND") is LAYOUTS["LBHNC"]
    assert ALIASES == {"HND": "LBHNC", "NHD": "LBNHC"}
    with pytest.raises(ValueError, match=r"'NHDX': known are LBHNC.*NHD"):
        layout_by_name("NHDX")
    with pytest.raises(ValueError, match=r"kv_cache_layout='BHLNC': must be one of LBHNC"):
        EngineConfig(kv_cache_layout="BHLNC")


@pytest.mark.parametrize(
    ("name", "value", "view_order", "properties"),
    [
        ("LBHNC", (0, 1, 2, 3, 4), (0, 1, 2, 3), (True, True, True, False)),
        ("LBNHC", (0, 1, 3, 2, 4), (0, 2, 1, 3), (True, False, True, False)),
        ("BLHNC", (1, 0, 2, 3, 4), (0, 1, 2, 3), (False, True, True, True)),
        ("BLNHC", (1, 0, 3, 2, 4), (0, 2, 1, 3), (False, False, True, True)),
    ],
)
def test_L3_table_of_properties(name: str, value: tuple, view_order: tuple, properties: tuple) -> None:
    layout = LAYOUTS[name]
    strides = layout.strides(SHAPE)
    assert layout.order == value and tuple(sorted(range(4), key=lambda axis: -strides[1 + axis])) == view_order
    block_contiguous = layer_view(layout, numbered(), SHAPE, 1)[2].is_contiguous()
    reach = 1 + sum((size - 1) * stride for size, stride in zip(SHAPE[2:], strides[2:], strict=True))
    found = (layout.layer_compact, block_contiguous, reach == SHAPE.page_numel, layout.block_outermost)
    assert found == properties


@pytest.mark.parametrize("name", ALL)
def test_addresses_and_views_agree_for_every_element(name: str) -> None:
    layout, buffer = LAYOUTS[name], numbered()
    views = [layer_view(layout, buffer, SHAPE, layer) for layer in range(SHAPE.num_layers)]
    seen = set()
    for index in itertools.product(*map(range, SHAPE)):
        address = byte_address(layout, SHAPE, 4, index)
        assert views[index[0]][index[1:]] == address // 4
        seen.add(address)
    assert seen == set(range(0, 4 * NUMEL, 4))


def test_L3_1_blocks_come_first() -> None:
    assert NhdCase.shape(7, 16, 4, 64) == (7, 2, 16, 4, 64)
    for layout in LAYOUTS.values():
        view = layer_view(layout, numbered(), SHAPE, 1)
        assert view.shape == (5, 2, 8, 4)
        assert split_kv(view).shape == NhdCase.shape(5, 8, 2, 2)


def test_L3_2_strides_of_the_nhd_case() -> None:
    blocks, tokens, heads, size, layers = 7, 16, 4, 64, 3
    assert NhdCase.stride_order() == (0, 2, 1, 3, 4)
    assert NhdCase.stride_order(with_layers=True) == (1, 0, 3, 2, 4, 5)
    shape = NhdCase.shape(blocks, tokens, heads, size)
    buffer = torch.arange(2 * blocks * tokens * heads * size)
    view = NhdCase.view(buffer, shape)
    assert view.shape == shape
    assert view.stride() == (tokens * 2 * heads * size, heads * size, 2 * heads * size, size, 1)
    key, value = view.unbind(1)
    assert value.storage_offset() - key.storage_offset() == heads * size
    flat = key.view(blocks * tokens, heads, size)  # raises if it would copy
    assert flat.data_ptr() == buffer.data_ptr() and flat.stride() == (2 * heads * size, size, 1)
    stacked = NhdCase.view(torch.arange(layers * buffer.numel()), (layers, *shape))
    assert stacked.shape == (layers, *shape)
    assert stacked.stride(0) == 2 * tokens * heads * size and stacked.stride(1) == layers * stacked.stride(0)
    assert stacked.stride()[2:] == view.stride()[1:]


@pytest.mark.parametrize("name", ALL)
def test_split_kv_shares_the_bytes_of_every_layout(name: str) -> None:
    view = layer_view(LAYOUTS[name], numbered(), SHAPE, 2)
    key, value = split_kv(view).unbind(1)
    assert torch.equal(key, view[..., :2].transpose(1, 2)) and torch.equal(value, view[..., 2:].transpose(1, 2))
    assert key.data_ptr() == view.data_ptr()


def test_L3_8_address_of_an_element_in_nhd() -> None:
    _, _, heads, tokens, channels = SHAPE
    for b, h, n, c in itertools.product(range(5), range(2), range(8), range(4)):
        expected = ((b * tokens + n) * heads + h) * channels + c
        assert byte_address(LAYOUTS["LBNHC"], SHAPE, 1, (0, b, h, n, c)) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ALL)
def test_L3_5_rows_are_the_bytes_of_one_block(name: str, dtype: torch.dtype) -> None:
    layout, buffer = LAYOUTS[name], numbered().to(dtype)
    rows = block_rows(layout, buffer, SHAPE.num_blocks, SHAPE.num_layers)
    page_bytes = 2 * 8 * 2 * 2 * dtype.itemsize  # K and V, tokens, heads, channels
    assert [tuple(row.shape) for row in rows] == (
        [(5, 3 * page_bytes)] if layout.block_outermost else [(5, page_bytes)] * 3
    )
    assert sorted(row.data_ptr() for row in rows)[0] == buffer.data_ptr()
    for row in rows:
        row[2] = 0xFF
    for layer in range(3):
        view = layer_view(layout, buffer, SHAPE, layer).view(torch.uint8)
        assert (view[2] == 0xFF).all() and not (view[[0, 1, 3, 4]] == 0xFF).all(dim=(1, 2, 3)).any()


@pytest.mark.parametrize("name", ALL)
def test_L3_4_whole_blocks_go_out_and_come_back(name: str, caplog: pytest.LogCaptureFixture) -> None:
    layout, buffer = LAYOUTS[name], torch.randn(NUMEL)
    rows, before = block_rows(layout, buffer, SHAPE.num_blocks, SHAPE.num_layers), buffer.clone()
    view = layer_view(layout, buffer, SHAPE, 0)
    assert torch.equal(view[[3, 1]], torch.stack([view[3], view[1]]))
    taken = extract_blocks(rows, [3, 1])
    inject_blocks(rows, [3, 1], taken)
    assert torch.equal(buffer, before)
    inject_blocks(rows, [0, 4], taken)
    for layer in range(3):
        after, was = layer_view(layout, buffer, SHAPE, layer), layer_view(layout, before, SHAPE, layer)
        assert torch.equal(after[[0, 4]], was[[3, 1]]) and torch.equal(after[1:4], was[1:4])
    with caplog.at_level(logging.WARNING):
        inject_blocks(rows, [2, 3, 4], taken[:1])
    assert "3 blocks were named and 1 came" in caplog.text
    assert torch.equal(extract_blocks(rows, [2]), taken[:1]) and torch.equal(extract_blocks(rows, [3]), taken[:1])
    for data in (taken, taken[:1, 1:]):
        with pytest.raises(ValueError, match=r"do not fit 1 blocks of"):
            inject_blocks(rows, [2], data)


@pytest.mark.parametrize("name", ALL)
def test_L3_6_L3_12_groups_agree_where_a_block_starts(name: str) -> None:
    groups = [
        CacheGroup(kind="full", block_size=8, layers=(0, 2), num_heads=2, num_channels=4),
        CacheGroup(kind="sliding", window=5, block_size=8, layers=(1,), num_heads=2, num_channels=4),
    ]
    layout = LAYOUTS[name]
    pool = KVCachePool(
        groups,
        num_blocks=5,
        dtype=torch.float32,
        device=torch.device("cpu"),
        layout=layout,
        tables=table_of_each(groups, [8, 2]),
    )
    assert pool.buffer.numel() == 2 * 5 * 2 * 8 * 4
    page = 2 * 8 * 4
    layer_stride, block_stride = (page, 2 * page) if layout.block_outermost else (5 * page, page)
    for layer, slot in ((0, 0), (2, 1), (1, 0)):
        view = pool.block_view(layer)
        assert view.storage_offset() == slot * layer_stride and view.stride(0) == block_stride
    pool.buffer.fill_(1)
    zero_blocks(pool.data, [3])
    for layer in range(3):
        view = pool.block_view(layer).flatten(1)
        assert (view[3] == 0).all()
    assert pool.buffer.sum() == pool.buffer.numel() - 2 * page


@pytest.mark.parametrize(
    ("supported", "requested", "mixed", "expected"),
    [
        ({}, None, False, "LBHNC"),
        ({"a": ALL}, None, False, "LBHNC"),
        ({"a": ("BLNHC", "LBHNC")}, None, False, "BLNHC"),
        ({"a": ALL, "connector": ("LBNHC",)}, None, False, "LBNHC"),
        ({"a": ("NHD",), "b": ALL}, None, False, "LBNHC"),
        ({"a": ALL, "b": ALL}, "NHD", False, "LBNHC"),
        ({"a": ALL, "b": ("BLHNC", "BLNHC")}, "BLNHC", False, "BLNHC"),
        ({"a": ALL}, None, True, "BLHNC"),
        ({"a": ALL}, "BLNHC", True, "BLNHC"),
    ],
)
def test_L3_9_what_is_chosen(supported: dict, requested: str | None, mixed: bool, expected: str) -> None:
    assert resolve_layout(supported, requested=requested, mixed_pages=mixed).name == expected


@pytest.mark.parametrize(
    ("supported", "requested", "mixed", "named"),
    [
        ({"a": ("LBHNC",), "b": ("NHD",)}, None, False, r"satisfies every supported set \(a: LBHNC; b: NHD\)"),
        ({"a": ("LBHNC",), "b": ("NHD",)}, "HND", False, "No KV cache layout"),
        ({"a": ("LBHNC",)}, "NHD", False, r"kv_cache_layout=NHD does not satisfy.*a: LBHNC.*valid are LBHNC"),
        ({"a": ALL, "connector": ("HND",)}, "BLHNC", False, r"kv_cache_layout=BLHNC.*connector: HND"),
        ({"a": ALL}, "NHDX", False, "unknown cache layout 'NHDX'"),
    ],
)
def test_L3_9_what_is_refused_and_never_dropped(
    supported: dict, requested: str | None, mixed: bool, named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        resolve_layout(supported, requested=requested, mixed_pages=mixed)


def test_L3_10_a_settled_layout_does_not_change() -> None:
    assert resolve_layout({"a": ALL}, fixed="BLHNC").name == "BLHNC"
    assert resolve_layout({"a": ALL}, fixed="NHD", requested="LBNHC").name == "LBNHC"
    with pytest.raises(ValueError, match="already resolved to BLHNC; cannot change it to LBNHC"):
        resolve_layout({"a": ALL}, fixed="BLHNC", requested="NHD")
    with pytest.raises(ValueError, match="already resolved to BLHNC; cannot change it to LBHNC"):
        resolve_layout({"draft": ("LBHNC",)}, fixed="BLHNC")


@pytest.mark.parametrize(
    ("supported", "requested"), [(ALL, "LBHNC"), (ALL, "NHD"), (("LBHNC", "LBNHC"), None), (("LBNHC",), None)]
)
def test_L3_11_mixed_pages_need_blocks_outermost(supported: tuple[str, ...], requested: str | None) -> None:
    with pytest.raises(ValueError, match=r"KV cache layout LB\w+.* cannot express this model's mixed page sizes"):
        resolve_layout({"a": supported}, requested=requested, mixed_pages=True)
