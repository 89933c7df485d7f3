"""What every operator's two directions have in common: they run outside of autocast, with their inputs' own types."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.autograd.function import once_differentiable


def outside_autocast(function: Any) -> Any:
    """A forward or backward of an autograd function that no autocast around it changes."""

    @functools.wraps(function)
    def call(*arguments: Any) -> Any:
        device = next((each.device.type for each in arguments if isinstance(each, torch.Tensor)), "cpu")
        with torch.autocast(device, enabled=False):
            return function(*arguments)

    return call


def first_order(function: Any) -> Any:
    """A backward that autocast does not change, and that has no gradient itself."""
    return once_differentiable(outside_autocast(function))


@functools.cache
def num_processors(device: torch.device) -> int:
    """Multiprocessors of a GPU."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def apply(function: Any, *arguments: Any) -> Any:
    """`function.apply`, of a torch.autograd.Function."""
    return function.apply(*arguments)
