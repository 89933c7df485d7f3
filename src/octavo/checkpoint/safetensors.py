"""Checkpoint: the tensors in a folder's safetensors files.

Owns which files belong to a checkpoint, the checks of their headers before a byte of data is trusted, and
reads. Does not know models: a name is a string. Nothing is unpickled or memory-mapped (a file that shrinks is
an error, not a bus error). Invariant: when the constructor returns, every tensor has one place, inside its
file, of the size that its shape and dtype say.
"""

from __future__ import annotations

import math
import os
import re
import stat
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from octavo.checkpoint.config_reader.fields import parse_json, read_json
from octavo.config.quoted import MAX_NAME, plain, quoted

MAX_HEADER_BYTES = 100 << 20
MAX_DIMENSION = 1 << 40
MAX_DIMENSIONS = 16  # sizes of a shape: a product of more is slow, and holds the interpreter meanwhile
_MAX_EXPERTS = 1 << 16  # of a tensor that holds a layer's experts
INDEX_NAME = "model.safetensors.index.json"

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
INTEGER_DTYPES = {"I64": torch.int64, "I32": torch.int32}  # of parameters that are declared as integers
_ITEM_SIZES = {
    name: size
    for size, names in {
        8: ("F64", "I64", "U64"),
        4: ("F32", "I32", "U32"),
        2: ("F16", "BF16", "I16", "U16"),
        1: ("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0"),
    }.items()
    for name in names
}


class Entry(msgspec.Struct, frozen=True):
    """One tensor of a checkpoint."""

    shard: int  # number of its file
    dtype: str  # safetensors' name
    shape: tuple[int, ...]
    start: int  # byte offset in the file
    size: int  # bytes


