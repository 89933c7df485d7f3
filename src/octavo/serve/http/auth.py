"""Who may do what: API keys, admin keys, and the class of every route.

Owns the keys, as digests, and the one question asked of every exchange before anything else of it is looked at. Knows
no route. Invariants: what no route says is for users; an answer takes the same time whatever part of a key is right.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import ipaddress
import re
from collections.abc import Iterable, Sequence

from octavo.serve.errors import ApiError

_OF_BROWSERS = (b"origin", b"sec-fetch-site")  # a page's picture has the second alone, and may name any address


class Access(enum.Enum):
    """Who may call a route."""

    PUBLIC = "public"  # anybody: it tells nothing of users or models
    USER = "user"
    ADMIN = "admin"


class Keys:
    """The keys of a server. With no user keys, users need none; so do administrators if there are no keys at all."""

    def __init__(self, user: Iterable[str] = (), admin: Iterable[str] = ()) -> None:
        """Only digests are kept."""
        self._user, self._admin = [list(map(_digest, keys)) for keys in (user, admin)]

    def check(self, headers: Sequence[tuple[bytes, bytes]], access: Access) -> None:
        """Raise ApiError, 401 or 403, unless the exchange with these headers may go on."""
        if access is Access.PUBLIC:
            return
        is_open = not self._user and (access is Access.USER or not self._admin)
        if access is Access.ADMIN and any(name in _OF_BROWSERS for name, _ in headers):
            raise ApiError(403, "forbidden", "browsers may not administrate")
        if is_open:
            return
        given = _digest(_key(headers))
        is_admin, is_user = _among(given, self._admin), _among(given, self._user)
        if not (is_admin or is_user):
            raise ApiError(
                401, "invalid_api_key", "a valid API key is needed", headers=[(b"www-authenticate", b"Bearer")]
            )
        if access is Access.ADMIN and not is_admin:
            raise ApiError(403, "forbidden", "this needs an admin key (--admin-key-file)")


class HostNames:
    """The names under which a server may be asked."""

    def __init__(self, names: Iterable[str], *, is_open: bool) -> None:
        """`names`: beside localhost and all addresses; `*.example` stands for all below it. `is_open`: any name."""
        self._names = {name.lower().rstrip(".") for name in names} | {"localhost", "*.localhost"}
        self._is_open = is_open

    def check(self, host: bytes) -> None:
        """Raise ApiError, 403, unless a request with this Host may go on.

        An address cannot be a page's own name for another machine, so any is let through.
        """
        if self._is_open:
            return
        name = re.sub(r":[0-9]*$", "", host.decode("latin-1").lower()).rstrip(".")
        parents = {"*" + name[at:] for at, char in enumerate(name) if char == "."}
        if name in self._names or not parents.isdisjoint(self._names):
            return
        try:
            ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
        except ValueError:
            message = "the Host header names another server than this one (--allowed-hosts)"
            raise ApiError(403, "host_not_allowed", message) from None


def _digest(key: str | bytes) -> bytes:
    return hashlib.sha256(key.encode() if isinstance(key, str) else key).digest()


def _among(given: bytes, digests: Sequence[bytes]) -> bool:
    """Whether `given` is one of them; all are compared, always."""
    found = False
    for digest in digests:
        found |= hmac.compare_digest(given, digest)
    return found


def _key(headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    """The one key of `Authorization: Bearer` or else `x-api-key`; empty, which is no key, for anything else."""
    given = [value for name, value in headers if name == b"authorization"]
    if given:
        scheme, _, key = given[0].partition(b" ")
        return key.strip() if len(given) == 1 and scheme.lower() == b"bearer" else b""
    given = [value for name, value in headers if name == b"x-api-key"]
    return given[0].strip() if len(given) == 1 else b""
