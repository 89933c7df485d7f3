"""Two engines that pass blocks on: their messages, and the protocol of the way that the bytes take.

Owns the messages and the socket that they go over. Knows no blocks. Invariant: every wait has a deadline, and an error
that names the peer.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec
import torch

from octavo.kv_connector.peers.description import NO_DESCRIPTION, CacheDescription
from octavo.kv_connector.worker.mover import Job, RefusedError

PROTOCOL = 5
_LENGTH = struct.Struct("<I")
_MAX_MESSAGE, _MOST_AT_HAND = 16 << 20, 64 << 10  # bytes
PIECE_BYTES = 16 << 20  # of blocks that come together through host memory
_POLL_STEP = 0.001  # seconds: poll() rounds up to it
_LEAST = 0.001  # seconds in which what has come by now is heard, when the time is over
_WORD = 0.05  # seconds in which a short word is whole, once it has begun


class TransferError(RuntimeError):
    """A peer that fails, or says no."""


class UnlikeError(TransferError, RefusedError):
    """A peer whose blocks mean something else here: it says no, now and later."""


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """The first word of a connection, from who wants blocks. What it says of its cache is read behind the protocol."""

    protocol: int = PROTOCOL
    way: str  # how the bytes are to come
    cache: msgspec.Raw  # a CacheDescription
    gives_up: list[str] = []  # transfer ids that it will not fetch: all that it has to say, and it hears no answer
    engine_id: str = ""  # the engine that offers them; empty: whoever listens


class Welcome(msgspec.Struct, frozen=True, kw_only=True):
    """The answer: the cache that blocks come from, unless it says why none can."""

    refused: str = ""
    cache: CacheDescription = NO_DESCRIPTION
    engine_id: str = ""  # of kv_transfer_config; empty: of a protocol before 4, which is refused


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """Fetch: from who goes on with a request."""

    fetch: str  # all ranks of who goes on ask under this name, and the offer has ended when all of them have
    transfer_id: str
    digest: bytes
    version: str = ""  # of the weights
    places: list[tuple[int, int]]  # of blocks there: cache group, and place in the request's list
    pieces: list[int]  # how many of them come at a time
    told: bytes = b""  # what the way of the bytes needs to know


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """The answer: bytes follow, unless it says why not."""

    refused: str = ""
    is_unlike: bool = False  # it will be refused next time, too
    lacking: list[int] = []  # which of the places have no block: if Done is the answer, the rest comes
    told: bytes = b""  # what the way of the bytes needs to know
    offer: str = ""  # the offer's own name, which no other one ever had
    lease: float = 0.0  # seconds that the blocks stay as they are, unless this side is told Done or closes before


class Done(msgspec.Struct, frozen=True):
    """All bytes are there; and the answer: they were the ones that were asked for."""


def _framed(message: msgspec.Struct) -> bytes:
    data = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(data)) + data


_DONE = _framed(Done())


class Pair:
    """This process and a peer."""

    def __init__(self, sock: socket.socket, timeout: float) -> None:
        """timeout: seconds that the peer may take for anything, a whole message for one."""
        sock.settimeout(timeout)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # a machine that vanished has closed it in the end
        self.sock, self.timeout = sock, timeout
        self.until = math.inf  # on the monotonic clock: when all that is waited for now has to be over
        self.own_host = str(sock.getsockname()[0])
        self.peer_host, port = sock.getpeername()[:2]
        self.peer = f"{self.peer_host}:{port}"
        self.state: Any = None  # of the way of the bytes, while the connection lasts
        self.theirs = NO_DESCRIPTION  # the cache on the other side
        self.region: Any = None  # where that lies in memory, if the way of the bytes was told
        self.engine_id = ""  # of who has blocks there, once it has said so
        self.leased_until = 0.0  # on this side's clock: the blocks that were asked for stay as they are until then
        self.is_alike = False  # a block's bytes mean the same on both sides
        self.is_due = False  # an answer Done is to come for a fetch that has ended
        self._owes, self._paying = False, threading.Lock()
        self.marks: list[tuple[str, float]] = []  # of a fetch: what has happened, and when

    @property
    def left(self) -> float:
        """Seconds that the peer still has for what is waited for now."""
        return max(min(self.timeout, self.until - time.monotonic()), _LEAST)

    def send(self, message: msgspec.Struct) -> None:
        """Raises OSError."""
        self.sock.settimeout(self.left)
        self.sock.sendall(_framed(message))

    def receive(self, kind: type[Any]) -> Any:
        """A message. Raises OSError, EOFError where the peer has gone, TransferError for what is no such message."""
        until = time.monotonic() + self.left
        (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size, until))
        if length > _MAX_MESSAGE:
            raise TransferError(f"{self.peer} sends a message of {length} bytes")
        try:
            return msgspec.msgpack.decode(self._exactly(length, until), type=kind)
        except ValueError as error:
            raise TransferError(f"{self.peer} speaks another protocol: {error}") from None

    def _exactly(self, count: int, until: float) -> bytes:
        """Raises TimeoutError where it is not whole by then."""
        data = b""
        while len(data) < count:
            self.sock.settimeout(max(until - time.monotonic(), _LEAST))
            with contextlib.suppress(TimeoutError):
                part = self.sock.recv(count - len(data))
                if not part:
                    raise EOFError(f"{self.peer} has closed the connection")
                data += part
            if len(data) < count and time.monotonic() >= until:
                limit = f"{self.timeout:g} s (kv_transfer_timeout)"
                raise TimeoutError(f"{self.peer} said {len(data)} of {count} bytes within {limit}")
        return data

    def owe(self) -> None:
        """A fetch has ended: Done is to be said by `pay`, or by who settles before."""
        self._owes = True

    def pay(self) -> None:
        """Say what is owed, by any thread. Raises OSError."""
        with self._paying:
            if self._owes:
                self._owes, self.is_due = False, True
                self.send(Done())

    def settle(self) -> None:
        """Say what is owed, and take what is due, of the fetch before. Raises as `send` and `receive`."""
        self.pay()
        if self.is_due:
            self.receive(Done)
            self.is_due = False

    def await_word(self) -> None:
        """Until something comes, or the end, if either ever does."""
        poll = select.poll()
        poll.register(self.sock, select.POLLIN)
        poll.poll()

    def says_something(self, seconds: float) -> bool:
        """Whether something has come, or the end, after so many seconds at the latest."""
        poll = select.poll()  # select() refuses the files of a busy server, whose numbers are high
        poll.register(self.sock, select.POLLIN)
        if 0 < seconds < _POLL_STEP:
            time.sleep(seconds)
            seconds = 0.0
        return bool(poll.poll(seconds * 1000))

    @property
    def has_message(self) -> bool:
        """Whether a whole one has come, if it is not long, or the end: `receive` waits for nobody. Raises OSError."""
        if not self.says_something(0):
            return False
        data = self.sock.recv(_MOST_AT_HAND, socket.MSG_PEEK)
        size = _LENGTH.size
        return not data or (len(data) >= size and len(data) - size >= _LENGTH.unpack_from(data)[0])

    def settle_now(self) -> bool:
        """As `settle`, if that waits for nobody; whether. Raises EOFError where the peer has gone, and TransferError.

        A look is a call of the system, where `settle` and `is_broken_off` make six: a load's copy waits for it.
        """
        if self._owes:
            return False
        if self.is_due:
            if not (data := self._at_hand(len(_DONE))):
                return False
            if data != _DONE:
                raise TransferError(f"{self.peer} speaks another protocol")
            self.is_due = False
        if self._at_hand(1):
            raise TransferError(f"{self.peer} speaks out of turn")
        return True

    def _at_hand(self, count: int) -> bytes:
        """So many bytes, if something has come; of a socket with a deadline, which the system does not wait for."""
        try:
            data = os.read(self.sock.fileno(), count)
        except BlockingIOError:
            return b""
        if not data:
            raise EOFError(f"{self.peer} has closed the connection")
        return data + self._exactly(count - len(data), time.monotonic() + _WORD)

    @property
    def has_gone(self) -> bool:
        """Whether the peer has closed the connection, over which nothing but a last answer is due."""
        if not self.says_something(0):
            return False
        if not self.is_due:  # which is so before Done is said, and what has come may be an answer to that
            return True
        try:
            self.settle_now()
        except (OSError, EOFError, TransferError):
            return True
        return False

    @property
    def is_broken_off(self) -> bool:
        """Whether the peer has closed the connection, and all that it has said was received."""
        try:
            return self.says_something(0) and not self.sock.recv(1, socket.MSG_PEEK)
        except (OSError, ValueError):  # it was reset, or is closed here
            return True

    def begin(self) -> None:
        """A fetch begins: what is marked is of it from now on."""
        self.marks.clear()
        self.mark("begun")

    def mark(self, what: str) -> None:
        """Note when something of a fetch has happened."""
        self.marks.append((what, time.monotonic()))

    def marked(self) -> str:
        """What was noted since the first mark, in milliseconds behind it; it is forgotten."""
        marks, self.marks = self.marks, []
        return ", ".join(f"{what} {(at - marks[0][1]) * 1e3:.2f}" for what, at in marks)

    def cut(self) -> None:
        """End the connection, by any thread: who waits on it finds that its peer has closed it."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Let go of the peer. May be called twice."""
        self.cut()
        self.sock.close()
        self.drop_state()

    def drop_state(self) -> None:
        """What the way of the bytes keeps of the connection ends, with its `close` if it has one."""
        state, self.state = self.state, None
        getattr(state, "close", int)()


