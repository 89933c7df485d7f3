"""Kernels in CUDA C++ as the checker of races runs them, told in another way: on a CPU they end as they do else."""

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
import gpu_states_rig
import mamba2_rig
import race_check

CHECKS: dict[str, Callable[[], None]] = {
    "mamba2_decode": functools.partial(mamba2_rig.decoded_in_cuda, shapes=((8, 2),)),
    "mamba2_prompts": mamba2_rig.walked_in_cuda,
    "delta_step": lambda: gpu_states_rig.one_kernel_decodes((1, 2), (63, 30, 15, 1), 1),  # in rounds of three blocks
}


def run(name: str) -> None:
    """Within a rig's comparison with Triton's."""
    kernel = emulated._KERNELS[name]
    source = race_check.retold(kernel.own_source)
    assert source.count("#line 1 ") == len(kernel.texts) and f'#line 1 "{name}.cu"\n' in source
    left = r"(lane|% 32) == 0\) arrive\(|tell_some\(|some_together\("
    assert not re.search(left, source), "one that rewriting does not know"
    rewritten = dataclasses.replace(kernel)
    rewritten.__dict__["own_source"] = source
    with unittest.mock.patch.dict(emulated._KERNELS, {name: rewritten}):
        CHECKS[name]()


INTERPRETED = {Path(each).stem: lambda each=each: run(Path(each).stem) for each in race_check.RETOLD}
