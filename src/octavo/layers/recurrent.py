"""Recurrent: the parts of a layer that keep a state, their weights, and what each keeps.

Owns a short convolution, the gated delta rule, Mamba-2 and Mamba-1, without the projections and norms around them, and
`state_spec`, which says in one StateSpec what all parts of a layer keep. A family's layer makes its parts of one
number, puts `state_spec(...)` of them into its model's `layer_specs`, and calls `mix` in its forward. Does not know
blocks or steps; which operators run is the StateBackend's that the step brings. Invariant: parts of one layer keep
tensors of different names.
"""

from __future__ import annotations

from typing import TypeAlias

import torch

from octavo.attention.base import current_context
from octavo.cache.specs import StateSpec, StateTensor
from octavo.layers.base import Layer
from octavo.layers.chain import line
from octavo.ops.scan import (
    CHUNK,
    SHORT_CHUNK,
    ConvOperands,
    DeltaOperands,
    Mamba1Operands,
    Mamba2Operands,
    decay_of,
)

Part: TypeAlias = "ShortConvolution | GatedDeltaRule | Mamba2Scan | Mamba1Scan"


def state_spec(*parts: Part) -> StateSpec:
    """What a layer of these parts keeps. The state advances as often as the part that wants it most often."""
    return StateSpec(
        states=tuple(tensor for part in parts for tensor in part.states),
        inputs=tuple(tensor for part in parts for tensor in part.inputs),
        chunk=min(part.chunk for part in parts if part.chunk) if any(part.chunk for part in parts) else SHORT_CHUNK,
        in_graphs=True,
    )


class _Part(Layer):
    """Of layer number `index`."""

    chunk = 0  # tokens from border to border; 0: any

    def __init__(self, index: int, dtype: torch.dtype) -> None:
        """`dtype`: of activations, and of what is kept of a token."""
        super().__init__()
        self.index = index
        self._name = str(dtype).removeprefix("torch.")


