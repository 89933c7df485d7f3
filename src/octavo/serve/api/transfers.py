"""What a request says to the engine's connector, and is answered: `kv_transfer_params`, as in vLLM.

Owns the reading of the field. Knows no connector. Invariant: a server without a connector refuses it, and what reaches
an engine is plain data of the kinds that connectors read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.request.sampling_params import ParameterError
from octavo.serve.errors import bad_request
from octavo.serve.state import ServeState

_NAME = "kv_transfer_params"
_COUNTS = ("max_load_tokens", "max_offload_tokens", "remote_num_tokens", "remote_port")
_FLAGS = ("do_remote_decode", "do_remote_prefill")


def with_transfer(state: ServeState, given: Mapping[str, Any], wanted: object) -> dict[str, Any]:
    """Sampling fields, with what a body's kv_transfer_params say among extra_args. Raises ApiError, ParameterError."""
    found = dict(given)
    if wanted is None:
        return found
    if not state.engine.config.kv_transfer_config:
        raise bad_request("not_allowed", f"{_NAME}: the server has no connector (--kv-transfer-config)", _NAME)
    if not isinstance(wanted, Mapping):
        raise ParameterError(_NAME, "must be an object", "invalid_type")
    for name in _COUNTS:
        value = wanted.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
            raise ParameterError(f"{_NAME}.{name}", "must be a whole number of at least 0", "invalid_type")
    for name in _FLAGS:
        if not isinstance(wanted.get(name, False), bool | None):
            raise ParameterError(f"{_NAME}.{name}", "must be true or false", "invalid_type")
    found["extra_args"] = {**(found.get("extra_args") or {}), _NAME: dict(wanted)}
    return found
