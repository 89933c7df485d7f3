"""What Triton calls itself in the names of its kept kernels: a sum of its own files, 400 MB, kept on disk.

Owns what a kept name follows from. Does not know kernels. Invariant: the name is Triton's own, of files whose paths,
sizes and times of change are those of now.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import triton
from triton.runtime import cache

from octavo.ops.compile import disk_cache


def name_compiler() -> None:
    """Let Triton know its name, which a process's first launch asks for: kept, or summed up now in 0.3 to 0.8 s."""
    names: Any = vars(cache)
    own = names.get("triton_key")
    if own is None or hasattr(own, "is_cached"):  # another Triton, or one that knows
        return
    name = str(disk_cache.find("triton", [str(triton.__version__), disk_cache.sum_of(repr(_files()))], own))

    def triton_key() -> str:
        return name

    triton_key.is_cached = True  # type: ignore[attr-defined]
    names["triton_key"] = triton_key


def _files() -> list[tuple[str, int, int]]:
    """Path, size and time of the last change of all that Triton consists of."""
    found = []
    for folder, inner, files in os.walk(Path(triton.__file__).parent):
        inner[:] = [name for name in inner if name != "__pycache__"]
        for path in (os.path.join(folder, name) for name in files):
            facts = os.stat(path)
            found.append((path, facts.st_size, facts.st_mtime_ns))
    return sorted(found)
