"""Weights from another process's memory on the same GPU: one buffer a message, opened, copied from and closed.

What travels of a handle are numbers and bytes in base64: nothing is unpickled.
"""

from __future__ import annotations

import base64
import binascii
import functools
from collections.abc import Mapping
from typing import Any

import torch

from octavo.ops import captures
from octavo.rl.plan import Incoming
from octavo.rl.session import WeightTransferError, WeightUpdateError
from octavo.rl.transport import Alone, Put, Read, field, split, told

# Of what torch says of a storage that is shared, in its order, without the device's number, which is a process's own.
_BYTES = ("handle", "ref_counter_handle", "event_handle")
_PARTS = (
    "handle",
    "size",
    "offset",
    "ref_counter_handle",
    "ref_counter_offset",
    "event_handle",
    "event_sync_required",
)


def handle_of(buffer: torch.Tensor) -> dict[str, Any]:
    """What another process opens a buffer [bytes] uint8 with, which its owner keeps until that is answered.

    The buffer may be a part of a larger tensor's memory.
    """
    parts = dict(zip(_PARTS, buffer.untyped_storage()._share_cuda_()[1:], strict=True))
    parts |= {"offset": parts["offset"] + buffer.storage_offset(), "size": buffer.numel()}
    told = {name: base64.b64encode(parts[name]).decode() for name in _BYTES}
    uuid = str(torch.cuda.get_device_properties(buffer.device).uuid)
    return {**parts, **told, "device_uuid": uuid}


class IpcTransport(Alone):
    """See octavo.rl.transport.Transport. A message has `ipc_handle`, one or one of each GPU by its uuid."""

    overwrites = True
    waits = False

    def __init__(self, device: torch.device, options: Mapping[str, Any]) -> None:
        """Raises WeightUpdateError without a GPU."""
        if device.type != "cuda":
            raise WeightUpdateError(f"backend 'ipc' needs a GPU, and the engine runs on {device.type}: take 'shm'")
        super().__init__()
        self._index = torch.cuda.current_device() if device.index is None else device.index

    def open(self, info: Mapping[str, Any], worker: int) -> dict[str, Any]:
        """There is nobody to meet."""
        return {"device_uuid": self._uuid}

    def receive(self, info: Mapping[str, Any], read: Read, put: Put) -> list[Incoming]:
        """Copy from the buffer, and let it go."""
        handles = info.get("ipc_handle")
        handle = handles.get(self._uuid, handles) if isinstance(handles, Mapping) else None
        if not isinstance(handle, Mapping) or handle.get("device_uuid") != self._uuid:
            raise WeightUpdateError(f"ipc_handle must be one of this worker's GPU, {self._uuid}")
        incoming = told(info, read)
        wanted, size = sum(each.num_bytes for each in incoming), field(handle, "size", int, of="update_info.ipc_handle")
        if size < wanted:
            raise WeightUpdateError(f"ipc_handle: expected {wanted} bytes, found {size}")
        buffer = self._opened(handle)[:wanted]
        for each, tensor in split(buffer, incoming):
            put(each, tensor)
        captures.wait_for_device(self._index)
        del buffer
        return incoming

    @property
    def _uuid(self) -> str:
        return str(torch.cuda.get_device_properties(self._index).uuid)

    def _opened(self, handle: Mapping[str, Any]) -> torch.Tensor:
        own = functools.partial(field, of="update_info.ipc_handle")
        try:
            parts = [
                base64.b64decode(own(handle, name, str), validate=True)
                if name in _BYTES
                else own(handle, name, bool if name == "event_sync_required" else int)
                for name in _PARTS
            ]
        except binascii.Error as error:
            raise WeightUpdateError(f"ipc_handle: {error}") from None
        try:
            storage = torch.UntypedStorage._new_shared_cuda(self._index, *parts)
        except RuntimeError as error:
            raise WeightTransferError(f"the sender's memory cannot be opened: {str(error)[:200]}") from None
        return torch.empty(0, dtype=torch.uint8, device=f"cuda:{self._index}").set_(storage)


TRANSPORT = IpcTransport
