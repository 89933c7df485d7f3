"""Command-line flags made from typed fields.

Owns the parser of one command: a flag per EngineConfig field and per SamplingParams field, both spellings of a name
(dash and underscore), dotted flags for mappings, the flags of other engines' start lines, and the refusal of unknown
ones. Does not know what a command does, nor what another engine's option means (`octavo.config.vllm_options`).
Invariant: a value stays text until the field's own reader takes it, so every source of a setting is checked by the same
code.
"""

from __future__ import annotations

import argparse
import json
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from octavo.config.engine_config import SETTINGS
from octavo.config.settings import ConfigError, Setting, did_you_mean, flag_name
from octavo.config.vllm_options import OPTIONS

# SamplingParams fields that make no sense in a terminal, or have a flag of the engine's (seed).
_NO_FLAG = frozenset(
    {
        "output_kind",
        "bad_words_token_ids",
        "extra_args",
        "detokenize",
        "stream_interval",
        "logprob_token_ids",
        "seed",
        "thinking",
    }
)
_SAMPLING_HELP = {
    "n": "completions per prompt",
    "temperature": "0: always the likeliest token",
    "top_p": "keep the likeliest tokens that make up this probability",
    "top_k": "keep so many likeliest tokens; 0: all",
    "min_p": "drop tokens below this share of the likeliest one's probability",
    "max_tokens": "most tokens to generate; none: fill the context",
    "min_tokens": "no end before so many tokens, and no end-of-text token with --ignore-eos either",
    "stop": "a text that ends the output; may be repeated",
    "stop_token_ids": "token ids that end the output, with commas",
    "ignore_eos": "go on after the end-of-text token",
    "logprobs": "log-probabilities of so many likeliest tokens",
    "repetition_penalty": "above 1 discourages tokens that were seen",
    "thinking_token_budget": "tokens of reasoning after which it is ended",
}


class UsageError(ValueError):
    """A mistake in the command line, in one line."""


class Parser(argparse.ArgumentParser):
    """ArgumentParser whose mistakes are UsageErrors. Of a flag that is repeated the last one counts."""

    def __init__(self, **options: Any) -> None:
        """No abbreviations: a flag that is added later must not change what a script means."""
        super().__init__(allow_abbrev=False, formatter_class=_Formatter, **options)

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing a usage text of many lines."""
        raise UsageError(f"{' '.join(message.split())}; see `{self.prog} --help`")

    def parse(self, argv: Sequence[str]) -> tuple[argparse.Namespace, dict[str, dict[str, Any]]]:
        """Parse. Returns the namespace, which holds given values only, and the dotted flags by field."""
        end = list(argv).index("--") if "--" in argv else len(argv)
        flags, dotted = _split_dotted(self._without_values_of_switches(argv[:end]))
        namespace, extras = self.parse_known_intermixed_args(flags)
        if end < len(argv):
            if not hasattr(namespace, "prompts"):
                raise UsageError(f"unexpected argument '--'; see `{self.prog} --help`")
            namespace.prompts += argv[end + 1 :]
        for extra in extras:
            if extra.startswith("-"):
                name = extra.partition("=")[0]
                hint = did_you_mean(name, self._option_string_actions) or f"see `{self.prog} --help`"
                raise UsageError(f"unknown flag {name}; {hint}")
        if extras:
            raise UsageError(f"unexpected argument {extras[0]!r}; see `{self.prog} --help`")
        return namespace, dotted

    def _without_values_of_switches(self, argv: Sequence[str]) -> list[str]:
        """`--switch true`, `--switch=true` and their opposites as `--switch` and `--no-switch`."""
        plain: list[str] = []
        rest = list(reversed(argv))
        while rest:
            argument = rest.pop()
            name, equals, value = argument.partition("=")
            action = self._option_string_actions.get(name.replace("_", "-")) if name.startswith("--") else None
            is_setting = action is not None and action.nargs == 0 and "." in action.dest
            if is_setting and not equals and rest and rest[-1].lower() in ("true", "false"):
                value = rest.pop()
            if is_setting and value:
                if value.lower() not in ("true", "false"):
                    raise UsageError(f"{name}: expected true or false, got {value[:60]!r}")
                negated = name.startswith("--no-")
                argument = name if value.lower() == "true" else "--" + name[5:] if negated else "--no-" + name[2:]
            plain.append(argument)
        return plain


class _Formatter(argparse.HelpFormatter):
    """Help with room for long flags."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34)


class Last(argparse.Action):
    """Stores a value, or a constant for flags without one; several values with commas. The last time counts."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Store."""
        value = values
        if self.nargs == 0:
            value = not (option_string or "").startswith("--no-")
        elif self.nargs == "+":
            value = ",".join(values)
            namespace.several = (self.dest, values)  # for take_model
        setattr(namespace, self.dest, value)


