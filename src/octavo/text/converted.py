"""Tokenizers in other files than tokenizer.json: SentencePiece models, tekken.json, tiktoken's ranks.

Owns which file of a folder is read, and its translation to the library `tokenizers`, which then does the work. Knows no
chat template. Invariant: a text has the ids that the file's own library gives it; a file whose rule for cutting words
is not known is refused.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import functools
import json
import unicodedata
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

if TYPE_CHECKING:
    import tokenizers

MAX_BYTES = 256 << 20
_SPACE = "\u2581"  # what SentencePiece writes for a space
_CUT, _APART = "\ufdd3", "\ufdd4"  # noncharacters that stand in a text while it is normalized
_COMPOSING = ("nmt_nfkc", "nfkc", "nmt_nfkc_cf", "nfkc_cf")  # tables of characters that are Unicode's compositions
_AFTER_MARKS = 0x3100  # in what follows few characters combine
_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = range(1, 7)  # SentencePiece's kinds of pieces
_UNIGRAM, _BPE = 1, 2  # and of models
_REST = r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{_REST}"
_UPPER, _LOWER = (rf"[{cases}\p{{Lm}}\p{{Lo}}\p{{M}}&&[^\p{{Han}}]]" for cases in (r"\p{Lu}\p{Lt}", r"\p{Ll}"))
_KIMI = "|".join(
    (
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        _REST,
    )
)
_KIMI_RESERVED = 256  # ids behind the ranks, with or without a name
# How tiktoken's users cut words is in their programs: the names of their files say whose.
_PATTERNS = {"tokenizer.model": _LLAMA3, "tiktoken.model": _KIMI}
FILES = ("tokenizer.json", "tekken.json", "tokenizer.model", "tiktoken.model")
_Part = TypeVar("_Part", str, bytes)


class Converted(NamedTuple):
    """What a file says."""

    backend: tokenizers.Tokenizer
    config: dict[str, Any]  # what tokenizer_config.json would say of special tokens


def tokenizer_file(folder: Path) -> Path | None:
    """The file of a folder that its tokenizer is read from: the first that is there."""
    return next((folder / name for name in FILES if (folder / name).exists()), None)


def convert(path: Path, config: Mapping[str, Any]) -> Converted:
    """Read a file that is no tokenizer.json. config: the folder's tokenizer_config.json.

    Raises ValueError, one line with the path: for a file that is broken or of no known kind, and for one that needs a
    library that is not installed, with the line that installs it.
    """
    data = _bytes_of(path)
    with _told(path):
        if path.name == "tekken.json":
            return _from_tekken(json.loads(data))
        ranks = _ranks_of(data)
        if ranks is not None:
            return _from_tiktoken(ranks, path.name, config)
        return _from_sentencepiece(data, config)


def _bytes_of(path: Path) -> bytes:
    try:
        if not path.is_file():
            raise ValueError(f"{path}: not a regular file")
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise ValueError(f"{path}: {size} bytes, the limit is {MAX_BYTES}")
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from None


@contextlib.contextmanager
def _told(path: Path) -> Iterator[None]:
    """Every failure as one line."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except _MissingError as error:
        raise ValueError(f"{path}: {error}") from None
    except BaseException as error:  # the libraries raise bare Exceptions, and their panics are no Exceptions
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"[:160]
        raise ValueError(f"{path}: not a usable tokenizer ({reason})") from None


class _MissingError(ValueError):
    """Something beside the file is needed."""


