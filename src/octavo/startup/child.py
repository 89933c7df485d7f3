"""What a process that serves another does first: it ties its life to that one's.

Owns the two calls of the kernel for it. Invariant: afterwards the process outlives its parent by no step, and gains no
rights.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38


def exit_with_parent(parent: int) -> bool:
    """Be killed when `parent` ends (Linux; elsewhere the end of what connects them does it). Whether it is there."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    return os.getppid() == parent
