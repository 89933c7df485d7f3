"""Dense products with packed weights: `linear` and what it needs.

Owns the packed form of a weight (layout: native/panels.h; on a GPU the plain [N, K] tensor), int8 quantization, and
the canonical arithmetic of a product: every output is one chain `acc = fma(x[k], w[k], acc)` over k = 0..K-1 in
float32 (on a GPU, `gpu.matmul` states it), then the bias, then one rounding. bfloat16 weights may be packed in pairs
of k (`native.set_bfloat16_chain`). bfloat16 rows then follow the chain that a processor's vdpbf16ps computes: for each
pair `acc = fma(x[2p + 1], w[2p + 1], acc)`, then `acc = fma(x[2p], w[2p], acc)`; denormals, of operands and of results,
are zeros, and an odd K is padded with a zero. float32 rows follow the first chain. It knows nothing of layers or
checkpoints.
Invariant: a row's bits depend on that row and the weight only: not on the number of rows, threads or the processor's
vector width. The reference implementation keeps the same promise with its own bits (it sums in its library's order).
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from octavo.ops import native
from octavo.ops.native.memory import PACKED_WEIGHTS

_P, _I, _C = native.PTR, native.I64, native.I32
native.declare("octavo_linear", [_P, _I, _I, _P, _P, _P, _I, _C, _C])
native.declare("octavo_panel_bytes", [_C, _I], _I)
native.declare("octavo_pack", [_P, _I, _C, _I, _I, _C, _P])

# Channels of a panel, k that share an int8 scale: constants of the layout (panels.h).
PANEL = 32
GROUP = 32
# Weight kinds -> their number in the C ABI.
KINDS = {"float32": 0, "bfloat16": 1, "int8": 2, "bfloat16 pairs": 3}
QUANTIZATIONS = ("int8",)


class _WeightHeader(ctypes.Structure):
    """`octavo::Weight` of matmul.cpp."""

    _fields_ = (
        ("n", ctypes.c_int64),
        ("k", ctypes.c_int64),
        ("panel_bytes", ctypes.c_int64),
        ("data", ctypes.c_void_p),
        ("kind", ctypes.c_int32),
    )


@dataclass(frozen=True, eq=False)
class LinearWeight:
    """A weight [n, k] made ready for `linear`. Make one with `pack_linear`; the tensor given may then be freed."""

    n: int
    k: int
    kind: str  # "float32" | "bfloat16" | "int8" | "bfloat16 pairs", on a GPU also "float16"
    storage: Tensor  # uint8: panels (native); or [n, k]: the exact values, float32 (eager) or of their kind (GPU)
    header: int = 0  # address of the C header, 0 for the eager form
    _keep: tuple[object, ...] = field(default=(), repr=False)

    @property
    def num_bytes(self) -> int:
        """Bytes of the storage."""
        return self.storage.numel() * self.storage.element_size()

    def behind(self, channels: int, count: int | None = None) -> LinearWeight | None:
        """The weight without its first channels, in the same memory. None where those end inside a panel.

        count: so many of those that are left; None: all.
        """
        n = self.n - channels if count is None else count
        if self.storage.is_cuda:
            return _plain_gpu_weight(self.storage[channels : channels + n], None)
        if not self.header:
            return replace(self, n=n, storage=self.storage[channels : channels + n])
        if channels % PANEL:
            return None
        storage = self.storage[channels // PANEL : -(-(channels + n) // PANEL)]
        header = _WeightHeader(n, self.k, storage.stride(0), storage.data_ptr(), KINDS[self.kind])
        return LinearWeight(header.n, self.k, self.kind, storage, ctypes.addressof(header), (header, *self._keep))


def pack_linear(weight: Tensor, quantization: str | None = None, into: LinearWeight | None = None) -> LinearWeight:
    """Pack weight [N, K] for `linear`.

    Without quantization bfloat16 stays bfloat16 (in the chain that is set) and float32 float32; float16 becomes float32
    (exact). "int8" is
    symmetric, one bfloat16 scale for 32 consecutive k of an output channel (8.5 bits a weight, the grain of
    llama.cpp's q8_0); a scale has 8 significant bits, so int8 times scale is exact in float32 and the product is
    the same chain as for the other kinds. On a GPU the weight is kept as it is, in its dtype and memory.
    into: what `pack_linear` made of a weight of this shape: it gets these values, in its memory and its kind, and is
    the result. A kind that cannot hold them as they are is the caller's to refuse.
    Raises ValueError for an unknown quantization, or one that the device has not.
    """
    if into is not None:
        return _repack(weight, into)
    if quantization is not None and quantization not in QUANTIZATIONS:
        raise ValueError(f"unknown quantization {quantization!r}: known are {', '.join(QUANTIZATIONS)}, or none")
    assert weight.dim() == 2, "a linear weight is [N, K]"
    n, k = weight.shape
    if weight.is_cuda:
        return _plain_gpu_weight(weight, quantization)
    if quantization == "int8":
        kind = "int8"
    elif weight.dtype == torch.bfloat16:
        kind = "bfloat16 pairs" if native.multiplies_in_pairs() else "bfloat16"
    else:
        kind = "float32"
    if weight.dtype not in native.DTYPE_CODES:
        weight = weight.float()
    lib = native.lib()
    if not lib:
        plain = _dequantize(*_quantize(weight), k) if kind == "int8" else weight.float()
        return LinearWeight(n, k, kind, plain.clone() if plain is weight else plain)
    if weight.stride(1) != 1:
        weight = weight.contiguous()
    panel_bytes = lib.octavo_panel_bytes(KINDS[kind], k)
    panels = -(-n // PANEL)
    part, owner = PACKED_WEIGHTS.take(panels * panel_bytes)
    storage = part.view(panels, panel_bytes)
    lib.octavo_pack(
        weight.data_ptr(), weight.stride(0), native.DTYPE_CODES[weight.dtype], n, k, KINDS[kind], storage.data_ptr()
    )
    header = _WeightHeader(n, k, panel_bytes, storage.data_ptr(), KINDS[kind])
    return LinearWeight(n, k, kind, storage, ctypes.addressof(header), (header, owner))


def _repack(weight: Tensor, into: LinearWeight) -> LinearWeight:
    assert weight.shape == (into.n, into.k), "a weight is packed again in its own shape"
    if not into.header:  # of a GPU, or the reference's
        values = weight
        if into.kind == "int8":
            values = _dequantize(*_quantize(weight), into.k)
        into.storage.copy_(values)
        return into
    weight = (weight.to(torch.bfloat16) if into.kind.startswith("bfloat16") else weight.float()).contiguous()
    stride, code, data = weight.stride(0), native.DTYPE_CODES[weight.dtype], into.storage.data_ptr()
    native.lib().octavo_pack(weight.data_ptr(), stride, code, into.n, into.k, KINDS[into.kind], data)
    return into


def packed_bytes(n: int, k: int, dtype: torch.dtype, quantization: str | None, device: str, *, native: bool) -> int:
    """Bytes of the storage that `pack_linear` makes of a weight [n, k] of `dtype` on "cpu" or "cuda".

    native: whether compiled operators are in use there.
    """
    if device != "cpu":
        return n * k * dtype.itemsize
    if not native:
        return n * k * 4
    rows = -(-n // PANEL) * PANEL
    if quantization == "int8":
        return rows * -(-k // GROUP) * (GROUP + 2)
    return rows * (k + k % 2) * 2 if dtype == torch.bfloat16 else rows * k * 4  # pairs pad an odd k


def _plain_gpu_weight(weight: Tensor, quantization: str | None) -> LinearWeight:
    if quantization is not None:
        raise ValueError(f"quantization {quantization!r} needs device 'cpu': on 'cuda' leave quantization out")
    from octavo.ops.gemm import gpu as matmul  # needs triton

    weight = weight.contiguous()
    matmul.check_library(weight)
    return LinearWeight(weight.shape[0], weight.shape[1], str(weight.dtype).removeprefix("torch."), weight)


def linear(
    x: Tensor,
    weight: LinearWeight,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """`x @ weight.T + bias`: x [M, K] float32 or bfloat16, rows may be strided; bias [N] float32 -> [M, N].

    On a GPU also float16; there x has the weight's dtype or float32. The result has `out_dtype` (default: x's) and is
    new, or `out` where one is given (last stride 1), of out's dtype.
    """
    lib = native.lib()
    if not (lib and weight.header):
        if x.is_cuda:
            return _linear_gpu(x, weight, bias, out_dtype, out)
        return linear_reference(x, weight, bias, out_dtype, out)
    m, k = x.shape
    assert k == weight.k, "x and the weight disagree on K"
    if out is None:
        out, stride = torch.empty((m, weight.n), dtype=out_dtype or x.dtype), weight.n
    else:
        stride = out.stride(0)
    lib.octavo_linear(
        x.data_ptr(),
        x.stride(0),
        m,
        weight.header,
        None if bias is None else bias.data_ptr(),
        out.data_ptr(),
        stride,
        native.DTYPE_CODES[x.dtype],
        native.DTYPE_CODES[out.dtype],
    )
    return out


def _linear_gpu(
    x: Tensor, weight: LinearWeight, bias: Tensor | None, out_dtype: torch.dtype | None, out: Tensor | None
) -> Tensor:
    from octavo.ops.gemm import cluster_gemm  # need triton
    from octavo.ops.gemm import gpu as matmul

    if out is None:
        out = torch.empty((x.shape[0], weight.n), dtype=out_dtype or x.dtype, device=x.device)
    if bias is None and cluster_gemm.serves(x, weight.storage, out):
        return cluster_gemm.product(x, weight.storage, out)
    return matmul.linear(x, weight.storage, bias, out)


def linear_as_it_lies(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """`linear` on a GPU, into `out`, with a weight [N, K] that nobody packed and whose memory may change hands."""
    from octavo.ops.gemm import cluster_gemm, gpu  # need triton

    weight = weight.contiguous()
    gpu.check_library(weight)
    if bias is None and x.shape[0] <= cluster_gemm.MAX_ROWS and cluster_gemm.serves(x, weight, out):
        cluster_gemm.product(x, weight, out)
    else:
        gpu.linear(x, weight, bias, out)


def load_kernels(num_rows: int) -> None:
    """On a GPU: load what products of so many rows run by the weights that they have met, draws of a head's among them.

    They load nothing while a graph is captured.
    """
    from octavo.ops.gemm import cluster_gemm  # need triton
    from octavo.ops.sampling import fused_lm_head_sampling

    cluster_gemm.load_for(num_rows)
    fused_lm_head_sampling.load_for(num_rows)


def linear_reference(
    x: Tensor,
    weight: LinearWeight,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """The reference implementation of `linear`: float32 products of fixed blocks of rows, whatever the row count.

    Within 1e-5 of the product of the CPU's or the GPU's kernels relative to `|x| @ |w|.T`, not equal in bits.
    """
    m, k = x.shape
    values = unpack(weight)
    # MKL has other kernels for 1 and for 2 to 3 rows, also for a thread's part of the rows: 8 rows a thread avoid both.
    block_rows = max(16, 8 * torch.get_num_threads())
    padded = torch.zeros((-(-m // block_rows) * block_rows, k), dtype=torch.float32, device=x.device)
    padded[:m] = x
    blocks = [torch.mm(block, values.t()) for block in padded.split(block_rows)] if m else []
    result = torch.cat(blocks)[:m] if blocks else padded.new_empty((0, weight.n))
    if bias is not None:
        result = result + bias
    return result.to(out_dtype or x.dtype) if out is None else out.copy_(result)


def unpack(weight: LinearWeight) -> Tensor:
    """The exact values [N, K] of a weight, float32 (for a bfloat16 or int8 kind too: both widen exactly)."""
    if not weight.header:
        return weight.storage.float()
    panels, n, k = weight.storage.shape[0], weight.n, weight.k
    if weight.kind == "float32":
        rows = weight.storage.view(torch.float32).view(panels, k, PANEL)
    elif weight.kind == "bfloat16":
        rows = _straight(weight.storage.view(torch.bfloat16).view(panels, k, PANEL)).float()
    elif weight.kind == "bfloat16 pairs":
        pairs = weight.storage.view(torch.bfloat16).view(panels, -1, PANEL, 2)
        rows = pairs.transpose(2, 3).flatten(1, 2)[:, :k].float()
    else:
        groups = weight.storage.view(panels, -1, (GROUP + 2) * PANEL)
        scales = _straight(groups[..., : 2 * PANEL].contiguous().view(torch.bfloat16)).float()
        quants = groups[..., 2 * PANEL :].contiguous().view(torch.int8).view(panels, -1, GROUP, PANEL)
        rows = (quants.float() * scales[:, :, None, :]).flatten(1, 2)[:, :k]
    return rows.transpose(1, 2).reshape(panels * PANEL, k)[:n].contiguous()


def _quantize(rows: Tensor) -> tuple[Tensor, Tensor]:
    """rows [N, K] -> int8 [N, groups, 32] (K padded with zeros) and bfloat16 scales [N, groups]: as pack.cpp packs."""
    n, k = rows.shape
    groups = -(-k // GROUP)
    values = torch.nn.functional.pad(rows.float(), (0, groups * GROUP - k)).view(n, groups, GROUP)
    scales = (values.abs().amax(dim=2) / 127).to(torch.bfloat16)
    divisors = scales.float()[:, :, None]
    quants = torch.where(divisors > 0, values / divisors, 0.0).round().clamp(-127, 127).to(torch.int8)
    return quants, scales


def _dequantize(quants: Tensor, scales: Tensor, k: int) -> Tensor:
    return (quants.float() * scales.float()[:, :, None]).flatten(1)[:, :k].contiguous()


def _straight(interleaved: Tensor) -> Tensor:
    """[..., 32] in the order 0, 16, 1, 17, ... of bfloat16 words -> the order of the channels."""
    return interleaved.unflatten(-1, (PANEL // 2, 2)).transpose(-1, -2).flatten(-2)
