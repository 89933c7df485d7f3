"""ModelFiles: whether a model's files are those that the server started with.

Owns the list of files that decide what a model says, and what is remembered of them: size, time of change and inode.
Knows no engine. Invariant: nothing is read but directories' entries; a file that was replaced, changed, added or
removed is noticed, unless its size, its times and its inode were forged.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

_SUFFIXES = (".safetensors", ".safetensors.index.json", ".jinja", ".model")
_NAMES = ("config.json", "generation_config.json", "special_tokens_map.json", "chat_template.json")
_PREFIX = "tokenizer"

_Mark = tuple[int, int, int]


class ModelFiles:
    """The files of some folders, as they were when this was made."""

    def __init__(self, folders: Iterable[Path]) -> None:
        """Links are followed: the hub's cache consists of them."""
        self._folders = list(dict.fromkeys(folders))
        self._marks = self._look()

    def changes(self) -> str:
        """What is different now, for an error; empty if nothing is."""
        now = self._look()
        if now == self._marks:
            return ""
        names = sorted(path for path in now.keys() | self._marks.keys() if now.get(path) != self._marks.get(path))
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        return f"the model's files have changed since the server's start: {shown}"

    def _look(self) -> dict[str, _Mark | None]:
        marks: dict[str, _Mark | None] = {}
        for folder in self._folders:
            try:
                names = os.listdir(folder)
            except OSError:
                marks[str(folder)] = None
                continue
            for name in names:
                if name.endswith(_SUFFIXES) or name in _NAMES or name.startswith(_PREFIX):
                    path = os.path.join(folder, name)
                    marks[path] = _mark(path)
        return marks


def _mark(path: str) -> _Mark | None:
    try:
        info = os.stat(path)
    except OSError:
        return None
    return info.st_size, info.st_mtime_ns, info.st_ino
