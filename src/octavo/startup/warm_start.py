"""The part of an engine's start that needs no torch, before and while that is imported.

Owns the threads that open the GPU meanwhile, and how seldom garbage is looked for. Importing it imports no torch.
Invariant: a start depends on this for its time only.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.config.engine_config import EngineConfig
from octavo.observe import Phases
from octavo.speculate import NO_SPECULATOR, Speculator
from octavo.startup import gc_control
from octavo.startup.cuda_init import has_device_file, open_counter, open_driver
from octavo.startup.fresh_pages import FRESH_PAGES, bytes_of_weights

if TYPE_CHECKING:
    from octavo.startup.build import Built

_TURN_SECONDS = 0.0005


def start(config: EngineConfig, phases: Phases, *, text: bool = True, speculator: Speculator = NO_SPECULATOR) -> Built:
    """See `octavo.startup.build.build_core`."""
    if config.device != "cpu" and not _has_opened():
        for opens in (open_driver, open_counter):
            threading.Thread(target=opens, name=f"octavo-{opens.__name__}", daemon=True).start()
    if config.load_format != "dummy" and (config.device == "cpu" or not has_device_file()):
        FRESH_PAGES.begin(bytes_of_weights(Path(config.model), config.quantization))  # of a model that is a folder
    with FRESH_PAGES, gc_control.relaxed(), _short_turns():
        with phases("import torch and the engine"), gc_control.loading():
            from octavo.worker.device import Opening  # torch, and little else: the GPU opens while the rest comes

            opening = Opening(config)
            from octavo.startup.build import build_core
        return build_core(config, phases, opening, text=text, speculator=speculator)


def _has_opened() -> bool:
    """Whether torch has opened a GPU here, which need not be the first: others are nobody's then."""
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda.is_initialized())


@contextlib.contextmanager
def _short_turns() -> Iterator[None]:
    """Within: threads that let others compute for a moment, as one does between torch's operators, go on soon.

    By default one waits 5 ms for another that computes.
    """
    before = sys.getswitchinterval()
    sys.setswitchinterval(min(before, _TURN_SECONDS))
    try:
        yield
    finally:
        sys.setswitchinterval(before)