def add_switch(parser: Parser, *names: str, help: str) -> None:
    """A flag without a value; the namespace holds it only if it is given."""
    parser.add_argument(*names, action=Last, nargs=0, default=argparse.SUPPRESS, help=help)


def add_config_flags(parser: Parser) -> None:
    """One flag per EngineConfig field, and --config."""
    group = parser.add_argument_group("engine settings (also Python arguments, YAML keys; `octavo doctor --explain`)")
    group.add_argument(
        "--config", action=Last, default=argparse.SUPPRESS, metavar="FILE", help="a YAML file of settings"
    )
    _add_settings(group, "config", SETTINGS)
    _add_foreign(group, SETTINGS, server=False)


def add_server_flags(parser: Parser, settings: Mapping[str, Setting]) -> None:
    """One flag per field of ServeConfig, whose settings these are."""
    group = parser.add_argument_group("server settings (also YAML keys)")
    _add_settings(group, "serve", settings)
    _add_foreign(group, settings, server=True)


def add_own_flags(parser: Parser, title: str, settings: Mapping[str, Setting]) -> None:
    """One flag per setting of a command that knows no other engine's; `given_server` reads them."""
    _add_settings(parser.add_argument_group(title), "serve", settings)


def _add_foreign(group: Any, settings: Mapping[str, Setting], *, server: bool) -> None:
    """The options of others, which help does not list. Their values stay as they are given."""
    for name, option in OPTIONS.items():
        if option.server is server and name not in settings:
            kind = {"switch": "bool", "values": "several"}.get(option.kind, "str")
            _add_flag(group, [flag_name(name), *option.short], f"foreign.{name}", kind, argparse.SUPPRESS)


def _add_settings(group: Any, prefix: str, settings: Mapping[str, Setting]) -> None:
    for name, fact in settings.items():
        names = [flag_name(name)]
        if name == "model":
            names.append("-m")
        if fact.short:
            names.append(f"-{fact.short}")
        kind = "several" if fact.several else fact.kind
        _add_flag(group, names, f"{prefix}.{name}", kind, _describe(fact))


def add_sampling_flags(parser: Parser) -> None:
    """One flag per SamplingParams field that makes sense in a terminal."""
    group = parser.add_argument_group("sampling (defaults: the checkpoint's, then these)")
    for name, (kind, _) in sampling_kinds().items():
        _add_flag(group, [flag_name(name)], f"sampling.{name}", kind, _SAMPLING_HELP.get(name, ""))


def _add_flag(group: Any, names: list[str], dest: str, kind: str, help: str) -> None:
    common = {"dest": dest, "default": argparse.SUPPRESS, "help": help.replace("%", "%%")}
    if kind == "bool":
        names.append("--no-" + names[0].removeprefix("--"))
        group.add_argument(*names, action=Last, nargs=0, **common)
    elif kind == "texts":
        group.add_argument(*names, action="append", metavar="TEXT", **common)
    elif kind == "several":
        group.add_argument(*names, action=Last, nargs="+", metavar="NAME", **common)
    else:
        group.add_argument(*names, action=Last, metavar=_METAVARS[kind], **common)


_METAVARS = {
    "str": "NAME",
    "int": "N",
    "float": "X",
    "length": "N",
    "bytes": "BYTES",
    "dict": "JSON",
    "mods": "MODULE:NAME",
    "ints": "N,N,...",
}


def _describe(fact: Setting) -> str:
    notes = [", ".join(fact.choices) or fact.describe_range()]
    if fact.default not in (None, False, {}) and "default" not in fact.help:
        notes.append(f"default: {fact.default}" if fact.default is not True else "on unless negated")
    told = "; ".join(note for note in notes if note)
    return f"{fact.help} ({told})" if told else fact.help


def sampling_kinds() -> dict[str, tuple[str, bool]]:
    """SamplingParams field -> (kind, whether None is a value), from its type hints."""
    from octavo.request.sampling_params import SamplingParams

    kinds = {}
    for name, hint in typing.get_type_hints(SamplingParams).items():
        if name in _NO_FLAG or name.startswith("_"):
            continue
        union = isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union
        members = list(typing.get_args(hint)) if union else [hint]
        optional = type(None) in members
        for kind, hints in (("bool", bool), ("texts", list[str]), ("ints", list[int]), ("int", int), ("float", float)):
            if hints in members:
                kinds[name] = (kind, optional)
                break
        else:
            kinds[name] = ("dict", optional)
    return kinds


