"""Structured outputs at the server's edge: what clients send, and the sandbox in which it is tried out.

Owns the mapping of OpenAI's `response_format` and vLLM's `structured_outputs` to StructuredOutputsParams, and
GrammarSandbox: child processes that compile foreign forms within limits of time and memory, so that what reaches the
engine is known to compile. Does not know the engine, which compiles the checked form again (0.5 to 2 ms is usual) and
keeps it. Invariants: every form gets an answer, or is turned away, within the time limit and the longest wait for a
child; a child that exceeds a limit is killed and replaced by the next check that needs one; a form that nobody waits
for any more takes no child from those that somebody waits for.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import math
import os
import signal
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from octavo.grammar.compiler import TokenTexts, Vocabulary
from octavo.request.structured_outputs import StructuredOutputsParams, read_structured_outputs
from octavo.request.validation import ParameterError, type_error
from octavo.serve.sandbox.grammar_child import MAX_FRAME_BYTES, Verdict, frame_length, pack

_LOG = logging.getLogger(__name__)

COMPILE_SECONDS = 4.5  # the answer is there within 5
START_SECONDS = 30.0  # for a child to start; on a busy machine an interpreter takes its time
MEMORY_BYTES = 1 << 30
MAX_CHILDREN = 2
MAX_WAITING = 32  # forms that wait for a child
WAIT_SECONDS = 10.0  # for a child
MAX_VERDICTS = 1024
DEATH_SECONDS = 10.0  # for a child that has closed its pipe to end
_MEMORY_CRASHES = (signal.SIGSEGV, signal.SIGBUS)
_LEAST_WORK = 0.125  # of the time limit: a child that worked for less was not given a processor, and says nothing
_TICK = 0.01  # seconds, by which a kernel counts a process's work
_CRASHES = (*_MEMORY_CRASHES, signal.SIGILL, signal.SIGFPE)
_KEPT_ENVIRONMENT = ("PATH", "PYTHONHOME", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "SYSTEMROOT")


def client_names(field: str, schema: str) -> dict[str, str]:
    """What a client calls the fields of a StructuredOutputsParams that came from `field`, its schema from `schema`."""
    names = {"structured_outputs": field, "structured_outputs.json": schema}
    return names | {f"structured_outputs.{form}": field for form in ("json_object", "structural_tag")}


def form_names(response_format: object, structured_outputs: object) -> dict[str, str]:
    """The same, for a request that may have these two fields; with neither its tools alone can ask for a form."""
    if not _asks_nothing(structured_outputs):
        return {}
    if response_format is not None:
        return client_names("response_format", "response_format.json_schema.schema")
    return client_names("tools", "tools")


def from_response_format(value: object, field: str = "response_format") -> StructuredOutputsParams | None:
    """OpenAI's {"type": "text" | "json_object" | "json_schema"}, the last as chat and Responses have it, or vLLM's tag.

    Errors of the schema itself name `structured_outputs.json`: see `client_names`. Raises ParameterError.
    """
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise type_error(field, "an object", value)
    kind = value.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputsParams(json_object=True)
    if kind == "structural_tag":
        return StructuredOutputsParams(structural_tag=dict(value))
    if kind != "json_schema":
        raise ParameterError(
            f"{field}.type", "must be text, json_object, json_schema or structural_tag", "invalid_value"
        )
    inner = value.get("json_schema", value if "schema" in value else None)
    if not isinstance(inner, Mapping):
        raise type_error(f"{field}.json_schema", "an object", inner)
    schema = inner.get("schema")
    if schema is None:  # OpenAI makes it optional: any object
        return StructuredOutputsParams(json_object=True)
    if not isinstance(schema, Mapping):
        raise type_error(f"{field}.json_schema.schema", "a JSON schema, that is an object", schema)
    return StructuredOutputsParams(json=dict(schema))


def from_request(response_format: object, structured_outputs: object) -> StructuredOutputsParams | None:
    """Of a request's two fields, of which one at most may ask for something. Raises ParameterError."""
    asked = from_response_format(response_format)
    if _asks_nothing(structured_outputs):
        return asked
    if asked is not None:
        raise ParameterError("structured_outputs", "excludes response_format", "conflicting")
    return read_structured_outputs(structured_outputs)


