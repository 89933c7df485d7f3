"""What an engine lets people see: logging, the phases of a start, a progress bar.

Owns how these are collected and shown, and nothing that they describe. Importing it configures nothing. Invariant:
observing never changes what is computed; the progress bar is a null object unless it is wanted.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TextIO

LOGGER = logging.getLogger("octavo")
_QUIET_SECONDS = 1.0  # of a Count, at first
_DRAWN_SECONDS, _LOGGED_SECONDS = 0.1, 2.0  # between the lines of a Count, on a terminal and in the log


def setup_logging(level: str = "warning") -> None:
    """Send Octavo's log to stderr, one line per record, from `level` on. Applications have their own set-up."""
    if not LOGGER.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        LOGGER.addHandler(handler)
        LOGGER.propagate = False
    LOGGER.setLevel(level.upper())


class Phases:
    """Named durations of a start, in order: `with phases("load weights"): ...`. Phases may nest."""

    def __init__(self) -> None:
        """The clock starts with the process where the system tells, else here."""
        now = time.perf_counter()
        age = _process_age()
        self._start = now - age
        self._depth = 0
        self.entries: list[tuple[str, float, int]] = [("start Python", age, 0)] if age else []  # name, seconds, depth

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time the block. It is listed also if it raises."""
        index, began = len(self.entries), time.perf_counter()
        self.entries.append((name, 0.0, self._depth))
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            self.entries[index] = (name, time.perf_counter() - began, self._depth)

    @property
    def total(self) -> float:
        """Seconds since the start of the process."""
        return time.perf_counter() - self._start

    def table(self) -> str:
        """One line per phase, then what no phase covers, then the total."""
        total = self.total
        rest = total - sum(seconds for _, seconds, depth in self.entries if depth == 0)
        rows = [("  " * depth + name, seconds) for name, seconds, depth in self.entries]
        rows += [("other", rest), ("total", total)]
        return "\n".join(f"  {name:<32} {seconds:7.3f} s" for name, seconds in rows)


def _process_age() -> float:
    """Seconds since this process started; 0.0 where the system does not tell."""
    try:
        with open("/proc/self/stat", encoding="ascii", errors="replace") as file:
            ticks = int(file.read().rpartition(")")[2].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0
    return max(age, 0.0)


class Count:
    """How many of some things are done: on a terminal a line that is written anew, else one in the log now and then.

    What is over before anyone asks how long it takes shows nothing.
    """

    def __init__(self, what: str, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """`what` is under way, e.g. "compiling kernels". `stream`: None takes stderr."""
        self._what, self._stream, self._clock = what, stream or sys.stderr, clock
        self._is_terminal = self._stream.isatty()
        self._began, self._shown = clock(), -1.0
        self._done = self._total = 0

    def __call__(self, done: int, total: int, name: str) -> None:
        """`done` of `total`, so far, with `name` as the last one. One call at a time, from any thread."""
        self._done, self._total = done, total
        after = self._clock() - self._began
        if after < _QUIET_SECONDS or (self._shown >= 0 and after - self._shown < self._pause and done < total):
            return
        self._shown = after
        line = f"{self._what}: {done} of {total} after {after:.1f} s ({name})"
        if self._is_terminal:
            self._stream.write(f"\r{line}\x1b[K")
            self._stream.flush()
        else:
            LOGGER.warning("%s", line)

    @property
    def _pause(self) -> float:
        return _DRAWN_SECONDS if self._is_terminal else _LOGGED_SECONDS

    def close(self) -> None:
        """End the line. Nothing comes after."""
        if self._shown < 0:
            return
        line = f"{self._what}: {self._done} of {self._total} in {self._clock() - self._began:.1f} s"
        if self._is_terminal:
            self._stream.write(f"\r{line}\x1b[K\n")
            self._stream.flush()
        else:
            LOGGER.warning("%s, kept for later starts", line)


class Progress(Protocol):
    """Counts what a run of many prompts has done."""

    def add(self, num_prompts: int = 0, num_input_tokens: int = 0, num_output_tokens: int = 0) -> None:
        """Count finished prompts, computed prompt tokens and generated tokens since the last call."""


class NullProgress:
    """Shows nothing."""

    def add(self, num_prompts: int = 0, num_input_tokens: int = 0, num_output_tokens: int = 0) -> None:
        """Nothing."""


class BarProgress:
    """A bar with prompts/s and tokens/s on stderr."""

    def __init__(self, bar: Any, total: int) -> None:
        """`bar` is a started rich.progress.Progress."""
        self._bar, self._start = bar, time.perf_counter()
        self._prompts = self._input = self._output = 0
        self._task = bar.add_task("prompts", total=total, rates="")

    def add(self, num_prompts: int = 0, num_input_tokens: int = 0, num_output_tokens: int = 0) -> None:
        """Count, and redraw when the bar's refresh comes."""
        self._prompts += num_prompts
        self._input += num_input_tokens
        self._output += num_output_tokens
        seconds = max(time.perf_counter() - self._start, 1e-9)
        rates = (
            f"{self._prompts / seconds:.2f} prompts/s, input {self._input / seconds:.0f} tokens/s, "
            f"output {self._output / seconds:.0f} tokens/s"
        )
        self._bar.update(self._task, completed=self._prompts, rates=rates)


@contextlib.contextmanager
def progress(total: int, *, wanted: bool | None = None) -> Iterator[Progress]:
    """A progress bar over `total` prompts; `wanted=None` shows it only if stderr is a terminal."""
    if not (sys.stderr.isatty() if wanted is None else wanted):
        yield NullProgress()
        return
    from rich import progress as bars
    from rich.console import Console

    columns = (
        bars.TextColumn("{task.description}"),
        bars.BarColumn(),
        bars.MofNCompleteColumn(),
        bars.TimeElapsedColumn(),
        bars.TextColumn("{task.fields[rates]}"),
    )
    with bars.Progress(*columns, console=Console(stderr=True), refresh_per_second=5) as bar:
        yield BarProgress(bar, total)
