"""Copies over the bus beside 64 rows that decode, ordered in other ways: `python bench/h200/copies.py --shape 8b`.

One engine; for each way rounds of the phases of `octavo bench connectors`. A way is the MiB of a window, how many of
them are under way, and the share of the bus that copies to the GPU, and from it, may take beside steps (1: all of it).
The default is named first, and again last: the machine may change meanwhile.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import ClassVar

import torch

from octavo.bench import connectors
from octavo.bench.shapes import SHAPES
from octavo.kv_connector.worker import cache_bytes
from octavo.ops.windows import Windows

WAYS = (  # MiB, under way, share to the GPU, share from it
    (64, 4, 0.88, 0.92),
    (96, 3, 0.88, 0.92),
    (128, 2, 0.88, 0.92),
    (1024, 4, 1.0, 1.0),  # a transfer in one call
)
NAMES = ("load_gb_s", "beside_loads_share", "save_gb_s", "beside_saves_share")


class _Noted(Windows):
    """Those of an engine: from its cache, then to it. A CPU has none."""

    made: ClassVar[list[Windows]] = []

    def __init__(self, most: int, share: float, computes: Callable[[], bool]) -> None:
        super().__init__(most, share, computes)
        self.made.append(self)


def main() -> None:
    """A line for each way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="8b")
    parser.add_argument("--length", type=int, default=2000)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    device, dtype = ("cuda", "bfloat16") if torch.cuda.is_available() else ("cpu", "float32")
    usual = cache_bytes._WINDOW_BYTES >> 20, cache_bytes._MAX_WINDOWS
    usual += cache_bytes._SHARE_TO_CACHE, cache_bytes._SHARE_FROM_CACHE
    bus = connectors.bus()
    print(
        f"the bus: {bus.get('bus_to_device_gb_s', 0):.1f} GB/s to the GPU, {bus.get('bus_to_host_gb_s', 0):.1f} from it"
    )
    print(f"{'MiB':>5}{'ahead':>6}{'shares':>12}   loads GB/s  decoding keeps   saves GB/s  decoding keeps")
    cache_bytes.Windows = _Noted  # type: ignore[misc]
    fields = {"device": device, "dtype": dtype}
    with connectors.decoding(options.shape, options.length, fields, num_rows=options.rows) as phases:
        for way in (usual, *WAYS, usual):
            cache_bytes._WINDOW_BYTES = way[0] << 20
            for windows, share in zip(_Noted.made, (way[3], way[2]), strict=False):
                windows.most, windows.share = way[1], share
            rounds = [phases.round() for _ in range(options.rounds)]
            found = [statistics.median(each[name] for each in rounds) for name in NAMES]
            line = f"{way[0]:>5}{way[1]:>6}  {way[2]:>4.2f}, {way[3]:>4.2f}   {found[0]:>10.1f}  {found[1]:>14.3f}"
            print(f"{line}   {found[2]:>10.1f}  {found[3]:>14.3f}", flush=True)
    shown = ", ".join(f"{windows.rate / 1e9:.1f}" for windows in _Noted.made)
    print(f"the bus as windows show it, GB/s from the GPU and to it: {shown}")


if __name__ == "__main__":
    main()
