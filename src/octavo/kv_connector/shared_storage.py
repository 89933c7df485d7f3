"""`shared_storage`: blocks in a folder that any number of engines share. vLLM's ExampleConnector by alias.

Owns the options and the scheduler's half: which blocks have a file. The files are `worker.block_files`'. Invariant:
names hold all that a block's bytes follow from, so engines of other models or settings may share the folder: they find
nothing of each other.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.config.kv_transfer import EXTRA, Extra, KVTransferConfig, refuse
from octavo.kv_connector import Connector
from octavo.kv_connector.guard import Troubles
from octavo.kv_connector.keys import MAX_HEADER_BYTES, Pair, file_path
from octavo.kv_connector.lookups import LookedUpHere
from octavo.kv_connector.orders import EngineSide, Order, Report
from octavo.kv_connector.stored import StoredConnector

if TYPE_CHECKING:
    from octavo.kv_connector.worker import WorkerConnector
    from octavo.kv_connector.worker.cache_bytes import CacheBytes

_SECRET_FILE = "octavo.key"
_SECRET_BYTES = 32
_MAX_USELESS = 1 << 16  # keys that are remembered


class SharedStorage:
    """See Kind."""

    shares_names = True
    moves_states = True

    def __init__(self, transfer: KVTransferConfig) -> None:
        """See Kind."""
        extra, self._transfer = Extra(transfer.extra), transfer
        extra.check_keys(("shared_storage_path", "max_bytes", "num_threads", "prompt_only"))
        path = extra.text("shared_storage_path", "")
        if not path:
            raise refuse(f"{EXTRA}.shared_storage_path", None, "must name a folder")
        self._folder = Path(path)
        self._max_bytes = extra.size("max_bytes", 0, low=0)
        self._num_threads = extra.number("num_threads", 2, 1, 64)
        self._prompt_only = extra.flag("prompt_only", False)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._secret = folder_secret(self._folder)
        except OSError as error:
            limit = f"cannot be used: {error.strerror}"
            raise refuse(f"{EXTRA}.shared_storage_path", path, limit, "give a folder that can be written") from None

    def secret(self) -> bytes:
        """See Kind. The folder's own, so that all who may read the folder name blocks alike."""
        return self._secret

    def scheduler_half(self, engine: EngineSide) -> Connector:
        """See Kind."""
        check_room(f"{EXTRA}.max_bytes", self._max_bytes, engine.block_bytes)
        transfer = self._transfer
        files = LookedUpFiles(str(self._folder), transfer.lookup, Troubles(transfer.kv_connector))
        return StoredConnector(engine, files, prompt_only=self._prompt_only)

    def worker_half(self, cache: CacheBytes, identity: str) -> WorkerConnector:
        """See Kind."""
        from octavo.kv_connector.worker.block_files import BlockFiles
        from octavo.kv_connector.worker.file_store import FileHandler
        from octavo.kv_connector.worker.mover import Mover

        transfer, troubles = self._transfer, Troubles(self._transfer.kv_connector)
        files = BlockFiles(
            self._folder,
            cache.block_bytes,
            max_bytes=self._max_bytes,
            label=identity,
            troubles=troubles,
            furnish=lambda: write_secret(self._folder, self._secret),
        )
        # one thread reads a page cache at a twentieth of a GPU's bus; steps and others need processors too
        num_readers = min(8, (os.cpu_count() or 1) // 2)
        handler, count = FileHandler(cache, files, num_readers), self._num_threads
        return Mover(handler, cache.block_bytes, count, timeout=transfer.timeout, troubles=troubles)


class FoundFiles:
    """Which keys have a file in a folder that can be used, as far as it is known without a look into it.

    The folder may be elsewhere, and say nothing for long.
    """

    def __init__(self, folder: str) -> None:
        """Nothing is known to be of no use."""
        self._folder = folder
        self._useless: set[bytes] = set()  # keys whose files brought nothing, and are there
        self._under_way: dict[int, tuple[bool, list[Pair]]] = {}  # order -> whether it is a load, what it moves

    def __contains__(self, key: object) -> bool:
        """Whether there is one. Another engine may add and remove files at any time."""
        assert isinstance(key, bytes), "files are named by keys"
        return key not in self._useless and self._is_file(key)

    def _is_file(self, key: bytes) -> bool:
        try:
            return stat.S_ISREG(os.stat(file_path(self._folder, key)).st_mode)
        except OSError:
            return False

    def ordered(self, number: int, pairs: Sequence[Pair], *, is_load: bool) -> None:
        """An order that reads or writes these files begins."""
        self._under_way[number] = is_load, list(pairs)

    def ended(self, number: int, report: Report | None) -> None:
        """See Index. A file that brought nothing and is still there could not be removed: it is asked no more."""
        is_load, pairs = self._under_way.pop(number, (False, []))
        if report is None:
            return
        if not is_load and not report.failed:
            self._useless.difference_update(pair.key for pair in pairs)
        missed = set(report.missed) if is_load else set()
        for pair in pairs:
            if pair.block in missed and len(self._useless) < _MAX_USELESS and self._is_file(pair.key):
                self._useless.add(pair.key)


class LookedUpFiles(LookedUpHere):
    """What has a file, by a thread that looks at the folder."""

    def __init__(self, folder: str, limit: float, troubles: Troubles) -> None:
        """See LookedUpHere."""
        self._files = FoundFiles(folder)
        super().__init__(self._files.__contains__, limit, troubles)
        self._moving: dict[int, tuple[bool, list[Pair]]] = {}  # order -> whether it is a load, what it moves

    def ordered(self, number: int, pairs: Sequence[Pair], *, is_load: bool) -> None:
        """An order that reads or writes these files begins."""
        self._moving[number] = is_load, list(pairs)

    def ended(self, number: int, report: Report | None) -> None:
        """See Index. Whether a file that brought nothing is still there is looked at by the thread too."""
        is_load, pairs = self._moving.pop(number, (False, []))
        if report is None or not pairs:
            return
        missed = set(report.missed) if is_load else set()
        if is_load:
            self._learn([pair.key for pair in pairs if pair.block in missed], [False] * len(pairs))
        elif not report.failed:
            self._learn([pair.key for pair in pairs], [True] * len(pairs))
        if missed or not is_load:
            self.questions.run(lambda: self._note(number, pairs, report, is_load=is_load))

    def _note(self, number: int, pairs: Sequence[Pair], report: Report, *, is_load: bool) -> None:
        self._files.ordered(number, pairs, is_load=is_load)
        self._files.ended(number, report)

    def order_load(self, number: int, pairs: Sequence[Pair]) -> tuple[Order | None, list[int]]:
        """See Index."""
        self.ordered(number, pairs, is_load=True)
        return super().order_load(number, pairs)

    def order_save(self, number: int, pairs: Sequence[Pair]) -> Order:
        """See Index."""
        self.ordered(number, pairs, is_load=False)
        blocks, keys = [pair.block for pair in pairs], [pair.key for pair in pairs]
        return Order(number=number, is_load=False, blocks=blocks, keys=keys)


def check_room(name: str, max_bytes: int, block_bytes: int) -> None:
    """Raise ConfigError for the setting `name` where `max_bytes`, 0: no limit, leave no room for one block's file."""
    least = block_bytes + MAX_HEADER_BYTES
    if 0 < max_bytes < least:
        raise refuse(name, max_bytes, f"a block's file has up to {least} bytes", "raise it, or 0: no limit")


def folder_secret(folder: Path) -> bytes:
    """The key of a folder's names, made by whoever comes first. Raises OSError."""
    path = folder / _SECRET_FILE
    if not path.exists():
        write_secret(folder, secrets.token_bytes(_SECRET_BYTES))
    if not path.is_file():
        raise OSError(0, f"{_SECRET_FILE} in it is no file")
    with path.open("rb") as file:  # whoever shares the folder may have put anything there: its size comes first
        size = os.fstat(file.fileno()).st_size
        found = file.read(_SECRET_BYTES)
    if size != _SECRET_BYTES or len(found) != _SECRET_BYTES:
        raise OSError(0, f"{_SECRET_FILE} in it has {size} bytes, not {_SECRET_BYTES}: take that file away")
    return found


def write_secret(folder: Path, secret: bytes) -> None:
    """Give a folder the key of its names, unless it has one. Raises OSError."""
    temporary = folder / f".{_SECRET_FILE}.{secrets.token_hex(8)}"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(secret)
    with contextlib.suppress(FileExistsError):
        os.link(temporary, folder / _SECRET_FILE)  # whole, or somebody else's
    temporary.unlink()
