"""Turn: the order that the halves of a connector written for vLLM pass on. It stays in its process."""

from __future__ import annotations

from typing import Any

from octavo.kv_connector.orders import Order


class Turn(Order, frozen=True, kw_only=True):
    """A step of the connector alone."""

    meta: Any = None  # what its build_connector_meta gave; None: nothing is bound, a send is waited for
    request_id: str = ""
    waits: bool = False  # until get_finished names the request
