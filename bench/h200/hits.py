"""A prompt whose blocks are in host memory, with and without gates: `python bench/h200/hits.py --shape 8b`.

With gates layers of the step's graph wait for their own blocks; without, the graph waits for all of them. The last
column is a hit in the GPU's own cache, by the same graph: what gates that are open cost. Milliseconds; ordering is
the part of the load that the host takes, before it issues the step.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from octavo.bench import connectors
from octavo.bench.shapes import SHAPES
from octavo.kv_connector.worker.mover import Mover
from octavo.ops.arrivals import NO_GATES
from octavo.worker import assembly


def _timed(call: Callable[..., Any], found: list[float]) -> Callable[..., Any]:
    def timed(*args: Any) -> Any:
        started = time.perf_counter()
        result = call(*args)
        found.append(time.perf_counter() - started)
        return result

    return timed


def main() -> None:
    """A line for each way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="8b")
    parser.add_argument("--length", type=int, default=2000)
    options = parser.parse_args()
    device, dtype = ("cuda", "bfloat16") if torch.cuda.is_available() else ("cpu", "float32")
    make_gates, begin_now = assembly.make_gates, Mover.begin_now
    lines = [f"{'ms':12}{'computed':>10}{'hit':>8}{'times':>8}{'load':>8}{'ordering':>10}{'own hit':>9}"]
    for name in ("gates", "no gates"):
        made, ordering = list[bool](), list[float]()

        def make(num_layers: int, place: torch.device, name: str = name, made: list[bool] = made) -> Any:
            gates = make_gates(num_layers, place) if name == "gates" else NO_GATES
            made.append(bool(gates))
            return gates

        assembly.make_gates = make
        Mover.begin_now = _timed(begin_now, ordering)  # type: ignore[method-assign]
        fields = {"device": device, "dtype": dtype}
        try:
            found = connectors.first_tokens(options.shape, options.length, fields, ways=["host"])
        except Exception as error:  # of a driver: the other way is measured all the same
            lines.append(f"{name}: {type(error).__name__}: {error}"[:160])
            continue
        computed, hit, load, own = (1e3 * found[f"host_{each}_s"] for each in ("computed", "hit", "load", "own_hit"))
        shown = name if made in ([], [name == "gates"]) else "NONE MADE"
        line = f"{shown:12}{computed:>10.2f}{hit:>8.2f}{computed / hit:>8.2f}{load:>8.2f}"
        lines.append(f"{line}{1e3 * statistics.median(ordering):>10.2f}{own:>9.2f}")
        print(lines[-1], flush=True)
    print("\n".join(["", *lines]))


if __name__ == "__main__":
    main()
