"""Plans and results as bytes: they hold data alone, so that a worker may live elsewhere."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
import numpy as np

from octavo.plan import IntArray, StepPlan, StepResult

_Message = TypeVar("_Message", StepPlan, StepResult)


def encode(message: StepPlan | StepResult) -> bytes:
    """As msgpack. Arrays go as shape and int64 bytes."""
    return _ENCODER.encode(message)


def decode(data: bytes, kind: type[_Message]) -> _Message:
    """What `encode` made of a `kind`. Raises msgspec.ValidationError for anything else."""
    return msgspec.msgpack.decode(data, type=kind, dec_hook=_decode_array)


def _encode_array(array: Any) -> tuple[tuple[int, ...], bytes]:
    return array.shape, np.ascontiguousarray(array, np.int64).tobytes()


def _decode_array(_: type, message: Any) -> IntArray:
    shape, data = message
    return np.frombuffer(data, np.int64).reshape(shape)


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_encode_array)
