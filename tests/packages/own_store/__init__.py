"""A connector out of tree: blocks in a dictionary of the process."""

from __future__ import annotations

from octavo.config.kv_transfer import Extra, KVTransferConfig
from octavo.kv_connector.store import StoreKind


class Dictionary(StoreKind):
    kept: dict[str, bytes] = {}

    def __init__(self, transfer: KVTransferConfig) -> None:
        super().__init__(transfer)
        extra = Extra(transfer.extra)
        extra.check_keys(("most",))
        self._most = extra.number("most", 1000, 1)

    def has(self, key: str) -> bool:
        return key in self.kept

    def get(self, key: str) -> bytes | None:
        return self.kept.get(key)

    def put(self, key: str, data: bytes) -> None:
        while len(self.kept) >= self._most:
            del self.kept[next(iter(self.kept))]
        self.kept[key] = data
