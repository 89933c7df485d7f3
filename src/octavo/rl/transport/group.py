"""Weights by broadcast: rank 0 of a group is the trainer's, and sends; an engine's workers receive.

Owns the meeting at the trainer's TCP store, and the order of buffers. The group is no process's default one, so a
trainer keeps its own. Does not know where values go. Invariant: who waits has a deadline; a group that failed is gone,
and another one may be made.
"""

from __future__ import annotations

import collections
import datetime
import functools
import queue
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import distributed
from torch.distributed import BroadcastOptions, PrefixStore, TCPStore  # type: ignore[attr-defined]

from octavo.process_groups import ending, thrown
from octavo.process_groups.works import Left, wait_for
from octavo.rl.plan import Incoming
from octavo.rl.session import WeightConflictError, WeightTransferError, WeightUpdateError
from octavo.rl.transport import (
    TIMEOUT,
    UNTOLD_BYTES,
    Check,
    Put,
    Read,
    buffers,
    deadline,
    field,
    go_on,
    split,
    told,
)
from octavo.rl.transport.extent import ADVICE, Extent, Rooms, likely_bytes

_T = TypeVar("_T")
_MAX_SIZE = 1 << 16  # members of a group
_MAX_ADDRESS = 255  # characters, as of any name of a host
_NAMED = ("names", "dtype_names", "shapes")
_AHEAD_BYTES = 64 << 20  # of buffers that are on their way together, and of one beside which another one may be
_LEAST_SECONDS = 0.1  # for the rest of a meeting whose store answered late
_ENDING = 0.5  # seconds in which what waits by a limit of its own may say what it waited for
_LOOK_SECONDS = 0.05  # between two looks at whether who waits is to go on waiting
_PLACE = re.compile(r"\[(enforce fail at )?[^\[\]\s]*\.(cc|cpp|h):\d+\] ")  # in a library's source
_ADVISES = re.compile(r"\. This is typically|\. Check the logs| Exception raised from ")
_TIMED_OUT = re.compile(r"(?i)timed out|timeout")
MakeGroup = Callable[[Any, int, int, datetime.timedelta, str], Any]
"""(store, rank, size, timeout, this machine's address) -> a process group."""


