"""Log-probabilities in the two shapes of OpenAI's APIs.

Owns the texts of tokens, where they begin in an output, and the order of alternatives. Knows no request. Invariants:
the token itself is always among its alternatives in completions; a chat gives exactly as many as were asked for.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Sequence

from octavo.request.outputs import LogprobsDict
from octavo.serve.api.shapes import ChatLogprobs, CompletionLogprobs, TokenLogprob, TopLogprob
from octavo.text.no_tokenizer import NoTokenizer
from octavo.text.tokenizer import Tokenizer

# JSON has no infinities: a token that cannot be sampled gets what OpenAI gives it.
_LOWEST = -9999.0


class TokenTexts:
    """How tokens are written: as their texts, or as "token_id:5"."""

    __slots__ = ("_as_ids", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer | NoTokenizer, as_ids: bool) -> None:
        """`as_ids`: return_tokens_as_token_ids. Without a tokenizer there is no other way."""
        self._tokenizer = tokenizer if isinstance(tokenizer, Tokenizer) else None
        self._as_ids = as_ids

    def __call__(self, token_id: int) -> str:
        """A token's text."""
        if self._as_ids or self._tokenizer is None:
            return f"token_id:{token_id}"
        return self._tokenizer.decode_token(token_id)

    def bytes_of(self, token_id: int) -> bytes:
        """What a token adds to a text."""
        return self._tokenizer.token_bytes(token_id) if self._tokenizer else b""


class Offsets:
    """Where tokens begin in the text that they make, in characters."""

    __slots__ = ("_decoder", "_offset", "_prompt", "_skipped", "_texts")

    def __init__(self, tokenizer: Tokenizer | NoTokenizer, skip_special: bool, prompt: str = "") -> None:
        """`skip_special`: special tokens have no text, but where `prompt`, which the text begins with, holds it."""
        self._texts, self._prompt = TokenTexts(tokenizer, False), prompt
        self._skipped = tokenizer.special_token_ids if skip_special else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def add(self, token_id: int) -> int:
        """Take the next token; where it begins."""
        offset = self._offset
        text = self._decoder.decode(self._texts.bytes_of(token_id))
        if token_id not in self._skipped or (text and self._prompt.startswith(text, offset)):
            self._offset += len(text)
        return offset


def completion_logprobs(
    texts: TokenTexts, offsets: Offsets, token_ids: Sequence[int], entries: Sequence[LogprobsDict | None]
) -> CompletionLogprobs:
    """The lists of /v1/completions; entry i belongs to token i, None where there is none."""
    made = CompletionLogprobs([], [], [], [])
    for token_id, entry in zip(token_ids, entries, strict=True):
        made.tokens.append(texts(token_id))
        made.text_offset.append(offsets.add(token_id))
        made.token_logprobs.append(None if entry is None else finite(entry[token_id].logprob))
        made.top_logprobs.append(top_of(texts, entry))
    return made


def top_of(texts: TokenTexts, entry: LogprobsDict | None) -> dict[str, float] | None:
    """The alternatives at a position, by their texts."""
    if entry is None:
        return None
    top: dict[str, float] = {}
    for each, logprob in entry.items():
        top.setdefault(texts(each), finite(logprob.logprob))  # of tokens with one text the likelier stays
    return top


def chat_logprobs(
    texts: TokenTexts, token_ids: Sequence[int], entries: Sequence[LogprobsDict], num_top: int
) -> ChatLogprobs:
    """The list of /v1/chat/completions."""
    return ChatLogprobs(list(chat_entries(texts, token_ids, entries, num_top)))


def chat_entries(
    texts: TokenTexts, token_ids: Sequence[int], entries: Sequence[LogprobsDict], num_top: int
) -> Iterator[TokenLogprob]:
    """The entries of that list. num_top: -1: all."""
    most = None if num_top == -1 else num_top
    for token_id, entry in zip(token_ids, entries, strict=True):
        likeliest = sorted(entry.items(), key=lambda item: item[1].rank or 0)[:most] if num_top else []
        top = [TopLogprob(texts(each), finite(value.logprob), _bytes(texts, each)) for each, value in likeliest]
        yield TokenLogprob(texts(token_id), finite(entry[token_id].logprob), _bytes(texts, token_id), top)


def _bytes(texts: TokenTexts, token_id: int) -> list[int]:
    return list(texts.bytes_of(token_id))


def finite(logprob: float) -> float:
    """A log-probability that JSON can hold."""
    return max(logprob, _LOWEST)