class Checkpoint:
    """The safetensors files of one folder, open for reading until `close`."""

    def __init__(self, folder: Path) -> None:
        """Open and check every shard. Raises ValueError, one line, with the file and what is wrong with it."""
        index = _read_index(folder)
        names = sorted(set(index.values())) if index is not None else _find_shards(folder)
        self.entries: dict[str, Entry] = {}  # in order of file and offset
        self._paths = [_shard_path(folder, name) for name in names]
        self._files: list[int] = []
        self._stats: list[os.stat_result] = []
        try:
            for shard, path in enumerate(self._paths):
                self._files.append(_open_regular(path))
                self._stats.append(os.fstat(self._files[shard]))
                for name, entry in _read_header(self._files[shard], self._stats[shard].st_size, path, shard).items():
                    if name in self.entries:
                        other = self._paths[self.entries[name].shard].name
                        raise ValueError(f"{folder}: {_tensor(name)} is in two shards: {other} and {names[shard]}")
                    self.entries[name] = entry
            for name, shard_name in (index or {}).items():
                if name not in self.entries or names[self.entries[name].shard] != shard_name:
                    raise ValueError(f"{folder / INDEX_NAME}: {_tensor(name)} is not in {plain(shard_name)}")
        except ValueError:
            self.close()
            raise

    def rename(self, prefixes: Mapping[str, str]) -> None:
        """Call tensors whose names begin with a key of `prefixes` by that prefix's value instead.

        Raises ValueError where two tensors would have one name.
        """
        if not prefixes:
            return
        entries: dict[str, Entry] = {}
        for name, entry in self.entries.items():
            prefix = next((prefix for prefix in prefixes if name.startswith(prefix)), "")
            known = prefixes.get(prefix, "") + name[len(prefix) :]
            if known in entries:
                raise ValueError(f"{self._paths[entry.shard]}: {_tensor(known)} is there under two names")
            entries[known] = entry
        self.entries = entries

    def unstack(self, stacks: Mapping[str, Sequence[str]]) -> None:
        """Show tensors [experts, rows, columns], which names with a `*` for a layer's number name, as their pieces.

        stacks: name -> of the pieces into which each expert's rows are cut, in order; a second `*` is the expert.
        """
        patterns = {re.compile(re.escape(name).replace(r"\*", r"(\d+)")): own for name, own in stacks.items()}
        entries: dict[str, Entry] = {}
        for name, entry in self.entries.items():
            found = ((pattern.fullmatch(name), own) for pattern, own in patterns.items())
            match, own = next(((match, own) for match, own in found if match), (None, ()))
            if match is None or len(entry.shape) != 3 or entry.shape[0] > _MAX_EXPERTS or entry.shape[1] % len(own):
                entries[name] = entry
                continue
            count, shape = entry.shape[0], (entry.shape[1] // len(own), entry.shape[2])
            size = entry.size // count // len(own)
            for index in range(count * len(own)):
                layer, rest = match[1], own[index % len(own)]
                piece = rest.replace("*", layer, 1).replace("*", str(index // len(own)), 1)
                if piece in self.entries or piece in entries:
                    raise ValueError(f"{self._paths[entry.shard]}: {_tensor(piece)} is there under two names")
                entries[piece] = msgspec.structs.replace(
                    entry, shape=shape, start=entry.start + index * size, size=size
                )
        self.entries = entries

    def path(self, name: str) -> Path:
        """The file that holds a tensor."""
        return self._paths[self.entries[name].shard]

    def read(self, name: str, out: torch.Tensor) -> None:
        """Read a tensor into `out`, contiguous CPU memory of its shape; converts where `out` has another dtype."""
        entry = self.entries[name]
        stored = {**DTYPES, **INTEGER_DTYPES}[entry.dtype]
        tensor = out if out.dtype == stored else torch.empty(entry.shape, dtype=stored)
        assert out.shape == entry.shape and out.is_contiguous(), f"{name}: wrong memory to read into"
        self.read_bytes(name, 0, tensor.view(-1).view(torch.uint8))
        if tensor is not out:
            out.copy_(tensor)

    def read_bytes(self, name: str, begin: int, out: torch.Tensor) -> None:
        """Read a tensor's bytes as stored, from one on, into all of `out`, [bytes] uint8 of CPU memory.

        From any thread. Raises ValueError for a file that ends or fails.
        """
        entry, target = self.entries[name], memoryview(out.numpy())  # type: ignore[arg-type]
        assert begin + len(target) <= entry.size, f"{name}: has fewer bytes"
        path, done = self._paths[entry.shard], 0
        while done < len(target):
            try:
                count = os.preadv(self._files[entry.shard], [target[done:]], entry.start + begin + done)
            except OSError as error:
                raise ValueError(f"{path}: cannot read: {error.strerror}") from error
            if count == 0:
                raise ValueError(f"{path}: ends in the middle of a tensor: the file changed while it was read")
            done += count

    def check_unchanged(self) -> None:
        """Raise ValueError if a file was written to since it was opened."""
        for path, file, before in zip(self._paths, self._files, self._stats, strict=True):
            now = os.fstat(file)
            if (now.st_size, now.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
                raise ValueError(f"{path}: the file changed while it was read")

    def close(self) -> None:
        """Close the files."""
        while self._files:
            os.close(self._files.pop())


def _read_index(folder: Path) -> dict[str, str] | None:
    """Tensor name -> shard name, or None where the checkpoint has no index."""
    if "\0" in str(folder):
        raise ValueError(f"{quoted(str(folder), MAX_NAME)}: no such folder: no path has a NUL in it")
    path = folder / INDEX_NAME
    if not path.exists():
        return None
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(v, str) for v in weight_map.values()):
        raise ValueError(f"{path}: weight_map must map tensor names to shard names")
    return weight_map


def _find_shards(folder: Path) -> list[str]:
    """The safetensors files of a folder without an index."""
    names = sorted(os.listdir(folder))
    shards = [name for name in names if name.endswith(".safetensors") and not name.startswith("consolidated")]
    if "model.safetensors" in shards:
        return ["model.safetensors"]
    if shards:
        return shards
    others = [name for name in names if name.endswith((".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5"))]
    found = f", found {', '.join(others[:3])}" if others else ""
    raise ValueError(f"{folder}: no *.safetensors file: only safetensors is loaded{found}")


def _shard_path(folder: Path, name: str) -> Path:
    """The real path of a shard: in the folder, or in the blobs of the hub cache that the folder is in."""
    if name != os.path.basename(name) or "\\" in name or "\0" in name or not name.endswith(".safetensors"):
        raise ValueError(
            f"{folder}: shard name not allowed: {quoted(name, MAX_NAME)} (a plain *.safetensors file name is needed)"
        )
    root = folder.resolve()
    try:
        path = (folder / name).resolve(strict=True)
    except FileNotFoundError:
        raise ValueError(f"{folder}: missing shard {quoted(name, MAX_NAME)}") from None
    except OSError as error:
        raise ValueError(f"{folder}: cannot read {quoted(name, MAX_NAME)}: {error.strerror}") from error
    except RuntimeError as error:
        raise ValueError(f"{folder}: cannot read {quoted(name, MAX_NAME)}: {str(error)[:300]}") from error
    in_cache = root.parent.name == "snapshots" and path.parent == root.parent.parent / "blobs"
    if path.parent != root and not in_cache:
        raise ValueError(
            f"{folder}: shard name not allowed: {quoted(name, MAX_NAME)} is a link to {path}, out of the folder"
        )
    return path


def _open_regular(path: Path) -> int:
    """A file descriptor for reading. A FIFO or a device is refused, and does not block."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise ValueError(f"{path}: cannot read: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise ValueError(f"{path}: cannot read: not a regular file")
    return file


def _read_header(file: int, file_size: int, path: Path, shard: int) -> dict[str, Entry]:
    """The entries of one file, by offset. Format: 8 bytes little-endian header length, JSON, data."""
    length = int.from_bytes(os.pread(file, 8, 0), "little") if file_size >= 8 else 0
    if not 2 <= length <= min(MAX_HEADER_BYTES, file_size - 8):
        raise ValueError(
            f"{path}: header length {length} does not fit: the file has {file_size} bytes, the limit is "
            f"{MAX_HEADER_BYTES}"
        )
    try:
        header = parse_json(os.pread(file, length, 8).decode(), _unique)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: header is not valid: {str(error)[:300]}") from error
    if not isinstance(header, dict):
        raise ValueError(f"{path}: header is not a JSON object")
    entries = {}
    for name, fields in header.items():
        if name != "__metadata__":
            entries[name] = _entry(name, fields, 8 + length, path, shard)
    entries = dict(sorted(entries.items(), key=lambda item: (item[1].start, item[1].size)))
    end = 8 + length
    for name, entry in entries.items():
        if entry.start != end:
            what = "overlaps the one before it" if entry.start < end else "leaves a gap before it"
            raise ValueError(f"{path}: header: {_tensor(name)} {what}")
        end += entry.size
    if end != file_size:
        raise ValueError(f"{path}: header: tensors end at byte {end}, the file has {file_size} bytes")
    return entries


def _unique(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object's pairs as a dict; a key that comes twice is a ValueError."""
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"key {quoted(key, MAX_NAME)} comes twice")
        result[key] = value
    return result


def _tensor(name: str) -> str:
    """A tensor, as errors call it."""
    return f"tensor {quoted(name, MAX_NAME)}"


def _entry(name: str, fields: object, data_start: int, path: Path, shard: int) -> Entry:
    """One tensor's header entry, checked."""
    where = f"{path}: header: {_tensor(name)}"
    if not isinstance(fields, dict) or set(fields) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{where} must have dtype, shape and data_offsets")
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _ITEM_SIZES:
        raise ValueError(f"{where} has unknown dtype {quoted(dtype)}")
    fault = fault_of_shape(shape, least=0)  # files of some models hold tensors without elements, which none reads
    if fault:
        raise ValueError(f"{where} has shape {quoted(shape)}, {fault}")
    if not isinstance(offsets, list) or len(offsets) != 2 or any(type(n) is not int or n < 0 for n in offsets):
        raise ValueError(f"{where} has data_offsets {quoted(offsets)}, two numbers of bytes are needed")
    begin, end = offsets
    size = math.prod(shape) * _ITEM_SIZES[dtype]
    if end - begin != size:
        raise ValueError(
            f"{where}: {dtype} {quoted(shape, MAX_NAME)} is {quoted(size)} bytes, not {quoted(end - begin)}"
        )
    return Entry(shard, dtype, tuple(shape), data_start + begin, size)


def fault_of_shape(shape: object, least: int = 1) -> str:
    """What is wrong with a shape that came from outside; empty: nothing, and its product is quickly made.

    least: of each size.
    """
    if not isinstance(shape, list | tuple):
        return "a list of sizes is needed"
    if len(shape) > MAX_DIMENSIONS:
        return f"{len(shape)} sizes: a tensor has at most {MAX_DIMENSIONS}"
    if any(type(n) is not int or not least <= n <= MAX_DIMENSION for n in shape):
        kind = "positive" if least else "natural"
        return f"all sizes must be {kind} integers of at most {MAX_DIMENSION}"
    return ""
