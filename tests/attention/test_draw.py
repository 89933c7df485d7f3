"""Pictures of masks."""

from __future__ import annotations

import importlib.util

import pytest
import torch

import octavo.attention as A
from octavo.attention.mods.drawing import FULL, PARTIAL, SKIPPED, draw, picture

needs_matplotlib = pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="no matplotlib")


def test_the_picture_is_the_mask_and_its_blocks() -> None:
    seen, blocks = shown = picture(A.sliding_window(16), 48, block=16)
    at = torch.arange(48)
    assert torch.equal(seen, (at[:, None] >= at) & (at[:, None] - at < 16))
    assert blocks.tolist() == [[PARTIAL, SKIPPED, SKIPPED], [PARTIAL, PARTIAL, SKIPPED], [SKIPPED, PARTIAL, PARTIAL]]
    assert shown.sparsity == pytest.approx(4 / 9)
    assert picture(A.causal(), 32, block=16).blocks.tolist() == [[PARTIAL, SKIPPED], [FULL, PARTIAL]]


def test_fields_are_those_of_a_request() -> None:
    seen, _ = picture(A.prefix_lm(), 20, fields={"prefix_len": 6})
    assert seen[0, :6].all() and not seen[0, 6:].any()
    seen, _ = picture(A.document(), 6, fields={"document_ids": [0, 0, 1]})
    assert seen.int().tolist()[3] == [0, 0, 1, 1, 0, 0]
    with pytest.raises(ValueError, match=r"extra_args.prefix_len: must be an integer"):
        picture(A.prefix_lm(), 20, fields={"prefix_len": "x"})  # type: ignore[dict-item]


def test_a_hint_that_contradicts_the_mask_is_found() -> None:
    mask = A.chunked(20).mask_mod
    with pytest.raises(ValueError, match="the hint `every` contradicts the mask"):
        picture(A.AttentionMods(mask_mod=mask, every=lambda b, q, q_last, kv, kv_last: q // 20 == kv_last // 20))
    with pytest.raises(ValueError, match="the hint `some` contradicts the mask"):
        picture(A.AttentionMods(mask_mod=mask, some=lambda b, q, q_last, kv, kv_last: q == kv))


@needs_matplotlib
def test_draw_saves_both_pictures(tmp_path) -> None:
    path = tmp_path / "mask.png"
    figure = draw(A.rswa(20), 64, fields={"prefix_len": 18}, path=path)
    assert [axes.get_title() for axes in figure.axes] == ["logical keys", "physical keys"]
    assert path.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="block_table must name 4 different blocks, got 2"):
        draw(A.causal(), 64, block_table=[1, 2])


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is not None, reason="matplotlib is installed")
def test_without_matplotlib_draw_says_what_is_missing() -> None:
    with pytest.raises(ValueError, match="pip install matplotlib"):
        draw(A.causal())
