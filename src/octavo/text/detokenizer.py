"""Tokens to text, one token at a time, and the search for stop strings in it.

Owns the bytes of each token (TokenBytes), the incremental detokenizers and StopChecker. Does not know requests.
Invariant: text is given out in whole characters, never taken back, and in the end all of it together is the text of
decoding all tokens at once. Each token costs constant time, amortised.
"""

from __future__ import annotations

import codecs
import functools
import json
import re
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec

if TYPE_CHECKING:
    import tokenizers

_SPACE = "\u2581"  # SentencePiece's sign for a space
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_NUM_PRIMING = 4  # a character has at most 4 bytes, so no more tokens can hold the start of one
_MAX_PENDING = 8  # tokens after which a window that ends in U+FFFD is taken to mean it


class DecoderKind(msgspec.Struct, frozen=True):
    """How a tokenizer.json's decoder makes text, as far as it is a concatenation of each token's bytes."""

    name: str  # "byte_level", "metaspace", "byte_fallback", or "other": ask the tokenizers library
    strip: int = 0  # spaces to drop from the very start of a text
    first_bare: bool = False  # metaspace: the very first token loses its spaces

    @staticmethod
    def of(backend: tokenizers.Tokenizer) -> DecoderKind:
        """Read it from the decoder's own description."""
        decoder = backend.decoder
        if decoder is None:
            return DecoderKind("other")
        tree = json.loads(decoder.__getstate__())
        steps = tree.get("decoders", [tree])
        if [step["type"] for step in steps] == ["ByteLevel"]:
            return DecoderKind("byte_level")
        if [step["type"] for step in steps] == ["Metaspace"] and steps[0]["replacement"] == _SPACE:
            return DecoderKind("metaspace", first_bare=steps[0].get("prepend_scheme", "always") != "never")
        strip = 0
        if steps and steps[-1]["type"] == "Strip":
            last = steps.pop()
            if last["content"] != " " or last["stop"] != 0:
                return DecoderKind("other")
            strip = last["start"]
        replace = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
        if steps == [replace, {"type": "ByteFallback"}, {"type": "Fuse"}]:
            return DecoderKind("byte_fallback", strip=strip)
        return DecoderKind("other")


class TokenBytes(dict[int, bytes]):
    """Token id -> the UTF-8 bytes that it adds to a text, filled as ids are asked for. Unknown ids add nothing."""

    def __init__(self, backend: tokenizers.Tokenizer, kind: DecoderKind, skip: Collection[int] = ()) -> None:
        """Tokens in `skip` (special ones) add nothing either."""
        super().__init__()
        self._backend = backend
        self._kind = kind
        self._skip = frozenset(skip)
        self._byte_of = byte_level_alphabet() if kind.name == "byte_level" else {}

    def __missing__(self, token_id: int) -> bytes:
        """Look the token up, once."""
        token = None if token_id in self._skip or token_id < 0 else self._backend.id_to_token(token_id)
        found = b"" if token is None else self._bytes(token_id, token)
        self[token_id] = found
        return found

    def bare(self, token_id: int) -> str:
        """A metaspace token's text without its spaces."""
        token = self._backend.id_to_token(token_id) if self[token_id] else None
        return (token or "").replace(_SPACE, "")

    def _bytes(self, token_id: int, token: str) -> bytes:
        if self._kind.name == "byte_level":
            found = [self._byte_of.get(char, -1) for char in token]
            return token.encode() if -1 in found else bytes(found)  # an added token outside the alphabet
        if self._kind.name == "other":
            return self._backend.decode([token_id], skip_special_tokens=False).encode()
        match = _BYTE_TOKEN.fullmatch(token) if self._kind.name == "byte_fallback" else None
        return bytes([int(match[1], 16)]) if match else token.replace(_SPACE, " ").encode()


class WholeText(dict[int, "str | None"]):
    """Token id -> its text, if its bytes are whole characters, else None."""

    def __init__(self, token_bytes: TokenBytes) -> None:
        """A view of `token_bytes`, filled as ids are asked for."""
        super().__init__()
        self._token_bytes = token_bytes

    def __missing__(self, token_id: int) -> str | None:
        """Decode the token, once."""
        try:
            found = self._token_bytes[token_id].decode()
        except UnicodeDecodeError:
            found = None
        self[token_id] = found
        return found


