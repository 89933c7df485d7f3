"""StagedTensor and what carries its writes: device state that the host changes by differences.

Owns tensors with fixed addresses, the writes that wait for them, and the pinned memory that writes pass through, where
a kernel reads them. The host stages ragged writes at any time; a queue, which many tensors share, brings them to the
device at one line of the step. Does not know what the rows mean. Invariant: between two `apply` calls of its queue a
tensor changes only through device work; later writes to the same element win; pinned memory is written again only after
the device has read it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from octavo.ops.inputs.staged_write import staged_write
from octavo.plan import IntArray

_NUM_SLOTS = 4  # more than the two steps that may be outstanding, so that a slot is never waited for
_NUMPY = {torch.int32: np.int32, torch.int64: np.int64, torch.float32: np.float32}


class PinnedRing:
    """Pinned host memory in slots, handed out in turn. A slot is free again when the work before its event is done."""

    def __init__(self) -> None:
        """Slots are made when they are first asked for."""
        self._slots = [torch.empty(0, dtype=torch.int32)] * _NUM_SLOTS
        self._events = [torch.cuda.Event() for _ in range(_NUM_SLOTS)]
        self._next = 0

    def take(self, num_words: int) -> tuple[torch.Tensor, torch.cuda.Event]:
        """The next slot, int32 [at least num_words], and the event to record after the work that uses it."""
        index = self._next
        self._next = (index + 1) % _NUM_SLOTS
        event = self._events[index]
        event.synchronize()  # of an event that was never recorded: returns at once
        if self._slots[index].numel() < num_words:
            self._slots[index] = torch.empty(max(4096, 2 * num_words), dtype=torch.int32, pin_memory=True)
        return self._slots[index], event


class WriteQueue:
    """Writes to any tensors of the CUDA device at hand, made by one kernel that reads them from pinned memory."""

    def __init__(self, ring: PinnedRing | None = None) -> None:
        """Empty at first. `ring`: what the writes pass through (default: its own)."""
        from octavo.ops.inputs.staged_write_gpu import WORDS_PER_RUN, RunWriter

        self._write_runs, self._header = RunWriter(), WORDS_PER_RUN
        self._ring = ring or PinnedRing()
        self._addresses: list[NDArray[np.int64]] = []
        self._counts: list[int | NDArray[np.int64]] = []  # words of each run; an int: of all runs alike
        self._words: list[NDArray[np.int32]] = []
        # not among them yet: runs by their first address, and the values at single addresses, by dtype
        self._runs: list[tuple[int, NDArray[np.int32]]] = []
        self._values: dict[np.dtype[Any], dict[int, Any]] = {}

    def stage(self, addresses: NDArray[np.int64], count: int | NDArray[np.int64], words: NDArray[np.int32]) -> None:
        """Stage runs for the device memory from addresses[i] on, which the caller keeps alive.

        count: words of each run, or of all alike. The runs of one call do not overlap. The arrays are kept, not copied.
        """
        if self._runs or self._values:
            self._settle()
        self._addresses.append(addresses)
        self._counts.append(count)
        self._words.append(words)

    def stage_run(self, address: int, words: NDArray[np.int32]) -> None:
        """Stage one run. The array is kept, not copied."""
        self._runs.append((address, words))

    def stage_value(self, address: int, dtype: np.dtype[Any], value: Any) -> None:
        """Stage one number, where `stage_run` writes nothing."""
        self._values.setdefault(dtype, {})[address] = value

    def _settle(self) -> None:
        """Turn single runs and values into arrays: of hundreds of new requests, each has several."""
        if self._runs:
            self._addresses.append(np.array([address for address, _ in self._runs]))
            self._counts.append(np.array([len(words) for _, words in self._runs]))
            self._words += [words for _, words in self._runs]
            self._runs = []
        for dtype, values in self._values.items():
            self._addresses.append(np.array([*values]))
            self._counts.append(dtype.itemsize // 4)
            self._words.append(np.array([*values.values()], dtype).view(np.int32))
        self._values.clear()

    def apply(self) -> None:
        """Bring the staged writes to the device, as if in the order in which they were staged."""
        if not (self._addresses or self._runs or self._values):  # as for most tensors of most steps
            return
        self._settle()
        staged, self._addresses = self._addresses, []
        counts, self._counts = self._counts, []
        words, self._words = self._words, []
        if len(staged) == 1 and isinstance(counts[0], int):  # new blocks of rows that decode, and no more
            self._send(staged[0], counts[0], words[0])
        else:
            self._apply_all(staged, counts, np.concatenate(words))

    def _apply_all(
        self, staged: list[NDArray[np.int64]], staged_counts: list[int | NDArray[np.int64]], words: NDArray[np.int32]
    ) -> None:
        addresses = np.concatenate(staged)
        counts = np.concatenate(
            [
                np.full(len(own), count) if isinstance(count, int) else count
                for own, count in zip(staged, staged_counts, strict=True)
            ]
        )
        order = addresses.argsort()
        if not ((addresses + 4 * counts)[order[:-1]] > addresses[order[1:]]).any():
            self._send(addresses, counts, words)
            return
        for index, end in enumerate(counts.cumsum().tolist()):
            one = slice(index, index + 1)
            self._send(addresses[one], counts[one], words[end - int(counts[index]) : end])

    def _send(self, addresses: NDArray[np.int64], counts: int | NDArray[np.int64], words: NDArray[np.int32]) -> None:
        num_runs = len(addresses)
        first = self._header * num_runs
        num_words = first + len(words)
        slot, event = self._ring.take(num_words)
        host = slot.numpy()
        headers = host[:first].view(np.int64).reshape(num_runs, 2)
        headers[:, 0] = addresses
        if isinstance(counts, int):
            longest = counts
            headers[:, 1] = np.arange(first | counts << 32, num_words | counts << 32, counts)
        else:
            longest = int(counts.max())
            headers[:, 1] = (counts.cumsum() - counts + first) | (counts << 32)
        host[first:num_words] = words
        self._write_runs(slot, num_runs, longest)
        event.record()


class HostQueue:
    """Writes to tensors on the host, which are made where they lie."""

    def __init__(self) -> None:
        """Empty at first."""
        self._waiting: list[StagedTensor] = []

    def enter(self, tensor: StagedTensor) -> None:
        """A tensor has its first write that waits."""
        self._waiting.append(tensor)

    def apply(self) -> None:
        """Make the staged writes, of each tensor in the order in which they were staged."""
        for tensor in self._waiting:
            tensor.make_writes()
        self._waiting.clear()


Queue = HostQueue | WriteQueue


def make_queue(device: torch.device) -> Queue:
    """What carries writes to the tensors of a device."""
    return WriteQueue() if device.type == "cuda" else HostQueue()


class StagedTensor:
    """`data` is [num_rows, width], or [num_rows] where `width` is 0."""

    def __init__(
        self,
        num_rows: int,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
        queue: Queue,
    ) -> None:
        """Zeroed at first. `queue`: which brings what is staged, to this tensor and others."""
        self.data = torch.zeros((num_rows, width) if width else (num_rows,), dtype=dtype, device=device)
        self._flat = self.data.view(-1)
        self._width = width or 1
        self._places: list[int | NDArray[np.int64]] = []
        self._values: list[Sequence[int | float] | NDArray[np.generic]] = []
        self._dtype = np.dtype(_NUMPY[dtype])
        self._address = self.data.data_ptr()
        self._queue = queue if isinstance(queue, WriteQueue) else None
        self._host = queue if isinstance(queue, HostQueue) else HostQueue()

    def stage(self, row: int, start: int, values: Sequence[int | float] | NDArray[np.generic]) -> None:
        """Stage `values` for columns start .. start + len(values) - 1 of `row`. Values may be kept, not copied."""
        assert start + len(values) <= self._width, f"write of {len(values)} at {start} leaves a row of {self._width}"
        at = row * self._width + start
        if self._queue is not None:
            address = self._address + at * self._dtype.itemsize
            if self._width == 1:
                for value in values:
                    self._queue.stage_value(address, self._dtype, value)
            else:
                self._queue.stage_run(address, np.ascontiguousarray(values, self._dtype).view(np.int32))
            return
        self._keep(at, values)

    def stage_one(self, row: int, value: int | float) -> None:
        """Stage one value for `row`, of a tensor of width 0."""
        if self._queue is not None:
            self._queue.stage_value(self._address + row * self._dtype.itemsize, self._dtype, value)
        else:
            self._keep(row, (value,))

    def stage_lines(
        self, rows: IntArray, lengths: IntArray, values: NDArray[np.generic], columns: IntArray | int = 0
    ) -> None:
        """Stage the next lengths[i] of `values`, at least one, for row rows[i], from column columns[i] on."""
        assert (columns + lengths).max(initial=0) <= self._width, f"a line leaves a row of {self._width}"
        words = np.ascontiguousarray(values, self._dtype)
        if self._queue is not None:
            size = self._dtype.itemsize
            addresses = rows.astype(np.int64, copy=False) * (self._width * size) + (columns * size + self._address)
            self._queue.stage(addresses, lengths.astype(np.int64, copy=False) * (size // 4), words.view(np.int32))
            return
        starts = np.broadcast_to(columns, rows.shape).tolist()
        for row, start, end, length in zip(
            rows.tolist(), starts, lengths.cumsum().tolist(), lengths.tolist(), strict=True
        ):
            self.stage(row, start, words[end - length : end])

    def stage_each(self, rows: IntArray, columns: IntArray | int, values: NDArray[np.generic]) -> None:
        """Stage values[i] for column columns[i] of row rows[i], each once. The caller checks the columns."""
        if self._queue is not None:
            size = self._dtype.itemsize
            addresses = rows.astype(np.int64, copy=False) * (self._width * size) + (columns * size + self._address)
            self._queue.stage(addresses, size // 4, np.ascontiguousarray(values, self._dtype).view(np.int32))
            return
        places = rows.astype(np.int64) * self._width + columns
        self._keep(places, values)

    def _keep(self, places: int | NDArray[np.int64], values: Sequence[int | float] | NDArray[np.generic]) -> None:
        if not self._places:
            self._host.enter(self)
        self._places.append(places)
        self._values.append(values)

    def make_writes(self) -> None:
        """Write what was staged for a tensor on the host: the queue's part."""
        staged_write(self._flat, self._places, self._values)
        self._places.clear()
        self._values.clear()
