"""Which requests begin with reasoning, and what their form and their budget have to do with it.

Owns ThinkingRule, which looks at the end of a prompt. Knows no worker. Invariant: a request without a form and without
a budget leaves as it came.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from msgspec.structs import replace

from octavo.config.engine_config import EngineConfig
from octavo.config.settings import ConfigError
from octavo.request.sampling_params import ParameterError, SamplingParams
from octavo.request.thinking import Marks, Thinking, find_marks
from octavo.text.no_tokenizer import NoTokenizer
from octavo.text.tokenizer import Tokenizer

_MAX_TAIL_IDS = 32  # token ids of a prompt's end that hold any opening mark


class ThinkingRule:
    """For the requests of one model."""

    def __init__(
        self,
        tokenizer: Tokenizer | NoTokenizer,
        parser: str,
        *,
        enable_in_reasoning: bool,
        end_text: str | None = None,
    ) -> None:
        """`parser`, `end_text`: as the settings reasoning_parser and reasoning_end_text.

        `enable_in_reasoning`: forms hold from the first token on. Raises ConfigError for an unknown parser, or for a
        text that does not end the reasoning.
        """
        self._tokenizer = tokenizer if isinstance(tokenizer, Tokenizer) else None
        sources = self._tokenizer.template.sources if self._tokenizer else {}
        try:
            self.marks = find_marks("\n".join(sources.values()), parser)
        except ValueError as error:
            raise ConfigError("reasoning_parser", parser, str(error)) from None
        self.form_waits = not enable_in_reasoning
        if end_text is not None and (self.marks is None or not end_text.endswith(self.marks.closing)):
            wanted = (
                f"must end with {self.marks.closing}" if self.marks else "this model's chat template has no reasoning"
            )
            raise ConfigError("reasoning_end_text", end_text, wanted, "change it, or name a --reasoning-parser")
        self._end_text = end_text

    @classmethod
    def of(cls, tokenizer: Tokenizer | NoTokenizer, config: EngineConfig) -> Self:
        """The rule that an engine's settings ask for. Raises ConfigError."""
        return cls(
            tokenizer,
            config.reasoning_parser,
            enable_in_reasoning=config.enable_in_reasoning,
            end_text=config.reasoning_end_text,
        )

    def apply(
        self, params: SamplingParams, text: str | None, token_ids: Sequence[int], *, may_open: bool
    ) -> SamplingParams:
        """`params` with what the worker must know of the reasoning that this prompt begins or leads to.

        `may_open`: the prompt is an answer's beginning, and reasoning that the model opens itself is welcome before a
        form. Raises ParameterError for a budget where nothing could end the reasoning.
        """
        waits = self.form_waits and params.structured_outputs is not None
        budget = params.thinking_token_budget
        if not waits and budget is None:
            return params
        marks, tokenizer = self.marks, self._tokenizer
        if marks is None or tokenizer is None:
            if budget is None:
                return params
            message = "this model's chat template has no reasoning that could be ended; name its --reasoning-parser"
            raise ParameterError("thinking_token_budget", message, "unsupported_parameter")
        if params.structured_outputs is not None and not waits:
            raise ParameterError("thinking_token_budget", "excludes a form under enable_in_reasoning", "conflicting")
        tail = tokenizer.decode(token_ids[-_MAX_TAIL_IDS:], skip_special_tokens=False) if text is None else text
        is_open = marks.are_open(tail)
        opening_id = -1
        if not is_open and not marks.are_closed(tail) and (may_open or not waits):
            opening_id = self._single(tokenizer, marks)
        if not is_open and opening_id < 0:
            return params
        closing_ids = tokenizer.encode(self._end_text or marks.ending or marks.closing, add_special_tokens=False)
        thinking = Thinking(closing=marks.closing, closing_ids=closing_ids, is_open=is_open, opening_id=opening_id)
        return replace(params, thinking=thinking)

    def _single(self, tokenizer: Tokenizer, marks: Marks) -> int:
        """The token that opens reasoning, if one does."""
        ids = tokenizer.encode(marks.opening, add_special_tokens=False)
        return ids[0] if len(ids) == 1 else -1
