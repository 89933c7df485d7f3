"""The routes that say what weights an engine has, under vLLM's and SGLang's names.

Owns what each takes and answers, and the snapshot that SGLang's clients compare with. Invariants: all of it is for
administrators; nothing is changed: what sets weights to zeros elsewhere is refused by name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import msgspec

from octavo.rl.session import WeightConflictError
from octavo.serve.errors import ApiError, bad_request
from octavo.serve.http.exchange import Exchange
from octavo.serve.routes.control import moving, read_options, told
from octavo.serve.state import ServeState

_NO_RESET = "sets weights to values that nobody trained, and is not done here: send an update"
_IGNORED = frozenset({"allow_quant_error", "selector"})
MAX_SKIPPED = 1024  # each is sought in the name of each weight


class Checker(msgspec.Struct, kw_only=True):
    """POST /weight_checker."""

    action: str = ""
    baseline: dict[str, str] | None = None


class SglangChecker(msgspec.Struct, kw_only=True):
    """GET or POST /weights_checker."""

    action: str = "checksum"
    skip_tensor_list: list[str] | None = None


class ByName(msgspec.Struct, kw_only=True):
    """GET or POST /get_weights_by_name."""

    name: str = ""
    truncate_size: int = 100


async def weight_checker(state: ServeState, exchange: Exchange) -> None:
    """POST /weight_checker: the checksum of each weight, or where they differ from a baseline's."""
    options, warnings = await read_options(state, exchange, Checker)
    if options.action == "reset":
        raise bad_request("unsupported_parameter", f"action: reset {_NO_RESET}", "action")
    if options.action not in ("checksum", "compare"):
        raise bad_request("invalid_value", "action: must be checksum or compare", "action")
    if options.action == "compare" and options.baseline is None:
        raise bad_request("missing_field", "baseline: compare needs the checksums of another time", "baseline")
    known = await _checksums(state)
    if options.baseline is None or options.action == "checksum":
        await exchange.reply_json(told(known, warnings))
        return
    differing = _differing(known["checksums"], options.baseline)
    await exchange.reply_json(told({"match": not differing, "mismatches": differing}, warnings))


async def weights_checker(state: ServeState, exchange: Exchange) -> None:
    """GET or POST /weights_checker, SGLang's: a snapshot is of checksums, and the server's until the next."""
    options, warnings = await read_options(state, exchange, SglangChecker, _IGNORED)
    if options.action == "reset_tensors":
        raise bad_request("unsupported_parameter", f"action: reset_tensors {_NO_RESET}", "action")
    if options.action not in ("checksum", "snapshot", "compare"):
        raise bad_request("invalid_value", "action: must be checksum, snapshot or compare", "action")
    skipped = options.skip_tensor_list or []
    if len(skipped) > MAX_SKIPPED:
        limit = f"may hold at most {MAX_SKIPPED} parts of names, got {len(skipped)}"
        raise bad_request("too_many", f"skip_tensor_list: {limit}", "skip_tensor_list")
    found = (await _checksums(state))["checksums"]
    own = {name: value for name, value in found.items() if not any(part in name for part in skipped)}
    answer: dict[str, Any] = {"success": True, "message": "Success"}
    if options.action == "snapshot":
        state.weights_snapshot = own
    elif options.action == "compare":
        if not state.weights_snapshot:
            raise ApiError(409, "wrong_state", "compare: there is no snapshot yet: take one first")
        before = {name: state.weights_snapshot[name] for name in own if name in state.weights_snapshot}
        differing = _differing(own, before)
        if differing:
            shown = ", ".join(differing[:5])
            raise bad_request("weights_differ", f"{len(differing)} weights differ from the snapshot: {shown}")
    else:
        whole = hashlib.sha256("".join(f"{name}{own[name]}" for name in sorted(own)).encode()).hexdigest()
        place = {"role": "target", "rank": 0, "size": 1} | {
            f"{kind}_{end}": value for kind in ("tp", "dp", "pp") for end, value in (("rank", 0), ("size", 1))
        }
        rank = {"checksums": own, "per_gpu_checksum": whole, "parallelism_info": place}
        answer |= {"ranks": [rank], "per_engine_checksum": whole}
    await exchange.reply_json(told(answer, warnings))


async def get_weights_by_name(state: ServeState, exchange: Exchange) -> None:
    """GET or POST /get_weights_by_name, SGLang's: the first rows of a weight, as numbers."""
    options, _ = await read_options(state, exchange, ByName)
    if not options.name:
        raise bad_request("missing_field", "name: is missing", "name")
    with moving(state):
        try:
            rows = await state.engine.get_weights_by_name(options.name, options.truncate_size)
        except WeightConflictError as error:
            raise ApiError(409, "weight_update_conflict", str(error)) from None
    await exchange.reply_json(rows)


async def _checksums(state: ServeState) -> dict[str, Any]:
    with moving(state):
        try:
            return await state.engine.get_weight_checksums()
        except WeightConflictError as error:
            raise ApiError(409, "weight_update_conflict", str(error)) from None


def _differing(found: Mapping[str, str], before: Mapping[str, str]) -> list[str]:
    return sorted(name for name in found.keys() | before.keys() if found.get(name) != before.get(name))
