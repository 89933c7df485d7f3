"""Weights from safetensors files: a folder as a checkpoint's, which nobody writes to while it is read."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from octavo.checkpoint.cache_scales import scale_names
from octavo.checkpoint.safetensors import DTYPES, Checkpoint
from octavo.config.quoted import MAX_NAME, plain, quoted
from octavo.rl.plan import Incoming
from octavo.rl.session import WeightTransferError, WeightUpdateError
from octavo.rl.transport import Alone, Put, Read, field
from octavo.rl.transport.pieces import read_ahead


class DiskTransport(Alone):
    """See octavo.rl.transport.Transport. A message has `path`, a folder; `names` may choose among its tensors."""

    def __init__(self, device: torch.device, options: Mapping[str, Any]) -> None:
        """Nothing is opened. options: `staging`, "none" where tensors go on to the device at once."""
        super().__init__()
        self._onto = device if options.get("staging") == "none" else torch.device("cpu")

    def receive(self, info: Mapping[str, Any], read: Read, put: Put) -> list[Incoming]:
        """Read the files."""
        given = field(info, "path", str)
        if not given or "\0" in given:
            raise WeightUpdateError(f"update_info.path must be a folder's, got {given[:80]!r}")
        path = Path(given)
        try:
            checkpoint = Checkpoint(path)
        except ValueError as error:
            raise WeightUpdateError(str(error)) from None
        except OSError as error:
            raise WeightUpdateError(f"{plain(str(path))}: cannot read: {error.strerror}") from None
        try:
            given = info.get("names") or []
            if not isinstance(given, list) or not all(isinstance(name, str) for name in given):
                raise WeightUpdateError("update_info.names must be a list of names, or be left out")
            names = list(given or checkpoint.entries.keys() - scale_names(checkpoint.entries).keys())
            lacking = [name for name in names if name not in checkpoint.entries]
            if lacking:
                raise WeightUpdateError(
                    f"{path}: holds no tensor {', '.join(quoted(name, MAX_NAME) for name in lacking[:5])}"
                )
            names.sort(key=lambda name: (checkpoint.entries[name].shard, checkpoint.entries[name].start))
            entries = [checkpoint.entries[name] for name in names]
            stored = [str(DTYPES.get(entry.dtype, entry.dtype)) for entry in entries]
            incoming = read(names, stored, [entry.shape for entry in entries])
            with contextlib.closing(read_ahead(checkpoint, incoming, self._onto)) as tensors:
                for each, tensor in tensors:
                    put(each, tensor)
            checkpoint.check_unchanged()
        except WeightUpdateError:
            raise
        except ValueError as error:  # the file changed or ended while it was read
            raise WeightTransferError(str(error)) from None
        finally:
            checkpoint.close()
        return incoming


TRANSPORT = DiskTransport
