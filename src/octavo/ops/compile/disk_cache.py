"""What is kept on disk for later starts: files of the user's cache folder, each with the key that it was made for.

Owns the file's form, which a sum guards, that it is whole or not there, whose it may be, and which files are removed.
Does not know what is kept, as compiled kernels, or what makes a key. Invariant: what is read under a key was written
under that key, unchanged, and by nobody but this user or the system's.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import stat
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton

_LOG = logging.getLogger(__name__)
_SYSTEM = 0  # the user whose files are trusted beside one's own
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_MAX_FILES, _MAX_SECONDS = 256, 90 * 24 * 3600  # in a folder, and since a file was last used


def versions() -> list[str]:
    """Of what compiles: machine code of one is not another's."""
    return [str(torch.__version__), str(torch.version.git_version), str(torch.version.cuda), str(triton.__version__)]


def folder(part: str) -> Path:
    """Where compiled kernels of a part of the program are kept; XDG_CACHE_HOME names the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "octavo" / part


def path_of(part: str, key: Any) -> Path:
    """The file of a key, which is made of JSON's types."""
    return folder(part) / f"{sum_of(json.dumps(key))}.json"


def find(part: str, key: Any, make: Callable[[], Any]) -> Any:
    """The body kept under a key, or what `make` gives now, which is kept. Keys and bodies are made of JSON's types."""
    path = path_of(part, key)
    try:
        return read(path, key)
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        _LOG.warning("the kept file %s is damaged or not one's own (%s): it is made anew", path, error)
    body = make()
    try:
        write(path, key, body)
    except OSError as error:
        _LOG.warning("the file %s cannot be kept: %s", path, error)
    return body


def has(part: str, key: Any) -> bool:
    """Whether there is a file for a key, which counts as used now."""
    try:
        os.utime(path_of(part, key))
    except OSError as error:
        return isinstance(error, PermissionError)  # in a folder that only others may write to
    return True


def write(path: Path, key: Any, body: Any) -> None:
    """Keep a body, made of JSON's types as its key is: whole or not at all. Raises OSError."""
    text = json.dumps([key, body])
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(f"{sum_of(text)}\n{text}\n")
        os.replace(temporary, path)
    except OSError:  # as of a full disk
        os.unlink(temporary)
        raise
    _prune(path.parent)


def _prune(folder: Path) -> None:
    """Remove the files that were not used for _MAX_SECONDS, and those used longest ago beyond the _MAX_FILES newest.

    Processes may do so at the same time: one that finds no file compiles its kernel anew.
    """
    used = []
    for file in folder.iterdir():
        with contextlib.suppress(OSError):
            used.append((file.stat().st_mtime, file))
    used.sort(reverse=True)
    oldest = time.time() - _MAX_SECONDS
    for place, (last, file) in enumerate(used):
        if place >= _MAX_FILES or last < oldest:
            with contextlib.suppress(OSError):
                file.unlink()


def read(path: Path, key: Any) -> Any:
    """The body kept under a key. Raises FileNotFoundError, other OSErrors, or ValueError where the file is damaged.

    PermissionError where another user could have written it: machine code runs with this user's rights.
    """
    with path.open(encoding="utf-8") as file:
        facts = os.fstat(file.fileno())
        if facts.st_uid not in (_SYSTEM, os.geteuid()) or facts.st_mode & _OTHERS_WRITE:
            raise PermissionError("another user may have written it")
        lines = file.read().split("\n")
    if len(lines) < 2 or lines[0] != sum_of(lines[1]):
        raise ValueError("its sum is another")
    cached_key, body = json.loads(lines[1])
    if cached_key != key:
        raise ValueError("its key is another")
    with contextlib.suppress(OSError):  # of a folder that only others may write to
        os.utime(path)  # by which `_prune` knows what is used
    return body


def sum_of(text: str | bytes) -> str:
    """SHA-256, as hexadecimal digits."""
    return hashlib.sha256(text.encode() if isinstance(text, str) else text).hexdigest()
