"""A decode step with a user's mod in a process of its own: prints what torch's cache of compiled graphs did.

Run as a program with the mod's number; the cache lies where TORCHINDUCTOR_CACHE_DIR says.
"""

from __future__ import annotations

import dataclasses
import sys

import torch

from octavo.attention.flex import FlexBackend
from octavo.attention.mods import AttentionMods
from test_flex_gpu import BF16, DEVICE, PLAIN, Step, make_rows


def main(number: int) -> None:
    def mask(b, h, q_idx, kv_idx):
        return (kv_idx % number != 3) | (q_idx - kv_idx < 64)

    step, variant = Step(make_rows([(300, 1), (90, 1)])), dataclasses.replace(PLAIN, mods=AttentionMods(mask_mod=mask))
    step.run(FlexBackend([variant], BF16, DEVICE, step.setup()), variant)
    counters = torch._dynamo.utils.counters["inductor"]
    print(counters["fxgraph_cache_hit"], counters["fxgraph_cache_miss"])


if __name__ == "__main__":
    main(int(sys.argv[1]))
