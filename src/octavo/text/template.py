"""Chat templates: messages in, the prompt's text out.

Owns the checks of messages and the sandbox that a template runs in, which gives the globals and filters that Hugging
Face's templates count on (`raise_exception`, `strftime_now`, `tojson`, loop controls, `generation` blocks). Does not
know tokenizers; what makes user text harmless is passed in as `guard`. Invariant: a bad template never hinders the
start; every failure of one is a TemplateError, and no output grows past a limit.
"""

from __future__ import annotations

import datetime
import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from octavo.config.settings import ConfigError
from octavo.request.sampling_params import ParameterError

if TYPE_CHECKING:
    import jinja2

MAX_SOURCE_CHARS = 256 * 1024
MAX_OUTPUT_CHARS = 1 << 20
MAX_MESSAGES = 4096
MAX_DEPTH = 64
CONTENT_FORMATS = ("auto", "string", "openai")
# of each statement or expression its last opening alone: no two tries look at the same text
_TOOLS = re.compile(r"\{%[^%]*\btools\b|\{\{(?:[^{}]|\{(?!\{))*\btools\b")
_REASONING = ("reasoning_content", "thinking", "reasoning")  # names of a message's reasoning, the first one first
_ROLE = re.compile(r"[A-Za-z0-9_. -]{1,64}")  # a template's own: no text of control tokens
_CONTINUE = "\ufdd2 "  # marks where a final message ends; a template that trims it takes the space away
_CONTINUE_SHOWN = re.compile(r"\\ufdd2|%ef%b7%92|&#64978;|&#xfdd2;", re.IGNORECASE)  # what filters make of the mark
# no `attr` (a way round the sandbox's attribute rules), no `random` (a prompt is a function of its messages)
_FILTERS = """
    abs batch capitalize center count d default dictsort e escape filesizeformat first float forceescape format groupby
    indent int items join last length list lower map max min pprint reject rejectattr replace reverse round safe select
    selectattr slice sort string striptags sum title trim truncate unique upper urlencode urlize wordcount wordwrap
    xmlattr
"""

Guard = Callable[[str], str]


class TemplateError(ParameterError):
    """The template is broken, or refuses these messages: "template_failed: ...". Only this request is at fault."""

    def __init__(self, message: str) -> None:
        """Line breaks become spaces: the text is one line."""
        super().__init__("template_failed", " ".join(message.split()), "template_failed")


