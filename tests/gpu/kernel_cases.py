"""One small case for every kernel of the package in Triton, Gluon or CUDA C++, for `compute-sanitizer`: run as a
program, it runs those named, or all, and prints what it ran.

Each case compares with the reference implementation, as the rigs do, on shapes with odd edges; `kernel_names` finds
what there is to cover in the sources, so a kernel without a case fails a test.
"""

from __future__ import annotations

import contextlib
import functools
import random
import sys
import time
import unittest
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "ops"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "attention"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "device"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "states"))

import torch

import backward_rig
import draft_rig
import flex_rig
import fused_rope_rig
import gpu_rig
import gpu_states_rig
import inputs_rig
import latent_rig
import mamba2_rig
import matmul_rig
import moe_rig
import paged_rig
from batches import make_batch, make_history
from octavo.ops import sampling as sample
from octavo.ops.activation.gpu import gated_activation
from octavo.ops.attention import decode, paged_plan
from octavo.ops.backward.attention import tiles_for
from octavo.ops.cache_write import copy_blocks_bulk
from octavo.ops.flex.mask_rows import Kind, Reach
from octavo.ops.gemm import cluster_gemm
from octavo.ops.gemm.gpu import linear, tile_for
from octavo.ops.sampling import fused_lm_head_sampling
from octavo.ops.scan import conv_decode
from octavo.ops.scan.delta import delta_prompts, delta_step, loading
from octavo.ops.scan.mamba2 import mamba2_advance, mamba2_decode, mamba2_prompts
from octavo.states import agreement, delta_gpu

CUDA = torch.device("cuda")
BF16, F32 = torch.bfloat16, torch.float32
BACKWARD = tiles_for(64, BF16)


def _norms() -> None:
    gpu_rig.check_norm("cuda", 40, BF16, 3)
    gpu_rig.check_norm("cuda", 2560, F32, 2)
    gpu_rig.check_group_norm("cuda", BF16, 8, 1024)
    gpu_rig.check_group_norm("cuda", F32)


def _activation() -> None:
    gpu_rig.check_activation("cuda", "silu", BF16)
    gpu_rig.check_activation("cuda", "gelu_tanh", F32, 1030)


def _rope() -> None:
    for dtype, shape in ((BF16, (4, 2, 64, 0)), (F32, (2, 1, 96, 24))):
        gpu_rig.check_rope("cuda", dtype, shape, 5)


def _zero() -> None:
    gpu_rig.check_zero_blocks("cuda", 2, 7, 9000, [5, 1])
    gpu_rig.check_zero_blocks("cuda", 2, 5, 33, [0, 4])


def _copy() -> None:
    for pages in ((3, 3), (3, 1), (1, 3)):
        gpu_rig.check_copy_blocks("cuda", pages, 40_000)
    gpu_rig.check_copy_blocks("cuda", (2, 1), 33)


def _bulk() -> None:
    """Less than a copy moves, and more than a ring holds."""
    for part in (16, 40_000, 3 << 17):
        for pages in ((3, 3), (3, 1), (1, 3)):
            gpu_rig.check_copy_blocks("cuda", pages, part, copy_blocks_bulk)


def _inputs() -> None:
    inputs_rig.check_gather("cuda", 3)
    inputs_rig.check_commit("cuda")
    inputs_rig.check_commit_drafts("cuda")
    inputs_rig.check_lay_out_passes("cuda")


def _states(name: str, sizes: tuple[int, ...]) -> None:
    for dtype in (BF16, F32):
        gpu_states_rig.check_results("cuda", name, dtype, (1, 17, 70, 130), 40, sizes)
        if name in ("conv", "delta", "mamba2"):
            gpu_states_rig.check_decoding("cuda", name, dtype, sizes)


def _deltas() -> None:
    """States whose heads are cut in blocks, and such that are streamed."""
    for sizes in ((2, 4, 40, 96), (2, 4, 24, 32)):
        _states("delta", sizes)


