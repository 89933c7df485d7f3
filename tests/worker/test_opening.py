"""A start that is refused while a GPU opens."""

from __future__ import annotations

import subprocess
import sys

_REFUSED = """
import threading, torch
from octavo.config.engine_config import EngineConfig
from octavo.worker import device

refused = threading.Event()

def open_slowly(cuda):
    refused.wait()
    print("opened")

device._open, device.has_driver, torch.version.cuda = open_slowly, lambda: True, "13.0"
device.Opening(EngineConfig(model="octavo-tiny", device="cuda"))
refused.set()
raise ValueError("refused")
"""


def test_a_start_that_is_refused_waits_for_the_gpu_that_opens() -> None:
    """A daemon thread that comes out of torch when the interpreter has ended calls std::terminate."""
    ended = subprocess.run([sys.executable, "-c", _REFUSED], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 1 and "refused" in ended.stderr and ended.stdout == "opened\n"
