"""Tensors of a checkpoint's files, read by several threads, in pieces, ahead of whoever takes them.

Owns the threads and the memory that pieces lie in: the tensors' own on the host, pinned memory on the way to a GPU.
Does not know what becomes of a tensor. Invariants: tensors come in order, each whole; pieces ahead are few, so that
memory beside the tensors is; when the iteration ends, however it does, no thread reads.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from typing import NamedTuple

import torch

from octavo.checkpoint.safetensors import Checkpoint
from octavo.rl.plan import Incoming

PIECE_BYTES = 16 << 20
_AHEAD = 16  # pieces that are read, or wait to be taken
_COPIES = 4  # of them, that a GPU may still copy from
_MAX_THREADS = 8
_SMALL = 64 << 20  # bytes that one thread has read before others have begun


class Piece(NamedTuple):
    """Bytes begin .. end - 1 of a tensor."""

    tensor: int  # its place among those that are read
    begin: int
    end: int


def read_ahead(
    checkpoint: Checkpoint, incoming: Sequence[Incoming], device: torch.device
) -> Generator[tuple[Incoming, torch.Tensor], None, None]:
    """Each tensor, on `device`, which is the taker's until the next one. Raises ValueError for a file that fails."""
    if device.type == "cpu" and sum(each.num_bytes for each in incoming) <= _SMALL:
        for each in incoming:
            tensor = torch.empty(each.shape, dtype=each.dtype)
            checkpoint.read(each.name, tensor)
            yield each, tensor
        return
    with contextlib.closing(
        _OntoHost(checkpoint, incoming) if device.type == "cpu" else _OntoGpu(checkpoint, incoming, device)
    ) as reads:
        for index, each in enumerate(incoming):
            yield each, reads.take(index)


class _OntoHost:
    """Pieces are read to where they belong."""

    def __init__(self, checkpoint: Checkpoint, incoming: Sequence[Incoming]) -> None:
        """Begins with the first ones."""
        self._checkpoint, self._incoming = checkpoint, incoming
        self._pieces = deque(pieces_of(incoming))
        self._running: deque[tuple[Piece, concurrent.futures.Future[None]]] = deque()
        self._tensors: dict[int, torch.Tensor] = {}
        threads = min(_MAX_THREADS, os.cpu_count() or 1)
        self._pool = concurrent.futures.ThreadPoolExecutor(threads, thread_name_prefix="octavo-files")
        self._begin_others(_AHEAD)

    def take(self, index: int) -> torch.Tensor:
        """The tensor at a place; they are asked for in order."""
        while self._running and self._running[0][0].tensor == index:
            piece, read = self._running.popleft()
            read.result()
            self._taken(piece)
        return self._tensors.pop(index)

    def close(self) -> None:
        """Once no thread reads."""
        self._pool.shutdown(cancel_futures=True)

    def _taken(self, piece: Piece) -> None:
        self._begin_others(1)

    def _begin_others(self, count: int) -> None:
        for _ in range(min(count, len(self._pieces))):
            piece = self._pieces.popleft()
            self._tensor(piece.tensor)
            name, target = self._incoming[piece.tensor].name, self._target(piece)
            self._running.append((piece, self._pool.submit(self._checkpoint.read_bytes, name, piece.begin, target)))

    def _target(self, piece: Piece) -> torch.Tensor:
        """What a piece is read into."""
        return _bytes(self._tensor(piece.tensor))[piece.begin : piece.end]

    def _tensor(self, index: int) -> torch.Tensor:
        if index not in self._tensors:
            self._tensors[index] = self._empty(self._incoming[index])
        return self._tensors[index]

    def _empty(self, incoming: Incoming) -> torch.Tensor:
        return torch.empty(incoming.shape, dtype=incoming.dtype)


class _OntoGpu(_OntoHost):
    """Pieces pass through pinned memory, in turn; copies run while further pieces are read."""

    def __init__(self, checkpoint: Checkpoint, incoming: Sequence[Incoming], device: torch.device) -> None:
        """Begins with the first ones."""
        self._device = device
        self._pinned = [torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(_AHEAD + _COPIES)]
        self._targets: dict[Piece, torch.Tensor] = {}
        self._copied: deque[tuple[torch.cuda.Event, torch.Tensor]] = deque()
        super().__init__(checkpoint, incoming)

    def close(self) -> None:
        """Once nothing is read, or copied from pinned memory."""
        super().close()
        while self._copied:
            self._copied.popleft()[0].synchronize()

    def _taken(self, piece: Piece) -> None:
        target = self._targets.pop(piece)
        size = piece.end - piece.begin
        _bytes(self._tensor(piece.tensor))[piece.begin : piece.end].copy_(target[:size], non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._copied.append((event, target))
        if len(self._copied) > _COPIES:
            event, target = self._copied.popleft()
            event.synchronize()
            self._pinned.append(target)
        super()._taken(piece)

    def _target(self, piece: Piece) -> torch.Tensor:
        target = self._targets[piece] = self._pinned.pop()
        return target[: piece.end - piece.begin]

    def _empty(self, incoming: Incoming) -> torch.Tensor:
        return torch.empty(incoming.shape, dtype=incoming.dtype, device=self._device)


def pieces_of(incoming: Sequence[Incoming]) -> Iterator[Piece]:
    """All bytes of all tensors, in order."""
    for index, each in enumerate(incoming):
        for begin in range(0, each.num_bytes, PIECE_BYTES):
            yield Piece(index, begin, min(begin + PIECE_BYTES, each.num_bytes))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)
