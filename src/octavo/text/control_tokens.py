"""Control tokens and text from outside: only a template may make the former.

Owns the guard that breaks what looks like a control token in a message, and the encoder that gives the plain meaning
back. Does not know templates. Invariant: whatever strings messages hold and however they are joined, the encoded
prompt has the control tokens that the template wrote, and no others; without such text, encoding is the ordinary one.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from octavo.request.sampling_params import ParameterError

if TYPE_CHECKING:
    import tokenizers

GUARD = "\ufdd0"  # noncharacters: no text for interchange has them
RENAME = "\ufdd1"


class ControlTokens:
    """Guards messages against a tokenizer's control tokens.

    A guard goes behind the first character of each control token found in a text, and to the text's end where a
    token could begin there and go on in the next text. Templates may then trim, split and join. To encode, the
    template's own control tokens are renamed, guards are removed, and a copy of the tokenizer that knows the control
    tokens only by their new names does the rest in one pass.
    """

    def __init__(self, backend: tokenizers.Tokenizer, tokens: Mapping[str, int]) -> None:
        """`tokens`: text -> id. A token of one character cannot be broken and is not guarded."""
        self._backend = backend
        self.ids = {token: token_id for token, token_id in tokens.items() if len(token) > 1}
        longest_first = sorted(self.ids, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        heads = {token[:k] for token in self.ids for k in range(1, len(token))}
        self._heads = {head for head in heads if not head.isalnum()}  # templates compare plain words
        self._longest_head = max(map(len, self._heads), default=0)

    def guard(self, text: str) -> str:
        """`text` with guards where it needs them. Raises ParameterError where it holds the guards' characters too."""
        guarded = text
        while self._pattern.search(guarded):  # again, for tokens that overlap
            guarded = self._pattern.sub(lambda match: match[0][0] + GUARD + match[0][1:], guarded)
        body = guarded.rstrip()
        if any(body[-k:] in self._heads for k in range(1, min(self._longest_head, len(body)) + 1)):
            guarded = body + GUARD + guarded[len(body) :]
        if guarded is not text and (GUARD in text or RENAME in text):
            message = "U+FDD0 and U+FDD1 cannot stand in one text with control tokens"
            raise ParameterError("messages", message, "invalid_unicode")
        return guarded

    def is_guarded(self, rendered: str) -> bool:
        """Whether rendered text has guards, for which a second tokenizer is made at the first."""
        return GUARD in rendered

    def plain(self, rendered: str) -> str:
        """Rendered text without guards, to show."""
        return rendered.replace(GUARD, "")

    def encode(self, rendered: str, add_special_tokens: bool = False) -> list[int]:
        """Token ids of rendered text; `add_special_tokens`: with those that the tokenizer puts around a text.

        Raises ParameterError if a guard is there and cannot be kept.
        """
        if GUARD not in rendered:
            return encode_text(self._backend, rendered, add_special_tokens, "messages")
        if RENAME in rendered:
            raise ParameterError("messages", "U+FDD1 cannot stand beside control tokens", "invalid_unicode")
        renamed = self._pattern.sub(lambda match: _new_name(match[0]), rendered)
        encoding = _encoding(self._renamed_tokenizer, renamed.replace(GUARD, ""), False, "messages")
        return (self._backend.post_process(encoding) if add_special_tokens else encoding).ids

    @functools.cached_property
    def _renamed_tokenizer(self) -> tokenizers.Tokenizer:
        """The tokenizer with its control tokens renamed, in the added tokens and in the model's vocabulary."""
        import tokenizers

        tree = json.loads(self._backend.to_str())
        tree["post_processor"] = None
        for added in tree["added_tokens"]:
            if added["content"] in self.ids:
                added["content"] = _new_name(added["content"])
        model = tree["model"]
        if isinstance(model["vocab"], dict):
            model["vocab"] = {self._renamed(token): token_id for token, token_id in model["vocab"].items()}
        else:
            model["vocab"] = [[self._renamed(token), score] for token, score in model["vocab"]]
        if isinstance(model.get("unk_token"), str):
            model["unk_token"] = self._renamed(model["unk_token"])
        copy = tokenizers.Tokenizer.from_str(json.dumps(tree))
        for token, token_id in self.ids.items():
            if token_id not in copy.encode(_new_name(token), add_special_tokens=False).ids:
                message = "text that looks like control tokens cannot be encoded with this tokenizer"
                raise ParameterError("messages", message, "unsupported")
        return copy

    def _renamed(self, token: str) -> str:
        return _new_name(token) if token in self.ids else token


def encode_text(backend: tokenizers.Tokenizer, text: str, add_special_tokens: bool, field: str = "prompt") -> list[int]:
    """Token ids. Raises ParameterError for a text that the tokenizer has no tokens for."""
    return _encoding(backend, text, add_special_tokens, field).ids


def _encoding(backend: tokenizers.Tokenizer, text: str, add_special_tokens: bool, field: str) -> tokenizers.Encoding:
    try:
        return backend.encode(text, add_special_tokens=add_special_tokens)
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # the library raises bare Exceptions, and its panics are no Exceptions
        reason = " ".join(str(error).split())[:120]  # of the tokenizer's own parts: it repeats no text
        message = f"cannot be tokenized: the model's tokenizer fails on it ({reason})"
        raise ParameterError(field, message, "untokenizable") from None


def _new_name(token: str) -> str:
    return token[0] + RENAME + token[1:]
