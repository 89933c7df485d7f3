"""FlexAttention over K and V without a cache, with the bits that the flex backend serves: what training code calls.

Owns the block mask of whole sequences, made of a mod's own hints as the backend makes its mask rows. On CUDA torch's
compiled FlexAttention runs; on CPU its reference implementation, without gradients. Does not know an engine. Invariant:
with the sizes of an engine's `attention_config`, a position's output has the bits that the engine computes for it, in a
prompt, in chunks or in decode.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from octavo.attention.base import AttentionInputs, Setup
from octavo.attention.flex.backend import FlexBackend
from octavo.attention.flex.block_sizes import FlexSizes, resolve_flex_sizes
from octavo.attention.flex.kernel import compile_alone, kernel_options
from octavo.attention.mods import NO_MODS, AttentionMods, bound
from octavo.cache.specs import AttentionSpec
from octavo.config.settings import ConfigError


def flex_attention(
    q: Tensor,
    key: Tensor,
    value: Tensor,
    mods: AttentionMods = NO_MODS,
    *,
    scale: float,
    sizes: Mapping[str, int],
    fields: Mapping[str, Tensor] | None = None,
) -> Tensor:
    """Attention of whole sequences: [batch, heads, length, head_size] like q.

    q: [batch, heads, length, head_size]; key, value: [batch, kv_heads, length, head_size] of its dtype. sizes: the four
    `flex_attn_*` of `attention_config`; the tile's lines and the cache's kernel block, `flex_attn_kv_block_size`, must
    be among them, and the length be a multiple of all. fields: what mods read of a request, by name: [batch], or
    [batch, tokens]. Raises ConfigError for sizes that contradict each other, ValueError for another length and for
    fields that lack.
    """
    batch, heads, length, head_size = q.shape
    for name in ("flex_attn_block_m", "flex_attn_kv_block_size"):
        if sizes.get(name) is None:
            raise ConfigError(name, None, "must be set, since bits depend on it", "give it as the engine's is")
    resolved = resolve_flex_sizes(
        sizes,
        kernel_block=sizes["flex_attn_kv_block_size"],
        group=heads // key.shape[1],
        head_size=head_size,
        float32=q.dtype == torch.float32,
    )
    multiple = max(resolved.q_block, resolved.kv_block)
    if length % multiple:
        raise ValueError(f"length={length} must be a multiple of {multiple}, the larger of the mask's blocks: pad it")
    lacking = [field.name for field in mods.specs if field.name not in (fields or {})]
    if lacking:
        raise ValueError(f"attention mod {mods.name} reads {', '.join(lacking)}: give fields={{name: tensor}}")
    spec = AttentionSpec(num_heads=heads, num_kv_heads=key.shape[1], head_size=head_size, scale=scale, mods=mods)
    if not q.is_cuda:
        return _by_reference(q, key, value, spec, sizes, fields or {})
    with bound(fields or {}):
        mask = _block_mask(mods, resolved, batch, length, q.device)
        out: Tensor = _compiled(mods, resolved, scale, q.shape, key.shape, q.dtype)(q, key, value, mask)
    return out


@functools.cache
def _compiled(mods: AttentionMods, sizes: FlexSizes, scale: float, *like: object) -> Callable[..., Tensor]:
    """One for each mod and shape, since torch gives up compiling what was compiled often."""
    from torch.nn.attention.flex_attention import flex_attention as in_torch

    options: Any = kernel_options(sizes, sizes.prefill_lines)

    def attend(q: Tensor, key: Tensor, value: Tensor, block_mask: Any) -> Any:
        return in_torch(
            q,
            key,
            value,
            score_mod=mods.score_mod,
            block_mask=block_mask,
            scale=scale,
            enable_gqa=True,
            kernel_options=options,
        )

    return compile_alone(attend)


def _block_mask(mods: AttentionMods, sizes: FlexSizes, batch: int, length: int, device: torch.device) -> Any:
    """Blocks as the backend tells them apart: wholly visible by the mod's hints, or maybe visible."""
    from torch.nn.attention.flex_attention import BlockMask

    b = torch.arange(batch, device=device)[:, None, None]
    q_first = torch.arange(0, length, sizes.q_block, dtype=torch.int32, device=device)[:, None]
    kv_first = torch.arange(0, length, sizes.kv_block, dtype=torch.int32, device=device)
    place = b, q_first, q_first + sizes.q_block - 1, kv_first, kv_first + sizes.kv_block - 1
    shape = batch, 1, len(q_first), len(kv_first)
    some, every = (test(*place).expand(batch, *shape[2:]) for test in (mods.some_visible, mods.all_visible))
    partial, full = some & ~every, some & every
    partial_num, full_num = (kind.sum(-1, dtype=torch.int32).view(shape[:3]) for kind in (partial, full))
    partial_ids, full_ids = (
        kind.byte().argsort(dim=-1, descending=True, stable=True).to(torch.int32).view(shape)
        for kind in (partial, full)
    )
    return BlockMask.from_kv_blocks(
        partial_num,
        partial_ids,
        full_num,
        full_ids,
        BLOCK_SIZE=(sizes.q_block, sizes.kv_block),
        mask_mod=mods.visible,
        seq_lengths=(length, length),
    )


def _by_reference(
    q: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec, sizes: Mapping[str, int], fields: Mapping[str, Tensor]
) -> Tensor:
    """The backend itself, over a cache in which K and V lie in order."""
    batch, heads, length, head_size = q.shape
    block, tokens = sizes["flex_attn_kv_block_size"], batch * length
    width = length // block
    setup = Setup(max_model_len=length, num_blocks=batch * width + 1, block_size=block, options=sizes, fields=fields)
    backend = FlexBackend([spec], q.dtype, q.device, setup)
    kv = torch.zeros(batch * width + 1, spec.num_kv_heads, block, 2 * head_size, dtype=q.dtype)
    blocks = torch.cat([key, value], -1).unflatten(2, (width, block)).transpose(1, 2)  # [batch, width, kv_heads, ..]
    kv[1:] = blocks.flatten(0, 1)
    inputs = AttentionInputs(
        num_rows=batch,
        num_tokens=tokens,
        max_query_len=length,
        max_seq_len=length,
        block_size=block,
        query_start=torch.arange(0, tokens + 1, length, dtype=torch.int32),
        seq_lens=torch.full((batch,), length, dtype=torch.int32),
        block_table=torch.arange(1, batch * width + 1, dtype=torch.int32).view(batch, width),
        slot_mapping=torch.full((tokens,), -1),
        rows=torch.arange(batch),
    )
    out = torch.empty(tokens, heads, head_size, dtype=q.dtype)
    backend.prepare(inputs)
    backend.run(q.transpose(1, 2).reshape(tokens, heads, head_size), kv, spec, out)
    return out.view(batch, length, heads, head_size).transpose(1, 2)
