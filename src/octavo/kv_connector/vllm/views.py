"""What a KVConnectorBase_V1 is shown of an engine, with vLLM's names.

Owns the shapes of configurations, requests, blocks and a scheduler's output, as far as connectors read them. They are
plain namespaces: nothing here imports vLLM. Invariant: what is shown is a copy: a connector that changes it changes
nothing of the engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from octavo.cache.groups import CacheGroup
from octavo.config.kv_transfer import KVTransferConfig
from octavo.kv_connector import Transfer
from octavo.request.request import Request


def layer_name(layer: int) -> str:
    """What vLLM calls the attention of a layer."""
    return f"model.layers.{layer}.self_attn.attn"


class TransferView(SimpleNamespace):
    """VllmConfig.kv_transfer_config."""

    def get_from_extra_config(self, key: str, default: Any) -> Any:
        """A value of kv_connector_extra_config."""
        return self.kv_connector_extra_config.get(key, default)


def config_view(transfer: KVTransferConfig, groups: Sequence[CacheGroup], num_blocks: int) -> SimpleNamespace:
    """VllmConfig."""
    view = TransferView(
        kv_connector=transfer.kv_connector,
        kv_role=transfer.kv_role,
        engine_id=transfer.engine_id,
        kv_ip=transfer.kv_ip,
        kv_port=transfer.kv_port,
        kv_buffer_device="cpu",
        kv_connector_extra_config=dict(transfer.extra),
        kv_connector_module_path=transfer.module_path,
        kv_load_failure_policy=transfer.load_failure_policy,
        is_kv_producer=transfer.produces,
        is_kv_consumer=transfer.consumes,
        is_kv_transfer_instance=True,
    )
    size = min(group.block_size for group in groups)
    parallel = SimpleNamespace(
        tensor_parallel_size=1, pipeline_parallel_size=1, data_parallel_size=1, rank=0, world_size=1
    )
    return SimpleNamespace(
        kv_transfer_config=view,
        cache_config=SimpleNamespace(block_size=size, num_gpu_blocks=num_blocks, enable_prefix_caching=True),
        parallel_config=parallel,
        model_config=SimpleNamespace(model=transfer.engine_id, use_mla=any(group.kind == "mla" for group in groups)),
        speculative_config=None,
    )


def cache_view(groups: Sequence[CacheGroup], num_blocks: int) -> SimpleNamespace:
    """KVCacheConfig."""
    shown = [
        SimpleNamespace(
            layer_names=[layer_name(layer) for layer in group.layers],
            kv_cache_spec=SimpleNamespace(
                block_size=group.block_size, num_kv_heads=group.num_heads, sliding_window=group.window or None
            ),
        )
        for group in groups
    ]
    return SimpleNamespace(num_blocks=num_blocks, kv_cache_groups=shown, kv_cache_tensors=[])


def request_view(request: Request) -> SimpleNamespace:
    """vllm.v1.request.Request."""
    wanted = (request.params.extra_args or {}).get("kv_transfer_params")
    tokens = list(request.tokens)
    return SimpleNamespace(
        request_id=request.request_id,
        prompt_token_ids=tokens[: request.num_prompt],
        all_token_ids=tokens,
        num_tokens=len(tokens),
        num_prompt_tokens=request.num_prompt,
        num_output_tokens=len(tokens) - request.num_prompt,
        num_computed_tokens=request.num_computed,
        num_preemptions=request.num_preemptions,
        block_hashes=list(request.block_hashes),
        cache_salt=request.cache_salt or None,
        sampling_params=request.params,
        kv_transfer_params=dict(wanted) if isinstance(wanted, Mapping) else None,
        lora_request=None,
        mm_features=[],
        mm_hashes=[],
        status=request.status.name,
    )


class BlocksView:
    """KVCacheBlocks."""

    def __init__(self, tables: Sequence[Sequence[int]]) -> None:
        """Per group, by logical index."""
        self._tables = tuple(list(table) for table in tables)
        self.blocks = tuple([SimpleNamespace(block_id=block) for block in table] for table in self._tables)

    def get_block_ids(self, allow_none: bool = False) -> tuple[list[int], ...]:
        """Per group."""
        return tuple(list(table) for table in self._tables)

    def get_unhashed_block_ids(self) -> list[int]:
        """Those of the only group."""
        return list(self._tables[0])


def output_view(transfer: Transfer, num_computed: int) -> SimpleNamespace:
    """SchedulerOutput of a step that computes one request's tokens from `num_computed` on."""
    request, tokens = transfer.request, transfer.request.tokens[: transfer.request.num_prompt]
    new = SimpleNamespace(
        req_id=request.request_id,
        prompt_token_ids=list(tokens),
        mm_features=[],
        sampling_params=request.params,
        pooling_params=None,
        block_ids=tuple(list(table) for table in transfer.blocks),
        num_computed_tokens=num_computed,
        lora_request=None,
    )
    none = SimpleNamespace(
        req_ids=[],
        resumed_req_ids=set(),
        new_token_ids=[],
        all_token_ids={},
        new_block_ids=[],
        num_computed_tokens=[],
        num_output_tokens=[],
        num_reqs=0,
    )
    count = max(len(tokens) - num_computed, 1)
    return SimpleNamespace(
        scheduled_new_reqs=[new],
        scheduled_cached_reqs=none,
        num_scheduled_tokens={request.request_id: count},
        total_num_scheduled_tokens=count,
        scheduled_spec_decode_tokens={},
        finished_req_ids=set(),
        preempted_req_ids=None,
        kv_connector_metadata=None,
    )
