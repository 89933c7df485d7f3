"""`host`: blocks that leave the device's cache stay in host memory, and in files behind it.

vLLM's OffloadingConnector by alias.

Owns the options, vLLM's, and the scheduler's half: which block is in which slot of the host's memory, who gives way,
and what is worth keeping. The worker's half copies, and moves what gives way to files. Invariant: a slot that an order
reads or writes is given to nobody else before the order has ended.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.cache.groups import CacheGroup
from octavo.config.kv_transfer import EXTRA, Extra, KVTransferConfig, refuse
from octavo.config.settings import ConfigError
from octavo.kv_connector import Connector
from octavo.kv_connector.eviction import EVICTION, Eviction
from octavo.kv_connector.guard import Troubles
from octavo.kv_connector.keys import Pair
from octavo.kv_connector.orders import EngineSide, Order, Report
from octavo.kv_connector.peers.description import GroupDescription
from octavo.kv_connector.shared_storage import LookedUpFiles, check_room, folder_secret, write_secret
from octavo.kv_connector.stored import Index, StoredConnector

if TYPE_CHECKING:
    from octavo.kv_connector.worker import WorkerConnector
    from octavo.kv_connector.worker.cache_bytes import CacheBytes

IN_FILE = -1  # the slot of a block that a file holds
_KEYS = (
    "cpu_bytes_to_use",
    "num_cpu_blocks",
    "block_size",
    "blocks_per_chunk",
    "eviction_policy",
    "store_threshold",
    "offload_prompt_only",
    "storage_path",
    "storage_bytes",
)
_MAX_COUNTED = 1 << 16  # keys whose uses are remembered before they are stored


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class HostOptions:
    """kv_connector_extra_config of `host`, read."""

    num_bytes: int  # of host memory, for one worker; 0: num_chunks says how much
    num_chunks: int
    chunk_tokens: int  # of each of them; 0: chunk_blocks of the cache
    chunk_blocks: int
    eviction_policy: str
    store_threshold: int  # times that a block has been computed or loaded when it is stored
    prompt_only: bool
    storage_path: str  # of the files behind the memory; empty: none
    storage_bytes: int  # 0: no limit


def _read(transfer: KVTransferConfig) -> HostOptions:
    extra = Extra(transfer.extra)
    extra.check_keys(_KEYS)
    num_chunks, chunk_tokens = extra.number("num_cpu_blocks", 0, 1), extra.number("block_size", 0, 1)
    for one, other in (("num_cpu_blocks", "cpu_bytes_to_use"), ("block_size", "blocks_per_chunk")):
        if None not in (transfer.extra.get(one), transfer.extra.get(other)):
            raise refuse(f"{EXTRA}.{one}", transfer.extra[one], f"says what {other} says", "leave one of them out")
    if transfer.extra.get("storage_bytes") is not None and not transfer.extra.get("storage_path"):
        limit = "is the size of files, and storage_path names no folder for them"
        raise refuse(f"{EXTRA}.storage_bytes", transfer.extra["storage_bytes"], limit, "set storage_path, or drop it")
    return HostOptions(
        num_bytes=0 if num_chunks else extra.size("cpu_bytes_to_use", None),
        num_chunks=num_chunks,
        chunk_tokens=chunk_tokens,
        chunk_blocks=extra.number("blocks_per_chunk", 1, 1, 1 << 20),
        eviction_policy=extra.choice("eviction_policy", "lru", tuple(EVICTION)),
        store_threshold=extra.number("store_threshold", 0, 0, 1 << 20),
        prompt_only=extra.flag("offload_prompt_only", False),
        storage_path=extra.text("storage_path", ""),
        storage_bytes=extra.size("storage_bytes", 0, low=0),
    )


class Host:
    """See Kind."""

    shares_names = False  # but with files behind the memory
    moves_states = brings = True

    def __init__(self, transfer: KVTransferConfig) -> None:
        """See Kind."""
        self._options, self._transfer = _read(transfer), transfer
        self.shares_names = bool(self._options.storage_path)
        self._secret = b""
        if self._options.storage_path:
            folder = Path(self._options.storage_path)
            try:
                folder.mkdir(parents=True, exist_ok=True)
                self._secret = folder_secret(folder)
            except OSError as error:
                limit = f"cannot be used: {error.strerror}"
                raise refuse(f"{EXTRA}.storage_path", str(folder), limit, "give a folder that can be written") from None

    def secret(self) -> bytes:
        """See Kind. That of the files behind the memory: they outlive the engine."""
        return self._secret

    def scheduler_half(self, engine: EngineSide) -> Connector:
        """See Kind."""
        num_slots, size = self._num_slots(engine.block_bytes, engine.groups), engine.block_bytes
        if self._options.storage_path:
            check_room(f"{EXTRA}.storage_bytes", self._options.storage_bytes, size)
        most = max(group.parts.blocks for group in engine.groups if group.kind != "inputs")
        if num_slots <= most > 1:
            limit = f"a state of this model's layers takes {most} blocks of {size} bytes, beside K and V before it"
            raise self._refuse_size(limit, "raise it")
        transfer = self._transfer
        files = LookedUpFiles(self._options.storage_path, transfer.lookup, Troubles(transfer.kv_connector))
        index = _Slots(num_slots, size, self._options, files)
        return StoredConnector(engine, index, prompt_only=self._options.prompt_only)

    def worker_half(self, cache: CacheBytes, identity: str) -> WorkerConnector:
        """See Kind."""
        from octavo.kv_connector.worker.block_files import BlockFiles
        from octavo.kv_connector.worker.host_memory import HostHandler
        from octavo.kv_connector.worker.mover import Mover

        options, files, troubles = self._options, None, Troubles(self._transfer.kv_connector)
        if options.storage_path:
            files = BlockFiles(
                options.storage_path,
                cache.block_bytes,
                max_bytes=options.storage_bytes,
                label=identity,
                troubles=troubles,
                furnish=lambda: write_secret(Path(options.storage_path), self._secret),
            )
        num_slots = self._num_slots(cache.block_bytes, cache.description.groups)
        needed = options.num_bytes or num_slots * cache.block_bytes
        if needed > cache.free_bytes:
            limit = f"the host has {cache.free_bytes} bytes left"
            raise self._refuse_size(limit if options.num_bytes else f"takes {needed} bytes: {limit}", "lower it")
        try:
            handler = HostHandler(cache, num_slots, files)
        except RuntimeError as error:
            text = " ".join(str(error).split())[:120]
            limit = f"the host has no memory for {num_slots} blocks: {text}"
            raise self._refuse_size(limit, "lower it") from None
        # of two threads one orders the next copies while the other one's are on the bus
        count = 2 if cache.on_gpu else 1
        timeout = self._transfer.timeout
        return Mover(handler, cache.block_bytes, count, timeout=timeout, troubles=troubles, bring=handler.bring)

    def _num_slots(self, block_bytes: int, groups: Sequence[CacheGroup] | Sequence[GroupDescription]) -> int:
        """Blocks of the cache that there is room for. One moves and gives way by itself, whatever a chunk is."""
        options = self._options
        per_chunk = options.chunk_blocks
        if options.chunk_tokens:
            tokens = [group.block_size for group in groups if group.kind not in ("inputs", "state")]
            size = max(tokens or [group.block_size for group in groups])
            if options.chunk_tokens % size:
                limit = f"must be a multiple of the cache's blocks, of {size} tokens"
                raise refuse(f"{EXTRA}.block_size", options.chunk_tokens, limit, "change it, or --block-size")
            per_chunk = options.chunk_tokens // size
        count = options.num_chunks * per_chunk or options.num_bytes // block_bytes
        if not count:
            limit = f"a block of this model's cache has {block_bytes} bytes"
            raise self._refuse_size(limit, "raise it")
        return count

    def _refuse_size(self, limit: str, change: str) -> ConfigError:
        options = self._options
        if options.num_chunks:
            return refuse(f"{EXTRA}.num_cpu_blocks", options.num_chunks, limit, change)
        return refuse(f"{EXTRA}.cpu_bytes_to_use", options.num_bytes, limit, change)


class _Slots(Index):
    """Which key is in which slot, and which are in a file behind."""

    is_memory = True

    def __init__(self, num_slots: int, block_bytes: int, options: HostOptions, files: LookedUpFiles) -> None:
        self._block_bytes, self._folder, self._files = block_bytes, options.storage_path, files
        self.answers_later = bool(self._folder)
        self._threshold = options.store_threshold
        self._make_eviction: Callable[[], Eviction] = functools.partial(EVICTION[options.eviction_policy], num_slots)
        self._eviction: Eviction = self._make_eviction()
        self._slots: dict[bytes, int] = {}  # of keys whose bytes are there
        self._free = list(range(num_slots - 1, -1, -1))
        self._uses = collections.Counter[bytes]()  # of orders that read a slot, by key
        self._loads: dict[int, list[bytes]] = {}  # load -> the keys whose slots it reads
        self._saves: dict[int, list[tuple[bytes, int]]] = {}  # save -> what it fills
        self._seen = collections.OrderedDict[bytes, int]()  # how often a key that is not kept was wanted
        self._num_evicted = 0

    @property
    def num_evicted(self) -> int:
        return self._num_evicted

    @property
    def stored_bytes(self) -> int:
        return len(self._slots) * self._block_bytes

    @property
    def num_errors(self) -> int:
        return self._files.num_errors

    @property
    def num_late(self) -> int:
        return self._files.num_late

    def is_known(self, request_id: str, keys: Sequence[bytes], stops: Sequence[bool]) -> bool:
        asked = [(key, stop) for key, stop in zip(keys, stops, strict=True) if key not in self._slots]
        return self._files.is_known(request_id, [key for key, _ in asked], [stop for _, stop in asked])

    def forget(self, request_id: str) -> None:
        self._files.forget(request_id)

    @property
    def is_looking(self) -> bool:
        return self._files.is_looking

    def wait(self, seconds: float) -> bool:
        return self._files.wait(seconds)

    def close(self) -> None:
        self._files.close()

    def __contains__(self, key: object) -> bool:
        assert isinstance(key, bytes), "blocks are looked for by key"
        return key in self._slots or self._has_file(key)

    def _has_file(self, key: bytes) -> bool:
        return bool(self._folder) and key in self._files

    def order_load(self, number: int, pairs: Sequence[Pair]) -> tuple[Order | None, list[int]]:
        there: list[Pair] = []
        missing: list[int] = []
        for pair in pairs:  # one look at each: files come and go meanwhile
            if pair.key in self:
                there.append(pair)
            else:
                missing.append(pair.block)
        if not there:
            return None, missing
        kept = [pair.key for pair in there if pair.key in self._slots]
        for key in kept:
            self._eviction.use(key)
        self._uses.update(kept)
        self._loads[number] = kept
        self._files.ordered(number, [pair for pair in there if pair.key not in self._slots], is_load=True)
        return Order(
            number=number,
            is_load=True,
            blocks=[pair.block for pair in there],
            keys=[pair.key for pair in there],
            slots=[self._slots.get(pair.key, IN_FILE) for pair in there],
        ), missing

    def order_save(self, number: int, pairs: Sequence[Pair]) -> Order | None:
        taken: list[tuple[Pair, int]] = []
        spills: list[tuple[int, bytes]] = []
        own = {pair.key for pair in pairs}
        for pair in pairs:
            if not self._is_wanted(pair.key):
                continue
            slot = self._take_slot(pair.key, own, spills)
            if slot is None:
                break  # all slots are read or filled
            taken.append((pair, slot))
        if not taken:
            return None
        self._saves[number] = [(pair.key, slot) for pair, slot in taken]
        self._files.ordered(number, [Pair(slot, key) for slot, key in spills], is_load=False)
        return Order(
            number=number,
            is_load=False,
            blocks=[pair.block for pair, _ in taken],
            keys=[pair.key for pair, _ in taken],
            slots=[slot for _, slot in taken],
            spills=spills,
        )

    def _is_wanted(self, key: bytes) -> bool:
        if self._threshold <= 1:
            return True
        count = self._seen.pop(key, 0) + 1
        if count >= self._threshold:
            return True
        self._seen[key] = count
        while len(self._seen) > _MAX_COUNTED:
            self._seen.popitem(last=False)
        return False

    def _take_slot(self, key: bytes, own: set[bytes], spills: list[tuple[int, bytes]]) -> int | None:
        if self._free:
            return self._free.pop()
        gone = self._eviction.give_way(key, lambda other: not self._uses[other] and other not in own)
        if gone is None:
            return None
        slot = self._slots.pop(gone)
        self._num_evicted += 1
        if self._folder:
            spills.append((slot, gone))
        return slot

    def ended(self, number: int, report: Report | None) -> None:
        self._files.ended(number, report)
        for key in self._loads.pop(number, ()):
            self._uses[key] -= 1
            if not self._uses[key]:
                del self._uses[key]
        for key, slot in self._saves.pop(number, ()):
            if report is None or report.failed or key in self._slots:
                self._free.append(slot)
            else:
                self._slots[key] = slot
                self._eviction.add(key)

    def reset(self) -> bool:
        """Forget all slots; False while an order uses one. Files are named by what they follow from, and stay."""
        if self._loads or self._saves:
            return False
        self._free += self._slots.values()
        self._slots.clear()
        self._seen.clear()
        self._eviction = self._make_eviction()
        return True
