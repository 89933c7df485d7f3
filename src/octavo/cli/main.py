"""The `octavo` command: `octavo generate|chat|serve|router|bench|doctor`.

Owns the table of commands, exit codes, and the form of every error: one line on stderr, 2 for a user's mistake, 1 for
ours, 130 after Ctrl-C, a traceback only with --debug. Knows no option and no engine. Invariant: nothing is imported
before the command that needs it is known, so `octavo --version` and `--help` answer at once.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

import octavo

COMMANDS = {
    "generate": ("octavo.cli.terminal:generate", "complete prompts, streaming to the terminal"),
    "chat": ("octavo.cli.terminal:chat", "talk to a model"),
    "serve": ("octavo.serve.server:main", "answer requests over HTTP, with OpenAI's API"),
    "router": ("octavo.router.main:main", "one address for prefill and decode servers"),
    "bench": ("octavo.cli.terminal:bench", "measure throughput, latency, prefix reuse, start; compare bits"),
    "doctor": ("octavo.cli.doctor:main", "versions, devices, memory plan, numerics contract, settings"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code. `argv` is without the program's name."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = _take_debug(arguments)
    try:
        code = _dispatch(arguments)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the flush at exit must not fail again
        return 1
    except Exception as error:
        if _was_interrupted(error):
            return 130
        if debug:
            raise
        if isinstance(error, ValueError):
            return _fail(str(error), 2)
        root = _root(error)
        return _fail(f"internal error: {type(root).__name__}: {root}; --debug shows the traceback", 1)


def _take_debug(arguments: list[str]) -> bool:
    """Remove --debug, wherever it stands before a `--`."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    if "--debug" not in arguments[:end]:
        return False
    arguments.remove("--debug")
    return True


def _dispatch(arguments: list[str]) -> int:
    name = arguments[0] if arguments else "--help"
    if name in ("--version", "-V"):
        print(f"octavo {octavo.__version__}")
        return 0
    if name in ("--help", "-h", "help"):
        print(_overview())
        return 0
    if name not in COMMANDS:
        from difflib import get_close_matches

        close = get_close_matches(name, COMMANDS, n=1)
        kind = "flag" if name.startswith("-") else "command"
        hint = f"did you mean {close[0]}?" if close else f"commands: {', '.join(COMMANDS)}"
        raise ValueError(f"unknown {kind} {name!r}; {hint}")
    module, _, function = COMMANDS[name][0].partition(":")
    code: int = getattr(importlib.import_module(module), function)(arguments[1:])
    return code


def _overview() -> str:
    lines = ["usage: octavo COMMAND ...", "", "A language-model inference engine.", "", "commands:"]
    lines += [f"  {name:<10} {help}" for name, (_, help) in COMMANDS.items()]
    lines += ["", "options:", "  --version  print the version", "  --debug    show tracebacks"]
    lines += ["", "`octavo COMMAND --help` lists a command's options."]
    return "\n".join(lines)


def _root(error: BaseException) -> BaseException:
    """What happened first: an error in the clean-up after it says less."""
    while error.__context__ is not None and not error.__suppress_context__:
        error = error.__context__
    return error


def _was_interrupted(error: BaseException | None) -> bool:
    """Whether a Ctrl-C started what ended in `error`."""
    while error is not None:
        if isinstance(error, KeyboardInterrupt):
            return True
        error = error.__cause__ or error.__context__
    return False


def _fail(message: str, code: int) -> int:
    print(f"octavo: error: {' '.join(message.split())}", file=sys.stderr)
    return code