def _merges(ranks: Mapping[_Part, float]) -> list[tuple[_Part, _Part]]:
    """The pairs that become one token, in the order in which they do: that of `ranks` of what they become."""
    found: list[tuple[_Part, _Part]] = []
    for token in sorted(ranks, key=ranks.__getitem__):
        splits = ((token[:at], token[at:]) for at in range(1, len(token)))
        pairs = [pair for pair in splits if pair[0] in ranks and pair[1] in ranks]
        found += sorted(pairs, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
    return found


# Byte-level: tekken.json and tiktoken's ranks


def _ranks_of(data: bytes) -> dict[bytes, int] | None:
    """tiktoken's lines of a token in base64 and its rank; None for anything else."""
    ranks = {}
    try:
        for line in data.splitlines():
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
    except (ValueError, binascii.Error):
        return None
    return ranks or None


def _from_tiktoken(ranks: Mapping[bytes, int], name: str, config: Mapping[str, Any]) -> Converted:
    named = config.get("added_tokens_decoder")
    if not isinstance(named, Mapping) or not named:
        raise _MissingError(
            "tiktoken's ranks name no special tokens: tokenizer_config.json must have them as added_tokens_decoder, or "
            "give a tokenizer.json"
        )
    specials: dict[int, str] = {int(str(token_id)): str(entry["content"]) for token_id, entry in named.items()}
    if name == "tiktoken.model":
        ids = range(len(ranks), len(ranks) + _KIMI_RESERVED)
        specials = {token_id: f"<|reserved_token_{token_id}|>" for token_id in ids} | specials
    return Converted(_byte_level(ranks, 0, _PATTERNS[name], specials, config), {})


def _from_tekken(tree: Mapping[str, Any]) -> Converted:
    """Mistral's file: ids of special tokens first, then ranks, as many as the vocabulary has room for."""
    facts = tree["config"]
    num_special = int(facts["default_num_special_tokens"])
    specials: dict[int, str] = {token_id: f"<SPECIAL_{token_id}>" for token_id in range(num_special)}
    default: list[dict[str, Any]] = [
        {"rank": rank, "token_str": text} for rank, text in enumerate(("<unk>", "<s>", "</s>"))
    ]
    for entry in tree.get("special_tokens") or default:
        if int(entry["rank"]) not in specials:
            raise ValueError(f"special token {entry['rank']} is beyond default_num_special_tokens={num_special}")
        specials[int(entry["rank"])] = str(entry["token_str"])
    room = int(facts["default_vocab_size"]) - num_special
    if room < 1:
        raise ValueError(f"default_vocab_size={facts['default_vocab_size']} has no room beside {num_special}")
    ranks = {
        base64.b64decode(entry["token_bytes"], validate=True): int(entry["rank"]) for entry in tree["vocab"][:room]
    }
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    own = {name: text for name, text in names.items() if text in specials.values()}
    config = {"add_bos_token": True, **own}
    return Converted(_byte_level(ranks, num_special, facts["pattern"], specials, config), config)


def _byte_level(
    ranks: Mapping[bytes, int], first_id: int, pattern: str, specials: Mapping[int, str], config: Mapping[str, Any]
) -> tokenizers.Tokenizer:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    from octavo.text.detokenizer import byte_level_alphabet

    chars = {byte: char for char, byte in byte_level_alphabet().items()}

    def shown(token: bytes) -> str:
        return "".join(chars[byte] for byte in token)

    vocab = {shown(token): first_id + rank for token, rank in ranks.items()} | {
        text: token_id for token_id, text in specials.items()
    }
    merges = [(shown(left), shown(right)) for left, right in _merges(ranks)]
    backend = Tokenizer(models.BPE(vocab, merges, ignore_merges=True))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    texts = [specials[token_id] for token_id in sorted(specials)]
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in texts])
    _frame(backend, config)
    return backend


def _frame(backend: tokenizers.Tokenizer, config: Mapping[str, Any]) -> None:
    """Put the tokens around a prompt that `config` asks for."""
    from tokenizers import processors

    def one(name: str) -> list[str]:
        text = config.get(name)
        text = text.get("content") if isinstance(text, Mapping) else text
        return [text] if config.get(f"add_{name}") and isinstance(text, str) else []

    first, last = one("bos_token"), one("eos_token")
    if first or last:
        ids = [(text, backend.token_to_id(text)) for text in dict.fromkeys(first + last)]
        backend.post_processor = processors.TemplateProcessing(
            single=[*first, "$A", *last], pair=[*first, "$A", *last, *first, "$B:1", *last], special_tokens=ids
        )


# SentencePiece


def _from_sentencepiece(data: bytes, config: Mapping[str, Any]) -> Converted:
    try:
        from sentencepiece import sentencepiece_model_pb2
    except ImportError:
        raise _MissingError(
            "a SentencePiece model needs the libraries sentencepiece and protobuf: pip install 'octavo[sentencepiece]'"
        ) from None
    from tokenizers import AddedToken, Tokenizer, models

    model: Any = vars(sentencepiece_model_pb2)["ModelProto"].FromString(data)  # made when it is imported
    pieces, trainer = list(model.pieces), model.trainer_spec
    bytes_too = bool(trainer.byte_fallback)
    if trainer.model_type == _UNIGRAM:
        scores = [(piece.piece, piece.score) for piece in pieces]
        kind: Any = models.Unigram(scores, unk_id=trainer.unk_id, byte_fallback=bytes_too)
    elif trainer.model_type == _BPE:
        vocab = {piece.piece: token_id for token_id, piece in enumerate(pieces)}
        joined = {piece.piece: -piece.score for piece in pieces if piece.type in (_NORMAL, _USER)}
        kind = models.BPE(vocab, _merges(joined), unk_token=trainer.unk_piece, fuse_unk=True, byte_fallback=bytes_too)
    else:
        raise ValueError(f"a SentencePiece model of kind {trainer.model_type}: unigram and bpe are known")
    backend = Tokenizer(kind)
    _set_spaces(backend, model.normalizer_spec, bytes_too)
    backend.add_tokens(
        [
            AddedToken(piece.piece, special=piece.type != _USER, normalized=False)
            for piece in pieces
            if piece.type in (_UNKNOWN, _CONTROL, _USER)
        ]
    )
    ids = {"bos_token": trainer.bos_id, "eos_token": trainer.eos_id, "unk_token": trainer.unk_id}
    own: dict[str, Any] = {name: pieces[at].piece for name, at in ids.items() if 0 <= at < len(pieces)}
    whole = {"add_bos_token": "bos_token" in own, **own, **config}
    _frame(backend, whole)
    return Converted(backend, own)


