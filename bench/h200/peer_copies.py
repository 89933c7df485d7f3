"""Blocks out of another GPU's memory, two GPUs in one process: `python bench/h200/peer_copies.py [names of ways]`.

The blocks of a prompt of 4,000 tokens of 8b (63 of 36 pages of 256 KiB), by copy engines and by kernels of several
shapes, for runs of so many blocks that lie together on both sides; the values are compared. Then by NCCL between two
processes, broadcast or sent, in pieces of two sizes, of its own number of channels or of 32.
"""

from __future__ import annotations

import ctypes
import datetime
import functools
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import distributed, multiprocessing

from octavo.kv_connector.worker.ways.regions import Region, joined_runs
from octavo.ops.cache_write import copy_blocks_bulk, copy_blocks_gpu
from octavo.ops.compile import driver
from octavo.ops.copying import BlockCopy

_PAGES, _BLOCKS, _PAGE_BYTES = 36, 252, 256 << 10
_ROUNDS = 8
_RUNS = (63, 8, 1)
_BULKS = (  # KiB of a copy, copies under way in a program, programs
    (32, 6, 8),
    (32, 6, 16),
    (32, 6, 32),
    (32, 6, 64),
    (32, 6, 132),
    (16, 12, 32),
    (16, 6, 132),
    (8, 8, 132),
    (64, 3, 8),
    (64, 3, 16),
    (64, 3, 32),
    (32, 4, 16),
    (96, 2, 16),
)


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
    """A line for each way, or for those whose names begin so."""
    names, failed = tuple(sys.argv[1:]) or ("",), 0
    for part, wanted in ((functools.partial(copies, names), names != ("nccl",)), (spread, "nccl".startswith(names))):
        try:
            if wanted:
                part()
        except Exception:  # the other one is measured
            traceback.print_exc()
            failed = 1
    return failed


def spread() -> None:
    """NCCL in two processes; without GPUs gloo stands for it."""
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(nccl, (f"{folder}/met", torch.cuda.device_count() > 1), nprocs=2)


def copies(names: tuple[str, ...]) -> None:
    """Out of the other GPU's memory: a line for each way, a column for each length of runs. GB/s of the GPU, of a load.

    The last two columns: what the host takes to order the copies, and to see that they have ended.
    """
    shape = (_PAGES, _BLOCKS, _PAGE_BYTES) if torch.cuda.device_count() > 1 else (3, _BLOCKS, 4096)
    home, other = ("cuda:0", "cuda:1") if torch.cuda.device_count() > 1 else ("cpu", "cpu")
    theirs = torch.randint(256, shape, dtype=torch.uint8, device=other)
    own = torch.zeros(shape, dtype=torch.uint8, device=home)
    own.copy_(theirs)  # torch lets either reach the other
    theirs.copy_(own)
    print(f"{'GB/s, runs of so many blocks':>34} " + " ".join(f"{each:>13}" for each in _RUNS) + "   us: order, end")
    for name, order in ways(own, theirs).items():
        if not name.startswith(names):
            continue
        found, host = [], (0.0, 0.0)
        try:
            for length in _RUNS:
                blocks = [start * 4 + each for start in range(0, 63, length) for each in range(min(length, 63 - start))]
                own.zero_()
                target, source = region(own, blocks), region(theirs, blocks)
                on_gpu, whole, host = timed(functools.partial(order, target, source), own)
                assert torch.equal(own[:, blocks], theirs[:, blocks].to(own.device)), "the blocks are there"
                assert not own[:, [b for b in range(shape[1]) if b not in blocks]].any(), "no other byte changes"
                size = len(blocks) * shape[0] * shape[2] / 1e9
                found.append(f"{size / on_gpu:>6.1f} {size / whole:>6.1f}")
        except (RuntimeError, AssertionError) as error:
            found.append(f"{type(error).__name__}: {error}"[:60])
        print(f"{name:>34} {' '.join(found)}   {host[0] * 1e6:.0f}, {host[1] * 1e6:.0f}", flush=True)


def timed(order: Callable[[], None], own: torch.Tensor) -> tuple[float, float, tuple[float, float]]:
    """Seconds of copies on the GPU, from the order to their end, of the order alone, and from the end to its word."""
    found = []
    for _ in range(_ROUNDS):
        if not own.is_cuda:
            started = time.perf_counter()
            order()
            found.append((time.perf_counter() - started,) * 3)
            continue
        stream = torch.cuda.Stream(own.device)
        begun, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(stream):
            torch.cuda.synchronize(own.device)
            started = time.perf_counter()
            begun.record()
            order()
            done.record()
            ordered = time.perf_counter()
            while not done.query():
                pass
            ended = time.perf_counter()
        found.append((begun.elapsed_time(done) / 1e3, ended - started, ordered - started))
    on_gpu, whole, ordering = (statistics.median(column) for column in zip(*found[2:], strict=True))
    return on_gpu, whole, (ordering, max(whole - max(on_gpu, ordering), 0.0))


