"""Reasoning that comes before an answer: its marks, and where it ends in the tokens of an output.

Owns the table of marks that model families write, Thinking (what the worker must know of one request), and ClosingMark,
which finds the end of the reasoning in the bytes of tokens. Knows no tokenizer, no grammar and no tensor. Invariant:
whether an output is still within its reasoning is a function of its own tokens and its Thinking, so a preemption, a
step in flight or a prefix hit changes nothing.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

_MAX_TAIL = 256  # characters of a prompt's end that tell whether it ends within reasoning


class Marks(msgspec.Struct, frozen=True):
    """The texts around a model's reasoning."""

    opening: str
    closing: str
    begins_behind: str = ""  # a prompt with this end is within reasoning already; "": `opening`
    ending: str = ""  # what is written to end reasoning that takes too long; "": `closing`

    def are_open(self, prompt: str) -> bool:
        """Whether a prompt ends within reasoning. Its last 256 characters are enough."""
        return prompt[-_MAX_TAIL:].rstrip().endswith(self.begins_behind or self.opening)

    def are_closed(self, prompt: str) -> bool:
        """Whether a prompt ends behind reasoning, as where a template is told not to think."""
        return prompt[-_MAX_TAIL:].rstrip().endswith(self.closing)


THINK = Marks("<think>", "</think>")
BRACKETS = Marks("[THINK]", "[/THINK]")
HARMONY = Marks(
    "<|channel|>analysis<|message|>",
    "<|channel|>final<|message|>",
    "<|start|>assistant",
    "<|end|><|start|>assistant<|channel|>final<|message|>",
)


class Thinking(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How one request's output may begin with reasoning."""

    closing: str  # the text behind which the answer begins
    closing_ids: list[int]  # tokens that end the reasoning where its budget is spent
    is_open: bool  # the prompt ends within reasoning
    opening_id: int = -1  # else: the first token of an output that begins with reasoning; -1: none does


class ClosingMark:
    """The end of the reasoning, for one vocabulary. States count the bytes of the mark that an output ends with."""

    def __init__(self, closing: str, tokens: Sequence[bytes], end_token_ids: Iterable[int], num_words: int) -> None:
        """`tokens`: each token's bytes. `end_token_ids`: tokens that would end an output before its answer.

        A vocabulary of 150,000 tokens takes some 30 ms.
        """
        self._mark, self._tokens = closing.encode(), tokens
        # some models break the line before they open their reasoning
        self.line_breaks = frozenset(i for i, token in enumerate(tokens) if token in (b"\n", b"\n\n"))
        self._falls = _falls(self._mark)
        allowed = np.full(num_words * 32, 1, np.uint8)
        allowed[list(end_token_ids)] = 0
        # a token that ends the mark and goes on would put a piece of the answer before its grammar
        overshoots = self._overshoots()
        self.allowed: list[
            NDArray[np.int32]
        ] = []  # of each state: the tokens that reasoning before a form may go on with
        for state in range(len(self._mark)):
            here, border = allowed.copy(), state
            here[overshoots[0]] = 0
            while border:
                here[overshoots[border]] = 0
                border = self._falls[border]
            self.allowed.append(np.packbits(here, bitorder="little").view(np.int32))

    def advance(self, state: int, token_id: int) -> int:
        """The state behind a token; -1: it ends the mark."""
        for byte in self._tokens[token_id] if token_id < len(self._tokens) else b"":
            while state and self._mark[state] != byte:
                state = self._falls[state]
            if self._mark[state] == byte:
                state += 1
            if state == len(self._mark):
                return -1
        return state

    def _overshoots(self) -> list[list[int]]:
        """Per state, the tokens that end the mark begun there and say more than white space behind it."""
        mark = self._mark
        found: list[list[int]] = [[] for _ in mark]
        last = mark[-1:]
        for token_id, token in enumerate(self._tokens):
            if last not in token[:-1]:
                continue
            at = token.find(mark)
            if at >= 0 and token[at + len(mark) :].strip():
                found[0].append(token_id)
            for state in range(1, len(mark)):
                rest = mark[state:]
                if token.startswith(rest) and token[len(rest) :].strip():
                    found[state].append(token_id)
        return found


def _falls(mark: bytes) -> list[int]:
    """Per number of bytes that fit, how many still fit when the next one does not (Knuth, Morris and Pratt)."""
    falls = [0] * (len(mark) + 1)
    fit = 0
    for at in range(1, len(mark)):
        while fit and mark[at] != mark[fit]:
            fit = falls[fit]
        fit += mark[at] == mark[fit]
        falls[at + 1] = fit
    return falls


MARKS = {
    **dict.fromkeys(
        ("deepseek_r1", "deepseek_v3", "ernie45", "glm45", "holo2", "kimi_k2", "minimax_m2", "nemotron_v3", "olmo3",
         "qwen3", "step3"),
        THINK,
    ),
    "mistral": BRACKETS, "openai_gptoss": HARMONY,
}  # fmt: skip
# what a chat template holds -> the marks of what its model writes; the first that fits
_SIGNS = (("<|channel|>", HARMONY), ("<think>", THINK), ("[THINK]", BRACKETS), ("</think>", THINK))


def find_marks(template: str | None, parser: str) -> Marks | None:
    """The marks by a parser's name, or ("auto") by what the chat template holds; None: the model does not reason.

    A name may also be "package.module:Class" of a parser with `opening` and `closing`. Raises ValueError for an unknown
    one.
    """
    if parser == "none":
        return None
    if parser == "auto":
        return next((marks for sign, marks in _SIGNS if sign in (template or "")), None)
    if parser in MARKS:
        return MARKS[parser]
    module, colon, name = parser.partition(":")
    if not colon:
        known = ", ".join(MARKS)
        raise ValueError(f"unknown reasoning parser {parser!r}: known are {known}, or a path 'package.module:Class'")
    try:
        found = getattr(importlib.import_module(module), name)
        return Marks(found.opening, found.closing)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"reasoning parser {parser!r} does not load: {error}") from None
