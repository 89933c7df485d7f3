"""Blocks out of another GPU's memory, two GPUs in one process: `python bench/h200/peer_copies.py`.

The blocks of a prompt of 4,000 tokens of 8b (63 of 36 pages of 256 KiB), by a copy engine and by a kernel, for runs of
so many blocks that lie together on both sides; the values are compared. GB/s, the waits of a load included. Then by
NCCL between two processes, broadcast or sent, in pieces of two sizes, of its own number of channels or of 32.
"""

from __future__ import annotations

import datetime
import statistics
import sys
import tempfile
import time
import traceback
from typing import Any

import torch
from torch import distributed, multiprocessing

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


def nccl(rank: int, file: str, on_gpu: bool) -> None:
    """One of two processes: what NCCL moves from 0 to 1."""
    backend, limit = "nccl" if on_gpu else "gloo", datetime.timedelta(seconds=20)
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    distributed.init_process_group(backend, init_method=f"file://{file}", rank=rank, world_size=2, timeout=limit)
    whole = torch.empty((590 << 20) if on_gpu else (1 << 20), dtype=torch.uint8, device=device)
    for channels in (0, 32):
        options: Any = distributed.ProcessGroupNCCL.Options() if on_gpu else None
        if channels and options is not None:
            options.config.min_ctas = options.config.max_ctas = channels
        group = distributed.new_group([0, 1], timeout=limit, pg_options=options)
        for name in ("broadcast", "send"):
            for pieces in (7, 1):
                seconds = []
                for _ in range(_ROUNDS):
                    distributed.barrier()
                    if on_gpu:
                        torch.cuda.synchronize()
                    started = time.perf_counter()
                    for piece in whole.chunk(pieces):
                        if name == "broadcast":
                            distributed.broadcast(piece, 0, group=group)
                        elif rank:
                            distributed.recv(piece, 0, group=group)
                        else:
                            distributed.send(piece, 1, group=group)
                    if on_gpu:
                        torch.cuda.synchronize()
                    seconds.append(time.perf_counter() - started)
                if rank:
                    rate = whole.numel() / statistics.median(seconds[2:]) / 1e9
                    print(
                        f"nccl {name:>9} in {pieces} pieces, channels {channels or 'its own'}: {rate:.1f}", flush=True
                    )
    distributed.destroy_process_group()


def main() -> int:
    """A line for each way."""
    on_gpu, failed = torch.cuda.device_count() > 1, 0
    for part in (copies, spread) if on_gpu else (spread,):
        try:
            part()
        except Exception:  # the other one is measured
            traceback.print_exc()
            failed = 1
    return failed


def spread() -> None:
    """NCCL in two processes; without GPUs gloo stands for it."""
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(nccl, (f"{folder}/met", torch.cuda.device_count() > 1), nprocs=2)


def copies() -> None:
    """Out of the other GPU's memory."""
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
    sys.exit(main())
