"""What every test may rely on: Ctrl-C has its usual meaning, also where the tests run in the background of a shell.

A shell starts background jobs with SIGINT ignored; Python then installs no handler, and every child inherits that.
"""

from __future__ import annotations

import signal

import pytest


@pytest.fixture(scope="session", autouse=True)
def usual_interrupt() -> None:
    """Handle SIGINT as in the foreground."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
