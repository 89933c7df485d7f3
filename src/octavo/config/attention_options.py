"""What `attention_config` says of layers and blocks.

Owns the reading of its two options that have a form of their own. Knows no backend. Invariant: what is given back has
that form, or a ConfigError shows an example of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from octavo.config.settings import ConfigError

FOREIGN_BACKENDS = {  # vLLM's names
    "FLASH_ATTN": "flash",
    "FLEX_ATTENTION": "flex",
    "TRITON_ATTN": "paged",
    "TORCH_SDPA": "reference",
    "TRITON_MLA": "mla",
    "CPU_ATTN": "cpu",
}


def read_layer_backends(options: Mapping[str, Any]) -> dict[str, Sequence[int]]:
    """Layers by the name of the backend that they have instead of the others'. Raises ConfigError."""
    given = options.get("layer_backends", {})
    example = 'e.g. {"layer_backends": {"reference": [0, 1]}}'
    if not isinstance(given, Mapping):
        raise ConfigError("attention_config", given, "layer_backends must name layers per backend", example)
    for name, layers in given.items():
        numbers = isinstance(layers, Sequence) and all(type(layer) is int and layer >= 0 for layer in layers)
        if not isinstance(name, str) or not numbers:
            raise ConfigError("attention_config", given, "layer_backends must name layers per backend", example)
    everyone = [layer for layers in given.values() for layer in layers]
    if len(set(everyone)) != len(everyone):
        raise ConfigError("attention_config", given, "layer_backends names a layer twice", example)
    return dict(given)


def read_kernel_block_size(options: Mapping[str, Any], block_size: int) -> int | None:
    """Tokens of a kernel block, which divide a block's; None: the backends decide. Raises ConfigError."""
    size = options.get("kernel_block_size")
    if size is None:
        return None
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ConfigError(
            "attention_config",
            size,
            "kernel_block_size must be a whole number of at least 1",
            'e.g. {"kernel_block_size": 64}',
        )
    if block_size % size:
        raise ConfigError(
            "attention_config",
            size,
            f"kernel_block_size must divide block_size={block_size}",
            "change one of the two",
        )
    return size
