"""`octavo generate`, `octavo chat` and `octavo bench`: the commands that run a model.

Owns prompts, streaming, the chat's slash commands, and what Ctrl-C does. Knows the LLM's public methods and nothing
beneath them. Invariant: Ctrl-C never interrupts a step of the engine: it is noted, the step ends, the request is
aborted; only a second Ctrl-C interrupts at once.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import io
import json
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

from octavo.cli import flags
from octavo.config.engine_config import EngineConfig, load_config
from octavo.config.environment import ENVIRONMENT
from octavo.config.settings import ConfigError, did_you_mean
from octavo.observe import Phases, setup_logging
from octavo.request.outputs import NO_TOKEN, TOO_COMPLEX

if TYPE_CHECKING:
    from octavo.llm import LLM, Messages, Prompt
    from octavo.request.outputs import LogprobsDict, RequestOutput
    from octavo.request.sampling_params import SamplingParams

DEFAULT_MAX_TOKENS = 128
# What a terminal would obey rather than show: control characters but newline and tab.
_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def generate(argv: Sequence[str]) -> int:
    """Complete prompts."""
    parser = _parser("generate", "Complete prompts. One prompt streams; several run as one batch.")
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="a text to complete; - reads it from stdin")
    flags.add_switch(parser, "--json", help="one JSON object per completion")
    parser.add_argument(
        "--echo",
        "--no-echo",
        action=flags.Last,
        nargs=0,
        default=argparse.SUPPRESS,
        help="print the prompt as well",
    )
    namespace, dotted = parser.parse(argv)
    session = _Session(namespace, dotted)
    prompts = _read_prompts(namespace.prompts)
    as_json = getattr(namespace, "json", False)
    echo = getattr(namespace, "echo", sys.stdout.isatty() or len(prompts) > 1)
    with session.open() as llm:
        params = session.params(llm)
        if len(prompts) == 1 and params.n == 1 and not as_json:
            if echo:
                _write(prompts[0])
            stopped = not _stream(llm, prompts[0], params, session)[1]
            _write("\n")
            session.report(llm)
            return 130 if stopped else 0
        with session.phases("generate"):
            outputs = llm.generate(prompts, params)
        for index, output in enumerate(outputs):
            for line in _show(index, output, as_json=as_json, echo=echo):
                _write(line + "\n", raw=as_json)
        session.report(llm)
        for output in outputs:
            _check_sound(output)
    return 0


def chat(argv: Sequence[str]) -> int:
    """Talk to a model."""
    parser = _parser("chat", "Talk to a model. /help lists the commands, Ctrl-C stops an answer, Ctrl-D leaves.")
    parser.add_argument("--system", action=flags.Last, default=argparse.SUPPRESS, metavar="TEXT", help="system message")
    namespace, dotted = parser.parse(argv)
    session = _Session(namespace, dotted)
    if session.num_choices != 1:
        raise flags.UsageError(f"--n: a chat has one answer at a time, got {session.num_choices}")
    with session.open() as llm:
        params = session.params(llm)
        session.report(llm)
        return _Chat(llm, params, getattr(namespace, "system", "")).run()


def bench(argv: Sequence[str]) -> int:
    """Run a set of benchmarks: `octavo bench engine|serve|connectors|reproducibility ...`."""
    if argv and argv[0] in ("--help", "-h"):
        _write("usage: octavo bench WHAT ...\n\n")
        for name, (_, help) in _BENCHMARKS.items():
            _write(f"  {name:<17}{help}\n")
        _write("\n`octavo bench WHAT --help` lists the options.\n")
        return 0
    if not argv or argv[0] not in _BENCHMARKS:
        raise flags.UsageError(f"octavo bench: say what to measure: {', '.join(_BENCHMARKS)}")
    module, _, function = _BENCHMARKS[argv[0]][0].partition(":")
    code: int = getattr(importlib.import_module(module), function)(list(argv[1:]))
    return code


_BENCHMARKS = {
    "engine": ("octavo.bench.engine:main", "throughput, latency, prefix reuse and start of an engine in this process"),
    "serve": ("octavo.bench.serve:main", "requests to a server, with vLLM's options and JSON keys"),
    "connectors": ("octavo.bench.connectors:main", "prompts found in host memory and files; copies beside decoding"),
    "reproducibility": ("octavo.bench.reproducibility:main", "one set of requests under all that must change no bit"),
}


def _parser(command: str, description: str) -> flags.Parser:
    usage = f"octavo {command} [option ...]" + (" PROMPT ..." if command == "generate" else "")
    parser = flags.Parser(prog=f"octavo {command}", usage=usage, description=description)
    parser.add_argument(
        "-v",
        "--verbose",
        action=flags.Last,
        nargs=0,
        default=argparse.SUPPRESS,
        help="print the phases of the start",
    )
    flags.add_sampling_flags(parser)
    flags.add_config_flags(parser)
    return parser


class _Session:
    """One command's settings, checked before anything heavy is imported, and its engine."""

    def __init__(self, namespace: argparse.Namespace, dotted: dict[str, dict[str, Any]]) -> None:
        self.phases = Phases()
        self._verbose = getattr(namespace, "verbose", False)
        environ = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
        given = flags.given_config(namespace, dotted)
        self.config, self._origins = load_config(given, None, getattr(namespace, "config", None), environ)
        self._sampling = {"max_tokens": DEFAULT_MAX_TOKENS, **flags.given_sampling(namespace)}
        if "seed" in given:
            self._sampling["seed"] = self.config.seed
        from octavo.request.sampling_params import SamplingParams

        checked = SamplingParams.from_optional(**self._sampling)  # a mistake shows before the model loads
        self._sampling = {name: getattr(checked, name) for name in self._sampling}
        if isinstance(sys.stdout, io.TextIOWrapper):  # else a caller has put another in its place
            sys.stdout.reconfigure(errors="replace")

    @contextlib.contextmanager
    def open(self) -> Iterator[LLM]:
        """The engine, closed at the end."""
        setup_logging(self.config.log_level)
        try:
            with self.phases("import the engine"):
                from octavo.llm import LLM
            llm = LLM(phases=self.phases, **_fields(self.config))
        except ConfigError as error:
            if not error.origin and self._origins.get(error.field, "default") != "default":
                error.origin = self._origins[error.field]
                raise ConfigError(error.field, error.value, error.limit, error.change, error.origin) from None
            raise
        with llm:
            yield llm

    @property
    def num_choices(self) -> int:
        """`n`, as it was given."""
        return self._sampling.get("n", 1)

    def params(self, llm: LLM) -> SamplingParams:
        """The checkpoint's defaults with what was given."""
        import msgspec

        return msgspec.structs.replace(llm.get_default_sampling_params(), **self._sampling)

    def report(self, llm: LLM) -> None:
        """With -v: where the time went, and what drafts brought, on stderr."""
        if self._verbose:
            print(self.phases.table(), file=sys.stderr)
            stats = llm.engine.scheduler.stats()
            if stats.num_drafts:
                per_step = 1 + stats.num_accepted_tokens / stats.num_drafts
                share = stats.num_accepted_tokens / stats.num_draft_tokens
                drafted = f"{stats.num_draft_tokens} draft tokens in {stats.num_drafts} verifications"
                print(f"{drafted}, {share:.0%} accepted: {per_step:.2f} tokens each", file=sys.stderr)