@contextlib.contextmanager
def _on_hopper(processors: int) -> Iterator[None]:
    """Within, kernels of states in CUDA C++ have so few blocks that one has several tasks. Skips other GPUs.

    Behind it, none of those that were asked for was missing, or was found to have other bits than Triton's.
    """
    if torch.cuda.get_device_capability()[0] != 9:
        raise unittest.SkipTest("needs a Hopper GPU")
    with contextlib.ExitStack() as stack:
        for kernel in (delta_step, delta_prompts, mamba2_advance, mamba2_decode, mamba2_prompts, conv_decode):
            stack.enter_context(mock.patch.object(kernel, "processors", lambda device: processors))
        yield
    own = [each.KERNEL for each in (mamba2_advance, mamba2_decode, mamba2_prompts, conv_decode)]
    for kernel in (*own, *loading.KERNELS.values()):
        assert None not in kernel._functions.values(), f"{kernel.name} could not be had"
    assert all(agreement._found.values()), agreement._found


def _deltas_in_cuda() -> None:
    """Prompts by blocks of one warp group and of two, and rows that decode, however few; states in lines of 128."""
    alone: dict[str, Any] = {"block_size": 64, "beside": ()}  # blocks that hold states in whole lines
    for processors in (132, 1):
        with _on_hopper(processors), mock.patch.object(delta_gpu, "_FEWEST_STEPS", 1):
            gpu_states_rig.check_results("cuda", "delta", BF16, (1, 17, 70, 230), 150, (2, 4, 128, 128), **alone)
            gpu_states_rig.check_decoding("cuda", "delta", BF16, (2, 4, 128, 128), **alone)


def _mamba2_in_cuda() -> None:
    """Rows that decode, states behind them, and prompts; and the convolution of rows that decode."""
    for processors in (132, 3):
        with _on_hopper(processors):
            mamba2_rig.advanced_in_cuda("cuda")
            mamba2_rig.decoded_in_cuda("cuda")
            mamba2_rig.walked_in_cuda("cuda")
            gpu_states_rig.convolved_in_cuda("cuda")


def _products() -> None:
    """The tiles of the table at every bound of it, and the rig's, on shapes that none divides."""
    weight = matmul_rig.heavy_tailed(70, 296, dtype=BF16, seed=1, device="cuda")
    for rows in (1, 9, 17, 33, 129):
        x = matmul_rig.heavy_tailed(rows, 296, dtype=BF16, seed=2, device="cuda")
        for tile in (tile_for(rows, 70, 296, BF16), tile_for(rows, 151936, 296, BF16), *matmul_rig.TILES):
            out = torch.full((rows, 70), 7.0, device="cuda")
            linear(x, weight, None, out, tile)
            assert matmul_rig.distance(out, x, weight) < 1e-5, (rows, tile)


def _few_rows_of_a_head() -> None:
    """By programs of several groups of channels, the bits of plain tiles."""
    weight = matmul_rig.heavy_tailed(40 * 1024, 1024, dtype=BF16, seed=1, device="cuda")
    for rows in (2, 5, 8):
        x = matmul_rig.heavy_tailed(rows, 1024, dtype=BF16, seed=rows, device="cuda")
        found, expected = torch.full((2, rows, len(weight)), 7.0, device="cuda")
        linear(x, weight, None, found)
        linear(x, weight, None, expected, tile_for(rows, *weight.shape, BF16))
        assert torch.equal(found, expected), rows


def _clustered() -> None:
    """On Hopper: the separate operators' bits, by tiles of each kind, rows, channels and k that fill none."""
    if torch.cuda.get_device_capability()[0] != 9:
        raise unittest.SkipTest("needs a Hopper GPU")
    weight = matmul_rig.heavy_tailed(416, 1088, dtype=BF16, seed=1, device="cuda") / 64
    x = matmul_rig.heavy_tailed(150, 1088, dtype=BF16, seed=2, device="cuda")
    plain = linear(x, weight, None, x.new_empty(150, 416), tile_for(16, 416, 1088, BF16))
    gated = gated_activation(plain, tanh=False)
    residual = matmul_rig.heavy_tailed(150, 424, dtype=BF16, seed=3, device="cuda")[:, 8:]
    total = (plain.float() + residual.float()).to(BF16)
    for activation, before, expected in ((None, None, plain), (None, residual, total), ("silu", None, gated)):
        for tile in matmul_rig.clustered(activation):
            out = cluster_gemm.product(x, weight, torch.empty_like(expected), activation, tile, before)
            assert torch.equal(out, expected), (activation, tile)


