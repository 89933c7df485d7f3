"""What of an answer is content, reasoning, or a call of a tool.

Owns the choice of the parsers for a request and their use on a stream of text. Knows neither a format of calls nor the
shape of an event. Invariant: however the text is cut into pieces, the parts that come out are the same in sum, and
without a parser every character is content.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from octavo.request.outputs import CompletionOutput
from octavo.request.sampling_params import SamplingParams
from octavo.request.structured_outputs import StructuredOutputsParams
from octavo.serve.api.protocol import ChatRequest
from octavo.serve.api.shapes import FunctionCall, ToolCall
from octavo.serve.api.tools import check_choice, check_tools
from octavo.serve.parsers.base import Delta
from octavo.serve.parsers.output import OutputParser, ParserChoice
from octavo.serve.sandbox.grammar import from_tool_choice
from octavo.serve.state import ServeState


@dataclasses.dataclass(slots=True)
class Parts:
    """What is new of an answer."""

    stretches: list[tuple[bool, str]] = dataclasses.field(default_factory=list)  # whether it is reasoning, and the text
    tool_calls: list[ToolCall] = dataclasses.field(
        default_factory=list
    )  # with an index: pieces, one a call; else whole

    @property
    def content(self) -> str:
        """What is said to the user."""
        return "".join([text for is_reasoning, text in self.stretches if not is_reasoning])

    @property
    def reasoning(self) -> str:
        """What comes before it."""
        return "".join([text for is_reasoning, text in self.stretches if is_reasoning])


class Answer:
    """One choice's text on its way."""

    def __init__(self, parser: OutputParser, *, reasons: bool, max_calls: int | None) -> None:
        """`reasons`: the model's answers may hold reasoning; calls beyond `max_calls` are dropped."""
        self.reasons, self._max_calls = reasons, max_calls
        self.num_reasoning_tokens = 0
        self._parser = parser

    def feed(self, completion: CompletionOutput) -> Parts:
        """The parts of the next piece; the last one has a finish reason."""
        deltas = self._parser.feed(completion.text)
        if completion.finish_reason is not None:
            deltas += self._parser.finish()
        parts = Parts()
        for delta in deltas:
            if delta.content:
                parts.stretches.append((False, delta.content))
            if delta.reasoning:
                parts.stretches.append((True, delta.reasoning))
            if delta.tool_index >= 0 and (self._max_calls is None or delta.tool_index < self._max_calls):
                _join(parts.tool_calls, _piece(delta))
        if parts.reasoning and not parts.content:
            self.num_reasoning_tokens += len(completion.token_ids)
        return parts

    def whole(self, completion: CompletionOutput) -> Parts:
        """The parts of a finished text: calls are whole, without an index."""
        parts = self.feed(completion)
        whole: list[ToolCall] = []
        for piece in parts.tool_calls:
            if piece.index == len(whole):
                whole.append(ToolCall(id=piece.id, type="function", function=FunctionCall(piece.function.name, "")))
            function = whole[piece.index].function  # type: ignore[index]
            function.arguments += piece.function.arguments or ""  # type: ignore[operator]
        parts.tool_calls = whole
        if parts.reasoning and completion.text:  # of a whole text only the share of characters is known
            self.num_reasoning_tokens = round(len(completion.token_ids) * len(parts.reasoning) / len(completion.text))
        return parts

    def finish_reason(self, reason: str | None) -> str | None:
        """What a client is told: an answer that calls tools ends with "tool_calls"."""
        return "tool_calls" if reason == "stop" and self._parser.num_calls else reason


def _join(pieces: list[ToolCall], piece: ToolCall) -> None:
    """Add a piece of a call. Clients look for one entry a call in each event: a second piece of it joins the first."""
    if not pieces or pieces[-1].index != piece.index:
        pieces.append(piece)
        return
    function = pieces[-1].function
    function.arguments = (function.arguments or "") + (piece.function.arguments or "")


def _piece(delta: Delta) -> ToolCall:
    piece = ToolCall(index=delta.tool_index, function=FunctionCall(arguments=delta.arguments))
    if delta.tool_id:
        piece.id, piece.type, piece.function.name = delta.tool_id, "function", delta.tool_name
    return piece


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Answers:
    """How the answers of a request are read."""

    parsers: ParserChoice
    form_waits: bool = True  # for the end of the reasoning
    shown: list[dict[str, Any]] | None = None  # tools, for the template
    tools: list[dict[str, Any]] | None = None  # that may be called
    choice: str = "none"
    max_calls: int | None = None

    @property
    def forced(self) -> StructuredOutputsParams | None:
        """The form of an output that must be a call. Raises ParameterError for schemas that cannot be one."""
        if self.tools is None or self.choice in ("none", "auto"):
            return None
        return from_tool_choice(self.tools, self.choice[1:] or None if self.choice.startswith("=") else None)

    @property
    def needs_special_tokens(self) -> bool:
        """Whether the text is needed with its special tokens."""
        return self.parsers.needs_special_tokens(tools=self.choice == "auto")

    def begin(self, prompt: str, params: SamplingParams) -> Answer:
        """A new answer to a rendered prompt. A form that does not wait for reasoning leaves no place for any."""
        functions = [tool["function"] for tool in self.tools or ()]
        schemas = {function["name"]: function.get("parameters") for function in functions}
        forced = "" if self.choice in ("none", "auto") else self.choice
        reasons = self.form_waits or params.structured_outputs is None
        parser = self.parsers.parser(prompt, tools=schemas, forced=forced, reasons=reasons)
        return Answer(parser, reasons=self.parsers.reasoning is not None, max_calls=self.max_calls)


def plan_answers(state: ServeState, request: ChatRequest) -> Answers:
    """Check the tools of a request, and choose its parsers. Raises ParameterError."""
    tools = check_tools(request.tools, state.config.max_tools)
    choice = check_choice(request.tool_choice, tools)
    hidden = choice == "none" and state.config.exclude_tools_when_tool_choice_none
    return Answers(
        parsers=state.parsers,
        form_waits=state.thinking.form_waits,
        shown=None if hidden else tools,
        tools=None if choice == "none" else tools,
        choice=choice,
        max_calls=None if request.parallel_tool_calls else 1,
    )
