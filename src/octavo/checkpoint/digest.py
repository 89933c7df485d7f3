"""WeightsDigest: a name for the weights of a model, made while they are read.

Owns what is hashed of a tensor: all of it takes part, at 2 GB/s a core. Knows no files. Invariant: a change of any
element changes the digest, and so does one of several that a plain sum would not see: values that change places, signs
that flip in pairs. The order in which tensors come and how they lie in files do not.
"""

from __future__ import annotations

import hashlib

import torch

_WORDS = 512  # 64-bit words of a piece that is summed: 4 KB
_PIECES = 512  # that are summed at once, while they are in a core's cache


class WeightsDigest:
    """Of one load. The sums of 4 KB pieces are hashed, and of each tensor the first piece and the rest as they are.

    In a sum each word counts times a number of its place, and so does its upper half: of bit 63 alone a product modulo
    2^64 would keep one bit.
    """

    def __init__(self) -> None:
        """Of no tensor yet."""
        self._tensors: dict[str, bytes] = {}
        generator = torch.Generator().manual_seed(0)
        self._factors = torch.randint(-(1 << 63), (1 << 63) - 1, (2, _WORDS), generator=generator) | 1  # [2, words]

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Take in a contiguous CPU tensor under its name."""
        digest = hashlib.blake2b(f"{name}\0{tensor.dtype}\0{list(tensor.shape)}\0".encode(), digest_size=16)
        data = tensor.view(-1).view(torch.uint8)
        data = data.clone() if data.storage_offset() % 8 else data  # words begin at multiples of their size
        size = len(data) // (8 * _WORDS) * 8 * _WORDS
        if size:
            for pieces in data[:size].view(torch.int64).view(-1, _WORDS).split(_PIECES):
                products = (pieces >> 32).mul_(self._factors[1]).addcmul_(pieces, self._factors[0])
                digest.update(products.sum(1).numpy().tobytes())
            digest.update(data[: 8 * _WORDS].numpy().tobytes())
        digest.update(data[size:].numpy().tobytes())
        self._tensors[name] = digest.digest()

    def hexdigest(self) -> str:
        """32 hexadecimal digits."""
        parts = b"".join(name.encode() + b"\0" + self._tensors[name] for name in sorted(self._tensors))
        return hashlib.blake2b(parts, digest_size=16).hexdigest()


def unseen(name: str, tensor: torch.Tensor) -> None:
    """For loads of which nobody wants a digest."""
