"""From the text of an answer to reasoning, content and tool calls.

Owns the tables of parsers, the choice between them ("auto" looks at the chat template), and OutputParser, which runs
one of each kind over an output. Invariant: as of its parts: the pieces, put together, do not depend on how the text
was cut.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection

from octavo.registry import Registry
from octavo.request.thinking import MARKS
from octavo.serve.parsers.base import Delta
from octavo.serve.parsers.reasoning import Reasoning
from octavo.serve.parsers.tools.base import ToolParser
from octavo.serve.parsers.tools.forced import Named, Required

_TOOLS, _REASONING = "octavo.serve.parsers.tools", "octavo.serve.parsers"
# vLLM's names
TOOL_PARSERS = Registry(
    "tool call parser",
    {
        "deepseek_v3": f"{_TOOLS}.deepseek:DeepSeek",
        "deepseek_v31": f"{_TOOLS}.deepseek:DeepSeek",
        "glm45": f"{_TOOLS}.glm45:Glm45",
        "glm47": f"{_TOOLS}.glm45:Glm45",
        "hermes": f"{_TOOLS}.hermes:Hermes",
        "kimi_k2": f"{_TOOLS}.kimi_k2:KimiK2",
        "llama3_json": f"{_TOOLS}.llama3:Llama3",
        "llama4_json": f"{_TOOLS}.llama3:Llama3",
        "minimax_m2": f"{_TOOLS}.minimax_m2:MiniMaxM2",
        "mistral": f"{_TOOLS}.mistral:Mistral",
        "openai": f"{_TOOLS}.harmony:Harmony",
        "qwen3": f"{_TOOLS}.hermes:Hermes",
        "qwen3_coder": f"{_TOOLS}.qwen3_coder:Qwen3Coder",
        "qwen3_xml": f"{_TOOLS}.qwen3_coder:Qwen3Coder",
    },
)
REASONING_PARSERS = Registry(
    "reasoning parser",
    dict.fromkeys(MARKS, f"{_REASONING}.reasoning:Reasoning")
    | {
        "mistral": f"{_REASONING}.reasoning:MistralReasoning",
        "openai_gptoss": f"{_REASONING}.harmony:HarmonyReasoning",
    },
)
# what a chat template holds -> the parser of what its model writes; the first that fits
_TOOL_SIGNS = (
    ("<|channel|>", "openai"),
    ("<minimax:tool_call>", "minimax_m2"),
    ("<｜tool▁calls▁begin｜>", "deepseek_v3"),
    ("<|tool_calls_section_begin|>", "kimi_k2"),
    ("<arg_key>", "glm45"),
    ("<function=", "qwen3_coder"),
    ("<tool_call>", "hermes"),
    ("[TOOL_CALLS]", "mistral"),
    ("<|python_tag|>", "llama3_json"),
    ('"parameters": dictionary of argument', "llama3_json"),
)
_REASONING_SIGNS = (
    ("<|channel|>", "openai_gptoss"),
    ("<think>", "qwen3"),
    ("[THINK]", "mistral"),
    ("</think>", "qwen3"),
)


@dataclasses.dataclass(frozen=True, slots=True)
class ParserChoice:
    """Which parsers a model's outputs need; None: none."""

    tools: type[ToolParser] | None = None
    reasoning: type[Reasoning] | None = None
    special_tokens: frozenset[str] = frozenset()  # of the tokenizer, without which texts come

    @staticmethod
    def of(
        template: str | None,
        tool_call_parser: str = "auto",
        reasoning_parser: str = "auto",
        special_tokens: Collection[str] = (),
    ) -> ParserChoice:
        """By name, or by what the chat template holds. Raises ValueError for an unknown name."""
        template = template or ""
        return ParserChoice(
            _choose(TOOL_PARSERS, tool_call_parser, _TOOL_SIGNS, template),
            _choose(REASONING_PARSERS, reasoning_parser, _REASONING_SIGNS, template),
            frozenset(special_tokens),
        )

    def needs_special_tokens(self, *, tools: bool) -> bool:
        """Whether marks are special tokens, so that the text needs `skip_special_tokens=False`.

        `tools`: whether calls are looked for.
        """
        asked = [parser for parser in (self.tools if tools else None, self.reasoning) if parser is not None]
        return any(parser.needs_special_tokens or self._are_special(parser) for parser in asked)

    def _are_special(self, parser: type) -> bool:
        """Whether a mark is a special token in this vocabulary, whatever it is in its family's."""
        marks = (getattr(parser, name, "") for name in ("opening", "closing", "section_open", "call_open"))
        return not self.special_tokens.isdisjoint(marks)

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
        be called, perhaps with their parameters' schemas; empty or None: calls are not looked for. `forced`:
        "required", or "=" and a tool's name, where the output was held to `serve.sandbox.grammar.from_tool_choice`.
        `reasons`: the output may begin with reasoning.
        """
        reasoning = self.reasoning(self.reasoning.is_open_in(prompt)) if self.reasoning and reasons else None
        if isinstance(reasoning, Reasoning) and self.tools and tools and not forced:
            reasoning.interrupts = self.tools.ends_reasoning
        if forced:
            new_id = new_id or (self.tools.default_id if self.tools else None)  # as the template wants them
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
