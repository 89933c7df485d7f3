"""Which tensors outlive the work that made them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class _Watch(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[str, weakref.ref[torch.Tensor]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        for result in results if isinstance(results, list | tuple) else [results]:
            is_new = func is torch.ops.aten.lift_fresh.default  # what torch.tensor made of numbers
            if isinstance(result, torch.Tensor) and (is_new or not _is_view(result, args)):
                self.made.append((str(func), weakref.ref(result)))
        return results


def _is_view(result: torch.Tensor, args: Any) -> bool:
    """Whether it lies in the memory of an argument."""
    place = result.untyped_storage().data_ptr()
    return any(isinstance(arg, torch.Tensor) and arg.untyped_storage().data_ptr() == place for arg in args)


def with_survivors(call: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, list[str]]:
    """What a call gives, and the operator behind each other tensor that it made and that is still there."""
    with _Watch() as watch:
        result = call()

    def left() -> list[str]:
        return [name for name, made in watch.made if made() is not None and made() is not result]

    if left():  # in a cycle perhaps: a look at all that a process holds takes longer than most calls
        gc.collect()
    return result, left()
