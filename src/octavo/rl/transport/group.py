"""Weights by broadcast: rank 0 of a group is the trainer's, and sends; an engine's workers receive.

Owns the meeting at the trainer's TCP store, and the order of buffers. The group is no process's default one, so a
trainer keeps its own. Does not know where values go. Invariant: who waits has a deadline; a group that failed is gone,
and another one may be made.
"""

from __future__ import annotations

import datetime
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch.distributed import BroadcastOptions, PrefixStore, TCPStore  # type: ignore[attr-defined]

from octavo.rl.plan import Incoming
from octavo.rl.session import WeightTransferError, WeightUpdateError
from octavo.rl.transport import TIMEOUT, UNTOLD_BYTES, Put, Read, buffers, deadline, field, split, told

_T = TypeVar("_T")
_MAX_SIZE = 1 << 16  # members of a group
_NAMED = ("names", "dtype_names", "shapes")
_AHEAD_BYTES = 64 << 20  # of a buffer beside which the next one may be on its way
_LEAST_SECONDS = 0.1  # for the rest of a meeting whose store answered late
MakeGroup = Callable[[Any, int, int, datetime.timedelta, str], Any]
"""(store, rank, size, timeout, this machine's address) -> a process group."""


def in_time(make: Callable[[], Any], seconds: float) -> Any:
    """What `make` gives, which waits for a peer by limits of its own, one behind the other. Raises TimeoutError."""
    made: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            made.put((make(), None))
        except BaseException as error:
            made.put((None, error))

    threading.Thread(target=run, daemon=True, name="octavo-meeting").start()
    try:
        result, error = made.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError("the time was over") from None
    if error is not None:
        raise error
    return result


class Group:
    """One member of a group. `source` is rank 0 and holds the store."""

    def __init__(
        self,
        make: MakeGroup,
        address: str,
        port: int,
        rank: int,
        size: int,
        timeout: float,
        *,
        store: Any = None,
        name: str = "",
    ) -> None:
        """Waits for all. Raises WeightTransferError. store: rank 0's, if it is there already.

        name: of a group that rank 0 makes with torch's `_new_process_group_helper`, as SGLang's clients do.
        """
        self.peer = f"rank 0 of {size} at {address}:{port}"
        until, limit = time.monotonic() + timeout, datetime.timedelta(seconds=timeout)
        try:
            self._store = store or TCPStore(address, port, size, False, limit, wait_for_workers=bool(name))
            prefixed = _torchs_store(self._store, name, make) if name else PrefixStore("octavo weights", self._store)
            rest = datetime.timedelta(seconds=max(until - time.monotonic(), _LEAST_SECONDS))
            self._group = make(prefixed, rank, size, rest, _own_address(address, port))
        except (RuntimeError, OSError) as error:
            raise WeightTransferError(f"{self.peer} was not met within {timeout:g} s: {_line(error)}") from None

    def broadcast(self, tensor: torch.Tensor, name: str, seconds: float) -> None:
        """Send `tensor`, or receive into it. Raises WeightTransferError, with the tensor's name."""
        self.begin_broadcast(tensor, name, seconds)()

    def begin_broadcast(self, tensor: torch.Tensor, name: str, seconds: float) -> Callable[[], None]:
        """Begin to send `tensor`, or to receive into it; what waits for the end. Both raise as `broadcast`."""
        limit = datetime.timedelta(seconds=seconds)
        options = BroadcastOptions()
        options.rootRank, options.timeout = 0, limit
        work = self._telling(name, seconds, lambda: self._group.broadcast([tensor], options))

        def wait() -> None:
            work.wait(limit)
            if tensor.is_cuda:
                torch.cuda.current_stream(tensor.device).synchronize()

        return lambda: self._telling(name, seconds, wait)

    def _telling(self, name: str, seconds: float, action: Callable[[], _T]) -> _T:
        try:
            return action()
        except RuntimeError as error:
            raise WeightTransferError(
                f"{self.peer} failed, or was silent for {seconds:.0f} s, while {name} was on its way: {_line(error)}"
            ) from None

    def close(self) -> None:
        """Leave."""
        abort = getattr(self._group, "abort", None)
        if abort is not None:
            abort()
        self._group = self._store = None


