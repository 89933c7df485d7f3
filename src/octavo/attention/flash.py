"""The FlashAttention backend: `torch.nn.attention.varlen` with block tables, or the `flash-attn` packages.

Owns the choice of the library and the step's arguments; the library does the work. The cache is shown to it as two
views of the same bytes, K and V, of [blocks, tokens, heads, channels] with any strides: both layouts, no copy. A torch
whose `varlen_attn` takes no block tables (2.11) gets each row's K and V copied together, layer by layer.
Not reproducible: the libraries split rows by the batch.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from octavo.attention.base import NO_SETUP, AttentionInputs, Capability, LayerTensors, Setup
from octavo.attention.frame import BackendFrame
from octavo.cache.kernel_blocks import MultipleOf
from octavo.cache.specs import AttentionSpec

_BLOCK_MULTIPLE = 256  # what FlashAttention 2, the least of them, takes


class Gather(NamedTuple):
    """Where each token of a step's rows lies, row after row."""

    starts: torch.Tensor  # [rows + 1] int32, of each row's tokens
    blocks: torch.Tensor  # [tokens] int64
    offsets: torch.Tensor  # [tokens] int64, in the block


class Library(NamedTuple):
    """One library's call. A library without block tables gets the rows' K and V copied together."""

    attend: Callable[[torch.Tensor, torch.Tensor, AttentionInputs, AttentionSpec, Gather | None], torch.Tensor]
    soft_cap: bool
    block_tables: bool = True


def _halves(kv: torch.Tensor, spec: AttentionSpec) -> tuple[torch.Tensor, torch.Tensor]:
    return kv[..., : spec.head_size], kv[..., spec.head_size :]


def _window(spec: AttentionSpec) -> tuple[int, int]:
    left = spec.window - 1 if spec.window else -1
    return left, 0 if spec.causal else left


def _torch_library(function: Any) -> Library:
    """Through `torch.nn.attention.varlen.varlen_attn` with block tables."""

    def attend(
        q: torch.Tensor, kv: torch.Tensor, inputs: AttentionInputs, spec: AttentionSpec, gather: Gather | None
    ) -> torch.Tensor:
        starts, lengths, table = inputs.live
        result: torch.Tensor = function(
            q,
            *_halves(kv.transpose(1, 2), spec),
            starts,
            None,
            inputs.max_query_len,
            inputs.max_seq_len,
            scale=spec.scale,
            window_size=_window(spec),
            enable_gqa=spec.num_heads != spec.num_kv_heads,
            seqused_k=lengths,
            block_table=table,
        )
        return result

    return Library(attend, soft_cap=False)


def _older_torch_library(function: Any) -> Library:
    """Through the `varlen_attn` of torch 2.10 to 2.12, which takes K and V of consecutive rows."""

    def attend(
        q: torch.Tensor, kv: torch.Tensor, inputs: AttentionInputs, spec: AttentionSpec, gather: Gather | None
    ) -> torch.Tensor:
        assert gather is not None, "rows without block tables are gathered"
        rows = kv[gather.blocks, :, gather.offsets]  # [tokens, heads, 2 * head_size]
        result: torch.Tensor = function(
            q,
            *_halves(rows, spec),
            inputs.live[0],
            gather.starts,
            inputs.max_query_len,
            inputs.max_seq_len,
            scale=spec.scale,
            window_size=_window(spec),
        )
        return result

    return Library(attend, soft_cap=False, block_tables=False)


def _package(function: Any, names: tuple[str, str, str]) -> Library:
    """Through a package's `flash_attn_varlen_func`; `names`: what it calls lengths, block table and soft cap."""

    def attend(
        q: torch.Tensor, kv: torch.Tensor, inputs: AttentionInputs, spec: AttentionSpec, gather: Gather | None
    ) -> torch.Tensor:
        starts, lengths, table = inputs.live
        words: dict[str, Any] = {names[0]: lengths, names[1]: table}
        if spec.soft_cap:
            words[names[2]] = spec.soft_cap
        key, value = _halves(kv.transpose(1, 2), spec)
        result = function(
            q,
            key,
            value,
            cu_seqlens_q=starts,
            max_seqlen_q=inputs.max_query_len,
            max_seqlen_k=inputs.max_seq_len,
            softmax_scale=spec.scale,
            causal=spec.causal,
            window_size=_window(spec),
            **words,
        )
        return result[0] if isinstance(result, tuple) else result

    return Library(attend, soft_cap=names[2] in inspect.signature(function).parameters)


