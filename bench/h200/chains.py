"""Cycles of a chain of matrix instructions over k, one for 16 of it, by both instructions of a Hopper GPU; their bits.

    python bench/h200/chains.py

A row's products are one chain a channel. mma.sync with operands in registers, and out of shared memory as kernels have
it; wgmma with both operands in shared memory, the row as one of 64 lines, by 8 to 32 channels. Some 5 s.
"""

from __future__ import annotations

import ctypes

import torch

from octavo.ops.compile import driver, nvrtc

CUDA, K = torch.device("cuda"), 2048
_HEAD = r"""
typedef unsigned int u32;
typedef unsigned long long u64;
extern __shared__ __align__(1024) unsigned char memory[];

__device__ inline u64 described(u32 at, u32 k_step, u32 line_step) {  // lines of 16 bytes, 8 of them together
    return (u64)(at >> 4 & 0x3fff) | (u64)(k_step >> 4) << 16 | (u64)(line_step >> 4) << 32;
}

// x [K], weight [N, K] -> out [N], and cycles. The k / 8 th piece of a line lies at k / 8 * 128 + line * 16 of a group.
// FLAT: those of the row lie one behind the other, so that its other lines are what follows.
extern "C" __global__ void __launch_bounds__(128)
    by_group(const uint4* x, const uint4* weight, float* out, long long* took) {
    u32 base = (u32)__cvta_generic_to_shared(memory), lane = threadIdx.x % 32;
    uint4* row = (uint4*)memory;
    uint4* channels = row + K;  // 16 K bytes on
    for (u32 i = threadIdx.x; i < K; i += 128) row[i] = make_uint4(0, 0, 0, 0);
    __syncthreads();
    for (u32 i = threadIdx.x; i < K / 8; i += 128) row[FLAT ? i : 8 * i] = x[i];
    for (u32 i = threadIdx.x; i < N * K / 8; i += 128) {
        u32 channel = i / (K / 8), piece = i % (K / 8);
        channels[channel / 8 * K + piece * 8 + channel % 8] = weight[i];
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    float sum[N / 2];
    for (u32 i = 0; i < N / 2; ++i) sum[i] = 0;
    u64 first = described(base, FLAT ? 16 : 128, 0), second = described(base + 16 * K, 128, 16 * K);
    long long begin = clock64();
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll 16
    for (u32 i = 0; i < K / 16; ++i) step(sum, first + (FLAT ? 2 : 16) * i, second + 16 * i);
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    for (u32 i = 0; i < N / 2; ++i) asm volatile("" : "+f"(sum[i]) :: "memory");
    long long end = clock64();
    if (threadIdx.x < 4)
        for (u32 i = 0; i < N / 8; ++i) out[8 * i + 2 * lane] = sum[4 * i], out[8 * i + 2 * lane + 1] = sum[4 * i + 1];
    if (threadIdx.x == 0) took[0] = end - begin;
}

__device__ inline void multiply(float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
                 " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The same by a warp, channels as 16 lines. LOADS: operands come out of shared memory.
extern "C" __global__ void __launch_bounds__(32)
    by_warp(const uint4* x, const uint4* weight, float* out, long long* took) {
    u32 base = (u32)__cvta_generic_to_shared(memory), lane = threadIdx.x;
    constexpr u32 LINE = 2 * K + 16;
    for (u32 i = lane; i < K / 8; i += 32) *(uint4*)(memory + 16 * i) = x[i];
    for (u32 i = lane; i < 16 * K / 8; i += 32)
        *(uint4*)(memory + 2 * K + i / (K / 8) * LINE + i % (K / 8) * 16) = weight[i];
    __syncwarp();
    float sum[4] = {0, 0, 0, 0};
    u32 a[4] = {lane, lane, lane, lane}, b0 = lane, b1 = lane;
    u32 at = base + 2 * K + lane % 16 * LINE + lane / 16 * 16, of_row = base + lane % 4 * 4;
    long long begin = clock64();
#pragma unroll 16
    for (u32 i = 0; i < K / 16; ++i) {
        if (LOADS) {
            asm("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(at + 32 * i));
            asm("ld.shared.b32 %0, [%1];" : "=r"(b0) : "r"(of_row + 32 * i));
            asm("ld.shared.b32 %0, [%1];" : "=r"(b1) : "r"(of_row + 32 * i + 16));
        }
        multiply(sum, a, b0, b1);
    }
    for (u32 i = 0; i < 4; ++i) asm volatile("" : "+f"(sum[i]) :: "memory");
    long long end = clock64();
    if (lane % 4 == 0) out[lane / 4] = sum[0], out[lane / 4 + 8] = sum[2];
    if (lane == 0) took[0] = end - begin;
}
"""


