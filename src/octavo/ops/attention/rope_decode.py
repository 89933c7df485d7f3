"""Rotation, store and attention of decoding or verifying rows in one kernel on a GPU: which of four, and whether any.

Owns that choice. Does not know layers or steps: whoever calls it knows that no row reads what another one stores.
Invariant: the bits are those of `octavo.ops.rope.qk_norm_rope_store` and `octavo.ops.attention.paged`, one behind the
other.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from octavo.ops.attention import decode
from octavo.ops.attention.mask_spec import MaskSpec
from octavo.ops.attention.paged import paged_attention
from octavo.ops.attention.paged_plan import Heads, Plan, Scratch
from octavo.ops.compile.row_sum import MIN_LENGTH
from octavo.ops.rope import Rotation


def serves(heads: Heads, mask_spec: MaskSpec, plan: Plan, kv: Tensor, rotation: Rotation) -> bool:
    """Whether the rows of a plan run here: of few queries, whose heads turn whole and are normed both or neither.

    Where a row has more than one query, rows must be few, and see all before them. Scales are those of 8 bits alone.
    """
    rows = plan.rows
    if rows is None or plan.tiles is not None or rotation.cos_sin.shape[1] != heads.size:
        return False
    if (rotation.q_norm is None) != (rotation.k_norm is None):
        return False
    if rotation.key_scale is not None and kv.element_size() > 1:
        return False
    if not rows.single:
        is_plain = mask_spec.causal and not mask_spec.reach and not mask_spec.soft_cap
        fits = heads.padded == heads.size >= 2 * MIN_LENGTH and kv.dtype in (torch.bfloat16, torch.float16)
        return rows.max_leaves > 0 and is_plain and fits
    if rows.max_leaves:
        from octavo.ops.attention import rope_decode_kernel  # needs Gluon

        return rope_decode_kernel.serves(heads, mask_spec, kv)
    return rows.is_copied and decode.supports(kv)


def fused_rope_decode(
    projected: Tensor,
    rotation: Rotation,
    kv: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    out: Tensor,
    *,
    mask_spec: MaskSpec,
    plan: Plan,
    scratch: Scratch,
) -> None:
    """`qk_norm_rope_store` of projected [tokens, (heads + 2 * KV heads) * head_size] and `paged_attention` into out.

    Of what `serves`; tensors as theirs. K and V of earlier steps, lengths, tables, positions and slots are read before
    the kernel ahead is done: the first kernel of a step is behind all that writes them. No row reads what another one
    stores in the same call.
    """
    rows = (query_start, seq_lens, block_table)
    options: dict[str, Any] = {"mask_spec": mask_spec, "plan": plan, "scratch": scratch}
    if plan.rows is not None and plan.rows.max_leaves and plan.rows.single:
        from octavo.ops.attention import rope_decode_kernel  # needs Gluon

        rope_decode_kernel.fused_rope_decode(projected, rotation, kv, *rows, out, **options)
    elif plan.rows is not None and plan.rows.max_leaves and verifies_in_columns(out, mask_spec, kv):
        from octavo.ops.attention import rope_verify_kernel  # needs Gluon

        rope_verify_kernel.fused_rope_decode(projected, rotation, kv, *rows, out, **options)
    else:
        options |= {"key_scale": rotation.key_scale, "value_scale": rotation.value_scale}
        paged_attention(projected, kv, *rows, out, rotation=rotation, **options)


def verifies_in_columns(out: Tensor, mask_spec: MaskSpec, kv: Tensor) -> bool:
    """Whether rows of several queries run in programs of up to 8 of their heads: else a tile holds a KV head's all."""
    if kv.device.type != "cuda":
        return False
    from octavo.ops.attention import rope_decode_kernel  # needs Gluon

    return rope_decode_kernel.serves(Heads(out.shape[1], kv.shape[1], out.shape[2]), mask_spec, kv)