def given_sampling(namespace: argparse.Namespace) -> dict[str, Any]:
    """The sampling values that were given, as Python values. Raises UsageError; ranges are SamplingParams' own."""
    kinds = sampling_kinds()
    values = {}
    for dest, value in vars(namespace).items():
        group, _, name = dest.partition(".")
        if group == "sampling":
            values[name] = read_sampling(name, value, *kinds[name])
    return values


def read_sampling(name: str, value: Any, kind: str, optional: bool) -> Any:
    """One sampling value from its text."""
    if isinstance(value, bool) or kind == "texts":
        return value
    if optional and value == "none":
        return None
    try:
        match kind:
            case "int":
                return int(value)
            case "float":
                return float(value)
            case "ints":
                return [int(part) for part in value.split(",")]
            case "bool":
                return {"true": True, "false": False}[value]
        loaded = json.loads(value)
    except (ValueError, KeyError, RecursionError):
        nouns = {"int": "a whole number", "float": "a number", "ints": "numbers with commas", "bool": "true or false"}
        raise UsageError(f"{flag_name(name)}: expected {nouns.get(kind, 'JSON')}, got {value[:60]!r}") from None
    return loaded


def take_model(namespace: argparse.Namespace, argv: Sequence[str]) -> str | None:
    """The model that ends a line after a flag that takes several values, as in `--served-model-name NAME MODEL`.

    Only for a line that names no other model: the flag is left with the values before it.
    """
    dest, values = getattr(namespace, "several", ("", []))
    if len(values) < 2 or values[-1] != argv[-1]:
        return None
    setattr(namespace, dest, ",".join(values[:-1]))
    return str(values[-1])


def given_server(namespace: argparse.Namespace) -> dict[str, Any]:
    """The server settings that were given, as text."""
    pairs = ((dest.partition("."), value) for dest, value in vars(namespace).items())
    return {name: value for (group, _, name), value in pairs if group == "serve" and name}


def given_config(namespace: argparse.Namespace, dotted: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The engine settings that were given, as text, mappings merged with their dotted flags; others' options too."""
    values: dict[str, Any] = {}
    for dest, value in vars(namespace).items():
        group, _, name = dest.partition(".")
        if group in ("config", "foreign") and name:
            values[name] = value
    for name, entries in dotted.items():
        if name in OPTIONS and name not in SETTINGS:
            values[name] = entries
            continue
        if name not in SETTINGS or SETTINGS[name].kind != "dict":
            mappings = [flag_name(field) for field, fact in SETTINGS.items() if fact.kind == "dict"]
            hint = did_you_mean(flag_name(name), mappings) or f"dotted flags belong to {', '.join(mappings)}"
            raise UsageError(f"unknown flag {flag_name(name)}.{next(iter(entries))}; {hint}")
        whole = values.get(name, "{}")
        try:
            merged = json.loads(whole)
        except (ValueError, RecursionError):
            merged = None
        if not isinstance(merged, dict):
            raise ConfigError(name, whole, "expected a mapping (JSON on the command line)", origin="command line")
        for key, value in entries.items():
            if key in merged:
                raise UsageError(f"{flag_name(name)} and {flag_name(name)}.{key} both set {key}")
            merged[key] = value
        values[name] = merged
    return values


def _split_dotted(argv: Sequence[str]) -> tuple[list[str], dict[str, dict[str, Any]]]:
    """Flags with dashes for underscores, and `--field.key value` taken out."""
    plain: list[str] = []
    dotted: dict[str, dict[str, Any]] = {}
    rest = iter(argv)
    for given in rest:
        argument = _long_form(given)
        if not argument.startswith("--") or any(space in argument.partition("=")[0] for space in " \n\t"):
            plain.append(argument)
            continue
        name, equals, value = argument.partition("=")
        base, dot, key = name.partition(".")
        if not dot:
            plain.append(name.replace("_", "-") + equals + value)
            continue
        if not equals:
            value = next(rest, "")
        entries = dotted.setdefault(base.removeprefix("--").replace("-", "_"), {})
        key = key.replace("-", "_")
        if not key or not value:
            raise UsageError(f"{name} needs a value")
        entries[key] = _plain_value(value)
    return plain, dotted


def _long_form(argument: str) -> str:
    """`-sc.key` of a mapping's short flag as `--speculative-config.key`; all else as it is."""
    short, dot, rest = argument.partition(".")
    if not dot or short.startswith("--"):
        return argument
    own = {f"-{fact.short}": name for name, fact in SETTINGS.items() if fact.short and fact.kind == "dict"}
    others = {each: name for name, option in OPTIONS.items() for each in option.short if option.harmless is None}
    name = {**others, **own}.get(short)
    return argument if name is None else f"{flag_name(name)}.{rest}"


def _plain_value(text: str) -> Any:
    """JSON where it is JSON (numbers, true, false), else the text itself."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
