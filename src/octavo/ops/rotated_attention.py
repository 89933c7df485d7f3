"""Rotation, store and attention of decoding rows in one kernel on a GPU: which of two kernels, and whether any.

Owns that choice. Does not know layers or steps: whoever calls it knows that no row reads what another one stores.
Invariant: the bits are those of `octavo.ops.rope.qk_norm_rope_store` and `octavo.ops.paged_attention`, one behind the
other.
"""

from __future__ import annotations

from torch import Tensor

from octavo.ops.gpu import row_attention
from octavo.ops.paged_attention import Heads, Plan, Scratch, paged_attention
from octavo.ops.rope import Rotation
from octavo.ops.sight import Sight


def serves(heads: Heads, sight: Sight, plan: Plan, kv: Tensor, rotation: Rotation) -> bool:
    """Whether the rows of a plan run here: all of one query, whose heads turn whole and are normed both or neither."""
    rows = plan.rows
    if rows is None or not rows.single or plan.tiles is not None or rotation.cos_sin.shape[1] != heads.size:
        return False
    if (rotation.q_norm is None) != (rotation.k_norm is None):
        return False
    if rows.max_leaves:
        from octavo.ops.gpu import rotate_attend  # needs Gluon

        return rotate_attend.serves(heads, sight, kv)
    return rows.is_copied and row_attention.takes(kv)


def rotate_and_attend(
    projected: Tensor, rotation: Rotation, kv: Tensor, query_start: Tensor, seq_lens: Tensor, block_table: Tensor,
    out: Tensor, *, sight: Sight, plan: Plan, scratch: Scratch,
) -> None:  # fmt: skip
    """`qk_norm_rope_store` of projected [tokens, (heads + 2 * KV heads) * head_size] and `paged_attention` into out.

    Of what `serves`; tensors as theirs. K and V of earlier steps, lengths, tables, positions and slots are read before
    the kernel ahead is done: the first kernel of a step is behind all that writes them. No row reads what another one
    stores in the same call.
    """
    rows = (query_start, seq_lens, block_table)
    if plan.rows is not None and plan.rows.max_leaves:
        from octavo.ops.gpu import rotate_attend  # needs Gluon

        rotate_attend.rotate_and_attend(projected, rotation, kv, *rows, out, sight=sight, plan=plan, scratch=scratch)
    else:
        paged_attention(projected, kv, *rows, out, sight=sight, plan=plan, scratch=scratch, rotation=rotation)
