"""Processes that stand still: a signal was sent is no fact yet, a process that is stopped is one."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from patience import patient


def stop(pid: int) -> None:
    """Send SIGSTOP, and wait until every thread of the process stands still: until then any of them may answer."""
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + patient(20)
    while any(state != "T" for state in _states(pid)):
        assert time.monotonic() < deadline, f"process {pid} does not stop: its threads are {_states(pid)}"
        time.sleep(0.001)


def _states(pid: int) -> list[str]:
    states = []
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        try:
            states.append(stat.read_text().rpartition(")")[2].split()[0])
        except OSError:  # the thread has ended
            continue
    return states
