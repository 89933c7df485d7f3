"""The interface of vLLM's connectors, for subclasses that run on Octavo: `--kv-transfer-config` names them.

Owns the names, vLLM's, and what a subclass may leave out. `octavo.kv_connector.vllm` calls them, in vLLM's order.
"""

from __future__ import annotations

import abc
import enum
from typing import Any


class KVConnectorRole(enum.Enum):
    """Which half an instance is."""

    SCHEDULER = 0
    WORKER = 1


class KVConnectorMetadata:
    """What the scheduler's half tells the worker's of a step; subclasses hold it."""


class SupportsHMA(abc.ABC):
    """Of connectors that take several cache groups."""

    @abc.abstractmethod
    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As `request_finished`, with the blocks of each group."""


class KVConnectorBase_V1(abc.ABC):
    """A connector. One instance lives beside the scheduler, one beside the cache."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any = None) -> None:
        self._vllm_config, self._role, self._kv_cache_config = vllm_config, role, kv_cache_config
        self._kv_transfer_config = vllm_config.kv_transfer_config
        self._connector_metadata: KVConnectorMetadata | None = None

    @property
    def role(self) -> KVConnectorRole:
        return self._role

    # beside the cache

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        self._connector_metadata = connector_metadata

    def clear_connector_metadata(self) -> None:
        self._connector_metadata = None

    def has_connector_metadata(self) -> bool:
        return self._connector_metadata is not None

    def _get_connector_metadata(self) -> KVConnectorMetadata:
        assert self._connector_metadata is not None, "it is bound within a step"
        return self._connector_metadata

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        return None

    def set_host_xfer_buffer_ops(self, copy_operation: Any) -> None:
        return None

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        return None

    @abc.abstractmethod
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...

    @abc.abstractmethod
    def wait_for_layer_load(self, layer_name: str) -> None: ...

    @abc.abstractmethod
    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None: ...

    @abc.abstractmethod
    def wait_for_save(self) -> None: ...

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return None, None

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set()

    def get_kv_connector_stats(self) -> Any:
        return None

    # beside the scheduler

    def on_new_request(self, request: Any) -> None:
        return None

    @abc.abstractmethod
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]: ...

    @abc.abstractmethod
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None: ...

    @abc.abstractmethod
    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata: ...

    def update_connector_output(self, connector_output: Any) -> None:
        return None

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return False, None

    def take_events(self) -> tuple[Any, ...]:
        return ()

    def reset_cache(self) -> bool | None:
        return None

    def shutdown(self) -> None:
        return None
