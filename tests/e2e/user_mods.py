"""Five attention mods as users write them, for the tests and, as file.py:name, for the server."""

from __future__ import annotations

import torch

import octavo
from octavo.attention import and_, request_field, sliding_window

# 1. A mask with a captured tensor: which of 16 kinds of position see which.
kinds = torch.randint(0, 2, (16, 16), generator=torch.Generator().manual_seed(0), dtype=torch.bool)


def kinds_meet(b, h, q_idx, kv_idx):
    return kinds[q_idx % 16, kv_idx % 16] | (q_idx == kv_idx)


by_kind = octavo.AttentionMods(mask_mod=kinds_meet)


# 2. A change of scores that differs between heads.
def prefer_near(score, b, h, q_idx, kv_idx):
    return torch.where(h % 2 == 0, score - 0.05 * (q_idx - kv_idx), score)


near = octavo.AttentionMods(score_mod=prefer_near)

# 3. Data of a request: its instructions stay visible behind a short window, and it scales its own scores.
instructions = request_field("instructions")
sharpness = request_field("sharpness", "float", default=1.0)


def keep_instructions(b, h, q_idx, kv_idx):
    return (kv_idx < instructions[b]) | (q_idx - kv_idx < 6)


def sharpen(score, b, h, q_idx, kv_idx):
    return score * sharpness[b]


with_data = octavo.AttentionMods(mask_mod=keep_instructions, score_mod=sharpen, fields=(instructions, sharpness))


# 4. A mask with a hint that prunes blocks: even heads see paragraphs of 20, odd ones everything.
def paragraphs(b, h, q_idx, kv_idx):
    return (h % 2 == 1) | (q_idx // 20 == kv_idx // 20)


def one_paragraph(b, q_first, q_last, kv_first, kv_last):
    return (q_first // 20 == q_last // 20) & (kv_first // 20 == q_first // 20) & (kv_last // 20 == q_first // 20)


with_hint = octavo.AttentionMods(mask_mod=paragraphs, every=one_paragraph)

# 5. A factory and a function together.
strided = and_(
    sliding_window(40), octavo.AttentionMods(mask_mod=lambda b, h, q, kv: ((q - kv) % 2 == 0) | (q - kv < 8))
)

FIVE = {"by_kind": by_kind, "near": near, "with_data": with_data, "with_hint": with_hint, "strided": strided}
EXTRA = {"instructions": 5, "sharpness": 1.5}


def per_layer(layer):
    """All five, over the layers."""
    return list(FIVE.values())[layer % 5]