class ShortConvolution(_Part):
    """A causal convolution of `width` tokens, of each channel by itself, with silu behind it if asked for.

    Parameters: weight [channels, 1, width], and bias [channels] if there is one.
    """

    operands: ConvOperands

    def __init__(
        self, index: int, channels: int, width: int, dtype: torch.dtype, *, bias: bool = False, silu: bool = True
    ) -> None:
        """`width`: tokens, at least 2."""
        super().__init__(index, dtype)
        self.silu = silu
        self.declare("weight", (channels, 1, width), torch.float32)
        if bias:
            self.declare("bias", (channels,), torch.float32)
        self.states = (StateTensor("conv", (width - 1, channels), self._name),)
        self.inputs = (StateTensor("conv", (channels,), self._name),)

    def finalize(self, quantization: str | None) -> None:
        """Make the operands."""
        super().finalize(quantization)
        weight: torch.Tensor = self.__dict__.pop("weight")
        self.operands = ConvOperands(weight.squeeze(1).t().contiguous(), self.__dict__.pop("bias", None), self.silu)

    @line("own")
    def mix(self, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, channels] -> the same shape and dtype."""
        own = current_context().layers[self.index].states
        assert own.backend is not None, "the engine gives every layer with a state its operators"
        return own.backend.short_conv(own, self.operands, x)


class GatedDeltaRule(_Part):
    """See DeltaOperands. Parameters: A_log and dt_bias, [num_heads]."""

    chunk = CHUNK
    operands: DeltaOperands

    def __init__(
        self, index: int, num_key_heads: int, num_heads: int, key_size: int, value_size: int, dtype: torch.dtype
    ) -> None:
        """`num_heads`: of the values, a multiple of the keys'."""
        super().__init__(index, dtype)
        self._sizes = num_key_heads, num_heads, key_size, value_size
        for name in ("A_log", "dt_bias"):
            self.declare(name, (num_heads,), torch.float32, dummy=0.0)
        self.channels = 2 * num_key_heads * key_size + num_heads * value_size
        self.states = (StateTensor("state", (num_heads, key_size, value_size), "float32", is_sum=True),)
        self.inputs = (
            StateTensor("key", (num_key_heads, key_size), self._name),
            StateTensor("value", (num_heads, value_size), self._name),
            StateTensor("update", (num_heads, value_size), self._name),
            StateTensor("decay", (num_heads,), "float32"),
            StateTensor("rate", (num_heads,), "float32"),
        )

    def finalize(self, quantization: str | None) -> None:
        """Make the operands."""
        super().finalize(quantization)
        decay = decay_of(self.__dict__.pop("A_log"))
        self.operands = DeltaOperands(*self._sizes, decay, self.__dict__.pop("dt_bias"))

    def mix(self, qkv: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """qkv [tokens, channels], behind their convolution; a, b [tokens, heads] -> [tokens, heads * value_size]."""
        own = current_context().layers[self.index].states
        assert own.backend is not None, "the engine gives every layer with a state its operators"
        return own.backend.gated_delta(own, self.operands, qkv, a, b)


class Mamba2Scan(_Part):
    """See Mamba2Operands. Parameters: A_log, dt_bias and D, [num_heads]."""

    chunk = CHUNK
    operands: Mamba2Operands

    def __init__(
        self,
        index: int,
        num_heads: int,
        head_size: int,
        num_groups: int,
        state_size: int,
        dtype: torch.dtype,
        *,
        dt_limits: tuple[float, float] = (0.0, float("inf")),
    ) -> None:
        """`num_groups`: of B and C; divides num_heads."""
        super().__init__(index, dtype)
        self._sizes, self._dt_limits = (num_heads, head_size, num_groups, state_size), dt_limits
        for name in ("A_log", "dt_bias", "D"):
            self.declare(name, (num_heads,), torch.float32, dummy=0.0)
        self.channels = num_heads * head_size + 2 * num_groups * state_size
        self.states = (StateTensor("state", (num_heads, state_size, head_size), "float32", is_sum=True),)
        self.inputs = (
            StateTensor("x", (num_heads, head_size), self._name),
            StateTensor("b", (num_groups, state_size), self._name),
            StateTensor("decay", (num_heads,), "float32"),
            StateTensor("dt", (num_heads,), "float32"),
        )

    def finalize(self, quantization: str | None) -> None:
        """Make the operands."""
        super().finalize(quantization)
        decay, dt_bias, skip = (
            decay_of(self.__dict__.pop("A_log")),
            self.__dict__.pop("dt_bias"),
            self.__dict__.pop("D"),
        )
        self.operands = Mamba2Operands(*self._sizes, decay, dt_bias, skip, *self._dt_limits)

    def mix(self, xbc: torch.Tensor, dt: torch.Tensor) -> torch.Tensor:
        """xbc [tokens, channels], behind their convolution; dt [tokens, heads] -> [tokens, heads * head_size]."""
        own = current_context().layers[self.index].states
        assert own.backend is not None, "the engine gives every layer with a state its operators"
        return own.backend.mamba2(own, self.operands, xbc, dt)


class Mamba1Scan(_Part):
    """See Mamba1Operands. Parameters: A_log [channels, state_size], dt_bias and D, [channels]."""

    chunk = SHORT_CHUNK
    operands: Mamba1Operands

    def __init__(self, index: int, channels: int, state_size: int, dtype: torch.dtype) -> None:
        """`dt_bias` is the bias of the product that makes dt: that product is without it."""
        super().__init__(index, dtype)
        self.declare("A_log", (channels, state_size), torch.float32, dummy=0.0)
        for name in ("dt_bias", "D"):
            self.declare(name, (channels,), torch.float32, dummy=0.0)
        self.states = (StateTensor("state", (state_size, channels), "float32", is_sum=True),)
        self.inputs = (
            StateTensor("x", (channels,), self._name),
            StateTensor("dt", (channels,), "float32"),
            StateTensor("b", (state_size,), self._name),
        )

    def finalize(self, quantization: str | None) -> None:
        """Make the operands."""
        super().finalize(quantization)
        decay, dt_bias, skip = (
            decay_of(self.__dict__.pop("A_log")),
            self.__dict__.pop("dt_bias"),
            self.__dict__.pop("D"),
        )
        self.operands = Mamba1Operands(decay.t().contiguous(), dt_bias, skip)

    def mix(self, x: torch.Tensor, dt: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        """x, dt [tokens, channels], x behind its convolution; b, c [tokens, state_size] -> [tokens, channels]."""
        own = current_context().layers[self.index].states
        assert own.backend is not None, "the engine gives every layer with a state its operators"
        return own.backend.mamba1(own, self.operands, x, dt, b, c)