Order = Callable[[Region, Region], None]


def ways(own: torch.Tensor, theirs: torch.Tensor) -> dict[str, Order]:
    """How blocks are copied, by name: on the current stream, which the copies are behind, and they ahead of it."""
    if not own.is_cuda:
        return {}
    flat, flat_there = own.view(-1), theirs.view(-1)

    def pushed(target: Region, source: Region) -> None:
        for (here, size), there in zip(*(side.tolist() for side in joined_runs(target, source)), strict=True):
            own_part, their_part = here - target.base, there[0] - source.base
            flat[own_part : own_part + size].copy_(flat_there[their_part : their_part + size], non_blocking=True)

    return {"by torch, by the other GPU": pushed, **engines(own.device), **kernels(own)}


def engines(device: torch.device) -> dict[str, Order]:
    """By copy engines: runs as they are or cut, on one stream or several, in one call a stream or one a run."""
    others = [torch.cuda.Stream(device) for _ in range(7)]

    def engine(num_streams: int, most: int, flags: int, call: str) -> Order:
        def order(target: Region, source: Region) -> None:
            driver._BESIDE_KERNELS = flags
            to, of = (cut(side, most) for side in joined_runs(target, source))
            streams = [torch.cuda.current_stream(), *others[: num_streams - 1]]
            for number, stream in enumerate(streams):
                part = slice(number, None, num_streams)
                if number:
                    stream.wait_stream(streams[0])
                if call == "batch":
                    driver.copy_batch(to[part, 0], of[part, 0], to[part, 1], stream.cuda_stream)
                else:
                    for run in zip(to[part, 0].tolist(), of[part, 0].tolist(), to[part, 1].tolist(), strict=True):
                        driver.call("cuMemcpyAsync", *map(ctypes.c_uint64, (*run, stream.cuda_stream)))
                if number:
                    streams[0].wait_stream(stream)

        return order

    found = {}
    for streams in (1, 2, 4, 8):
        found[f"batch, {streams} streams"] = engine(streams, 1 << 60, 1, "batch")
    for streams, most in ((1, 4 << 20), (4, 4 << 20), (4, 1 << 20), (4, 256 << 10)):
        found[f"batch, {streams} streams, {most >> 10} KiB"] = engine(streams, most, 1, "batch")
    for streams in (1, 4):
        found[f"batch, {streams} streams, no hint"] = engine(streams, 1 << 60, 0, "batch")
        found[f"copies, {streams} streams"] = engine(streams, 1 << 60, 0, "each")
    return found


def kernels(own: torch.Tensor) -> dict[str, Order]:
    """By kernels of several shapes."""

    def kernel(copy: Callable[..., None], **options: int) -> Order:
        def order(target: Region, source: Region) -> None:
            parts = target.num_pages
            blocks = np.array([target.blocks, source.blocks], np.int64)
            strides = target.strides(parts), source.strides(parts)
            copy(BlockCopy(own, source.base, blocks, strides, parts, target.page_bytes), **options)

        return order

    def plain(programs: int, block: int, warps: int) -> Order:
        def order(target: Region, source: Region) -> None:
            copy_blocks_gpu._PROGRAMS, copy_blocks_gpu._BLOCK, copy_blocks_gpu._WARPS = programs, block, warps
            kernel(copy_blocks_gpu.copy_blocks)(target, source)

        return order

    found = {}
    shapes = ((256, 2048, 8), (132, 2048, 8), (528, 2048, 8), (1056, 1024, 4), (256, 4096, 8), (528, 4096, 16))
    for programs, block, warps in shapes:
        found[f"kernel, {programs} of {block}, {warps} warps"] = plain(programs, block, warps)
    for chunk, stages, programs in _BULKS:
        options = {"chunk": chunk << 10, "stages": stages, "programs": programs}
        found[f"bulk, {programs} of {stages} x {chunk} KiB"] = kernel(copy_blocks_bulk.copy_blocks, **options)
    return found


def cut(runs: np.ndarray, most: int) -> np.ndarray:
    """(address, bytes) of each run, those that are longer in pieces of `most`."""
    found = []
    for address, size in runs.tolist():
        found += [(address + start, min(most, size - start)) for start in range(0, size, min(most, size))]
    return np.array(found, np.uint64)


if __name__ == "__main__":
    sys.exit(main())
