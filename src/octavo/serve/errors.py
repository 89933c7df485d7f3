"""The errors of the server: one envelope, a closed list of codes, texts that repeat nothing a client sent.

Owns ApiError, its JSON form (OpenAI's), and the mapping from the errors of other layers. Knows no route. Invariant:
every reply that is no success has this form; a message has at most 300 characters, a field's name 200; what was not
foreseen is "internal error" and the request's id, its details are in the log only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import msgspec

from octavo.request.sampling_params import ParameterError

MAX_MESSAGE_CHARS = 300
MAX_PARAM_CHARS = 200
Headers = Sequence[tuple[bytes, bytes]]


class ErrorInfo(msgspec.Struct):
    """What the envelope holds."""

    message: str
    type: str
    param: str | None
    code: str | int | None


class Envelope(msgspec.Struct):
    """{"error": {...}}"""

    error: ErrorInfo


class ApiError(Exception):
    """A reply that is no success."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        param: str | None = None,
        *,
        headers: Headers = (),
        close: bool = False,
    ) -> None:
        """`close`: the connection ends with the reply."""
        super().__init__(message)
        self.status, self.code, self.close = status, code, close
        self.param = param and param[:MAX_PARAM_CHARS]
        self.message = message[:MAX_MESSAGE_CHARS]
        self.headers = list(headers)

    @property
    def info(self) -> ErrorInfo:
        """What the envelope holds."""
        return ErrorInfo(self.message, _TYPES.get(self.status, "invalid_request_error"), self.param, self.code)

    def body(self) -> bytes:
        """The envelope as JSON."""
        return msgspec.json.encode(Envelope(self.info))

    def event(self) -> bytes:
        """The envelope as an event of a stream that has begun."""
        return b"data: " + self.body() + b"\n\n"


_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "unavailable_error",
    504: "timeout_error",
}


def bad_request(code: str, message: str, param: str | None = None) -> ApiError:
    """400."""
    return ApiError(400, code, message, param)


def from_parameter_error(error: ParameterError, names: dict[str, str] | None = None) -> ApiError:
    """A mistake in a request. `names`: what the client calls a field that has another name inside."""
    text = str(error)
    field, separator, rest = text.partition(": ")
    name = (names or {}).get(error.field, error.field)
    if separator and field == error.field:
        text = f"{name}: {rest}"
    if error.code == "template_failed":
        return bad_request("template_failed", text, "messages")
    if error.code == "context_length_exceeded":
        text = f"{text} (this model's maximum context length)"
    return bad_request(error.code, text, name)


@contextlib.contextmanager
def renaming(names: dict[str, str]) -> Iterator[None]:
    """Within, a ParameterError is an ApiError that calls fields as the client does."""
    try:
        yield
    except ParameterError as error:
        raise from_parameter_error(error, names) from None


def not_ready(state: str, retry_after: float = 1.0) -> ApiError:
    """503 with what the engine is doing."""
    seconds = max(1, round(retry_after))
    headers = [(b"retry-after", b"%d" % seconds)]
    message = {
        "loading": "Loading model",
        "restarting": "The engine is being restarted",
        "draining": "The server is shutting down",
    }.get(state, "The engine does not answer")
    code = {"loading": "loading", "restarting": "engine_restarting", "draining": "draining"}.get(state, "engine_dead")
    return ApiError(503, code, message, headers=headers, close=state == "draining")


def queue_full(message: str, retry_after: float) -> ApiError:
    """503: come back later."""
    headers = [(b"retry-after", b"%d" % max(1, round(retry_after)))]
    return ApiError(503, "overloaded", message, headers=headers)


def internal(request_id: str) -> ApiError:
    """500, for what was not foreseen; trying again would not help."""
    headers = [(b"x-should-retry", b"false")]
    return ApiError(500, "internal_error", f"internal error; the log has more under {request_id}", headers=headers)
