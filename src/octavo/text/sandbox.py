"""TextSandbox: chat templates and long texts are worked on in child processes, which can be killed.

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
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from octavo.request.sampling_params import Limits, check_text
from octavo.request.validation import ParameterError
from octavo.startup.forks import tell_in_child
from octavo.text.no_tokenizer import NoTokenizer
from octavo.text.sandbox_child import Answer, Job, Parts, receive, send
from octavo.text.template import TemplateError
from octavo.text.tokenizer import Tokenizer

LONG_TEXT = 16_384  # characters; what is shorter is tokenized where it is, in milliseconds
RENDER_SECONDS, RENDER_BYTES = 2.0, 512 << 20
ENCODE_SECONDS, ENCODE_BYTES = 60.0, 6 << 30  # 8 MB may become 8 million tokens of 200 bytes and more
START_SECONDS = 60.0
SPARE_SECONDS = 30.0  # by the clock, beyond a job's processor time: for a machine that is busy, or a child that stands
_KEPT_ENVIRONMENT = ("PATH", "PYTHONHOME", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TZ", "SYSTEMROOT")
_SIZES_OF_POOLS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS")
CLOSED = "the text's children are closed"  # what a SandboxError says then


class SandboxError(Exception):
    """A job was not done. `exceeded`: the limit that ended it, or "" where no child could be had."""

    def __init__(self, exceeded: str, reason: str) -> None:
        """`reason`: for the log."""
        super().__init__(reason)
        self.exceeded = exceeded


class TextSandbox:
    """A tokenizer's children. Any thread may ask; there are as many children as threads that ask at once."""

    def __init__(self, tokenizer: Tokenizer | NoTokenizer, *, module: str = "octavo.text.sandbox_child") -> None:
        """Nothing is started before it is needed. `module`: a child that may know more jobs."""
        self._tokenizer, self._module = tokenizer, module
        self._lock = threading.Lock()
        self._first: Parts | None = None
        self._idle: list[Child] = []
        self._children: set[Child] = set()
        self._closed = False
        self.num_killed = 0
        tell_in_child(self._forked)
        weakref.finalize(self, _end_all, self._children)  # for who forgets to close it

    def _forked(self) -> None:
        """In a forked process the children and their answers are the parent's."""
        self._lock = threading.Lock()
        self._idle.clear()
        self._children.clear()

    def start(self) -> None:
        """Have a child ready. Raises SandboxError."""
        self._give_back(self.take()[0])

    def render_chat(self, messages: object, limits: Limits, **options: Any) -> tuple[str, list[int]]:
        """As Tokenizer.render_chat, within limits: of time and memory, and of what fits the model.

        Raises:
            ParameterError: a bad message, a template that fails or takes too long, a text that cannot fit.
            SandboxError: there is no child.

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
        """The text of a conversation, with guards. Raises ParameterError or SandboxError."""
        with telling_of_template():
            return self.ask(render_job(conversation)).decode()

    def plain(self, rendered: str, limits: Limits) -> str:
        """Rendered text as it is shown. Raises ParameterError for one that cannot fit whatever its tokens are."""
        assert isinstance(self._tokenizer, Tokenizer), "there is no rendered text without a tokenizer"
        return check_text(self._tokenizer.control.plain(rendered), limits, "messages")

    def encode(
        self, text: str, *, add_special_tokens: bool = False, guarded: bool = False, num_chars_before: int = 0
    ) -> list[int]:
        """Token ids of a text; of rendered text if `guarded`. Long ones are worked on in a child.

        `num_chars_before`: other text of the same request. Raises ParameterError or SandboxError.
        """
        tokenizer = self._tokenizer
        if isinstance(tokenizer, NoTokenizer):
            return tokenizer.encode(text)
        if self.is_quick(text, guarded=guarded, num_chars_before=num_chars_before):
            return (tokenizer.control if guarded else tokenizer).encode(text, add_special_tokens)
        with telling_of_text("messages" if guarded else "prompt"):
            return ids_of(self.ask(encode_job(text, add_special_tokens=add_special_tokens, guarded=guarded)))

    def is_quick(self, text: str, *, guarded: bool = False, num_chars_before: int = 0) -> bool:
        """Whether `encode` does a text here: it is short, and needs no tokenizer that is yet to be made."""
        assert isinstance(self._tokenizer, Tokenizer), "there is something to encode with"
        if num_chars_before + len(text) > LONG_TEXT:
            return False
        return not (guarded and self._tokenizer.control.is_guarded(text))

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text of many tokens. Raises ParameterError or SandboxError."""
        data = array.array("I", token_ids).tobytes()
        options = {"skip_special_tokens": skip_special_tokens}
        job = Job(name="decode", data=data, options=options, seconds=ENCODE_SECONDS, memory_bytes=ENCODE_BYTES)
        with telling_of_text("tokens"):
            return self.ask(job).decode()

    def ask(self, job: Job) -> bytes:
        """What a child makes of a job. Raises ParameterError for what it refuses, SandboxError for what it cannot."""
        while True:
            child, is_fresh = self.take()
            try:
                answer = child.ask(job)
            except (OSError, EOFError, msgspec.DecodeError) as error:
                refusal = self.end(child, job, is_fresh=is_fresh, is_late=isinstance(error, TimeoutError))
                if refusal is None:
                    continue
                raise refusal from None
            except BaseException:  # an interrupt: what this child says next would be another job's answer
                self._forget(child)
                raise
            self._give_back(child)
            return told(job, answer)

    def end(self, child: Child, job: Job, *, is_fresh: bool, is_late: bool = False) -> SandboxError | None:
        """End a child that has no answer. What that says of the job; None: it may have been dead before it was asked.

        `is_late`: its time is over by the clock.
        """
        code = self._forget(child)
        if code == -signal.SIGPROF:
            exceeded = f"{job.seconds:g} s"
        elif is_late:  # it had the time and did not use it: it stood, or the machine is busy
            exceeded = ""
        elif is_fresh:
            exceeded = f"{job.memory_bytes >> 20} MB"
        else:
            return None
        self.num_killed += 1
        return SandboxError("" if self._closed else exceeded, f"a child ended at {job.name} ({code})")

    def close(self) -> None:
        """End the children; whoever waits for one gets a SandboxError."""
        with self._lock:
            self._closed = True
            children = list(self._children)
            self._idle.clear()
        for child in children:
            child.kill()

    def take(self) -> tuple[Child, bool]:
        """A child that nobody else asks, and whether it is new. Raises SandboxError."""
        with self._lock:
            if self._closed:
                raise SandboxError("", CLOSED)
            if self._idle:
                return self._idle.pop(), False
            if self._first is None:
                self._first = _parts(self._tokenizer)
        try:
            return self._begun(self._first), True
        except EOFError:  # it was killed, perhaps; another one may live
            pass
        try:
            return self._begun(self._first), True
        except EOFError as error:
            raise SandboxError("", f"a text's child does not start: {error}") from None

    def _begun(self, first: Parts) -> Child:
        """A new child that takes jobs. Raises EOFError if it ended before, SandboxError if there can be none."""
        try:
            child = Child(self._module, self._know)
        except OSError as error:
            raise SandboxError("", f"a text's child cannot be started: {error.strerror}") from None
        try:
            child.begin(first)
        except (OSError, EOFError, msgspec.DecodeError) as error:
            raise EOFError(f"{type(error).__name__} ({self._forget(child)})") from None
        except BaseException:
            self._forget(child)
            raise
        return child

    def _know(self, child: Child) -> None:
        with self._lock:
            self._children.add(child)
            if self._closed:
                raise SandboxError("", CLOSED)

    def _give_back(self, child: Child) -> None:
        with self._lock:
            self._idle.append(child)

    def _forget(self, child: Child) -> int:
        with self._lock:
            self._children.discard(child)
        return child.kill()


