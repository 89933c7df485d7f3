"""GraphPool: CUDA graphs of whole decode steps.

Owns which batch shapes are captured, the capture and the replay. Does not know what a step does: it is given a
function that issues one for a padded number of rows. Invariants: a graph reads and writes memory that stays where it
is; graphs share one memory pool, so what one leaves in it holds until the next replay; only batches whose every row
computes the token that it sampled last take a graph.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable

import torch

from octavo.device.batch import Work


@dataclasses.dataclass(frozen=True, order=True, slots=True)
class GraphKey:
    """The shape that a graph was captured for. 0 rows: no graph, the step is issued kernel by kernel."""

    num_rows: int


EAGER = GraphKey(0)


def decode_sizes(max_num_rows: int) -> list[int]:
    """Padded row counts worth a graph: close together where padding costs most. The last one is `max_num_rows`."""
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, 512, 16), *range(512, max_num_rows, 32)]
    return [*(size for size in sizes if size < max_num_rows), max_num_rows]


class GraphPool:
    """The graphs of one runner. With no sizes it is the null object: every step is EAGER."""

    def __init__(self, sizes: list[int]) -> None:
        """`sizes`: ascending padded row counts."""
        self._keys = [GraphKey(size) for size in sizes]
        self._graphs: dict[GraphKey, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}

    def capture(self, issue: Callable[[int], torch.Tensor]) -> None:
        """Capture `issue(num_rows)` for every size, the largest first, so that the others fit in its memory.

        `issue` must have no effect while the tables are empty; what it returns, `replay` gives. Memory of the pool
        that it returns is not kept: it holds until the next replay.
        """
        pool = torch.cuda.graph_pool_handle() if self._keys else None
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            for key in reversed(self._keys):
                issue(key.num_rows)  # compiles and loads what the graph launches
                graph = torch.cuda.CUDAGraph()
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                try:
                    output = issue(key.num_rows)
                finally:
                    graph.capture_end()
                self._graphs[key] = graph, _alias(output)
                del output
        torch.cuda.synchronize()

    def dispatch(self, work: Work) -> GraphKey:
        """The smallest graph that holds a step, or EAGER. A chunk of a prompt takes no graph, however short it is."""
        place = bisect.bisect_left(self._keys, GraphKey(work.num_rows)) if work.is_decode else len(self._keys)
        return self._keys[place] if place < len(self._keys) else EAGER

    def replay(self, key: GraphKey) -> torch.Tensor:
        """Run a captured step. The result holds until the next replay."""
        graph, output = self._graphs[key]
        graph.replay()
        return output


class _Memory:
    """Device memory of a tensor, for torch.as_tensor: it is neither kept nor copied."""

    def __init__(self, tensor: torch.Tensor) -> None:
        assert tensor.is_contiguous() and tensor.dtype == torch.float32, "graphs give contiguous float32"
        self.__cuda_array_interface__ = {
            "shape": tuple(tensor.shape), "typestr": "<f4", "data": (tensor.data_ptr(), False), "version": 3,
        }  # fmt: skip


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, which others may be given once `tensor` is gone."""
    return torch.as_tensor(_Memory(tensor), device=tensor.device)
