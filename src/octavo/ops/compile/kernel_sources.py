"""Where the source of a kernel ends, which Triton asks of each one that is imported.

Owns the answer for this package's kernels: Python's `inspect` takes all of their lines apart for it, three quarters of
what their import takes. Invariant: the answer is that of `inspect.getsourcelines`, for names of kept kernels follow
from it; functions of others are left to `inspect`.
"""

from __future__ import annotations

import inspect
import sys
import types
from typing import Any

_CLOSING = (")", "]", "}")  # a line that begins so goes on with a statement above, however little it is indented


def read_quickly() -> None:
    """Let Triton ask here, in this process. With a Triton that asks in another way nothing changes."""
    import triton  # and nothing within it: another thread may import it too, and a module waits for its package

    asking: Any = sys.modules.get(f"{triton.__name__}.runtime.jit")
    if getattr(asking, "inspect", None) is inspect:
        asking.inspect = _Inspect()


class _Inspect:
    """In place of that module."""

    def __getattr__(self, name: str) -> Any:
        """All else of it."""
        return getattr(inspect, name)

    def getsourcelines(self, function: Any) -> tuple[list[str], int]:
        """See `source_lines`."""
        return source_lines(function)


def source_lines(function: Any) -> tuple[list[str], int]:
    """The lines of a function from its first decorator on, and the number of the first one."""
    is_own = isinstance(function, types.FunctionType) and function.__module__.partition(".")[0] == "octavo"
    if not is_own or hasattr(function, "__wrapped__"):
        return inspect.getsourcelines(function)
    lines, first = inspect.findsource(function)
    return lines[first : _end(lines, first, function.__code__)], first + 1


def _end(lines: list[str], first: int, code: types.CodeType) -> int:
    """Behind the last line: from that of the last instruction on, all that is indented further than the first line."""
    outside = _indentation(lines[first])
    end = max(line for _, _, line in code.co_lines() if line)
    for place in range(end, len(lines)):
        text = lines[place].strip()
        if text and _indentation(lines[place]) <= outside and not text.startswith(_CLOSING):
            break
        end = place + 1 if text else end
    return end


def _indentation(line: str) -> int:
    return len(line) - len(line.lstrip())
