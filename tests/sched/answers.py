"""What the model without weights says: a token follows from the history alone, so every answer is known before."""

from __future__ import annotations

import dataclasses
import zlib

from octavo.request.request import Request

VOCAB = 40


def fingerprint(before: int, token: int) -> int:
    """Of a history, from the one that is a token shorter."""
    return hash((before, token))


def history(tokens: list[int], salt: str) -> list[int]:
    """Fingerprints of all prefixes of `tokens`, the empty one first. Salted: K and V must not pass between salts."""
    fingerprints = [zlib.crc32(salt.encode())]
    for token in tokens:
        fingerprints.append(fingerprint(fingerprints[-1], token))
    return fingerprints


def next_token(before: int) -> int:
    """What the model without weights samples after a history."""
    return hash((before, VOCAB)) % VOCAB


@dataclasses.dataclass
class Answer:
    """What a request must give if nothing ends it from outside."""

    tokens: list[int]
    finish_reason: str
    stop_reason: int | None


def expected_answer(request: Request, max_model_len: int) -> Answer:
    """By generating one token after the other, alone."""
    params, output = request.params, []
    before = history(request.tokens[: request.num_prompt], request.cache_salt)[-1]
    limit = min(params.max_tokens, max_model_len - request.num_prompt)
    while True:
        token = next_token(before)
        before = fingerprint(before, token)
        output.append(token)
        if len(output) >= params.min_tokens:
            if token in request.eos_token_ids:
                return Answer(output, "stop", None)
            if token in request.stop_token_ids:
                return Answer(output, "stop", token)
        if len(output) >= limit:
            return Answer(output, "length", None)
