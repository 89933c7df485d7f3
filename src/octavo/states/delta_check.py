"""Whether the gated delta rule's kernels in CUDA C++ give Triton's bits: both run an example of a layer's own shape.

Owns what the example would have kept, and is given, drawn at random. Does not know which kernels there are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from octavo.ops.scan import DeltaOperands
from octavo.states.base import LayerStates
from octavo.states.example import Example
from octavo.states.launches import Told

Run = Callable[[LayerStates, Told, DeltaOperands, Tensor, Tensor, Tensor], Tensor]
PROMPT = 64, 86  # tokens computed before, and those of the step: from a state on, past a border, into an open chunk
CONTINUED = 64 + 41, 86  # from within a block of 16 tokens on
DECODED = 64 + 41, 1


def results(
    own: LayerStates, told: Told, rule: DeltaOperands, like: Tensor, row: tuple[int, int], runs: Sequence[Run]
) -> list[list[Tensor]]:
    """What each run gives of one row, and all that is then kept. like: of the type of what tokens bring."""
    count, example = row[1], Example(own, told, row, like.device)
    kept = [example.draw(*shape) for shape in example.shapes]
    kept[1] *= rule.key_size**-0.5
    kept[4], kept[5] = -kept[4].abs(), kept[5].sigmoid()
    kept = [each.to(store.dtype) for each, store in zip(kept, told.kept, strict=True)]
    channels = 2 * rule.num_key_heads * rule.key_size + rule.num_heads * rule.value_size
    qkv, a, b = (example.draw(count, width).to(like.dtype) for width in (channels, rule.num_heads, rule.num_heads))

    def of_example(run: Run) -> Callable[[LayerStates, Told], tuple[Tensor]]:
        return lambda own, told: (run(own, told, rule, qkv, a, b),)

    return example.results(kept, [of_example(run) for run in runs])
