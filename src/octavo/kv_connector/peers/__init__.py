"""What engines that pass blocks on tell each other: their caches, the mapping between two, and what is on offer."""

from __future__ import annotations

from typing import Final

NIXL: Final = ("nixl_cu12", "nixl_cu13")  # the library's packages, of the same calls: for CUDA 12 and 13
