"""What every test may rely on: time enough, and a Ctrl-C with its usual meaning, also in the background of a shell.

A shell starts background jobs with SIGINT ignored; Python then installs no handler, and every child inherits that.
"""

from __future__ import annotations

import signal

import pytest

from patience import patient


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """A test that hangs is ended after the time of the settings, stretched for a slow or busy machine."""
    if config.option.timeout is None:
        config.option.timeout = patient(float(config.getini("timeout")))


@pytest.fixture(scope="session", autouse=True)
def usual_interrupt() -> None:
    """Handle SIGINT as in the foreground."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
