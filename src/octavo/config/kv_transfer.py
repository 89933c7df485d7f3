"""What `kv_transfer_config` says: which connector moves blocks, in which role, with which deadline and policy.

Owns the keys, vLLM's, and the reading of their values; what `kv_connector_extra_config` may hold is each connector's to
say, with `Extra`. Knows no connector. Invariant: a KVTransferConfig holds only values that can be used, and a key or a
value that cannot is a ConfigError of one line that names it.
"""

from __future__ import annotations

import dataclasses
import math
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from octavo.config.kv_peers import KEY as PEERS
from octavo.config.kv_peers import NO_PEERS, Peers, read_peers
from octavo.config.settings import ConfigError, did_you_mean, parse_bytes

FIELD = "kv_transfer_config"
EXTRA = "kv_connector_extra_config"
ROLES = ("kv_producer", "kv_consumer", "kv_both")
POLICIES = ("fail", "recompute")
DEFAULT_PORT = 14579
DEFAULT_TIMEOUT = 30.0  # seconds
DEFAULT_LOOKUP = 1.0
LOOKUP_TIMEOUT = "kv_lookup_timeout"
_MAX_TIMEOUT = 86400.0
_MAX_GIB = 1 << 20
_EXAMPLE = (
    'e.g. {"kv_connector": "host", "kv_role": "kv_both", "kv_connector_extra_config": {"cpu_bytes_to_use": "4G"}}'
)
_KEYS = (
    "kv_connector",
    "kv_role",
    "engine_id",
    "kv_buffer_device",
    "kv_buffer_size",
    "kv_rank",
    "kv_parallel_size",
    "kv_ip",
    "kv_port",
    PEERS,
    EXTRA,
    "kv_connector_module_path",
    "enable_permute_local_kv",
    "kv_load_failure_policy",
    "kv_transfer_timeout",
    LOOKUP_TIMEOUT,
)
_NO_VALUE: Any = object()


def refuse(key: str, value: object, limit: str, change: str = "") -> ConfigError:
    """The error of a key of kv_transfer_config."""
    return ConfigError(f"{FIELD}.{key}", value, limit, change or "change --kv-transfer-config")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class KVTransferConfig:
    """One connector. `kv_connector` is empty where there is none."""

    kv_connector: str = ""
    kv_role: str = "kv_both"
    engine_id: str = ""
    kv_ip: str = "127.0.0.1"
    kv_port: int = DEFAULT_PORT
    peers: Peers = NO_PEERS  # whom this engine may connect to
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    module_path: str = ""  # where a connector out of tree is
    load_failure_policy: str = "fail"
    timeout: float = DEFAULT_TIMEOUT  # seconds that a transfer may take
    lookup: float = DEFAULT_LOOKUP  # seconds for which a request waits for what a store has

    @property
    def produces(self) -> bool:
        """Whether blocks go out."""
        return self.kv_role != "kv_consumer"

    @property
    def consumes(self) -> bool:
        """Whether blocks come in."""
        return self.kv_role != "kv_producer"


NO_TRANSFER = KVTransferConfig()


def read_kv_transfer(given: Mapping[str, Any], label: str = "") -> KVTransferConfig:
    """What the mapping says; empty: no connector. label: where it stands inside kv_transfer_config.

    Raises ConfigError.
    """
    if not given:
        return NO_TRANSFER
    extra = Extra(given, label=label)
    extra.check_keys(_KEYS)
    name = extra.text("kv_connector", "")
    role = extra.choice("kv_role", "", ("", *ROLES))
    if not name:
        raise refuse(f"{label}kv_connector", name, "must name a connector", _EXAMPLE)
    if not role:
        raise refuse(f"{label}kv_role", None, f"must be one of {', '.join(ROLES)}", _EXAMPLE)
    if extra.flag("enable_permute_local_kv", False):
        raise refuse(
            f"{label}enable_permute_local_kv", True, "blocks are never permuted in the cache", "set kv_cache_layout"
        )
    # of vLLM's older connectors: they do nothing here
    for key, least in (("kv_rank", 0), ("kv_parallel_size", 1), ("kv_buffer_size", 0)):
        extra.number(key, least, least)
    extra.choice("kv_buffer_device", "auto", ("auto", "cpu", "cuda"))
    timeout = extra.seconds("kv_transfer_timeout", DEFAULT_TIMEOUT)
    return KVTransferConfig(
        kv_connector=name,
        kv_role=role,
        engine_id=extra.text("engine_id", "") or str(uuid.uuid4()),
        kv_ip=extra.text("kv_ip", "127.0.0.1"),
        kv_port=extra.number("kv_port", DEFAULT_PORT, 0, 65535),
        peers=read_peers(given),
        extra=extra.mapping(EXTRA),
        module_path=extra.text("kv_connector_module_path", ""),
        load_failure_policy=extra.choice("kv_load_failure_policy", "fail", POLICIES),
        timeout=timeout,
        lookup=min(extra.seconds(LOOKUP_TIMEOUT, DEFAULT_LOOKUP), timeout),
    )