def in_time(make: Callable[[], Any], seconds: float, check: Check = go_on) -> Any:
    """What `make` gives, which waits for a peer by limits of its own, one behind the other. Raises TimeoutError.

    What `check` raises is raised here, while it waits; `make` is left to itself then.
    """
    made: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
    until = time.monotonic() + seconds

    def run() -> None:
        try:
            if device is not None:  # a thread begins on the first one
                torch.cuda.set_device(device)
            made.put((make(), None))
        except BaseException as error:
            made.put((None, error))

    thread = threading.Thread(target=run, daemon=True, name="octavo-meeting")
    ending.waits(thread, until)
    thread.start()
    while True:
        try:
            result, error = made.get(timeout=max(min(_LOOK_SECONDS, until - time.monotonic()), 0.0))
        except queue.Empty:
            check()
            if time.monotonic() < until:
                continue
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
        check: Check = go_on,
    ) -> None:
        """Waits for all. Raises WeightTransferError. store: rank 0's, if it is there already.

        name: of a group that rank 0 makes with torch's `_new_process_group_helper`, as SGLang's clients do. check:
        asked in every wait, here and later; what it raises ends that.
        """
        self.peer, self.check, self.size = f"rank 0 of {size} at {address}:{port}", check, size
        until, limit = time.monotonic() + timeout, datetime.timedelta(seconds=timeout)

        def meet() -> tuple[Any, Any]:
            # torch's client asks again and again, beyond its own limit
            met = store or TCPStore(address, port, size, False, limit, wait_for_workers=bool(name))
            prefixed = _torchs_store(met, name, make) if name else PrefixStore("octavo weights", met)
            rest = datetime.timedelta(seconds=max(until - time.monotonic(), _LEAST_SECONDS))
            return met, make(prefixed, rank, size, rest, _own_address(address, port))

        try:
            self._store, self._group = in_time(meet, timeout + _ENDING, check)
        except TimeoutError:
            raise WeightTransferError(
                f"{self.peer} was not met within {timeout:g} s: {_who_is_there(address, port)}"
            ) from None
        except (RuntimeError, OSError) as error:
            raise WeightTransferError(f"{self.peer} was not met within {timeout:g} s: {_line(error)}") from None
        self._threads = thrown.threads_of(self._group)
        self._has_workers = isinstance(self._group, getattr(distributed, "ProcessGroupGloo", ()))
        if self._has_workers:
            ending.ends(self)
        self._quiet = None if store else _quiet_connection(address, port)
        # Those that were begun, and may be on their way. A work holds the connection, and who keeps an error keeps its
        # frames: each is in a list of its own, which `close` empties.
        self._works: list[list[Any]] = []

    @property
    def is_gone(self) -> bool:
        """Whether rank 0's process has ended, or let go of its store. Waits for nothing."""
        if self._quiet is None:
            return False
        try:
            return not self._quiet.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def broadcast(self, tensor: torch.Tensor, name: str, seconds: float) -> None:
        """Send `tensor`, or receive into it. Raises WeightTransferError, with the tensor's name."""
        self.begin_broadcast(tensor, name, seconds)()

    def begin_broadcast(
        self, tensor: torch.Tensor, name: str, seconds: float, num_before: int = 0
    ) -> Callable[[], None]:
        """Begin to send `tensor`, or to receive into it; what waits for the end. Both raise as `broadcast`.

        seconds: from when that is waited for. num_before: others on their way, each of which may take as long.
        """
        options = BroadcastOptions()
        options.rootRank, options.timeout = 0, datetime.timedelta(seconds=seconds * (1 + num_before))
        with ending.inside():
            works = [self._telling(name, seconds, lambda: self._group.broadcast([tensor], options))]
        self._works.append(works)

        def check() -> None:
            said = thrown.said_by(self._threads)
            if said is not None:
                raise WeightUpdateError(_of_thrown(name, tensor.nbytes, said))
            self.check()

        def wait() -> None:
            wait_for(works[0], time.monotonic() + seconds, check, is_cuda=tensor.is_cuda)
            self._works.remove(works)
            with ending.inside():
                works.clear()
            if tensor.is_cuda:
                torch.cuda.current_stream(tensor.device).synchronize()

        return lambda: self._telling(name, seconds, wait)

    def _telling(self, name: str, seconds: float, action: Callable[[], _T]) -> _T:
        try:
            return action()
        except RuntimeError as error:
            line = _line(error)
            timed_out = _TIMED_OUT.search(line)
            what = f"was silent for {round(seconds, 2):g} s," if timed_out else f"failed ({line})"
            raise WeightTransferError(f"{self.peer} {what} while {name} was on its way") from None

    @property
    def is_quiet(self) -> bool:
        """Whether no buffer is on its way."""
        return all(work.is_completed() for works in self._works for work in works)

    def close(self) -> None:
        """Leave; a group with a buffer on its way is left meanwhile, which takes until that is given up."""
        if self._quiet is not None:
            self._quiet.close()
            self._quiet = None
        begun, self._works = self._works, []
        left = Left(self._group, self._threads, [work for works in begun for work in works])
        self._group = self._store = None  # nobody else has them
        for works in begun:
            works.clear()
        if left.is_quiet:
            left.end()
        else:
            threading.Thread(target=left.leave, args=(self._has_workers,), daemon=True, name="octavo-leaving").start()

    def end(self) -> None:
        """Leave at the end of the process: at once if it is quiet, and else never."""
        if self.is_quiet:
            self.close()
        else:
            ending.keep(self._group, *(work for works in self._works for work in works))


def place_of(address: str, port: int) -> str:
    """What a trainer's group is called by both ends: where its store is."""
    return f"{address}:{port}"


