"""Transports: how a session's tensors reach a worker.

Owns the protocol that all keep to, the table of backends, and the rule by which tensors share a buffer. Does not know
where values go. Invariant: a receive ends, with all tensors or an error that names the peer and the tensor, within a
deadline; nothing is unpickled.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

from octavo.checkpoint.safetensors import fault_of_shape
from octavo.config.quoted import quoted
from octavo.rl.plan import Incoming
from octavo.rl.session import BACKENDS, WeightUpdateError

BUFFER_BYTES = 1 << 28
UNTOLD_BYTES = 1 << 30  # of the buffers of a sender that does not say: vLLM's, whose trainers count so
TIMEOUT = 60.0  # seconds, and one more for each GB
_BYTES_PER_SECOND = 1e9
_MAX_NAME = 1024  # characters of a tensor's name

Read = Callable[[Sequence[str], Sequence[str], Sequence[Sequence[int]]], list[Incoming]]
Put = Callable[[Incoming, torch.Tensor], None]
Check = Callable[[], None]
"""Asked again and again by who waits for a peer; what it raises ends the wait."""


def go_on() -> None:
    """Nothing ends the wait."""


class Alone:
    """What a transport is that keeps no connection: it opens nothing, and nobody can go."""

    overwrites = False
    waits = True
    gives = True
    peer_is_gone = False
    peer = ""

    def __init__(self) -> None:
        """Nothing is opened."""
        self.check: Check = go_on
        self.displaced = ""

    def open(self, info: Mapping[str, Any], worker: int) -> dict[str, Any]:
        """There is nobody to meet."""
        return {}

    def close(self) -> None:
        """Nothing is open."""


class Transport(Protocol):
    """One worker's end. A message of a session is a dict whose further keys are the transport's own."""

    overwrites: bool  # tensors go to where they belong as they come; else they are kept on the host until all are there
    waits: bool  # a receive waits for a peer or for files: it is done beside the steps
    gives: bool  # the memory of what it puts is the taker's; else it is others', and used again
    check: Check  # asked while a meeting or a receive waits for a peer
    displaced: str  # the peer whose place its own one took; empty: nobody's

    @property
    def peer(self) -> str:
        """Whom it is connected to, in words; empty: nobody."""

    @property
    def peer_is_gone(self) -> bool:
        """Whether the sender's process has ended, as far as its connection tells. Waits for nothing."""

    def __init__(self, device: torch.device, options: Mapping[str, Any]) -> None:
        """`options`: what weight_transfer_config says beside the backend."""

    def open(self, info: Mapping[str, Any], worker: int) -> dict[str, Any]:
        """Meet the sender, before any session. worker: this one's number among the engine's. Raises as `receive`."""

    def receive(self, info: Mapping[str, Any], read: Read, put: Put) -> list[Incoming]:
        """Take one message's tensors: `read` checks what is told, then each is `put`, in order; the tensors.

        A tensor is put on the host or on the device.
        Raises WeightUpdateError for a message that cannot be used, WeightTransferError for a peer that fails.
        """

    def close(self) -> None:
        """Let go of the sender. May be called twice."""


def make_transport(backend: str, device: torch.device, options: Mapping[str, Any], check: Check = go_on) -> Transport:
    """The backend's. Raises WeightUpdateError for an unknown one."""
    if backend not in BACKENDS:
        raise WeightUpdateError(f"unknown weight transfer backend {quoted(backend)}: known are {', '.join(BACKENDS)}")
    module = importlib.import_module(f"octavo.rl.transport.{backend}")
    transport: Transport = module.TRANSPORT(device, options)
    transport.check = check
    return transport


def told(info: Mapping[str, Any], read: Read) -> list[Incoming]:
    """The tensors that a message names. Raises WeightUpdateError."""
    lists = [info.get(key) for key in ("names", "dtype_names", "shapes")]
    for key, value in zip(("names", "dtype_names", "shapes"), lists, strict=True):
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise WeightUpdateError(f"update_info.{key} must be a list, got {type(value).__name__}")
    names, dtype_names, shapes = lists
    if not all(isinstance(name, str) and len(name) <= _MAX_NAME for name in [*names, *dtype_names]):  # type: ignore[misc]
        raise WeightUpdateError(
            f"update_info.names and dtype_names must hold text, of at most {_MAX_NAME} characters each"
        )
    for number, shape in enumerate(shapes):  # type: ignore[arg-type]
        if fault := fault_of_shape(shape):
            what = "update_info.shapes must hold lists of positive integers"
            raise WeightUpdateError(f"{what}, got {quoted(shape)} as number {number}: {fault}")
    return read(names, dtype_names, shapes)  # type: ignore[arg-type]


def field(info: Mapping[str, Any], key: str, kind: type, default: Any = None, *, of: str = "update_info") -> Any:
    """One value of a message. Raises WeightUpdateError where it is missing or of another type. of: its place."""
    value = info.get(key, default)
    if type(value) is not kind:
        found = "and is missing" if value is None else f"got {quoted(value, 100)}"
        raise WeightUpdateError(f"{of}.{key} must be {kind.__name__}, {found}")
    return value


def deadline(options: Mapping[str, Any], num_bytes: int) -> float:
    """Seconds that so many bytes may take."""
    return float(options.get("timeout", TIMEOUT)) + num_bytes / _BYTES_PER_SECOND


def buffers(incoming: Sequence[Incoming], size: int) -> Iterator[list[Incoming]]:
    """Tensors that travel together: a buffer is closed when its bytes first exceed `size`. Both ends count alike."""
    part: list[Incoming] = []
    total = 0
    for each in incoming:
        part.append(each)
        total += each.num_bytes
        if total > size:
            yield part
            part, total = [], 0
    if part:
        yield part


def split(buffer: torch.Tensor, part: Sequence[Incoming]) -> Iterator[tuple[Incoming, torch.Tensor]]:
    """The tensors of a buffer [bytes] uint8, one behind the other."""
    begin = int(buffer.storage_offset())
    address = buffer.data_ptr() - begin
    for each, data in zip(part, buffer.split([each.num_bytes for each in part]), strict=True):
        if (begin | address) % each.dtype.itemsize:
            data = data.clone()
        begin += each.num_bytes
        yield each, data.view(each.dtype).view(each.shape)
