"""AttentionMods: what a query may see and how its scores are changed, written in logical positions.

Owns the words of a mod (mask_mod, score_mod, block hints, request fields), their composition, and what lies around
their calls: request fields bound to a backend's tables, and ModError for what they raise. Does not know blocks, batches
or kernels, and imports no torch before a mod fails. Invariants: a mask decides alone what is seen, hints only save
work; `b` is a request's row in the tables that request fields read, and nothing else.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from octavo.config.quoted import said
from octavo.request.fields import FieldSpec
from octavo.startup.interrupts import may_be_a_signal

if TYPE_CHECKING:
    from torch import Tensor

MaskMod: TypeAlias = "Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]"
"""(b, h, q_idx, kv_idx) -> bool: whether the query sees the key. Arguments are int scalars."""
ScoreMod: TypeAlias = "Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]"
"""(score, b, h, q_idx, kv_idx) -> score; the score is scaled already."""
BlockTest: TypeAlias = "Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]"
"""(b, q_first, q_last, kv_first, kv_last) -> bool for tensors that broadcast: a rectangle of positions, ends in it."""

BOUND: dict[str, Tensor] = {}
_BINDING = threading.RLock()


@dataclasses.dataclass(frozen=True, slots=True)
class RequestField:
    """A field of requests as a mod reads it: `field[b]`, or `field[b, position]` for a field per token."""

    spec: FieldSpec

    def __getitem__(self, index: Any) -> Tensor:
        """The value of a request's row. Only while a backend runs."""
        return BOUND[self.spec.name][index]


def request_field(
    name: str,
    kind: str = "int",
    *,
    default: float = 0,
    per_token: bool = False,
    low: float | None = None,
    high: float | None = None,
) -> RequestField:
    """A field that requests carry in `SamplingParams.extra_args[name]`, to be listed in `AttentionMods.fields`.

    kind: int or float, 32 bits each; default: of requests without it; per_token: a list with a value for each token,
    the last one standing for all later tokens. low, high: bounds, both allowed, that requests are checked against; a
    mod that indexes with a field needs them. Raises ValueError for a default outside the bounds, and for the
    name of PROMPT_LENGTH.
    """
    if name == PROMPT_LENGTH.spec.name:
        raise ValueError(f"request field {name}: the engine has a field of that name, take another")
    return RequestField(FieldSpec(name, kind, default, per_token, low, high))


class ModError(RuntimeError):
    """What a mod raised in a step: fatal to requests, not to the engine."""


PROMPT_LENGTH = RequestField(FieldSpec("_prompt_length"))
"""Tokens of each row's prompt. The engine knows them, so requests do not carry them."""


@contextlib.contextmanager
def bound(tables: Mapping[str, Tensor]) -> Iterator[None]:
    """Let mods read their fields from `tables` (by name: [rows], or [rows, tokens]); one engine at a time."""
    if not tables:
        yield
        return
    with _BINDING:
        before = dict(BOUND)
        BOUND.update(tables)
        try:
            yield
        finally:
            BOUND.clear()
            BOUND.update(before)


@contextlib.contextmanager
def at_work(mods: AttentionMods, tables: Mapping[str, Tensor]) -> Iterator[None]:
    """Around calls of `mods`, a user's or none: their fields are bound to `tables`.

    Raises ModError for what they raise, but for memory and devices that fail.
    """
    with bound(tables if mods.fields else {}):
        try:
            yield
        except BaseException as error:  # of whatever kind: the engine lives
            import traceback

            import torch

            of_device = isinstance(error, MemoryError | torch.OutOfMemoryError | torch.AcceleratorError)
            if mods is NO_MODS or of_device or may_be_a_signal(error):
                raise
            frame = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{Path(frame.filename).name}, line {frame.lineno}"
            raise ModError(f"attention mod {mods.name}: {said(error)} ({place})") from error


