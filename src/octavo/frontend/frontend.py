"""Frontend: the half of an engine that needs no device: requests on their way in, their text on its way out.

Owns the checks of a request, the ids of its sequences, and its life between `queue` and its last output: text, stop
strings, the aborts that follow from them. Knows neither where the core runs nor who waits for outputs: an `Engine`
hands it a step's updates, and so does an `AsyncEngine`. Invariants: what `check` lets through, no later part refuses
for what the request says; a request that was queued gives exactly one finished output, unless it is dropped; what is
wrong with one request's text ends that request alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import msgspec

from octavo.frontend.core_client import CoreClient
from octavo.frontend.messages import Add
from octavo.request.outputs import RequestOutput
from octavo.request.sampling_params import Limits, SamplingParams, check, check_request_options
from octavo.request.structured_outputs import StructuredOutputsParams
from octavo.request.updates import RequestUpdate
from octavo.text.no_tokenizer import NoTokenizer
from octavo.text.output import OutputProcessor
from octavo.text.tokenizer import Tokenizer
from octavo.text.told_of_tokens import wants_every_token


class Prompt(msgspec.Struct, frozen=True):
    """A prompt as a core takes it, and its text if it came as one."""

    token_ids: list[int]
    text: str | None = None
    cache_salt: str = ""
    is_chat: bool = False  # an answer begins behind it


class Checked(NamedTuple):
    """A request that a core will take."""

    prompt: Prompt
    params: SamplingParams
    max_tokens: int  # at least 1
    priority: int


def _was_checked(structured: StructuredOutputsParams | None) -> None:
    """Forms that come from a sandbox have been compiled there."""


class Frontend:
    """One core's. `check` may be used by any thread, the rest by one at a time."""

    def __init__(
        self,
        core: CoreClient,
        tokenizer: Tokenizer | NoTokenizer,
        limits: Limits,
        *,
        check_form: Callable[[StructuredOutputsParams | None], object] = _was_checked,
        coalesces: bool = False,
    ) -> None:
        """`check_form` raises ParameterError for the form of an output that cannot be compiled.

        `coalesces`: nobody asks when a token came, so that a core may tell of several at once where no text needs them.
        """
        self.tokenizer, self.limits = tokenizer, limits
        self._core, self._check_form, self._coalesces = core, check_form, coalesces
        self._outputs = OutputProcessor(tokenizer if isinstance(tokenizer, Tokenizer) else None, limits.experts)

    def check(self, prompt: Prompt, params: SamplingParams, *, priority: int = 0) -> Checked:
        """What `queue` takes. Raises ParameterError, which names the field, for what the model's limits forbid."""
        check_request_options(prompt.cache_salt, priority)
        params = self.tokenizer.resolve_bad_words(params)
        max_tokens = check(params, self.limits, len(prompt.token_ids))
        self._check_form(params.structured_outputs)
        self._outputs.check(params)
        return Checked(prompt, params, max_tokens, priority)

    def queue(self, request_id: str, request: Checked) -> list[str]:
        """Give the core a request that `check` let through.

        Returns:
            The ids of its sequences, by which updates name them.

        Raises:
            ParameterError: the id is in use, or the request is too large to send.
            RuntimeError: the core is lost.

        """
        prompt, params, max_tokens, priority = request
        sequence_ids = self._outputs.add(request_id, prompt.text, prompt.token_ids, params)
        coalesces = self._coalesces and not wants_every_token(params)
        try:
            self._core.add(
                Add(sequence_ids, prompt.token_ids, params, max_tokens, priority, prompt.cache_salt, coalesces)
            )
        except BaseException:
            self._outputs.drop([request_id])
            raise
        return sequence_ids

    def take(self, updates: Sequence[RequestUpdate]) -> list[RequestOutput]:
        """The outputs that one step's updates make due. Updates of requests that are not there are ignored."""
        outputs, stopped = self._outputs.process(updates)
        if stopped:
            self._core.abort(stopped)
        return outputs

    def abort(self, request_ids: Iterable[str]) -> list[RequestOutput]:
        """End requests; gives their last outputs. Unknown ids are ignored."""
        request_ids = list(request_ids)
        outputs = self.take(self._core.take_untold(self._outputs.sequence_ids(request_ids)))
        sequence_ids, last_outputs = self._outputs.abort(request_ids)
        self._end(sequence_ids)
        return outputs + last_outputs

    def drop(self, request_ids: Iterable[str]) -> None:
        """End requests without an output. Unknown ids are ignored."""
        self._end(self._outputs.drop(request_ids))

    @property
    def request_ids(self) -> list[str]:
        """Of requests that have not ended, in the order of their coming."""
        return self._outputs.request_ids

    def request_of(self, sequence_id: str) -> str | None:
        """The request that a sequence is one of, until the sequence has ended."""
        return self._outputs.request_of(sequence_id)

    @property
    def num_tokens(self) -> int:
        """Tokens of all completions so far; those that came behind a completion's end are none of them."""
        return self._outputs.num_tokens

    @property
    def num_sequences(self) -> int:
        """Sequences that have not ended."""
        return self._outputs.num_sequences

    def _end(self, sequence_ids: list[str]) -> None:
        if sequence_ids:
            self._core.abort(sequence_ids)
