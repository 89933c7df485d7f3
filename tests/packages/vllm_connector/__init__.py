"""A connector as somebody wrote it for vLLM: prompts in memory, layer by layer. It knows nothing of Octavo."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.logger import init_logger

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

logger = init_logger(__name__)
KEPT: dict[tuple[tuple[int, ...], str], torch.Tensor] = {}
CALLS: list[str] = []
LOST: set[int] = set()  # places of blocks whose load fails


@dataclasses.dataclass
class Move:
    tokens: tuple[int, ...]
    block_ids: list[int]
    is_store: bool


@dataclasses.dataclass
class Meta(KVConnectorMetadata):
    moves: list[Move] = dataclasses.field(default_factory=list)


class MemoryConnector(KVConnectorBase_V1):
    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._size = vllm_config.cache_config.block_size
        self._label = self._kv_transfer_config.get_from_extra_config("label", "none")
        self._need: dict[str, Request] = {}
        self._bad: set[int] = set()

    def _whole(self, tokens: list[int]) -> tuple[int, ...]:
        return tuple(tokens[: (len(tokens) - 1) // self._size * self._size])

    def _has(self, tokens: tuple[int, ...]) -> bool:
        return bool(tokens) and any(key[0] == tokens for key in KEPT)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        tokens = self._whole(request.prompt_token_ids)
        return (max(len(tokens) - num_computed_tokens, 0) if self._has(tokens) else 0), False

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        if num_external_tokens > 0:
            self._need[request.request_id] = request

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        meta = Meta()
        for new in scheduler_output.scheduled_new_reqs:
            tokens = self._whole(new.prompt_token_ids)
            if new.req_id in self._need:
                meta.moves.append(Move(tokens, new.block_ids[0], False))
            elif not self._has(tokens):
                meta.moves.append(Move(tokens, new.block_ids[0], True))
        self._need.clear()
        return meta

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        CALLS.append("start_load_kv")
        for move in self._get_connector_metadata().moves:
            if move.is_store:
                continue
            ids = move.block_ids[: len(move.tokens) // self._size]
            for name, layer in forward_context.no_compile_layers.items():
                layer.kv_cache[ids] = KEPT[move.tokens, name]
            for place in LOST:
                if place < len(ids):
                    layer.kv_cache[ids[place]] = float("nan")
                    self._bad.add(ids[place])

    def wait_for_layer_load(self, layer_name: str) -> None:
        CALLS.append("wait_for_layer_load")

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        for move in self._get_connector_metadata().moves:
            if move.is_store:
                KEPT[move.tokens, layer_name] = kv_layer[move.block_ids[: len(move.tokens) // self._size]].clone()

    def wait_for_save(self) -> None:
        CALLS.append("wait_for_save")

    def get_block_ids_with_load_errors(self) -> set[int]:
        bad, self._bad = self._bad, set()
        return bad

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        CALLS.append(f"finished {request.request_id}")
        return False, {"label": self._label, "num_blocks": len(block_ids)}