class ChatTemplate:
    """A model's chat templates; compiled on first use, so that a broken one fails only the calls that need it."""

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, Any]) -> None:
        """`sources`: name -> Jinja source ("default", perhaps "tool_use"); empty: the model has none.

        `special_tokens` are variables for the template (`bos_token` and so on).
        """
        self.sources = dict(sources)
        self._special_tokens = dict(special_tokens)

    @property
    def source(self) -> str | None:
        """The default template's source."""
        return self.sources.get("default")

    def conversation(
        self,
        messages: object,
        *,
        tools: Sequence[Any] | None = None,
        documents: Sequence[Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
        content_format: str = "auto",
    ) -> dict[str, Any]:
        """The arguments of `render` as plain data for another process, checked. No template is looked at.

        Raises ParameterError as `render` does for what does not depend on the template.
        """
        checked = _check(messages, tools, documents, add_generation_prompt, continue_final_message)
        self._choose(tools, chat_template)
        if content_format not in CONTENT_FORMATS:
            message = f"must be one of {', '.join(CONTENT_FORMATS)}"
            raise ParameterError("chat_template_content_format", message, "invalid_value")
        return {
            "messages": [_plain(message, str) for message in checked],
            "tools": _plain(tools, str),
            "documents": _plain(documents, str),
            "add_generation_prompt": bool(add_generation_prompt),
            "continue_final_message": bool(continue_final_message),
            "template_kwargs": _plain(dict(template_kwargs or {}), str),
            "chat_template": chat_template,
            "content_format": content_format,
        }

    def render(
        self,
        messages: object,
        *,
        tools: Sequence[Any] | None = None,
        documents: Sequence[Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
        content_format: str = "auto",
        guard: Guard = str,
    ) -> str:
        """Render `messages` (dicts of role, content and so on) as one text.

        `guard` sees every string that came from outside, but the checked roles. `continue_final_message` leaves the
        last message open, so that generation goes on within it. `chat_template`: another source than the model's.
        `content_format`: "string" joins the parts of a content, "openai" makes a list of each text, "auto" looks at the
        template.

        Raises:
            ParameterError: a bad message, code "invalid_message".
            TemplateError: no template, a broken one, or one that refuses these messages.

        """
        checked = _check(messages, tools, documents, add_generation_prompt, continue_final_message)
        template, takes = _compile(self._choose(tools, chat_template))
        for message in checked:
            _shape(message, takes, content_format)
        chat = [{**_plain(message, guard), "role": message["role"]} for message in checked]
        last = _open_final(chat) if continue_final_message else ""
        variables = {**self._special_tokens, **_plain(dict(template_kwargs or {}), guard)}
        variables |= {"tools": _plain(tools, guard), "documents": _plain(documents, guard)}
        variables |= {"messages": chat, "add_generation_prompt": add_generation_prompt}
        text = _run(template, variables)
        return _cut_final(text, last) if continue_final_message else text

    def takes_tools(self, chat_template: str | None = None) -> bool:
        """Whether the model is shown tools: its template, or the one that stands for it, speaks of them."""
        sources = self.sources.values() if chat_template is None else [chat_template]
        return any(map(_speaks_of_tools, sources))

    def _choose(self, tools: Sequence[Any] | None, chat_template: str | None) -> str:
        """The source of the template that takes this conversation."""
        if chat_template is not None:
            return chat_template
        source = self.sources.get("tool_use" if tools and "tool_use" in self.sources else "default")
        if source is None:
            ways = "give one (--chat-template, in Python chat_template), or the prompt as text or token ids"
            raise TemplateError(f"the model has no chat template; {ways}")
        return source


@functools.lru_cache(maxsize=16)
def _speaks_of_tools(source: str) -> bool:
    return _TOOLS.search(source) is not None


def read_template(given: str) -> str:
    """A chat template from its file, or the source itself. Raises ConfigError."""
    if "{{" in given or "{%" in given:
        return given
    try:
        if Path(given).stat().st_size > MAX_SOURCE_CHARS:
            raise ConfigError("chat_template", given, f"is larger than {MAX_SOURCE_CHARS} bytes")
        return Path(given).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise ConfigError("chat_template", given, f"cannot be read ({reason})") from None


def _check(
    messages: object,
    tools: Sequence[Any] | None,
    documents: Sequence[Any] | None,
    add_generation_prompt: bool,
    continue_final_message: bool,
) -> list[dict[str, Any]]:
    """What does not depend on the template: the messages, whose checked copies these are."""
    checked = check_messages(messages)
    if continue_final_message and add_generation_prompt:
        raise ParameterError("continue_final_message", "excludes add_generation_prompt", "unsupported_parameter")
    for name, entries in (("tools", tools), ("documents", documents)):
        if entries is not None and not _is_list_of_objects(entries):
            raise ParameterError(name, "must be a list of objects", "invalid_type")
    return checked


def check_messages(messages: object) -> list[dict[str, Any]]:
    """Check the form of a conversation.

    Returns:
        Copies of the messages, without keys whose value is None: templates test for presence. Reasoning has all of
        its names.

    Raises:
        ParameterError: "messages[i]: ..." with code "invalid_message", or "empty_prompt".

    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise ParameterError("messages", "must be a list of messages", "invalid_type")
    if not messages:
        raise ParameterError("messages", "must not be empty", "empty_prompt")
    if len(messages) > MAX_MESSAGES:
        raise ParameterError("messages", f"may hold at most {MAX_MESSAGES}, got {len(messages)}", "too_many_items")
    return [_check_message(f"messages[{i}]", message) for i, message in enumerate(messages)]


def _check_message(name: str, message: object) -> dict[str, Any]:
    def refuse(text: str) -> ParameterError:
        return ParameterError(name, text, "invalid_message")

    if not isinstance(message, Mapping):
        raise refuse("must be an object with role and content")
    if not all(isinstance(key, str) for key in message):
        raise refuse("keys must be strings")
    role, content = message.get("role"), message.get("content")
    reasoning = next((message[name] for name in _REASONING if message.get(name)), None)
    if not isinstance(role, str) or not _ROLE.fullmatch(role):
        raise refuse("role must be 1 to 64 letters, digits, spaces, dots, dashes or underscores")
    if role == "tool" and not isinstance(message.get("tool_call_id"), str):
        raise refuse("a tool message needs the tool_call_id that it answers")
    if content is None:
        says_else = role == "assistant" and (message.get("tool_calls") or reasoning)
        if "content" not in message and not says_else:
            raise refuse(f"content of a message from {role} must be text")
        if not says_else:
            message = {**message, "content": ""}
    elif not isinstance(content, str):
        if isinstance(content, bytes | Mapping) or not isinstance(content, Sequence):
            raise refuse("content must be text or a list of text parts")
        for k, part in enumerate(content):
            if not isinstance(part, Mapping) or part.get("type", "text") != "text":
                raise refuse(f"content part {k} must be an object of type text")
            if not isinstance(part.get("text"), str):
                raise refuse(f"content part {k} must hold text")
    named = dict.fromkeys(_REASONING, reasoning) if reasoning else {}
    return {key: value for key, value in {**message, **named}.items() if value is not None}


def _is_list_of_objects(value: object) -> bool:
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        return False
    return all(isinstance(entry, Mapping) for entry in value)


def _plain(value: Any, guard: Guard, depth: int = 0) -> Any:
    """A copy of `value` in plain JSON types, its strings guarded: a template sees no foreign object's methods."""
    if depth > MAX_DEPTH:
        raise ParameterError("messages", f"are nested deeper than {MAX_DEPTH}", "too_deep")
    if isinstance(value, str):
        return guard(str.__str__(value))
    if value is None or type(value) in (bool, int, float):
        return value
    if isinstance(value, Mapping):
        return {guard(str(key)): _plain(entry, guard, depth + 1) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry, guard, depth + 1) for entry in value]
    raise ParameterError("messages", f"hold a {type(value).__name__}, which is no plain data", "invalid_type")


def _shape(message: dict[str, Any], takes: _Takes, content_format: str) -> None:
    """Bring a message into the form that the template takes: OpenAI's API allows more than one."""
    content = message.get("content")
    if content is None:
        message["content"] = None if takes.no_content else ""
    elif not isinstance(content, str):
        parts = [{"type": "text", **part} for part in content]
        keeps = takes.parts if content_format == "auto" else content_format == "openai"
        message["content"] = parts if keeps else "\n".join(part["text"] for part in parts)
    elif content_format == "openai":
        message["content"] = [{"type": "text", "text": content}]
    calls = message.get("tool_calls")
    if not takes.arguments_as_text and isinstance(calls, list | tuple):
        message["tool_calls"] = [_with_object(call) for call in calls]


def _with_object(call: Any) -> Any:
    """A tool call whose arguments are the object that their text means, if they are a text that means one."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(arguments := function.get("arguments"), str):
        return call
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):  # a model's slip, sent back: it stays as it is
        return call
    return {**call, "function": {**function, "arguments": value}} if isinstance(value, dict) else call


def _open_final(chat: list[dict[str, Any]]) -> str:
    """Mark where the last message ends. Returns its text."""
    if _holds_mark(chat):
        raise ParameterError("continue_final_message", "messages may not hold U+FDD2 beside it", "invalid_message")
    content = chat[-1].get("content")
    if isinstance(content, list) and content:
        last = content[-1]["text"]
        content[-1]["text"] = last + _CONTINUE
    elif isinstance(content, str):
        last = content
        chat[-1]["content"] = last + _CONTINUE
    else:
        raise ParameterError("continue_final_message", "the last message has no text", "invalid_message")
    return str(last)


def _holds_mark(value: Any) -> bool:
    if isinstance(value, str):
        return _CONTINUE[0] in value or _CONTINUE_SHOWN.search(value) is not None
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any(map(_holds_mark, parts))


def _cut_final(text: str, last: str) -> str:
    """Drop what the template wrote after the last message, and the marks: it may write that message more than once."""
    at = text.rfind(_CONTINUE[0])
    if at < 0 or last.strip() not in text:
        raise TemplateError("continue_final_message: the template changes the last message")
    kept = text[:at]
    kept = kept if text.startswith(_CONTINUE, at) else kept.rstrip()
    head, *others = kept.split(_CONTINUE[0])
    for other in others:  # a template that trims the message takes the mark's space away, and what stood before it
        head = head + other[1:] if other.startswith(_CONTINUE[1:]) else head.rstrip() + other
    if _CONTINUE_SHOWN.search(head):
        raise TemplateError("continue_final_message: the template writes the last message in other characters too")
    return head


def _run(template: jinja2.Template, variables: dict[str, Any]) -> str:
    import jinja2

    pieces: list[str] = []
    num_chars = 0
    try:
        for piece in template.generate(variables):
            pieces.append(piece)
            num_chars += len(piece)
            if num_chars > MAX_OUTPUT_CHARS:
                raise TemplateError(f"more than {MAX_OUTPUT_CHARS} characters of output")
    except TemplateError:
        raise
    except jinja2.TemplateError as error:
        raise TemplateError(str(error)) from None
    except Exception as error:  # whatever foreign code raises; its text might repeat the messages
        raise TemplateError(f"{type(error).__name__} while rendering") from None
    return "".join(pieces)


class _Takes(NamedTuple):
    """In which forms a template takes what messages hold."""

    parts: bool  # it goes through the parts of a content
    no_content: bool  # it asks whether a content is none
    arguments_as_text: bool  # it writes a tool call's arguments as they are: else they are to be an object


@functools.lru_cache(maxsize=16)
def _compile(source: str) -> tuple[jinja2.Template, _Takes]:
    """The compiled template, and what it takes. Raises TemplateError."""
    import jinja2

    if len(source) > MAX_SOURCE_CHARS:
        raise TemplateError(f"the source has {len(source)} characters, the limit is {MAX_SOURCE_CHARS}")
    environment = _environment()
    try:
        return environment.from_string(source), _takes(environment.parse(source))
    except jinja2.TemplateError as error:
        raise TemplateError(f"line {getattr(error, 'lineno', 0)}: {error}") from None
    except (RecursionError, ValueError, SyntaxError, MemoryError) as error:
        raise TemplateError(f"{type(error).__name__} while compiling") from None


def _takes(tree: jinja2.nodes.Template) -> _Takes:
    """What the template does with contents and arguments."""
    from jinja2 import nodes

    is_content, is_arguments = _means(tree, "content", filtered=True), _means(tree, "arguments", filtered=False)
    written = [part for output in tree.find_all(nodes.Output) for part in output.nodes]
    written += [side for add in tree.find_all(nodes.Add) for side in (add.left, add.right)]
    written += [part for concat in tree.find_all(nodes.Concat) for part in concat.nodes]
    return _Takes(
        parts=any(is_content(loop.iter) for loop in tree.find_all(nodes.For)),
        no_content=any(test.name == "none" and is_content(test.node) for test in tree.find_all(nodes.Test)),
        arguments_as_text=any(map(is_arguments, written)),
    )


def _means(tree: jinja2.nodes.Template, name: str, *, filtered: bool) -> Callable[[jinja2.nodes.Node], bool]:
    """Whether an expression is a field of this name, also by a variable that was set to it.

    `filtered`: what filters and items make of it as well.
    """
    from jinja2 import nodes

    def means(node: nodes.Node) -> bool:
        if isinstance(node, nodes.Getattr) and node.attr == name:
            return True
        if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const):
            return bool(node.arg.value == name)
        if filtered and isinstance(node, nodes.Filter | nodes.Getitem | nodes.Getattr):
            return isinstance(node.node, nodes.Node) and means(node.node)
        return isinstance(node, nodes.Name) and node.name in aliases

    aliases = {name}
    for assign in tree.find_all(nodes.Assign):
        if isinstance(assign.target, nodes.Name) and means(assign.node):
            aliases.add(assign.target.name)
    return means


@functools.cache
def _environment() -> jinja2.Environment:
    """The sandbox. It is immutable, knows few filters, and refuses products that are larger than any prompt."""
    import jinja2
    import jinja2.ext
    import jinja2.nodes
    import jinja2.parser
    import jinja2.utils
    from jinja2.exceptions import SecurityError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(jinja2.ext.Extension):
        """`{% generation %}` marks what a trainer learns from; here it is only its body."""

        tags = {"generation"}

        def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    class Sandbox(ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset(("*", "**"))

        def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
            sizes = [len(side) if hasattr(side, "__len__") else abs(side) for side in (left, right)]
            if operator == "**" and (sizes[0] > MAX_OUTPUT_CHARS or sizes[1] > MAX_DEPTH):
                raise SecurityError("power out of range")
            repeats = operator == "*" and (hasattr(left, "__len__") or hasattr(right, "__len__"))
            if repeats and sizes[0] * sizes[1] > MAX_OUTPUT_CHARS:
                raise SecurityError("repetition out of range")
            return super().call_binop(context, operator, left, right)

    class Namespace(jinja2.utils.Namespace):
        def __init__(*args: Any, **kwargs: Any) -> None:
            self, *rest = args  # `self` may be a keyword too
            for name in dict(*rest, **kwargs):
                _check_public(name)
            jinja2.utils.Namespace.__init__(self, *rest, **kwargs)

        def __setitem__(self, name: str, value: Any) -> None:
            _check_public(name)
            super().__setitem__(name, value)

    environment = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols])
    environment.filters = {name: environment.filters[name] for name in _FILTERS.split()} | {"tojson": _to_json}
    del environment.globals["lipsum"]
    environment.globals["dict"] = lambda *args, **kwargs: dict(*args, **kwargs)
    environment.globals["namespace"] = Namespace
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment


def _check_public(name: str) -> None:
    if name.startswith("_"):
        raise TemplateError("a namespace's names must not start with an underscore")


def _raise_exception(message: object) -> None:
    """Let a template refuse its messages."""
    import jinja2

    raise jinja2.TemplateError(str(message))


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """JSON as Hugging Face's templates expect it: not escaped for HTML."""
    if indent is not None and not 0 <= int(indent) <= MAX_DEPTH:
        raise TemplateError(f"tojson: indent must be in [0, {MAX_DEPTH}]")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
