"""Weights by broadcast from GPU to GPU. Tensors go to where they belong as they come."""

from __future__ import annotations

import contextlib
import datetime
import os
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import distributed

from octavo.rl.session import WeightUpdateError
from octavo.rl.transport.group import GroupTransport

# A group that waits for a peer that died would end the whole process, by a thread of its own: failures are errors.
_FAILURES_ARE_ERRORS = {
    "TORCH_NCCL_BLOCKING_WAIT": "1",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}


def make_nccl(store: Any, rank: int, size: int, timeout: datetime.timedelta, host: str) -> Any:
    """A process group of NCCL, on the current device, whose members have met. Raises RuntimeError in time if not."""
    backend: Any = distributed.ProcessGroupNCCL
    options = backend.Options()
    options._timeout = timeout
    with _environment(_FAILURES_ARE_ERRORS):
        group = backend(store, rank, size, options)
    _meet(group, torch.cuda.current_device(), timeout)
    return group


def _meet(group: Any, device: int, timeout: datetime.timedelta) -> None:
    """A first broadcast makes the connection, which NCCL waits for without an end."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            torch.cuda.set_device(device)
            # a stream of its own: another group's kernel, whose peer has died, may hold up a wait for the device
            with torch.cuda.stream(torch.cuda.Stream()):
                group.broadcast([torch.zeros(1, device="cuda")], distributed.BroadcastOptions()).wait(timeout)
                torch.cuda.current_stream().synchronize()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True, name="octavo-nccl")
    thread.start()
    thread.join(timeout.total_seconds())
    if errors:
        raise RuntimeError(str(errors[0]))
    if thread.is_alive():
        raise RuntimeError("its GPU did not answer")


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


class NcclTransport(GroupTransport):
    """See GroupTransport."""

    overwrites = True
    make = staticmethod(make_nccl)

    def __init__(self, device: torch.device, options: Any) -> None:
        """Raises WeightUpdateError without a GPU."""
        if device.type != "cuda":
            raise WeightUpdateError(f"backend 'nccl' needs a GPU, and the engine runs on {device.type}: take 'gloo'")
        super().__init__(device, options)


TRANSPORT = NcclTransport
