"""Peers: which hosts an engine connects to for blocks, as `kv_peers` of kv_transfer_config says.

Owns the reading of it, and the answer for a host that a request names. Whoever sends a request may name any host, and
what comes from there is found by everybody's prompts: so by default it is this host alone. Invariant: to ask about a
host asks no name server; names of the setting are looked up once, when it is read.
"""

from __future__ import annotations

import dataclasses
import functools
import ipaddress
import socket
from collections.abc import Mapping, Sequence
from typing import Any

from octavo.config.settings import ConfigError

KEY = "kv_peers"
_FIELD = f"kv_transfer_config.{KEY}"
_OWN = "localhost"
_CHANGE = 'e.g. ["10.0.0.7", "10.1.0.0/16", "prefill-1.example"]'
_Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_Network = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclasses.dataclass(frozen=True, slots=True)
class Peers:
    """Hosts. None are given: this host alone."""

    given: tuple[str, ...] = ()
    networks: tuple[_Network, ...] = ()

    def trust(self, host: str) -> bool:
        """Whether an engine may connect to a host, by the name or address that it is called by."""
        address = _address(host)
        if not self.given:
            return host.lower() == _OWN if address is None else _is_own(address)
        if address is None:
            return "/" not in host and host.lower() in self.given
        return any(address in network for network in self.networks)

    def may_come(self, host: str) -> bool:
        """Whether who comes from there may ask for blocks: by default whoever reaches `kv_ip`."""
        return not self.given or self.trust(host)

    def refusal(self, host: str) -> str:
        """Why not, with what to change."""
        allowed = ", ".join(self.given) if self.given else "this host alone"
        limit = f"names {host[:80]!a}, and this engine takes blocks from {allowed}"
        return f"{limit}: list its address or network in {KEY} of --kv-transfer-config, if it is one of yours"


NO_PEERS = Peers()


def read_peers(given: Mapping[str, Any]) -> Peers:
    """What kv_transfer_config says of them. Raises ConfigError."""
    value = given.get(KEY)
    if value is None:
        return NO_PEERS
    entries = [value] if isinstance(value, str) else value
    if not isinstance(entries, Sequence) or not entries or not all(isinstance(each, str) and each for each in entries):
        raise ConfigError(_FIELD, value, "expected hosts, addresses or networks, at least one", _CHANGE)
    return _read(tuple(each.lower() for each in entries))


@functools.lru_cache(maxsize=64)
def _read(given: tuple[str, ...]) -> Peers:
    return Peers(given, tuple(network for each in given for network in _networks(each)))


def _networks(entry: str) -> list[_Network]:
    try:
        network = ipaddress.ip_network(entry)
        mapped = getattr(network.network_address, "ipv4_mapped", None)
        return [network if mapped is None else ipaddress.ip_network((mapped, max(network.prefixlen - 96, 0)))]
    except ValueError as error:
        if "/" in entry or entry.replace(".", "").isdecimal() or ":" in entry:
            raise ConfigError(_FIELD, entry, f"is no address or network: {error}", _CHANGE) from None
    try:
        found = socket.getaddrinfo(entry, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        limit = f"is a name that cannot be looked up: {error}"
        raise ConfigError(_FIELD, entry, limit, "give its address, or its network") from None
    return [ipaddress.ip_network(str(where[4][0]).partition("%")[0]) for where in found]


def _address(host: str) -> _Address | None:
    """None: it is a name."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def _is_own(address: _Address) -> bool:
    """Whether it is one of this host's: what is sent to it comes from it."""
    if address.is_loopback:
        return True
    if address.is_multicast or address.is_unspecified or address.is_reserved:
        return False
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((str(address), 9))  # sends nothing
            return _address(probe.getsockname()[0]) == address
    except (OSError, TypeError):  # the latter of a zone that is no text of the system's
        return False
