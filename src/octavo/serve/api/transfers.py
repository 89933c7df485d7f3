"""What a request says to the engine's connector: `kv_transfer_params` of its body.

Owns its way to the engine. Knows no connector. Invariant: a server without a connector refuses it, and what reaches an
engine is plain data of the kinds that connectors read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.request import transfer_params
from octavo.serve.errors import bad_request
from octavo.serve.state import ServeState


def with_transfer(state: ServeState, given: Mapping[str, Any], wanted: object) -> dict[str, Any]:
    """Sampling fields, with what a body's kv_transfer_params say of all its prompts among extra_args.

    Raises ApiError, ParameterError.
    """
    found, name = dict(given), transfer_params.NAME
    if wanted is None:
        return found
    if not state.engine.config.kv_transfer_config:
        raise bad_request("not_allowed", f"{name}: the server has no connector (--kv-transfer-config)", name)
    said = transfer_params.check(wanted, state.engine.limits.max_model_len)
    said.pop(transfer_params.EACH, None)
    found["extra_args"] = {**(found.get("extra_args") or {}), name: said}
    return found


def each_transfer(wanted: Mapping[str, Any] | None, num_prompts: int) -> list[dict[str, Any]]:
    """What is said of each of a body's prompts, where they differ. `wanted`: as checked. Raises ParameterError."""
    if wanted is None or (num_prompts == 1 and wanted.get(transfer_params.EACH) is None):
        return []
    return transfer_params.split(wanted, num_prompts)
