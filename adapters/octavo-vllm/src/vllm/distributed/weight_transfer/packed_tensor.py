"""Tensors in buffers of bytes, one broadcast each. Both ends count alike: a tensor that fills a buffer ends it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch


def packed_nccl_broadcast_producer(
    iterator: Iterator[tuple[str, torch.Tensor]],
    group: Any,
    src: int,
    post_iter_func: Callable[[tuple[str, torch.Tensor]], torch.Tensor],
    buffer_size_bytes: int | None = None,
    num_buffers: int = 2,
) -> None:
    """Send the tensors, in order. `group`: of `trainer_init`."""
    most = buffer_size_bytes or group.buffer_bytes
    pieces: list[torch.Tensor] = []
    total = 0
    for item in iterator:
        piece = post_iter_func(item).detach().contiguous().reshape(-1).view(torch.uint8)
        pieces.append(piece)
        total += piece.numel()
        if total > most:
            group.broadcast(torch.cat(pieces), src=src)
            pieces, total = [], 0
    if pieces:
        group.broadcast(torch.cat(pieces), src=src)
