"""The digest of attention mods: the same in every process for the same mods, and never for others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from octavo.attention.mods import NO_MODS, AttentionMods, and_
from octavo.attention.mods.digest import mods_digest
from octavo.attention.mods.factories import causal, sliding_window, soft_cap
from octavo.attention.mods.loading import load_mods

SOURCE = """
import torch
from octavo import AttentionMods
SPAN = {span}
TABLE = torch.tensor([1.0, {slope}])
def near(q, kv):
    return q - kv < SPAN {also}
def mask(b, h, q_idx, kv_idx):
    inner = lambda: near(q_idx, kv_idx)
    return inner()
def score(score, b, h, q_idx, kv_idx):
    return score + TABLE[h]
mods = AttentionMods(mask_mod=mask, score_mod=score)
"""


def digest_of(folder: Path, name: str = "own", *, span: int = 4, slope: float = 0.5, also: str = "") -> str:
    path = folder / f"{name}.py"
    path.write_text(SOURCE.format(span=span, slope=slope, also=also))
    mods = load_mods(f"{path}:mods")
    assert isinstance(mods, AttentionMods)
    return mods_digest([mods, NO_MODS])


def test_equal_mods_have_one_digest(tmp_path):
    assert digest_of(tmp_path) == digest_of(tmp_path) == digest_of(tmp_path, "elsewhere")
    assert mods_digest([sliding_window(4)]) == mods_digest([sliding_window(4)])
    assert mods_digest([NO_MODS, NO_MODS]) == ""


@pytest.mark.parametrize("change", [{"span": 5}, {"slope": 0.25}, {"also": "+ 1"}])
def test_a_constant_a_tensor_or_a_helper_that_differs_gives_another(tmp_path, change):
    assert digest_of(tmp_path) != digest_of(tmp_path, **change)


def test_other_mods_have_other_digests():
    several = [
        [sliding_window(4)],
        [sliding_window(5)],
        [soft_cap(4.0)],
        [causal()],
        [and_(sliding_window(4), soft_cap(4.0))],
        [sliding_window(4), NO_MODS],
        [NO_MODS, sliding_window(4)],
    ]
    assert len({mods_digest(mods) for mods in several}) == len(several)


def test_what_cannot_be_named_is_shared_with_nobody():
    class Own:
        span = 4

    own = Own()
    mods = AttentionMods(mask_mod=lambda b, h, q_idx, kv_idx: q_idx - kv_idx < own.span)
    assert mods_digest([mods]) != mods_digest([mods])
    captured = torch.ones(3)
    named = AttentionMods(score_mod=lambda score, b, h, q_idx, kv_idx: score + captured[h])
    assert mods_digest([named]) == mods_digest([named])