class Detokenizer(Protocol):
    """One text that grows."""

    def add(self, token_id: int) -> str:
        """The whole characters that are certain now."""
        ...

    def flush(self) -> str:
        """The rest, at the end: an unfinished character becomes U+FFFD."""
        ...


class ByteDetokenizer:
    """For tokenizers whose text is the concatenation of each token's bytes: nearly all."""

    __slots__ = ("_bytes", "_errors", "_first_bare", "_pending", "_strip", "_whole")

    def __init__(
        self, token_bytes: TokenBytes, whole: WholeText, kind: DecoderKind, prompt: Sequence[int] = ()
    ) -> None:
        """With a `prompt` the text goes on after it, without it the text starts here and loses its first space."""
        self._bytes, self._whole = token_bytes, whole
        self._errors = error_handler(kind)
        self._strip = self._first_bare = 0
        self._pending = b""  # the start of an unfinished character
        if prompt:
            for token_id in prompt[-_NUM_PRIMING:]:
                self.add(token_id)
        else:
            self._strip, self._first_bare = kind.strip, int(kind.first_bare)

    def add(self, token_id: int) -> str:
        """See Detokenizer."""
        text = self._whole[token_id]
        if text is None or self._pending:
            data = self._pending + self._bytes[token_id]
            text, num_used = codecs.utf_8_decode(data, self._errors, False)
            self._pending = data[num_used:]
        if text and (self._strip or self._first_bare):
            return self._at_start(token_id, text)
        return text

    def flush(self) -> str:
        """See Detokenizer."""
        text, _ = codecs.utf_8_decode(self._pending, self._errors, True)
        self._pending = b""
        return text

    def _at_start(self, token_id: int, text: str) -> str:
        if self._first_bare:
            self._first_bare = 0
            return self._bytes.bare(token_id)
        num_dropped = min(self._strip, len(text) - len(text.lstrip(" ")))
        self._strip = 0 if num_dropped < len(text) else self._strip - num_dropped
        return text[num_dropped:]


class WindowDetokenizer:
    """For any decoder: decodes a short window of tokens with and without the new ones; the difference is new text."""

    __slots__ = ("_added", "_backend", "_last_added", "_num_told", "_skip", "_told", "_window")

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        skip: Collection[int],
        added: dict[int, str],
        prompt: Sequence[int] = (),
    ) -> None:
        """`added`: tokens that get no spaces between them (id -> text), empty for the decoder's own way."""
        self._backend, self._skip, self._added = backend, skip, added
        self._window = [token_id for token_id in prompt[-_NUM_PRIMING:] if token_id not in skip]
        self._num_told = len(self._window)  # tokens at the window's start whose text was given out
        self._told = self._decode(self._window)
        self._last_added = False

    def add(self, token_id: int) -> str:
        """See Detokenizer."""
        if token_id in self._skip or token_id < 0 or self._backend.id_to_token(token_id) is None:
            return ""  # a token without text must not become the window's start
        after_added, self._last_added = self._last_added, token_id in self._added
        self._window.append(token_id)
        text = self._decode(self._window)
        if text.endswith("\ufffd") and len(self._window) - self._num_told < _MAX_PENDING:
            return ""
        new = self._tell(text)
        return self._added[token_id] if after_added and self._last_added else new

    def flush(self) -> str:
        """See Detokenizer."""
        return self._tell(self._decode(self._window))

    def _tell(self, text: str) -> str:
        new = text[len(self._told) :]
        if self._num_told < len(self._window):
            self._window = self._window[self._num_told :]
        self._num_told = len(self._window)
        self._told = self._decode(self._window)
        return new

    def _decode(self, token_ids: list[int]) -> str:
        return self._backend.decode(token_ids, skip_special_tokens=False)


class NoText:
    """The detokenizer of requests that want none."""

    def add(self, token_id: int) -> str:
        """Nothing."""
        return ""

    def flush(self) -> str:
        """Nothing."""
        return ""


NO_TEXT = NoText()


