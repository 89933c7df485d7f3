"""What a request says to the engine's connector: `kv_transfer_params` of its body.

Owns its way to the engine, and what is said of fields that the engine's connector does not act on. Knows the connectors
of the table by name, and loads none. Invariants: a server without a connector refuses it; what reaches an engine is
plain data of the kinds that connectors read, and names no host that the engine may not connect to; what one out of tree
reads is its own affair.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from octavo.config.kv_peers import read_peers
from octavo.config.kv_transfer import EXTRA
from octavo.kv_connector.table import ALIASES, TABLE
from octavo.request import transfer_params
from octavo.request.transfer_params import EACH, FIELDS, NAME, REMOTE
from octavo.serve.errors import bad_request
from octavo.serve.state import ServeState

_UNKNOWN = "unknown field, ignored"
_PEERS = ("p2p", "nixl", "mooncake")  # they move one request's blocks from engine to engine
_LIMITS = ("max_load_tokens", "max_offload_tokens")  # of what is loaded from a store, or kept there
_MAX_TOLD = 8


def with_transfer(state: ServeState, given: Mapping[str, Any], wanted: object, warnings: list[str]) -> dict[str, Any]:
    """Sampling fields, with what a body's kv_transfer_params say of all its prompts among extra_args.

    warnings: gets what is not acted on. Raises ApiError, ParameterError.
    """
    found = dict(given)
    extra = found.get("extra_args")
    if isinstance(extra, Mapping) and extra.get(NAME) is not None:  # past all that is checked here
        raise bad_request("not_allowed", f"extra_args.{NAME}: belongs beside extra_args", f"extra_args.{NAME}")
    if wanted is None:
        return found
    if not state.engine.config.kv_transfer_config:
        raise bad_request("not_allowed", f"{NAME}: the server has no connector (--kv-transfer-config)", NAME)
    said = transfer_params.check(wanted, state.engine.limits.max_model_len)
    _check_hosts(said, state.engine.config.kv_transfer_config)
    idle = _not_acted_on(said, state.engine.config.kv_transfer_config)
    if state.config.strict and (unknown := next((text for text in idle if text.endswith(_UNKNOWN)), "")):
        raise bad_request("unknown_field", unknown.removesuffix(", ignored"), unknown.partition(":")[0])
    warnings += idle
    said.pop(EACH, None)
    found["extra_args"] = {**(extra or {}), NAME: said}
    return found


def each_transfer(wanted: Mapping[str, Any] | None, num_prompts: int) -> list[dict[str, Any]]:
    """What is said of each of a body's prompts, where they differ. `wanted`: as checked. Raises ParameterError."""
    if wanted is None or (num_prompts == 1 and wanted.get(EACH) is None):
        return []
    return transfer_params.split(wanted, num_prompts)


def _check_hosts(said: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Raise ApiError for a host that the engine may not connect to."""
    if all(ALIASES.get(name, name) not in _PEERS for name, _ in _parts(config)):
        return
    peers = read_peers(config)
    for field, host in transfer_params.hosts(said):
        if not peers.trust(host):
            raise bad_request("not_allowed", f"{field} {peers.refusal(host)}", field)


def _not_acted_on(said: Mapping[str, Any], config: Mapping[str, Any]) -> list[str]:
    """A line for each field. said: as checked; config: kv_transfer_config."""
    each: list[dict[str, Any]] = [{**said, **own} for own in said.get(EACH) or [{}]]
    return list(dict.fromkeys(line for own in each for line in _idle(own, config)))[:_MAX_TOLD]


def _idle(said: Mapping[str, Any], config: Mapping[str, Any]) -> Iterator[str]:
    kinds = [(ALIASES.get(name, name), role) for name, role in _parts(config)]
    if any(name not in TABLE for name, _ in kinds):
        return
    given = {name: value for name, value in said.items() if value is not None and name != EACH}
    for name in (name for name in given if name not in FIELDS):
        yield f"{NAME}.{name[:64] if name[:64].isidentifier() else 'a field'}: {_UNKNOWN}"
    roles = [role for name, role in kinds if name in _PEERS]
    for flag, other in (("do_remote_decode", "kv_consumer"), ("do_remote_prefill", "kv_producer")):
        if given.get(flag) and all(role == other for role in roles):
            why = f"kv_role of this engine is {other}" if roles else f"{kinds[0][0]} moves blocks to and from no engine"
            yield f"{NAME}.{flag}: has no effect: {why}"
    lacking = [name for name in REMOTE if not given.get(name)]
    if given.get("remote_addresses"):
        lacking = [name for name in lacking if name not in ("remote_host", "remote_port")]
    if given.get("do_remote_prefill") and lacking and any(role != "kv_producer" for role in roles):
        yield f"{NAME}.do_remote_prefill: has no effect without {', '.join(lacking)}: the prompt is computed here"
    for name in _LIMITS:
        if name in given and all(kind in _PEERS for kind, _ in kinds):
            yield f"{NAME}.{name}: has no effect with {kinds[0][0]}, which keeps nothing"


def _parts(config: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The connectors of a configuration, as checked at the start, and their roles."""
    name = str(config["kv_connector"])
    if config.get("kv_connector_module_path"):
        return [("", "")]
    if ALIASES.get(name, name) != "multi":
        return [(name, str(config["kv_role"]))]
    return [part for own in config[EXTRA]["connectors"] for part in _parts(own)]
