"""NixlAgent: an agent of NIXL's with the memory that it may move.

Owns the calls of the library, under a lock: NIXL's own threads are off, so whoever waits for bytes, on either side,
asks NIXL again and again, and a transfer goes on only then. Invariant: behind `close` no byte of a transfer that was
given up arrives any more. Over TCP it would as long as the agent lived, whatever became of its handle.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from octavo.kv_connector.peers import NIXL
from octavo.kv_connector.worker.pair import Meanwhile, Pair, TransferError, yield_interpreter

POLL = 0.00005  # seconds between two questions whether the other side wants something
_LOOK = 0.00003  # seconds between two looks at a transfer, of which each may let it go on
_EAGER = 0.005  # seconds in which they follow each other at once: as long as a prompt takes over NVLink


def _library() -> Any:
    """NIXL's calls: of the package for torch's CUDA, if it is there, else of the other one. Raises ImportError."""
    own = f"nixl_cu{(torch.version.cuda or '').partition('.')[0]}"
    packages = sorted(NIXL, key=lambda name: name != own)
    found = [name for name in packages if importlib.util.find_spec(name) is not None]
    return importlib.import_module(f"{(found or packages)[0]}._api")


def _leave_stdout() -> None:
    """NIXL logs to stdout, which is the program's: its warnings go where others' go."""
    log = logging.getLogger("nixl")
    log.handlers.clear()
    log.propagate = True
    if not os.environ.get("NIXL_LOG_LEVEL"):
        log.setLevel(logging.WARNING)


class Runs(NamedTuple):
    """Runs of bytes on one side."""

    places: np.ndarray  # uint64 [runs, 2]: address, bytes
    device: int
    kind: str  # of memory, in NIXL's words


def _described(runs: Runs) -> np.ndarray:
    """As the library wants them: uint64 [runs, 3], the device with each."""
    told = np.empty((len(runs.places), 3), np.uint64)
    told[:, :2], told[:, 2] = runs.places, runs.device
    return told


class NixlAgent:
    """Any thread may use it."""

    def __init__(self) -> None:
        """It may move nothing."""
        self._lock = threading.Lock()
        library = _library()
        _leave_stdout()
        config = library.nixl_agent_config(enable_prog_thread=False, enable_listen_thread=False, backends=["UCX"])
        self._agent: Any = library.nixl_agent(f"octavo-{uuid.uuid4()}", config)

    def register(self, address: int, num_bytes: int, device: int, kind: str) -> Any:
        """Let memory be moved; what it is forgotten by."""
        with self._lock:
            return self._agent.register_memory([(address, num_bytes, device, "")], kind)

    def forget(self, registered: Any) -> None:
        """Let memory be moved no more."""
        with self._lock:
            if self._agent is not None:
                self._agent.deregister_memory(registered)

    def metadata(self) -> bytes:
        """What another agent must know to move bytes to and from this memory."""
        with self._lock:
            return bytes(self._agent.get_agent_metadata())

    def meet(self, metadata: bytes) -> str:
        """Another agent's name."""
        with self._lock:
            name = self._agent.add_remote_agent(metadata)
        return name.decode() if isinstance(name, bytes) else str(name)

    def part(self, name: str) -> None:
        """Forget another agent, and the memory that its connection takes."""
        with self._lock:
            if self._agent is not None:
                self._agent.remove_remote_agent(name)

    def work(self) -> None:
        """Let what others move go on."""
        with self._lock:
            self._agent.get_new_notifs()

    def move(self, what: str, own: Runs, others: Runs, name: str, pair: Pair) -> None:
        """READ from, or WRITE to, the agent `name` of a peer, until it is done. Raises TransferError."""
        self.begin(what, own, others, name, pair)()

    def begin(self, what: str, own: Runs, others: Runs, name: str, pair: Pair) -> Callable[..., None]:
        """As `move`, without the wait, which is to be called, with what is done meanwhile."""
        began = time.monotonic()
        with self._lock:
            sides = [self._agent.get_xfer_descs(_described(runs), runs.kind) for runs in (own, others)]
            handle = self._agent.initialize_xfer(what, *sides, name)  # a word to the other side would wait for its look
            state = self._agent.transfer(handle)
        return functools.partial(self._wait, what, handle, state, began, pair)

    def _wait(
        self,
        what: str,
        handle: Any,
        state: str,
        began: float,
        pair: Pair,
        meanwhile: Meanwhile = yield_interpreter,
    ) -> None:
        try:
            while state == "PROC":
                seconds = time.monotonic() - began
                if seconds > pair.timeout or began + seconds > pair.until:
                    raise TransferError(f"{pair.peer}: a {what} of blocks did not end within {pair.timeout:g} s")
                meanwhile()
                if seconds > _EAGER:
                    time.sleep(_LOOK)
                with self._lock:
                    state = self._agent.check_xfer_state(handle)
            if state != "DONE":
                raise TransferError(f"{pair.peer}: a {what} of blocks ended with {state}")
        finally:
            with self._lock:
                self._agent.release_xfer_handle(handle)

    def close(self) -> None:
        """Move nothing any more. May be called twice."""
        with self._lock:
            agent, self._agent = self._agent, None
            if agent is not None:
                agent.agent = None  # the library's object, which ends with its last name
