"""A model's tokenizer: tokenizer.json, or what stands in its place, and its companions, without transformers.

Owns encoding, decoding, the special tokens and the chat prompt. Knows nothing of requests or the engine; the library
`tokenizers` is imported when one is loaded. Invariant: a folder either gives a working Tokenizer or one ValueError of
one line that names the file; plain text prompts mean what they mean to Hugging Face, text in messages never makes a
special token.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from octavo.request.sampling_params import ParameterError, SamplingParams, check_unicode
from octavo.text import converted
from octavo.text.control_tokens import ControlTokens, encode_text
from octavo.text.detokenizer import (
    ByteDetokenizer,
    DecoderKind,
    Detokenizer,
    TokenBytes,
    WholeText,
    WindowDetokenizer,
    byte_level_alphabet,
    decode_bytes,
)
from octavo.text.template import ChatTemplate, read_template

if TYPE_CHECKING:
    import tokenizers

    from octavo.checkpoint.arch import Arch

MAX_TOKENIZER_BYTES = 256 << 20
MAX_CONFIG_BYTES = 16 << 20
_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_LISTED = ("additional_special_tokens", "extra_special_tokens")
_NORMALIZERS = frozenset(("NFC", "NFD", "NFKC", "NFKD", "Prepend", "Lowercase"))  # they shorten a little at most


def load_tokenizer(folder: str | Path, arch: Arch) -> Tokenizer:
    """The tokenizer of a model folder. Raises ValueError, in one line, if it is broken or does not suit the model."""
    tokenizer = Tokenizer.load(folder)
    tokenizer.check_fits(arch.vocab_size)
    return tokenizer


class Tokenizer:
    """Text to token ids and back."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        config: Mapping[str, Any] | None = None,
        templates: Mapping[str, str] | None = None,
    ) -> None:
        """`backend` is the library's tokenizer, `config` the contents of tokenizer_config.json.

        `templates` are chat templates by name; by default those of `config`.
        """
        config = dict(config or {})
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.special_tokens = _special_tokens(config)  # name -> text (or texts), as templates see them
        _make_special(backend, self.special_tokens)
        self.kind = DecoderKind.of(backend)
        added = backend.get_added_tokens_decoder()
        self.special_token_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._added = {token_id: token.content for token_id, token in added.items()}
        self._bytes = (TokenBytes(backend, self.kind), TokenBytes(backend, self.kind, self.special_token_ids))
        self._whole = (WholeText(self._bytes[0]), WholeText(self._bytes[1]))
        self._texts: dict[int, str] = {}
        self.bos_token_id = self._id_of("bos_token")
        self.eos_token_id = self._id_of("eos_token")
        self.pad_token_id = self._id_of("pad_token")
        self.template = ChatTemplate(_templates(config) if templates is None else templates, self.special_tokens)

    @classmethod
    def load(cls, folder: str | Path) -> Tokenizer:
        """Read tokenizer.json, tokenizer_config.json, special_tokens_map.json and chat_template.* of a folder.

        Without a tokenizer.json one of the other files that `converted` knows.

        Raises:
            ValueError: one line with the file's path and what is wrong.

        """
        folder = Path(folder)
        config = _read_json(folder / "special_tokens_map.json") | _read_json(folder / "tokenizer_config.json")
        file = converted.tokenizer_file(folder)
        if file is None or file.name == "tokenizer.json":
            backend = _read_backend(folder / "tokenizer.json")
        else:
            backend, own = converted.convert(file, config)
            config = own | config
        templates = _templates(config) | _templates(_read_json(folder / "chat_template.json"))
        path = folder / "chat_template.jinja"
        if path.is_file():
            templates["default"] = _read(path, MAX_CONFIG_BYTES)
        return cls(backend, config, templates)

    @property
    def num_token_ids(self) -> int:
        """One more than the largest token id."""
        return self._extent[0]

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    def __len__(self) -> int:
        """Number of tokens, added ones included."""
        return self.vocab_size

    @property
    def max_token_bytes(self) -> int:
        """UTF-8 bytes of text that one token can stand for at most; 0 if there is no such limit."""
        return self._extent[1]

    @functools.cached_property
    def _extent(self) -> tuple[int, int]:
        """(num_token_ids, max_token_bytes): one look at the whole vocabulary, which may be slow to copy."""
        vocab = self.backend.get_vocab(with_added_tokens=True)
        num_token_ids = max(vocab.values(), default=-1) + 1
        factor = _most_shortening(self.backend.normalizer)
        if self.kind.name == "byte_level":
            whole = all(char in vocab for char in byte_level_alphabet())
        else:  # without a token for every byte, any text may become one unknown token
            whole = self.kind.name == "byte_fallback" and getattr(self.backend.model, "byte_fallback", False)
        return num_token_ids, max(len(token.encode()) for token in vocab) * factor if whole else 0

    @property
    def chat_template(self) -> str | None:
        """The default chat template's source."""
        return self.template.source

    def check_fits(self, num_rows: int) -> None:
        """Raise ValueError if a token id is outside an embedding with `num_rows` rows."""
        if self.num_token_ids > num_rows:
            worst = self.num_token_ids - 1
            raise ValueError(f"tokenizer.json: token id {worst} is outside the model's vocab_size {num_rows}")

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a plain prompt. Special tokens in the text count as such, as with Hugging Face.

        Raises ParameterError for a text that this tokenizer has no tokens for.
        """
        return encode_text(self.backend, text, add_special_tokens)

    def __call__(self, text: str | Sequence[str], add_special_tokens: bool = True) -> dict[str, Any]:
        """Hugging Face's form of `encode`: `input_ids` and `attention_mask` of a text, or lists of them of texts.

        Raises ParameterError as `encode` does.
        """
        many = [text] if isinstance(text, str) else list(text)
        ids = [self.encode(each, add_special_tokens) for each in many]
        masks = [[1] * len(each) for each in ids]
        one = isinstance(text, str)
        return {"input_ids": ids[0] if one else ids, "attention_mask": masks[0] if one else masks}

    def use_chat_template(self, given: str) -> None:
        """Take another chat template than the model's: a file, or the template itself. Raises ConfigError."""
        source = read_template(given)
        self.template.sources.clear()
        self.template.sources["default"] = source

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `token_ids`. Unknown ids add nothing, broken characters become U+FFFD."""
        if self.kind.name == "other":
            return self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return decode_bytes(self._bytes[skip_special_tokens], self.kind, token_ids)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to a text; b"" for an id without a token."""
        return self._bytes[False][token_id]

    def decode_token(self, token_id: int) -> str:
        """A token's own text, with its leading space; parts of characters become U+FFFD."""
        text = self._texts.get(token_id)
        if text is None:
            text = self._texts[token_id] = self._bytes[False][token_id].decode("utf-8", "replace")
        return text

    def detokenizer(
        self,
        prompt_token_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> Detokenizer:
        """A new incremental detokenizer whose text goes on after the prompt."""
        if self.kind.name != "other":
            table = self._bytes[skip_special_tokens]
            return ByteDetokenizer(table, self._whole[skip_special_tokens], self.kind, prompt_token_ids)
        skip = self.special_token_ids if skip_special_tokens else frozenset[int]()
        joined = skip_special_tokens or spaces_between_special_tokens
        return WindowDetokenizer(self.backend, skip, {} if joined else self._added, prompt_token_ids)

    def render_chat(
        self,
        messages: object,
        *,
        tools: Sequence[Any] | None = None,
        documents: Sequence[Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
        content_format: str = "auto",
    ) -> tuple[str, list[int]]:
        """The prompt of a conversation, as text to show and as token ids.

        Special tokens come from the template alone: in the messages their texts are plain text.

        Raises:
            ParameterError: a bad message, or a template that fails ("template_failed: ...").

        """
        rendered = self.template.render(
            messages,
            tools=tools,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            template_kwargs=chat_template_kwargs,
            chat_template=chat_template,
            content_format=content_format,
            guard=self.control.guard,
        )
        check_unicode("messages", rendered)
        return self.control.plain(rendered), self.control.encode(rendered)

    def apply_chat_template(
        self,
        conversation: object,
        tools: Sequence[Any] | None = None,
        documents: Sequence[Any] | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        chat_template: str | None = None,
        **kwargs: Any,
    ) -> str | list[int]:
        """Hugging Face's name and defaults for `render_chat`. Returns token ids, or text if not `tokenize`."""
        text, token_ids = self.render_chat(
            conversation,
            tools=tools,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template_kwargs=kwargs,
            chat_template=chat_template,
        )
        return token_ids if tokenize else text

    def resolve_bad_words(self, params: SamplingParams) -> SamplingParams:
        """`params` with the token ids of its bad words, each as the start of a text and after a space.

        Raises ParameterError for a word without tokens, or for too many tokens together.
        """
        if not params.bad_words:
            return params
        sequences: list[list[int]] = []
        for i, word in enumerate(params.bad_words):
            texts = (word.lstrip(), " " + word.lstrip())
            field = f"bad_words[{i}]"
            found = [ids for text in texts if (ids := encode_text(self.backend, text, False, field))]
            if not word.strip() or not found:
                raise ParameterError(field, "has no tokens")
            for token_ids in found:
                if token_ids not in sequences:
                    sequences.append(token_ids)
        return replace(params, bad_words_token_ids=sequences)

    @functools.cached_property
    def control(self) -> ControlTokens:
        """The guard of messages, and the encoder of what a template makes of them."""
        return ControlTokens(self.backend, {self._added[token_id]: token_id for token_id in self.special_token_ids})

    def _id_of(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return self.backend.token_to_id(token) if isinstance(token, str) else None


def _special_tokens(config: Mapping[str, Any]) -> dict[str, Any]:
    """The special tokens that a tokenizer_config.json names; each is a text or an object with one."""

    def text_of(token: object) -> str | None:
        content = token.get("content") if isinstance(token, Mapping) else token
        return content if isinstance(content, str) else None

    found: dict[str, Any] = {name: text_of(config.get(name)) for name in _NAMED}
    for name in _LISTED:
        tokens = config.get(name)
        if isinstance(tokens, Mapping):  # model-specific names, such as image_token
            found |= {str(key): text_of(token) for key, token in tokens.items()}
        elif isinstance(tokens, list):
            found[name] = [text for text in map(text_of, tokens) if text is not None]
    return {name: token for name, token in found.items() if token}


def _make_special(backend: tokenizers.Tokenizer, special_tokens: Mapping[str, Any]) -> None:
    """Tokens that the config calls special are special, whatever tokenizer.json says."""
    from tokenizers import AddedToken

    known = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    texts = [text for entry in special_tokens.values() for text in ([entry] if isinstance(entry, str) else entry)]
    for text in dict.fromkeys(texts):
        token = known.get(text)
        if backend.token_to_id(text) is not None and not (token and token.special):
            flags = {"lstrip": token.lstrip, "rstrip": token.rstrip} if token else {}
            backend.add_special_tokens([AddedToken(text, special=True, normalized=False, **flags)])


def _templates(config: Mapping[str, Any]) -> dict[str, str]:
    """Chat templates by name: the config has one text, or a list of {name, template}."""
    entry = config.get("chat_template")
    if isinstance(entry, str):
        return {"default": entry}
    if isinstance(entry, list):
        named = [each for each in entry if isinstance(each, Mapping)]
        return {str(each.get("name")): each["template"] for each in named if isinstance(each.get("template"), str)}
    return {}


def _most_shortening(normalizer: Any) -> int:
    """How many times fewer bytes a text may have after normalizing; 0 if nobody knows."""
    if normalizer is None:
        return 1
    tree = json.loads(normalizer.__getstate__())
    steps = tree.get("normalizers", [tree])
    known = all(step["type"] in _NORMALIZERS or _replaces_space(step) for step in steps)
    return 4 if known else 0


def _replaces_space(step: Mapping[str, Any]) -> bool:
    return step["type"] == "Replace" and step["pattern"] == {"String": " "} and bool(step["content"])


def _read(path: Path, limit: int) -> str:
    try:
        if not path.is_file():
            raise ValueError(f"{path}: not found, or not a regular file")
        size = path.stat().st_size
        if size > limit:
            raise ValueError(f"{path}: {size} bytes, the limit is {limit}")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 at byte {error.start}") from None


def _read_json(path: Path) -> dict[str, Any]:
    """A companion file's object; a missing file is an empty one."""
    if not path.exists():
        return {}
    text = _read(path, MAX_CONFIG_BYTES)
    try:
        tree = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not JSON ({error})") from None
    if not isinstance(tree, dict):
        raise ValueError(f"{path}: must hold an object")
    return tree


def _read_backend(path: Path) -> tokenizers.Tokenizer:
    text = _read(path, MAX_TOKENIZER_BYTES)
    import tokenizers

    try:
        backend = tokenizers.Tokenizer.from_str(text)
        if not backend.get_vocab_size(with_added_tokens=True):
            raise ValueError("the vocabulary is empty")
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library raises bare Exceptions, and its panics are no Exceptions
        reason = " ".join(str(error).split())[:160]
        raise ValueError(f"{path}: not a usable tokenizer ({reason})") from None
    return backend