def find_library() -> Library:
    """The first that is installed. Raises ValueError saying what was found."""
    found = []
    for module_name in ("flash_attn_interface", "flash_attn.cute"):  # FlashAttention 3 and 4: seqused_k, page tables
        try:
            function = importlib.import_module(module_name).flash_attn_varlen_func
        except (ImportError, AttributeError):
            continue
        if {"seqused_k", "page_table"} <= set(inspect.signature(function).parameters):
            return _package(function, ("seqused_k", "page_table", "softcap"))
        found.append(f"{module_name} without page_table")
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        found.append(f"torch {torch.__version__} without torch.nn.attention.varlen")
    else:
        parameters = set(inspect.signature(varlen_attn).parameters)
        if {"seqused_k", "block_table", "enable_gqa"} <= parameters:
            return _torch_library(varlen_attn)
        if {"window_size", "scale"} <= parameters:
            return _older_torch_library(varlen_attn)
        found.append(f"torch {torch.__version__}, whose varlen_attn takes no window_size (2.11 does)")
    raise ValueError(
        f"attention backend 'flash' found {' and '.join(found)}: install torch 2.13, flash-attn-3 or flash-attn-4, or "
        "set attention_backend='paged'"
    )


def gather_of(inputs: AttentionInputs) -> Gather:
    """Waits for the device once: the sum of lengths sizes the result."""
    _, lengths, table = inputs.live
    counts = lengths.tolist()
    row = torch.repeat_interleave(torch.arange(len(counts), device=lengths.device), lengths, output_size=sum(counts))
    starts = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    at = torch.arange(sum(counts), device=lengths.device) - starts[row]
    return Gather(starts, table[row, at // inputs.block_size].long(), at % inputs.block_size)


class FlashBackend(BackendFrame):
    """An AttentionBackend for CUDA; kernel blocks that 256 divides."""

    name = "flash"
    capability = Capability(
        devices=("cuda",),
        dtypes=(torch.bfloat16, torch.float16),
        kernel_block_sizes=(MultipleOf(_BLOCK_MULTIPLE),),
        non_causal=True,
        reproducible=False,
    )

    def __init__(
        self, specs: Sequence[AttentionSpec], dtype: torch.dtype, device: torch.device, setup: Setup = NO_SETUP
    ) -> None:
        """See BackendFrame. Raises ValueError where no library is there, and for other heads, too."""
        super().__init__(specs, dtype, device, setup)
        for spec in specs:
            if spec.head_size > 256 or spec.head_size % 8:
                raise ValueError(
                    f"attention backend 'flash' takes heads of up to 256 that 8 divides, got {spec.head_size}: set "
                    "attention_backend='paged'"
                )
        self._library = find_library()
        if not self._library.soft_cap and any(spec.soft_cap for spec in specs):
            raise ValueError(
                "attention backend 'flash' has no soft_cap through torch: set attention_backend='paged', or install "
                "flash-attn-3"
            )

    def prepare(self, inputs: AttentionInputs, *, for_capture: bool = False) -> None:
        """Where the rows' tokens lie, for a library without block tables. That waits for the device."""
        super().prepare(inputs, for_capture=for_capture)
        self._gather = None if self._library.block_tables else gather_of(inputs)

    def attend(
        self, q: torch.Tensor, kv: torch.Tensor, spec: AttentionSpec, out: torch.Tensor, layer: LayerTensors
    ) -> None:
        """See BackendFrame."""
        tokens = self.inputs.num_tokens
        out[:tokens] = self._library.attend(q[:tokens], kv, self.inputs, spec, self._gather)
