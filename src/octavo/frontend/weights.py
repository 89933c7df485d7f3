"""New weights for an engine, as methods with vLLM's names.

Owns the names, arguments and messages; `octavo.rl.session` does what they ask. Knows neither tensors nor transports.
`WeightMethods` waits for its core's answers; the server's AsyncEngine has the same methods as coroutines.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any

import msgspec

from octavo.request.sampling_params import ParameterError
from octavo.rl.session import check_version, result_of

MAX_ROWS = 1024  # of a tensor that is told as numbers


def message(**fields: Any) -> bytes:
    """The payload of a call with arguments. Raises ParameterError for what is no plain data."""
    try:
        return msgspec.msgpack.encode(fields)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ParameterError("weights", f"must be plain data: {error}", "invalid_type") from None


def told(name: str, request: Mapping[str, Any] | None) -> bytes:
    """The payload of `{name: {...}}`, or of the inner part alone. Raises ParameterError for what is neither."""
    if request is not None and not isinstance(request, Mapping):
        raise ParameterError(name, f"must be an object, got {type(request).__name__}", "invalid_type")
    inner = (request or {}).get(name, request or {})
    if not isinstance(inner, Mapping | list if name == "update_info" else Mapping):
        raise ParameterError(name, f"must be an object, got {type(inner).__name__}", "invalid_type")
    return message(**{str(key): value for key, value in (request or {}).items()})


def rows_of(name: object, truncate_size: object) -> bytes:
    """The payload of a question for values. Raises ParameterError."""
    if not isinstance(name, str):
        raise ParameterError("name", f"must be text, got {type(name).__name__}", "invalid_type")
    if type(truncate_size) is not int or not 1 <= truncate_size <= MAX_ROWS:
        raise ParameterError("truncate_size", f"must be in [1, {MAX_ROWS}], got {str(truncate_size)[:50]}")
    return msgspec.msgpack.encode((name, truncate_size))


class WeightMethods(abc.ABC):
    """For a class that asks its core between two steps."""

    @abc.abstractmethod
    def _ask_core(self, name: str, payload: bytes = b"") -> bytes:
        """See EngineCore.call."""

    def init_weight_transfer_engine(self, request: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Meet the sender: `{"init_info": {...}}`, whose keys are the backend's; "backend" may name another one.

        Returns {"workers": what each worker tells}. Raises WeightUpdateError for what cannot be used,
        WeightTransferError where nobody is met within the deadline, WeightConflictError while an update is open.
        """
        return dict(result_of(self._ask_core("init_weight_transfer_engine", told("init_info", request))))

    def shutdown_weight_transfer_engine(self) -> None:
        """Let go of the sender; an open update is aborted. It may be initialized again."""
        result_of(self._ask_core("shutdown_weight_transfer_engine"))

    def start_weight_update(
        self, *, partial: bool = False, on_running: str = "recompute", is_checkpoint_format: bool = True
    ) -> str:
        """Begin an update. The old weights serve until it is finished. Its name: what comes with another is refused.

        partial: a subset of the weights may come. on_running: what becomes of requests that have begun: "recompute"
        (their tokens stay, K and V are computed again), "keep_kv" (later tokens attend K and V of the old weights, and
        say so) or "abort". Raises WeightConflictError while one is open.
        """
        fields = {"partial": partial, "on_running": on_running, "is_checkpoint_format": is_checkpoint_format}
        return str(result_of(self._ask_core("start_weight_update", message(**fields)))["session"])

    def update_weights(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Receive tensors: `{"update_info": {"names", "dtype_names", "shapes", ...}}`, with the checkpoint's names.

        Beside it may stand "session", the name that the start gave. Where these are the first tensors, or the last,
        "start" and "finish" may be the arguments of `start_weight_update`, which then gives the name that "session"
        says, and of `finish_weight_update`, whose answer is among the rest: one call is a whole update. Other threads'
        requests go on meanwhile. Returns {"num_tensors", "num_bytes"}. Whatever it raises, the update is over: the old
        weights serve on, unless a transport had begun to overwrite them.
        """
        return dict(result_of(self._ask_core("update_weights", told("update_info", request))))

    def finish_weight_update(
        self, weight_version: str | None = None, *, on_running: str | None = None, session: str | None = None
    ) -> dict[str, Any]:
        """Apply the update: steps from now on run with it. Returns {"weight_version", "num_tensors"}.

        weight_version: a label of up to 256 characters that can be printed; None: the number of updates so far.
        on_running: instead of what the start said. session: the name that the start gave. Raises WeightUpdateError,
        which names tensors, unless every weight has come.
        """
        fields = {"weight_version": weight_version, "on_running": on_running, "session": session}
        return dict(result_of(self._ask_core("finish_weight_update", message(**fields))))

    def abort_weight_update(self, *, session: str | None = None) -> None:
        """End the update that is open without applying it; a receive or a meeting that waits is cut short.

        session: the name that the start gave. Raises WeightConflictError where no update is open, or another one.
        """
        result_of(self._ask_core("abort_weight_update", message(session=session)))

    def update_weight_version(self, weight_version: str) -> None:
        """Give the weights that are there another label. No request and no cached block is touched."""
        if not isinstance(weight_version, str):
            raise ParameterError("weight_version", f"must be text, got {type(weight_version).__name__}", "invalid_type")
        check_version(weight_version)
        result_of(self._ask_core("update_weight_version", msgspec.msgpack.encode(weight_version)))

    def get_weight_version(self) -> str:
        """The label of the weights; "default" before the first update."""
        return str(self.weight_state()["weight_version"])

    def get_weight_checksums(self) -> dict[str, Any]:
        """{"checksums": 16 hexadecimal digits by a checkpoint's names, "own_form", "weight_version"}.

        They are `octavo.rl.checksum`'s of the tensors as they are computed with, but for the names in own_form, whose
        layer keeps its weights in another form. Raises WeightConflictError where there are no whole weights.
        """
        return dict(result_of(self._ask_core("weight_checksums")))

    def get_weights_by_name(self, name: str, truncate_size: int = 100) -> list[Any]:
        """The first `truncate_size` rows of a checkpoint's tensor, as numbers.

        Raises WeightUpdateError for a name that the model has not, and WeightConflictError where no weights are whole.
        """
        return list(result_of(self._ask_core("weight_values", rows_of(name, truncate_size))))

    def weight_state(self) -> dict[str, Any]:
        """{"state": "ready" | "open" | "held", "weight_version", "age" of an update, "lost_because", "stats"}."""
        return dict(result_of(self._ask_core("weight_state")))
