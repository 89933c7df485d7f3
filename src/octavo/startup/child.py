"""What a process that serves another does first: it ties its life to that one's.

Owns the two calls of the kernel for it. Invariant: afterwards the process outlives its parent by no step, and gains no
rights.

Run as `python -m octavo.startup.child PARENT ARGUMENT ...` it does so and becomes `python ARGUMENT ...`.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38


def exit_with_parent(parent: int) -> bool:
    """Be killed when `parent` ends (Linux; elsewhere the end of what connects them does it). Whether it is there."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    return os.getppid() == parent


def command(*arguments: str) -> list[str]:
    """Of a Python process that ends with this one, whatever ends it. Its parent is the thread that starts it."""
    return [sys.executable, "-m", "octavo.startup.child", str(os.getpid()), *arguments]


def main(argv: Sequence[str]) -> int:
    """See the module."""
    if exit_with_parent(int(argv[0])):
        os.execv(sys.executable, [sys.executable, *argv[1:]])
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