def _asks_nothing(structured_outputs: object) -> bool:
    """Whether it is null, or an object of nulls alone."""
    if isinstance(structured_outputs, Mapping):
        return all(value is None for value in structured_outputs.values())
    return structured_outputs is None


def from_tool_choice(tools: Iterable[Mapping[str, Any]], name: str | None = None) -> StructuredOutputsParams:
    """The form of an output that must be tool calls, as `parsers.tools.Named` and `Required` read it.

    `name`: the arguments of this tool, as one JSON object. None: a list of at least one {"name", "arguments"}. The JSON
    is compact: white space is where a model that would rather not call gets lost.
    """
    functions = {str(tool["function"]["name"]): tool["function"] for tool in tools}
    schemas = {each: dict(function.get("parameters") or {"type": "object"}) for each, function in functions.items()}
    if name is not None:
        return StructuredOutputsParams(json=schemas[name], disable_any_whitespace=True)
    calls: list[dict[str, Any]] = []
    for number, each in enumerate(schemas):
        properties = {"name": {"const": each}, "arguments": {"$ref": f"#/$defs/{number}"}}
        calls.append(
            {
                "type": "object",
                "properties": properties,
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    arguments = {str(number): _moved(schema, f"#/$defs/{number}") for number, schema in enumerate(schemas.values())}
    for schema in arguments.values():
        schema.pop("$id", None)  # a name of its own would make it a root again
    schema = {"type": "array", "minItems": 1, "items": {"anyOf": calls}, "$defs": arguments}
    return StructuredOutputsParams(json=schema, disable_any_whitespace=True)


def _moved(node: Any, root: str) -> Any:
    """A schema as a part of another, at `root`: where it refers to itself, it does so there."""
    if isinstance(node, list):
        return [_moved(entry, root) for entry in node]
    if not isinstance(node, Mapping):
        return node
    moved = {key: _moved(value, root) for key, value in node.items()}
    reference = node.get("$ref")
    if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):
        moved["$ref"] = root + reference[1:]
    return moved


class SandboxBusyError(RuntimeError):
    """A form cannot be checked now. `retry_after`: seconds after which it may be worth asking again."""

    def __init__(self, reason: str, retry_after: float) -> None:
        """`reason` is for the client."""
        super().__init__(reason)
        self.retry_after = retry_after


class GrammarSandbox:
    """Says whether forms can be compiled for a model. One event loop's."""

    def __init__(
        self,
        texts: TokenTexts,
        vocab_size: int,
        eos_token_ids: Iterable[int],
        *,
        seconds: float = COMPILE_SECONDS,
        memory_bytes: int = MEMORY_BYTES,
        max_children: int = MAX_CHILDREN,
        max_waiting: int = MAX_WAITING,
        wait_seconds: float = WAIT_SECONDS,
    ) -> None:
        """Nothing is started before the first check. `texts`: the tokenizer; `vocab_size`: the logits' width."""
        self._make: Callable[[], Vocabulary] = lambda: Vocabulary.of(texts, vocab_size, eos_token_ids)
        self._seconds, self._memory_bytes = seconds, memory_bytes
        self._vocabulary = b""
        self._idle: list[_Child] = []
        self._children: set[_Child] = set()
        self._places = asyncio.Semaphore(max_children)
        self._max_children, self._max_waiting, self._wait_seconds = max_children, max_waiting, wait_seconds
        self._verdicts: collections.OrderedDict[bytes, Verdict] = collections.OrderedDict()
        self._checks: dict[bytes, _Check] = {}  # that wait or run, in the order of their coming
        self.num_killed = 0

    async def check_structured(self, structured: StructuredOutputsParams | None) -> StructuredOutputsParams | None:
        """The form, in words that the engine's library knows, if it can be compiled.

        Raises ParameterError within the time limit, SandboxBusyError if too many wait or the wait is too long.
        """
        if structured is None:
            return None
        key = structured.key
        verdict = self._verdicts.get(key)
        if verdict is None:
            verdict = await self._ask(key, structured)
        if verdict.code:
            raise ParameterError(verdict.field, verdict.message, verdict.code)
        if not verdict.spelled:
            return structured
        return msgspec.structs.replace(structured, **{structured.form: verdict.spelled})

    async def _ask(self, key: bytes, structured: StructuredOutputsParams) -> Verdict:
        check = self._checks.get(key)
        if check is None:
            if len(self._checks) >= self._max_children + self._max_waiting:
                raise self._busy(f"{self._max_waiting} forms of outputs wait to be checked, the most that may")
            check = self._checks[key] = _Check()
            check.task = asyncio.create_task(self._judge(key, structured, check))
            check.task.add_done_callback(lambda task: task.cancelled() or task.exception())  # nobody may be left to see
        assert check.task is not None, "a check has a task from the beginning"
        check.num_askers += 1
        self._drop_abandoned()
        try:
            # a client that leaves must not cost the others that wait for the same answer theirs
            return await asyncio.shield(check.task)
        finally:
            check.num_askers -= 1
            self._drop_abandoned()

    def _drop_abandoned(self) -> None:
        """End what nobody asks for any more: it waits, or others wait for its child."""
        others = self._places.locked() and any(c.num_askers and not c.has_begun for c in self._checks.values())
        for key, check in list(self._checks.items()):
            is_in_the_way = not check.has_begun or (others and check.is_compiling)
            if not check.num_askers and check.task is not None and is_in_the_way:
                del self._checks[key]  # who asks again begins anew
                check.task.cancel()

    def _busy(self, reason: str) -> SandboxBusyError:
        seconds = self._seconds * len(self._checks) / self._max_children
        return SandboxBusyError(reason, max(min(seconds, self._wait_seconds), 1.0))  # by then all who wait have gone

    async def close(self) -> None:
        """End the children."""
        for check in self._checks.values():
            if check.task is not None:
                check.task.cancel()
        for child in list(self._children):
            await self._end(child)

    async def _judge(self, key: bytes, structured: StructuredOutputsParams, check: _Check) -> Verdict:
        """The verdict, from a child. Ends with the check's entry."""
        try:
            try:
                await asyncio.wait_for(self._places.acquire(), self._wait_seconds)
            except TimeoutError:
                raise self._busy(f"no form of an output could be checked within {self._wait_seconds:g} s") from None
            try:
                check.has_begun = True
                verdict = await self._try(structured, check)
            finally:
                self._places.release()
        finally:
            if self._checks.get(key) is check:
                del self._checks[key]
        self._verdicts[key] = verdict
        if len(self._verdicts) > MAX_VERDICTS:
            self._verdicts.popitem(last=False)
        return verdict

    async def _try(self, structured: StructuredOutputsParams, check: _Check) -> Verdict:
        field = f"structured_outputs.{structured.form}"
        while True:
            is_fresh = not self._idle
            child = await self._start() if is_fresh else self._idle.pop()
            if child is None:
                raise self._busy("the forms of outputs cannot be checked now")
            if not check.num_askers:  # all left while the child started, which others will need
                self._idle.append(child)
                raise asyncio.CancelledError
            check.is_compiling, done = True, False
            worked = child.processor_seconds()
            try:
                verdict = await asyncio.wait_for(child.ask(structured), self._seconds)
                done = True
            except TimeoutError:
                if child.processor_seconds() - worked < self._seconds * _LEAST_WORK - _TICK:
                    raise self._busy("this machine is too busy to check a form of an output") from None
                verdict = Verdict(field, f"takes more than {self._seconds:g} s to compile", "schema_too_complex")
            except (OSError, RuntimeError, asyncio.IncompleteReadError, msgspec.DecodeError):
                if not is_fresh:  # it may have been dead before it was asked: another one tells
                    continue
                verdict = Verdict(field, await child.why_it_died(), "schema_too_complex")
            finally:
                if done:
                    self._idle.append(child)
                else:
                    _LOG.warning("a grammar's child died, or exceeded a limit: it is replaced")
                    self.num_killed += 1
                    await self._end(child)
            return verdict

    async def _start(self) -> _Child | None:
        if not self._vocabulary:
            self._vocabulary = pack(await asyncio.to_thread(self._make))
        child = None
        try:
            child = await _Child.start(self._memory_bytes, self._seconds)
            self._children.add(child)
            await asyncio.wait_for(child.begin(self._vocabulary), START_SECONDS)
        except (TimeoutError, OSError, asyncio.IncompleteReadError, msgspec.DecodeError) as error:
            _LOG.error("a grammar's child cannot be started: %s", type(error).__name__)
            if child is not None:
                await self._end(child)
            return None
        return child

    async def _end(self, child: _Child) -> None:
        self._children.discard(child)
        await child.kill()


class _Check:
    """A form that is being checked, and for how many."""

    def __init__(self) -> None:
        self.num_askers = 0
        self.has_begun = self.is_compiling = False
        self.task: asyncio.Task[Verdict] | None = None


class _Child:
    """One process of the sandbox."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None and process.stdout is not None, "a child is started with pipes"
        self.process, self._sink, self._source = process, process.stdin, process.stdout

    @staticmethod
    async def start(memory_bytes: int, seconds: float) -> _Child:
        environment = {name: os.environ[name] for name in _KEPT_ENVIRONMENT if name in os.environ}
        environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)  # where this process looks
        environment |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS"), "1")
        environment["MALLOC_ARENA_MAX"] = "1"  # the thread that works takes no address space of its own in advance
        numbers = (str(number) for number in (memory_bytes, int(seconds) + 1, os.getpid()))
        return _Child(
            await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "octavo.serve.sandbox.grammar_child",
                *numbers,
                env=environment,
                start_new_session=True,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
            )
        )

    async def begin(self, vocabulary: bytes) -> None:
        self._sink.write(vocabulary)
        await self._sink.drain()
        await self._answer()

    async def ask(self, structured: StructuredOutputsParams) -> Verdict:
        self._sink.write(pack(structured))
        await self._sink.drain()
        return await self._answer()

    def processor_seconds(self) -> float:
        """What it has worked so far; without end where nobody counts that."""
        try:
            with open(f"/proc/{self.process.pid}/stat", "rb") as file:
                user, system = file.read().rsplit(b")", 1)[1].split()[11:13]
        except OSError:
            return math.inf
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")

    async def why_it_died(self) -> str:
        """What the form of a child that gave no answer did, for the client. It has closed its pipe."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.process.wait(), DEATH_SECONDS)
        code = self.process.returncode
        if code is not None and -code in _CRASHES:
            name = signal.Signals(-code).name
            if -code in _MEMORY_CRASHES:  # a library that does not look whether it was given memory ends so, too
                return (
                    f"crashes the grammar library ({name}), or takes more memory than is allowed: it cannot be compiled"
                )
            return f"crashes the grammar library ({name}): it cannot be compiled"
        return "takes more than the memory that is allowed to compile"

    async def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGKILL)
        self._sink.close()
        await self.process.wait()

    async def _answer(self) -> Verdict:
        length = frame_length(await self._source.readexactly(4))
        if length > MAX_FRAME_BYTES:
            raise OSError("a frame is too long")
        return msgspec.msgpack.decode(await self._source.readexactly(length), type=Verdict)