class GroupTransport:
    """See octavo.rl.transport.Transport. `init_info` has master_address, master_port, rank_offset and world_size."""

    overwrites = False
    waits = True
    gives = True
    make: MakeGroup

    def __init__(self, device: torch.device, options: Mapping[str, Any]) -> None:
        """Nobody is met."""
        self._device, self._options = device, options
        self.check: Check = go_on
        self._group: Group | None = None
        self._rooms = Rooms()
        self._place, self._was, self._over, self.displaced = "", "", "", ""  # the last peer's, and how its group ended
        self._last: dict[str, Any] = {}  # what the last message told of its tensors

    def open(self, info: Mapping[str, Any], worker: int) -> dict[str, Any]:
        """Meet the others."""
        own = functools.partial(field, info, of="init_info")
        address, port = own("master_address", str), own("master_port", int)
        size, rank = own("world_size", int), own("rank_offset", int, 1) + worker
        if not 1 <= len(address) <= _MAX_ADDRESS or not address.isprintable() or not address.isascii():
            what = f"the trainer's, of 1 to {_MAX_ADDRESS} printable characters"
            raise WeightUpdateError(f"init_info.master_address must be {what}, got {address[:80]!a}")
        if size > _MAX_SIZE:
            raise WeightUpdateError(f"init_info.world_size must be at most {_MAX_SIZE}, got {size}")
        if not 1 <= rank < size:
            raise WeightUpdateError(f"init_info.rank_offset + worker must be in [1, world_size), got {rank} of {size}")
        if not 1 <= port <= 65535:
            raise WeightUpdateError(f"init_info.master_port must be in [1, 65535], got {port}")
        seconds = float(self._options.get("timeout", TIMEOUT))
        name, self._packed = own("group_name", str, ""), own("packed", bool, False)
        self._buffer_bytes = _buffer_bytes(info, UNTOLD_BYTES, of="init_info")
        self._last = {}
        self._group = Group(type(self).make, address, port, rank, size, seconds, name=name, check=self.check)
        self._place, self._was = place_of(address, port), self._group.peer
        return {"rank": rank, "world_size": size, "group": self._place}

    def receive(self, info: Mapping[str, Any], read: Read, put: Put) -> list[Incoming]:
        """Take part in the broadcast of each buffer."""
        group = self._met_with(field(info, "group", str, ""))
        info = self._with_names(info)
        incoming = told(info, read)
        self._last = {key: info[key] for key in _NAMED}
        is_packed = field(info, "packed", bool, self._packed)
        size = _buffer_bytes(info, self._buffer_bytes) if is_packed else 0
        try:
            for part, buffer in self._arriving(group, list(buffers(incoming, size))):
                for each, tensor in split(buffer, part):
                    put(each, tensor)
        except BaseException as error:
            self._over = str(error)
            self.close()
            raise
        return incoming

    def _met_with(self, place: str) -> Group:
        """The group, if it is the one of the trainer at `place`, or that is not said. Raises WeightUpdateError."""
        if place and self._place and place != self._place:
            raise WeightConflictError(
                f"another trainer took this one's place: the engine's group is with {self._was}, and this update is "
                f"sent from {place}: an engine has one trainer at a time; init_weight_transfer_engine takes it back"
            )
        if self._group is None:
            why = f" (the last one was with {self._was}, and ended: {self._over[:300]})" if self._over else ""
            if why and self.displaced:
                why = f"{why[:-1]}; it had taken the place of the one with {self.displaced})"
            raise WeightUpdateError(f"there is no group, or it failed: call init_weight_transfer_engine first{why}")
        return self._group

    @property
    def peer(self) -> str:
        """The trainer's rank, while its group is there."""
        return "" if self._group is None else self._group.peer

    @property
    def peer_is_gone(self) -> bool:
        """Whether the trainer has gone."""
        return self._group is not None and self._group.is_gone

    def close(self) -> None:
        """Leave the group, and let go of what was kept for its buffers."""
        group, self._group, self._rooms = self._group, None, Rooms()
        if group is not None:
            group.close()

    def _with_names(self, info: Mapping[str, Any]) -> Mapping[str, Any]:
        """`info` with the tensors of the last message, where it names none: a sender tells of them once."""
        if any(info.get(key) for key in _NAMED):
            return info
        if not self._last:
            raise WeightUpdateError("names may be empty only behind a message of the same group that had them")
        return {**info, **self._last}

    def _arriving(self, group: Group, parts: Sequence[list[Incoming]]) -> Iterator[tuple[list[Incoming], torch.Tensor]]:
        """Each part when its buffer is there. Others are on their way by then, where they are no matter of memory."""
        begun: collections.deque[_Begun] = collections.deque()
        likely = [likely_bytes(parts, number) if group.size == 2 else 0 for number in range(min(2, len(parts)))]
        following, in_hand = 0, 0  # a part's number; bytes of what has begun, and of the buffer that is being taken

        def begin() -> None:
            nonlocal following, in_hand
            part = parts[following]
            begun.append(self._begin(group, part, len(begun), likely[min(following, 1)]))
            following, in_hand = following + 1, in_hand + _bytes_of(part)

        while begun or following < len(parts):
            while following < len(parts) and self._has_room(parts[following], in_hand, bool(begun)):
                begin()
            part, wait = begun.popleft()
            buffer = wait()
            if not begun and following < len(parts) and self._has_room(parts[following], in_hand, False):
                begin()
            yield part, buffer
            in_hand -= buffer.numel()
            del buffer, wait

    def _has_room(self, part: Sequence[Incoming], in_hand: int, is_waiting: bool) -> bool:
        """Whether a buffer may be on its way beside those in hand: in all few bytes, or one beside one."""
        if not in_hand:
            return True
        fits = in_hand + _bytes_of(part) <= _AHEAD_BYTES or (not is_waiting and in_hand <= _AHEAD_BYTES)
        return fits and self._device.type == "cpu"

    def _begin(self, group: Group, part: list[Incoming], num_before: int, likely: int) -> _Begun:
        """`num_before`: that are on their way, each of which may take its time. likely: see Extent."""
        num_bytes, name = _bytes_of(part), part[0].name
        seconds = deadline(self._options, num_bytes)
        if self._device.type != "cpu":
            buffer = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
            arrived = group.begin_broadcast(buffer, name, seconds, num_before)
            return _Begun(part, lambda: (arrived(), buffer)[1])
        extent = Extent(part, self._rooms, likely=likely)
        wait = group.begin_broadcast(extent.room, name, seconds, num_before)

        def come() -> torch.Tensor:
            wait()
            return extent.come()

        return _Begun(part, come)


