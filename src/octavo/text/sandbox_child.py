"""The text sandbox's inside: a process that runs chat templates and tokenizes long texts.

Owns its own limits (processor time and address space, set for each job; files), and the frames on its socket. Keeps
nothing between jobs. Invariant: one frame in, one frame out, in order; what exceeds a limit ends this process and
nothing else, and the sandbox outside answers for it.

Run as `python -m octavo.text.sandbox_child SOCKET PARENT`. First frame: Parts; its answer says that jobs may come.
"""

from __future__ import annotations

import array
import contextlib
import json
import resource
import signal
import socket
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from octavo.request.validation import ParameterError, check_unicode
from octavo.startup.child import exit_with_parent
from octavo.text.control_tokens import ControlTokens, encode_text
from octavo.text.template import ChatTemplate
from octavo.text.tokenizer import Tokenizer

_HEAD = struct.Struct("<I")


class Parts(msgspec.Struct, frozen=True, kw_only=True):
    """What a child is made of. An empty `backend`: there is no tokenizer."""

    backend: str = ""  # the tokenizer, as the contents of a tokenizer.json
    control_tokens: dict[str, int] = {}
    special_tokens: dict[str, Any] = {}
    templates: dict[str, str] = {}


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One thing to do, within limits."""

    name: str
    data: bytes
    options: dict[str, Any] = {}
    seconds: float  # of processor time
    memory_bytes: int  # beyond what the child takes before its first job


class Answer(msgspec.Struct, frozen=True):
    """What came of a job: `data`, or with a `code` a user's mistake."""

    data: bytes = b""
    field: str = ""
    message: str = ""
    code: str = ""


class Texts:
    """A model's tokenizer and templates, as far as jobs need them."""

    def __init__(self, parts: Parts) -> None:
        """Raises ValueError for a tokenizer that cannot be read, which the parent could read."""
        self.template = ChatTemplate(parts.templates, parts.special_tokens)
        if parts.backend:
            import tokenizers

            self.tokenizer = Tokenizer(tokenizers.Tokenizer.from_str(parts.backend), {}, {})
            self.control = ControlTokens(self.tokenizer.backend, parts.control_tokens)


Run = Callable[[Texts, bytes, Mapping[str, Any]], bytes]


def render(texts: Texts, data: bytes, options: Mapping[str, Any]) -> bytes:
    """A conversation, as ChatTemplate.conversation gives it in JSON: its text, with guards."""
    rendered = texts.template.render(**json.loads(data), guard=texts.control.guard)
    check_unicode("messages", rendered)
    return rendered.encode()


def encode(texts: Texts, data: bytes, options: Mapping[str, Any]) -> bytes:
    """A text: its token ids, each four bytes. `guarded`: as rendered text is."""
    if options["guarded"]:
        token_ids = texts.control.encode(data.decode(), options["add_special_tokens"])
    else:
        token_ids = encode_text(texts.tokenizer.backend, data.decode(), options["add_special_tokens"])
    return array.array("I", token_ids).tobytes()


def decode(texts: Texts, data: bytes, options: Mapping[str, Any]) -> bytes:
    """Token ids: their text."""
    token_ids = array.array("I", data).tolist()
    return texts.tokenizer.decode(token_ids, options["skip_special_tokens"]).encode()


JOBS: dict[str, Run] = {"render": render, "encode": encode, "decode": decode}


def main(argv: Sequence[str], jobs: Mapping[str, Run] = JOBS) -> None:
    """Serve until the socket is closed."""
    connection = socket.socket(fileno=int(argv[0]))
    if not exit_with_parent(int(argv[1])):
        return
    first = receive(connection)
    if first is None:
        return
    texts = Texts(msgspec.msgpack.decode(first, type=Parts))
    own_bytes = _address_space()
    for limit in (resource.RLIMIT_CORE, resource.RLIMIT_FSIZE):
        resource.setrlimit(limit, (0, 0))
    send(connection, Answer())
    while (frame := receive(connection)) is not None:
        job = msgspec.msgpack.decode(frame, type=Job)
        _limit_memory(own_bytes + job.memory_bytes if own_bytes else resource.RLIM_INFINITY)
        signal.setitimer(signal.ITIMER_PROF, job.seconds)  # nobody handles SIGPROF: it ends the process
        answer = _run(jobs[job.name], texts, job)
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        send(connection, answer)


def _run(run: Run, texts: Texts, job: Job) -> Answer:
    try:
        return Answer(run(texts, job.data, job.options))
    except ParameterError as error:
        return Answer(b"", error.field, str(error).removeprefix(f"{error.field}: "), error.code)
    except (MemoryError, RecursionError) as error:
        return Answer(b"", job.name, f"{type(error).__name__} at work", "too_complex")


def send(connection: socket.socket, message: msgspec.Struct) -> None:
    """One frame: the length of a msgpack text, and the text."""
    connection.sendall(frame_of(message))


def frame_of(message: msgspec.Struct) -> bytes:
    """A message as it is sent."""
    text = msgspec.msgpack.encode(message)
    return _HEAD.pack(len(text)) + text


def receive(connection: socket.socket) -> bytes | bytearray | None:
    """One frame's text; None at the end."""
    head = _receive_exactly(connection, _HEAD.size)
    return None if head is None else _receive_exactly(connection, _HEAD.unpack(head)[0])


def _receive_exactly(connection: socket.socket, count: int) -> bytearray | None:
    data = bytearray(count)
    view, at = memoryview(data), 0
    while at < count:
        num_bytes = connection.recv_into(view[at:])
        if not num_bytes:
            return None
        at += num_bytes
    return data


def _address_space() -> int:
    """Bytes that this process has mapped; 0 where the system does not say."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        return 0


def _limit_memory(num_bytes: int) -> None:
    with contextlib.suppress(ValueError, OSError):  # a stricter limit of the system's own stays
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (num_bytes, hard))


if __name__ == "__main__":
    main(sys.argv[1:])
