"""A picture of a mask: what each query sees, and which blocks of the cache are read for it.

Owns the picture. Does not run attention. Invariant: it evaluates the mods as the backends do, in logical positions;
blocks are coloured by the same hints that prune them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.attention.mods import AttentionMods, bound
from octavo.request.fields import FieldSpec

SKIPPED, PARTIAL, FULL = 0, 1, 2
_COLOURS = ("#f4f4f4", "#f2c14e", "#3f88c5")


class Picture(NamedTuple):
    """What is drawn."""

    seen: Tensor  # [tokens, tokens] bool: query, key
    blocks: Tensor  # [query blocks, key blocks]: SKIPPED, PARTIAL or FULL

    @property
    def sparsity(self) -> float:
        """Share of the block pairs that are not read."""
        return float((self.blocks == SKIPPED).float().mean())


def picture(
    mods: AttentionMods,
    tokens: int = 64,
    *,
    block: int = 16,
    head: int = 0,
    fields: Mapping[str, float | Sequence[float]] | None = None,
) -> Picture:
    """The mask of one request of `tokens` tokens. fields: its extra_args.

    Raises ValueError for a wrong field, and where a hint contradicts the mask, which nothing else would notice.
    """
    if tokens < 1 or block < 1:
        raise ValueError(f"tokens and block must be at least 1, got {tokens} and {block}")
    tables = {spec.name: _table(spec, dict(fields or {}), tokens) for spec in mods.specs}
    at = torch.arange(tokens)
    first = torch.arange(0, tokens, block)
    last = (first + block - 1).clamp(max=tokens - 1)
    b = torch.tensor(0)
    call = torch.vmap(torch.vmap(lambda q, kv: mods.visible(b, torch.tensor(head), q, kv), (None, 0)), (0, None))
    with bound(tables):
        seen = call(at, at)
        spans = b, first[:, None], last[:, None], first[None, :], last[None, :]
        some, every = mods.some_visible(*spans), mods.all_visible(*spans)
    blocks = torch.where(every, FULL, torch.where(some, PARTIAL, SKIPPED)).expand(len(first), len(first))
    for index, state in enumerate(blocks.flatten().tolist()):
        q, kv = (slice(int(first[at]), int(last[at]) + 1) for at in divmod(index, len(first)))
        if (state == SKIPPED and seen[q, kv].any()) or (state == FULL and not seen[q, kv].all()):
            hint = "some" if state == SKIPPED else "every"
            raise ValueError(f"{mods.name}: the hint `{hint}` contradicts the mask for queries {q} and keys {kv}")
    return Picture(seen, blocks)


def draw(
    mods: AttentionMods,
    tokens: int = 64,
    *,
    block: int = 16,
    head: int = 0,
    fields: Mapping[str, float | Sequence[float]] | None = None,
    block_table: Sequence[int] | None = None,
    path: str | Path | None = None,
) -> Any:
    """Draw the mask of one request; gives matplotlib's Figure, saved as `path` if given.

    On the left the logical picture, on the right the physical one, with the blocks where they lie in the cache:
    block_table, or a shuffle. Blue blocks are wholly visible, yellow ones partly, grey ones are not read.
    """
    try:
        from matplotlib.colors import ListedColormap
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError("drawing needs matplotlib: pip install matplotlib") from error
    seen, blocks = shown = picture(mods, tokens, block=block, head=head, fields=fields)
    count = blocks.shape[1]
    table = list(block_table) if block_table is not None else _shuffle(count)
    if len(set(table)) != count or min(table) < 0:
        raise ValueError(f"block_table must name {count} different blocks, got {len(set(table))}")
    figure = Figure(figsize=(11, 5.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    colours = ListedColormap(_COLOURS)
    whole = blocks.repeat_interleave(block, 0).repeat_interleave(block, 1)[:tokens, :tokens]
    physical = torch.full((tokens, (max(table) + 1) * block), float("nan"))
    dots = torch.zeros(physical.shape, dtype=torch.bool)
    for column, place in enumerate(table):
        keys = slice(column * block, min((column + 1) * block, tokens))
        width = keys.stop - keys.start
        physical[:, place * block : place * block + width] = whole[:, keys].float()
        dots[:, place * block : place * block + width] = seen[:, keys]
    for axes, values, marks, name in ((left, whole.float(), seen, "logical"), (right, physical, dots, "physical")):
        axes.imshow(values, cmap=colours, vmin=0, vmax=2, aspect="auto", interpolation="nearest")
        y, x = marks.nonzero(as_tuple=True)
        axes.scatter(x, y, s=max(0.3, 2000 / values.numel()), c="#1b1b1e", linewidths=0)
        axes.set(title=f"{name} keys", xlabel=f"key ({name})", ylabel="query")
    figure.suptitle(f"{mods.name}: {shown.sparsity:.0%} of the blocks of {block} are not read")
    if path is not None:
        figure.savefig(path, dpi=120)
    return figure


def _table(spec: FieldSpec, fields: Mapping[str, Any], tokens: int) -> Tensor:
    values = torch.from_numpy(spec.read(fields).expand(tokens if spec.per_token else 1))
    return values[None] if spec.per_token else values


def _shuffle(count: int) -> list[int]:
    return torch.randperm(count, generator=torch.Generator().manual_seed(0)).tolist()
