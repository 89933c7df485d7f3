"""The connectors that there are, and how one out of tree is found.

Owns the table of names, vLLM's as aliases, and the protocol of a kind: what makes both halves. Loads none of them
before it is asked for. Invariant: a name that cannot be used is refused with the known ones, or with what to install.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast

from octavo.cache.groups import CacheGroup
from octavo.cache.policies import lost_prefixes
from octavo.config.kv_transfer import EXTRA, KVTransferConfig, read_kv_transfer, refuse
from octavo.config.settings import did_you_mean
from octavo.kv_connector import Connector

if TYPE_CHECKING:
    from octavo.kv_connector.orders import EngineSide
    from octavo.kv_connector.worker import WorkerConnector
    from octavo.kv_connector.worker.cache_bytes import CacheBytes


class Kind(Protocol):
    """One kind of connector, as it is configured: both halves are made of it, each in its process.

    One that moves what layers keep as a state, too, says so by `moves_states = True`; one with loads that a step waits
    for (`Connector.allocated_now`) by `brings = True`; one that tells a library each run of bytes, so that a block
    should be one, by `moves_runs = True`.
    """

    shares_names: bool  # names of blocks leave the process

    def __init__(self, transfer: KVTransferConfig) -> None:
        """Raises ConfigError for what the configuration may not say, ImportError where a library is missing."""

    def secret(self) -> bytes:
        """What names are keyed with where the user gives no secret of their own; empty: drawn."""

    def scheduler_half(self, engine: EngineSide) -> Connector:
        """Beside the scheduler. Raises ConfigError."""

    def worker_half(self, cache: CacheBytes, identity: str) -> WorkerConnector:
        """Beside the cache of a worker. identity: see EngineSide. Raises ConfigError."""


class _NoKind:
    """Of an engine without a connector."""

    shares_names = False

    def __init__(self, transfer: KVTransferConfig) -> None:
        """Nothing is said."""

    def secret(self) -> bytes:
        """See Kind."""
        return b""

    def scheduler_half(self, engine: EngineSide) -> Connector:
        """See Kind."""
        raise AssertionError("there is nothing to connect")

    def worker_half(self, cache: CacheBytes, identity: str) -> WorkerConnector:
        """See Kind."""
        raise AssertionError("there is nothing to connect")


TABLE = {
    "shared_storage": "octavo.kv_connector.shared_storage:SharedStorage",
    "host": "octavo.kv_connector.host:Host",
    "p2p": "octavo.kv_connector.p2p:P2P",
    "nixl": "octavo.kv_connector.p2p:Nixl",
    "mooncake": "octavo.kv_connector.mooncake:Mooncake",
    "mooncake_store": "octavo.kv_connector.mooncake:MooncakeStore",
    "lmcache": "octavo.kv_connector.lmcache:LMCache",
    "multi": "octavo.kv_connector.multi:Multi",
}
ALIASES = {
    "ExampleConnector": "shared_storage",
    "SharedStorageConnector": "shared_storage",
    "OffloadingConnector": "host",
    "SimpleCPUOffloadConnector": "host",
    "MultiConnector": "multi",
    "P2pNcclConnector": "p2p",
    "NixlConnector": "nixl",
    "LMCacheConnectorV1": "lmcache",
    "LMCacheConnector": "lmcache",
    "LMCacheConnectorV1Dynamic": "lmcache",
    "MooncakeConnector": "mooncake",
    "MooncakeStoreConnector": "mooncake_store",
}
_PARTS = ("scheduler_half", "worker_half", "secret", "shares_names")


def make_kind(transfer: KVTransferConfig) -> Kind:
    """The kind that is named, or one that moves nothing. Raises ConfigError."""
    name = transfer.kv_connector
    if not name:
        return _NoKind(transfer)
    from octavo.config.quoted import describe
    from octavo.kv_connector.guard import RAISED, made

    brings_own = ALIASES.get(name) == "lmcache" and transfer.module_path.startswith("lmcache.")  # LMCache's, for vLLM
    if transfer.module_path and not brings_own:
        module, attribute = transfer.module_path, name
    else:
        path = TABLE.get(ALIASES.get(name, name), name)
        module, colon, attribute = path.partition(":")
        if not colon:
            known = ", ".join([*TABLE, *ALIASES])
            hint = did_you_mean(name, [*TABLE, *ALIASES]) or "or give kv_connector_module_path, or package.module:Class"
            raise refuse("kv_connector", name, f"unknown: known are {known}", hint)
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        text = " ".join(str(error).split())[:200]
        raise refuse("kv_connector", f"{module}:{attribute}", f"does not load: {text}") from None
    except RAISED as error:
        raise refuse("kv_connector", f"{module}:{attribute}", f"does not load: {describe(error)}") from error
    if hasattr(found, "get_num_new_matched_tokens"):
        from octavo.kv_connector.vllm.adapter import VLLMConnector

        return VLLMConnector(transfer, found)
    if unwritten := sorted(getattr(found, "__abstractmethods__", ())) if inspect.isclass(found) else []:
        limit = f"lacks {', '.join(unwritten)}"
        raise refuse("kv_connector", f"{module}:{attribute}", limit, "write them (see docs/connectors.md)")
    lacking = [part for part in _PARTS if not hasattr(found, part)]
    if lacking:
        limit = f"is no connector: it has no {', '.join(lacking)} (see docs/connectors.md)"
        raise refuse("kv_connector", f"{module}:{attribute}", limit)
    return cast(Kind, made(name, lambda: found(transfer)))


def check_early(given: Mapping[str, Any]) -> None:
    """Refuse what kv_transfer_config may not say, before torch is there. One out of tree is the engine's to load."""
    if given and _is_ours(given):
        make_kind(read_kv_transfer(given))