def _step(channels: int) -> str:
    """The matrix instruction of a group of four warps."""
    count = channels // 2
    names = ", ".join(f"%{i}" for i in range(count))
    sums = ", ".join(f'"+f"(sum[{i}])' for i in range(count))
    head = f"__device__ inline void step(float (&sum)[{count}], unsigned long long first, unsigned long long second)"
    body = (
        ' {\n    asm volatile("{ .reg .pred p; setp.ne.b32 p, 1, 0; wgmma.mma_async.sync.aligned.'
        f'm64n{channels}k16.f32.bf16.bf16 {{{names}}}, %{count}, %{count + 1}, p, 1, 1, 0, 0; }}"\n'
    )
    return head + body + f'        : {sums} : "l"(first), "l"(second));\n}}\n'


def _launch(name: str, channels: int, form: int, threads: int, shared: int) -> tuple[torch.Tensor, int]:
    """(sums of the first channels, cycles: the least of ten). form: LOADS or FLAT."""
    code = nvrtc.compile_cubin(_step(channels) + _HEAD, {"K": K, "N": channels, "LOADS": form, "FLAT": form}, "sm_90a")
    function = driver.load(code, name, shared)
    out, took = torch.zeros(channels, device=CUDA), torch.zeros(1, dtype=torch.int64, device=CUDA)
    values = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (X, WEIGHT, out, took)]
    params = (ctypes.c_void_p * 4)(*(ctypes.addressof(value) for value in values))
    cycles = []
    for _ in range(10):
        driver.launch(function, (1, 1, 1), threads, shared, torch.cuda.current_stream().cuda_stream, params)
        torch.cuda.synchronize()
        cycles.append(int(took.item()))
    return out, min(cycles)


def main() -> None:
    """Print a table."""
    steps = K // 16
    row = 2 * K + 16 * (2 * K + 16)
    expected, cycles = _launch("by_warp", 16, 1, 32, row)
    print(f"cycles of a step of {steps}: mma.sync out of shared memory {cycles / steps:.1f}", flush=True)
    print(f"  mma.sync in registers {_launch('by_warp', 16, 0, 32, row)[1] / steps:.1f}", flush=True)
    for channels in (8, 16, 24, 32):
        for flat in (0, 1):
            out, cycles = _launch("by_group", channels, flat, 128, 16 * K + 2 * K * channels)
            shared = min(channels, 16)
            verdict = "same" if torch.equal(out[:shared], expected[:shared]) else "DIFFER"
            form = ", the row flat" if flat else ""
            print(f"  wgmma, {channels:2d} channels {cycles / steps:.1f}, bits {verdict}{form}", flush=True)
    print(f"  (of plain torch {(X.float() @ WEIGHT[:8].float().t())[0].tolist()[:3]}, {expected[:3].tolist()})")


if __name__ == "__main__":
    torch.manual_seed(0)
    X = (torch.randn(1, K, device=CUDA) * torch.rand(1, K, device=CUDA).mul(12).sub(6).exp2()).to(torch.bfloat16)
    WEIGHT = (torch.randn(64, K, device=CUDA) / 16).to(torch.bfloat16)
    with torch.inference_mode():
        main()
