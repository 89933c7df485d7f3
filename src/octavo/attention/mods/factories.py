"""The usual masks and score changes as AttentionMods, each with its block hints.

Owns the factories that `octavo.attention` offers. Knows no backend. Invariant: the hints of a factory follow from its
mask; tests compare them with the mask pair by pair.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from octavo.attention.mods import AttentionMods, NativeForm, RequestField, request_field

if TYPE_CHECKING:
    from torch import Tensor


def causal() -> AttentionMods:
    """Every key up to the query."""
    return AttentionMods(name="causal", native=NativeForm())


def sliding_window(window: int) -> AttentionMods:
    """The last `window` keys, the query's own included."""
    _at_least("sliding_window", window, 1)

    def near(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return q_idx - kv_idx < window

    def some(b: Tensor, q_first: Tensor, q_last: Tensor, kv_first: Tensor, kv_last: Tensor) -> Tensor:
        return q_first - kv_last < window

    def every(b: Tensor, q_first: Tensor, q_last: Tensor, kv_first: Tensor, kv_last: Tensor) -> Tensor:
        return q_last - kv_first < window

    return AttentionMods(
        mask_mod=near, some=some, every=every, name=f"sliding_window({window})", native=NativeForm(window=window)
    )


def chunked(size: int) -> AttentionMods:
    """The keys of the query's own chunk of `size` positions."""
    _at_least("chunked", size, 1)

    def same_chunk(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return q_idx // size == kv_idx // size

    def some(b: Tensor, q_first: Tensor, q_last: Tensor, kv_first: Tensor, kv_last: Tensor) -> Tensor:
        return (q_first // size <= kv_last // size) & (kv_first // size <= q_last // size)

    def every(b: Tensor, q_first: Tensor, q_last: Tensor, kv_first: Tensor, kv_last: Tensor) -> Tensor:
        chunk = q_first // size
        return (q_last // size == chunk) & (kv_first // size == chunk) & (kv_last // size == chunk)

    return AttentionMods(
        mask_mod=same_chunk, some=some, every=every, name=f"chunked({size})", native=NativeForm(chunk=size)
    )


def dilated(step: int) -> AttentionMods:
    """Every `step`-th key, counted back from the query."""
    _at_least("dilated", step, 1)

    def on_grid(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx - kv_idx) % step == 0

    return AttentionMods(mask_mod=on_grid, name=f"dilated({step})")


def sinks(count: int) -> AttentionMods:
    """The first `count` keys: with `or_`, what a window keeps of the beginning."""
    _at_least("sinks", count, 1)

    def first_keys(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return kv_idx < count

    def some(b: Tensor, q_first: Tensor, q_last: Tensor, kv_first: Tensor, kv_last: Tensor) -> Tensor:
        return kv_first < count

    def every(b: Tensor, q_first: Tensor, q_last: Tensor, kv_first: Tensor, kv_last: Tensor) -> Tensor:
        return kv_last < count

    return AttentionMods(mask_mod=first_keys, some=some, every=every, name=f"sinks({count})")


def prefix(field: RequestField) -> AttentionMods:
    """The keys of a request's prefix, `field` tokens long, for queries behind them."""

    def in_prefix(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return kv_idx < field[b]

    def some(b: Tensor, q_first: Tensor, q_last: Tensor, kv_first: Tensor, kv_last: Tensor) -> Tensor:
        return kv_first < field[b]

    def every(b: Tensor, q_first: Tensor, q_last: Tensor, kv_first: Tensor, kv_last: Tensor) -> Tensor:
        return kv_last < field[b]

    return AttentionMods(mask_mod=in_prefix, some=some, every=every, fields=(field,), name=f"prefix({field.spec.name})")


def prefix_lm(field: str = "prefix_len") -> AttentionMods:
    """A prefix whose tokens see each other both ways, then causal. Its length comes with the request.

    Looks ahead, so a prompt is computed in one step, and its cached blocks serve equal prompts only.
    """
    length = request_field(field)
    ahead = prefix(length)

    def in_prefix_or_before(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (kv_idx <= q_idx) | (kv_idx < length[b])

    def some(b: Tensor, q_first: Tensor, q_last: Tensor, kv_first: Tensor, kv_last: Tensor) -> Tensor:
        return (kv_first <= q_last) | (kv_first < length[b])

    def every(b: Tensor, q_first: Tensor, q_last: Tensor, kv_first: Tensor, kv_last: Tensor) -> Tensor:
        return (kv_last <= q_first) | (kv_last < length[b])

    return AttentionMods(
        mask_mod=in_prefix_or_before, some=some, every=every, causal=False, fields=ahead.fields, name="prefix_lm"
    )


def rswa(window: int, field: str = "prefix_len") -> AttentionMods:
    """Reference sliding window: the request's prefix, whose length comes with it, and the last `window` keys."""
    from octavo.attention.mods import or_

    return or_(prefix(request_field(field)), sliding_window(window))


def document(field: str = "document_ids") -> AttentionMods:
    """Keys of the query's own document. The request says which document each token belongs to."""
    ids = request_field(field, per_token=True)

    def same_document(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return ids[b, q_idx] == ids[b, kv_idx]

    return AttentionMods(mask_mod=same_document, fields=(ids,), name="document")


def alibi(slopes: Tensor | int) -> AttentionMods:
    """A score falls by its head's slope for each position that the key lies before its query, and rises behind it.

    slopes: [heads] float32 on the engine's device; or the number of heads, for the geometric sequence of "Train Short,
    Test Long" (Press et al., 2021).
    """
    native = None
    if isinstance(slopes, int):
        from octavo.attention.base import alibi_slopes  # needs torch

        _at_least("alibi", slopes, 1)
        power, native = 1 << (slopes.bit_length() - 1), NativeForm(alibi_slopes=alibi_slopes(slopes))

    def fall(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        if isinstance(slopes, int):
            slope = ((-8.0 * (h + 1)).where(h < power, -4.0 * (2 * (h - power) + 1)) / power).exp2()
        else:
            slope = slopes[h]
        return score - slope * (q_idx - kv_idx)

    return AttentionMods(score_mod=fall, name="alibi", native=native)


def soft_cap(cap: float) -> AttentionMods:
    """Scores become cap * tanh(score / cap)."""
    if not (math.isfinite(cap) and cap > 0):
        raise ValueError(f"soft_cap must be finite and above 0, got {cap}")

    def capped(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return cap * (score / cap).tanh()

    return AttentionMods(score_mod=capped, name=f"soft_cap({cap:g})", native=NativeForm(soft_cap=cap))


def temperature(field: str = "attention_temperature") -> AttentionMods:
    """Scores are divided by a number that comes with the request (default 1)."""
    value = request_field(field, "float", default=1.0)

    def divided(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score / value[b]

    return AttentionMods(score_mod=divided, fields=(value,), name="temperature")


def _at_least(name: str, value: int, low: int) -> None:
    if not isinstance(value, int) or value < low:
        raise ValueError(f"{name} takes a whole number of at least {low}, got {value!r}")