def _end_all(children: set[Child]) -> None:
    for child in children:
        child.kill()


class Child:
    """One process of the sandbox, and our end of the socket to it."""

    def __init__(self, module: str, know: Callable[[Child], None]) -> None:
        """`know` is told of it as soon as it runs; what that raises ends it. Raises OSError."""
        environment = {name: os.environ[name] for name in _KEPT_ENVIRONMENT if name in os.environ}
        environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)  # where this process looks
        environment |= dict.fromkeys(_SIZES_OF_POOLS, "1") | {"TOKENIZERS_PARALLELISM": "false"}
        self.socket, theirs = socket.socketpair()
        with theirs, contextlib.ExitStack() as closed_on_failure:
            closed_on_failure.callback(self.socket.close)
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                env=environment,
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            closed_on_failure.callback(self.kill)
            know(self)
            closed_on_failure.pop_all()

    def begin(self, first: Parts) -> None:
        """Wait until it takes jobs. Raises OSError, EOFError or DecodeError."""
        self.socket.settimeout(START_SECONDS)
        send(self.socket, first)
        self._answer()

    def ask(self, job: Job) -> Answer:
        """Its answer. Raises OSError, EOFError or DecodeError if there is none."""
        self.socket.settimeout(job.seconds + SPARE_SECONDS)
        send(self.socket, job)
        return self._answer()

    def kill(self) -> int:
        """End it, if it has not ended. What it ended with."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits for its answer
        if self._process.poll() is None:
            self._process.kill()
        self.socket.close()
        return self._process.wait()

    def _answer(self) -> Answer:
        frame = receive(self.socket)
        if frame is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(1.0)  # so that it can be told what it ended with
            raise EOFError
        return msgspec.msgpack.decode(frame, type=Answer)


def render_job(conversation: bytes) -> Job:
    """What TextSandbox.render asks."""
    return Job(name="render", data=conversation, seconds=RENDER_SECONDS, memory_bytes=RENDER_BYTES)


def encode_job(text: str, *, add_special_tokens: bool, guarded: bool) -> Job:
    """What TextSandbox.encode asks; `ids_of` reads the answer."""
    options = {"guarded": guarded, "add_special_tokens": add_special_tokens}
    return Job(name="encode", data=text.encode(), options=options, seconds=ENCODE_SECONDS, memory_bytes=ENCODE_BYTES)


def ids_of(data: bytes) -> list[int]:
    """Token ids that a child sent."""
    return array.array("I", data).tolist()


def told(job: Job, answer: Answer) -> bytes:
    """What an answer holds. Raises ParameterError or SandboxError for one that says no."""
    if answer.code == "template_failed":
        raise TemplateError(answer.message)
    if answer.code == "too_complex":
        raise SandboxError(f"{job.memory_bytes >> 20} MB", answer.message)
    if answer.code:
        raise ParameterError(answer.field, answer.message, answer.code)
    return answer.data


@contextlib.contextmanager
def telling_of_template() -> Iterator[None]:
    """Within, a limit that a template exceeds is a user's mistake."""
    try:
        yield
    except SandboxError as error:
        if not error.exceeded:
            raise
        raise TemplateError(f"it takes more than {error.exceeded} to render") from None


@contextlib.contextmanager
def telling_of_text(field: str) -> Iterator[None]:
    """Within, a limit that a text of `field` exceeds is a user's mistake."""
    try:
        yield
    except SandboxError as error:
        if not error.exceeded:
            raise
        raise ParameterError(field, f"takes more than {error.exceeded} to tokenize", "too_complex") from None


def _parts(tokenizer: Tokenizer | NoTokenizer) -> Parts:
    if isinstance(tokenizer, NoTokenizer):
        return Parts()
    return Parts(
        backend=tokenizer.backend.to_str(),
        control_tokens=tokenizer.control.ids,
        special_tokens=tokenizer.special_tokens,
        templates=tokenizer.template.sources,
    )
