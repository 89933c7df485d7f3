"""Masks of grammars, made beside the steps: a mask that takes long costs its own row time, and no other row.

Owns the threads in three lanes: one for what is quick, and two of a lower priority, for forms that are still to be
compiled and for those whose masks were slow, so that they hold up neither the quick ones nor the model's own threads.
Knows no rows and no logits. Invariant: every job ends, with the tokens that may follow or with the reason why none may,
whatever its form does; a job's result is a function of its form and its output, not of the lane or the time.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
import weakref
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from octavo.sampling.thinking import Form
from octavo.startup.forks import tell_in_child

_LOG = logging.getLogger(__name__)

NUM_COMPILE_THREADS, NUM_SLOW_THREADS = 2, 1
NICENESS = 10  # a tenth of the processor time of a thread of the model that wants the same core


class MaskJob:
    """The tokens that may follow `output`. What it gives may be read once `is_done`."""

    __slots__ = ("_lock", "bits", "cancelled", "is_done", "latch", "matcher", "met_limit", "output")

    def __init__(self, matcher: Form, lock: threading.Lock, output: NDArray[np.int32], num_words: int) -> None:
        """`lock`: the matcher's, which follows one output at a time; `num_words`: `Grammars.num_words`."""
        self.matcher = matcher
        self.output = output
        self.bits = np.zeros(num_words, np.int32)  # empty where nothing may follow
        self.met_limit = False  # the form is too complex to go on
        self.is_done = self.cancelled = False
        self.latch: _Latch | None = None  # of who waits
        self._lock = lock

    def run(self) -> None:
        """Do it, in a thread of a lane."""
        if self.cancelled:
            return
        try:
            with self._lock:
                began = time.thread_time()
                if not self.matcher.is_compiled:
                    self.matcher.prepare()
                    began = time.thread_time()
                self.met_limit = not self.matcher.fill(self.output, self.bits) and self.matcher.met_limit
                self.matcher.note(time.thread_time() - began)
        except BaseException as error:  # a panic of the library among them: it ends this row, not the lane
            _LOG.error("a grammar failed: %s", type(error).__name__)
            self.met_limit = True
            self.bits[:] = 0


class _Latch:
    """Opens when so many jobs are done."""

    def __init__(self, num_left: int) -> None:
        self.num_left = num_left
        self.opened = threading.Lock()
        self.opened.acquire()


class MaskLanes:
    """The threads that run jobs. They start with the first job, and end when the lanes are forgotten."""

    def __init__(self) -> None:
        """Nothing is started."""
        self._empty()
        tell_in_child(self._empty)

    def _empty(self) -> None:
        """Forget all jobs and threads: a forked process has none of these."""
        self._quick: queue.SimpleQueue[MaskJob | None] = queue.SimpleQueue()
        self._compile: queue.SimpleQueue[MaskJob | None] = queue.SimpleQueue()
        self._slow: queue.SimpleQueue[MaskJob | None] = queue.SimpleQueue()
        self._ends = threading.Lock()  # of jobs, one after the other
        self._started = False

    def submit(self, job: MaskJob) -> None:
        """Queue a job in its form's lane."""
        if not self._started:
            self._started = True
            self._start()
        form = job.matcher
        lane = self._compile if not form.is_compiled else self._slow if form.is_slow else self._quick
        lane.put(job)

    def wait(self, jobs: Iterable[MaskJob], num_wanted: int, seconds: float) -> None:
        """Wait until `num_wanted` of `jobs` are done, for so many seconds at most. One thread waits at a time."""
        with self._ends:
            pending = [job for job in jobs if not job.is_done]
            latch = _Latch(min(num_wanted, len(pending)))
            for job in pending:
                job.latch = latch
        if pending and num_wanted > 0:
            latch.opened.acquire(timeout=max(seconds, 0.0))

    def _start(self) -> None:
        num_quick = min(max(2, (os.cpu_count() or 1) // 4), 4)  # the second goes on where the first meets a slow mask
        lanes = [
            (self._quick, 0, num_quick, self._slow),
            (self._compile, NICENESS, NUM_COMPILE_THREADS, None),
            (self._slow, NICENESS, NUM_SLOW_THREADS, None),
        ]
        for jobs, niceness, num_threads, other in lanes:
            for _ in range(num_threads):
                arguments = (jobs, niceness, other, self._ends)
                threading.Thread(target=_work, args=arguments, name="octavo-masks", daemon=True).start()
                weakref.finalize(self, jobs.put, None)


_Lane = queue.SimpleQueue["MaskJob | None"]


def _work(jobs: _Lane, niceness: int, slow: _Lane | None, ends: threading.Lock) -> None:
    """Run jobs until there is a None. `slow`: where those go whose form has proved slow meanwhile."""
    if niceness:
        with contextlib.suppress(AttributeError, OSError):  # on Linux the number of a thread is as good as a process's
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)
    while (job := jobs.get()) is not None:
        if slow is not None and job.matcher.is_slow:
            slow.put(job)
            continue
        job.run()
        with ends:
            job.is_done = True
            latch = job.latch
            if latch is not None:
                latch.num_left -= 1
                if latch.num_left == 0:
                    latch.opened.release()
        del job, latch  # their row may be gone before the next one comes
