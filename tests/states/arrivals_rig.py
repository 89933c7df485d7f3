"""Kernels in CUDA C++ as the checker of races runs them, whose lanes each arrive: on a CPU they end as they do else."""

from __future__ import annotations

import dataclasses
import functools
import re
import sys
import unittest.mock
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "gpu"))

import emulated
import mamba2_rig
import race_check

CHECKS: dict[str, Callable[[], None]] = {
    "mamba2_decode": functools.partial(mamba2_rig.decoded_in_cuda, shapes=((8, 2),)),
    "mamba2_prompts": mamba2_rig.walked_in_cuda,
}


def run(name: str) -> None:
    """Within a rig's comparison with Triton's."""
    kernel = emulated._KERNELS[name]
    source = race_check.told_of_each(kernel.own_source)
    assert source.count("#line 1 ") == len(kernel.texts) and f'#line 1 "{name}.cu"\n' in source
    assert not re.search(r"(lane|% 32) == 0\) arrive\(", source), "one that rewriting does not know"
    rewritten = dataclasses.replace(kernel)
    rewritten.__dict__["own_source"] = source
    with unittest.mock.patch.dict(emulated._KERNELS, {name: rewritten}):
        CHECKS[name]()


INTERPRETED = {Path(each).stem: lambda each=each: run(Path(each).stem) for each in race_check.ONE_ARRIVES}
