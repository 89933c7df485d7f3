"""A prompt whose log-probabilities alone are wanted: how one that fills the context is asked of an engine.

An engine draws a token behind every prompt, for which a full context has no place. The last token of such a prompt is
not computed, then: it is told beside the others, and scored in the place of the one that is drawn. Knows no engine.
Invariant: a token's score has the same bits either way, since they follow from the tokens before it.
"""

from __future__ import annotations

from typing import Any

import msgspec

from octavo.request.sampling_params import Limits, ParameterError, SamplingParams, check_token_ids
from octavo.request.validation import listed


def without_answer(token_ids: list[int], params: SamplingParams, limits: Limits) -> tuple[list[int], SamplingParams]:
    """The tokens to compute of a prompt whose answer nobody wants, and with which parameters: `max_tokens` is 1.

    token_ids: of 1 to max_model_len tokens, as `check_token_ids(..., is_answered=False)` lets through.
    """
    if len(token_ids) < max(limits.max_model_len, 2):
        return token_ids, params
    last = token_ids[-1] if params.prompt_logprobs is not None else None
    return token_ids[:-1], msgspec.structs.replace(params, scored_token_id=last)


def refuse_texts(sequences: Any, name: str = "prompts") -> None:
    """Raise ParameterError for texts: vLLM's `score` compares these, by another kind of model."""
    is_list = isinstance(sequences, list | tuple) and bool(sequences)
    place, kind = (f"{name}[0]", "") if is_list else (name, "sequences of ")
    if isinstance(sequences[0] if is_list else sequences, str):
        limit = f"must be a list of {kind}token ids, whose log-probabilities are told (texts are not compared), got str"
        raise ParameterError(place, limit, "invalid_type")


def scored_alone(
    sequences: Any, params: SamplingParams, limits: Limits, name: str = "prompts"
) -> list[tuple[list[int], SamplingParams]]:
    """Of each of a list of sequences of token ids what `without_answer` gives. Raises ParameterError by `name`."""
    found = []
    for index, entry in enumerate(listed(name, sequences, "a list of sequences of token ids")):
        ids = listed(f"{name}[{index}]", entry, "a list of token ids, as in [[5, 6]]")
        checked = check_token_ids(ids, limits, name=f"{name}[{index}]", is_answered=False)
        found.append(without_answer(checked, params, limits))
    return found