def _is_ours(given: object) -> bool:
    if not isinstance(given, Mapping):
        return True
    extra = given.get(EXTRA)
    others = extra.get("connectors") if isinstance(extra, Mapping) else None
    is_ours = not given.get("kv_connector_module_path") and ":" not in str(given.get("kv_connector"))
    return is_ours and all(_is_ours(own) for own in (others if isinstance(others, list | tuple) else ()))


def secret_of(kind: Kind, transfer: KVTransferConfig) -> bytes:
    """See Kind. Raises ConfigError."""
    if not transfer.kv_connector:
        return b""
    from octavo.kv_connector.guard import made

    return made(transfer.kv_connector, kind.secret)


def scheduler_half(kind: Kind, engine: EngineSide) -> Connector:
    """See Kind. What one out of tree raises later stays with it. Raises ConfigError."""
    from octavo.kv_connector.guard import Guarded, made

    name = engine.transfer.kv_connector
    if not _is_out_of_tree(kind):
        return kind.scheduler_half(engine)
    lookup, timeout = engine.transfer.lookup, engine.transfer.timeout
    return made(name, lambda: Guarded(kind.scheduler_half(engine), name, lookup=lookup, timeout=timeout))


def worker_half(kind: Kind, transfer: KVTransferConfig, cache: CacheBytes, identity: str) -> WorkerConnector:
    """See Kind. Raises ConfigError."""
    if not _is_out_of_tree(kind):
        return kind.worker_half(cache, identity)
    from octavo.kv_connector.guard import made

    return made(transfer.kv_connector, lambda: kind.worker_half(cache, identity))


def _is_out_of_tree(kind: Kind) -> bool:
    """Whether code that is not Octavo's runs in it: whatever that raises may not end the engine."""
    return not type(kind).__module__.startswith("octavo.") or bool(getattr(kind, "is_out_of_tree", False))


def brings(kind: Kind) -> bool:
    """Whether blocks may arrive while a step runs."""
    return bool(getattr(kind, "brings", False))


def moves_runs(kind: Kind) -> bool:
    """Whether the layers of a block should lie together in the cache, where the user does not say how they lie."""
    return bool(getattr(kind, "moves_runs", False))


def moves_states(kind: Kind) -> bool:
    """Whether it moves what layers keep as a state: who does not say so moves blocks of tokens alone."""
    return bool(getattr(kind, "moves_states", False))


def check_groups(kind: Kind, transfer: KVTransferConfig, groups: Sequence[CacheGroup], layers_of_each: int = 1) -> None:
    """Raise ConfigError for a model whose cache cannot move as the connector moves it, if it is to.

    layers_of_each: see Arch. Layers are named as the model's config.json numbers them.
    """
    if not (name := transfer.kv_connector):
        return
    if lost := lost_prefixes(groups):
        raise refuse(
            "kv_connector", name, f"brings prefixes back, and {lost}", "drop kv_transfer_config for this model"
        )
    kept = [group for group in groups if group.kind == "state"]
    if kept and not moves_states(kind):
        layers = list(dict.fromkeys(layer // layers_of_each for layer in kept[0].layers))
        limit = f"moves blocks of tokens, and layers {_shown(layers)} of this model keep states"
        raise refuse("kv_connector", name, limit, f"take one of {', '.join(TABLE)}")


def _shown(layers: Sequence[int]) -> str:
    return ", ".join(map(str, layers[:4])) + ("..." if len(layers) > 4 else "")
