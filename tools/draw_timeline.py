"""Draw what the host and a GPU do during decode steps: `python tools/draw_timeline.py steps.json timeline.png`.

The input is what `python bench/engine.py --shape 0.6b --workload none --timeline steps.json` writes on a machine with a
GPU; drawing needs matplotlib. Above: all steps. Below: the end of one, around the copy of its results.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from octavo.bench.gpu_profile import FAMILIES, family_of

HOST_COLORS = {
    "schedule": "#f4d35e",
    "issue": "#ee964b",
    "wait": "#e8e8e8",
    "update": "#a3d977",
    "outputs": "#c9b1ff",
    "apply": "#f9c784",
    "stage": "#f4845f",
}
DEVICE_COLORS = dict(zip([*FAMILIES, "other"], ["#c0392b", "#2c4a8e", "#16a085", "#8e44ad", "#7f8c1a", "#795548"]))
ZOOM = 800.0  # microseconds


def color_of(lane: str, name: str) -> str:
    """The color of an event."""
    if lane in ("engine", "issue"):
        return HOST_COLORS[name]
    if lane.startswith("stream"):
        return DEVICE_COLORS[family_of(name)]
    return HOST_COLORS["wait"] if "Synchronize" in name else "#8c8c8c"


def lanes_of(events: list[Any]) -> list[str]:
    """Host first, then streams, the busiest first."""
    busy: dict[str, float] = {}
    for lane, _, _, length in events:
        if lane.startswith("stream"):
            busy[lane] = busy.get(lane, 0.0) + length
    return ["engine", "issue", "CUDA", *sorted(busy, key=lambda lane: -busy[lane])]


def draw(axes: Any, events: list[Any], lanes: list[str], begin: float, end: float) -> None:
    """The events between two times."""
    for height, lane in enumerate(lanes):
        shown = [event for event in events if event[0] == lane and event[2] < end and event[2] + event[3] > begin]
        axes.broken_barh(
            [(start, length) for _, _, start, length in shown],
            (-height - 0.4, 0.8),
            color=[color_of(lane, name) for _, name, _, _ in shown],
        )
    axes.set_xlim(begin, end)
    axes.set_yticks([-height for height in range(len(lanes))], lanes)
    axes.set_xlabel("microseconds")


def main() -> None:
    """Draw."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    arguments = parser.parse_args()
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    document = json.loads(arguments.source.read_text())
    events, lanes = document["events"], lanes_of(document["events"])
    figure, (above, below) = plt.subplots(2, 1, figsize=(13, 6), constrained_layout=True)
    end = max(start + length for _, _, start, length in events)
    draw(above, events, lanes, 0.0, end)
    ends = [start for _, name, start, _ in events if name.startswith("_commit")]  # the last kernel of a step
    begin = ends[(len(ends) - 1) // 2] - ZOOM / 4 if ends else 0.0
    draw(below, events, lanes, begin, begin + ZOOM)
    above.axvspan(begin, begin + ZOOM, color="#000000", alpha=0.08)
    above.set_title(f"Decode steps of {document['rows']} requests, {document['shape']}, under the profiler")
    patches = [Patch(color=color, label=name) for name, color in (HOST_COLORS | DEVICE_COLORS).items()]
    figure.legend(handles=patches, ncols=7, loc="outside lower center", fontsize="small")
    figure.savefig(arguments.target, dpi=110)


if __name__ == "__main__":
    main()