def _drawn_heads() -> None:
    """On Hopper: the tokens of product and draw, by each tile, rows and channels that fill none."""
    if torch.cuda.get_device_capability()[0] != 9:
        raise unittest.SkipTest("needs a Hopper GPU")
    weight = matmul_rig.heavy_tailed(65576, 128, dtype=BF16, seed=1, device="cuda") / 64
    for num_rows in (120, 250):
        x = matmul_rig.heavy_tailed(num_rows, 128, dtype=BF16, seed=2, device="cuda")
        at = torch.arange(num_rows, device="cuda")
        logits = linear(x, weight, None, x.new_empty(num_rows, 65576, dtype=torch.float32))
        expected = sample.draw(logits, at, at % 2 / 2, at * 3, at * 5)
        assert fused_lm_head_sampling.serves(x, weight)
        for own, other in zip(
            fused_lm_head_sampling.draw(x, weight, at, at % 2 / 2, at * 3, at * 5), expected, strict=True
        ):
            assert torch.equal(own, other), num_rows


def _paged() -> None:
    """Rows divided, merged and few, tiles whole and split, over windows and blocks of several sizes."""
    long = make_history(5, 1500, 4, 2, 32, BF16)
    rows = [(long, 1500, 2), (long, 300, 1), (long, 900, 40), (long, 7, 7)]
    for options in ({}, {"window": 70, "soft_cap": 20.0}):
        batch = paged_rig.to_device(make_batch(rows, 16, heads_last=bool(options)), CUDA)
        expected = paged_rig.attend(batch, processors=paged_rig.FEW, **options)
        with mock.patch.multiple(paged_plan, _FOLDS=4, _LONG=5):
            for processors in (paged_rig.FEW, paged_rig.MANY):
                assert torch.equal(paged_rig.attend(batch, processors=processors, **options), expected)
        assert torch.equal(paged_rig.attend(batch, **options), expected)


def _rotated() -> None:
    """On Hopper: a row of one program, a row of several, a padding row."""
    if torch.cuda.get_device_capability()[0] < 9:
        raise unittest.SkipTest("needs a Hopper GPU")
    fused_rope_rig.check([70, 1100, 0], 4, 2, 16)


def _prompts() -> None:
    """On Hopper: the plain tiles' bits, with a window and blocks that a tile has several of, and without."""
    if torch.cuda.get_device_capability()[0] != 9:
        raise unittest.SkipTest("needs a Hopper GPU")
    history = make_history(5, 700, 4, 2, 64, BF16)
    rows = [(history, 700, 150), (history, 90, 1), (history, 130, 130)]
    for block_size, options in ((64, {}), (16, {"window": 70})):
        batch = paged_rig.to_device(make_batch(rows, block_size), CUDA)
        out = paged_rig.attend(batch, processors=paged_rig.FEW, **options)
        plain = paged_rig.attend(batch, processors=paged_rig.FEW, tile=paged_plan.Tile(128, 8, 2, 128), **options)
        assert torch.equal(out, plain), options
    for stored in (torch.float8_e4m3fn, torch.int8):
        narrow = paged_rig.narrowed(batch, stored)
        out = paged_rig.attend(narrow, processors=paged_rig.FEW)
        plain = paged_rig.attend(narrow, processors=paged_rig.FEW, tile=paged_plan.Tile(128, 8, 2, 128))
        assert torch.equal(out, plain), stored