def offloading(name: str, value: Any) -> dict[str, Any]:
    """vLLM's option of GiB of host memory for blocks: the connector `host` with as many. Raises ConfigError."""
    try:
        size = float(value)
    except (TypeError, ValueError):
        size = -1.0
    if not 0 <= size < _MAX_GIB:
        raise ConfigError(name, value, f"expected GiB, from 0 to {_MAX_GIB - 1}")
    if not size:
        return {}
    extra = {"cpu_bytes_to_use": int(size * 2**30)}
    return {FIELD: {"kv_connector": "host", "kv_role": "kv_both", EXTRA: extra}}


class Extra:
    """Typed values of a mapping of kv_transfer_config. Each method raises ConfigError, naming key and limit."""

    def __init__(self, values: Mapping[str, Any], *, label: str = f"{EXTRA}.") -> None:
        """label: what stands before a key in an error."""
        self._values, self._label = values, label

    def check_keys(self, known: Iterable[str]) -> None:
        """Raise for a key that nobody reads."""
        known = tuple(known)
        for key in self._values:
            if key not in known:
                hint = did_you_mean(str(key), known) or f"known keys: {', '.join(known) or 'none'}"
                raise refuse(f"{self._label}{str(key)[:40]}", self._values[key], "unknown key", hint)

    def _get(self, key: str) -> Any:
        value = self._values.get(key, _NO_VALUE)
        return _NO_VALUE if value is None else value

    def _refuse(self, key: str, value: object, limit: str) -> ConfigError:
        return refuse(self._label + key, value, limit)

    def text(self, key: str, default: str) -> str:
        """A text."""
        value = self._get(key)
        if value is _NO_VALUE:
            return default
        if not isinstance(value, str) or not value or not value.isprintable():
            raise self._refuse(key, value, "expected text")
        return value

    def choice(self, key: str, default: str, known: Sequence[str]) -> str:
        """One of `known`."""
        value = self._get(key)
        if value is _NO_VALUE:
            return default
        if value not in known or value == "":
            raise self._refuse(key, value, f"must be one of {', '.join(filter(None, known))}")
        return str(value)

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self._get(key)
        if value is _NO_VALUE:
            return default
        if not isinstance(value, bool):
            raise self._refuse(key, value, "expected true or false")
        return value

    def number(self, key: str, default: int, low: int, high: int | None = None) -> int:
        """A whole number in [low, high], as a number, as 5e9, or as text of one: vLLM takes and shows them so."""
        value = self._get(key)
        if value is _NO_VALUE:
            return default
        count = _whole(value)
        if count is None or count < low or (high is not None and count > high):
            reach = f"at least {low}" if high is None else f"from {low} to {high}"
            raise self._refuse(key, value, f"must be a whole number {reach}")
        return count

    def names(self, key: str, default: Sequence[str]) -> list[str]:
        """A list of names, at least one."""
        value = self._get(key)
        if value is _NO_VALUE:
            return list(default)
        if not isinstance(value, list | tuple) or not value or not all(isinstance(n, str) and n for n in value):
            raise self._refuse(key, value, "expected a list of names")
        return list(value)

    def seconds(self, key: str, default: float) -> float:
        """A time above 0 and at most a day."""
        value = self._get(key)
        if value is _NO_VALUE:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= _MAX_TIMEOUT:
            raise self._refuse(key, value, f"must be seconds above 0, at most {_MAX_TIMEOUT:g}")
        return float(value)

    def size(self, key: str, default: int | None, *, low: int = 1) -> int:
        """Bytes, as a number or as text: 4G. default None: it must be given."""
        value = self._get(key)
        if value is _NO_VALUE and default is not None:
            return default
        try:
            count = parse_bytes(value) if isinstance(value, str) else value
        except (ValueError, OverflowError):
            count = None
        if isinstance(count, float) and math.isfinite(count) and count == int(count):
            count = int(count)  # JSON of other tools writes 1e9
        if isinstance(count, bool) or not isinstance(count, int) or count < low:
            shown = None if value is _NO_VALUE else value
            raise self._refuse(key, shown, f"must be bytes, at least {low}: 4294967296 or 4G")
        return count

    def mapping(self, key: str) -> Mapping[str, Any]:
        """A mapping, empty if it is not given."""
        value = self._get(key)
        if value is _NO_VALUE:
            return {}
        if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
            raise self._refuse(key, value, "expected a mapping")
        return dict(value)

    def mappings(self, key: str) -> list[Mapping[str, Any]]:
        """A list of mappings, at least one."""
        value = self._get(key)
        if not isinstance(value, list | tuple) or not value or not all(isinstance(each, Mapping) for each in value):
            raise self._refuse(key, None if value is _NO_VALUE else value, "expected a list of mappings, at least one")
        return list(value)


def _whole(value: object) -> int | None:
    """The whole number that a value is, or says; None: it is none."""
    if isinstance(value, str):
        try:
            return int(value)
        except ValueError:
            pass
        try:
            value = float(value)
        except ValueError:
            return None
    if isinstance(value, float) and math.isfinite(value) and value == int(value):
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None
