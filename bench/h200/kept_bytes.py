"""How fast a GPU reads the same bytes again and again, of which a share is told to stay in its L2.

    python bench/h200/kept_bytes.py [--bytes 105000000]

Microseconds a read, by one kernel of plain loads: all at one priority; a share evicted last and the rest first; that
share and the rest as ever. Four reads behind copies that leave nothing else in the L2, and twelve in a row. Some 8 s.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
from collections.abc import Callable
from typing import Any

import torch

from octavo.ops.compile import driver, nvrtc

CUDA, _FLUSHED, _THREADS, _BLOCKS = torch.device("cuda"), 256 << 20, 256, 1056
KERNEL = r"""
extern "C" __global__ void read_all(const uint4* data, long long count, int share, int rest, unsigned* out) {
    unsigned long long last, first, plain;
    asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(last));
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(first));
    asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(plain));
    const long long stride = (long long)gridDim.x * blockDim.x;
    const long long begin = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    const bool stays = (blockIdx.x * 8 + threadIdx.x / 32) % 16 < share;  // by warps, whose lines no other one reads
    const unsigned long long policy = stays ? last : rest ? first : plain;
    unsigned sum = 0;
    for (long long i = begin; i < count; i += 8 * stride) {
        uint4 value[8];
#pragma unroll
        for (int j = 0; j < 8; j++) {
            value[j] = make_uint4(0, 0, 0, 0);
            if (i + j * stride < count)
                asm volatile("ld.global.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
                             : "=r"(value[j].x), "=r"(value[j].y), "=r"(value[j].z), "=r"(value[j].w)
                             : "l"(data + i + j * stride), "l"(policy));
        }
#pragma unroll
        for (int j = 0; j < 8; j++) sum ^= value[j].x ^ value[j].y ^ value[j].z ^ value[j].w;
    }
    if (sum == 0x12345678u) *out = sum;
}
"""


def _least(run: Callable[[], Any]) -> float:
    """Microseconds of a graph of it, the least of 30."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(31)]
    for event in events:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    return 1000 * min(a.elapsed_time(b) for a, b in itertools.pairwise(events))


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--bytes", type=int, default=105_000_000)
    size = parser.parse_args().bytes // 16
    function = driver.load(nvrtc.compile_cubin(KERNEL, {}, "sm_90a"), "read_all", 0)
    data, out = torch.zeros(4 * size, dtype=torch.int32, device=CUDA), torch.zeros(1, dtype=torch.int32, device=CUDA)
    source, target = (torch.zeros(_FLUSHED, dtype=torch.uint8, device=CUDA) for _ in range(2))

    def read(share: int, rest: int) -> None:
        values = (
            ctypes.c_void_p(data.data_ptr()),
            ctypes.c_longlong(size),
            ctypes.c_int(share),
            ctypes.c_int(rest),
            ctypes.c_void_p(out.data_ptr()),
        )
        params = (ctypes.c_void_p * 5)(*(ctypes.addressof(value) for value in values))
        stream = torch.cuda.current_stream().cuda_stream
        driver.launch(function, (_BLOCKS, 1, 1), _THREADS, 0, stream, params)

    def behind_copy(share: int, rest: int, count: int) -> None:
        target.copy_(source)
        for _ in range(count):
            read(share, rest)

    def in_a_row(share: int, rest: int) -> None:
        for _ in range(12):
            read(share, rest)

    copy = _least(lambda: target.copy_(source))
    print(f"us to read {16e-6 * size:.1f} MB    share kept   behind copies   in a row", flush=True)
    for share, rest in ((0, 0), (0, 1), *itertools.product((2, 3, 4, 5, 6, 8), (1, 0))):
        times = (_least(lambda s=share, r=rest: behind_copy(s, r, 4)) - copy) / 4  # type: ignore[misc]
        row = _least(lambda s=share, r=rest: in_a_row(s, r)) / 12  # type: ignore[misc]
        print(f"  rest {'first' if rest else 'as ever'} {share:2d}/16 {times:14.2f} {row:10.2f}", flush=True)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