@dataclasses.dataclass(frozen=True, slots=True)
class NativeForm:
    """What a AttentionSpec says without a mod, in its own words."""

    window: int = 0
    chunk: int = 0
    soft_cap: float = 0.0
    alibi_slopes: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AttentionMods:
    """A mask and a change of scores, on top of what the model itself has (its windows and caps stay).

    mask_mod and score_mod as FlexAttention takes them, in logical positions: token p of a request is p, whatever block
    holds it. Tensors may be captured; they must lie on the engine's device. causal: keys behind the query are hidden
    without the mask's saying so. If False, a prompt's queries see keys behind them, but none that was generated.
    some, every: hints per rectangle of positions, whether any pair or surely every pair in it is visible by mask_mod
    alone; blocks that are hidden are not read, blocks that are wholly visible are not masked. fields: what the
    functions read of a request. name: for messages.
    """

    mask_mod: MaskMod | None = None
    score_mod: ScoreMod | None = None
    causal: bool = True
    some: BlockTest | None = None
    every: BlockTest | None = None
    fields: tuple[RequestField, ...] = ()
    name: str = ""
    native: NativeForm | None = None  # set by factories whose effect it is, whole

    def __post_init__(self) -> None:
        """Raises ValueError where a part has the wrong type, or two fields share a name."""
        for part in ("mask_mod", "score_mod", "some", "every"):
            if getattr(self, part) is not None and not callable(getattr(self, part)):
                raise ValueError(f"attention_mods: {part} must be a function, got {type(getattr(self, part)).__name__}")
        if not isinstance(self.causal, bool):
            raise ValueError(f"attention_mods: causal must be True or False, got {self.causal!r}")
        if not isinstance(self.name, str):
            raise ValueError(f"attention_mods: name must be a string, got {type(self.name).__name__}")
        given: Any = self.fields
        one = isinstance(given, RequestField | str) or not isinstance(given, Iterable)
        fields = (given,) if one else tuple(given)
        for field in fields:
            if not isinstance(field, RequestField):
                raise ValueError(f"attention_mods: fields must be made by request_field(...), got {field!r}")
        object.__setattr__(self, "fields", fields)
        specs = [field.spec for field in self.fields]
        if len({spec.name for spec in specs}) != len(set(specs)):
            raise ValueError("attention_mods: two request fields share a name and differ")
        if not self.name:
            named = [getattr(part, "__name__", "mod") for part in (self.mask_mod, self.score_mod) if part is not None]
            object.__setattr__(self, "name", " and ".join(named) or "no mods")

    @property
    def specs(self) -> tuple[FieldSpec, ...]:
        """The fields, each once."""
        return tuple(dict.fromkeys(field.spec for field in self.fields))

    def some_visible(self, b: Tensor, q_first: Tensor, q_last: Tensor, kv_first: Tensor, kv_last: Tensor) -> Tensor:
        """Whether a rectangle may have a visible pair, causality included."""
        seen = kv_first <= q_last
        if not self.causal:
            seen.fill_(True)
        return seen if self.some is None else seen & self.some(b, q_first, q_last, kv_first, kv_last)

    def all_visible(self, b: Tensor, q_first: Tensor, q_last: Tensor, kv_first: Tensor, kv_last: Tensor) -> Tensor:
        """Whether every pair of a rectangle is surely visible, causality included."""
        seen = kv_last <= q_first
        if self.mask_mod is not None and self.every is None:
            return seen.fill_(False)
        if not self.causal:
            seen.fill_(True)
        return seen if self.every is None else seen & self.every(b, q_first, q_last, kv_first, kv_last)

    def visible(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """The mask, causality included."""
        if self.mask_mod is None:
            return kv_idx <= q_idx if self.causal else kv_idx >= 0
        seen = self.mask_mod(b, h, q_idx, kv_idx)
        return seen & (kv_idx <= q_idx) if self.causal else seen


NO_MODS = AttentionMods(native=NativeForm())
PerLayer: TypeAlias = AttentionMods | Callable[[int], AttentionMods | None]
"""What `attention_mods` may be: one for all layers, or a function from a layer's number to its own."""


def _known(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return (kv_idx <= q_idx) | (kv_idx < PROMPT_LENGTH[b])


def _known_in(b: Tensor, q_first: Tensor, q_last: Tensor, kv_first: Tensor, kv_last: Tensor) -> Tensor:
    return (kv_first <= q_last) | (kv_first < PROMPT_LENGTH[b])


def _all_known(b: Tensor, q_first: Tensor, q_last: Tensor, kv_first: Tensor, kv_last: Tensor) -> Tensor:
    return (kv_last <= q_first) | (kv_last < PROMPT_LENGTH[b])


KNOWN = AttentionMods(mask_mod=_known, causal=False, some=_known_in, every=_all_known, fields=(PROMPT_LENGTH,))
"""The keys that are known when a query is first computed: the prompt's, and those up to its own."""


def within_prompt(mods: AttentionMods) -> AttentionMods:
    """Mods that look ahead, as an engine runs them: what a query saw in the prompt's step is all it ever sees.

    So a prompt's query that is computed again, beside tokens generated since, does not see these.
    """
    # a mask without hints gets none: where nobody has a say in it, a kernel finds the blocks
    unhinted = mods.mask_mod is not None and mods.some is None and mods.every is None
    known = dataclasses.replace(KNOWN, some=None, every=None) if unhinted else KNOWN
    return dataclasses.replace(and_(mods, known), name=mods.name)


def and_(*parts: AttentionMods) -> AttentionMods:
    """A key is seen if every part lets it be seen; score changes are applied from left to right."""
    masks = [part.mask_mod for part in parts if part.mask_mod is not None]
    scores = [part.score_mod for part in parts if part.score_mod is not None]
    some = [part.some for part in parts if part.some is not None]
    every = [part.every for part in parts if part.every is not None]
    knows_all = all(part.every is not None for part in parts if part.mask_mod is not None)
    return AttentionMods(
        mask_mod=_all_of(masks),
        score_mod=_in_turn(scores),
        causal=any(part.causal for part in parts) or not parts,
        some=_all_of(some),
        every=_all_of(every) if knows_all else None,
        fields=tuple(dict.fromkeys(field for part in parts for field in part.fields)),
        name=_join(parts, " & "),
        native=_native_of(parts),
    )


def or_(*parts: AttentionMods) -> AttentionMods:
    """A key is seen if some part lets it be seen. Causal only if every part is.

    Raises ValueError for a part that changes scores: which pairs would it change?
    """
    if any(part.score_mod is not None for part in parts):
        raise ValueError("or_ joins masks: put the score_mod outside, and_(or_(...), ...)")
    if len({part.causal for part in parts}) > 1:
        parts = tuple(_uncausal(part) if part.causal else part for part in parts)
    free = any(part.mask_mod is None for part in parts)
    hinted = all(part.some is not None for part in parts)
    return AttentionMods(
        mask_mod=None if free else functools.reduce(_either, (part.mask_mod for part in parts if part.mask_mod)),
        causal=all(part.causal for part in parts),
        some=None if free or not hinted else functools.reduce(_either, (part.some for part in parts if part.some)),
        every=None if free else _any_of([part.every for part in parts if part.every is not None]),
        fields=tuple(dict.fromkeys(field for part in parts for field in part.fields)),
        name=_join(parts, " | "),
    )


def _uncausal(part: AttentionMods) -> AttentionMods:
    """The same mods with causality in the mask."""
    return dataclasses.replace(
        part, mask_mod=part.visible, some=part.some_visible, every=part.all_visible, causal=False, native=None
    )


def _join(parts: tuple[AttentionMods, ...], sign: str) -> str:
    return f"({sign.join(part.name for part in parts)})" if len(parts) > 1 else "".join(part.name for part in parts)


def _both(first: Callable[..., Tensor], second: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def both(*at: Tensor) -> Tensor:
        return first(*at) & second(*at)

    return both


def _either(first: Callable[..., Tensor], second: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def either(*at: Tensor) -> Tensor:
        return first(*at) | second(*at)

    return either


def _then(first: ScoreMod, second: ScoreMod) -> ScoreMod:
    def then(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return second(first(score, b, h, q_idx, kv_idx), b, h, q_idx, kv_idx)

    return then


def _all_of(tests: list[Callable[..., Tensor]]) -> Callable[..., Tensor] | None:
    return functools.reduce(_both, tests) if tests else None


def _any_of(tests: list[Callable[..., Tensor]]) -> Callable[..., Tensor] | None:
    return functools.reduce(_either, tests) if tests else None


def _in_turn(scores: list[ScoreMod]) -> ScoreMod | None:
    return functools.reduce(_then, scores) if scores else None


def _native_of(parts: tuple[AttentionMods, ...]) -> NativeForm | None:
    """The native form of all parts together, if they have one."""
    whole = NativeForm()
    for part in parts:
        form = part.native
        if form is None or not part.causal:
            return None
        twice = (form.chunk and whole.chunk) or (form.soft_cap and whole.soft_cap)
        if twice or ((form.soft_cap or form.alibi_slopes) and whole.alibi_slopes):  # a spec caps, then falls, once
            return None
        whole = NativeForm(
            window=min(filter(None, (whole.window, form.window)), default=0),
            chunk=whole.chunk or form.chunk,
            soft_cap=whole.soft_cap or form.soft_cap,
            alibi_slopes=whole.alibi_slopes or form.alibi_slopes,
        )
    return whole
