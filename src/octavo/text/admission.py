"""What every request passes on its way in, with HTTP or without.

Owns the order of the checks that need the tokenizer and the model's limits. Knows no engine and no queue. Invariant:
what it lets through, no later part refuses for what the request says.
"""

from __future__ import annotations

from octavo.request.sampling_params import Limits, SamplingParams, check, check_request_options
from octavo.text.no_tokenizer import NoTokenizer
from octavo.text.tokenizer import Tokenizer


def check_request(
    tokenizer: Tokenizer | NoTokenizer,
    limits: Limits,
    params: SamplingParams,
    num_prompt_tokens: int,
    *,
    cache_salt: object = "",
    priority: object = 0,
) -> tuple[SamplingParams, int]:
    """Check a request. Raises ParameterError, which names the field, for what the model's limits forbid.

    Returns:
        The parameters with the tokens of their bad words, and the request's max_tokens, at least 1.

    """
    check_request_options(cache_salt, priority)
    params = tokenizer.resolve_bad_words(params)
    return params, check(params, limits, num_prompt_tokens)
