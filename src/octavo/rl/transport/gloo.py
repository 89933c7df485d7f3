"""Weights by broadcast through host memory, over TCP: for CPUs, and where no faster way is there."""

from __future__ import annotations

import datetime
from typing import Any

import torch
from torch import distributed

from octavo.process_groups import thrown
from octavo.rl.transport import Check, go_on
from octavo.rl.transport.group import GroupTransport, in_time

_ENDING = 1.0  # seconds in which what waits by a limit of its own may say so


def make_gloo(store: Any, rank: int, size: int, timeout: datetime.timedelta, host: str, check: Check = go_on) -> Any:
    """A process group of gloo. check: see in_time."""
    backend: Any = distributed.ProcessGroupGloo
    options = backend._Options()
    device, threads = thrown.with_thread(lambda: backend.create_device(hostname=host))
    options._devices = [device]
    options._timeout = timeout
    group = in_time(lambda: backend(store, rank, size, options), timeout.total_seconds() + _ENDING, check)
    thrown.belong(group, threads)
    return group


class GlooTransport(GroupTransport):
    """See GroupTransport."""

    make = staticmethod(make_gloo)

    def __init__(self, device: torch.device, options: Any) -> None:
        """Buffers are the host's, whatever the device."""
        super().__init__(torch.device("cpu"), options)
        thrown.catch()  # an engine outlives a trainer's mistakes; a trainer's own process is as it was


TRANSPORT = GlooTransport
