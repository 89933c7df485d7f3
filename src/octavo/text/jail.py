"""TextJail: chat templates and long texts are worked on in child processes, which can be killed.

Owns the children, their limits of processor time and memory, and what is said when one exceeds them. A model's template
is a program that somebody else wrote, and the tokenizers' library holds the interpreter's lock while it works: neither
may hold up, fill or end the process of whoever asks. Knows no requests. Invariant: every question has an answer or an
error within its limits; its result has the bits that the same work in this process would give; a child that exceeds a
limit is replaced.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from octavo.checks import ParameterError
from octavo.sampling_params import Limits, check_text
from octavo.text.jail_child import Answer, Job, Parts, receive, send
from octavo.text.no_tokenizer import NoTokenizer
from octavo.text.template import TemplateError
from octavo.text.tokenizer import Tokenizer

LONG_TEXT = 16_384  # characters; what is shorter is tokenized where it is, in milliseconds
RENDER_SECONDS, RENDER_BYTES = 2.0, 512 << 20
ENCODE_SECONDS, ENCODE_BYTES = 60.0, 6 << 30  # 8 MB may become 8 million tokens of 200 bytes and more
START_SECONDS = 60.0
_SPARE_SECONDS = 30.0  # by the clock, beyond a job's processor time: for a machine that is busy, or a child that stands
_KEPT_ENVIRONMENT = ("PATH", "PYTHONHOME", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TZ", "SYSTEMROOT")
_SIZES_OF_POOLS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS")


class JailError(Exception):
    """A job was not done. `exceeded`: the limit that ended it, or "" where no child could be had."""

    def __init__(self, exceeded: str, reason: str) -> None:
        """`reason`: for the log."""
        super().__init__(reason)
        self.exceeded = exceeded


class TextJail:
    """A tokenizer's children. Any thread may ask; there are as many children as threads that ask at once."""

    def __init__(self, tokenizer: Tokenizer | NoTokenizer, *, module: str = "octavo.text.jail_child") -> None:
        """Nothing is started before it is needed. `module`: a child that may know more jobs."""
        self._tokenizer, self._module = tokenizer, module
        self._lock = threading.Lock()
        self._first: Parts | None = None
        self._idle: list[_Child] = []
        self._children: set[_Child] = set()
        self._closed = False
        self.num_killed = 0

    def start(self) -> None:
        """Have a child ready. Raises JailError."""
        self._give_back(self._take()[0])

    def render_chat(self, messages: object, limits: Limits, **options: Any) -> tuple[str, list[int]]:
        """As Tokenizer.render_chat, within limits: of time and memory, and of what fits the model.

        Raises:
            ParameterError: a bad message, a template that fails or takes too long, a text that cannot fit.
            JailError: there is no child.

        """
        rendered = self.render(self.conversation(messages, **options))
        return self.plain(rendered, limits), self.encode(rendered, guarded=True)

    def conversation(self, messages: object, **options: Any) -> bytes:
        """The checked arguments of `ChatTemplate.render`, for `render`. Raises ParameterError."""
        if isinstance(self._tokenizer, NoTokenizer):
            self._tokenizer.render_chat(messages)
        options["template_kwargs"] = options.pop("chat_template_kwargs", None)
        return json.dumps(self._tokenizer.template.conversation(messages, **options)).encode()

    def render(self, conversation: bytes) -> str:
        """The text of a conversation, with guards. Raises ParameterError or JailError."""
        job = Job(name="render", data=conversation, seconds=RENDER_SECONDS, memory_bytes=RENDER_BYTES)
        try:
            return self.ask(job).decode()
        except JailError as error:
            if not error.exceeded:
                raise
            raise TemplateError(f"it takes more than {error.exceeded} to render") from None

    def plain(self, rendered: str, limits: Limits) -> str:
        """Rendered text as it is shown. Raises ParameterError for one that cannot fit whatever its tokens are."""
        assert isinstance(self._tokenizer, Tokenizer), "there is no rendered text without a tokenizer"
        return check_text(self._tokenizer.control.plain(rendered), limits, "messages")

    def encode(
        self, text: str, *, add_special_tokens: bool = False, guarded: bool = False, num_chars_before: int = 0
    ) -> list[int]:
        """Token ids of a text; of rendered text if `guarded`. Long ones are worked on in a child.

        `num_chars_before`: other text of the same request. Raises ParameterError or JailError.
        """
        tokenizer = self._tokenizer
        if isinstance(tokenizer, NoTokenizer):
            return tokenizer.encode(text)
        if self.is_quick(text, guarded=guarded, num_chars_before=num_chars_before):
            return tokenizer.control.encode(text) if guarded else tokenizer.encode(text, add_special_tokens)
        options = {"guarded": guarded, "add_special_tokens": add_special_tokens}
        data = text.encode()
        job = Job(name="encode", data=data, options=options, seconds=ENCODE_SECONDS, memory_bytes=ENCODE_BYTES)
        return _ids(self._ask_of_text(job, "messages" if guarded else "prompt"))

    def is_quick(self, text: str, *, guarded: bool = False, num_chars_before: int = 0) -> bool:
        """Whether `encode` does a text here: it is short, and needs no tokenizer that is yet to be made."""
        assert isinstance(self._tokenizer, Tokenizer), "there is something to encode with"
        if num_chars_before + len(text) > LONG_TEXT:
            return False
        return not (guarded and self._tokenizer.control.is_guarded(text))

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text of many tokens. Raises ParameterError or JailError."""
        data = array.array("I", token_ids).tobytes()
        options = {"skip_special_tokens": skip_special_tokens}
        job = Job(name="decode", data=data, options=options, seconds=ENCODE_SECONDS, memory_bytes=ENCODE_BYTES)
        return self._ask_of_text(job, "tokens").decode()

    def ask(self, job: Job) -> bytes:
        """What a child makes of a job. Raises ParameterError for what it refuses, JailError for what it cannot do."""
        while True:
            child, is_fresh = self._take()
            try:
                answer = child.ask(job)
            except (OSError, EOFError, msgspec.DecodeError) as error:
                code = self._end(child)
                if isinstance(error, TimeoutError) or code == -signal.SIGPROF:
                    reason = f"{job.seconds:g} s"
                elif is_fresh:
                    reason = f"{job.memory_bytes >> 20} MB"
                else:  # it may have been dead before it was asked: another one tells
                    continue
                self.num_killed += 1
                raise JailError("" if self._closed else reason, f"a child ended at {job.name} ({code})") from None
            except BaseException:  # an interrupt: what this child says next would be another job's answer
                self._end(child)
                raise
            self._give_back(child)
            if answer.code == "template_failed":
                raise TemplateError(answer.message)
            if answer.code == "too_complex":
                raise JailError(f"{job.memory_bytes >> 20} MB", answer.message)
            if answer.code:
                raise ParameterError(answer.field, answer.message, answer.code)
            return answer.data

    def close(self) -> None:
        """End the children; whoever waits for one gets a JailError."""
        with self._lock:
            self._closed = True
            children = list(self._children)
            self._idle.clear()
        for child in children:
            child.kill()

    def _ask_of_text(self, job: Job, field: str) -> bytes:
        try:
            return self.ask(job)
        except JailError as error:
            if not error.exceeded:
                raise
            raise ParameterError(field, f"takes more than {error.exceeded} to tokenize", "too_complex") from None

    def _take(self) -> tuple[_Child, bool]:
        """A child, and whether it is new."""
        with self._lock:
            if self._closed:
                raise JailError("", "the text's children are closed")
            if self._idle:
                return self._idle.pop(), False
            if self._first is None:
                self._first = _parts(self._tokenizer)
        try:
            child = _Child(self._module, self._know)
        except OSError as error:
            raise JailError("", f"a text's child cannot be started: {error.strerror}") from None
        try:
            child.begin(self._first)
        except (OSError, EOFError, msgspec.DecodeError) as error:
            self._end(child)
            raise JailError("", f"a text's child does not start: {type(error).__name__}") from None
        except BaseException:
            self._end(child)
            raise
        return child, True

    def _know(self, child: _Child) -> None:
        with self._lock:
            self._children.add(child)
            if self._closed:
                raise OSError("closed")

    def _give_back(self, child: _Child) -> None:
        with self._lock:
            self._idle.append(child)

    def _end(self, child: _Child) -> int:
        with self._lock:
            self._children.discard(child)
        return child.kill()


class _Child:
    """One process of the jail, and our end of the socket to it."""

    def __init__(self, module: str, know: Callable[[_Child], None]) -> None:
        environment = {name: os.environ[name] for name in _KEPT_ENVIRONMENT if name in os.environ}
        environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)  # where this process looks
        environment |= dict.fromkeys(_SIZES_OF_POOLS, "1") | {"TOKENIZERS_PARALLELISM": "false"}
        self._socket, theirs = socket.socketpair()
        with theirs, contextlib.ExitStack() as closed_on_failure:
            closed_on_failure.callback(self._socket.close)
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()], env=environment, start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip
            closed_on_failure.callback(self.kill)
            know(self)
            closed_on_failure.pop_all()

    def begin(self, first: Parts) -> None:
        self._socket.settimeout(START_SECONDS)
        send(self._socket, first)
        self._answer()

    def ask(self, job: Job) -> Answer:
        self._socket.settimeout(job.seconds + _SPARE_SECONDS)
        send(self._socket, job)
        return self._answer()

    def kill(self) -> int:
        """End it, if it has not ended. What it ended with."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits for its answer
        if self._process.poll() is None:
            self._process.kill()
        self._socket.close()
        return self._process.wait()

    def _answer(self) -> Answer:
        frame = receive(self._socket)
        if frame is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(1.0)  # so that it can be told what it ended with
            raise EOFError
        return msgspec.msgpack.decode(frame, type=Answer)


def _ids(data: bytes) -> list[int]:
    return array.array("I", data).tolist()


def _parts(tokenizer: Tokenizer | NoTokenizer) -> Parts:
    if isinstance(tokenizer, NoTokenizer):
        return Parts()
    return Parts(
        backend=tokenizer.backend.to_str(),
        control_tokens=tokenizer.control.ids,
        special_tokens=tokenizer.special_tokens,
        templates=tokenizer.template.sources,
    )
