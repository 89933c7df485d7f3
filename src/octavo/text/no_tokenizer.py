"""NoTokenizer: what stands in where a model folder has no tokenizer.

Owns the refusals. Invariant: everything that needs text says so in one ParameterError; token ids go through.
"""

from __future__ import annotations

from typing import Any, NoReturn

from octavo.sampling_params import ParameterError, SamplingParams


class NoTokenizer:
    """False, and without text."""

    num_token_ids = 0  # unknown: prompts may hold any id of the model's vocabulary
    max_token_bytes = 0
    special_token_ids: frozenset[int] = frozenset()

    def __bool__(self) -> bool:
        """Always false."""
        return False

    def encode(self, text: str, add_special_tokens: bool = True) -> NoReturn:
        """Refuse."""
        raise ParameterError(
            "prompt", "the model folder has no tokenizer.json: pass token ids", "unsupported_parameter"
        )

    def token_bytes(self, token_id: int) -> NoReturn:
        """Refuse."""
        raise ParameterError("structured_outputs", "the model folder has no tokenizer.json", "unsupported_parameter")

    def render_chat(self, messages: Any, **options: Any) -> NoReturn:
        """Refuse."""
        raise ParameterError(
            "messages", "the model folder has no tokenizer.json: pass token ids", "unsupported_parameter"
        )

    def resolve_bad_words(self, params: SamplingParams) -> SamplingParams:
        """The parameters as they are, if they hold no words."""
        if params.bad_words:
            raise ParameterError("bad_words", "the model folder has no tokenizer.json", "unsupported_parameter")
        return params