def _decode() -> None:
    """On Hopper: the plain rows' bits, whole, folded and left to be merged."""
    if torch.cuda.get_device_capability()[0] != 9:
        raise unittest.SkipTest("needs a Hopper GPU")
    history = make_history(5, 1500, 4, 2, 64, BF16)
    rows = [(history, 1500, 2), (history, 300, 1), (history, 7, 4), (history, 64, 1)]
    for block_size, options in ((64, {}), (16, {"window": 70})):
        batch = paged_rig.to_device(make_batch(rows, block_size), CUDA)
        with mock.patch.object(decode, "can_serve", lambda *facts: False):
            plain = paged_rig.attend(batch, processors=paged_rig.FEW, **options)
        assert torch.equal(paged_rig.attend(batch, processors=paged_rig.FEW, **options), plain), options
        with mock.patch.multiple(paged_plan, _FOLDS=4, _LONG=5):
            assert torch.equal(paged_rig.attend(batch, processors=2, **options), plain), options
    fused_rope_rig.check([70, 1100, 300, 0], 4, 2, 64, processors=2)
    for stored in (torch.float8_e4m3fn, torch.int8):
        batch = paged_rig.narrowed(paged_rig.to_device(make_batch(rows, 64), CUDA), stored)
        with mock.patch.object(decode, "can_serve", lambda *facts: False):
            plain = paged_rig.attend(batch, processors=paged_rig.FEW)
        assert torch.equal(paged_rig.attend(batch, processors=paged_rig.FEW), plain), stored
        fused_rope_rig.check([70, 1100, 300, 0], 4, 2, 64, processors=2, stored=stored)


def _verified() -> None:
    """Rows of several queries: by programs of 8 columns on Hopper, and by tiles of a KV head's all."""
    fused_rope_rig.check([70, 1100, 0], 4, 2, 16, queries=5)
    fused_rope_rig.check([70, 1100, 0], 4, 2, 16, queries=2, size=64)


def _latent() -> None:
    batch = latent_rig.Batch([(700, 1), (20, 9), (513, 2)], BF16, CUDA)
    whole, split = batch.run("mla", 1), batch.run("mla", 2)
    assert torch.equal(whole, split)
    latent_rig.check_store_equals_the_reference(CUDA, BF16)
    latent_rig.check_head_linear_rows_keep_their_bits(CUDA, BF16)


def _experts() -> None:
    for check in moe_rig.CHECKS.values():
        check(CUDA, BF16)


def _flex() -> None:
    flex_rig.check_plan(Reach(causal=True, window=40), [5, 0, 30, 1], [70, 0, 33, 160], 4, CUDA)
    flex_rig.check_plan(Reach(causal=True), [1, 1, 1, 0], [70, 1, 160, 0], 3, CUDA, Kind.SINGLE, block=48, kv_block=64)
    flex_rig.check_order(CUDA)
    for num_leaves in (1, 3):
        flex_rig.check(4, 16, num_leaves, BF16, sinks=num_leaves > 1, seed=num_leaves, device=CUDA)


def _backward() -> None:
    """What goes back through elementwise operators and norms."""
    backward_rig.check_norm("cuda", BF16, 300, 130)
    backward_rig.check_activation("cuda", BF16, "gelu_tanh")
    backward_rig.check_rope("cuda", BF16, (3, 1, 80, 24), normed=True, tokens=40)
    backward_rig.check_logprob("cuda", F32, 5003, cap=6.0, entropy=True)


def _attention_backward() -> None:
    """Rows that fill no tile, with the tiles of the table."""
    for options in ({}, {"window": 70, "sinks": True}, {"chunk": 64, "soft_cap": 20.0, "slopes": True}):
        backward_rig.check_attention("cuda", BF16, (150, 1, 200), (4, 2, 64), tiles=BACKWARD, **options)