class GroupTransport:
    """See octavo.rl.transport.Transport. `init_info` has master_address, master_port, rank_offset and world_size."""

    overwrites = False
    make: MakeGroup

    def __init__(self, device: torch.device, options: Mapping[str, Any]) -> None:
        """Nobody is met."""
        self._device, self._options = device, options
        self._group: Group | None = None
        self._is_awaited = False  # a buffer is on its way, and nobody waits for it
        self._last: dict[str, Any] = {}  # what the last message told of its tensors

    def open(self, info: Mapping[str, Any], worker: int) -> dict[str, Any]:
        """Meet the others."""
        address, port = field(info, "master_address", str), field(info, "master_port", int)
        size, rank = field(info, "world_size", int), field(info, "rank_offset", int, 1) + worker
        if size > _MAX_SIZE:
            raise WeightUpdateError(f"world_size must be at most {_MAX_SIZE}, got {size}")
        if not 1 <= rank < size:
            raise WeightUpdateError(f"rank_offset + worker must be in [1, world_size), got {rank} of {size}")
        if not 1 <= port <= 65535:
            raise WeightUpdateError(f"master_port must be in [1, 65535], got {port}")
        seconds = float(self._options.get("timeout", TIMEOUT))
        name = field(info, "group_name", str, "")
        self._packed = field(info, "packed", bool, False)
        self._buffer_bytes = field(info, "packed_buffer_size_bytes", int, UNTOLD_BYTES)
        self._last = {}
        self._group = Group(type(self).make, address, port, rank, size, seconds, name=name)
        return {"rank": rank, "world_size": size}

    def receive(self, info: Mapping[str, Any], read: Read, put: Put) -> list[Incoming]:
        """Take part in the broadcast of each buffer."""
        group = self._group
        if group is None:
            raise WeightUpdateError("there is no group, or it failed: call init_weight_transfer_engine first")
        info = self._with_names(info)
        incoming = told(info, read)
        self._last = {key: info[key] for key in _NAMED}
        is_packed = field(info, "packed", bool, self._packed)
        size = field(info, "packed_buffer_size_bytes", int, self._buffer_bytes) if is_packed else 0
        try:
            for part, buffer in self._arriving(group, buffers(incoming, size)):
                for each, tensor in split(buffer, part):
                    put(each, tensor)
        except BaseException:
            self.close()
            raise
        return incoming

    def close(self) -> None:
        """Leave the group; one with a buffer on its way is left meanwhile, which takes until that is given up."""
        group, self._group = self._group, None
        if group is None:
            return
        if self._is_awaited:
            threading.Thread(target=group.close, daemon=True, name="octavo-leaving").start()
        else:
            group.close()
        self._is_awaited = False

    def _with_names(self, info: Mapping[str, Any]) -> Mapping[str, Any]:
        """`info` with the tensors of the last message, where it names none: a sender tells of them once."""
        if any(info.get(key) for key in _NAMED):
            return info
        if not self._last:
            raise WeightUpdateError("names may be empty only behind a message of the same group that had them")
        return {**info, **self._last}

    def _arriving(self, group: Group, parts: Iterator[list[Incoming]]) -> Iterator[tuple[list[Incoming], torch.Tensor]]:
        """Each part when its buffer is there. The next one is on its way by then, where two are no matter of memory."""
        part = next(parts, None)
        begun = None if part is None else self._begin(group, part)
        while part is not None and begun is not None:
            buffer, wait = begun
            wait()
            self._is_awaited = False
            following = next(parts, None)
            begun = None
            if following is not None and buffer.device.type == "cpu" and buffer.numel() <= _AHEAD_BYTES:
                begun, self._is_awaited = self._begin(group, following), True
            yield part, buffer
            part = following
            if part is not None and begun is None:
                begun = self._begin(group, part)

    def _begin(self, group: Group, part: Sequence[Incoming]) -> tuple[torch.Tensor, Callable[[], None]]:
        num_bytes = sum(each.num_bytes for each in part)
        buffer = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        return buffer, group.begin_broadcast(buffer, part[0].name, deadline(self._options, num_bytes))


def _torchs_store(store: Any, name: str, make: MakeGroup) -> Any:
    """What of `store` a group of this name has, where torch makes it, on the device that its backend is for."""
    device = "cuda" if make.__name__ == "make_nccl" else "cpu"
    return PrefixStore(f"{device}/", PrefixStore(f"{name}/", PrefixStore(name, store)))


def _own_address(address: str, port: int) -> str:
    """This machine's address as the peer sees it: names that do not resolve are nobody's trouble."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, port))
        return str(probe.getsockname()[0])


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
