"""From the text of an answer to reasoning, content and tool calls.

Owns the tables of parsers, the choice between them ("auto" looks at the chat template), and OutputParser, which runs
one of each kind over an output. Invariant: as of its parts: the pieces, put together, do not depend on how the text
was cut.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection

from octavo.registry import Registry
from octavo.serve.parsers.base import Delta
from octavo.serve.parsers.reasoning import Reasoning
from octavo.serve.parsers.tools import Named, Required, ToolParser
from octavo.thinking import MARKS

_TOOLS, _REASONING = "octavo.serve.parsers.tools", "octavo.serve.parsers.reasoning"
TOOL_PARSERS = Registry(
    "tool call parser",
    {
        "hermes": f"{_TOOLS}:Hermes",
        "qwen3": f"{_TOOLS}:Hermes",
        "llama3_json": f"{_TOOLS}:Llama3",
        "mistral": f"{_TOOLS}:Mistral",
    },
)
REASONING_PARSERS = Registry(
    "reasoning parser",
    dict.fromkeys(MARKS, f"{_REASONING}:Reasoning") | {"mistral": f"{_REASONING}:MistralReasoning"},
)
# what a chat template holds -> the parser of what its model writes; the first that fits
_TOOL_SIGNS = (("<tool_call>", "hermes"), ("[TOOL_CALLS]", "mistral"), ("<|python_tag|>", "llama3_json"),
               ('"parameters": dictionary of argument', "llama3_json"))  # fmt: skip
_REASONING_SIGNS = (("<think>", "qwen3"), ("[THINK]", "mistral"), ("</think>", "qwen3"))


@dataclasses.dataclass(frozen=True, slots=True)
class ParserChoice:
    """Which parsers a model's outputs need; None: none."""

    tools: type[ToolParser] | None = None
    reasoning: type[Reasoning] | None = None

    @staticmethod
    def of(template: str | None, tool_call_parser: str = "auto", reasoning_parser: str = "auto") -> ParserChoice:
        """By name, or by what the chat template holds. Raises ValueError for an unknown name."""
        template = template or ""
        return ParserChoice(
            _choose(TOOL_PARSERS, tool_call_parser, _TOOL_SIGNS, template),
            _choose(REASONING_PARSERS, reasoning_parser, _REASONING_SIGNS, template),
        )

    def needs_special_tokens(self, *, tools: bool) -> bool:
        """Whether marks are special tokens, so that the text needs `skip_special_tokens=False`.

        `tools`: whether calls are looked for.
        """
        calls = tools and self.tools is not None and self.tools.needs_special_tokens
        return calls or (self.reasoning is not None and self.reasoning.needs_special_tokens)

    def parser(
        self,
        prompt: str,
        *,
        tools: Collection[str] | None = None,
        forced: str = "",
        reasons: bool = True,
        new_id: Callable[[], str] | None = None,
    ) -> OutputParser:
        """For one output.

        `prompt`: its text, which tells whether the output begins within reasoning. `tools`: names of the tools that may
        be called; empty or None: calls are not looked for. `forced`: "required", or "=" and a tool's name, where the
        output was held to `serve.grammar.from_tool_choice`. `reasons`: the output may begin with reasoning.
        """
        reasoning = self.reasoning(self.reasoning.is_open_in(prompt)) if self.reasoning and reasons else None
        if forced:
            calls = Named(forced[1:], new_id) if forced.startswith("=") else Required(tools, new_id)
            return OutputParser(reasoning, calls)
        return OutputParser(reasoning, self.tools(tools, new_id) if self.tools and tools else None)


class OutputParser:
    """Reasoning first, then calls in what is left. A Parser."""

    def __init__(self, reasoning: Reasoning | None, tools: ToolParser | None) -> None:
        """None: not looked for; without both every text is content."""
        self._reasoning, self._tools = reasoning, tools

    @property
    def num_calls(self) -> int:
        """Tool calls so far: with any, the answer's finish reason is "tool_calls"."""
        return self._tools.num_calls if self._tools else 0

    def feed(self, text: str) -> list[Delta]:
        """What is certain with this much more text."""
        return self._pass_on(self._reasoning.feed(text) if self._reasoning else [("", text)])

    def finish(self) -> list[Delta]:
        """The rest, at the end of the output."""
        deltas = self._pass_on(self._reasoning.finish() if self._reasoning else [])
        return deltas + (self._tools.finish() if self._tools else [])

    def _pass_on(self, pieces: list[tuple[str, str]]) -> list[Delta]:
        deltas: list[Delta] = []
        for reasoning, answer in pieces:
            if reasoning:
                deltas.append(Delta(reasoning=reasoning))
            if answer:
                deltas += self._tools.feed(answer) if self._tools else [Delta(content=answer)]
        return deltas


@dataclasses.dataclass(slots=True)
class ParsedCall:
    """A whole tool call."""

    id: str
    name: str
    arguments: str = ""


@dataclasses.dataclass(slots=True)
class Parsed:
    """A whole answer."""

    content: str = ""
    reasoning: str = ""
    calls: list[ParsedCall] = dataclasses.field(default_factory=list)

    def add(self, delta: Delta) -> None:
        """Put a piece where it belongs."""
        self.content += delta.content
        self.reasoning += delta.reasoning
        if delta.tool_index >= 0:
            if delta.tool_index == len(self.calls):
                self.calls.append(ParsedCall(delta.tool_id, delta.tool_name))
            self.calls[delta.tool_index].arguments += delta.arguments


def parse(parser: OutputParser, text: str) -> Parsed:
    """A whole output at once."""
    parsed = Parsed()
    for delta in parser.feed(text) + parser.finish():
        parsed.add(delta)
    return parsed


def _choose(registry: Registry, name: str, signs: tuple[tuple[str, str], ...], template: str) -> type | None:
    if name == "auto":
        name = next((found for sign, found in signs if sign in template), "none")
    if name == "none":
        return None
    found: type = registry.resolve(name)
    return found
