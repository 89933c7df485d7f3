"""WeightsDigest: a name for the weights of a model, made while they are read.

Owns what is hashed of a tensor: every bit of it (by XXH3, at the speed of memory), its name, dtype and shape. Knows no
files. Invariant: neither the order in which tensors come nor how they lie in files changes the digest.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch


class WeightsDigest:
    """Of one load."""

    def __init__(self) -> None:
        """Of no tensor yet."""
        self._tensors: dict[str, bytes] = {}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Take in a contiguous CPU tensor under its name."""
        import xxhash  # here and below: most loads are not digested

        bits = xxhash.xxh3_128_digest(tensor.view(-1).view(torch.uint8).numpy().data)
        self._tensors[name] = f"\0{tensor.dtype}\0{list(tensor.shape)}\0".encode() + bits

    def hexdigest(self) -> str:
        """32 hexadecimal digits."""
        parts = b"".join(name.encode() + self._tensors[name] for name in sorted(self._tensors))
        return hashlib.blake2b(parts, digest_size=16).hexdigest()


def files_digest(folder: Path) -> str:
    """Of config.json and the weights' files in a folder, byte for byte: 32 hexadecimal digits."""
    import xxhash

    found = hashlib.blake2b(digest_size=16)
    for path in sorted([folder / "config.json", *folder.glob("*.safetensors")]):
        if path.exists():
            own = xxhash.xxh3_128()
            with path.open("rb") as file:
                while piece := file.read(1 << 24):
                    own.update(piece)
            found.update(path.name.encode() + own.digest())
    return found.hexdigest()


def unseen(name: str, tensor: torch.Tensor) -> None:
    """For loads of which nobody wants a digest."""
