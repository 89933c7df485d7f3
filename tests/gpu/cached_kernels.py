"""Steps with a user's mod in a process of its own: prints what became of its kernels and the bits of what they gave.

Run as a program with the mod's number and a file to keep the outputs in; XDG_CACHE_HOME says where kernels are kept.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import sys

import torch

from flex_gpu_rig import BF16, DEVICE, HEADS, PLAIN, Step, make_rows
from octavo.attention.flex.backend import FlexBackend
from octavo.attention.mods import AttentionMods

SLOPES = torch.linspace(0.01, 0.2, HEADS, device=DEVICE)


def mods_of(number: int) -> AttentionMods:
    """A mask with a number, and a score with a captured tensor."""

    def mask(b, h, q_idx, kv_idx):
        return (kv_idx % number != 3) | (q_idx - kv_idx < 64)

    def score(value, b, h, q_idx, kv_idx):
        return value - SLOPES[h] * (q_idx - kv_idx)

    return AttentionMods(mask_mod=mask, score_mod=score)


class Told(logging.Handler):
    """What the log says of kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        logger = logging.getLogger("octavo")
        logger.setLevel(logging.INFO)
        logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def count(self, words: str) -> int:
        return sum(words in line for line in self.lines)


@torch.inference_mode()
def main(number: int, file: str) -> None:
    told = Told()
    spec = dataclasses.replace(PLAIN, mods=mods_of(number))
    outs = []
    for rows in ([(300, 1), (2500, 1)], [(300, 1), (64, 64), (4200, 130)]):
        step = Step(make_rows(rows))
        outs.append(step.run(FlexBackend([spec], BF16, DEVICE, step.setup()), spec).cpu())
    torch.save(outs, file)
    answer = {
        "kept": told.count("compiled, kept at"),
        "found": told.count("found at"),
        "compiler": any(f"torch.{name}" in sys.modules for name in ("_dynamo", "_inductor")),
        "lines": told.lines,
    }
    print(json.dumps(answer))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
