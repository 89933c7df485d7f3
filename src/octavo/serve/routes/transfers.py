"""GET /kv_transfer and POST /kv_transfer/release: what a router asks of, and tells, an engine with a connector.

Owns both. Invariant: an offer is named by its transfer id, which nobody knows but who asked for it.
"""

from __future__ import annotations

import msgspec

from octavo.serve.engine.refusals import EngineDeadError
from octavo.serve.errors import bad_request, not_ready
from octavo.serve.http.exchange import Exchange
from octavo.serve.state import ServeState

MAX_IDS = 4096  # of one release
_MAX_TEXT = 256  # characters of an id


async def standing(state: ServeState, exchange: Exchange) -> None:
    """GET /kv_transfer: loads that failed since the start, and why the blocks of a peer cannot be taken at all."""
    told = await _ask(state, "transfers")
    await exchange.reply_json(msgspec.msgpack.decode(told, type=dict[str, int | str]))


async def release(state: ServeState, exchange: Exchange) -> None:
    """POST /kv_transfer/release: nobody will fetch what is on offer under `transfer_ids`, now or soon."""
    ids = (await exchange.json()).get("transfer_ids")
    if not isinstance(ids, list) or not all(isinstance(each, str) and 1 <= len(each) <= _MAX_TEXT for each in ids):
        text = f"transfer_ids: must be a list of strings of 1 to {_MAX_TEXT} characters"
        raise bad_request("invalid_type", text, "transfer_ids")
    if len(ids) > MAX_IDS:
        raise bad_request("too_many", f"transfer_ids: may hold at most {MAX_IDS} ids, got {len(ids)}", "transfer_ids")
    told = await _ask(state, "release_transfers", msgspec.msgpack.encode(ids))
    await exchange.reply_json({"released": msgspec.msgpack.decode(told, type=int)})


async def _ask(state: ServeState, name: str, payload: bytes = b"") -> bytes:
    state.check_ready()
    try:
        return await state.engine.call(name, payload)
    except EngineDeadError as error:
        raise not_ready(state.engine.state, error.retry_after) from None