CASES: dict[str, tuple[Callable[[], None], tuple[str, ...]]] = {
    "norm": (_norms, ("norm.gpu._norm_rows", "norm.gpu._norm_groups")),
    "activation": (_activation, ("activation.gpu._gated", "activation.gpu._gated_by", "activation.gpu._squared_relu")),
    "embedding": (functools.partial(gpu_rig.check_embedding, "cuda", BF16), ("embedding.gpu._gather",)),
    "rope and store": (_rope, ("rope.gpu._qk_norm_rope_store",)),
    "zeroed blocks": (_zero, ("cache_write.zero_blocks_gpu._zero",)),
    "a peer's blocks": (_copy, ("cache_write.copy_blocks_gpu._copy_blocks",)),
    "a peer's blocks, in bulk": (_bulk, ("cache_write.copy_blocks.copy_blocks",)),
    "inputs": (
        _inputs,
        ("inputs.gpu._gather", "inputs.gpu._commit", "inputs.gpu._commit_runs", "inputs.draft_passes_gpu._lay_out"),
    ),
    "a drafter's entries": (functools.partial(draft_rig.check_beside, "cuda", BF16), ("embedding.beside_gpu._beside",)),
    "kept sums": (functools.partial(draft_rig.check_kept_sum, "cuda", BF16), ("norm.kept_sum_gpu._keep",)),
    "both ends of a drafter's pass": (
        functools.partial(draft_rig.check_ends, "cuda", 1024, 16448),
        ("embedding.beside_gemv._entry_product", "sampling.drafts_head._product_and_draw"),
    ),
    "drafts": (functools.partial(draft_rig.check_drafts, "cuda", 1801), ("sampling.drafts_gpu._draw_drafts",)),
    "prompt lookup": (functools.partial(gpu_rig.check_look_up, "cuda", 3001), ("lookup.gpu._look_up",)),
    "short convolution": (
        functools.partial(_states, "conv", (300, 3)),
        (
            "scan.conv_gpu.short_convolution",
            "scan.conv_gpu.convolve_prompts",
            "scan.conv_decode_gpu.decode_convolution",
        ),
    ),
    "gated delta rule": (
        _deltas,
        (
            "scan.gates_gpu.normalize_keys",
            "scan.gates_gpu.scan_gates",
            "scan.delta.scan_gpu.delta_blocks",
            "scan.delta.scan_gpu.delta_scan",
            "scan.delta.scan_gpu.delta_advance",
            "scan.delta.decode_gpu.delta_ready",
            "scan.delta.decode_gpu.delta_decode",
            "scan.delta.walk_gpu.delta_chunks",
            "scan.delta.walk_gpu.delta_walk",
        ),
    ),
    "gated delta rule, in CUDA C++": (
        _deltas_in_cuda,
        (
            "scan.delta.delta_step.delta_step",
            "scan.delta.delta_prompts.delta_prompts",
            "scan.delta.delta_prepare.delta_prepare",
        ),
    ),
    "Mamba-2": (
        functools.partial(_states, "mamba2", (4, 48, 2, 80)),
        (
            "scan.mamba2.mamba2_gpu.mamba2_scan",
            "scan.mamba2.mamba2_decode_gpu.mamba2_decode",
            "scan.mamba2.mamba2_walk_gpu.mamba2_walk",
            "scan.mamba2.mamba2_advance_gpu.mamba2_advance",
        ),
    ),
    "Mamba-2, in CUDA C++": (
        _mamba2_in_cuda,
        (
            "scan.mamba2.mamba2_advance.mamba2_advance",
            "scan.mamba2.mamba2_decode.mamba2_decode",
            "scan.mamba2.mamba2_prompts.mamba2_prompts",
            "scan.conv_decode.conv_decode",
        ),
    ),
    "Mamba-1": (functools.partial(_states, "mamba1", (300, 16)), ("scan.mamba1_gpu.mamba1_scan",)),
    "staged writes": (functools.partial(inputs_rig.check_staged_write, "cuda"), ("inputs.staged_write_gpu._write",)),
    "products": (_products, ("gemm.kernels.product",)),
    "fused products": (functools.partial(matmul_rig.check_fused, "cuda", (BF16,)), ("gemm.skinny_gemm._product",)),
    "a row alone": (
        functools.partial(matmul_rig.check_fused, "cuda", (BF16,), exact=True, shapes=((2048, 1024, False),)),
        ("gemm.gemv._product",),
    ),
    "few rows, weights held": (
        functools.partial(
            matmul_rig.check_fused,
            "cuda",
            (BF16,),
            exact=True,
            shapes=((2048, 1024, False),),
            numbers=(2, 5, 8),
        ),
        ("gemm.held_gemm._product",),
    ),
    "clustered products": (_clustered, ("gemm.cluster_gemm.product", "gemm.gated_gemm.gated_gemm")),
    "heads that draw": (_drawn_heads, ("sampling.fused_lm_head_sampling.product_and_draw",)),
    "a row alone, streamed": (
        functools.partial(matmul_rig.check_fused, "cuda", (BF16,), exact=True, shapes=((4096, 4096, False),)),
        ("gemm.gemv._streamed",),
    ),
    "few rows of a head": (_few_rows_of_a_head, ("gemm.streamed_gemm._streamed_rows",)),
    "draw": (functools.partial(gpu_rig.check_draw, "cuda", 4099), ("sampling.gpu._draw", "sampling.gpu._draw_ready")),
    "logprobs": (
        functools.partial(gpu_rig.check_logprobs, "cuda", 4201),
        (
            "sampling.gpu._leaf_sums", "sampling.gpu._fold_leaves", "sampling.gpu._order_keys",
            "sampling.topk_topp_small._list",
            "sampling.topk_topp_small._leaf_maxima", "sampling.topk_topp_small._set_bars",
            "sampling.topk_topp_small._gather",
        ),
    ),
    "truncation": (
        functools.partial(gpu_rig.check_cuts, "cuda", 4201),
        (
            "sampling.topk_topp._survey", "sampling.topk_topp._gather", "sampling.topk_topp._settle",
            "sampling.topk_topp_small._cut",
            "sampling.truncation_gpu._write",
        ),
    ),
    "bit masks": (functools.partial(gpu_rig.check_bits, "cuda", 1041), ("sampling.bitmask._allow_bits",)),
    "paged attention": (
        _paged,
        (
            "attention.paged_workload.divide", "attention.paged_decode_kernels.attend_rows",
            "attention.paged_decode_kernels.attend_few",
            "attention.paged_kernels.attend_tiles", "attention.paged_decode_kernels.merge",
        ),
    ),
    "decode attention": (
        _decode,
        ("attention.hopper.decode_kernel.attend_rows_copied", "attention.paged_workload.divide"),
    ),
    "prompt attention": (
        _prompts,
        ("attention.hopper.prefill_kernel.attend_prompts", "attention.paged_workload.count_tiles"),
    ),
    "rotation and attention": (_rotated, ("attention.rope_decode_kernel._rotate_and_attend",)),
    "rows that verify": (
        _verified,
        (
            "attention.rope_verify_kernel._rotate_and_attend_columns",
            "attention.paged_decode_kernels.rotate_and_attend_few",
        ),
    ),
    "latent attention": (
        _latent,
        ("latent.gpu._latent_rope_store", "latent.gpu._head_product", "latent.gpu._attend", "latent.gpu._merge"),
    ),
    "experts": (
        _experts,
        ("moe.gpu._group", "moe.gpu._grouped_product", "moe.routing_gpu._choose", "moe.sums_gpu._sum"),
    ),
    "backward": (
        _backward,
        (
            "backward.norm._norm_backward", "backward.activation._gated_backward", "backward.rope._rope_backward",
            "backward.logprob._entropies", "backward.logprob._logprob_backward",
        ),
    ),
    "attention backward": (
        _attention_backward,
        ("backward.attention_kernels.backward_of_queries", "backward.attention_kernels.backward_of_keys"),
    ),
    "flex": (
        _flex,
        (
            "flex.gpu._count_tiles", "flex.gpu._plan", "flex.gpu._gather", "flex.gpu._merge",
            "flex.gpu._scatter",
        ),
    ),
}  # fmt: skip


def main(names: list[str]) -> None:
    """Run the cases and say how long each took."""
    random.seed(0)
    for name in names or CASES:
        begin = time.perf_counter()
        with contextlib.suppress(unittest.SkipTest):
            CASES[name][0]()
        torch.cuda.synchronize()
        print(f"{name}: {time.perf_counter() - begin:.1f} s", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
