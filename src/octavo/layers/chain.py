"""Chain: the lines that a layer's forward is written in.

Owns what a line is, and how lines are learned: a layer's `forward` is called once with a symbol in the place of the
hidden state, and each Layer that it calls notes itself down. Does not know operators or steps. Invariant: a chain says
all that its layer computes. Every line takes what the line before it gave; a sum adds that to the residual stream,
which is the last sum, or what the layer was given. A forward that does anything else has no chain, and runs as it is
written.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar, cast

import torch

Run = Callable[[torch.Tensor], torch.Tensor]
_Owner = TypeVar("_Owner")
_Method: TypeAlias = Callable[[_Owner, torch.Tensor], torch.Tensor]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Line:
    """One line. `kind`: norm | linear | rope_store | attend | mlp | add, or own: what no fusion knows."""

    kind: str
    owner: Any  # the Layer that computes it; None: a sum
    run: Run  # by itself


class NoChainError(Exception):
    """A forward does with the hidden state what a chain has no word for."""


class Symbol:
    """The hidden state, while lines are learned."""

    __slots__ = ("_chain",)

    def __init__(self, chain: Chain) -> None:
        """A value of `chain`."""
        self._chain = chain

    def record(self, kind: str, owner: object, run: Run) -> torch.Tensor:
        """The value of a line that takes this one."""
        return cast(torch.Tensor, self._chain.record(self, Line(kind, owner, run)))

    def __add__(self, other: Symbol) -> Symbol:
        """The sum of the residual stream and what the last line gave, in either order."""
        return self._chain.add(self, other)

    def __bool__(self) -> bool:
        """Of no value known here."""
        raise NoChainError

    def __getattr__(self, name: str) -> Any:
        """No tensor's attributes."""
        raise NoChainError

    @classmethod
    def __torch_function__(cls, *_: Any, **__: Any) -> Any:
        """No operator of torch."""
        raise NoChainError


class Chain:
    """The lines of one layer, in order."""

    def __init__(self) -> None:
        """No lines yet."""
        self.lines: list[Line] = []
        self.value = self.stream = Symbol(self)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Of the lines."""
        return tuple(line.kind for line in self.lines)

    def record(self, taken: Symbol, line: Line) -> Symbol:
        """Append a line that takes the last value."""
        if taken is not self.value:
            raise NoChainError
        self.lines.append(line)
        self.value = Symbol(self)
        return self.value

    def add(self, one: Symbol, other: object) -> Symbol:
        """Append the sum of the stream and the last value."""
        if self.value is self.stream or not {id(one), id(other)} == {id(self.value), id(self.stream)}:
            raise NoChainError
        self.lines.append(Line("add", None, _no_run))
        self.value = self.stream = Symbol(self)
        return self.value


def _no_run(_: torch.Tensor) -> torch.Tensor:
    raise AssertionError("a sum has two operands")


def learn(forward: Run) -> Chain | None:
    """The lines of a layer's forward, which ends with a sum and does the same in every step; None: it has no chain."""
    chain = Chain()
    try:
        result: object = forward(cast(torch.Tensor, chain.value))
    except Exception:  # whatever it stumbles over: it may run as it is written
        return None
    return chain if chain.lines and result is chain.stream else None


def line(kind: str) -> Callable[[_Method[_Owner]], _Method[_Owner]]:
    """Make a method of a Layer, which takes and gives one tensor, a line of this kind."""

    def wrap(method: _Method[_Owner]) -> _Method[_Owner]:
        @functools.wraps(method)
        def call(self: _Owner, x: torch.Tensor) -> torch.Tensor:
            symbol: object = x
            if isinstance(symbol, Symbol):
                return symbol.record(kind, self, functools.partial(method, self))
            return method(self, x)

        return call

    return wrap
