"""Fetches: loads from the ranks of a peer engine, over connections that are kept.

Owns the connections, what is asked of which rank, and what is done with what comes: blocks that mean the same on both
sides are taken as they are, others go by rows through host memory (`peers.mapping`), a batch of blocks at a time. Knows
no library that moves bytes. Invariants: a row is written whole, with zeros behind the last token alone, unless what it
lacks is said; nothing is asked of a peer whose description of its cache does not fit; all waits of a load have one end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
import socket
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import NamedTuple, TypeVar

import msgspec
import torch

from octavo.kv_connector.orders import Report
from octavo.kv_connector.peers.description import CacheDescription, differences, flaws, has_same_rows
from octavo.kv_connector.peers.mapping import (
    Part,
    Place,
    Tokens,
    batches,
    copy,
    divide,
    first_read,
    needed_places,
    num_bytes,
    span,
)
from octavo.kv_connector.peers.offers import Wanted
from octavo.kv_connector.worker.cache_bytes import CacheBytes
from octavo.kv_connector.worker.mover import Begun, Job
from octavo.kv_connector.worker.pair import (
    NOT_AHEAD,
    PIECE_BYTES,
    Ahead,
    Ask,
    Done,
    Hello,
    Pair,
    Told,
    TransferError,
    UnlikeError,
    Way,
    Welcome,
    yield_interpreter,
)

_LOG = logging.getLogger(__name__)
Address = tuple[str, int]
MAX_DIFFERENCES = 3  # that are said
_T = TypeVar("_T")


class _Batch(NamedTuple):
    """Blocks here that are filled together, and the blocks of each peer that have something of them."""

    tokens: Tokens
    targets: list[int]  # which of an order's blocks
    sources: list[list[Place]]  # of each peer


@dataclasses.dataclass(frozen=True, slots=True)
class _Fetch:
    """One load: its order, and what it says."""

    job: Job
    wanted: Wanted
    pairs: list[Pair]  # of the ranks of the peer, in their order

    @property
    def peers(self) -> list[CacheDescription]:
        return [pair.theirs for pair in self.pairs]

    def targets(self, numbers: Sequence[int]) -> list[Place]:
        return [self.wanted.places[number] for number in numbers]


class Fetches:
    """See Handler."""

    stored_bytes = 0
    num_evicted = 0

    def __init__(self, cache: CacheBytes, timeout: float, way: Way) -> None:
        """timeout: seconds that a load may take, all that its peers do together."""
        self._cache, self._own, self._timeout, self._way = cache, cache.description, timeout, way
        self._lock = threading.Lock()
        self._idle: dict[Address, list[Pair]] = {}

    def reset(self) -> bool:
        """See Handler."""
        return True

    def close(self) -> None:
        """See Handler."""
        for pairs in self._idle.values():
            for pair in pairs:
                pair.close()

    def start(self, job: Job) -> Begun | None:
        """Begin a load in the thread that gives its order, if that waits for nobody. What is left; None: all of it."""
        wanted, blocks = _wanted(job), job.order.blocks
        if not wanted.blocks or len(wanted.addresses) != 1 or not self._way.orders_at_once(wanted.blocks, blocks):
            return None
        pair = self._take_idle(wanted.addresses[0], wanted.engine_id)
        if pair is None:
            return None
        job.until = time.monotonic() + self._timeout
        try:
            if pair.region is None or not pair.is_alike or not pair.settle_now():
                self._keep(wanted.addresses[0], pair)
                return None
            _begin(pair, job)
            ahead = self._read_ahead(_Fetch(job, wanted, [pair]), 0)
        except Exception as error:  # of a peer or a driver: the load begins anew, and says it
            _LOG.debug("a load is begun once more: %s", error)
            pair.close()
            return None
        # its peer was asked: who drops it, before a block was touched, has no more to say than that it goes
        return Begun(functools.partial(self._handle, job, wanted, [pair], ahead, is_asked=True), pair.close)

    def _keep(self, address: Address, pair: Pair) -> None:
        pair.until = math.inf
        with self._lock:
            self._idle.setdefault(address, []).append(pair)

    def handle(self, job: Job) -> Report:
        """See Handler. Raises TransferError, OSError, EOFError."""
        wanted = _wanted(job)
        job.until = time.monotonic() + self._timeout
        kept = [self._take_idle(address, wanted.engine_id) for address in wanted.addresses]
        return self._handle(job, wanted, kept)

    def _handle(
        self, job: Job, wanted: Wanted, kept: Sequence[Pair | None], ahead: Ahead = NOT_AHEAD, *, is_asked: bool = False
    ) -> Report:
        """is_asked: all ranks, and `ahead` is on its way."""
        try:
            return self._fetch(job, wanted, kept, ahead, is_asked=is_asked)
        except (OSError, EOFError) as error:
            if isinstance(error, TimeoutError) or not any(kept) or job.is_cancelled:
                raise
        # a peer was started anew: once more, over new connections
        return self._fetch(job, wanted, [None] * len(kept), NOT_AHEAD, is_asked=False)

    def _take_idle(self, address: Address, engine_id: str) -> Pair | None:
        with self._lock:
            pairs = self._idle.get(address, [])
            fitting = [number for number, pair in enumerate(pairs) if engine_id in ("", pair.engine_id)]
            return pairs.pop(fitting[-1]) if fitting else None

    def _fetch(self, job: Job, wanted: Wanted, kept: Sequence[Pair | None], ahead: Ahead, *, is_asked: bool) -> Report:
        pairs = [pair for pair in kept if pair is not None]
        try:
            ordered: list[Pair] = []
            for address, pair in zip(wanted.addresses, kept, strict=True):
                if pair is None:
                    pairs.append(pair := self._connect(job, address, wanted.engine_id))
                if not is_asked:
                    self._settle(pair, job)
                ordered.append(pair)
            fetch = _Fetch(job, wanted, ordered)
            partial = self._move(fetch, ahead if is_asked else None)
            self._end(fetch)
            job.waits_no_more()
        except BaseException:
            for pair in pairs:
                pair.close()
            raise
        for address, pair in zip(wanted.addresses, ordered, strict=True):
            self._keep(address, pair)
        job.afterwards = functools.partial(_pay, ordered)
        return Report(number=job.order.number, partial=partial)

    @staticmethod
    def _settle(pair: Pair, job: Job) -> None:
        """Begin a fetch over a connection, behind the one before."""
        _begin(pair, job)
        pair.settle()
        # Before anything is read of a peer that is gone: UCX, beneath NIXL, may end this process then. One that goes
        # between this look and the read, or while blocks come, is not to be seen from here: no look is late enough, for
        # nobody can hold a peer, and its memory, as long as a read takes. What this closes is all the time before, in
        # which a connection lies idle: what is left are the microseconds until the read, and the read.
        if pair.is_broken_off:
            raise EOFError(f"{pair.peer} has closed the connection")

    def _end(self, fetch: _Fetch) -> None:
        """All is here, and has to be said. Who has the blocks answers that they were on offer until then.

        That is said and heard later, where their lease says so, and is waited for where not.
        """
        now = time.monotonic()
        is_sure = [now < pair.leased_until and not pair.is_broken_off for pair in fetch.pairs]
        for pair in fetch.pairs:
            pair.owe()
        for pair, sure in zip(fetch.pairs, is_sure, strict=True):
            if not sure:
                pair.settle()
            pair.mark("ended")
            if _LOG.isEnabledFor(logging.DEBUG):
                _LOG.debug("%d blocks of %s: ms: %s", len(fetch.job.order.blocks), pair.peer, pair.marked())

    def _connect(self, job: Job, address: Address, engine_id: str) -> Pair:
        """Raises TransferError for a peer that cannot be reached, is another engine, or has another cache."""
        self._drop_gone()
        try:
            left = job.until - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"{self._timeout:g} s were over (kv_transfer_timeout)")
            pair = Pair(socket.create_connection(address, left), self._timeout)
        except OSError as error:
            raise TransferError(f"{address[0]}:{address[1]} cannot be reached: {error}") from None
        try:
            _begin(pair, job)
            pair.send(Hello(way=self._way.name, cache=msgspec.Raw(msgspec.msgpack.encode(self._own))))
            welcome = pair.receive(Welcome)
            if welcome.engine_id and engine_id not in ("", welcome.engine_id):
                there = f"{pair.peer}: engine {welcome.engine_id!r} listens there"
                wanted = f"the blocks are of engine {engine_id!r} (remote_engine_id)"
                raise TransferError(f"{there}, and {wanted}, which was started anew or is elsewhere")
            if welcome.refused:
                raise UnlikeError(f"{pair.peer}: {welcome.refused}")
            self._check(pair, welcome.cache)
        except BaseException:
            pair.close()
            raise
        pair.theirs, pair.engine_id = welcome.cache, welcome.engine_id
        pair.is_alike = has_same_rows(pair.theirs, self._own)
        return pair

    def _check(self, pair: Pair, theirs: CacheDescription) -> None:
        """What a peer says of its cache, by which its bytes are asked for and laid. Raises UnlikeError."""
        wrong = flaws(theirs) or differences(theirs, self._own)
        if wrong:
            raise UnlikeError(f"{pair.peer}: {'; '.join(wrong[:MAX_DIFFERENCES])}")

    def _drop_gone(self) -> None:
        """Let go of peers that have closed their connections: one that is started anew listens elsewhere."""
        with self._lock:
            gone = {address: [pair for pair in pairs if pair.has_gone] for address, pairs in self._idle.items()}
            for address, pairs in gone.items():
                kept = [pair for pair in self._idle[address] if pair not in pairs]
                self._idle[address] = kept
                if not kept:
                    del self._idle[address]
        for pairs in gone.values():
            for pair in pairs:
                pair.close()

    def _move(self, fetch: _Fetch, ahead: Ahead | None) -> list[int]:
        """Fill the order's blocks. Those of which only what the request reads has come.

        ahead: of a peer that is asked.
        """
        if len(fetch.pairs) == 1 and fetch.pairs[0].is_alike:
            self._take_as_they_are(fetch, 0, ahead)
            return []
        names = ", ".join(pair.peer for pair in fetch.pairs)
        try:
            divided = divide(self._own, fetch.peers)
        except ValueError as error:
            raise UnlikeError(f"{names} {error}") from None
        givers = [number for number, parts in enumerate(divided) if parts]
        if len(givers) == 1 and fetch.pairs[givers[0]].is_alike:
            self._take_as_they_are(fetch, givers[0], None)
            return []
        return self._take_by_rows(fetch, divided)

    def _ask(self, fetch: _Fetch, number: int, pieces: Sequence[Sequence[Place]]) -> None:
        """Ask a rank for blocks, some at a time."""
        pair, wanted = fetch.pairs[number], fetch.wanted
        num_bytes = max(map(len, pieces), default=0) * pair.theirs.block_bytes
        pair.send(
            Ask(
                fetch=wanted.fetch,
                transfer_id=wanted.transfer_id,
                digest=wanted.digest,
                version=wanted.version,
                places=[place for piece in pieces for place in piece],
                pieces=list(map(len, pieces)),
                told=self._way.ask(pair, num_bytes) if pieces else b"",
            )
        )
        pair.leased_until = time.monotonic()
        pair.mark("asked")  # behind the order of what is read ahead

    @staticmethod
    def _hear(pair: Pair, num_asked: int) -> Told:
        """Its answer to so many blocks. Raises TransferError for no."""
        told: Told = pair.receive(Told)
        pair.leased_until += told.lease  # which begins there later than this side asked
        pair.mark("told")
        if told.refused:
            raise (UnlikeError if told.is_unlike else TransferError)(f"{pair.peer}: {told.refused}")
        if told.lacking and not 0 <= min(told.lacking) <= max(told.lacking) < num_asked:
            raise TransferError(f"{pair.peer} lacks blocks {told.lacking[:4]} of {num_asked} that it was asked for")
        return told

    def _pieces(self, blocks: Sequence[_T]) -> list[Sequence[_T]]:
        """As many of them as come at a time."""
        count = max(self._way.piece_bytes // self._cache.block_bytes, 1)
        return [blocks[start : start + count] for start in range(0, len(blocks), count)]

    def _read_ahead(self, fetch: _Fetch, giver: int) -> Ahead:
        """Ask all ranks, and order before what the offer has named, which is copied while its side looks for it.

        An error leaves no copy under way.
        """
        ahead = self._way.read_ahead(fetch.pairs[giver], fetch.wanted.blocks, fetch.job, fetch.job.order.blocks)
        try:
            pieces = self._pieces(fetch.wanted.places)
            for number in range(len(fetch.pairs)):
                self._ask(fetch, number, pieces if number == giver else [])
        except BaseException:
            ahead.wait(yield_interpreter)
            raise
        fetch.job.is_under_way()
        return ahead

    def _take_as_they_are(self, fetch: _Fetch, giver: int, ahead: Ahead | None) -> None:
        ahead = ahead or self._read_ahead(fetch, giver)
        num_asked = [len(fetch.wanted.places) if number == giver else 0 for number in range(len(fetch.pairs))]
        answers = _Answers(list(zip(fetch.pairs, num_asked, strict=True)), self._hear)
        ahead.wait(answers.look)
        if ahead.told:
            fetch.pairs[giver].mark("copied")
        for pair, answer in zip(fetch.pairs, answers.all(), strict=True):
            if answer.lacking:
                raise _lacks(pair, fetch, fetch.wanted.places[answer.lacking[0]])
        told = answers.all()[giver]
        if not ahead.told or (told.told, told.offer) != (ahead.told, fetch.wanted.offer):
            self._way.take(fetch.pairs[giver], told.told, fetch.job, self._pieces(fetch.job.order.blocks))

    def _take_by_rows(self, fetch: _Fetch, divided: Sequence[Sequence[Part]]) -> list[int]:
        steps = list(self._batches(fetch, divided))
        partial: set[int] = set()
        streams: list[Generator[torch.Tensor]] = []
        for number, parts in enumerate(divided):
            pieces = [batch.sources[number] for batch in steps if batch.sources[number]]
            self._ask(fetch, number, pieces)
            asked = [place for piece in pieces for place in piece]
            told = self._hear(fetch.pairs[number], len(asked))
            lacking = {asked[index] for index in told.lacking}
            for place in lacking:
                partial |= self._spoilt(fetch, number, parts, place)
            if lacking:
                fetch.pairs[number].send(Done())
            for batch in steps:
                batch.sources[number][:] = [place for place in batch.sources[number] if place not in lacking]
            counts = [len(batch.sources[number]) for batch in steps if batch.sources[number]]
            streams.append(self._way.rows(fetch.pairs[number], told.told, counts))
        with contextlib.ExitStack() as ends:
            for stream in streams:
                ends.enter_context(contextlib.closing(stream))
            for batch in steps:
                self._fill(fetch, divided, batch, streams, partial)
        return sorted(partial)

    def _batches(self, fetch: _Fetch, divided: Sequence[Sequence[Part]]) -> Iterator[_Batch]:
        places, groups = fetch.wanted.places, self._own.groups
        starts = [place * groups[group].block_size for group, place in places]
        for tokens in batches(self._own, fetch.peers, Tokens(min(starts), fetch.wanted.end), PIECE_BYTES):
            own = [number for number, start in enumerate(starts) if tokens.start <= start < tokens.end]
            targets = fetch.targets(own)
            sources = [
                needed_places(peer, self._own, parts, targets, tokens)
                for peer, parts in zip(fetch.peers, divided, strict=True)
            ]
            yield _Batch(tokens, own, sources)

    def _fill(
        self,
        fetch: _Fetch,
        divided: Sequence[Sequence[Part]],
        batch: _Batch,
        streams: Sequence[Iterator[torch.Tensor]],
        partial: set[int],
    ) -> None:
        """partial: blocks of which something may lack."""
        targets = fetch.targets(batch.targets)
        memory = self._cache.host_memory(len(targets), self._cache.block_bytes)
        rows = memory.numpy()
        rows.fill(0)
        came = 0
        for peer, parts, places, stream in zip(fetch.peers, divided, batch.sources, streams, strict=True):
            if places:
                came += copy(
                    peer,
                    self._own,
                    parts,
                    (places, next(stream).numpy()),
                    (targets, rows),
                    batch.tokens,
                )
        blocks = [fetch.job.order.blocks[number] for number in batch.targets]
        whole = [place for place, block in zip(targets, blocks, strict=True) if block not in partial]
        due = num_bytes(self._own, whole, batch.tokens)
        if came < due:
            names = ", ".join(pair.peer for pair in fetch.pairs)
            raise TransferError(f"{names} gave {came} of {due} bytes of transfer {fetch.wanted.transfer_id!r}")
        with fetch.job.touching():
            self._cache.write(blocks, list(memory))

    def _spoilt(self, fetch: _Fetch, number: int, parts: Sequence[Part], place: Place) -> set[int]:
        """The blocks here that a missing block of a peer leaves incomplete.

        Raises TransferError where the request reads what is missing.
        """
        lost = span(fetch.peers[number].groups[place[0]], place[1], Tokens(0, fetch.wanted.end))
        groups = {part.target for part in parts if part.source == place[0]}
        if any(first_read(self._own.groups[group], fetch.wanted.position) < lost.end for group in groups):
            raise _lacks(fetch.pairs[number], fetch, place)
        return {
            block
            for (group, own), block in zip(fetch.wanted.places, fetch.job.order.blocks, strict=True)
            if group in groups and span(self._own.groups[group], own, lost).num_tokens > 0
        }


class _Answers:
    """What the ranks of a peer say when they are asked, in their order. It is heard while blocks come, if it can be."""

    def __init__(self, asked: Sequence[tuple[Pair, int]], hear: Callable[[Pair, int], Told]) -> None:
        """Nobody has been heard. asked: for how many blocks."""
        self._due, self._hear = list(asked), hear
        self._heard: list[Told] = []
        self._error: Exception | None = None

    def look(self) -> None:
        """Hear who says something. Raises nothing."""
        try:
            if self._due and self._error is None and self._due[0][0].has_message:
                self._heard.append(self._hear(*self._due.pop(0)))
        except Exception as error:  # blocks still come
            self._error = error
        yield_interpreter()

    def all(self) -> list[Told]:
        """Wait for the rest. Raises as `hear`."""
        if self._error is not None:
            raise self._error
        while self._due:
            self._heard.append(self._hear(*self._due.pop(0)))
        return self._heard


def _wanted(job: Job) -> Wanted:
    wanted = job.order.wanted
    assert wanted is not None, "a load says where it is"
    return wanted


def _begin(pair: Pair, job: Job) -> None:
    """A load begins over a connection. Raises Cancelled."""
    pair.begin()
    pair.until = job.until
    job.waits_by(pair.cut)


def _pay(pairs: Sequence[Pair]) -> None:
    """Say what is owed. Who cannot hear it is found to have gone when it is needed next."""
    for pair in pairs:
        with contextlib.suppress(OSError):
            pair.pay()


def _lacks(pair: Pair, fetch: _Fetch, place: Place) -> TransferError:
    return TransferError(f"{pair.peer}: transfer {fetch.wanted.transfer_id!r} has no block at {place}")
