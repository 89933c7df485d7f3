"""Blocks in LMCache, by the public calls of its engine: lookup, store and retrieve.

Owns an engine of LMCache's, and how a block looks to it: a prompt of one chunk, whose tokens are what the block's key
hashes to, and whose K and V are bytes. LMCache hashes tokens to 64 bits, so the checksum around a block holds its key.
"""

from __future__ import annotations

import hashlib
import os
import threading
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from lmcache.v1.cache_engine import LMCacheEngineBuilder
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.config_base import validate_and_set_config_value
from lmcache.v1.gpu_connector.gpu_connectors import GPUConnectorInterface
from lmcache.v1.metadata import LMCacheMetadata

from octavo.kv_connector.guard import Troubles
from octavo.kv_connector.worker.cache_bytes import CacheBytes
from octavo.kv_connector.worker.remote_store import CHECKSUM_BYTES, seal, unseal

_CHUNK = 8  # tokens of a block, as LMCache sees it
# what moves other things than whole chunks that are asked for
_UNSUITED = ("use_layerwise", "enable_blending", "enable_pd", "enable_p2p", "enable_async_loading")


class WrongSetting(ValueError):
    """A setting of LMCache's that cannot be used."""

    def __init__(self, name: str, value: object, limit: str) -> None:
        """limit: why not."""
        super().__init__(f"{name}={value!r}: {limit}")
        self.name, self.value, self.limit = name, value, limit


class LMCacheStore:
    """See RemoteStore."""

    stored_bytes = 0  # LMCache knows
    num_evicted = 0

    def __init__(
        self, cache: CacheBytes, identity: str, settings: Mapping[str, Any], timeout: float, troubles: Troubles
    ) -> None:
        """settings: of LMCache, before those of its file and environment. timeout: seconds. Raises WrongSetting."""
        config, self._troubles = _config(settings, cache.free_bytes), troubles
        row_bytes = -(-(CHECKSUM_BYTES + cache.block_bytes) // _CHUNK) * _CHUNK
        self._row = np.zeros(row_bytes, np.uint8)
        self._timeout, self._lock = timeout, threading.Lock()
        self._name = f"octavo-{uuid.uuid4()}"
        metadata = LMCacheMetadata(
            model_name=f"octavo-{identity}",
            world_size=1,
            local_world_size=1,
            worker_id=0,
            local_worker_id=0,
            kv_dtype=torch.uint8,
            kv_shape=(1, 1, _CHUNK, 1, row_bytes // _CHUNK),
            chunk_size=_CHUNK,
        )
        self._engine = LMCacheEngineBuilder.get_or_create(self._name, config, metadata, _Rows(self._row), _same, _same)
        self._engine.post_init()

    def find(self, keys: Sequence[bytes]) -> Sequence[bool]:
        """See RemoteStore."""
        return [self._engine.lookup(tokens=_tokens(key)) == _CHUNK for key in keys]

    def write(self, key: bytes, block: np.ndarray) -> None:
        """See Blocks."""
        with self._lock:
            seal(key, block, self._row)
            self._engine.store(tokens=_tokens(key))

    def read(self, key: bytes, block: np.ndarray) -> bool:
        """See Blocks. What LMCache cannot give any more, for whatever reason, is not there."""
        with self._lock:
            found = self._engine.retrieve(_tokens(key))
            return bool(found.all()) and unseal(key, self._row, block, self._troubles)

    def close(self) -> None:
        """See RemoteStore. What does not end in time is left behind."""
        thread = threading.Thread(target=LMCacheEngineBuilder.destroy, args=(self._name,), daemon=True)
        thread.start()
        thread.join(self._timeout)


def _same(value: Any, source: int) -> Any:
    """What the first of several ranks says, where there is one."""
    return value


def _tokens(key: bytes) -> list[int]:
    return np.frombuffer(hashlib.blake2b(key, digest_size=4 * _CHUNK).digest(), "<u4").tolist()


def _config(settings: Mapping[str, Any], free_bytes: int) -> LMCacheEngineConfig:
    """LMCache's settings: given here, or in its environment, or in its file. Raises WrongSetting."""
    path = os.environ.get("LMCACHE_CONFIG_FILE")
    try:
        if path:
            config = LMCacheEngineConfig.from_file(path)
            config.update_config_from_env()
        else:
            config = LMCacheEngineConfig.from_env()
    except Exception as error:  # of the file, its syntax or a value
        raise WrongSetting("LMCACHE_CONFIG_FILE", path, " ".join(str(error).split())[:200]) from None
    for name, value in settings.items():
        if not validate_and_set_config_value(config, name, value):
            limit = "has a value that LMCache does not take" if hasattr(config, name) else "is no setting of LMCache's"
            raise WrongSetting(name, value, limit)
    for name in _UNSUITED:
        if getattr(config, name, False):
            raise WrongSetting(name, True, "blocks go to LMCache and come back whole, when they are asked for")
    if config.remote_serde not in (None, "naive"):
        raise WrongSetting("remote_serde", config.remote_serde, "changes bits: only naive leaves them as they are")
    wanted = config.max_local_cpu_size
    if wanted * 2**30 > free_bytes:
        raise WrongSetting("max_local_cpu_size", wanted, f"GiB: the host has {free_bytes / 2**30:.1f} left")
    config.chunk_size = _CHUNK
    return config


class _Rows(GPUConnectorInterface):
    """Chunks go to one row of host memory, and come from it."""

    def __init__(self, row: np.ndarray) -> None:
        self._row = torch.from_numpy(row)

    def from_gpu(self, memory_obj: Any, start: int, end: int, **kwargs: Any) -> None:
        """To LMCache."""
        memory_obj.tensor.view(-1).copy_(self._row)

    def to_gpu(self, memory_obj: Any, start: int, end: int, **kwargs: Any) -> None:
        """From LMCache."""
        self._row.copy_(memory_obj.tensor.view(-1))

    def batched_from_gpu(self, memory_objs: Any, starts: list[int], ends: list[int], **kwargs: Any) -> None:
        """To LMCache: one chunk at a time is asked for."""
        for memory_obj in memory_objs:
            self.from_gpu(memory_obj, 0, _CHUNK)

    def batched_to_gpu(self, memory_objs: Any = None, starts: Any = None, ends: Any = None, **kwargs: Any) -> None:
        """From LMCache."""
        for memory_obj in memory_objs:
            self.to_gpu(memory_obj, 0, _CHUNK)

    def get_shape(self, num_tokens: int) -> torch.Size:
        """Of one chunk."""
        return torch.Size([1, 1, num_tokens, self._row.numel() // _CHUNK])
