"""NoTokenizer: what stands in where a model folder has no tokenizer, or none is wanted.

Owns the refusals. Invariant: everything that needs text says so in one ParameterError; token ids go through.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from msgspec.structs import replace

from octavo.request.sampling_params import ParameterError, SamplingParams


class NoTokenizer:
    """False, and without text."""

    num_token_ids = 0  # unknown: prompts may hold any id of the model's vocabulary
    max_token_bytes = 0
    special_token_ids: frozenset[int] = frozenset()

    def __init__(self, *, skipped: bool = False) -> None:
        """`skipped`: skip_tokenizer_init is set, so that nobody expects text and `detokenize` is off unasked."""
        self._skipped = skipped
        self.reason = "skip_tokenizer_init is set" if skipped else "the model folder has no tokenizer.json"

    def __bool__(self) -> bool:
        """Always false."""
        return False

    def refusal(self, field: str, way_out: str = "") -> ParameterError:
        """The error of a request's field that needs text."""
        return ParameterError(field, self.reason + (way_out and f": {way_out}"), "unsupported_parameter")

    def encode(self, text: str, add_special_tokens: bool = True) -> NoReturn:
        """Refuse."""
        raise self.refusal("prompt", "pass token ids")

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Nothing."""
        return ""

    def token_bytes(self, token_id: int) -> NoReturn:
        """Refuse."""
        raise self.refusal("structured_outputs")

    def render_chat(self, messages: Any, **options: Any) -> NoReturn:
        """Refuse."""
        raise self.refusal("messages", "pass token ids")

    def resolve_bad_words(self, params: SamplingParams) -> SamplingParams:
        """The parameters without text, if they hold no words. Raises ParameterError."""
        if params.bad_words:
            raise self.refusal("bad_words")
        if not self._skipped:
            return params
        self.check_text_free(params.stop, params.structured_outputs)
        return replace(params, detokenize=False) if params.detokenize else params

    def check_text_free(self, stop: object, structured_outputs: object) -> None:
        """Raise ParameterError for what ends or forms a text."""
        if stop:
            raise self.refusal("stop", "take stop_token_ids")
        if structured_outputs is not None:
            raise self.refusal("structured_outputs")