class _Begun(NamedTuple):
    """A buffer that is on its way."""

    part: list[Incoming]
    wait: Callable[[], torch.Tensor]  # gives the buffer, [bytes] uint8


def _of_thrown(name: str, num_bytes: int, said: str) -> str:
    """What a peer did that made gloo throw."""
    lengths = re.search(r"(?<!\d)(\d+) vs \d+", said)
    came = f"{int(lengths[1]):,}" if lengths else "more"
    return f"{name}: there was room for {num_bytes:,} bytes, and {came} came: {ADVICE}"


def _bytes_of(part: Sequence[Incoming]) -> int:
    return sum(each.num_bytes for each in part)


def _quiet_connection(address: str, port: int) -> socket.socket | None:
    """A connection on which nothing is said, and which ends with who holds the store. None: there is none."""
    try:
        quiet = socket.create_connection((address, port), _ENDING)
    except OSError:
        return None
    quiet.setblocking(False)
    return quiet


def _who_is_there(address: str, port: int) -> str:
    """Why nobody was met at an address, as far as a connection tells."""
    try:
        socket.create_connection((address, port), _ENDING).close()
    except OSError as error:
        return f"nobody answers there ({error.strerror or error}): is it the trainer's address and port?"
    return "its store answers, and not all of the group have come to it"


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
    """What a library says, in a line, without where its source lay and whom it asks."""
    said = _PLACE.sub("", " ".join(str(error).split()))
    return _ADVISES.split(said)[0].rstrip(". ")[:300]


def _buffer_bytes(info: Mapping[str, Any], default: int, *, of: str = "update_info") -> int:
    size = int(field(info, "packed_buffer_size_bytes", int, default, of=of))
    if size < 1:
        raise WeightUpdateError(f"{of}.packed_buffer_size_bytes must be at least 1, got {size}")
    return size
