"""The FlashAttention backend: `torch.nn.attention.varlen` with block tables, or the `flash-attn` packages.

Owns the choice of the library and the step's arguments; the library does the work. The cache is shown to it as two
views of the same bytes, K and V, of [blocks, tokens, heads, channels] with any strides: both layouts, no copy.
Not reproducible: the libraries split rows by the batch.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

from octavo.attention.base import (
    NO_SETUP,
    NO_TENSORS,
    AttentionInputs,
    Capability,
    LayerTensors,
    Setup,
    Variant,
    check_variants,
)
from octavo.kv_cache.kernel_blocks import MultipleOf

_BLOCK_MULTIPLE = 256  # what FlashAttention 2, the least of them, takes
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, AttentionInputs, Variant], torch.Tensor]


def _words(inputs: AttentionInputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows = inputs.num_rows
    return inputs.query_start[: rows + 1], inputs.seq_lens[:rows], inputs.block_table[:rows]


def _window(variant: Variant) -> tuple[int, int]:
    left = variant.window - 1 if variant.window else -1
    return left, 0 if variant.causal else left


def _torch_attend(function: Any) -> Attend:
    """Through `torch.nn.attention.varlen.varlen_attn`."""

    def attend(
        q: torch.Tensor, key: torch.Tensor, value: torch.Tensor, inputs: AttentionInputs, variant: Variant
    ) -> torch.Tensor:
        starts, lengths, table = _words(inputs)
        result: torch.Tensor = function(
            q, key, value, starts, None, inputs.max_query_len, inputs.max_seq_len, scale=variant.scale,
            window_size=_window(variant), enable_gqa=variant.num_heads != variant.num_kv_heads, seqused_k=lengths,
            block_table=table,
        )  # fmt: skip
        return result

    return attend


def _package_attend(function: Any, names: tuple[str, str, str]) -> Attend:
    """Through a package's `flash_attn_varlen_func`; `names`: what it calls lengths, block table and soft cap."""

    def attend(
        q: torch.Tensor, key: torch.Tensor, value: torch.Tensor, inputs: AttentionInputs, variant: Variant
    ) -> torch.Tensor:
        starts, lengths, table = _words(inputs)
        words: dict[str, Any] = {names[0]: lengths, names[1]: table}
        if variant.soft_cap:
            words[names[2]] = variant.soft_cap
        result = function(
            q, key, value, cu_seqlens_q=starts, max_seqlen_q=inputs.max_query_len, max_seqlen_k=inputs.max_seq_len,
            softmax_scale=variant.scale, causal=variant.causal, window_size=_window(variant), **words,
        )  # fmt: skip
        return result[0] if isinstance(result, tuple) else result

    return attend


def _find() -> tuple[Attend, bool]:
    """(how to attend, whether it knows soft caps), from what is installed. Raises ValueError saying what was found."""
    found = []
    for module_name in ("flash_attn_interface", "flash_attn.cute"):  # FlashAttention 3 and 4: seqused_k, page tables
        try:
            function = importlib.import_module(module_name).flash_attn_varlen_func
        except (ImportError, AttributeError):
            continue
        parameters = inspect.signature(function).parameters
        if {"seqused_k", "page_table"} <= set(parameters):
            return _package_attend(function, ("seqused_k", "page_table", "softcap")), "softcap" in parameters
        found.append(f"{module_name} without page_table")
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        found.append(f"torch {torch.__version__} without torch.nn.attention.varlen")
    else:
        if {"seqused_k", "block_table", "enable_gqa"} <= set(inspect.signature(varlen_attn).parameters):
            return _torch_attend(varlen_attn), False
        found.append(f"torch {torch.__version__}, whose varlen_attn takes no block_table (2.13 does)")
    raise ValueError(
        f"attention backend 'flash' found {' and '.join(found)}: install torch 2.13, flash-attn-3 or flash-attn-4, or "
        "set attention_backend='paged'"
    )


class FlashBackend:
    """An AttentionBackend for CUDA; kernel blocks that 256 divides."""

    capability = Capability(
        devices=("cuda",),
        dtypes=(torch.bfloat16, torch.float16),
        kernel_block_sizes=(MultipleOf(_BLOCK_MULTIPLE),),
        non_causal=True,
        reproducible=False,
    )

    def __init__(
        self, variants: Sequence[Variant], dtype: torch.dtype, device: torch.device, setup: Setup = NO_SETUP
    ) -> None:
        """Raises ValueError where no library takes block tables and for another device, dtype, head size or feature."""
        if device.type != "cuda":
            raise ValueError(
                f"attention backend 'flash' runs on device cuda, got {device}: set attention_backend='cpu'"
            )
        check_variants("flash", self.capability, variants, dtype, setup)
        for variant in variants:
            if variant.head_size > 256 or variant.head_size % 8:
                raise ValueError(
                    f"attention backend 'flash' takes heads of up to 256 that 8 divides, got {variant.head_size}: set "
                    "attention_backend='paged'"
                )
        self._attend, has_soft_cap = _find()
        if not has_soft_cap and any(variant.soft_cap for variant in variants):
            raise ValueError(
                "attention backend 'flash' has no soft_cap through torch: set attention_backend='paged', or install "
                "flash-attn-3"
            )

    def prepare(self, inputs: AttentionInputs, *, for_capture: bool = False) -> None:
        """Remember the step's inputs. Raises ValueError for inputs that contradict each other or a block size."""
        inputs.check()
        if inputs.block_size % _BLOCK_MULTIPLE:
            raise ValueError(
                f"attention backend 'flash' takes block sizes that {_BLOCK_MULTIPLE} divides, got {inputs.block_size}: "
                f"set block_size={_BLOCK_MULTIPLE}"
            )
        self._inputs = inputs

    def run(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        variant: Variant,
        out: torch.Tensor,
        layer: LayerTensors = NO_TENSORS,
    ) -> None:
        """Attend; see AttentionBackend. Raises ValueError for tensors that are not the step's."""
        inputs = self._inputs
        inputs.check_call(q, kv, out)
        tokens, pages = inputs.num_tokens, kv.transpose(1, 2)
        key, value = pages[..., : variant.head_size], pages[..., variant.head_size :]
        out[:tokens] = self._attend(q[:tokens], key, value, inputs, variant)
