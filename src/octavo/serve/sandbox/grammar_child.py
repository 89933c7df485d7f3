"""The grammar sandbox's inside: a process that compiles foreign forms and says whether that worked.

Owns its own limits (address space, processor time, files), which it sets before it reads a form, and the frames on its
standard input and output. Knows no request and keeps nothing between forms. Invariant: one frame in, one frame out, in
order; whatever a form does to it, the sandbox outside answers for it.

Run as `python -m octavo.serve.sandbox.grammar_child MEMORY_BYTES CPU_SECONDS PARENT`. First frame: a Vocabulary.
"""

from __future__ import annotations

import contextlib
import resource
import struct
import sys
import threading
from collections.abc import Sequence
from typing import BinaryIO

import msgspec

from octavo.grammar.compiler import Grammars, Vocabulary
from octavo.request.structured_outputs import StructuredOutputsParams
from octavo.request.validation import ParameterError
from octavo.startup.child import exit_with_parent

MAX_FRAME_BYTES = 1 << 28
STACK_BYTES = 16 << 20
_HEAD = struct.Struct("<I")


class Verdict(msgspec.Struct, frozen=True):
    """A form's fate; an empty `code`: it can be compiled, as `spelled` if that is not empty."""

    field: str = ""
    message: str = ""
    code: str = ""
    spelled: str = ""


def pack(message: msgspec.Struct) -> bytes:
    """A frame: the length of a msgpack text, and the text."""
    text = msgspec.msgpack.encode(message)
    return _HEAD.pack(len(text)) + text


def frame_length(head: bytes) -> int:
    """How much follows a frame's first four bytes."""
    length: int = _HEAD.unpack(head)[0]
    return length


def main(argv: Sequence[str]) -> None:
    """Serve until the input ends, in a thread.

    A thread's stack is mapped whole before the limits. The first thread's grows as it is used: where the limit of the
    address space forbids that, the process would crash (SIGSEGV) instead of being told that memory is short.
    """
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=_serve, args=(argv,))
    thread.start()
    thread.join()


def _serve(argv: Sequence[str]) -> None:
    memory_bytes, cpu_seconds, parent = int(argv[0]), int(argv[1]), int(argv[2])
    if not exit_with_parent(parent):
        return
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    text = _read(source)
    if text is None:
        return
    vocabulary = msgspec.msgpack.decode(text, type=Vocabulary)
    grammars = Grammars(lambda: vocabulary, len(vocabulary.tokens), vocabulary.eos_token_ids)
    with contextlib.suppress(ParameterError):  # imports the library and builds the tokenizer, before the limits
        grammars.build(StructuredOutputsParams(choice=["ready"]))
    sink.write(pack(Verdict()))
    sink.flush()
    _limit(memory_bytes)
    while (text := _read(source)) is not None:
        used = resource.getrusage(resource.RUSAGE_SELF)
        soft = int(used.ru_utime + used.ru_stime) + cpu_seconds + 1
        resource.setrlimit(resource.RLIMIT_CPU, (soft, resource.RLIM_INFINITY))
        sink.write(pack(_judge(grammars, text)))
        sink.flush()


def _judge(grammars: Grammars, text: bytes) -> Verdict:
    try:
        structured = msgspec.msgpack.decode(text, type=StructuredOutputsParams)
        spelled, compiled = grammars.spell(structured)
        grammars.try_out(spelled, compiled)
    except ParameterError as error:
        return Verdict(error.field, str(error).removeprefix(f"{error.field}: "), error.code)
    except (MemoryError, RecursionError):
        return Verdict("structured_outputs", "takes more memory than is allowed", "schema_too_complex")
    return Verdict(spelled="" if spelled is structured else str(getattr(spelled, spelled.form)))


def _read(source: BinaryIO) -> bytes | None:
    head = source.read(_HEAD.size)
    if len(head) < _HEAD.size:
        return None
    length = frame_length(head)
    assert length <= MAX_FRAME_BYTES, "the parent sends no longer frames"
    return source.read(length)


def _limit(memory_bytes: int) -> None:
    _lower(resource.RLIMIT_AS, memory_bytes)
    _lower(resource.RLIMIT_NOFILE, 16)
    for limit in (resource.RLIMIT_CORE, resource.RLIMIT_FSIZE):
        resource.setrlimit(limit, (0, 0))


def _lower(kind: int, most: int) -> None:
    """A stricter limit, which the server was started under (`ulimit`), stays."""
    _, hard = resource.getrlimit(kind)
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(kind, (most, most))


if __name__ == "__main__":
    main(sys.argv[1:])
