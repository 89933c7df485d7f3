"""Names of attention backends."""

from __future__ import annotations

import enum


class AttentionBackendEnum(enum.Enum):
    """vLLM's."""

    FLASH_ATTN = "flash"
    FLASHINFER = "flashinfer"
    FLEX_ATTENTION = "flex"
    TRITON_ATTN = "paged"
    CUSTOM = "custom"
