"""What rows of logits cut off before a token is drawn, as tables on the device.

Plain data, for `octavo.ops.sampling` and its kernels. Does not know requests. Invariant: a row's cut is said by its own
entries, whatever rows are at hand.
"""

from __future__ import annotations

import msgspec
import torch

FEW = 64  # so many entries of top-k a GPU finds without a survey of the row


class TruncationRows(msgspec.Struct, frozen=True, kw_only=True):
    """Tables of what rows cut off before a draw, [N] each. The order: divide, then as in `top_k_top_p_mask_`."""

    divisors: torch.Tensor  # float32, temperatures; 0: the row is neither divided nor cut
    top_k: torch.Tensor  # int64
    top_p: torch.Tensor  # float32, as the next
    min_p: torch.Tensor
    few: bool = True  # whether some of the rows at hand may have a top_k in 1 .. FEW, for which a GPU has its own way
    many: bool = True  # whether some may be cut otherwise
