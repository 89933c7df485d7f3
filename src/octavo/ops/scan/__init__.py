"""Scans: what recurrent layers compute of a chunk of tokens, in the one order that all members keep to.

Owns the operands of four operators (short convolution, gated delta rule, Mamba-2, Mamba-1), the elementwise functions
that they share, and the reference implementations of a chunk. Knows no blocks, tables or steps: `octavo.states` brings
what the tokens before brought. Invariants: what a place of a chunk gives follows from the state at the chunk's begin
and the places up to it, by chains of single additions and products that no batch, cut or number of places reaches;
nothing is fused and no library function is called whose bits depend on a place in memory. The compiled operators of a
CPU give the same bits. A GPU multiplies in tiles and has an order of its own, with the same promise.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from octavo.ops.activation import exp_reference
from octavo.ops.gemm import LinearWeight

CHUNK = 64  # tokens of a chunk whose places are computed at once: gated delta rule, Mamba-2
SHORT_CHUNK = 16  # of operators that compute the open chunk's places again, one by one: Mamba-1; and of convolutions
LANES = 16  # of the sums over the channels of two vectors
L2_EPS = 1e-6  # of q and k in the gated delta rule


class ConvOperands(NamedTuple):
    """A causal convolution, channel by channel: y_t = act(bias + sum over j of weight[j] x_(t - width + 1 + j)).

    The sum starts with the bias and takes the oldest token first.
    """

    weight: Tensor  # [width, channels] float32
    bias: Tensor | None  # [channels] float32
    silu: bool  # the activation: silu, else none


class DeltaOperands(NamedTuple):
    """A gated delta rule (Yang, Kautz, Hatamizadeh 2024): S_t = S + b_t k_t (v_t - S' k_t)' with S = exp(g_t) S_(t-1).

    o_t = S_t' q_t. q and k are of norm 1, and q is divided by sqrt(key_size); g_t = decay * softplus(a_t + dt_bias),
    b_t = sigmoid(b). Head h of the values has head h // (num_heads // num_key_heads) of the keys.
    """

    num_key_heads: int
    num_heads: int  # of the values
    key_size: int
    value_size: int
    decay: Tensor  # [num_heads] float32, -exp(A_log)
    dt_bias: Tensor  # [num_heads] float32


class DeltaNetOperands(NamedTuple):
    """A gated delta net around its rule: projections to q, k and v, z, b and a; a norm of each head, gated by z."""

    project: LinearWeight
    conv: ConvOperands
    rule: DeltaOperands
    norm: Tensor  # [value_size] float32
    eps: float


class Mamba2Operands(NamedTuple):
    """Mamba-2 (Dao and Gu 2024): S_t = exp(dt_t decay) S_(t-1) + dt_t B_t x_t'; y_t = S_t' C_t + skip * x_t.

    dt_t = softplus(dt + dt_bias), cut to dt_min .. dt_max. Head h has group h // (num_heads // num_groups) of B and C.
    """

    num_heads: int
    head_size: int
    num_groups: int
    state_size: int
    decay: Tensor  # [num_heads] float32, -exp(A_log)
    dt_bias: Tensor  # [num_heads] float32
    skip: Tensor  # [num_heads] float32, D
    dt_min: float
    dt_max: float


class Mamba1Operands(NamedTuple):
    """Mamba-1 (Gu and Dao 2023), per channel: h_t = exp(dt_t decay) h_(t-1) + dt_t x_t B_t; y_t = h_t' C_t + skip x_t.

    dt_t = softplus(dt + dt_bias).
    """

    decay: Tensor  # [state_size, channels] float32, -exp(A_log)
    dt_bias: Tensor  # [channels] float32
    skip: Tensor  # [channels] float32, D


def decay_of(a_log: Tensor) -> Tensor:
    """-e^a_log, float32. On a CPU it is rounded from float64.

    There libraries' exponentials of float32 have other last bits on another kind of processor; those of float64 are
    alike up to what this rounding drops.
    """
    return -(a_log.double().exp().float() if a_log.device.type == "cpu" else a_log.exp())


def softplus(x: Tensor) -> Tensor:
    """log(1 + e^x) of float32 within 4 ulp, by additions, products and one division: the same bits in any place."""
    y = exp_reference(-x.abs())
    s = y / (y + 2.0)
    square = s * s
    p = square * (1.0 / 17.0) + (1.0 / 15.0)
    for odd in (13.0, 11.0, 9.0, 7.0, 5.0, 3.0):
        p = p * square + (1.0 / odd)
    log = (p * square + 1.0) * (s + s)
    return x.clamp(min=0.0) + log


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + e^-x) of float32."""
    return 1.0 / (exp_reference(-x) + 1.0)


def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x) of float32."""
    return x / (exp_reference(-x) + 1.0)


def dot(x: Tensor, y: Tensor) -> Tensor:
    """Sums of x * y over the last axis, float32: chains in 16 lanes, which a halving tree adds up."""
    size = x.shape[-1]
    product = torch.nn.functional.pad(x * y, (0, -size % LANES)).unflatten(-1, (-1, LANES))
    lanes = product[..., 0, :]
    for index in range(1, product.shape[-2]):
        lanes = lanes + product[..., index, :]
    while lanes.shape[-1] > 1:
        lower, upper = lanes.chunk(2, dim=-1)
        lanes = lower + upper
    return lanes[..., 0]


def normalized(x: Tensor) -> Tensor:
    """x / sqrt(sum of x^2 + 1e-6) over the last axis, float32."""
    # MKL's float32 sqrt is not correctly rounded; float64 rounded to float32 is.
    return x * (1.0 / torch.sqrt((dot(x, x) + L2_EPS).double()).float())[..., None]
