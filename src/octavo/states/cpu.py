"""CpuStates: the compiled operators of layers with states, one native call each.

Owns what the native code is told: where a layer's tensors lie in blocks (once), a step's rows (once a step). The bits
are those of ReferenceStates, which serves where no library is, and for sizes that the compiled operators do not take.
Invariant: operands keep their memory, so what is told of them once stays true when weights change.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.ops import native
from octavo.ops.scan import ConvOperands, DeltaNetOperands, DeltaOperands, Mamba1Operands, Mamba2Operands
from octavo.ops.states import Store
from octavo.states import composed
from octavo.states.base import LayerStates, StateInputs
from octavo.states.reference import DELTA_INPUTS, MAMBA1_INPUTS, MAMBA2_INPUTS, ReferenceStates

_P, _I, _C, _F = native.PTR, native.I64, native.I32, native.F32
native.declare("octavo_short_conv", [_P, _P, _P, _P, _P, _I, _P, _C])
native.declare("octavo_gated_delta", [_P, _P, _P, _P, _P, _I, _P, _I, _P, _I, _P, _C])
native.declare("octavo_delta_net", [_P, _P, _P, _I, _I, _P, _C])
native.declare("octavo_mamba2", [_P, _P, _P, _P, _P, _I, _P, _I, _P, _C])
native.declare("octavo_mamba1", [_P, _P, _P, _P, _P, _I, _P, _I, _P, _I, _P, _I, _P, _C])

# What the compiled operators take at most: MOST_WIDTH of conv.cpp, heads of a group, MOST_STATES of mamba1.cpp.
_MOST_WIDTH, _MOST_DELTA_HEADS, _MOST_MAMBA2_HEADS, _MOST_STATES = 16, 64, 256, 256


class _Kept(ctypes.Structure):
    """`octavo::Kept` of kept.h."""

    _fields_ = (
        ("data", _P),
        *((name, _I) for name in ("block_bytes", "part_bytes", "line_bytes", "run", "lines", "line_size")),
        *((name, _I) for name in ("first_part", "per_block", "blocks")),
        ("dtype", _C),
    )


class _Step(ctypes.Structure):
    """`octavo::StateStep` of kept.h."""

    _fields_ = (
        *((name, _P) for name in ("rows", "query_start", "seq_lens")),
        *((name, _I) for name in ("num_rows", "num_tokens")),
    )


class _Tables(ctypes.Structure):
    """`octavo::StateTables` of kept.h."""

    _fields_ = (
        *((name, _P) for name in ("states", "inputs")),
        *((name, _I) for name in ("state_columns", "input_columns", "chunk", "block_size")),
    )


class _ShortConv(ctypes.Structure):
    """`octavo::ShortConv` of conv.cpp."""

    _fields_ = (("channels", _I), ("width", _I), ("weight", _P), ("bias", _P), ("silu", _C))


class _DeltaRule(ctypes.Structure):
    """`octavo::DeltaRule` of delta.cpp."""

    _fields_ = (
        *((name, _I) for name in ("num_key_heads", "num_heads", "key_size", "value_size")),
        *((name, _P) for name in ("decay", "dt_bias")),
        ("query_scale", _F),
    )


class _DeltaNet(ctypes.Structure):
    """`octavo::DeltaNet` of delta_net.cpp."""

    _fields_ = (
        *((name, _P) for name in ("project", "norm")),
        *((f"{operator}_{name}", _P) for operator in ("conv", "rule") for name in ("tables", "kept", "operands")),
        *((name, _I) for name in ("channels", "num_heads", "value_size")),
        ("eps", _F),
    )


class _Mamba2Scan(ctypes.Structure):
    """`octavo::Mamba2Scan` of mamba2.cpp."""

    _fields_ = (
        *((name, _I) for name in ("num_heads", "head_size", "num_groups", "state_size")),
        *((name, _P) for name in ("decay", "dt_bias", "skip")),
        *((name, _F) for name in ("dt_min", "dt_max")),
    )


class _Mamba1Scan(ctypes.Structure):
    """`octavo::Mamba1Scan` of mamba1.cpp."""

    _fields_ = (("channels", _I), ("state_size", _I), *((name, _P) for name in ("decay", "dt_bias", "skip")))


class _Told(NamedTuple):
    """What the native code is told of one operator of one layer."""

    tables: _Tables
    kept: Any  # an array of _Kept
    operands: ctypes.Structure
    addresses: tuple[int, int, int]  # of the three


class CpuStates:
    """See StateBackend."""

    name = "cpu"

    def __init__(self) -> None:
        """Layers and steps are told of as they come."""
        self._reference = ReferenceStates()
        self._told: dict[tuple[LayerStates, str], _Told] = {}
        self._nets: dict[LayerStates, _DeltaNet] = {}
        self._step: tuple[StateInputs | None, _Step] = (None, _Step())

    def short_conv(self, own: LayerStates, conv: ConvOperands, x: Tensor) -> Tensor:
        """See StateBackend."""
        lib = native.lib()
        if not lib or len(conv.weight) > _MOST_WIDTH:
            return self._reference.short_conv(own, conv, x)
        told = self._told.get((own, "conv")) or self._tell_conv(own, conv)
        x, out = _rows(x), torch.empty_like(x, memory_format=torch.contiguous_format)
        code = native.DTYPE_CODES[x.dtype]
        lib.octavo_short_conv(self._rows_of(own), *told.addresses, x.data_ptr(), x.stride(0), out.data_ptr(), code)
        return out

    def gated_delta(self, own: LayerStates, rule: DeltaOperands, qkv: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """See StateBackend."""
        lib = native.lib()
        if not lib or rule.num_heads > _MOST_DELTA_HEADS * rule.num_key_heads:
            return self._reference.gated_delta(own, rule, qkv, a, b)
        told = self._told.get((own, "delta")) or self._tell_delta(own, rule)
        qkv, a, b = _rows(qkv), _rows(a), _rows(b)
        out = qkv.new_empty(len(qkv), rule.num_heads * rule.value_size)
        lib.octavo_gated_delta(
            self._rows_of(own),
            *told.addresses,
            qkv.data_ptr(),
            qkv.stride(0),
            a.data_ptr(),
            a.stride(0),
            b.data_ptr(),
            b.stride(0),
            out.data_ptr(),
            native.DTYPE_CODES[qkv.dtype],
        )
        return out

    def delta_net(self, own: LayerStates, net: DeltaNetOperands, x: Tensor) -> Tensor:
        """See StateBackend."""
        lib, rule = native.lib(), net.rule
        address = self.net_address(own, net)
        if not lib or not address:
            return composed.delta_net(self, own, net, x)
        x, out = _rows(x), x.new_empty(len(x), rule.num_heads * rule.value_size)
        code, step = native.DTYPE_CODES[x.dtype], self._rows_of(own)
        lib.octavo_delta_net(step, address, x.data_ptr(), x.stride(0), len(x), out.data_ptr(), code)
        return out

    def net_address(self, own: LayerStates, net: DeltaNetOperands) -> int:
        """See NativeNets."""
        told, rule = self._nets.get(own), net.rule
        if told is not None:
            return ctypes.addressof(told)
        is_wide = len(net.conv.weight) > _MOST_WIDTH or rule.num_heads > _MOST_DELTA_HEADS * rule.num_key_heads
        if not net.project.header or is_wide:
            return 0
        conv, delta = self._tell_conv(own, net.conv), self._tell_delta(own, rule)
        channels = 2 * rule.num_key_heads * rule.key_size + rule.num_heads * rule.value_size
        sizes = channels, rule.num_heads, rule.value_size, net.eps
        addresses = net.project.header, net.norm.data_ptr(), *conv.addresses, *delta.addresses
        told = self._nets[own] = _DeltaNet(*addresses, *sizes)
        return ctypes.addressof(told)

    def mamba2(self, own: LayerStates, scan: Mamba2Operands, xbc: Tensor, dt: Tensor) -> Tensor:
        """See StateBackend."""
        lib = native.lib()
        if not lib or scan.num_heads > _MOST_MAMBA2_HEADS * scan.num_groups:
            return self._reference.mamba2(own, scan, xbc, dt)
        told = self._told.get((own, "mamba2"))
        if told is None:
            pointers = scan.decay.data_ptr(), scan.dt_bias.data_ptr(), scan.skip.data_ptr()
            operands = _Mamba2Scan(*scan[:4], *pointers, scan.dt_min, scan.dt_max)
            told = self._tell(own, "mamba2", ("state",), MAMBA2_INPUTS, operands)
        xbc, dt = _rows(xbc), _rows(dt)
        out = xbc.new_empty(len(xbc), scan.num_heads * scan.head_size)
        lib.octavo_mamba2(
            self._rows_of(own),
            *told.addresses,
            xbc.data_ptr(),
            xbc.stride(0),
            dt.data_ptr(),
            dt.stride(0),
            out.data_ptr(),
            native.DTYPE_CODES[xbc.dtype],
        )
        return out

    def mamba1(self, own: LayerStates, scan: Mamba1Operands, x: Tensor, dt: Tensor, b: Tensor, c: Tensor) -> Tensor:
        """See StateBackend."""
        lib = native.lib()
        if not lib or len(scan.decay) > _MOST_STATES:
            return self._reference.mamba1(own, scan, x, dt, b, c)
        told = self._told.get((own, "mamba1"))
        if told is None:
            states, channels = scan.decay.shape
            pointers = scan.decay.data_ptr(), scan.dt_bias.data_ptr(), scan.skip.data_ptr()
            told = self._tell(own, "mamba1", ("state",), MAMBA1_INPUTS, _Mamba1Scan(channels, states, *pointers))
        given = [_rows(each) for each in (x, dt, b, c)]
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        places = [number for each in given for number in (each.data_ptr(), each.stride(0))]
        code = native.DTYPE_CODES[x.dtype]
        lib.octavo_mamba1(self._rows_of(own), *told.addresses, *places, out.data_ptr(), code)
        return out

    def _tell_conv(self, own: LayerStates, conv: ConvOperands) -> _Told:
        width, channels = conv.weight.shape
        bias = None if conv.bias is None else conv.bias.data_ptr()
        operands = _ShortConv(channels, width, conv.weight.data_ptr(), bias, int(conv.silu))
        return self._tell(own, "conv", ("conv",), ("conv",), operands)

    def _tell_delta(self, own: LayerStates, rule: DeltaOperands) -> _Told:
        pointers = rule.decay.data_ptr(), rule.dt_bias.data_ptr()
        operands = _DeltaRule(*rule[:4], *pointers, rule.key_size**-0.5)
        return self._tell(own, "delta", ("state",), DELTA_INPUTS, operands)

    def _tell(
        self, own: LayerStates, name: str, states: tuple[str, ...], inputs: tuple[str, ...], operands: ctypes.Structure
    ) -> _Told:
        part = own.only(states, inputs)
        stores = (*part.states, *part.kept_inputs)
        kept = (_Kept * len(stores))(*(_kept(store) for store in stores))
        tables = _Tables(
            own.state_table.data_ptr(),
            own.input_table.data_ptr(),
            own.state_table.stride(0),
            own.input_table.stride(0),
            own.chunk,
            own.block_size,
        )
        addresses = ctypes.addressof(tables), ctypes.addressof(kept), ctypes.addressof(operands)
        told = self._told[own, name] = _Told(tables, kept, operands, addresses)
        return told

    def _rows_of(self, own: LayerStates) -> int:
        return self.step_address(own.inputs)

    def step_address(self, inputs: StateInputs) -> int:
        """See NativeNets."""
        if self._step[0] is not inputs:
            tensors = inputs.rows, inputs.query_start, inputs.seq_lens
            assert all(each.is_contiguous() for each in tensors), "a step's rows lie together"
            pointers = (each.data_ptr() for each in tensors)
            self._step = inputs, _Step(*pointers, len(inputs.rows), len(inputs.positions))
        return ctypes.addressof(self._step[1])


def _rows(x: Tensor) -> Tensor:
    """With rows that lie together each."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _kept(store: Store) -> _Kept:
    data, size = store.data, store.data.itemsize
    block, part, line = (data.stride(axis) * size for axis in range(3))
    line_size = data[0, 0, 0].numel()
    assert line == line_size * size, "lines of a part lie behind each other"
    own = store.first_part, data.shape[1], store.blocks
    return _Kept(
        data.data_ptr(), block, part, line, data.shape[2], store.lines, line_size, *own, native.DTYPE_CODES[data.dtype]
    )
