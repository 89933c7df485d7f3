"""What every test may rely on: time enough, and a Ctrl-C with its usual meaning, also in the background of a shell.

What was imported and collected lives as long as the process: the collector of garbage does not look at it meanwhile.

Random examples are the same in every run, so that a change is judged by what it changes; `OCTAVO_TEST_EXPLORE=1` draws
others, for who looks for faults.

A shell starts background jobs with SIGINT ignored; Python then installs no handler, and every child inherits that.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
from collections.abc import Iterator

import hypothesis
import pytest

from patience import patient

LONG = ("tests/states/test_state_kernels.py", "tests/ops/test_ops_interpreted.py")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """A test that hangs is ended after the time of the settings, stretched for a slow or busy machine."""
    if config.option.timeout is None:
        config.option.timeout = patient(float(config.getini("timeout")))
    if not os.environ.get("OCTAVO_TEST_EXPLORE"):
        hypothesis.settings.register_profile("same", derandomize=True)
        hypothesis.settings.load_profile("same")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One process more than there are cores: a third of the tests' time they wait, for servers and for deadlines."""
    return (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1) + 1


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with a process that takes minutes begin first: one that began last would end when all others are done."""
    items.sort(key=lambda item: not item.nodeid.startswith(LONG))


@pytest.hookimpl(hookwrapper=True)
def pytest_collection() -> Iterator[None]:
    """Two million objects that stay: looking at them took a third of the collection."""
    gc.disable()
    yield
    gc.freeze()
    gc.unfreeze()  # into the oldest generation: what asks whether something is frozen would count it for 20 ms
    gc.enable()


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """What a command sets up of the log, in this process, ends with its test: its stream is that test's stderr."""
    logger = logging.getLogger("octavo")
    handlers, propagate, level = [*logger.handlers], logger.propagate, logger.level
    yield
    logger.handlers[:], logger.propagate = handlers, propagate
    logger.setLevel(level)


@pytest.fixture(scope="session", autouse=True)
def usual_interrupt() -> None:
    """Handle SIGINT as in the foreground."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
