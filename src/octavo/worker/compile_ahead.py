"""What steps launch, compiled before there are any: a start's passes over steps of all sizes.

Owns which steps stand for all others. Does not know kernels or how they are compiled aside
(`octavo.ops.compile.side_by_side`). Invariant: no state changes; a step that no pass stood for compiles what it needs
when it is issued.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from octavo.device.batch import StepShape
from octavo.device.graphs import GraphKey
from octavo.plan import StepLimits

# Sizes between which operators choose other kernels, and some between.
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096)
_FEW_ROWS, _FEW_TOKENS = (2, 4, 8, 16, 32), (2, 4, 8)  # of steps whose rows verify some drafts, or end their prompts
MOST_DRAFTED = 256  # drafts of a step, and tokens that verify some: for so many logits there is room in any plan
_SETTLED_SECONDS = 0.5  # in which what the first steps launch is loaded, if it was compiled before


class Shape(NamedTuple):
    """A step that no graph holds."""

    num_rows: int
    num_tokens: int
    max_query_len: int
    max_seq_len: int
    every: bool  # hidden states of all tokens are asked for
    num_drafts: int = 0  # of each row

    @property
    def drafts(self) -> StepShape | None:
        """What is to be known of the step's drafts, if its rows have any."""
        if not self.num_drafts:
            return None
        each = np.ones(self.num_rows, np.int64)
        return StepShape(
            rows=0 * each,
            num_tokens=(1 + self.num_drafts) * each,
            query_start=np.arange(self.num_rows + 1, dtype=np.int32) * (1 + self.num_drafts),
            seq_lens=self.max_seq_len * each,
            max_query_len=self.max_query_len,
            max_seq_len=self.max_seq_len,
            sampling=each.cumsum() - 1,
            is_decode=False,
            num_drafts=self.num_drafts * each,
        )


class Rehearser(Protocol):
    """A runner, as far as it is needed here. It issues steps of which nothing comes."""

    def graph_keys(self) -> Sequence[GraphKey]:
        """Those that may be captured, the first ones first."""

    def rehearse(self, key: GraphKey) -> object:
        """Issue what a graph would hold."""

    def rehearse_writes(self) -> object:
        """Issue what brings a step's rows to the device."""

    def rehearse_step(self, shape: Shape) -> object:
        """Issue a step without a graph, with all that a sampler may do, and a drafter behind it."""


def step_shapes(limits: StepLimits, *, decodes: bool) -> list[Shape]:
    """Steps that stand for all that no graph holds, the largest first. decodes: those of rows that decode too."""
    max_num_tokens, max_model_len, most = limits.max_num_tokens, limits.max_model_len, limits.max_num_drafts
    found: dict[Shape, None] = {}
    for size in (max_num_tokens, *(size for size in reversed(_SIZES) if size < max_num_tokens)):
        for num_rows in _row_counts(size, limits.max_num_rows, max_model_len):
            longest = min(size - num_rows + 1, max_model_len)
            for length in {longest, max_model_len}:
                found[Shape(num_rows, size, longest, length, False)] = None
                if longest > 1:
                    found[Shape(num_rows, size, longest, length, True)] = None
                if 0 < most < longest and num_rows * (1 + most) <= min(size, max(limits.max_num_rows, MOST_DRAFTED)):
                    found[Shape(num_rows, size, longest, length, False, most)] = None
    for num_rows, longest in itertools.product(_FEW_ROWS, _FEW_TOKENS):
        size = num_rows - 1 + longest
        if num_rows <= limits.max_num_rows and size <= max_num_tokens and longest <= max_model_len:
            found |= {Shape(num_rows, size, longest, length, False): None for length in {longest, max_model_len}}
    largest_first = sorted(found, key=lambda shape: -shape.num_tokens)
    return [shape for shape in largest_first if decodes or shape.max_query_len > 1]


def _row_counts(num_tokens: int, most: int, longest: int) -> Iterator[int]:
    """The fewest rows that have so many tokens, some, and one for each."""
    fewest = -(-num_tokens // longest)
    for num_rows in sorted({fewest, num_tokens // 2, num_tokens}):
        if fewest <= num_rows <= most:
            yield num_rows


def compile_ahead(
    runner: Rehearser, told: Callable[[int, int, str], object], limits: StepLimits, num_threads: int = 0
) -> int:
    """Compile what a runner's steps launch, side by side; how many kernels were not compiled before.

    Two large steps find out whether any is missing, and one with drafts where there are any; if none is, that is all.
    told: see `side_by_side.Told`. num_threads: 0 means as many as processors.
    """
    from octavo.ops.compile import side_by_side  # needs Triton

    if not side_by_side.can_compile():
        return 0
    keys = runner.graph_keys()
    shapes = step_shapes(limits, decodes=not any(key.is_decode for key in keys))
    issued: list[Callable[[], object]] = [functools.partial(runner.rehearse, key) for key in keys]
    issued += [functools.partial(runner.rehearse_step, shape) for shape in shapes]
    issued.append(runner.rehearse_writes)
    num_first, drafted = 2, [place for place, shape in enumerate(shapes) if shape.num_drafts]
    if drafted:  # a start without a drafter has compiled all but what that launches
        issued.insert(2, issued.pop(len(keys) + drafted[0]))
        num_first = 3
    with side_by_side.compiling(told, num_threads) as made:
        for issue in issued[:num_first]:
            issue()
        if not made.is_settled(_SETTLED_SECONDS):
            for issue in issued[num_first:]:
                issue()
    return made.num_made