def _fields(config: EngineConfig) -> dict[str, Any]:
    return {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}


def _read_prompts(prompts: list[str]) -> list[str]:
    if prompts.count("-") > 1:
        raise flags.UsageError("- (stdin) is given twice")
    if not prompts:
        if sys.stdin.isatty():
            raise flags.UsageError("a PROMPT is missing; - reads it from stdin")
        prompts = ["-"]
    return [_read_stdin() if prompt == "-" else prompt for prompt in prompts]


def _read_stdin() -> str:
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise flags.UsageError(f"stdin: not UTF-8 at byte {error.start}") from None


def _write(text: str, *, raw: bool = False) -> None:
    """Print at once; on a terminal, control characters are shown and not obeyed."""
    sys.stdout.write(text if raw or not sys.stdout.isatty() else text.translate(_CONTROLS))
    sys.stdout.flush()


class _StopOnSigint:
    """Within: the first Ctrl-C sets `requested`, the second raises KeyboardInterrupt."""

    def __enter__(self) -> _StopOnSigint:
        self.requested = False
        self._previous = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._previous)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True


def _stream(
    llm: LLM, prompt: Prompt | Messages, params: SamplingParams, session: _Session | None = None
) -> tuple[str, bool]:
    """Print an answer as it comes. Returns it, and whether it came to its end."""
    pieces: list[str] = []
    with _StopOnSigint() as stop, contextlib.closing(llm.stream(prompt, params)) as outputs:
        phases = session.phases if session else Phases()
        with phases("first token"):
            first = next(outputs, None)
        with phases("further tokens"):
            output = first
            while output is not None:
                pieces.append(output.outputs[0].text)
                _write(pieces[-1])
                _check_sound(output)
                if stop.requested:
                    break
                output = next(outputs, None)
    return "".join(pieces), not stop.requested


