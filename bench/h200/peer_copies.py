"""Blocks out of another GPU's memory, two GPUs in one process: `python bench/h200/peer_copies.py`.

The blocks of a prompt of 4,000 tokens of 8b (63 of 36 pages of 256 KiB), by a copy engine and by a kernel, for runs of
so many blocks that lie together on both sides; the values are compared. GB/s, the waits of a load included.
"""

from __future__ import annotations

import statistics
import time

import torch

from octavo.kv_connector.worker.ways import ipc_memory
from octavo.kv_connector.worker.ways.ipc_memory import DeviceMemory
from octavo.kv_connector.worker.ways.regions import Region

_PAGES, _BLOCKS, _PAGE_BYTES = 36, 252, 256 << 10
_ROUNDS = 8


def region(data: torch.Tensor, blocks: list[int]) -> Region:
    """Of data [pages, blocks, bytes]."""
    pages, num, size = data.shape
    kind = "VRAM" if data.is_cuda else "DRAM"
    return Region(
        agent=b"",
        base=data.data_ptr(),
        kind=kind,
        device=0,
        num_pages=pages,
        num_blocks=num,
        page_bytes=size,
        blocks=blocks,
    )


def main() -> None:
    """A line for each way."""
    shape = (_PAGES, _BLOCKS, _PAGE_BYTES)
    theirs = torch.randint(256, shape, dtype=torch.uint8, device="cuda:1")
    own = torch.zeros(shape, dtype=torch.uint8, device="cuda:0")
    own.copy_(theirs)  # torch lets the one reach the other
    memory = DeviceMemory(torch.device("cuda:0"))
    print(f"{'blocks together':>15} {'MiB':>6}  {'copy engine':>11}  {'kernel':>6}")
    for length in (63, 16, 8, 4, 2, 1):
        blocks = [start * 4 + each for start in range(0, 63, length) for each in range(min(length, 63 - start))]
        found = []
        for least in (1, 1 << 60):
            ipc_memory._LEAST_RUN = least
            own.zero_()
            seconds = []
            for _ in range(_ROUNDS):
                torch.cuda.synchronize(0)
                started = time.perf_counter()
                memory.copy(own, region(own, blocks), region(theirs, blocks))
                seconds.append(time.perf_counter() - started)
            assert torch.equal(own[:, blocks], theirs[:, blocks].to(own.device)), "the blocks are there"
            assert not own[:, [b for b in range(_BLOCKS) if b not in blocks]].any(), "no other byte changes"
            found.append(len(blocks) * _PAGES * _PAGE_BYTES / statistics.median(seconds[1:]) / 1e9)
        print(f"{length:>15} {length * _PAGE_BYTES / (1 << 20):>6.2f}  {found[0]:>11.1f}  {found[1]:>6.1f}", flush=True)


if __name__ == "__main__":
    main()