def yield_interpreter() -> None:
    """Let other threads go on for a moment, if they want to: the shortest sleep is 70 microseconds long."""
    select.poll().poll(0)


Meanwhile = Callable[[], object]
"""What who waits for blocks does between two looks: at least, it lets other threads go on. It raises nothing."""


class Ahead(NamedTuple):
    """Blocks that are on their way before their peer was asked."""

    told: bytes  # what it has to `tell` then, if that was right; empty: nothing was ordered
    wait: Callable[[Meanwhile], object]  # until they are there, by any thread, once. Raises as `Way.take`


NOT_AHEAD = Ahead(b"", bool)


class Way(Protocol):
    """How the bytes of blocks come from one cache to another."""

    name: str
    piece_bytes: int  # of blocks that come together

    def ask(self, pair: Pair, num_bytes: int) -> bytes:
        """What the side that has the blocks must know. num_bytes: of what comes at a time, at most."""

    def tell(self, blocks: Sequence[int]) -> bytes:
        """What the side that wants these blocks must know."""

    def orders_at_once(self, theirs: Sequence[int], blocks: Sequence[int]) -> bool:
        """Whether `read_ahead` takes so short for these blocks that nobody minds."""

    def read_ahead(self, pair: Pair, theirs: Sequence[int], job: Job, blocks: Sequence[int]) -> Ahead:
        """Order what `take` does, before the peer has said a word. theirs: the blocks there, so far as is known."""

    def give(self, pair: Pair, asked: bytes, job: Job, pieces: Sequence[Sequence[int]]) -> None:
        """Until the peer has these blocks, some at a time, but for its word Done.

        Raises as `Pair.receive` and `Job.touching`.
        """

    def take(self, pair: Pair, told: bytes, job: Job, pieces: Sequence[Sequence[int]]) -> None:
        """Until the bytes are in these blocks, which mean what the peer's mean. Raises as `give`."""

    def rows(self, pair: Pair, told: bytes, pieces: Sequence[int]) -> Generator[torch.Tensor]:
        """The peer's blocks as they are there, so many at a time: uint8 [count, block_bytes there], on the host.

        A piece is there until the next one is asked for. Raises as `Pair.receive`.
        """

    def close(self) -> None:
        """Nothing moves any more."""