def _show(index: int, output: RequestOutput, *, as_json: bool, echo: bool) -> Iterator[str]:
    """The lines that show a finished request."""
    for completion in output.outputs:
        if not as_json:
            yield (output.prompt or "" if echo else "") + completion.text + "\n"
            continue
        entry: dict[str, Any] = {
            "prompt_index": index,
            "prompt": output.prompt,
            "index": completion.index,
            "text": completion.text,
            "token_ids": list(completion.token_ids),
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
            "num_prompt_tokens": len(output.prompt_token_ids or ()),
            "num_cached_tokens": output.num_cached_tokens,
        }
        if completion.logprobs is not None:
            entry["cumulative_logprob"] = completion.cumulative_logprob
            entry["logprobs"] = [_plain(position) for position in completion.logprobs]
        if output.prompt_logprobs is not None:
            entry["prompt_logprobs"] = [each and _plain(each) for each in output.prompt_logprobs]
        yield json.dumps(entry, ensure_ascii=False)


def _plain(position: LogprobsDict) -> dict[str, float]:
    """Token id -> log-probability; JSON has no infinities, so what cannot be sampled gets the server's -9999."""
    return {str(token): max(value.logprob, -9999.0) for token, value in position.items()}


def _check_sound(output: RequestOutput) -> None:
    """Raise ValueError for wishes that exclude each other, RuntimeError for a failure of the model."""
    for completion in output.outputs:
        if completion.finish_reason == "error" and completion.stop_reason == NO_TOKEN:
            raise ValueError("the output's form, and the tokens that are allowed or forbidden, leave no token to go on")
        if completion.finish_reason == "error" and completion.stop_reason == TOO_COMPLEX:
            raise ValueError("the output's form is too complex: it met a limit within the text")
        if completion.finish_reason == "error":
            raise RuntimeError(f"the model failed on this prompt: {completion.stop_reason}")


class _Chat:
    """A conversation and its commands."""

    HELP = """\
/help            this list
/reset           forget the conversation
/system TEXT     set the system message (and forget the conversation); no TEXT: none
/set             show the sampling parameters
/set NAME=VALUE  set one, e.g. /set temperature=0.7; /set stop= takes a text back
/exit            leave (also Ctrl-D)
Ctrl-C stops an answer."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str) -> None:
        self._llm, self._params = llm, params
        self._system = system
        self._messages: list[dict[str, str]] = []
        self._reset()

    def run(self) -> int:
        """Read lines until the end of input."""
        interactive = sys.stdin.isatty()
        if interactive:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401  (line editing and history for input)
            print("/help lists the commands, Ctrl-D leaves.")
        while True:
            try:
                line = input("> " if interactive else "").strip()
            except EOFError:
                if interactive:
                    print()
                return 0
            except KeyboardInterrupt:
                print("\n(Ctrl-D or /exit leaves)")
                continue
            if line.startswith("/"):
                if line.split()[0] in ("/exit", "/quit"):
                    return 0
                self._command(*line.partition(" ")[::2])
            elif line:
                self._answer(line)

    def _answer(self, text: str) -> None:
        self._messages.append({"role": "user", "content": text})
        try:
            answer, finished = _stream(self._llm, self._messages, self._params)
        except ValueError as error:
            self._messages.pop()
            hint = "; /reset forgets the conversation" if len(self._messages) > 1 else ""
            print(f"error: {' '.join(str(error).split())}{hint}")
            return
        _write("\n" if finished else " [stopped]\n")
        self._messages.append({"role": "assistant", "content": answer})

    def _command(self, name: str, argument: str) -> None:
        argument = argument.strip()
        if name == "/help":
            print(self.HELP)
        elif name == "/reset":
            self._reset()
            print("The conversation is forgotten.")
        elif name == "/system":
            self._system = argument
            self._reset()
            print("The system message is set, the conversation forgotten.")
        elif name == "/set":
            self._set(argument)
        else:
            hint = did_you_mean(name, ("/help", "/reset", "/system", "/set", "/exit")) or "/help lists the commands"
            print(f"unknown command {name}; {hint}")

    def _reset(self) -> None:
        self._messages = [{"role": "system", "content": self._system}] if self._system else []

    def _set(self, argument: str) -> None:
        import msgspec

        from octavo.request.sampling_params import SamplingParams

        kinds = {**flags.sampling_kinds(), "seed": ("int", True)}
        del kinds["n"]
        if not argument:
            for name in kinds:
                print(f"  {name} = {getattr(self._params, name)!r}")
            return
        name, equals, text = (part.strip() for part in argument.partition("="))
        name = name.replace("-", "_")
        if not equals or name not in kinds:
            print(f"usage: /set NAME=VALUE; {did_you_mean(name, kinds) or 'names: ' + ', '.join(kinds)}")
            return
        kind, optional = kinds[name]
        try:
            value = ([text] if text else []) if kind == "texts" else flags.read_sampling(name, text, kind, optional)
            read = SamplingParams.from_optional(**{"max_tokens": None, name: value})  # JSON's shapes are taken
            self._params = msgspec.structs.replace(self._params, **{name: getattr(read, name)})
        except ValueError as error:
            print(f"error: {error}")
