"""CacheBytes: whole blocks of a cache as runs of bytes on the host.

Owns the copies between the cache and the host, on streams of their own where the cache is a GPU's. Knows blocks, and
neither layers nor layouts: what the bytes of a block mean the cache's identity says. Invariant: when `read` and `write`
return the bytes are there, for every later step too; neither touches another block, nor waits for a step.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from octavo.kv_connector.peers.description import NO_DESCRIPTION, CacheDescription
from octavo.ops.arrivals import NO_ARRIVALS, NO_GATES, Arrivals, Gates
from octavo.ops.copying import can_copy_pieces, copy_pieces, to_device
from octavo.ops.windows import Windows

_LEAST_PIECE = 128 << 10  # bytes: smaller ones take a copy engine longer than the bus
_WINDOW_BYTES = 64 << 20  # that one call of the driver orders: no step can launch meanwhile
_MAX_WINDOWS = 3  # under way: for as long as steps may keep a thread waiting, and leaving them room for their launches
# of the bus's rate, beside steps: what comes is written to the memory that they read, and what goes is read from it
_SHARE_TO_CACHE, _SHARE_FROM_CACHE = 0.88, 0.92
_STAGING_BYTES = 64 << 20  # of a direction: what is gathered on a GPU before it goes over the bus


class CacheBytes:
    """The blocks of one worker. Any thread may read, and any write: each on a stream of its direction."""

    def __init__(
        self,
        data: torch.Tensor,
        free_bytes: int,
        views: Sequence[torch.Tensor] = (),
        *,
        description: CacheDescription = NO_DESCRIPTION,
        moves: bool = False,
        computes: Callable[[], bool] = bool,
        gates: Gates = NO_GATES,
    ) -> None:
        """data: uint8 [pages, num_blocks, bytes of a page], as `KVCachePool.data`. free_bytes: of the host's memory.

        views: the same by layers, as attention sees them, [kernel blocks, heads, tokens, channels]. description: what
        another engine is told of it. moves: the memory behind these addresses may go, and other may come. computes:
        whether steps run on the device at this moment. gates: of the steps' graphs, which a load opens one by one.
        """
        self.data, self.free_bytes, self.views, self.moves = data, free_bytes, views, moves
        self.description, self._gates = description, gates
        self.device, self._entered = data.device, threading.local()
        self.num_pages, self.num_blocks, self.page_bytes = data.shape
        self.block_bytes = self.num_pages * self.page_bytes
        shares = {False: _SHARE_FROM_CACHE, True: _SHARE_TO_CACHE}
        self._lanes = {way: _Lane(self, share, computes) for way, share in shares.items()} if data.is_cuda else {}

    @property
    def on_gpu(self) -> bool:
        """Whether host memory for copies has to be pinned."""
        return self.data.is_cuda

    def enter_thread(self) -> None:
        """Let a library work in the calling thread: a new one has no context of a GPU's driver, which UCX asks for."""
        if self.on_gpu and not hasattr(self._entered, "has_context"):
            torch.cuda.current_stream(self.device).query()
            self._entered.has_context = True

    def host_memory(self, num_rows: int, row_bytes: int) -> torch.Tensor:
        """Memory for copies: uint8 [num_rows, row_bytes], pinned for a GPU. Raises RuntimeError where there is none."""
        with torch.inference_mode():
            return torch.empty((num_rows, row_bytes), dtype=torch.uint8, pin_memory=self.on_gpu)

    def read(self, blocks: Sequence[int], rows: Sequence[torch.Tensor]) -> None:
        """Copy blocks to rows of host memory, uint8 [block_bytes] each."""
        with torch.inference_mode():
            if self._lanes:
                self._lanes[False].run(blocks, rows, to_cache=False)
                return
            for block, row in zip(blocks, rows, strict=True):
                row.view(self.num_pages, self.page_bytes).copy_(self.data[:, block])

    def write(self, blocks: Sequence[int], rows: Sequence[torch.Tensor]) -> None:
        """Copy rows of host memory to blocks."""
        with torch.inference_mode():
            if self._lanes:
                self._lanes[True].run(blocks, rows, to_cache=True)
                return
            for block, row in zip(blocks, rows, strict=True):
                self.data[:, block].copy_(row.view(self.num_pages, self.page_bytes))

    def bring(self, blocks: Sequence[int], rows: Sequence[torch.Tensor]) -> Arrivals | None:
        """As `write`, with all steps done; the next step waits, and nobody else does. Pages come by layers.

        None, and nothing is done: it is not to be had without a wait. An error leaves no copy under way.
        """
        if not self._lanes:
            self.write(blocks, rows)
            return NO_ARRIVALS
        return self._lanes[True].bring(blocks, rows, self._gates.in_turn(self._page_of_layer()))

    def _page_of_layer(self) -> list[int]:
        """Of each layer the page of a block that has its bytes; a layer that keeps none has any."""
        first, size = self.data.data_ptr(), self.num_blocks * self.page_bytes
        return [(view.data_ptr() - first) // size if view.numel() else 0 for view in self.views]

    def gather(self, blocks: Sequence[int]) -> torch.Tensor:
        """Blocks as rows beside the cache, uint8 [len(blocks), block_bytes]: on the current stream, not waited for."""
        with torch.inference_mode():
            rows = self._by_block().index_select(0, self._index(blocks))
            return rows.view(torch.uint8).view(-1, self.block_bytes)

    def scatter(self, blocks: Sequence[int], rows: torch.Tensor) -> None:
        """Fill blocks with rows that lie beside the cache: on the current stream, not waited for."""
        with torch.inference_mode():
            own = self._by_block()
            own.index_copy_(0, self._index(blocks), rows.view(own.dtype).view(-1, *own.shape[1:]))

    def _by_block(self) -> torch.Tensor:
        words = torch.int64 if self.page_bytes % 8 == 0 else torch.uint8  # a thread moves a word
        return self.data.view(words).transpose(0, 1)  # [num_blocks, pages, words]

    def _index(self, blocks: Sequence[int]) -> torch.Tensor:
        return to_device(np.array(blocks, np.int64), self.device)


class _Lane:
    """Copies of one direction on a GPU: one stream. One thread at a time orders copies, any number wait for theirs.

    So what one thread orders follows what another waits for without a gap on the bus.
    """

    def __init__(self, cache: CacheBytes, share: float, computes: Callable[[], bool]) -> None:
        """share, computes: see Windows."""
        self._device = cache.device
        self._windows = Windows(_MAX_WINDOWS, share, computes)
        self._stream = torch.cuda.Stream(cache.device)
        self._lock = threading.Lock()
        self._pieces = Pieces(cache.data)
        # large pieces go over the bus from where they lie to where they belong; small ones are gathered on the GPU
        self._is_direct = cache.page_bytes >= _LEAST_PIECE and can_copy_pieces(cache.device)
        self._count = 1 if self._is_direct else max(_STAGING_BYTES // cache.block_bytes, 1)
        with torch.inference_mode():
            words = torch.int64 if cache.page_bytes % 8 == 0 else torch.uint8  # a thread gathers a word
            self._blocks = cache.data.view(words).transpose(0, 1)  # [num_blocks, pages, words]
            shape = (0 if self._is_direct else self._count, *self._blocks.shape[1:])
            self._staging = torch.empty(shape, dtype=self._blocks.dtype, device=cache.device)

    def run(self, blocks: Sequence[int], rows: Sequence[torch.Tensor], *, to_cache: bool) -> None:
        if not len(blocks):
            return
        done = torch.cuda.Event(blocking=True)
        with self._lock, torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            order = self._order_pieces if self._is_direct else self._order_staged
            try:
                order(blocks, rows, to_cache=to_cache)
            except BaseException:  # the blocks of an order that failed are somebody else's at once
                self._stream.synchronize()
                raise
            done.record(self._stream)
        done.synchronize()

    def _order_pieces(self, blocks: Sequence[int], rows: Sequence[torch.Tensor], *, to_cache: bool) -> None:
        self._stream.query()  # a thread has no context of the driver's before torch has asked something in it
        own, other = (addresses.reshape(-1) for addresses in self._pieces.of(blocks, rows))
        targets, sources = (own, other) if to_cache else (other, own)
        size = self._pieces.num_bytes
        count = max(_WINDOW_BYTES // size, 1)
        for start in range(0, len(own), count):
            part = slice(start, start + count)
            num_bytes = size * len(own[part])
            self._windows.make_room(num_bytes)
            copy_pieces(targets[part], sources[part], size, self._stream.cuda_stream)
            event = torch.cuda.Event(enable_timing=True, blocking=True)
            event.record(self._stream)
            self._windows.ordered(event, num_bytes)

    def bring(
        self, blocks: Sequence[int], rows: Sequence[torch.Tensor], gates: Iterable[tuple[int, torch.cuda.Event]]
    ) -> Arrivals | None:
        """See CacheBytes. All at once: each gate's pages, and its event behind them."""
        if not self._is_direct or not self._lock.acquire(blocking=False):
            return None
        try:
            with torch.cuda.device(self._device):
                begun, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begun.record(self._stream)
                own, other = (addresses.T for addresses in self._pieces.of(blocks, rows))  # [pages, blocks]
                size, start = self._pieces.num_bytes, 0
                try:
                    for stop, event in (*gates, (len(own), done)):
                        if start < stop:
                            part = slice(start, stop)
                            copy_pieces(own[part].reshape(-1), other[part].reshape(-1), size, self._stream.cuda_stream)
                            start = stop
                        event.record(self._stream)
                except BaseException:
                    self._stream.synchronize()
                    raise
            return Arrivals(begun, done)
        finally:
            self._lock.release()

    def _order_staged(self, blocks: Sequence[int], rows: Sequence[torch.Tensor], *, to_cache: bool) -> None:
        rows = [row.view(self._blocks.dtype) for row in rows]
        if self._blocks.shape[1] == 1:  # a block is one run of bytes: it goes over the bus as it lies
            for block, row in zip(blocks, rows, strict=True):
                own = self._blocks[block, 0]
                source, target = (row, own) if to_cache else (own, row)
                target.copy_(source, non_blocking=True)
            return
        index = to_device(np.array(blocks, np.int64), self._device)
        for start in range(0, len(blocks), self._count):
            part = slice(start, start + self._count)
            self._gather(index[part], rows[part], to_cache=to_cache)

    def _gather(self, index: torch.Tensor, rows: Sequence[torch.Tensor], *, to_cache: bool) -> None:
        """Order the copies of blocks [at most as many as are staged]; those before them are done with the staging."""
        staging = self._staging[: len(rows)]
        flat = staging.view(len(rows), -1)
        if to_cache:
            for place, lines in joined(rows):
                flat[place : place + len(lines)].copy_(lines, non_blocking=True)
            self._blocks.index_copy_(0, index, staging)
        else:
            torch.index_select(self._blocks, 0, index, out=staging)
            for place, lines in joined(rows):
                lines.copy_(flat[place : place + len(lines)], non_blocking=True)


class Pieces:
    """Addresses of the pages of blocks, in a cache and in rows."""

    def __init__(self, data: torch.Tensor) -> None:
        """data: see CacheBytes. num_bytes: of a piece."""
        num_pages, num_blocks, self.num_bytes = data.shape
        page = np.arange(num_pages, dtype=np.uint64) * np.uint64(self.num_bytes)  # [pages], in a row
        self._in_row, self._in_cache = page, page * np.uint64(num_blocks) + np.uint64(data.data_ptr())

    def of(self, blocks: Sequence[int], rows: Sequence[torch.Tensor]) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
        """Of each page of each block: where it lies in the cache, and in the block's row. [blocks, pages] each."""
        assert len(blocks) == len(rows), "each block has a row"
        own = np.array(blocks, np.uint64)[:, None] * np.uint64(self.num_bytes) + self._in_cache
        other = np.array([row.data_ptr() for row in rows], np.uint64)[:, None] + self._in_row
        return own, other


def joined(rows: Sequence[torch.Tensor]) -> Iterator[tuple[int, torch.Tensor]]:
    """(place of the first, [rows, elements]) of each run of rows that lie one behind the other in one storage.

    rows: [elements] each, of one length. A copy for each of some hundred rows takes the host longer than the bus.
    """
    begin = 0
    for end in range(1, len(rows) + 1):
        if end == len(rows) or not _follows(rows[end - 1], rows[end]):
            size = len(rows[begin])
            yield begin, rows[begin].as_strided((end - begin, size), (size, 1))
            begin = end


def _follows(before: torch.Tensor, row: torch.Tensor) -> bool:
    """Whether `row` begins where `before` ends."""
    is_next = row.data_ptr() == before.data_ptr() + before.nbytes
    return is_next and row.untyped_storage().data_ptr() == before.untyped_storage().data_ptr()