def _charsmap_steps(rules: Any) -> list[Any]:
    """SentencePiece's table of characters, on each character alone, and then what combines.

    The library looks up whole graphemes in the table and drops what is behind the first match: marks would be lost.
    SentencePiece composes what follows in a text's own order, so marks in another order than Unicode's stay apart.
    """
    from tokenizers import Regex, normalizers

    if not rules.precompiled_charsmap:
        return []
    table = normalizers.Precompiled(rules.precompiled_charsmap)
    if rules.name not in _COMPOSING:
        return [table]
    return [
        normalizers.Replace(Regex(_uncombined()), _APART),
        normalizers.Replace(Regex(r"\Y"), _CUT),  # within a grapheme
        table,
        normalizers.Replace(_CUT, ""),
        normalizers.NFC(),
        normalizers.Replace(_APART, ""),
    ]


@functools.cache
def _uncombined() -> str:
    """A regex of the places before a mark that does not combine with what stands before it, as SentencePiece reads."""
    lasts: dict[int, list[int]] = {}  # combining class of a character's last part -> characters
    marks: dict[int, list[int]] = {}  # and of the character itself
    several = []  # characters that stand for several
    for point in range(0xA0, 0x10000):
        char = chr(point)
        if point < _AFTER_MARKS:
            last, own = unicodedata.combining(unicodedata.normalize("NFD", char)[-1]), unicodedata.combining(char)
            lasts.setdefault(last, []).append(point)
            marks.setdefault(own, []).append(point)
        if unicodedata.decomposition(char).startswith("<") and len(unicodedata.normalize("NFKC", char)) > 1:
            several.append(point)
    ways = [f"(?<={_class(several)})"]
    for own in sorted(set(marks) - {0}):
        before = [point for last, points in lasts.items() if last > own for point in points]
        if before:
            ways.append(f"(?<={_class(before)})(?={_class(marks[own])})")
    return rf"(?=\p{{M}})(?:{'|'.join(ways)})"


def _class(points: list[int]) -> str:
    """A regex of one of these characters."""
    spans: list[list[int]] = []
    for point in sorted(points):
        if spans and spans[-1][1] == point - 1:
            spans[-1][1] = point
        else:
            spans.append([point, point])
    return "[" + "".join(chr(low) if low == high else f"{chr(low)}-{chr(high)}" for low, high in spans) + "]"


def _set_spaces(backend: tokenizers.Tokenizer, rules: Any, bytes_too: bool) -> None:
    """What is done to a text before it is cut, and undone behind."""
    from tokenizers import Regex, decoders, normalizers, pre_tokenizers

    steps = _charsmap_steps(rules)
    if rules.remove_extra_whitespaces:  # of U+0020 alone: what else is a space has become one, or stays
        steps += [normalizers.Replace(Regex(r"\A +"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    if rules.add_dummy_prefix:
        steps.append(normalizers.Prepend(_SPACE))
    steps.append(normalizers.Replace(" ", _SPACE))
    if rules.remove_extra_whitespaces:
        steps.append(normalizers.Replace(Regex(rf"{_SPACE}+\z"), ""))
    backend.normalizer = normalizers.Sequence(steps)
    if bytes_too:  # a text that spells a byte token is no byte
        backend.pre_tokenizer = pre_tokenizers.Split(Regex("(?<=<)(?=0x[0-9A-F]{2}>)"), behavior="isolated")
    back = [decoders.Replace(_SPACE, " "), *([decoders.ByteFallback()] if bytes_too else []), decoders.Fuse()]
    if rules.add_dummy_prefix:
        back.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(back)
