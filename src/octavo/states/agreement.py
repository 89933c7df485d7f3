"""Whether two kernels were found to give the same bits, before the one that is to serve runs: asked of a GPU once.

Does not know what they compute. Invariant: nothing is compared while a graph is captured or a pass compiles.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

import torch

from octavo.ops.compile import driver, side_by_side, validation_cache

_LOG = logging.getLogger(__name__)
_found: dict[tuple[object, ...], bool] = {}  # by kernel, GPU and what the kernel was compiled for


def agrees(name: str, macros: Mapping[str, int | str], device: torch.device, compare: Callable[[], bool]) -> bool:
    """Whether kernel `name` gives the bits of the one that it stands for: what `compare` says, now or when it was kept.

    False while it is not known.
    """
    key = name, device.index, frozenset(macros.items())
    if key not in _found:
        if side_by_side.current() is not None:
            return True
        if torch.cuda.is_current_stream_capturing():
            return False
        try:
            _found[key] = validation_cache.holds([name, sorted(map(str, macros.items()))], device, compare)
        except torch.OutOfMemoryError:
            _LOG.warning("no memory to compare %s with the kernel that it stands for, which runs", name)
            _found[key] = False
            return False
        except driver.DriverError as error:
            _LOG.warning("%s cannot be launched, so the kernel that it stands for runs: %s", name, error)
            _found[key] = False
            return False
        if not _found[key]:
            _LOG.warning("%s sums in another order than Triton's kernel, which runs instead", name)
    return _found[key]
