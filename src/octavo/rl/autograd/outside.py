"""What every operator's two directions have in common.

They run outside of autocast, with their inputs' own types; and what a backward gives has no gradient itself: who asks
for one is refused by the operator's name.
"""

from __future__ import annotations

import functools
import re
from typing import Any, cast

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # that operators compute in
_OF_CPU = DTYPES[:2]


def first_order(function: Any) -> Any:
    """A backward that autocast does not change, and whose results refuse a backward of their own.

    torch's `once_differentiable` refuses it only where the gradient that comes in requires one itself: that of a loss
    is a constant, and the second derivative by what a forward saved would be dropped in silence.
    """
    once = cast(Any, _Once).apply
    operator = re.sub(r"(?<=.)([A-Z])", r"_\1", function.__qualname__.split(".")[-2].lstrip("_")).lower()

    @functools.wraps(function)
    def call(ctx: Any, *grads: Any) -> Any:
        device = next((each.device.type for each in grads if each is not None), "cpu")
        with torch.no_grad(), torch.autocast(device, enabled=False):
            found = function(ctx, *grads)
        if not torch.is_grad_enabled():  # without create_graph
            return found
        if isinstance(found, Tensor):
            return once(found.detach().requires_grad_(), operator)
        return tuple(None if each is None else once(each.detach().requires_grad_(), operator) for each in found)

    call.operator = operator  # type: ignore[attr-defined]
    return call


class _Once(torch.autograd.Function):
    """A gradient as it is, of which none is taken."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, operator: str) -> Tensor:
        ctx.operator = operator
        return grad.detach()

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        raise RuntimeError(
            f"octavo.rl has first derivatives only: this loss holds a gradient (create_graph=True) that went through "
            f"{ctx.operator}, whose second derivative there is not; compute such a loss in plain torch"
        )


@functools.cache
def num_processors(device: torch.device) -> int:
    """Multiprocessors of a GPU."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def apply(function: Any, *arguments: Any) -> Any:
    """`function.apply`, of an operator's torch.autograd.Function, which no autocast around it changes.

    Raises ValueError where the first argument, a tensor whose type its result has, is of none that operators take.
    """
    rows = arguments[0]
    if rows.dtype not in (_OF_CPU if rows.is_cpu else DTYPES):
        check_dtype(f"octavo.rl's {function.backward.operator}", rows.dtype, rows.device)
    if not torch.is_autocast_enabled(rows.device.type):  # to switch off what is off takes as long as a small operator
        return function.apply(*arguments)
    with torch.autocast(rows.device.type, enabled=False):
        return function.apply(*arguments)


def check_dtype(what: str, dtype: torch.dtype, device: torch.device) -> None:
    """Raises ValueError for a type in which the device computes nothing, so that none is read as another."""
    if dtype not in (_OF_CPU if device.type == "cpu" else DTYPES):
        raise ValueError(f"{what}: CPU operators take float32 and bfloat16, a GPU's float16 too, got {dtype}")