class StopChecker:
    """Finds the first stop string to be completed, and holds back text that may be the start of one.

    An Aho-Corasick automaton (Aho and Corasick, 1975): a state is the longest suffix of the text that starts a stop
    string, so its depth is what to hold back, and each character costs constant time, amortised. Where two stop
    strings are completed by one character the longer counts. How text is split into pieces makes no difference.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        """`include`: the stop string stays in the text."""
        self._include = include
        automaton = _automaton(tuple(stops))
        self._next, self._fail = automaton.next, automaton.fail
        self._depth, self._found = automaton.depth, automaton.found
        self._state = 0
        self._held = ""

    def feed(self, text: str, active: bool = True) -> tuple[str, str | None]:
        """Take new text. Returns (text to give out, the stop string that ends it or None).

        While not `active` (before min_tokens) a completed stop string is passed over.
        """
        state, following = self._state, self._next
        for i, char in enumerate(text):
            while state and char not in following[state]:
                state = self._fail[state]
            state = following[state].get(char, 0)
            found = self._found[state]
            if found is not None and active:
                whole = self._held + text[: i + 1]
                self._state, self._held = 0, ""
                return whole if self._include else whole[: len(whole) - len(found)], found
        self._state = state
        whole = self._held + text
        keep = len(whole) - self._depth[state]
        self._held = whole[keep:]
        return whole[:keep], None

    def flush(self) -> str:
        """The held text: the end has come without a stop string."""
        held, self._held, self._state = self._held, "", 0
        return held


class _Automaton:
    """The states of a set of stop strings; the completions of a request share them."""

    __slots__ = ("depth", "fail", "found", "next")

    def __init__(self, stops: Sequence[str]) -> None:
        self.next: list[dict[str, int]] = [{}]
        self.fail, self.depth = [0], [0]
        self.found: list[str | None] = [None]  # per state the longest stop string that it ends in
        for stop in stops:
            self._insert(stop)
        self._link()

    def _insert(self, stop: str) -> None:
        state = 0
        for char in stop:
            if char not in self.next[state]:
                self.next[state][char] = len(self.next)
                self.next.append({})
                self.fail.append(0)
                self.depth.append(self.depth[state] + 1)
                self.found.append(None)
            state = self.next[state][char]
        self.found[state] = stop

    def _link(self) -> None:
        queue = list(self.next[0].values())
        for state in queue:  # grows while it is walked: breadth first
            for char, child in self.next[state].items():
                queue.append(child)
                fail = self.fail[state]
                while fail and char not in self.next[fail]:
                    fail = self.fail[fail]
                self.fail[child] = self.next[fail].get(char, 0)
                self.found[child] = self.found[child] or self.found[self.fail[child]]


@functools.lru_cache(maxsize=8)  # a request's completions begin one after the other
def _automaton(stops: tuple[str, ...]) -> _Automaton:
    return _Automaton(stops)


def error_handler(kind: DecoderKind) -> str:
    """The name of the codec error handler that replaces invalid bytes as this kind of decoder does."""
    if kind.name != "byte_fallback":
        return "replace"
    codecs.register_error("octavo-each-byte", _replace_each_byte)
    return "octavo-each-byte"


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    """Byte fallback gives one U+FFFD for each byte of a broken character, not one for all."""
    assert isinstance(error, UnicodeDecodeError), "only used to decode"
    return "\ufffd" * (error.end - error.start), error.end


def byte_level_alphabet() -> dict[str, int]:
    """GPT-2's alphabet, character -> byte: printable bytes are themselves, the others follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + k): byte for k, byte in enumerate(others)}


def decode_bytes(token_bytes: TokenBytes, kind: DecoderKind, token_ids: Sequence[int]) -> str:
    """One-shot decoding with the same meaning as a ByteDetokenizer that starts here."""
    rest = iter(token_ids)
    first = ""
    if kind.first_bare:
        first = next((token_bytes.bare(token_id) for token_id in rest if token_bytes[token_id]), "")
    text = b"".join(map(token_bytes.__getitem__, rest)).decode("utf-8", error_handler(kind))
    num_spaces = len(text) - len(text.lstrip(" "))
    return first + text[min(num_spaces, kind.strip) :]
